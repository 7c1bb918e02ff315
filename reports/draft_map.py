"""The map of speculation: numbers of drafts along, loads down, how many times as fast inside."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from servecast.reports.page import section, table
from servecast.reports.svg import BOTTOM, COLOURS, TOP, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType

#: Height of a row of the map, and the room for names of rows, in points.
CELL, NAMES = 30, 104

#: Strength of the colour at the strongest.
STRONG = 0.6

SMALL = 10

SHORT = {"memory": "m", "acceptance": "a", "verification": "v", "drafting": "d"}

LEGEND = (
    "* the best of a row; slower because of m memory, a acceptance, v verification cost, "
    "d drafting (times as fast as without drafts, mean end-to-end time, same seeds)"
)


def _tokens(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({point["tokens"] for row in rows for point in row["points"]})


def _name(row: Mapping[str, Any]) -> str:
    parts = [
        f"{key} x{value:g}" if key == "load" else f"{key.rpartition('.')[2]} {value}"
        for key, value in row["changes"].items()
    ]
    return ", ".join(parts) or "as it is"


def _cells(row: Mapping[str, Any], tokens: Sequence[int]) -> list[str]:
    by_tokens = {point["tokens"]: point for point in row["points"]}
    cells = []
    for count in tokens:
        point = by_tokens.get(count)
        if point is None:
            cells.append("-")
            continue
        best = "*" if count == row["best"] else ""
        cells.append(f"{point['speedup']:.2f}{SHORT.get(point['cause'] or '', '')}{best}")
    return cells


def render_draft_map(found: Mapping[str, Any]) -> "RenderableType":
    """On a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    tokens = _tokens(found["rows"])
    lines = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    lines.add_column("drafts")
    for count in tokens:
        lines.add_column(str(count), justify="right", no_wrap=True)
    for row in found["rows"]:
        lines.add_row(_name(row), *_cells(row, tokens))
    words = [Text(line) for line in found["words"]]
    return Group(Text("Where drafts pay", "bold"), lines, Text(LEGEND, "dim"), *words)


def draft_map_section(found: Mapping[str, Any] | None) -> str:
    """On a page: figure, table, and what it says."""
    if found is None:
        return ""
    tokens = _tokens(found["rows"])
    rows = [(escape(_name(row)), *_cells(row, tokens)) for row in found["rows"]]
    items = "".join(f"<li>{escape(line)}</li>" for line in found["words"])
    return section(
        "Where drafts pay",
        escape(f"{LEGEND[:1].upper()}{LEGEND[1:]}. The line is break-even."),
        f"<figure>{map_figure(found)}</figure>"
        + table(("Drafts", *map(str, tokens)), rows, "latency")
        + f"<ul>{items}</ul>",
    )


def map_figure(found: Mapping[str, Any]) -> str:
    """Cells bluer the faster, redder the slower, and the line between them; ringed the best."""
    rows, tokens = found["rows"], _tokens(found["rows"])
    speeds = [{point["tokens"]: point["speedup"] for point in row["points"]} for row in rows]
    widest = max((abs(s - 1) for row in speeds for s in row.values()), default=0.0) or 1.0

    def draw(axes: "Axes") -> None:
        from matplotlib.patches import Rectangle

        for y, (row, speed) in enumerate(zip(rows, speeds, strict=True)):
            for x, count in enumerate(tokens):
                if count not in speed:
                    continue
                colour = COLOURS["blue" if speed[count] >= 1 else "vermillion"]
                alpha = STRONG * abs(speed[count] - 1) / widest
                look: dict[str, Any] = {"facecolor": colour, "alpha": alpha, "linewidth": 0}
                axes.add_patch(Rectangle((x, y), 1, 1, **look))
                if count == row["best"]:
                    ring: dict[str, Any] = {"fill": False, "edgecolor": COLOURS["ink"]}
                    axes.add_patch(
                        Rectangle((x + 0.05, y + 0.07), 0.9, 0.86, linewidth=1.2, **ring)
                    )
                axes.annotate(
                    f"{speed[count]:.2f}",
                    (x + 0.5, y + 0.5),
                    ha="center",
                    va="center",
                    fontsize=SMALL,
                    color=COLOURS["ink"],
                )
        for start, end in _borders(speeds, tokens):
            axes.plot(*zip(start, end, strict=True), color=COLOURS["ink"], linewidth=2.2)
        axes.set_xlim(0, len(tokens))
        axes.set_ylim(len(rows), 0)
        axes.grid(visible=False)
        axes.tick_params(length=0, labelsize=SMALL)
        axes.set_xticks([x + 0.5 for x in range(len(tokens))], [str(count) for count in tokens])
        axes.set_yticks([y + 0.5 for y in range(len(rows))], [_name(row)[:18] for row in rows])
        axes.set_xlabel("drafts a round", fontsize=SMALL + 1)

    height = CELL * len(rows) + TOP + BOTTOM
    return panel(draw, "How many times as fast, by drafts and load", height=height, left=NAMES)


def _borders(
    speeds: Sequence[Mapping[int, float]], tokens: Sequence[int]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Edges between cells that pay and cells that do not."""
    found: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for y, row in enumerate(speeds):
        for x, count in enumerate(tokens):
            here = row.get(count)
            right = row.get(tokens[x + 1]) if x + 1 < len(tokens) else None
            below = speeds[y + 1].get(count) if y + 1 < len(speeds) else None
            if here is None:
                continue
            if right is not None and (here >= 1) != (right >= 1):
                found.append(((x + 1, y), (x + 1, y + 1)))
            if below is not None and (here >= 1) != (below >= 1):
                found.append(((x, y + 1), (x + 1, y + 1)))
    return found
