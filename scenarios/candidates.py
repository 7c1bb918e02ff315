"""Combinations of knobs and what is known of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servecast.reports.stats import clopper_pearson
from servecast.scenarios.answer import choice, sla_holds

Changes = dict[str, Any]
Result = dict[str, Any]

#: A growth of the time to first token below this is taken for chance, seconds a second.
STEADY = 0.02

#: Clauses that a growing queue breaks.
QUEUED = ("ttft", "e2e", "queue")


@dataclass
class Candidate:
    """A combination of knobs and what is known of it so far.

    `unseen_s` is how much longer the whole load lasts than the runs so far.
    """

    changes: Changes
    stage: str = "screened"
    error: str | None = None
    results: list[dict[str, Any]] | None = None
    unseen_s: float = 0.0

    @property
    def goodput_per_s(self) -> float:
        """Mean over the seeds run so far."""
        return float(np.mean(self.goodputs))

    @property
    def expected_s(self) -> float:
        """How much later than now a first token would come at the end of the whole load."""
        drifts = [result["drift"] for result in self.results or ()]
        growth = float(np.mean(drifts)) if drifts else 0.0
        return growth * self.unseen_s if growth > STEADY else 0.0

    @property
    def expected_goodput_per_s(self) -> float:
        """Goodput, less what a queue that is building up will take of it."""
        clauses = self.results[0]["summary"]["sla"]["clauses"] if self.results else []
        limits = [float(c["limit"]) for c in clauses if c["clause"].startswith(QUEUED)]
        if not limits:
            return self.goodput_per_s
        return self.goodput_per_s / (1 + self.expected_s / min(limits))

    @property
    def goodputs(self) -> list[float]:
        return [r["summary"]["goodput_per_s"] for r in self.results or ()]

    @property
    def met(self) -> bool:
        """The SLA holds in the runs so far, and will to the end of the load."""
        holds = sla_holds([result["summary"] for result in self.results or ()])
        return holds and (self.expected_s == 0 or self.margin > 0)

    @property
    def margin(self) -> float:
        """Room under the tightest clause, as a share of its limit; 1 without clauses.

        The median over the runs so far.
        """
        return float(np.median([self._room(result) for result in self.results or ()]))

    def _room(self, result: Result) -> float:
        rooms = [
            1 - (clause["value"] + self._later(clause["clause"])) / clause["limit"]
            for clause in result["summary"]["sla"]["clauses"]
            if clause["value"] is not None and clause["limit"] > 0
        ]
        return min(rooms, default=1.0)

    def _later(self, clause: str) -> float:
        return self.expected_s if clause.startswith(QUEUED) else 0.0

    @property
    def price_per_hour(self) -> float:
        """Of all its devices; 0 where it is not known."""
        result = (self.results or [{}])[0]
        return float(result.get("summary", {}).get("cost", {}).get("price_per_hour", 0.0))


def fingerprint(result: dict[str, Any]) -> str:
    """All latencies of a run: what a knob must change to have done anything."""
    metrics = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s")
    return repr([result["summary"][metric] for metric in metrics])


def score_of(candidate: Candidate) -> float:
    """What Optuna climbs: goodput, halved where the SLA does not hold."""
    if not candidate.results:
        return 0.0
    return candidate.goodput_per_s * (1.0 if candidate.met else 0.5)


def table_row(candidate: Candidate) -> dict[str, Any]:
    """One line of the table of every point."""
    row: dict[str, Any] = {
        "changes": candidate.changes,
        "stage": candidate.stage,
        "error": candidate.error,
        "met": None,
        **dict.fromkeys(
            (
                "goodput_per_s",
                "ttft_p95_s",
                "itl_p99_s",
                "tokens_per_s_per_device",
                "tokens_per_s_per_user",
                "preemptions",
                "kv_peak_use",
            )
        ),
    }
    if candidate.results:
        found = choice(candidate.changes, candidate.results)
        row |= {key: found[key] for key in row if key in found}
        row["met"] = candidate.met
    return row


def clause_probabilities(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """P(met) of each clause over the seeds, with a 90 % interval."""
    rows = []
    for i, clause in enumerate(results[0]["summary"]["sla"]["clauses"]):
        runs = [result["summary"]["sla"]["clauses"][i] for result in results]
        met = sum(bool(run["met"]) for run in runs)
        values = [run["value"] for run in runs if run["value"] is not None]
        low, high = clopper_pearson(met, len(runs), 0.9)
        rows.append(
            {
                "clause": clause["clause"],
                "limit": clause["limit"],
                "value": float(np.mean(values)) if values else None,
                "probability": met / len(runs),
                "lo": low,
                "hi": high,
            }
        )
    return rows


def idle_knobs(candidates: Sequence[Candidate], knobs: dict[str, Sequence[Any]]) -> list[str]:
    """Knobs whose values all gave the same latencies wherever nothing else differed."""
    idle = []
    for key, values in knobs.items():
        groups: dict[str, set[str]] = {}
        compared = False
        for candidate in candidates:
            if candidate.results:
                rest = {k: v for k, v in candidate.changes.items() if k != key}
                seen = groups.setdefault(f"{candidate.stage} {rest}", set())
                compared |= bool(seen)
                seen.add(fingerprint(candidate.results[0]))
        if len(values) > 1 and compared and all(len(seen) == 1 for seen in groups.values()):
            idle.append(key)
    return idle
