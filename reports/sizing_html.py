"""The report of a sizing: the answer and its command on top, then what it rests on.

One HTML file without scripts or anything from elsewhere, as the report of a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from servecast.reports import sizing_figures as figures
from servecast.reports import sizing_words as words
from servecast.reports import units
from servecast.reports.page import bar, card, grid, page, section, table
from servecast.reports.sizing_heatmap import goodput_range, heat_maps, varied
from servecast.reports.sizing_words import Choice, Result

#: One flag a line, for every flag is wider than this.
ONE_FLAG = 1

#: Rows of the table of points that are open to see.
OPEN_ROWS = 30

STYLE = """
.command pre {
  margin: 8px 0 0; padding: 12px 14px; border-radius: 8px; background: var(--page);
  border: 1px solid var(--grid); white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.55;
  -webkit-user-select: all; user-select: all;
}
.answer { border-left: 6px solid; font-size: 1.15rem; line-height: 1.45; }
.answer p { margin: 0; }
.answer.good { border-left-color: var(--good); }
.answer.bad { border-left-color: var(--bad); }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 4px 0 14px; font-size: .88rem; }
.key span { white-space: nowrap; }
.key i {
  display: inline-block; width: 1.6em; height: 1.1em; border-radius: 2px; margin-right: 6px;
  vertical-align: -.2em;
}
.ramp { background: linear-gradient(90deg, color-mix(in srgb, var(--blue) 8%, transparent),
  color-mix(in srgb, var(--blue) 62%, transparent)); }
.missed { background: repeating-linear-gradient(135deg, var(--vermillion) 0 1px,
  color-mix(in srgb, var(--vermillion) 30%, transparent) 1px 5px); }
.blank { border: 1px solid var(--grid); }
.edge { border-left: 3px solid var(--ink); width: 6px !important; }
dl { margin: 0; }
dt { font-weight: 600; margin-top: 10px; }
dt:first-child { margin-top: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: 10px 0; font-weight: 600; color: var(--blue); }
.choices { table-layout: fixed; }
.choices td { white-space: normal; overflow-wrap: anywhere; }
.choices th:first-child { width: 40%; }
.points { font-size: .85rem; }
.points th { white-space: normal; vertical-align: bottom; }
.points td:last-child { max-width: 36em; overflow: hidden; text-overflow: ellipsis; }
.reasons :is(th, td):last-child { text-align: left; width: 60%; }
@media (max-width: 760px) {
  .answer { font-size: 1.05rem; }
  .sla :is(th, td):nth-child(5) { display: none; }
  .sla td:last-child, .choices th { white-space: normal; }
  .choices th:first-child { width: 34%; }
}
"""


def render_sizing_report(result: Result) -> str:
    """The whole page; equal input gives equal bytes."""
    parts = (
        _header(result),
        _answer(result),
        _command(result),
        _cards(result),
        _sla(result),
        _reasons(result),
        _choices(result),
        _heat(result),
        section(
            "As the load grows",
            "The best setting at other loads. Knee: throughput over latency is highest there. "
            "Cliff: preemption begins. Shaded: the SLA is broken.",
            grid(figures.load_panels(result)),
        ),
        _trade_off(result),
        _points(result),
        _provenance(result),
    )
    return page(f"{result['scenario']}: sizing", parts, STYLE)


# ---------------------------------------------------------------- the answer


def _header(result: Result) -> str:
    kind, word = ("good", "Calibrated") if words.calibrated(result) else ("warn", "Uncalibrated")
    notes = "".join(f'<p class="note warn">{escape(note)}</p>' for note in result.get("notes", ()))
    return (
        f"<header>\n<h1>{escape(result['scenario'])}: which flags to serve with</h1>\n"
        f'<p class="note {kind}"><b>{word} step times:</b> {escape(result["calibration"])}.</p>\n'
        f"{notes}</header>"
    )


def _answer(result: Result) -> str:
    kind = "bad" if result["best"]["met"] is False else "good"
    return f'<section class="answer {kind}"><p>{_told(words.answer(result))}</p></section>'


def _told(text: str) -> str:
    """Text with its numbers and units kept on one line, its first word strong."""
    first, colon, rest = escape(text).partition(": ")
    return f"<b>{first}{colon}</b>{rest}" if first in ("Yes", "No") else escape(text)


def _command(result: Result) -> str:
    title = "Serve with" if result["best"]["met"] is not False else "The closest setting"
    lines = "\n".join(
        escape(line) for line in words.command_lines(result["vllm_command"], ONE_FLAG)
    )
    return f'<section class="command"><h2>{title}</h2><pre><code>{lines}</code></pre></section>'


def _cards(result: Result) -> str:
    best, default = result["best"], result["default"]
    sent = words.sent_per_s(result)
    spread = words.interval(best)
    of = f"of {units.significant(sent)} sent" if sent else ""
    load, breaks = result["headroom"]["load"], result["headroom"]["breaks"]
    cliff = result["cliff"]["load"]
    most = words.largest_load(result)
    cards = [
        card(
            "Requests per second in the SLA",
            units.significant(best["goodput_per_s"]),
            ", ".join(filter(None, (of, spread))),
        ),
        card(
            f"Against {words.DEFAULT}",
            words.relative(best["goodput_per_s"], default and default["goodput_per_s"]),
            f"which serve {units.significant(default['goodput_per_s'])}, "
            f"SLA {words.met_words(default['met'])}"
            if default
            else "they do not start",
        ),
        card(
            "Load until a limit breaks",
            words.factor(load) if load is not None else units.NONE,
            escape(words.clause_title(breaks)) if breaks else "no limit breaks up to there",
        ),
        card(
            "Load until preemption",
            words.factor(cliff) if cliff else f"&gt; {words.factor(most)}" if most else units.NONE,
            f"{result['cliff']['preemptions']:,} preemptions there" if cliff else "none seen",
        ),
        card(
            "Output tokens per second",
            units.significant(best["output_tokens_per_s"]),
            f"on {result['devices']:,} device{'s' if result['devices'] > 1 else ''}",
        ),
        card(
            "Tokens per second of a user",
            words.number(best["tokens_per_s_per_user"]),
            f"P99 gap {units.seconds(best['itl_p99_s'])}",
        ),
        card(
            "KV cache at its peak",
            units.percent(best["kv_peak_use"]),
            f"{units.count(best['preemptions'])} preemptions",
        ),
    ]
    if best["cost_per_million_output_tokens"] is not None:
        per_hour = units.dollars(result["price_per_hour"])
        per_million = units.dollars(best["cost_per_million_output_tokens"])
        cards.append(card("Per million output tokens", per_million, f"{per_hour} an hour"))
    return f'<section class="cards">{"".join(cards)}</section>'


def _sla(result: Result) -> str:
    clauses = result["sla"]
    if not clauses:
        return ""
    met = result["best"]["met"] is not False
    kind, title = ("good", "SLA met") if met else ("bad", "SLA missed")
    missed = sum(not words.clause_met(clause) for clause in clauses)
    told = (
        f"{missed} of {len(clauses)} clauses missed."
        if missed
        else "Every clause holds in the mean of the runs."
    )
    note = f"{told} Probability: share of runs in which it holds, with its 90 % interval."
    head = ("", "Clause", "Simulated", "Limit", "Of limit", "Probability")
    rows = table(head, [_clause_row(clause) for clause in clauses], "sla")
    return f'<section class="verdict {kind}"><h2>{title}</h2><p>{note}</p>{rows}</section>'


def _clause_row(clause: Mapping[str, Any]) -> tuple[str, ...]:
    kind, mark = ("good", "✓") if words.clause_met(clause) else ("bad", "✗")
    name, value, limit = clause["clause"], clause["value"], clause["limit"]
    return (
        f'<b class="mark {kind}">{mark}</b>',
        escape(words.clause_title(name)),
        units.clause_number(name, value),
        units.clause_number(name, limit),
        units.NONE if value is None or not limit else bar(value / limit, kind),
        escape(words.probability(clause)),
    )


def _reasons(result: Result) -> str:
    facts = (
        ("What binds", result["binding"]),
        ("Headroom", words.headroom(result)),
        ("Cliff", words.cliff(result)),
        ("Block size", result["block_size"]),
        ("What to measure next", words.lever(result)),
    )
    told = "".join(f"<dt>{name}</dt><dd>{escape(_upper(fact))}.</dd>" for name, fact in facts)
    return section("Why, and how far it carries", "", f"<dl>{told}</dl>")


def _upper(text: str) -> str:
    """As the start of a sentence; the name of a flag stays as it is."""
    first = text.partition(" ")[0]
    return (text if "_" in first else text[:1].upper() + text[1:]).rstrip(".")


# ---------------------------------------------------------------- alternatives


def _choices(result: Result) -> str:
    """Best, runner-up and defaults side by side, a number a row."""
    named = {
        "Best": result["best"],
        "Runner-up": result["runner_up"],
        "Defaults": result["default"],
    }
    choices = {name: choice for name, choice in named.items() if choice is not None}
    best = result["best"]
    rows = [
        (words.knob_name(key), *(_knob(choice, key) for choice in choices.values()))
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
        f"{_upper(words.distance(result))}.",
        table(("", *choices), rows, "choices"),
    )


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


def _heat(result: Result) -> str:
    low, high = goodput_range(result)
    key = (
        f'<span>{units.significant(low)} <i class="ramp"></i>{units.significant(high)} requests/s '
        "within the SLA</span>"
        '<span><i class="missed"></i>misses the SLA</span>'
        '<span><i class="edge"></i>boundary of the SLA</span>'
        "<span>&#9733; best</span><span>&#9671; defaults</span>"
        "<span>&times; does not start</span>"
        '<span><i class="blank"></i>not simulated</span>'
    )
    left = [point for point in result["points"] if point["goodput_per_s"] is None]
    note = f"Goodput of {len(words.simulated(result)):,} points. "
    if len(varied(result)) > 3:
        names = ", ".join(words.knob_name(key) for key in varied(result)[3:])
        note += f"Each cell shows the best over {escape(names)}. "
    if left:
        note += (
            f"{len(left):,} others were not simulated: they do not start, cannot keep up by their "
            "bounds, or act as one that was."
        )
    return section(
        "Goodput by setting", note, f'<div class="key">{key}</div>{grid(heat_maps(result))}'
    )


def _trade_off(result: Result) -> str:
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


def _points(result: Result) -> str:
    """Simulated points by goodput, then those never simulated, folded where there are many."""
    done = sorted(words.simulated(result), key=lambda point: -point["goodput_per_s"])
    failed = [p for p in result["points"] if p["goodput_per_s"] is None and p["error"] is not None]
    skipped = [p for p in result["points"] if p["goodput_per_s"] is None and p["error"] is None]
    names = [escape(words.knob_name(key)).replace("_", "_<wbr>") for key in result["knobs"]]
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


def _provenance(result: Result) -> str:
    return (
        f"<footer><p>servecast {escape(str(result['version']))}, scenario "
        f"{escape(result['scenario'])}, objective {escape(result['objective'])}. "
        f"{escape(_upper(words.effort(result)))}. "
        f"Step times: {escape(result['calibration'])}.</p></footer>"
    )
