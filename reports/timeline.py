"""What a run looked like over time, in a bounded number of equal bins."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servecast.costmodels.shape import NS_PER_S
from servecast.reports.latencies import completed_rows
from servecast.sim.trace import Trace

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

BINS = 160

#: Groups of requests whose latency is told over time, at most, and the least requests in one.
GROUPS, GROUP_SIZE = 60, 50


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
    """Bin a run; None if no step ever ran. Replicas add up; their pools are averaged."""
    steps = trace.steps
    if not len(steps["start_ns"]):
        return None
    start = min(int(trace.requests["arrival_ns"].min()), int(steps["start_ns"].min()))
    edges = np.linspace(start, int(steps["end_ns"].max()), bins + 1)
    if trace.replicas == 1:
        return _binned(trace, start, edges)
    parts = [_binned(trace.of_replica(n), start, edges) for n in range(trace.replicas)]
    # First tokens are counted from the requests, which every part has all of.
    firsts = _firsts_per_s(trace, edges)
    return Timeline(
        edges_s=parts[0].edges_s,
        running=np.sum([part.running for part in parts], axis=0),
        waiting=np.sum([part.waiting for part in parts], axis=0),
        kv_share=np.mean([part.kv_share for part in parts], axis=0),
        kv_share_peak=np.max([part.kv_share_peak for part in parts], axis=0),
        prefill_tokens_per_s=np.sum([part.prefill_tokens_per_s for part in parts], axis=0),
        output_tokens_per_s=np.sum([part.output_tokens_per_s - firsts for part in parts], axis=0)
        + firsts,
        preemptions=np.sum([part.preemptions for part in parts], axis=0),
    )


def _firsts_per_s(trace: Trace, edges: FloatArray) -> FloatArray:
    first_tokens = trace.requests["first_token_ns"]
    counts, _ = np.histogram(first_tokens[first_tokens >= 0], edges)
    return np.asarray(counts * NS_PER_S / (edges[1] - edges[0]), dtype=np.float64)


def _binned(trace: Trace, start: int, edges: FloatArray) -> Timeline:
    """One engine's run in given bins."""
    steps = trace.steps
    width = edges[1] - edges[0]
    kv_share = steps["kv_blocks"] / max(1, trace.kv_blocks)
    kv_mean = _mean(trace, kv_share, edges)
    per_s = NS_PER_S / width
    decoded = _amount(trace, steps["decoded_tokens"], edges)
    return Timeline(
        edges_s=(edges - start) / NS_PER_S,
        running=_mean(trace, steps["running"], edges),
        waiting=_mean(trace, steps["waiting"], edges),
        kv_share=kv_mean,
        kv_share_peak=_peak(trace, kv_share, edges, kv_mean),
        prefill_tokens_per_s=_amount(trace, steps["prefill_tokens"], edges) * per_s,
        output_tokens_per_s=decoded * per_s + _firsts_per_s(trace, edges),
        preemptions=np.histogram(steps["end_ns"], edges, weights=steps["preemptions"])[0].astype(
            np.int64
        ),
    )


def _amount(trace: Trace, amounts: IntArray | FloatArray, edges: FloatArray) -> FloatArray:
    """What falls into each bin of amounts that flow evenly over their intervals.

    The running total is a polyline through the ends of the intervals: read off at the edges, it
    gives every bin its part exactly, however intervals and bins overlap.
    """
    total: FloatArray = np.cumsum(amounts, dtype=np.float64)
    corners = np.column_stack([trace.steps["start_ns"], trace.steps["end_ns"]]).ravel()
    totals = np.column_stack([total - amounts, total]).ravel()
    return np.diff(np.interp(edges, corners.astype(np.float64), totals))


def _mean(trace: Trace, values: IntArray | FloatArray, edges: FloatArray) -> FloatArray:
    """Mean over time of values that hold during their intervals."""
    spans = trace.steps["end_ns"] - trace.steps["start_ns"]
    held = values.astype(np.float64) * spans
    return _amount(trace, held, edges) / float(edges[1] - edges[0])


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


@dataclass(frozen=True)
class ArrivalGroups:
    """Latency over time: completed requests in order of arrival, in groups of equal size.

    Attributes
    ----------
    size : requests in each group (the last has up to twice as many); 0 if none completed
    arrival_s : (groups,) median arrival, seconds since the first request of the run
    end_s : last arrival
    ttft_s : (groups,) each of "p50", "p95"
    """

    size: int
    arrival_s: FloatArray
    end_s: float
    ttft_s: dict[str, FloatArray]


def arrival_groups(trace: Trace) -> ArrivalGroups:
    """Time to first token of neighbours in time: every point stands on as many requests."""
    rows = completed_rows(trace)
    order = np.argsort(rows["arrival_ns"], kind="stable")
    if not len(order):
        return ArrivalGroups(0, np.empty(0), 0.0, {"p50": np.empty(0), "p95": np.empty(0)})
    arrival_s = (rows["arrival_ns"][order] - trace.requests["arrival_ns"].min()) / NS_PER_S
    ttft_s = (rows["first_token_ns"] - rows["arrival_ns"])[order] / NS_PER_S
    size = min(len(order), max(GROUP_SIZE, -(-len(order) // GROUPS)))
    groups = np.split(np.arange(len(order)), range(size, len(order) - size + 1, size))
    return ArrivalGroups(
        size=size,
        arrival_s=np.array([np.median(arrival_s[group]) for group in groups]),
        end_s=float(arrival_s[-1]),
        ttft_s={
            f"p{percent}": np.array([np.percentile(ttft_s[group], percent) for group in groups])
            for percent in (50, 95)
        },
    )
