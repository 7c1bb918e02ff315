"""What a sizing found, in the sentences that the terminal and the page share.

A result is the plain mapping that `servecast size --json` prints. Loads are factors of the
scenario's own load, goodput is in requests per second.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from servecast.reports import units

Result = Mapping[str, Any]
Choice = Mapping[str, Any]

DEFAULT = "vLLM's defaults"

#: Differences of goodput below this share do not matter: the search itself stops there.
NEGLIGIBLE = 0.02

METRIC_NAMES = {
    "goodput_per_s": "Goodput in requests per second",
    "output_tokens_per_s": "Output tokens per second",
}


# ---------------------------------------------------------------- names and numbers


def knob_name(key: str) -> str:
    """`engine.max_num_seqs` is max_num_seqs; keys of other parts of a scenario stay whole."""
    return key.removeprefix("engine.")


def settings(changes: Mapping[str, Any]) -> str:
    """Knobs and their values, as in `max_num_seqs 64, block_size 16`."""
    return ", ".join(f"{knob_name(key)} {units.flag(value)}" for key, value in changes.items())


def clause_title(clause: str) -> str:
    """A clause such as `ttft_p95_s` as a heading; a name of another kind stays as it is."""
    name, stat = _clause(clause)
    return name if stat is None else f"{name}, {stat}"


def clause_words(clause: str) -> str:
    """A clause as inside a sentence."""
    name, stat = _clause(clause)
    told = name[:1].lower() + name[1:]
    return told if stat is None else f"{stat} {told}"


def _clause(clause: str) -> tuple[str, str | None]:
    try:
        name, stat = units.clause_name(clause)
    except KeyError:
        return clause, None
    return name, None if stat == "share" else stat


def clause_met(clause: Mapping[str, Any]) -> bool:
    """Whether the value of the best choice stays within the limit."""
    return clause["value"] is not None and clause["value"] <= clause["limit"]


def metric_words(metric: str) -> str:
    """The metric of the sensitivity as a heading."""
    return METRIC_NAMES.get(metric) or clause_title(metric)


def chance(probability: float | None) -> str:
    """A probability in whole percent; what is not certain is never told as 0 or 100."""
    if probability is None:
        return units.NONE
    if 0 < probability < 0.005:
        return "< 1 %"
    if 0.995 <= probability < 1:
        return "> 99 %"
    return f"{probability * 100:.0f} %"


def probability(clause: Mapping[str, Any]) -> str:
    """How probable it is that a clause holds, and the 90 % interval of that."""
    told = chance(clause["probability"])
    if None in (clause["lo"], clause["hi"]):
        return told
    return f"{told} ({chance(clause['lo'])} to {chance(clause['hi'])})"


def interval(choice: Choice) -> str:
    """Goodput from and to; nothing if it has no interval."""
    if choice["lo"] is None or choice["hi"] is None:
        return ""
    return f"{units.significant(choice['lo'])} to {units.significant(choice['hi'])}"


def number(value: float | None) -> str:
    """Three digits, or what stands for no value."""
    return units.NONE if value is None else units.significant(value)


def relative(value: float | None, base: float | None) -> str:
    """Change from `base` in percent with its sign."""
    if value is None or not base:
        return units.NONE
    change = 100 * (value / base - 1)
    if abs(change) < 0.05:
        return "0 %"
    return f"{change:+.0f} %" if abs(change) >= 10 else f"{change:+.1f} %"


def factor(load: float) -> str:
    """A load as a multiple of the scenario's."""
    return f"× {load:.3g}"  # noqa: RUF001 (the sign people read)


def met_words(met: bool | None) -> str:
    """Whether the whole SLA holds; without an SLA a dash."""
    return units.NONE if met is None else "met" if met else "missed"


def calibrated(result: Result) -> bool:
    """False when step times rest on the generic fallback."""
    return "uncalibrated" not in result["calibration"].lower()


def command_lines(command: str, width: int) -> Iterator[str]:
    """The command over several lines of at most `width`, as a shell reads it.

    A flag keeps its values; one that alone is longer than `width` is not broken.
    """
    line = ""
    for part in _flags(command):
        # Two more columns for what continues the line.
        if line and len(line) + len(part) + 3 > width:
            yield f"{line} \\"
            line = f"    {part}"
        else:
            line = f"{line} {part}" if line else part
    yield line


def _flags(command: str) -> Iterator[str]:
    """Words up to the first flag, then each flag with its values."""
    words: list[str] = []
    for word in shlex.split(command):
        if word.startswith("--") and words:
            yield shlex.join(words)
            words = []
        words.append(word)
    yield shlex.join(words)


# ---------------------------------------------------------------- facts behind sentences


def sent_per_s(result: Result) -> float | None:
    """Requests per second at the scenario's own load; None without a curve."""
    return next((row["rate_per_s"] / row["load"] for row in result["curve"] if row["load"]), None)


def serves_all(result: Result) -> bool:
    """Whether goodput is the rate sent: seeds differ, so that it may even seem higher."""
    sent = sent_per_s(result)
    return sent is not None and result["best"]["goodput_per_s"] >= 0.995 * sent


def largest_load(result: Result, *, held: bool = False) -> float | None:
    """The largest load tried, or the largest of those at which the SLA held."""
    loads = (row["load"] for row in result["curve"] if not held or row["met"] is not False)
    return max(loads, default=None)


def simulated(result: Result) -> list[Mapping[str, Any]]:
    """Points that were simulated, for however short a time."""
    return [point for point in result["points"] if point["goodput_per_s"] is not None]


def worst_clause(result: Result) -> Mapping[str, Any] | None:
    """The missed clause that is furthest beyond its limit."""
    missed = [c for c in result["sla"] if c["value"] is not None and not clause_met(c)]
    return max(missed, key=lambda c: c["value"] / (c["limit"] or 1e-12), default=None)


def grid_size(result: Result) -> int:
    """Combinations of the knobs."""
    return math.prod(len(values) for values in result["knobs"].values())


def told_apart(best: Choice, other: Choice) -> bool:
    """Whether the intervals of goodput leave no doubt which is better."""
    return None not in (best["lo"], other["hi"]) and bool(best["lo"] > other["hi"])


def differing(choice: Choice, best: Choice) -> dict[str, Any]:
    """Knobs that are not as in the best."""
    changes, own = choice["changes"], best["changes"]
    return {key: changes[key] for key in changes if changes[key] != own.get(key)}


# ---------------------------------------------------------------- sentences


def answer(result: Result) -> str:
    """The finding in one sentence that stands above the command."""
    best = result["best"]
    devices = result["devices"]
    served = f"{devices} device{'s serve' if devices > 1 else ' serves'} {_of_sent(result)}"
    if best["met"] is False:
        return f"No: {_why_not(result)}"
    if not result["sla"]:
        return f"With these flags {served}{_against_default(result)}."
    room = _room(result)
    return (
        f"Yes: with these flags {served} within the SLA{_against_default(result)}"
        f"{f', and {room}' if room else ''}."
    )


def _of_sent(result: Result) -> str:
    goodput, sent = units.significant(result["best"]["goodput_per_s"]), sent_per_s(result)
    if serves_all(result):
        return f"all {goodput} requests a second"
    return f"{goodput}{f' of {units.significant(sent)}' if sent else ''} requests a second"


def _why_not(result: Result) -> str:
    worst = worst_clause(result)
    told = (
        f"none of the {len(simulated(result)):,} settings simulated meets the SLA at this "
        f"load; the closest serves {_of_sent(result)} within its limits"
    )
    if worst is not None:
        name = worst["clause"]
        value, limit = (units.clause_number(name, worst[key]) for key in ("value", "limit"))
        told += f", and its {clause_words(name)} is {value} where {limit} is allowed"
    return f"{told}."


def _against_default(result: Result) -> str:
    best, default = result["best"], result["default"]
    if default is None:
        return f", where {DEFAULT} do not start"
    if default["changes"] == best["changes"]:
        return f", as {DEFAULT} already do"
    if not default["goodput_per_s"]:
        return f", where with {DEFAULT} none would be"
    gain = best["goodput_per_s"] / default["goodput_per_s"] - 1
    misses = ", which miss the SLA" if default["met"] is False and best["met"] else ""
    if abs(gain) < NEGLIGIBLE:
        return f", about as many as with {DEFAULT}{misses}"
    how = "more" if gain > 0 else "less"
    return f", {abs(gain) * 100:.0f} % {how} than with {DEFAULT}{misses}"


def _room(result: Result) -> str:
    """How far the load may grow, as half a sentence."""
    load, breaks = result["headroom"]["load"], result["headroom"]["breaks"]
    if load is None:
        load, breaks = largest_load(result, held=True), None
    if load is None or load < 1:
        return ""
    if breaks is None:
        return f"no limit breaks up to {factor(load)} the load"
    return (
        f"the load may grow by {(load - 1) * 100:.0f} % before "
        f"{clause_words(breaks)} breaks its limit"
    )


def distance(result: Result) -> str:
    """What the runner-up has less, and whether that is certain."""
    best, other = result["best"], result["runner_up"]
    if other is None:
        return "there is no runner-up"
    if best["met"] and other["met"] is False:
        return "the runner-up misses the SLA"
    if (
        best["goodput_per_s"]
        and abs(other["goodput_per_s"] / best["goodput_per_s"] - 1) < NEGLIGIBLE
    ):
        return "the runner-up is within 2 % of the best: either will do"
    if told_apart(best, other):
        return "the runner-up is worse: the intervals do not meet"
    if told_apart(other, best):
        return "the runner-up serves more requests, but the best stands before it in the search"
    return "the intervals of the runner-up and the best meet: they cannot be told apart"


def headroom(result: Result) -> str:
    """How far the load may grow before which clause breaks."""
    load, breaks = result["headroom"]["load"], result["headroom"]["breaks"]
    if load == 0 and breaks is not None:
        least = factor(min((row["load"] for row in result["curve"]), default=1))
        return f"none: {clause_words(breaks)} breaks its limit even at {least} this load"
    if load is not None and load < 1 and breaks is not None:
        return f"none: {clause_words(breaks)} holds only up to {factor(load)} this load"
    room = _room(result)
    if not room:
        return "not known: no other load was simulated"
    return f"{room} ({factor(load)})" if breaks and load else room


def cliff(result: Result) -> str:
    """Where preemption begins, and how far off that is."""
    load, most = result["cliff"]["load"], largest_load(result)
    if load is None:
        tried = f" up to {factor(most)} the load" if most else ""
        return f"no preemption{tried}"
    if load <= 1:
        return (
            f"preemption has begun: {result['cliff']['preemptions']:,} at {factor(load)} the load"
        )
    where = f"preemption begins at {factor(load)} the load, {(load - 1) * 100:.0f} % above this one"
    room = result["headroom"]["load"]
    if room is None or result["headroom"]["breaks"] is None:
        return where
    return where + (", after the SLA breaks" if load > room else ", before the SLA breaks")


def lever(result: Result) -> str:
    """The one measurement that would most change the answer."""
    if not result["sensitivity"]:
        return "none: no coefficient was varied"
    first = result["sensitivity"][0]
    metric = result["sensitivity_metric"]
    low, base, high = (units.headline(metric, first[key]) for key in ("low", "base", "high"))
    name = METRIC_NAMES.get(metric, "").lower() or clause_words(metric)
    return f"{first['what']}: {name} is {low} if 15 % lower, {high} if higher, else {base}"


def effort(result: Result) -> str:
    """What the search simulated, against a search of every point at full length."""
    points = f"{result['points_simulated']:,} points simulated"
    done, exhaustive = result["simulated_requests"], result["exhaustive_requests"]
    if not exhaustive:
        return f"{points}, {done:,} requests"
    return (
        f"{points}, {done:,} requests: {units.percent(done / exhaustive)} of the {exhaustive:,} "
        f"that all {grid_size(result):,} combinations take at full length"
    )


def sentence(text: str) -> str:
    """As the start of a sentence; the name of a flag stays as it is."""
    first = text.partition(" ")[0]
    return (text if "_" in first else text[:1].upper() + text[1:]).rstrip(".")
