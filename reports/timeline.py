"""What a run looked like over time, in a bounded number of equal bins."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servecast.costmodels.shape import NS_PER_S
from servecast.sim.trace import Trace

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

BINS = 160


@dataclass(frozen=True)
class Timeline:
    """Means over the time of each bin; time without a step counts as nothing running.

    Attributes
    ----------
    edges_s : (bins + 1,) seconds since the first arrival
    running, waiting : (bins,) requests
    kv_share : (bins,) of the pool in use; `kv_share_peak` is the highest moment of the bin
    prefill_tokens_per_s : (bins,) prompt tokens computed, those computed again among them
    output_tokens_per_s : (bins,) tokens sampled
    preemptions : (bins,) how many
    """

    edges_s: FloatArray
    running: FloatArray
    waiting: FloatArray
    kv_share: FloatArray
    kv_share_peak: FloatArray
    prefill_tokens_per_s: FloatArray
    output_tokens_per_s: FloatArray
    preemptions: IntArray


def timeline(trace: Trace, bins: int = BINS) -> Timeline | None:
    """Bin a run; None if no step ever ran."""
    steps = trace.steps
    if not len(steps["start_ns"]):
        return None
    start = min(int(trace.requests["arrival_ns"].min()), int(steps["start_ns"][0]))
    edges = np.linspace(start, int(steps["end_ns"][-1]), bins + 1)
    width = edges[1] - edges[0]
    kv_share = steps["kv_blocks"] / max(1, trace.kv_blocks)
    kv_mean = _mean(trace, kv_share, edges)
    first_tokens = trace.requests["first_token_ns"]
    firsts, _ = np.histogram(first_tokens[first_tokens >= 0], edges)
    per_s = NS_PER_S / width
    decoded = _amount(trace, steps["decodes"] * steps["steps"], edges)
    return Timeline(
        edges_s=(edges - start) / NS_PER_S,
        running=_mean(trace, steps["running"], edges),
        waiting=_mean(trace, steps["waiting"], edges),
        kv_share=kv_mean,
        kv_share_peak=_peak(trace, kv_share, edges, kv_mean),
        prefill_tokens_per_s=_amount(trace, steps["prefill_tokens"], edges) * per_s,
        output_tokens_per_s=(decoded + firsts) * per_s,
        preemptions=np.histogram(steps["end_ns"], edges, weights=steps["preemptions"])[0].astype(
            np.int64
        ),
    )


def _amount(trace: Trace, amounts: IntArray | FloatArray, edges: FloatArray) -> FloatArray:
    """What falls into each bin of amounts that flow evenly over their intervals.

    The running total is a polyline through the ends of the intervals: read off at the edges, it
    gives every bin its part exactly, however intervals and bins overlap.
    """
    total = np.cumsum(amounts, dtype=np.float64)
    corners = np.column_stack([trace.steps["start_ns"], trace.steps["end_ns"]]).ravel()
    totals = np.column_stack([total - amounts, total]).ravel()
    return np.diff(np.interp(edges, corners, totals))


def _mean(trace: Trace, values: IntArray | FloatArray, edges: FloatArray) -> FloatArray:
    """Mean over time of values that hold during their intervals."""
    held = values * (trace.steps["end_ns"] - trace.steps["start_ns"]).astype(np.float64)
    return _amount(trace, held, edges) / (edges[1] - edges[0])


def _peak(
    trace: Trace, values: IntArray | FloatArray, edges: FloatArray, mean: FloatArray
) -> FloatArray:
    """Highest value in each bin: of the intervals that start or end in it, or cover it whole."""
    peak = mean.copy()
    last = len(edges) - 2
    for time_ns in (trace.steps["start_ns"], trace.steps["end_ns"]):
        bins = np.clip(np.searchsorted(edges, time_ns, side="right") - 1, 0, last)
        np.maximum.at(peak, bins, values)
    return peak
