"""Why one way of serving a load differs from another: what changed, in words, largest first.

The mean end-to-end time of a request is the sum of three stages: queueing (arrival to first
admission), prefill (admission to first token) and decode (first to last token). Beside them stand
what has no share of that sum: preemptions, prompt tokens found in the prefix cache, requests not
served, and the time of engine steps by part.

The rank of a change is its size against what it is part of: a stage against the base's mean
end-to-end time, a part of the steps against the base's step time, the rest a request (or prompt
token) of the base.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servecast.costmodels.shape import PARTS
from servecast.reports import units
from servecast.reports.metrics import WAITING_PARTS
from servecast.scenarios.paired import Read, Result, difference, told_apart, unserved_share, values

#: Smaller changes are not named.
LEAST = 0.01

#: Parts of step time that are named at most.
PARTS_NAMED = 2

HELD = {
    "kv": "the KV pool was full",
    "slots": "all sequence slots were taken",
    "budget": "the token budget of the steps was used up",
}


def explain(
    base: Sequence[Result], other: Sequence[Result], replicas: tuple[int, int]
) -> list[dict[str, Any]]:
    """What changed beyond 1 % and beyond its interval, largest first.

    Parameters
    ----------
    base, other : results in the order of their seeds
    replicas : of the base and of the other

    Returns
    -------
    Entries `{what, rank, delta, text}`: `delta` as of `difference`, in seconds (stages: a request;
    parts: an output token), counts or tokens.
    """
    found = [*_stages(base, other), *_counts(base, other), *_parts(base, other, replicas)]
    told = [e for e in found if e["rank"] >= LEAST and told_apart(e["delta"])]
    return sorted(told, key=lambda entry: -entry["rank"])


# ---------------------------------------------------------------- stages of a request


def _mean(summary: Mapping[str, Any], name: str) -> float | None:
    value: float | None = summary[f"{name}_s"]["mean"]
    return value


def _between(start: str, end: str) -> Read:
    def read(summary: Mapping[str, Any]) -> float | None:
        first, last = _mean(summary, start), _mean(summary, end)
        return None if first is None or last is None else last - first

    return read


STAGES: dict[str, tuple[str, Read]] = {
    "queueing": ("wait for admission", lambda summary: _mean(summary, "queue")),
    "prefill": ("admission to first token", _between("queue", "ttft")),
    "decode": ("first to last token", _between("ttft", "e2e")),
}


def _stages(base: Sequence[Result], other: Sequence[Result]) -> list[dict[str, Any]]:
    whole = values(base, lambda summary: _mean(summary, "e2e"))
    entries = []
    for what, (words, read) in STAGES.items():
        was, now = values(base, read), values(other, read)
        delta = difference(was, now)
        if delta is None or whole is None or was is None or now is None:
            continue
        text = f"{words}, {_seconds(was, now, delta)}{_cause(what, base, other)}"
        entries.append(_entry(what, delta, float(np.mean(whole)), text))
    return entries


def _cause(what: str, base: Sequence[Result], other: Sequence[Result]) -> str:
    if what == "decode":
        gaps = [values(results, lambda s: _mean(s, "tpot")) for results in (base, other)]
        if gaps[0] is None or gaps[1] is None:
            return ""
        was, now = (units.seconds(float(np.mean(gap))) for gap in gaps if gap is not None)
        return f"; a token every {now} instead of {was}" if was != now else ""
    if what != "queueing":
        return ""
    shares = {
        name: [float(np.mean([r["pressure"][name] for r in results])) for results in (base, other)]
        for name in HELD
        if all("pressure" in r for results in (base, other) for r in results)
    }
    if not shares:
        return ""
    name = max(shares, key=lambda name: abs(shares[name][1] - shares[name][0]))
    was, now = (units.percent(share) for share in shares[name])
    if abs(shares[name][1] - shares[name][0]) < LEAST:
        return ""
    return f"; {HELD[name]} {now} of the time (base {was}) while requests waited"


# ---------------------------------------------------------------- counts


def _prompt_tokens(summary: Mapping[str, Any]) -> float:
    rate = summary["total_tokens_per_s"] - summary["output_tokens_per_s"]
    return float(rate * summary["duration_s"])


def _counts(base: Sequence[Result], other: Sequence[Result]) -> list[dict[str, Any]]:
    """Preemptions, prefix hits, and requests not served: against requests, or prompt tokens."""
    sent = float(np.mean([r["summary"]["requests"]["sent"] for r in base]))
    prompts = float(np.mean([_prompt_tokens(r["summary"]) for r in base]))
    counted: tuple[tuple[str, Read, float, str], ...] = (
        ("preemption", lambda s: float(s["preemptions"]), sent, "preemptions"),
        ("prefix cache", lambda s: float(s["prefix_hit_tokens"]), prompts, "prompt tokens found"),
        (
            "not served",
            lambda s: (unserved_share(s) or 0.0) * s["requests"]["sent"],
            sent,
            "requests refused or given up",
        ),
    )
    entries = []
    for what, read, whole, words in counted:
        was, now = values(base, read), values(other, read)
        delta = difference(was, now)
        if delta is None or was is None or now is None:
            continue
        text = f"{_plain(np.mean(now))} {words} instead of {_plain(np.mean(was))}"
        if what == "preemption":
            text += _pools(base, other)
        entries.append(_entry(what, delta, whole, text))
    return entries


def _pools(base: Sequence[Result], other: Sequence[Result]) -> str:
    was, now = (results[0]["summary"]["kv"]["tokens"] for results in (base, other))
    return f"; the KV pool holds {now:,} tokens instead of {was:,}" if was != now else ""


# ---------------------------------------------------------------- parts of the steps


def step_seconds(summary: Mapping[str, Any], part: str, replicas: int) -> float | None:
    """Seconds of engine steps spent on a part, an output token of all replicas.

    The summary has shares; their whole follows from the share of the run in which the device was
    at work, which is what is left of the steps without the parts in which it waits.
    """
    share, tokens = summary["step_time_share"], summary["output_tokens_per_s"]
    at_work = 1 - sum(share[name] for name in WAITING_PARTS)
    if tokens <= 0 or at_work <= 0:
        return None
    steps = summary["utilisation"]["device_busy"] * replicas / at_work
    return float(share[part] * steps / tokens)


def _parts(
    base: Sequence[Result], other: Sequence[Result], replicas: tuple[int, int]
) -> list[dict[str, Any]]:
    whole = 0.0
    entries = []
    for part in PARTS:
        was = values(base, lambda s, part=part: step_seconds(s, part, replicas[0]))  # type: ignore[misc]
        now = values(other, lambda s, part=part: step_seconds(s, part, replicas[1]))  # type: ignore[misc]
        delta = difference(was, now)
        if delta is None or was is None or now is None:
            continue
        whole += float(np.mean(was))
        words = f"{_seconds(was, now, delta)} of step time per output token"
        entries.append((f"steps: {units.PART_NAMES[part]}", delta, words))
    ranked = [_entry(what, delta, whole, text) for what, delta, text in entries]
    return sorted(ranked, key=lambda entry: -entry["rank"])[:PARTS_NAMED]


# ---------------------------------------------------------------- words


def _entry(what: str, delta: Mapping[str, Any], whole: float, text: str) -> dict[str, Any]:
    rank = abs(delta["mean"]) / whole if whole else 0.0
    return {"what": what, "rank": rank, "delta": dict(delta), "text": f"{what}: {text}"}


def _seconds(was: Sequence[float], now: Sequence[float], delta: Mapping[str, Any]) -> str:
    """`4.50 s instead of 1.20 s (+3.30 s, from +2.9 s to +3.7 s)`."""
    text = f"{units.seconds(float(np.mean(now)))} instead of {units.seconds(float(np.mean(was)))}"
    change = _signed(delta["mean"])
    if delta["lo"] is None:
        return f"{text} ({change})"
    return f"{text} ({change}, 95 % {_signed(delta['lo'])} to {_signed(delta['hi'])})"


def _signed(seconds: float) -> str:
    sign = "+" if seconds > 0 else "-" if seconds < 0 else ""
    return f"{sign}{units.seconds(abs(seconds))}"


def _plain(value: "float | np.floating[Any]") -> str:
    return units.significant(float(value)) if value < 100 else f"{value:,.0f}"
