"""Metrics of a comparison in words: their names, their values, and what a change of them says."""

from collections.abc import Mapping
from typing import Any

from servecast.reports import units

NAMES = {
    "goodput_per_s": "Goodput, requests/s",
    "requests_per_s": "Requests/s",
    "output_tokens_per_s": "Output tokens/s",
    "e2e_mean_s": "End to end, mean",
    "queue_mean_s": "Wait for admission, mean",
    "preemptions": "Preemptions",
    "unserved_share": "Requests not served",
    "device_busy_share": "Device at work",
    "kv_peak_share": "KV cache at its peak",
    "acceptance_rate": "Drafts accepted",
    "mean_acceptance_length": "Tokens a round",
    "cost_per_million_output_tokens": "Cost per million output tokens",
}

#: Metrics of the narrow tables and of the figures.
HEADLINES = ("goodput_per_s", "ttft_p95_s", "itl_p99_s", "e2e_p95_s", "output_tokens_per_s")


def metric_name(name: str) -> str:
    """A metric in words, with its statistic."""
    return NAMES.get(name) or ", ".join(units.clause_name(name))


def metric_value(name: str, value: float | None) -> str:
    """A metric's value in its unit."""
    if value is None:
        return units.NONE
    if name.startswith("cost_"):
        return units.dollars(value)
    if name.endswith("_share"):
        return units.percent(value)
    return units.headline(name, value)


def signed_value(name: str, value: float) -> str:
    """A difference in the metric's unit, with its sign."""
    sign = "+" if value > 0 else "-" if value < 0 else ""
    return f"{sign}{metric_value(name, abs(value))}"


def relative_text(delta: Mapping[str, Any] | None, name: str) -> str:
    """A difference against the base: `+12.3 % ±1.2`, or in its own unit where the base is 0."""
    if delta is None:
        return units.NONE
    if delta["mean"] == 0 and not delta["lo"] and not delta["hi"]:
        return "equal"
    half = None if delta["lo"] is None else (delta["hi"] - delta["lo"]) / 2
    relative = delta["relative"]
    if not relative:
        text = signed_value(name, delta["mean"])
        return text if half is None else f"{text} ±{metric_value(name, half)}"
    text = f"{_points(100 * relative)} %"
    if half is None:
        return text
    return f"{text} ±{_points(abs(100 * relative * half / delta['mean']), '')}"


def _points(value: float, sign: str = "+") -> str:
    """Percent with a digit behind the point; less than a tenth with one that counts."""
    digits = 0 if abs(value) >= 99.5 else 1
    if 0 < abs(value) < 0.095:
        digits = min(4, -int(f"{abs(value):e}".partition("e")[2]))
    return f"{value:{sign},.{digits}f}"


def interval_text(name: str, entry: Mapping[str, Any]) -> str:
    """`lo to hi`, or nothing known."""
    if entry["lo"] is None:
        return units.NONE
    return f"{signed_value(name, entry['lo'])} to {signed_value(name, entry['hi'])}"


def judgement(delta: Mapping[str, Any] | None) -> str:
    """`good` or `bad` where a difference lies beyond its interval, else nothing."""
    if delta is None or delta["lo"] is None or not delta["better"]:
        return ""
    if delta["lo"] <= 0 <= delta["hi"]:
        return ""
    return "good" if delta["mean"] * delta["better"] > 0 else "bad"


def change_words(row: Mapping[str, Any]) -> str:
    """A row of a comparison in a clause: `time to first token, P95 55.1 % lower`."""
    name, delta = row["metric"], row["delta"]
    words = metric_name(name)
    words = words[0].lower() + words[1:]
    if not delta["relative"]:
        return f"{words} {metric_value(name, row['b'])} instead of {metric_value(name, row['a'])}"
    way = "higher" if delta["mean"] > 0 else "lower"
    return f"{words} {_points(abs(100 * delta['relative']), '')} % {way}"


def probability(value: float | None) -> str:
    """A probability, never told as certain."""
    if value is None:
        return units.NONE
    if value > 0.999:
        return "> 99.9 %"
    return "< 0.1 %" if value < 0.001 else f"{value * 100:.1f} %"


def clause_title(row: Mapping[str, Any]) -> str:
    """A clause and its class in short: `ttft p95`, `chat: ttft p95`."""
    title = str(row["clause"]).removesuffix("_s").replace("_", " ")
    return f"{row['class']}: {title}" if row["class"] else title


def held(share: Mapping[str, Any]) -> str:
    """In how many replications a clause (or all of them) held: `3/4`."""
    return f"{round(share['met'] * share['n'])}/{share['n']}"


def mostly(share: Mapping[str, Any]) -> bool:
    """Whether it held in more than half of the replications."""
    return bool(share["met"] > 0.5)
