"""What-if and comparison on a terminal of 80 columns, with or without colour."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from servecast.reports import deltas, units
from servecast.reports.deltas import HEADLINES, metric_name, metric_value
from servecast.reports.draft_map import render_draft_map

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

#: Points that the table shows; the report and --json have all.
POINTS_SHOWN = 24

#: Reasons told of a point, and points that have more than one told.
REASONS, POINTS_EXPLAINED = 3, 6

HEADS = {
    "goodput_per_s": "goodput/s",
    "ttft_p95_s": "ttft p95",
    "itl_p99_s": "itl p99",
    "e2e_p95_s": "e2e p95",
    "output_tokens_per_s": "out tok/s",
}

STYLES = {"good": "green", "bad": "red", "": "dim"}


def render_whatif(result: Mapping[str, Any]) -> "RenderableType":
    """What `console.print` of rich shows: the grid, then what changed and why."""
    from rich.console import Group
    from rich.text import Text

    n = len(result["seeds"])
    seeds = f"{n} replication{'s' if n > 1 else ''} a point, the same arrivals in all"
    shown, all_points = result["points"][:POINTS_SHOWN], result["points"]
    parts: list[RenderableType] = [
        Text(f"{result['scenario']}: what if", style="bold"),
        Text(f"{seeds}; below each value its change against the base, ± 95 %", "dim"),
        "",
        _points(result["base"], shown),
    ]
    if len(shown) < len(all_points):
        parts.append(Text(f"{len(all_points) - len(shown)} more points: see the report", "dim"))
    if result.get("drafts"):
        parts += ["", render_draft_map(result["drafts"])]
    if reasons := _reasons(shown):
        parts += ["", reasons]
    return Group(*parts, "", _footer(result))


def _points(base: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("point", overflow="fold")
    table.add_column("sla", no_wrap=True)
    for name in HEADLINES:
        table.add_column(HEADS[name], justify="right", no_wrap=True)
    table.add_row(
        Text("base"), _sla(base), *(metric_value(n, base["metrics"][n]) for n in HEADLINES)
    )
    for point in points:
        if point["error"] is not None:
            cells = [Text(units.NONE) for _ in HEADLINES]
            table.add_row(_lines(point["label"]), Text("no start", "yellow"), *cells)
        else:
            table.add_row(_lines(point["label"]), _sla(point), *_values(point))
    return table


def _lines(label: str) -> "Text":
    from rich.text import Text

    return Text(label.replace(", ", "\n"))


def _values(point: Mapping[str, Any]) -> "list[Text]":
    from rich.text import Text

    cells = []
    for name in HEADLINES:
        delta = point["deltas"].get(name)
        below = deltas.relative_text(delta, name).replace(" ±", "\n±")
        told = (f"\n{below}", STYLES[deltas.judgement(delta)])
        cells.append(Text.assemble(metric_value(name, point["metrics"][name]), told))
    return cells


def _sla(point: Mapping[str, Any]) -> "Text":
    """Met in so many replications; below it the clauses that mostly did not hold."""
    from rich.text import Text

    share = point["sla_met"]
    if share is None:
        return Text(units.NONE)
    mark, style = ("✓", "green") if deltas.mostly(share) else ("✗", "bold red")
    missed = [deltas.clause_title(row) for row in point["sla"] if not deltas.mostly(row)]
    return Text.assemble(
        (f"{mark} {deltas.held(share)}", style), *(f"\n{clause}" for clause in missed[:2])
    )


def _reasons(points: Sequence[Mapping[str, Any]]) -> "Table | None":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", max_width=22)
    table.add_column()
    told = REASONS if len(points) <= POINTS_EXPLAINED else 1
    for point in points:
        if point["error"] is not None:
            table.add_row(point["label"], Text(point["error"], "yellow"))
        for number, entry in enumerate(point["explanation"][:told]):
            table.add_row("" if number else Text(point["label"]), Text(entry["text"]))
    return table if table.row_count else None


def _footer(result: Mapping[str, Any]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for note in result["notes"]:
        table.add_row(Text("note", "bold yellow"), Text(note))
    label = result["calibration"]
    if label:
        table.add_row("step times", Text(label, "yellow" if "uncalibrated" in label else ""))
    return table


# ---------------------------------------------------------------- A and B


def render_compare(result: Mapping[str, Any]) -> "RenderableType":
    """What `console.print` of rich shows: the verdict, the metrics, where A and B part."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        *(_side(side, result[side.lower()]) for side in ("A", "B")),
        Text(_differs(result["differs"]), "dim"),
        "",
        Text(result["verdict"], "bold"),
    ]
    if result["metrics"]:
        parts += ["", _metrics(result["metrics"])]
    return Group(*parts, "", _facts(result), _footer(result))


def _side(letter: str, side: Mapping[str, Any]) -> "Text":
    from rich.text import Text

    where = f"{side['replicas']} x {side['hardware']}" if side["replicas"] > 1 else side["hardware"]
    return Text.assemble((f"{letter}  {side['name']}", "bold"), f": {side['model']} on {where}")


def _differs(rows: Sequence[Mapping[str, Any]], most: int = 4) -> str:
    if not rows:
        return "A and B ask for the same deployment and load"
    told = [f"{row['key']} {units.flag(row['a'])} | {units.flag(row['b'])}" for row in rows[:most]]
    more = f", and {len(rows) - most} more" if len(rows) > most else ""
    return f"differ in {'; '.join(told)}{more}"


def _metrics(rows: Sequence[Mapping[str, Any]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("metric", ratio=1)
    for head in ("A", "B", "B - A, ± 95 %", "P(B better)"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        name, delta = row["metric"], row["delta"]
        table.add_row(
            metric_name(name),
            metric_value(name, row["a"]),
            metric_value(name, row["b"]),
            Text(deltas.relative_text(delta, name), STYLES[deltas.judgement(delta)]),
            deltas.probability(row["p_b_better"]),
        )
    return table


def _facts(result: Mapping[str, Any]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for letter in ("a", "b"):
        for number, row in enumerate(result[letter]["sla"]):
            table.add_row("" if number else f"sla {letter.upper()}", _clause(row))
    for number, entry in enumerate(result["explanation"][:REASONS]):
        table.add_row("" if number else "why", Text(entry["text"]))
    if result["parting"] is not None:
        table.add_row("they part", Text(parting_words(result["parting"])))
    if result["canary"] is not None:
        for line in _canary_lines(result["canary"]):
            table.add_row("canary", Text(line))
    return table


def _clause(row: Mapping[str, Any]) -> "Text":
    from rich.text import Text

    mark, style = ("✓", "green") if deltas.mostly(row) else ("✗", "bold red")
    value, limit = (units.clause_number(row["clause"], row[key]) for key in ("value", "limit"))
    return Text.assemble(
        (f"{mark} {deltas.clause_title(row)}", style),
        f" {value}, limit {limit}, held in {deltas.held(row)}",
    )


def parting_words(parting: Mapping[str, Any]) -> str:
    """Where A and B part, in a sentence."""
    loads = [entry["load"] for entry in parting["loads"]]
    if parting["load"] is None:
        return f"not between x{loads[0]:g} and x{loads[-1]:g} of the load" if loads else "not tried"
    if parting["below"] is None:
        return f"already at x{parting['load']:g} of the load: {parting['why']}"
    return (
        f"at x{parting['load']:g} of the load (not yet at x{parting['below']:g}): {parting['why']}"
    )


def _canary_lines(canary: Mapping[str, Any]) -> list[str]:
    lines = []
    for letter in ("a", "b"):
        side = canary[letter]
        told = [
            f"{HEADS[name]} {metric_value(name, side['metrics'][name]['mean'])}"
            for name in ("ttft_p95_s", "itl_p99_s", "e2e_p95_s")
            if name in side["metrics"]
        ]
        sla = f", SLA held in {deltas.held(side['sla_met'])}" if side["sla_met"] else ""
        share = canary["share"] if letter == "b" else 1 - canary["share"]
        lines.append(
            f"{letter.upper()} with {units.percent(share)} ({side['requests']:,.0f} requests): "
            f"{', '.join(told)}{sla}"
        )
    return lines
