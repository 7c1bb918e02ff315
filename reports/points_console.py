"""Constants of an SRAM device on a terminal, and the speeds that they are held against."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from servecast.reports import units


def render_points(found: Mapping[str, Any]) -> RenderableType:
    """One row a point: measured, predicted, and what the fitted points leave open."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("tokens/s of one user")
    for name in ("measured", "predicted", "left open", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["points"]:
        mark = "✓" if row["inside"] else "✗"
        drafts = "" if row["drafts"] == "no" else f", drafts {row['drafts']}"
        table.add_row(
            f"{row['model']} on {row['units'] or 'enough'} x {row['hardware']}{drafts}",
            units.significant(row["measured"]),
            units.significant(row["predicted"]),
            f"{units.significant(row['low'])} to {units.significant(row['high'])}",
            f"{mark} {'fitted' if row['fitted'] else 'left out'}",
        )
    constants = found["constants"]
    told = (
        f"fixed {units.seconds(constants['fixed_s'])} a stage, {constants['hops']:.3g} times the "
        f"side, {constants['words']:.3g} times a core's words, a wafer to the next "
        f"{units.seconds(constants['link_s'])}"
    )
    notes = [Text(note, "dim") for note in found["notes"]]
    return Group(table, Text(told), Text(f"written to {found['profile']}", "dim"), *notes)
