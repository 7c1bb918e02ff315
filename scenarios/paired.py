"""Two ways of serving the same loads, compared seed by seed.

Results come as lists in the order of their seeds. Seed i of both met the same luck (common random
numbers), so a difference taken seed by seed is free of the noise that they share, and is exactly
zero where nothing differs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from servecast.reports.stats import clopper_pearson, mean_interval

#: A result of `servecast.scenarios.points.evaluate`, or anything with its `summary`.
Result = Mapping[str, Any]

Read = Callable[[Mapping[str, Any]], float | None]

#: Parts of a summary that say what was configured rather than how the load was served.
NOT_OUTCOMES = ("provenance", "memory", "kv")


class Metric(NamedTuple):
    """How a metric is read from a summary, and which way is better: 1 up, -1 down, 0 neither."""

    read: Read
    better: int


def _at(*path: str) -> Read:
    def read(summary: Mapping[str, Any]) -> float | None:
        value: Any = summary
        for key in path:
            value = value.get(key) if value is not None else None
        return None if value is None else float(value)

    return read


def unserved_share(summary: Mapping[str, Any]) -> float | None:
    """Share of the requests sent that were refused, failed or given up."""
    requests = summary["requests"]
    sent = requests["sent"]
    return (requests["failed"] + requests["timed_out"]) / sent if sent else None


#: What is compared; the names end in their unit.
METRICS: dict[str, Metric] = {
    "goodput_per_s": Metric(_at("goodput_per_s"), 1),
    "requests_per_s": Metric(_at("requests_per_s"), 1),
    "output_tokens_per_s": Metric(_at("output_tokens_per_s"), 1),
    "ttft_p50_s": Metric(_at("ttft_s", "p50"), -1),
    "ttft_p95_s": Metric(_at("ttft_s", "p95"), -1),
    "itl_p99_s": Metric(_at("itl_s", "p99"), -1),
    "tpot_mean_s": Metric(_at("tpot_s", "mean"), -1),
    "e2e_mean_s": Metric(_at("e2e_s", "mean"), -1),
    "e2e_p95_s": Metric(_at("e2e_s", "p95"), -1),
    "queue_mean_s": Metric(_at("queue_s", "mean"), -1),
    "preemptions": Metric(_at("preemptions"), -1),
    "unserved_share": Metric(unserved_share, -1),
    "device_busy_share": Metric(_at("utilisation", "device_busy"), 0),
    "kv_peak_share": Metric(_at("kv", "peak_use"), 0),
    "acceptance_rate": Metric(_at("speculation", "acceptance_rate"), 0),
    "mean_acceptance_length": Metric(_at("speculation", "mean_acceptance_length"), 0),
    "cost_per_million_output_tokens": Metric(_at("cost", "per_million_output_tokens"), -1),
}


def values(results: Sequence[Result], read: Read) -> list[float] | None:
    """A metric seed by seed; None where a seed has no value."""
    found = [read(result["summary"]) for result in results]
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) else None


def means(results: Sequence[Result]) -> dict[str, float | None]:
    """Mean of every metric over the seeds."""
    found = {name: values(results, metric.read) for name, metric in METRICS.items()}
    return {name: None if v is None else float(np.mean(v)) for name, v in found.items()}


def spreads(results: Sequence[Result]) -> dict[str, dict[str, float | None]]:
    """Mean of every metric that has one, with Student's 95 % interval over the seeds."""
    found = {name: values(results, metric.read) for name, metric in METRICS.items()}
    return {name: _interval(v) for name, v in found.items() if v is not None}


def difference(
    base: Sequence[float] | None, other: Sequence[float] | None
) -> dict[str, float | None] | None:
    """`other - base`, paired: mean, Student's 95 % interval (None for one seed), and the mean as
    a share of the base's (None where that is 0)."""
    if base is None or other is None:
        return None
    interval = _interval([b - a for a, b in zip(base, other, strict=True)])
    middle, mean = float(np.mean(base)), interval["mean"]
    assert mean is not None
    return {**interval, "relative": mean / abs(middle) if middle else None}


def differences(base: Sequence[Result], other: Sequence[Result]) -> dict[str, Any]:
    """`difference` of every metric that both have; with `better`, see `Metric`."""
    found = {}
    for name, metric in METRICS.items():
        delta = difference(values(base, metric.read), values(other, metric.read))
        if delta is not None:
            found[name] = {**delta, "better": metric.better}
    return found


def told_apart(delta: Mapping[str, Any]) -> bool:
    """Whether a difference lies beyond its interval; of one seed, whether there is any."""
    if delta["lo"] is None:
        return bool(delta["mean"] != 0)
    return bool(delta["lo"] > 0 or delta["hi"] < 0)


def probability_better(base: Sequence[float], other: Sequence[float], better: int) -> float | None:
    """Probability that the mean of `other` is better than the base's.

    The posterior of a mean difference under a flat prior: Student's t with n - 1 degrees of
    freedom around the mean of the paired differences (Gelman et al., Bayesian Data Analysis,
    3rd ed., section 3.2). Equal everywhere is 0.5; None for one pair, or no better way.
    """
    n = len(base)
    if n < 2 or not better:
        return None
    gain = better * (np.asarray(other, np.float64) - np.asarray(base, np.float64))
    error = float(gain.std(ddof=1)) / np.sqrt(n)
    mean = float(gain.mean())
    if error == 0:
        return 0.5 * (1 + float(np.sign(mean)))
    from scipy.special import stdtr

    return float(stdtr(n - 1, mean / error))


# ---------------------------------------------------------------- SLA


def sla_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Each clause, those of classes after the others: mean value, and in which share it held.

    `met` is a share of the replications; `lo` and `hi` are its exact 95 % interval.
    """
    rows = []
    for same in zip(*(_clauses(result["summary"]) for result in results), strict=True):
        klass, first = same[0]
        clauses = [clause for _, clause in same]
        known = [clause["value"] for clause in clauses if clause["value"] is not None]
        rows.append(
            {
                "clause": first["clause"],
                "class": klass,
                "limit": first["limit"],
                "value": float(np.mean(known)) if known else None,
                **_share([clause["met"] for clause in clauses]),
            }
        )
    return rows


def sla_verdicts(results: Sequence[Result]) -> list[bool] | None:
    """Whether every clause held, seed by seed; None without clauses."""
    clauses = [[c["met"] for _, c in _clauses(result["summary"])] for result in results]
    return [all(met) for met in clauses] if clauses and clauses[0] else None


def sla_met(results: Sequence[Result]) -> dict[str, Any] | None:
    """Share of the replications in which every clause held, with its interval."""
    verdicts = sla_verdicts(results)
    return None if verdicts is None else _share(verdicts)


def same_outcome(first: Sequence[Result], second: Sequence[Result]) -> bool:
    """Whether the load was served exactly alike in every replication."""
    return all(
        _outcome(a["summary"]) == _outcome(b["summary"]) for a, b in zip(first, second, strict=True)
    )


def _outcome(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key not in NOT_OUTCOMES}


def _clauses(summary: Mapping[str, Any]) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    yield from ((None, clause) for clause in summary["sla"]["clauses"])
    for name, entry in summary.get("classes", {}).items():
        yield from ((name, clause) for clause in entry["sla"]["clauses"])


def _share(met: Sequence[bool]) -> dict[str, Any]:
    n, held = len(met), sum(met)
    lo, hi = clopper_pearson(held, n) if n > 1 else (None, None)
    return {"met": held / n, "lo": lo, "hi": hi, "n": n}


def _interval(sample: Sequence[float]) -> dict[str, float | None]:
    lo, hi = mean_interval(sample)
    return {"mean": float(np.mean(sample)), "lo": lo, "hi": hi}
