"""What a change does, in panels: differences with their intervals, a map of two varied keys, and
goodput against load of two deployments."""

from collections.abc import Mapping, Sequence
from math import log2
from typing import TYPE_CHECKING, Any

from servecast.reports import deltas, units
from servecast.reports.svg import BOTTOM, COLOURS, TOP, message, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Points of a line of a row's name and between rows, room for the names, rows of a panel at most.
LINE, GAP, NAMES, ROWS = 13, 11, 132, 40

#: Longest line of a row's name, in characters, and most lines.
LONGEST, LINES = 22, 3

#: Changes beyond this many percent are drawn at the edge.
WIDEST = 300.0

#: Heights of a cell of the map, of the strip above, and room for its axes, in points.
CELL, HEAD, BELOW, MAP_LEFT = 40, 14, 44, 84

#: Strength of the colour of the worst and of the best cell.
FAINT, STRONG = 0.06, 0.6

#: More columns than this leave no room for numbers.
NUMBERED_COLUMNS = 7

SMALL = 10

TONES = {"good": "green", "bad": "vermillion", "": "muted"}


# ---------------------------------------------------------------- differences


def whiskers(rows: Sequence[tuple[str, Mapping[str, Any] | None]], label: str) -> str:
    """Differences as dots with their 95 % intervals, in percent of the base; the first on top.

    `rows` are names and entries `{mean, lo, hi, relative, better}`; one that has no percentage is
    left out.
    """
    known = [(name, delta) for name, delta in rows if delta is not None and _known(delta)][:ROWS]
    if not known:
        return message("nothing to compare", label)
    edge = _edge([delta for _, delta in known])
    names = [_lines(name) for name, _ in known]
    row = GAP + LINE * max(name.count("\n") + 1 for name in names)

    def draw(axes: "Axes") -> None:
        axes.axvline(0, color=COLOURS["ink"], linewidth=1)
        for place, (_, delta) in enumerate(known):
            _whisker(axes, place, delta, edge)
        axes.set_yticks(range(len(known)), names, fontsize=SMALL)
        axes.tick_params("y", labelcolor=COLOURS["ink"])
        axes.set_ylim(len(known) - 0.4, -0.6)
        axes.set_xlim(-edge * 1.06, edge * 1.06)
        _percent_ticks(axes, edge)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")

    return panel(draw, label, height=row * len(known) + BOTTOM + TOP, left=NAMES)


def _known(delta: Mapping[str, Any]) -> bool:
    return delta["relative"] is not None or delta["mean"] == 0


def _percents(delta: Mapping[str, Any]) -> tuple[float, float, float]:
    """Mean, low and high in percent of the base; without an interval both are the mean."""
    relative = delta["relative"]
    if not relative:
        # No change, or a mean that is zero by chance: its interval has no scale to tell.
        return 0.0, 0.0, 0.0
    scale = 100 * relative / delta["mean"]
    low, high = (delta["mean"] if delta[end] is None else delta[end] for end in ("lo", "hi"))
    return 100 * relative, low * scale, high * scale


def _edge(found: Sequence[Mapping[str, Any]]) -> float:
    """Where the axis ends, the same on both sides; never wider than `WIDEST`.

    An interval that includes no change may run over the edge: it has nothing to show there.
    """
    reach = 1.0
    for delta in found:
        mean, low, high = _percents(delta)
        ends = (low, high) if deltas.judgement(delta) else (1.4 * mean,)
        reach = max(reach, *map(abs, ends))
    return min(reach, WIDEST)


def _whisker(axes: "Axes", place: int, delta: Mapping[str, Any], edge: float) -> None:
    mean, low, high = _percents(delta)
    colour = COLOURS[TONES[deltas.judgement(delta)]]
    ends = [max(-edge, min(edge, value)) for value in (low, high)]
    axes.plot(ends, [place, place], color=colour, linewidth=2, solid_capstyle="round")
    at = max(-edge, min(edge, mean))
    axes.plot(at, place, "o" if at == mean else ("<" if at < 0 else ">"), color=colour, ms=6)
    if at != mean:
        # Beyond the edge the number stands in for the place.
        axes.annotate(
            f"{mean:+,.0f} %",
            (at, place),
            (8 if at < 0 else -8, 5),
            textcoords="offset points",
            horizontalalignment="left" if at < 0 else "right",
            fontsize=SMALL,
            color=colour,
        )


def _percent_ticks(axes: "Axes", edge: float) -> None:
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(4, symmetric=True).tick_values(-edge, edge)
    # A label at the very end would be cut off, or run into the next.
    ticks = [tick for tick in ticks if abs(tick) <= 0.85 * edge]
    axes.set_xticks(ticks, [f"{tick:+g} %" if tick else "0" for tick in ticks])


def _lines(name: str) -> str:
    """A name over a few lines: one a change, or one for the statistic."""
    parts = name.split(", ")[:LINES]
    return "\n".join(p if len(p) <= LONGEST else f"{p[: LONGEST - 2]}.." for p in parts)


# ---------------------------------------------------------------- two varied keys


def heat_map(result: Mapping[str, Any], metric: str) -> str:
    """A metric over the two varied keys: the first along, the second up; ✓ where the SLA is met."""
    along, up = result["varied"]
    columns, rows = along["values"], up["values"]
    label = f"{deltas.metric_name(metric)} by {along['key']} and {up['key']}"
    cells = {
        (columns.index(p["changes"][along["key"]]), rows.index(p["changes"][up["key"]])): p
        for p in result["points"]
    }
    seen = [p["metrics"][metric] for p in cells.values() if p["metrics"][metric] is not None]
    if not seen:
        return message("no point runs", label)
    low, high = min(seen), max(seen)

    def draw(axes: "Axes") -> None:
        from matplotlib.patches import Rectangle

        for (column, row), point in cells.items():
            value = point["metrics"][metric]
            reach = (value - low) / (high - low) if value is not None and high > low else 0.0
            # The strongest colour is always the better side.
            share = reach if point["deltas"].get(metric, {}).get("better", 1) >= 0 else 1 - reach
            look: dict[str, Any] = {"facecolor": "none", "edgecolor": COLOURS["grid"]}
            if value is not None:
                strength = FAINT + (STRONG - FAINT) * share
                look = {"facecolor": COLOURS["blue"], "alpha": strength, "linewidth": 0}
            axes.add_patch(Rectangle((column + 0.03, row + 0.04), 0.94, 0.92, **look))
            if len(columns) <= NUMBERED_COLUMNS:
                _cell_text(axes, column + 0.5, row + 0.5, point, metric)
        _map_axes(axes, along, up)

    return panel(
        draw, label, height=CELL * len(rows) + HEAD + TOP + BELOW, left=MAP_LEFT, bottom=BELOW
    )


def _cell_text(axes: "Axes", x: float, y: float, point: Mapping[str, Any], metric: str) -> None:
    value = point["metrics"][metric]
    text = "no start" if value is None else deltas.metric_value(metric, value)
    place: dict[str, Any] = {"ha": "center", "textcoords": "offset points", "fontsize": SMALL}
    share = point["sla_met"]
    axes.annotate(text, (x, y), (0, -4 if share is None else 1), color=COLOURS["ink"], **place)
    if share is not None:
        met = deltas.mostly(share)
        # In ink, for no colour of marks stays readable on every blue.
        mark = f"{'✓' if met else '✗'} {deltas.held(share)}"
        axes.annotate(mark, (x, y), (0, -12), color=COLOURS["ink"], **place)


def _map_axes(axes: "Axes", along: Mapping[str, Any], up: Mapping[str, Any]) -> None:
    columns, rows = along["values"], up["values"]
    axes.set_xlim(0, len(columns))
    axes.set_ylim(0, len(rows) + HEAD / CELL)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0, labelsize=SMALL)
    every = 1 + (len(columns) - 1) // 8
    shown = range(0, len(columns), every)
    axes.set_xticks([i + 0.5 for i in shown], [value_text(columns[i], 10) for i in shown])
    axes.set_yticks([i + 0.5 for i in range(len(rows))], [value_text(v, 13) for v in rows])
    axes.set_xlabel(along["key"], fontsize=SMALL + 1)
    axes.annotate(
        up["key"],
        (0, 1),
        (4 - MAP_LEFT, -6),
        xycoords="axes fraction",
        textcoords="offset points",
        color=COLOURS["muted"],
        fontsize=SMALL + 1,
    )


def value_text(value: Any, longest: int) -> str:
    """A varied value on an axis."""
    if isinstance(value, Mapping):
        text = ", ".join(f"{key} {item}" for key, item in value.items())
    else:
        text = f"{value:g}" if isinstance(value, float) else units.flag(value)
    return text if len(text) <= longest else f"{text[: longest - 2]}.."


# ---------------------------------------------------------------- over load


def goodput_by_load(parting: Mapping[str, Any]) -> str:
    """Goodput of A and B over the load factors tried, and where they part."""
    label = "Goodput over load, A and B"
    loads = [entry["load"] for entry in parting["loads"]]
    if len(loads) < 2:
        return message("fewer than two loads were tried", label)

    def draw(axes: "Axes") -> None:
        for side, (name, colour) in enumerate((("A", "blue"), ("B", "green"))):
            served = [entry["goodput_per_s"][side] for entry in parting["loads"]]
            dash = "-" if side == 0 else (0, (4, 2))
            axes.plot(loads, served, color=COLOURS[colour], ls=dash, marker="o", ms=4, label=name)
        axes.set_xscale("log", base=2)
        marks = [load for load in loads if log2(load).is_integer()]
        axes.set_xticks(marks, [f"x{load:g}" for load in marks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0, top=1.3 * axes.get_ylim()[1])
        if parting["load"] is not None:
            axes.axvline(parting["load"], color=COLOURS["vermillion"], lw=1.2, ls=(0, (4, 3)))
            axes.annotate(
                f"part at x{parting['load']:g}",
                (parting["load"], 0),
                (-4, 6),
                textcoords="offset points",
                horizontalalignment="right",
                color=COLOURS["vermillion"],
            )
        axes.legend(loc="upper left", ncols=2)

    return panel(draw, label)
