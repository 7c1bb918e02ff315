"""The five latencies of a run, in nanoseconds as the clock counts them, and their statistics."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from servecast.costmodels.shape import NS_PER_S
from servecast.reports.quantiles import WeightedSample
from servecast.sim.trace import COMPLETED, Trace

IntArray = npt.NDArray[np.int64]
Latencies = dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]]

LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")

PERCENTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}

#: Keys of a latency block, in order.
STATS = ("n", "mean", *PERCENTILES, "max")


def completed_rows(trace: Trace, klass: int | None = None) -> dict[str, IntArray]:
    """Columns of the requests that completed, of one class if asked."""
    wanted = trace.requests["status"] == COMPLETED
    if klass is not None:
        wanted &= trace.requests["klass"] == klass
    return {name: column[wanted] for name, column in trace.requests.items()}


def request_latencies_ns(rows: Mapping[str, IntArray]) -> Latencies:
    """Latencies that each completed request has, row by row; `tpot` is NaN for one token.

    ttft : arrival to first token
    tpot : (finish - first token) / (output tokens - 1), as vLLM's benchmark defines it
    e2e : arrival to last token
    queue : arrival to first admission
    """
    gaps = rows["output_tokens"] - 1
    decoding = rows["finish_ns"] - rows["first_token_ns"]
    return {
        "ttft": rows["first_token_ns"] - rows["arrival_ns"],
        "tpot": np.where(gaps > 0, decoding / np.maximum(gaps, 1), np.nan),
        "e2e": rows["finish_ns"] - rows["arrival_ns"],
        "queue": rows["admitted_ns"] - rows["arrival_ns"],
    }


def latency_samples_ns(trace: Trace) -> dict[str, WeightedSample]:
    """The five samples behind the latency blocks, by name (`LATENCIES`)."""
    samples = samples_of(request_latencies_ns(completed_rows(trace)))
    samples["itl"] = WeightedSample(trace.gap_ns, trace.gap_count)
    return samples


def samples_of(latencies: Latencies) -> dict[str, WeightedSample]:
    """A sample of each latency, without the requests that do not have it."""
    return {name: WeightedSample(values[~np.isnan(values)]) for name, values in latencies.items()}


def latency_block(sample: WeightedSample) -> dict[str, Any]:
    """`{n, mean, p50, p90, p95, p99, max}` in seconds of a sample in nanoseconds.

    Of an empty sample all but `n` are None.
    """
    if not sample.n:
        return {"n": 0, **dict.fromkeys(STATS[1:])}
    stats = {"mean": sample.mean()}
    stats |= {name: sample.percentile(percent) for name, percent in PERCENTILES.items()}
    stats["max"] = float(sample.values[-1])
    return {"n": sample.n, **{name: value / NS_PER_S for name, value in stats.items()}}


def value_at(summary: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    """A number of a summary by its keys, one inside the other."""
    value: Any = summary
    for key in path:
        value = value[key]
    return None if value is None else float(value)
