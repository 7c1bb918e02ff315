"""Predictions beside measured runs, on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def render_validation(answer: Mapping[str, Any]) -> RenderableType:
    """A row a measured value, then medians by metric and how many intervals hold."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "measured", "predicted", "error", "90 % interval", ""):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    before = None
    for row in answer["rows"]:
        if row["case"] != before:
            table.add_row(Text(row["case"], "bold"))
            before = row["case"]
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
    lines: list[RenderableType] = [table, Text("")]
    for name, found in answer["metrics"].items():
        lines.append(
            Text(
                f"{name.replace('_s ', ' ')}: {found['values']} values, median error "
                f"{found['median_error']:.1%}, worst {found['worst_error']:.1%}"
            )
        )
    if answer["inside"] is None:
        lines.append(Text("No intervals: they come from a profile's kernels (--profile).", "dim"))
    else:
        lines.append(Text(f"inside the 90 % interval: {answer['inside']:.0%}"))
    return Group(*lines)
