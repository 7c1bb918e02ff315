"""Speculative decoding in a summary: what was accepted, what it cost, what it brought."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from servecast.reports.latencies import completed_rows, value_at
from servecast.sim.trace import Trace

IntArray = npt.NDArray[np.int64]

#: What a speed-up is taken of: name, path in a summary, and whether more is better.
COMPARED = (
    ("tpot", ("tpot_s", "mean"), False),
    ("e2e", ("e2e_s", "mean"), False),
    ("e2e_p95", ("e2e_s", "p95"), False),
    ("ttft", ("ttft_s", "mean"), False),
    ("output_tokens_per_s", ("output_tokens_per_s",), True),
)


def speculation_block(trace: Trace, source: str) -> dict[str, Any]:
    """Rounds of a run.

    Returns
    -------
    draft_tokens, accepted_tokens, rounds : verified drafts, and in how many verifications
    acceptance_rate : accepted over verified drafts; None without any, as are the next
    mean_acceptance_length : tokens that a round emitted, the bonus token included
    acceptance_by_position : share of the rounds in which so many drafts or more were accepted
    request_acceptance_length : mean, p5, p50, p95 over completed requests, and how many (n)
    wasted_verification_share : rejected drafts, of all positions that rounds verified
    tokens_a_step : that a decoding sequence got in a step, whether anything was drafted or not
    draft_time_share : of the time in steps
    acceptance : what the acceptance rests on, in words
    """
    rows = trace.requests
    seconds = sum(float(trace.steps[name].sum()) for name in trace.steps if name.endswith("_s"))
    drafting = float(trace.steps["draft_s"].sum())
    return {
        **acceptance_of(rows),
        "acceptance_by_position": _by_position(trace),
        "request_acceptance_length": _by_request(completed_rows(trace)),
        "tokens_a_step": _tokens_a_step(trace),
        "draft_time_share": drafting / seconds if seconds else 0.0,
        "acceptance": source,
    }


def acceptance_of(rows: Mapping[str, IntArray]) -> dict[str, Any]:
    """Totals of some requests."""
    names = ("draft_tokens", "accepted_tokens", "draft_rounds")
    drafts, accepted, rounds = (int(rows[name].sum()) for name in names)
    return {
        "draft_tokens": drafts,
        "accepted_tokens": accepted,
        "rounds": rounds,
        "acceptance_rate": accepted / drafts if drafts else None,
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        "wasted_verification_share": (drafts - accepted) / (drafts + rounds) if rounds else None,
    }


def _tokens_a_step(trace: Trace) -> float | None:
    steps = trace.steps
    turns = int((steps["decodes"] * steps["steps"]).sum())
    return int(steps["decoded_tokens"].sum()) / turns if turns else None


def _by_position(trace: Trace) -> list[float]:
    """Share of all rounds, those with fewer drafts included, as vLLM logs it."""
    if not trace.accepted:
        return []
    outcomes = np.array(trace.accepted, np.int64)
    most, rounds = int(outcomes[:, 0].max()), int(outcomes[:, 2].sum())
    return [
        float(outcomes[outcomes[:, 1] >= position, 2].sum() / rounds)
        for position in range(1, most + 1)
    ]


def _by_request(done: Mapping[str, IntArray]) -> dict[str, Any]:
    verified = done["draft_rounds"] > 0
    rounds = done["draft_rounds"][verified]
    lengths = 1 + done["accepted_tokens"][verified] / np.maximum(rounds, 1)
    if not len(lengths):
        return {"n": 0, "mean": None, "p5": None, "p50": None, "p95": None}
    percentiles = {f"p{q}": float(np.percentile(lengths, q)) for q in (5, 50, 95)}
    return {"n": len(lengths), "mean": float(lengths.mean()), **percentiles}


def speedup(summary: Mapping[str, Any], without: Mapping[str, Any]) -> dict[str, Any]:
    """How many times as fast as the same load, with the same seed, without speculation.

    Above 1 is faster. `without` holds what it is taken of; None where either has no value.
    """
    found: dict[str, Any] = {"without": {}}
    for name, path, rises in COMPARED:
        own, other = value_at(summary, path), value_at(without, path)
        found["without"][name] = other
        if own is None or other is None or min(own, other) <= 0:
            found[name] = None
        else:
            found[name] = own / other if rises else other / own
    return found
