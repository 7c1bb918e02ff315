"""What lies around an answer: the limit of the load, the cliff, and what would change it."""

import math
from dataclasses import replace
from typing import Any

from servecast.calibration.profile import GENERIC, Profile
from servecast.scenarios.answer import binding_words
from servecast.scenarios.build import set_up
from servecast.scenarios.candidates import Candidate, Changes, Result
from servecast.scenarios.runner import Runner

#: Loads tried around the winner, in order; the search for the limit goes on by halving.
LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
FAR_LOADS = (8.0, 16.0)
HALVINGS = 2

#: How far a coefficient may be off, for the tornado.
SWING = 0.15
COEFFICIENTS = {
    "gemm_bandwidth": "memory bandwidth of dense layers",
    "gemm_flops": "compute rate of dense layers",
    "attention_decode_bandwidth": "memory bandwidth of decode attention",
    "attention_prefill_flops": "compute rate of prefill attention",
    "host_step_s": "host time of a step",
}


def _at_load(runner: Runner, changes: Changes, requests: int, load: float) -> Result:
    (result,) = runner.run([{**changes, "load": load}], requests=requests)
    return {"load": load, **result}


def limit(
    runner: Runner, changes: Changes, requests: int
) -> tuple[float, str | None, list[dict[str, Any]]]:
    """(largest load factor that holds, the clause that breaks, all loads tried)."""
    tried: list[dict[str, Any]] = []
    held, broken = 0.0, None
    for load in LOADS:
        tried.append(_at_load(runner, changes, requests, load))
        if _holds(tried[-1]):
            held = load
        else:
            broken = load
            break
    for _ in range(HALVINGS if broken is not None else 0):
        assert broken is not None
        tried.append(_at_load(runner, changes, requests, (held + broken) / 2))
        if _holds(tried[-1]):
            held = tried[-1]["load"]
        else:
            broken = tried[-1]["load"]
    first = min((t for t in tried if not _holds(t)), key=lambda t: t["load"], default=None)
    return held, _broken_clause(first), tried


def surroundings(
    runner: Runner, best: Candidate, rate_per_s: float, requests: int
) -> dict[str, Any]:
    """`headroom`, `cliff`, `curve` and `binding` of an answer, from runs of so many requests."""
    held, breaks, tried = limit(runner, best.changes, requests)
    for load in FAR_LOADS:
        if any(_preemptions(t) for t in tried):
            break
        tried.append(_at_load(runner, best.changes, requests, load))
    tried.sort(key=lambda t: t["load"])
    cliff = next((t for t in tried if _preemptions(t)), None)
    strained = next((t for t in tried if not _holds(t)), tried[-1])
    return {
        "headroom": {"load": held, "breaks": breaks},
        "cliff": {
            "load": cliff["load"] if cliff else None,
            "preemptions": _preemptions(cliff) if cliff else 0,
        },
        "curve": [
            _curve_row(t, rate_per_s)
            for t in tried
            if t["error"] is None and (t["load"] not in FAR_LOADS or t is cliff)
        ],
        "binding": binding_words(strained),
    }


def _curve_row(tried: Result, rate_per_s: float) -> dict[str, Any]:
    summary = tried["summary"]
    return {
        "load": tried["load"],
        "rate_per_s": rate_per_s * tried["load"],
        "goodput_per_s": _goodput_per_s(summary, tried["load"] * rate_per_s),
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "ttft_p95_s": summary["ttft_s"]["p95"],
        "itl_p99_s": summary["itl_s"]["p99"],
        "e2e_p95_s": summary["e2e_s"]["p95"],
        "preemptions": summary["preemptions"],
        "met": _holds(tried),
    }


def sensitivity(runner: Runner, best: Candidate, requests: int) -> dict[str, Any]:
    """The tightest clause (or the mean gap) with each coefficient off by `SWING`."""
    metric = _tightest(best)
    if set_up(runner.loaded).placement is not None:
        # An SRAM device has no such coefficients.
        return {"sensitivity": [], "sensitivity_metric": metric}

    def outcome(profile: Profile) -> float | None:
        (result,) = runner.run([best.changes], requests=requests, profile=profile)
        return _metric(result, metric)

    base = outcome(GENERIC)
    rows = []
    for name, what in COEFFICIENTS.items():
        low, high = (outcome(_off(name, factor)) for factor in (1 - SWING, 1 + SWING))
        if None not in (low, high, base):
            rows.append({"what": what, "low": low, "high": high, "base": base})
    rows.sort(key=lambda row: -abs(float(row["high"] or 0) - float(row["low"] or 0)))
    return {"sensitivity": rows, "sensitivity_metric": metric}


def _goodput_per_s(summary: dict[str, Any], rate_per_s: float) -> float:
    """Share of the requests within their limits, times what is sent.

    Over the duration of so short a run the time in which it empties would count for much. Without
    limits, or where all is sent at once, there is only the duration.
    """
    if not summary["sla"]["clauses"] or not math.isfinite(rate_per_s):
        return float(summary["goodput_per_s"])
    good = summary["goodput_per_s"] * summary["duration_s"]
    return float(good / summary["requests"]["sent"] * rate_per_s)


def _holds(result: dict[str, Any]) -> bool:
    return result["error"] is None and result["summary"]["sla"]["met"] is not False


def _preemptions(result: dict[str, Any]) -> int:
    return 0 if result["error"] is not None else int(result["summary"]["preemptions"])


def _broken_clause(result: dict[str, Any] | None) -> str | None:
    if result is None or result["error"] is not None:
        return None
    missed = [c["clause"] for c in result["summary"]["sla"]["clauses"] if not c["met"]]
    return missed[0] if missed else None


def _tightest(best: Candidate) -> str:
    """The clause with the least room, else the mean gap between tokens."""
    assert best.results
    clauses = best.results[0]["summary"]["sla"]["clauses"]
    bounded = [c for c in clauses if c["value"] is not None and c["clause"].endswith("_s")]
    if not bounded:
        return "tpot_mean_s"
    return str(max(bounded, key=lambda c: c["value"] / c["limit"])["clause"])


def _metric(result: dict[str, Any], name: str) -> float | None:
    if result["error"] is not None:
        return None
    metric, stat, _ = name.split("_")
    value = result["summary"][f"{metric}_s"][stat]
    return None if value is None else float(value)


def _off(name: str, factor: float) -> Profile:
    """The generic profile with one coefficient off."""
    label = f"{GENERIC.label}, {name} x {factor:g}"
    if name == "host_step_s":
        efficiency = replace(GENERIC.efficiency, label=label)
        return replace(
            GENERIC,
            host_step_s=GENERIC.host_step_s * factor,
            host_sequence_s=GENERIC.host_sequence_s * factor,
            efficiency=efficiency,
        )
    value = min(1.0, getattr(GENERIC.efficiency, name) * factor)
    changes: dict[str, Any] = {name: value, "label": label}
    return replace(GENERIC, efficiency=replace(GENERIC.efficiency, **changes))
