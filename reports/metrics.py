"""The summary of a run: every number is a function of its trace and a few plain facts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from servecast.costmodels.shape import NS_PER_S, PARTS
from servecast.reports.latencies import (
    LATENCIES,
    Latencies,
    completed_rows,
    latency_block,
    latency_samples_ns,
    request_latencies_ns,
    samples_of,
    value_at,
)
from servecast.reports.speculation import acceptance_of, speculation_block
from servecast.reports.stats import clopper_pearson, mean_interval
from servecast.sim.trace import COMPLETED, REFUSED, TIMED_OUT, Trace

IntArray = npt.NDArray[np.int64]
MEMORY_KEYS = tuple(
    f"{part}_bytes" for part in ("weights", "activation", "graph", "other", "kv", "total")
)

#: Parts of a step in which the device waits, for the host or for its link.
WAITING_PARTS = ("host", "swap")

#: Share of requests by clause name: the requests that count against it.
RATES = {"timeout_rate": "timed_out", "failure_rate": "failed"}

#: Headline metrics that replications put an interval on: name to path in the summary.
HEADLINES = {
    "ttft_p50_s": ("ttft_s", "p50"),
    "ttft_p95_s": ("ttft_s", "p95"),
    "ttft_p99_s": ("ttft_s", "p99"),
    "itl_p99_s": ("itl_s", "p99"),
    "tpot_mean_s": ("tpot_s", "mean"),
    "e2e_p95_s": ("e2e_s", "p95"),
    "output_tokens_per_s": ("output_tokens_per_s",),
    "requests_per_s": ("requests_per_s",),
    "preemptions": ("preemptions",),
}

#: Of what a calibration leaves open, where it says so.
SPAN_METRICS = {
    "ttft_mean_s": ("ttft_s", "mean"),
    "tpot_mean_s": ("tpot_s", "mean"),
    "e2e_mean_s": ("e2e_s", "mean"),
    "e2e_p95_s": ("e2e_s", "p95"),
    "output_tokens_per_s": ("output_tokens_per_s",),
}

#: The same where the deployment speculates.
SPECULATION_HEADLINES = {
    "acceptance_rate": ("speculation", "acceptance_rate"),
    "mean_acceptance_length": ("speculation", "mean_acceptance_length"),
    "tpot_speedup": ("speculation", "speedup", "tpot"),
    "throughput_speedup": ("speculation", "speedup", "output_tokens_per_s"),
}


@dataclass(frozen=True)
class RunFacts:
    """What was simulated, beside what came out.

    Attributes
    ----------
    devices : in the deployment
    kv_bytes_per_token : on one device
    memory : bytes of one device by use, keys `MEMORY_KEYS`
    peak_flops_per_s, bandwidth_bytes_per_s : datasheet, one device
    sla : clause name, such as `ttft_p95_s` or `timeout_rate`, to its upper limit
    class_sla : class name to limits of its own, in place of `sla`
    price_per_hour : of one device, in dollars; None if unknown
    calibration : what the step times rest on, in words
    engine : every flag with its value
    acceptance : what the acceptance of drafts rests on; empty without speculation
    pipeline : of an SRAM device: wafers, stages, slots (tokens in flight at most), seconds of a
        token and of the slowest stage; None elsewhere
    """

    name: str
    model: str
    hardware: str
    devices: int
    block_size: int
    kv_bytes_per_token: float
    memory: Mapping[str, int]
    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    version: str
    scenario_sha256: str
    calibration: str
    seed: int
    sla: Mapping[str, float] = field(default_factory=dict)
    class_sla: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    price_per_hour: float | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    acceptance: str = ""
    pipeline: Mapping[str, float] | None = None

    @property
    def calibrated(self) -> bool:
        """False when step times rest on the generic fallback."""
        return "uncalibrated" not in self.calibration.lower()


def summarise(trace: Trace, facts: RunFacts) -> dict[str, Any]:
    """`summary.json`: seconds, bytes, tokens, and rates a second; plain Python numbers.

    Latencies and throughput count completed requests only. With several classes there is
    `classes`, with a known price `cost`.
    """
    rows = trace.requests
    done = completed_rows(trace)
    duration_s = _duration_s(rows)
    output_tokens = int(done["output_tokens"].sum())
    tokens = output_tokens + int(done["prompt_tokens"].sum())
    samples = latency_samples_ns(trace)
    summary: dict[str, Any] = {f"{name}_s": latency_block(samples[name]) for name in LATENCIES}
    summary |= {
        "requests": _outcomes(rows["status"]),
        "output_tokens_per_s": _rate(output_tokens, duration_s),
        "total_tokens_per_s": _rate(tokens, duration_s),
        "requests_per_s": _rate(len(done["request"]), duration_s),
        "output_tokens_per_s_per_device": _rate(output_tokens, duration_s) / facts.devices,
        "duration_s": duration_s,
        "preemptions": int(rows["preemptions"].sum()),
        "prefix_hit_tokens": int(rows["prefix_hit_tokens"].sum()),
        "kv": _kv(trace, facts),
        "memory": {key: int(facts.memory[key]) for key in MEMORY_KEYS},
        "utilisation": _utilisation(trace, facts, duration_s),
        "step_time_share": _step_time_share(trace),
    }
    gap_s = summary["tpot_s"]["mean"]
    # What one user sees: none of this where no request has a second token.
    summary["output_tokens_per_s_per_user"] = 1 / gap_s if gap_s else None
    summary["sla"] = _verdict(summary, facts.sla)
    classes = {
        name: _class_summary(trace, number, facts.class_sla.get(name, facts.sla), duration_s)
        for number, name in enumerate(trace.class_names)
    }
    summary["goodput_per_s"] = sum(entry["goodput_per_s"] for entry in classes.values())
    if facts.pipeline is not None:
        summary["pipeline"] = {**facts.pipeline, "fill": _fill(trace, facts.pipeline)}
    if facts.acceptance:
        summary["speculation"] = speculation_block(trace, facts.acceptance)
        for number, entry in enumerate(classes.values()):
            mine = trace.requests["klass"] == number
            entry["speculation"] = acceptance_of(
                {name: column[mine] for name, column in trace.requests.items()}
            )
    if len(classes) > 1:
        summary["classes"] = classes
    if trace.control:
        summary["control"] = [
            {
                "replica": replica,
                "t_s": t_ns / NS_PER_S,
                "p95_s": p95_ns / NS_PER_S if p95_ns >= 0 else None,
                "max_num_batched_tokens": tokens,
            }
            for replica, t_ns, p95_ns, tokens in trace.control
        ]
    if facts.price_per_hour is not None:
        summary["cost"] = _cost(
            facts.price_per_hour * facts.devices, duration_s, output_tokens, tokens
        )
    summary["provenance"] = {
        "version": facts.version,
        "scenario_sha256": facts.scenario_sha256,
        "calibration": facts.calibration,
        "seed": facts.seed,
    }
    return summary


# ---------------------------------------------------------------- classes


def _class_summary(
    trace: Trace, klass: int, sla: Mapping[str, float], duration_s: float
) -> dict[str, Any]:
    """One class: gaps between tokens are recorded for all classes together, so no `itl_s`."""
    latencies = request_latencies_ns(completed_rows(trace, klass))
    blocks = {f"{name}_s": latency_block(sample) for name, sample in samples_of(latencies).items()}
    status = trace.requests["status"][trace.requests["klass"] == klass]
    good = int(_good(latencies, sla).sum())
    own = {clause: limit for clause, limit in sla.items() if not clause.startswith("itl_")}
    return {
        **blocks,
        "requests": _outcomes(status),
        "promoted": int(trace.requests["promoted"][trace.requests["klass"] == klass].sum()),
        "goodput_per_s": _rate(good, duration_s),
        "goodput_share": good / len(status) if len(status) else None,
        "sla": _verdict({**blocks, "requests": _outcomes(status)}, own),
    }


def _good(latencies: Latencies, sla: Mapping[str, float]) -> npt.NDArray[np.bool_]:
    """Requests that themselves stay within every limit put on a percentile or maximum.

    Goodput as in DistServe (Zhong et al., OSDI 2024). A limit on a mean, on gaps or on a rate
    says nothing of one request.
    """
    good = np.ones(len(latencies["ttft"]), np.bool_)
    for clause, limit in sla.items():
        metric, _, stat = clause.removesuffix("_s").partition("_")
        if metric in latencies and stat != "mean":
            # A request of one token has no gap that could be too long.
            good &= ~(latencies[metric] > limit * NS_PER_S)
    return good


# ---------------------------------------------------------------- the rest


def _duration_s(rows: Mapping[str, IntArray]) -> float:
    """First arrival to last finish; 0 if nothing finished."""
    last_ns = int(rows["finish_ns"].max(initial=-1))
    return (last_ns - int(rows["arrival_ns"].min())) / NS_PER_S if last_ns >= 0 else 0.0


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _outcomes(status: IntArray) -> dict[str, int]:
    named = {"completed": COMPLETED, "failed": REFUSED, "timed_out": TIMED_OUT}
    counts = {name: int((status == code).sum()) for name, code in named.items()}
    return {"sent": len(status), **counts}


def _kv(trace: Trace, facts: RunFacts) -> dict[str, Any]:
    """The pool as requests see it.

    `fill` is the mean share of the taken blocks' tokens that is in use, over the time in which
    every running request decodes; 1 less it is internal fragmentation. Blocks shared by a
    prefix are counted once and their tokens for each request, so it may pass 1. `mean_use` is
    the mean share of the pool that is taken, over the time in steps.
    """
    steps = trace.steps
    used = int(steps["kv_blocks"].max(initial=0))
    time_ns = steps["end_ns"] - steps["start_ns"]
    taken = steps["kv_blocks"].astype(np.float64)
    # At the end of an interval of equal steps, when `kv_blocks` is taken.
    stored = steps["context_tokens"] + steps["decodes"] * (steps["steps"] - 1)
    pure = (steps["prefill_tokens"] == 0) & (steps["decodes"] == steps["running"]) & (taken > 0)
    held = float((time_ns[pure] * taken[pure]).sum()) * facts.block_size
    total_ns = float(time_ns.sum())
    return {
        "blocks": trace.kv_blocks,
        "block_size": facts.block_size,
        "tokens": trace.kv_blocks * facts.block_size,
        "bytes_per_token": facts.kv_bytes_per_token,
        "peak_use": used / trace.kv_blocks if trace.kv_blocks else 0.0,
        "mean_use": float((time_ns * taken).sum()) / total_ns / trace.kv_blocks
        if total_ns and trace.kv_blocks
        else 0.0,
        "fill": float((time_ns[pure] * stored[pure]).sum()) / held if held else None,
    }


def _utilisation(trace: Trace, facts: RunFacts, duration_s: float) -> dict[str, float]:
    """Shares of the whole duration, idle time included.

    `device_busy` is time in steps without the parts in which the device waits. `mfu` and
    `bandwidth` are the work that the model needs over what the datasheet allows.
    """
    steps = trace.steps
    step_s = int((steps["end_ns"] - steps["start_ns"]).sum()) / NS_PER_S
    device_s = step_s - sum(float(steps[f"{part}_s"].sum()) for part in WAITING_PARTS)
    engine_s = duration_s * trace.replicas
    return {
        "device_busy": _rate(device_s, engine_s),
        "mfu": _rate(trace.flops / facts.peak_flops_per_s, engine_s),
        "bandwidth": _rate(trace.bytes / facts.bandwidth_bytes_per_s, engine_s),
    }


def _fill(trace: Trace, pipeline: Mapping[str, float]) -> float:
    """Share of the slots that hold a token, over the time in steps."""
    steps = trace.steps
    tokens = steps["prefill_tokens"] + steps["decode_tokens"] * steps["steps"]
    time_s = float((steps["end_ns"] - steps["start_ns"]).sum()) / NS_PER_S
    worked_s = float(tokens.sum()) * pipeline["slowest_stage_s"]
    return min(1.0, worked_s / time_s) if time_s else 0.0


def _step_time_share(trace: Trace) -> dict[str, float]:
    """Share of the time in steps by part: sums to 1, or to 0 where there was no step."""
    seconds = {part: float(trace.steps[f"{part}_s"].sum()) for part in PARTS}
    total = sum(seconds.values())
    return {part: value / total if total else 0.0 for part, value in seconds.items()}


def _cost(
    price_per_hour: float, duration_s: float, output_tokens: int, tokens: int
) -> dict[str, float | None]:
    """Dollars of the deployment for the duration of the run, over what it delivered."""
    spent = price_per_hour * duration_s / 3600
    return {
        "price_per_hour": price_per_hour,
        "per_million_output_tokens": spent / output_tokens * 1e6 if output_tokens else None,
        "per_million_tokens": spent / tokens * 1e6 if tokens else None,
    }


def _verdict(summary: Mapping[str, Any], sla: Mapping[str, float]) -> dict[str, Any]:
    """Clause by clause; `met` of the whole is None if nothing was asked."""
    clauses = []
    for clause, limit in sla.items():
        value = _clause_value(summary, clause)
        # Where nothing was there to measure, no completed request broke the limit, if any did
        # complete: outputs of one token have no gaps.
        met = value <= limit if value is not None else summary["requests"]["completed"] > 0
        clauses.append({"clause": clause, "limit": float(limit), "value": value, "met": met})
    return {"clauses": clauses, "met": all(c["met"] for c in clauses) if clauses else None}


def _clause_value(summary: Mapping[str, Any], clause: str) -> float | None:
    if clause in RATES:
        requests = summary["requests"]
        return requests[RATES[clause]] / requests["sent"] if requests["sent"] else None
    metric, _, stat = clause.removesuffix("_s").partition("_")
    try:
        value: float | None = summary[f"{metric}_s"][stat]
    except KeyError:
        raise ValueError(f"unknown SLA clause {clause!r}") from None
    return value


# ---------------------------------------------------------------- replications


def merge_replications(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first summary, with `replications`: what all of them say of the headline metrics.

    `replications` is `{n, <metric>: {mean, lo, hi}}` with the metrics of `HEADLINES` and the
    share of replications that met the SLA, `sla_met` (if there is one). `lo` and `hi` bound the
    mean with 95 % confidence: Student's t over replications, whose seeds are independent, cut off
    at 0, below which none of these metrics can be. The
    share is binomial: Clopper and Pearson's interval, which does not collapse when all agree.
    Where a replication has no value, or there is only one, the interval is None.

    Raises ValueError without summaries.
    """
    if not summaries:
        raise ValueError("no replications to merge")
    merged: dict[str, Any] = {"n": len(summaries)}
    speculates = "speedup" in summaries[0].get("speculation", {})
    for name, path in {**HEADLINES, **(SPECULATION_HEADLINES if speculates else {})}.items():
        merged[name] = _student_interval([value_at(summary, path) for summary in summaries])
    verdicts = [summary["sla"]["met"] for summary in summaries]
    if None not in verdicts:
        merged["sla_met"] = _binomial_interval(sum(verdicts), len(verdicts))
    return {**summaries[0], "replications": merged}


def _student_interval(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "lo": None, "hi": None}
    low, high = mean_interval(known)
    return {
        "mean": float(np.mean(known)),
        "lo": None if low is None else max(0.0, low),
        "hi": high,
    }


def _binomial_interval(met: int, n: int) -> dict[str, float | None]:
    if n < 2:
        return {"mean": float(met), "lo": None, "hi": None}
    low, high = clopper_pearson(met, n)
    return {"mean": met / n, "lo": low, "hi": high}
