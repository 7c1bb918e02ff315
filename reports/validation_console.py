"""Predictions beside measured runs, on the terminal."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def render_validation(answer: Mapping[str, Any]) -> RenderableType:
    """A row a measured value, then medians by metric and how many intervals hold."""
    lines: list[RenderableType] = []
    for name in dict.fromkeys(row["case"] for row in answer["rows"]):
        lines.append(Text(name, "bold"))
        lines.append(_table(row for row in answer["rows"] if row["case"] == name))
    lines.append(Text(""))
    for found in answer.get("engines", ()):
        error = found["median_step_error"]
        steps = "" if error is None else f", {found['steps']} steps, median error {error:.1%}"
        lines.append(Text(f"{found['case']}: {found['engine']}{steps}"))
    for name, found in answer["metrics"].items():
        lines.append(
            Text(
                f"{name.replace('_s ', ' ')}: {found['values']} values, median error "
                f"{found['median_error']:.1%} ({found['median_signed_error']:+.1%} signed), worst "
                f"{found['worst_error']:.1%}"
                + ("" if found["inside"] is None else f", {found['inside']:.0%} inside")
            )
        )
    if answer["inside"] is None:
        lines.append(Text("No intervals: they come from a profile's kernels (--profile).", "dim"))
    else:
        lines.append(Text(f"inside the 90 % interval: {answer['inside']:.0%}"))
    return Group(*lines)


#: Columns, and how wide they are, so that the tables of all cases stand under one another.
COLUMNS = {"": 12, "measured": 10, "predicted": 10, "error": 8, "90 % interval": 20, " ": 7}


def _table(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for title, width in COLUMNS.items():
        justify: Literal["left", "right"] = "right" if title.strip() else "left"
        table.add_column(title, justify=justify, no_wrap=True, min_width=width)
    for row in rows:
        unit, scale = ("ms", 1e3) if row["measured"] < 1 else ("s", 1.0)
        low, high = row["lo"], row["hi"]
        known = low is not None
        table.add_row(
            f"  {row['metric'].replace('_s ', ' ')}",
            f"{scale * row['measured']:.4g} {unit}",
            f"{scale * row['predicted']:.4g} {unit}",
            f"{row['error']:+.1%}",
            f"{scale * low:.4g} to {scale * high:.4g} {unit}" if known else "",
            "" if not known or row["inside"] else Text("outside", "yellow"),
        )
    return table
