"""Goodput of every combination of two or three knobs, and where the SLA ends."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from servecast.reports import sizing_words as words
from servecast.reports import units
from servecast.reports.sizing_words import Result
from servecast.reports.svg import COLOURS, LEFT, TOP, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = Mapping[str, Any]
Cells = dict[tuple[int, int], Point]

#: Points below the axes: ticks and the name of a knob.
BELOW = 44

#: Height of a row of cells and of the strip above them, in points.
ROW, STRIP = 28, 16

#: More columns than this leave no room for a number in a cell, more than that for three digits.
NUMBERED_COLUMNS, EXACT_COLUMNS = 10, 7

#: Strength of the colour of the lowest and the highest goodput.
FAINT, STRONG = 0.08, 0.62

#: A narrower range of goodput than this share still spans all colours.
LEAST_RANGE = 0.05

FONT = 10


def varied(result: Result) -> list[str]:
    """Knobs with several values, in order; with none, the first."""
    knobs = result["knobs"]
    return [key for key in knobs if len(knobs[key]) > 1] or list(knobs)[:1]


def heat_axes(result: Result) -> tuple[str, str | None, str | None]:
    """Knobs along the columns, along the rows, and over the panels.

    Of three the second goes over the panels, for the first and the third are those that trade
    slots against waste: max_num_seqs and block_size.
    """
    columns, *others = varied(result)
    rows = others[1] if len(others) > 1 else others[0] if others else None
    return columns, rows, others[0] if len(others) > 1 else None


#: How the stage of a point begins that acts as another: `same as KEY VALUE, KEY VALUE`.
SAME = "same as "


def with_twins(result: Result) -> list[Point]:
    """All points; those that act as a simulated one with what that one gave."""
    by_changes = {_key(point["changes"]): point for point in result["points"]}
    told = []
    for point in result["points"]:
        twin = by_changes.get(_key(_as_changes(point)))
        if twin is not None and twin is not point and twin["goodput_per_s"] is not None:
            point = {**twin, "changes": point["changes"], "stage": point["stage"]}
        told.append(point)
    return told


def _as_changes(point: Point) -> Mapping[str, Any]:
    """The changes of the point that this one acts as; its own if it acts as no other."""
    if not point["stage"].startswith(SAME):
        return point["changes"]  # type: ignore[no-any-return]
    named = (part.rpartition(" ") for part in point["stage"].removeprefix(SAME).split(", "))
    return {**point["changes"], **{key: value for key, _, value in named}}


def _key(changes: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Values as text, as a stage names them."""
    return tuple(sorted((key, str(value)) for key, value in changes.items()))


def heat_maps(result: Result) -> list[tuple[str, str]]:
    """Caption and panel of each value of the knob over the panels: goodput by cell."""
    columns, rows, panels = heat_axes(result)
    knobs = result["knobs"]
    values = knobs[panels] if panels else [None]
    points = with_twins(result)
    return [
        (
            f"{words.knob_name(panels)} {units.flag(value)}"
            if panels
            else f"By {words.knob_name(columns)}",
            _heat_map(
                result, columns, rows, _cells(points, knobs, (columns, rows, panels), value), number
            ),
        )
        for number, value in enumerate(values)
    ]


def goodput_range(result: Result) -> tuple[float, float]:
    """Goodput of the faintest and the strongest colour."""
    seen = [point["goodput_per_s"] for point in words.simulated(result)]
    high = max(seen, default=1.0) or 1.0
    return min(min(seen, default=0.0), high * (1 - LEAST_RANGE)), high


def _cells(
    points: Sequence[Point],
    knobs: Mapping[str, Sequence[Any]],
    axes: tuple[str, str | None, str | None],
    value: Any,
) -> Cells:
    """The best point of each cell, by column and row: of several, knobs beyond three vary."""
    columns, rows, panels = axes
    cells: Cells = {}
    for point in points:
        changes = point["changes"]
        if panels is not None and changes[panels] != value:
            continue
        row = knobs[rows].index(changes[rows]) if rows else 0
        at = knobs[columns].index(changes[columns]), row
        if at not in cells or _rank(point) > _rank(cells[at]):
            cells[at] = point
    return cells


def _rank(point: Point) -> tuple[bool, bool, float, bool]:
    goodput = point["goodput_per_s"]
    return goodput is not None, point["met"] is not False, goodput or 0.0, point["error"] is None


def _heat_map(result: Result, columns: str, rows: str | None, cells: Cells, number: int) -> str:
    knobs = result["knobs"]
    width, height = len(knobs[columns]), len(knobs[rows]) if rows else 1

    def draw(axes: "Axes") -> None:
        _frame(axes, knobs[columns], knobs[rows] if rows else [])
        axes.set_xlabel(words.knob_name(columns), fontsize=FONT + 1)
        if rows:
            axes.annotate(
                words.knob_name(rows),
                (0, 1),
                (4 - LEFT, -8),
                xycoords="axes fraction",
                textcoords="offset points",
                color=COLOURS["muted"],
                fontsize=FONT + 1,
            )
        _fill(axes, cells, goodput_range(result))
        if width <= NUMBERED_COLUMNS:
            _number(axes, cells, 3 if width <= EXACT_COLUMNS else 2, _marked(result))
        _cross_out(axes, [at for at, point in cells.items() if point["error"] is not None])
        for ends in _boundary(cells):
            axes.plot(*ends, color=COLOURS["ink"], linewidth=2.2, solid_capstyle="round")
        _mark(axes, result, cells)

    size = height * ROW + STRIP + TOP + BELOW
    return panel(draw, f"Goodput by setting, {number + 1}", height=size, bottom=BELOW)


def _frame(axes: "Axes", columns: Sequence[Any], rows: Sequence[Any]) -> None:
    height = max(len(rows), 1)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(0, height + STRIP / ROW)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0, labelsize=FONT if len(columns) > 6 else FONT + 1)
    axes.set_xticks([i + 0.5 for i in range(len(columns))], [units.flag(v) for v in columns])
    axes.set_yticks([i + 0.5 for i in range(len(rows))], [units.flag(v) for v in rows])


def _fill(axes: "Axes", cells: Cells, span: tuple[float, float]) -> None:
    """Colour by goodput, hatched where the SLA is missed; outlines where nothing was simulated."""
    from matplotlib.patches import Rectangle

    low, high = span
    for (column, row), point in cells.items():
        corner, size = (column + 0.03, row + 0.03), 0.94
        goodput = point["goodput_per_s"]
        if goodput is None:
            axes.add_patch(Rectangle(corner, size, size, fill=False, color=COLOURS["grid"]))
            continue
        share = (goodput - low) / (high - low)
        missed = point["met"] is False
        colour = COLOURS["vermillion" if missed else "blue"]
        alpha = round(FAINT + (STRONG - FAINT) * share, 2)
        axes.add_patch(Rectangle(corner, size, size, color=colour, alpha=alpha, linewidth=0))
        if missed:
            lines = Rectangle(corner, size, size, fill=False, hatch="///", linewidth=0)
            lines.set(edgecolor=colour, alpha=0.6)
            axes.add_patch(lines)


def _number(axes: "Axes", cells: Cells, digits: int, marked: Sequence[Any]) -> None:
    """Goodput in the middle of a cell, lower where a mark stands above it."""
    for (column, row), point in cells.items():
        if point["goodput_per_s"] is None:
            continue
        axes.text(
            column + 0.5,
            row + (0.28 if point["changes"] in marked else 0.48),
            ("=" if point["stage"].startswith(SAME) else "")
            + units.significant(point["goodput_per_s"], digits),
            fontsize=FONT,
            horizontalalignment="center",
            verticalalignment="center",
        )


def _cross_out(axes: "Axes", at: Sequence[tuple[int, int]]) -> None:
    for column, row in at:
        for ends in ((0.35, 0.65), (0.65, 0.35)):
            x = [column + 0.38, column + 0.62]
            axes.plot(x, [row + ends[0], row + ends[1]], color=COLOURS["muted"], linewidth=1.2)


def _boundary(cells: Cells) -> Iterator[tuple[list[int], list[int]]]:
    """Ends of the edges between cells that meet the SLA and cells known not to."""
    good = {at for at, point in cells.items() if point["goodput_per_s"] and point["met"]}
    bad = {
        at
        for at, point in cells.items()
        if point["error"] is not None or (point["goodput_per_s"] is not None and not point["met"])
    }
    for column, row in sorted(good):
        if (column + 1, row) in bad:
            yield [column + 1, column + 1], [row, row + 1]
        if (column - 1, row) in bad:
            yield [column, column], [row, row + 1]
        if (column, row + 1) in bad:
            yield [column, column + 1], [row + 1, row + 1]
        if (column, row - 1) in bad:
            yield [column, column + 1], [row, row]


def _mark(axes: "Axes", result: Result, cells: Cells) -> None:
    """A star on the best, a diamond on the defaults; on one cell the star stands for both."""
    marked = _marked(result)
    for (column, row), point in cells.items():
        if point["changes"] in marked:
            best = point["changes"] == result["best"]["changes"]
            axes.plot(
                column + 0.5,
                row + 0.74,
                "*" if best else "D",
                markersize=9 if best else 4.5,
                color=COLOURS["ink"],
                markerfacecolor=COLOURS["ink"] if best else "none",
            )


def _marked(result: Result) -> list[Mapping[str, Any]]:
    choices = (result["best"], result["default"])
    return [choice["changes"] for choice in choices if choice is not None]
