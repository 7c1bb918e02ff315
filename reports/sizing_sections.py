"""The sections of a sizing's report below its answer: alternatives, figures, every point."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from servecast.reports import sizing_figures as figures
from servecast.reports import sizing_words as words
from servecast.reports import units
from servecast.reports.page import grid, section, table
from servecast.reports.sizing_heatmap import goodput_range, heat_maps, varied
from servecast.reports.sizing_words import Choice, Result

#: Rows of the table of points that are open to see.
OPEN_ROWS = 30


def choices(result: Result) -> str:
    """Best, runner-up and defaults side by side, a number a row."""
    named = {
        "Best": result["best"],
        "Runner-up": result["runner_up"],
        "Defaults": result["default"],
    }
    choices = {name: choice for name, choice in named.items() if choice is not None}
    best = result["best"]
    rows = [
        (_breakable(key), *(_knob(choice, key) for choice in choices.values()))
        for key in result["knobs"]
    ]
    rows += [
        (name, *(told(choice) for choice in choices.values())) for name, told in COMPARED.items()
    ]
    change = (
        units.NONE if c is best else words.relative(c["goodput_per_s"], best["goodput_per_s"])
        for c in choices.values()
    )
    rows.insert(len(result["knobs"]) + 2, ("Change", *change))
    return section(
        f"Against the runner-up and {words.DEFAULT}",
        f"{words.sentence(words.distance(result))}.",
        table(("", *choices), rows, "choices"),
    )


def _breakable(key: str) -> str:
    """The name of a knob, which a narrow column may break after an underscore."""
    return escape(words.knob_name(key)).replace("_", "_<wbr>")


def _knob(choice: Choice, key: str) -> str:
    """The value of a knob: as tried, else as the engine resolved it."""
    value = choice["changes"].get(key, choice["engine"].get(words.knob_name(key)))
    return f"<code>{escape(units.flag(value))}</code>"


COMPARED: dict[str, Callable[[Choice], str]] = {
    "Requests per second in the SLA": lambda c: units.significant(c["goodput_per_s"]),
    "Interval": lambda c: words.interval(c) or units.NONE,
    "SLA": lambda c: words.met_words(c["met"]),
    "Time to first token, P95": lambda c: units.seconds(c["ttft_p95_s"]),
    "Gap between tokens, P99": lambda c: units.seconds(c["itl_p99_s"]),
    "End to end, P95": lambda c: units.seconds(c["e2e_p95_s"]),
    "Tokens per second per device": lambda c: words.number(c["tokens_per_s_per_device"]),
    "Tokens per second per user": lambda c: words.number(c["tokens_per_s_per_user"]),
    "Preemptions": lambda c: units.count(c["preemptions"]),
    "KV cache at its peak": lambda c: units.percent(c["kv_peak_use"]),
    "Per million output tokens": lambda c: units.dollars(c["cost_per_million_output_tokens"]),
}


def heat(result: Result) -> str:
    low, high = goodput_range(result)
    key = (
        f'<span>{units.significant(low)} <i class="ramp"></i>{units.significant(high)} requests/s '
        "within the SLA</span>"
        '<span><i class="missed"></i>misses the SLA</span>'
        '<span><i class="edge"></i>boundary of the SLA</span>'
        "<span>&#9733; best</span><span>&#9671; defaults</span>"
        "<span>&times; does not start</span><span>= acts as a smaller value</span>"
        '<span><i class="blank"></i>not simulated</span>'
    )
    left = [point for point in result["points"] if point["goodput_per_s"] is None]
    note = f"Goodput of {len(words.simulated(result)):,} points. "
    if len(varied(result)) > 3:
        names = ", ".join(words.knob_name(key) for key in varied(result)[3:])
        note += f"Each cell shows the best over {escape(names)}. "
    if left:
        note += (
            f"{len(left):,} others were not simulated: they do not start, cannot keep up, act as "
            "another, or the search had no need of them."
        )
    return section(
        "Goodput by setting", note, f'<div class="key">{key}</div>{grid(heat_maps(result))}'
    )


def over_load(result: Result) -> str:
    """What the best setting gives at other loads."""
    return section(
        "As the load grows",
        "The best setting at other loads. Knee: throughput over latency is highest there. "
        "Cliff: preemption begins. Shaded: the SLA is broken.",
        grid(figures.load_panels(result)),
    )


def trade_off(result: Result) -> str:
    metric = words.metric_words(result["sensitivity_metric"])
    cells = [
        (
            "Tokens per second per device, against per user",
            f'{figures.pareto(result)}<p class="muted">Every point simulated: dots meet the SLA, '
            "crosses miss it. On the line no other is better in both.</p>",
        ),
        (
            f"{escape(metric)} if a coefficient is off by 15 %",
            f'{figures.tornado(result)}<p class="muted">Orange: the coefficient is 15 % lower, '
            "blue: 15 % higher. The longest bar is what to measure first.</p>",
        ),
    ]
    return section("Trade-off and sensitivity", "", grid(cells))


# ---------------------------------------------------------------- every point


def points(result: Result) -> str:
    """Simulated points by goodput, then those never simulated, folded where there are many."""
    done = sorted(words.simulated(result), key=lambda point: -point["goodput_per_s"])
    failed = [p for p in result["points"] if p["goodput_per_s"] is None and p["error"] is not None]
    skipped = [p for p in result["points"] if p["goodput_per_s"] is None and p["error"] is None]
    names = [_breakable(key) for key in result["knobs"]]
    head = (*names, *POINT_COLUMNS, "Run")
    body = table(head, (_point_row(result, point) for point in done[:OPEN_ROWS]), "points")
    if len(done) > OPEN_ROWS:
        rest = table(head, (_point_row(result, point) for point in done[OPEN_ROWS:]), "points")
        body += _folded(f"{len(done) - OPEN_ROWS:,} more", rest)
    for title, points in (("that do not start", failed), ("not simulated", skipped)):
        if points:
            rows = ((*_knobs(result, p), escape(str(p["error"] or p["stage"]))) for p in points)
            told = f"{len(points):,} points {title}"
            body += _folded(told, table((*names, "Why"), rows, "points reasons"))
    return section(
        "Every point",
        "By goodput. Short and medium runs are of fewer requests than full ones: they rank points, "
        "they do not settle a value.",
        body,
    )


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def _knobs(result: Result, point: Mapping[str, Any]) -> Iterator[str]:
    return (escape(units.flag(point["changes"].get(key))) for key in result["knobs"])


def _point_row(result: Result, point: Mapping[str, Any]) -> Sequence[str]:
    mark = _mark(result, point)
    first, *others = _knobs(result, point)
    return (
        f"{first} <b>{mark}</b>" if mark else first,
        *others,
        *(told(point) for told in POINT_COLUMNS.values()),
        escape(point["stage"]),
    )


def _mark(result: Result, point: Mapping[str, Any]) -> str:
    named = {"best": "best", "runner_up": "runner-up", "default": "defaults"}
    return ", ".join(
        told
        for name, told in named.items()
        if result[name] is not None and result[name]["changes"] == point["changes"]
    )


POINT_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "Goodput": lambda p: units.significant(p["goodput_per_s"]),
    "SLA": lambda p: words.met_words(p["met"]),
    "TTFT P95": lambda p: units.seconds(p["ttft_p95_s"]),
    "ITL P99": lambda p: units.seconds(p["itl_p99_s"]),
    "Tok/s/device": lambda p: words.number(p["tokens_per_s_per_device"]),
    "Tok/s/user": lambda p: words.number(p["tokens_per_s_per_user"]),
    "Preempted": lambda p: units.count(p["preemptions"]),
    "KV peak": lambda p: units.percent(p["kv_peak_use"]),
}
