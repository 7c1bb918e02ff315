"""Service-level clauses: `ttft_p95_s: 0.5` taken apart."""

import math
from dataclasses import dataclass

METRICS = {
    "ttft": "time to first token",
    "itl": "gap between two tokens",
    "tpot": "mean gap of a request",
    "e2e": "time from sending to the last token",
    "queue": "time from sending to first admission",
}
STATS = ("mean", "p50", "p90", "p95", "p99", "max")
RATES = {
    "timeout_rate": "share of requests given up by their client",
    "failure_rate": "share of requests refused or failed",
}
CLAUSE_NAMES = tuple(f"{metric}_{stat}_s" for metric in METRICS for stat in STATS) + tuple(RATES)


@dataclass(frozen=True)
class Clause:
    """`stat` of `metric` stays at or below `limit`.

    Attributes
    ----------
    name : as written, such as `ttft_p95_s` or `timeout_rate`
    metric : a key of `METRICS`, or `timeout`, `failure`
    stat : one of `STATS`, or `rate`
    limit : seconds, > 0; for a rate a share of requests in [0, 1]
    """

    name: str
    metric: str
    stat: str
    limit: float


def describe(name: str) -> str:
    """One line that says what a clause of `CLAUSE_NAMES` bounds."""
    if name in RATES:
        return f"Upper limit of the {RATES[name]}, 0 to 1."
    metric, stat, _ = name.split("_")
    return f"Upper limit of the {stat} of the {METRICS[metric]}, seconds."


def parse_clause(name: str, limit: float) -> Clause:
    """A clause from its key and value.

    Raises
    ------
    ValueError : the name is none of `CLAUSE_NAMES`, or the limit is out of range
    """
    if name not in CLAUSE_NAMES:
        metrics, stats = "|".join(METRICS), "|".join(STATS)
        raise ValueError(f"unknown clause, expected <{metrics}>_<{stats}>_s, " + " or ".join(RATES))
    if name in RATES:
        if not 0 <= limit <= 1:
            raise ValueError(f"must be a share from 0 to 1, got {limit!r}")
        metric, stat = name.split("_")
    else:
        if not (limit > 0 and math.isfinite(limit)):
            raise ValueError(f"must be seconds greater than 0, got {limit!r}")
        metric, stat, _ = name.split("_")
    return Clause(name, metric, stat, limit)
