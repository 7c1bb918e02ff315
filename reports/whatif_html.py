"""What-if and comparison as one HTML file each, without scripts or anything from elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from servecast.reports import deltas, units
from servecast.reports.deltas import HEADLINES, metric_name, metric_value
from servecast.reports.draft_map import draft_map_section
from servecast.reports.page import grid, page, section, table
from servecast.reports.whatif_console import parting_words
from servecast.reports.whatif_figures import goodput_by_load, heat_map, whiskers

#: Points whose explanations stand open; of more only the first.
EXPLAINED = 60

#: Metrics of the figure of A and B: those whose percentages share a scale.
DRAWN = (*HEADLINES, "ttft_p50_s", "tpot_mean_s", "e2e_mean_s", "cost_per_million_output_tokens")

#: Metrics of the map of two varied keys.
MAPPED = ("goodput_per_s", "ttft_p95_s", "itl_p99_s", "output_tokens_per_s")

Rows = Sequence[Mapping[str, Any]]


def render_whatif_report(result: Mapping[str, Any]) -> str:
    """The whole page of `servecast whatif`; equal input gives equal bytes."""
    n = len(result["seeds"])
    varied = "; ".join(_varied(entry) for entry in result["varied"]) or "nothing"
    head = (
        f'<p class="lead">Varied: {varied}</p>'
        f"<p>{len(result['points']):,} points, {n:,} replication{'s' if n > 1 else ''} each. Every "
        "point meets the same arrivals, lengths and prefixes (common random numbers), so what "
        "differs from the base is the change's own.</p>"
    )
    parts = (
        _header(f"{result['scenario']}: what if", head, result),
        _notes(result["notes"]),
        _sla_by_point(result),
        draft_map_section(result.get("drafts")),
        _maps(result),
        _differences(result["points"]),
        _metrics_by_point(result),
        _explanations(result["points"]),
        _footer(result),
    )
    return page(f"{result['scenario']}: what if", parts)


def render_compare_report(result: Mapping[str, Any]) -> str:
    """The whole page of `servecast compare`; equal input gives equal bytes."""
    a, b = result["a"], result["b"]
    title = f"{a['name']} and {b['name']}" if a["name"] != b["name"] else f"{a['name']}: A and B"
    n = len(result["seeds"])
    sides = "<br>".join(_side(letter, side) for letter, side in (("A", a), ("B", b)))
    told = f"<p>Paired on the same arrivals, {n:,} replication{'s' if n > 1 else ''} of each.</p>"
    parts = (
        _header(title, f'<p class="lead">{sides}</p>{told}', result),
        f'<section><h2>Verdict</h2><p class="lead">{escape(result["verdict"])}</p></section>',
        _notes(result["notes"]),
        _settings(result["differs"]),
        _sla_of_both(a, b),
        _metrics_of_both(result),
        _why(result["explanation"]),
        _parting(result["parting"]),
        _canary(result["canary"]),
        _footer(result),
    )
    return page(title, parts)


# ---------------------------------------------------------------- both pages


def _header(title: str, body: str, result: Mapping[str, Any]) -> str:
    label = result["calibration"]
    known = "uncalibrated" not in label.lower()
    kind, word = ("good", "Calibrated") if known else ("warn", "Uncalibrated")
    rests = (
        f'<p class="note {kind}"><b>{word} step times:</b> {escape(label)}.</p>' if label else ""
    )
    return f"<header>\n<h1>{escape(title)}</h1>\n{body}\n{rests}\n</header>"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="note warn"><h2>Notes</h2><ul>{items}</ul></section>'


def _footer(result: Mapping[str, Any]) -> str:
    seeds = result["seeds"]
    told = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    label = f", step times: {escape(result['calibration'])}" if result["calibration"] else ""
    return f"<footer><p>servecast {escape(result['version'])}, {told}{label}.</p></footer>"


def _mark(share: Mapping[str, Any] | None) -> str:
    """Met or missed, in how many replications."""
    if share is None:
        return units.NONE
    kind, mark = ("good", "✓") if deltas.mostly(share) else ("bad", "✗")
    return f'<b class="mark {kind}">{mark}</b>&nbsp;{deltas.held(share)}'


def _toned(text: str, delta: Mapping[str, Any] | None) -> str:
    kind = deltas.judgement(delta)
    return (
        f'<span class="mark {kind}">{text}</span>' if kind else f'<span class="muted">{text}</span>'
    )


def _reasons(explanation: Rows) -> str:
    if not explanation:
        return (
            '<p class="muted">Nothing changed by 1&nbsp;% or more that the replications tell.</p>'
        )
    items = "".join(
        f"<li><b>{escape(e['what'])}</b>{escape(e['text'].removeprefix(e['what']))}</li>"
        for e in explanation
    )
    return f"<ol>{items}</ol>"


# ---------------------------------------------------------------- what if


def _varied(entry: Mapping[str, Any]) -> str:
    values = ", ".join(escape(units.flag(value)) for value in entry["values"])
    return (
        f"<code>{escape(entry['key'])}</code> {values} (base {escape(units.flag(entry['base']))})"
    )


def _sla_by_point(result: Mapping[str, Any]) -> str:
    """One column a clause: mean value, and in how many replications it held."""
    clauses = result["base"]["sla"]
    if not clauses:
        return ""
    head = ["Point", "SLA"]
    for row in clauses:
        limit = units.clause_number(row["clause"], row["limit"])
        head.append(f"{escape(deltas.clause_title(row))}<br>{limit}")
    rows = []
    for point in (result["base"], *result["points"]):
        if point.get("error") is not None:
            rows.append((_name(point), "does not run", *[units.NONE] * len(clauses)))
            continue
        cells = [
            f"{units.clause_number(row['clause'], row['value'])} {_mark(row)}"
            for row in point["sla"]
        ]
        rows.append((_name(point), _mark(point["sla_met"]), *cells))
    return section(
        "SLA by point",
        "Limits below the clauses are the base's. Mean over replications, and in how many of them "
        "the clause held.",
        table(head, rows),
    )


def _name(point: Mapping[str, Any]) -> str:
    return escape(point["label"]).replace(", ", "<br>")


def _maps(result: Mapping[str, Any]) -> str:
    """Nothing unless two keys are varied."""
    if len(result["varied"]) != 2 or not result["points"]:
        return ""
    drawn = [(metric_name(metric), heat_map(result, metric)) for metric in MAPPED]
    return section(
        "Both keys together",
        "The stronger the colour, the better. ✓ where most replications met the SLA.",
        grid(drawn),
    )


def _differences(points: Rows) -> str:
    shown = [point for point in points if point["error"] is None]
    if not shown:
        return ""
    drawn = [
        (metric_name(name), whiskers([(p["label"], p["deltas"].get(name)) for p in shown], name))
        for name in HEADLINES
    ]
    return section(
        "Change against the base",
        "In percent of the base, with the paired 95&nbsp;% interval: green is better beyond it, "
        "orange worse, grey cannot be told apart from no change.",
        grid(drawn),
    )


def _metrics_by_point(result: Mapping[str, Any]) -> str:
    names = [name for name, value in result["base"]["metrics"].items() if value is not None]
    head = ("Point", *(escape(metric_name(name)).replace(", ", "<br>") for name in names))
    base = result["base"]["metrics"]
    rows = [("base", *(metric_value(name, base[name]) for name in names))]
    for point in result["points"]:
        if point["error"] is None:
            rows.append((_name(point), *(_changed(point, name) for name in names)))
    note = (
        "Mean over replications; below it the change against the base with its 95&nbsp;% interval."
    )
    return section("Every metric", note, table(head, rows))


def _changed(point: Mapping[str, Any], name: str) -> str:
    delta = point["deltas"].get(name)
    value = metric_value(name, point["metrics"][name])
    return f"{value}<br>{_toned(deltas.relative_text(delta, name), delta)}"


def _explanations(points: Rows) -> str:
    if not points:
        return ""
    told = []
    for point in points[:EXPLAINED]:
        body = _reasons(point["explanation"])
        if point["error"] is not None:
            body = f"<p>{escape(point['error'])}</p>"
        elif point["same_as_base"]:
            body = '<p class="muted">Served exactly as the base.</p>'
        told.append(f"<p><b>{escape(point['label'])}</b></p>{body}")
    if len(points) > EXPLAINED:
        told.append(f"<p>{len(points) - EXPLAINED:,} more points are in the JSON output.</p>")
    return section(
        "What changed, and where",
        "Largest first: stages of a request against the base's end-to-end time, parts of the "
        "engine's steps against its step time.",
        "".join(told),
    )


# ---------------------------------------------------------------- A and B


def _side(letter: str, side: Mapping[str, Any]) -> str:
    fleet = f"{side['replicas']} &times; " if side["replicas"] > 1 else ""
    return (
        f"<b>{letter}</b> {escape(side['name'])}: {escape(side['model'])} on "
        f"{fleet}{escape(side['hardware'])}"
    )


def _settings(differs: Rows) -> str:
    if not differs:
        return section("What differs", "", "<p>Nothing: A and B ask for the same.</p>")
    rows = [
        (f"<code>{escape(row['key'])}</code>", *(escape(units.flag(row[s])) for s in ("a", "b")))
        for row in differs
    ]
    return section("What differs", "", table(("Key", "A", "B"), rows))


def _sla_of_both(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    rows = []
    for letter, side in (("A", a), ("B", b)):
        for row in side["sla"]:
            value, limit = (
                units.clause_number(row["clause"], row[key]) for key in ("value", "limit")
            )
            rows.append((letter, escape(deltas.clause_title(row)), value, limit, _mark(row)))
    if not rows:
        return ""
    head = ("", "Clause", "Mean", "Limit", "Held in")
    return section("SLA", "", table(head, rows, "sla"))


def _metrics_of_both(result: Mapping[str, Any]) -> str:
    metrics = result["metrics"]
    if not metrics:
        return ""
    head = ("Metric", "A", "B", "B - A", "95 % interval", "P(B better)")
    rows = [
        (
            escape(metric_name(row["metric"])),
            metric_value(row["metric"], row["a"]),
            metric_value(row["metric"], row["b"]),
            _toned(deltas.relative_text(row["delta"], row["metric"]), row["delta"]),
            deltas.interval_text(row["metric"], row["delta"]),
            deltas.probability(row["p_b_better"]),
        )
        for row in metrics
    ]
    drawn = whiskers(
        [
            (metric_name(row["metric"]), {**row["delta"], "better": row["better"]})
            for row in metrics
            if row["metric"] in DRAWN
        ],
        "B against A",
    )
    return section(
        "Difference by metric",
        f"Paired over seeds. Probability that B is better: {escape(result['method'])}.",
        table(head, rows) + f"<figure>{drawn}</figure>",
    )


def _why(explanation: Rows) -> str:
    if not explanation:
        return ""
    return section("What changed, and where", "From A to B, largest first.", _reasons(explanation))


def _parting(parting: Mapping[str, Any] | None) -> str:
    if parting is None:
        return ""
    rows = []
    for entry in parting["loads"]:
        a, b = entry["goodput_per_s"]
        delta = {**entry["delta"], "better": 1}
        met = [units.NONE if share is None else units.percent(share) for share in entry["met"]]
        told = _toned(deltas.relative_text(delta, "goodput_per_s"), delta)
        rows.append((f"x{entry['load']:g}", *map(units.significant, (a, b)), told, *met))
    head = ("Load", "Goodput of A", "of B", "B - A", "A meets SLA", "B meets SLA")
    words = parting_words(parting)
    figure = grid([("Goodput, requests/s", goodput_by_load(parting))])
    return section("Where they part", f"They part {escape(words)}.", figure + table(head, rows))


def _canary(canary: Mapping[str, Any] | None) -> str:
    if canary is None:
        return ""
    head = ("What each share sees", "A", "B")
    share = (1 - canary["share"], canary["share"])
    sides = (canary["a"], canary["b"])
    rows = [
        ("Share of the requests", *map(units.percent, share)),
        ("Requests a replication", *(units.count(side["requests"]) for side in sides)),
        ("SLA held in", *(_mark(side["sla_met"]) for side in sides)),
    ]
    for name in sides[0]["metrics"]:
        if name in sides[1]["metrics"]:
            cells = (_spread(name, side["metrics"][name]) for side in sides)
            rows.append((escape(metric_name(name)), *cells))
    return section(
        f"Canary: {units.percent(canary['share'])} of the requests go to B",
        "Drawn at random by request. Each side serves only its share: B is lightly loaded, and "
        "what it shows says little of B under the whole load, which the comparison above does.",
        table(head, rows),
    )


def _spread(name: str, entry: Mapping[str, Any]) -> str:
    value = metric_value(name, entry["mean"])
    if entry["lo"] is None:
        return value
    # Student's interval knows no bounds; none of these is below 0, and a share not above 1.
    most = 1.0 if name.endswith("_share") else entry["hi"]
    low = metric_value(name, max(0.0, entry["lo"]))
    high = metric_value(name, min(most, entry["hi"]))
    return f'{value}<br><span class="muted">{low} to {high}</span>'
