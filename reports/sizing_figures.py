"""What a sizing found, in panels: curves over load, the trade-off, and the tornado."""

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from servecast.reports import sizing_words as words
from servecast.reports import units
from servecast.reports.figures import LIMIT_LINE, LINEAR_RANGE, TICK_STEPS
from servecast.reports.sizing_words import Result
from servecast.reports.svg import BOTTOM, COLOURS, LEFT, RIGHT, TOP, WIDTH, message, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = Mapping[str, Any]

#: Points below the axes where their name stands below the ticks.
NAMED_BOTTOM = 44

#: Latencies over load by panel: keys of a row of the curve, and colours.
CURVES = {
    "ttft": {"ttft_p95_s": "blue", "ttft_p50_s": "green"},
    "itl": {"itl_p99_s": "blue"},
    "e2e": {"e2e_p95_s": "blue"},
}

SMALL = 10

#: Bars of the tornado at most, and the points from bar to bar.
BARS, BAR_HEIGHT = 8, 42


# ---------------------------------------------------------------- over load


def knee(curve: Sequence[Mapping[str, Any]]) -> float | None:
    """Load at which throughput over latency is highest, Kleinrock's "power".

    Beyond it latency grows faster than throughput. None if that is at either end of the curve,
    so that no knee has been seen. Source: L. Kleinrock, "Power and deterministic rules of thumb
    for probabilistic problems in computer communications", ICC 1979; here with P95 end to end.
    """
    power = [
        (row["output_tokens_per_s"] / row["e2e_p95_s"], row["load"])
        for row in sorted(curve, key=lambda row: row["load"])
        if row["e2e_p95_s"] and row["output_tokens_per_s"] is not None
    ]
    best = max(power, default=None)
    return best[1] if best is not None and best not in (power[0], power[-1]) else None


def load_panels(result: Result) -> list[tuple[str, str]]:
    """Caption and panel: goodput, then each latency, over the load."""
    curve = sorted(result["curve"], key=lambda row: row["load"])
    told = [("Requests per second, sent and within the SLA", _goodput(result, curve))]
    for name, columns in CURVES.items():
        kinds = ", ".join(_stat(column) for column in sorted(columns))
        caption = f"{units.LATENCY_NAMES[name]}, {kinds}"
        told.append((caption, _latency(result, curve, name, columns)))
    return told


def _goodput(result: Result, curve: Sequence[Mapping[str, Any]]) -> str:
    label = "Requests per second over load"
    if len(curve) < 2:
        return message("fewer than two loads were simulated", label)

    def draw(axes: "Axes") -> None:
        loads = [row["load"] for row in curve]
        sent = [row["rate_per_s"] for row in curve]
        served = [row["goodput_per_s"] for row in curve]
        axes.plot(loads, sent, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (2, 2)))
        axes.plot(loads, served, color=COLOURS["blue"], marker="o", markersize=4)
        axes.set_ylim(0, 1.45 * max([*sent, 1e-9]))
        _at_end(axes, loads, sent, "sent", "muted")
        _at_end(axes, loads, served, "in SLA", "blue")
        _marks(axes, result, loads)

    return panel(draw, label, height=230, bottom=NAMED_BOTTOM)


def _latency(
    result: Result, curve: Sequence[Mapping[str, Any]], name: str, columns: Mapping[str, str]
) -> str:
    label = f"{units.LATENCY_NAMES[name]} over load"
    lines = {
        column: [(row["load"], row[column]) for row in curve if row[column]] for column in columns
    }
    lines = {column: line for column, line in lines.items() if len(line) > 1}
    if not lines:
        return message("fewer than two loads were simulated", label)
    limits = units.limits_of(name, {c["clause"]: c["limit"] for c in result["sla"]})

    def draw(axes: "Axes") -> None:
        seen = [value for line in lines.values() for _, value in line]
        _seconds_up(axes, [*seen, *limits.values()])
        for column, line in lines.items():
            loads, values = zip(*line, strict=True)
            axes.plot(loads, values, color=COLOURS[columns[column]], marker="o", markersize=4)
            if len(lines) > 1:
                _at_end(axes, loads, values, _stat(column), columns[column])
        for stat, limit in limits.items():
            axes.axhline(limit, **LIMIT_LINE)
            axes.annotate(
                f"limit {units.stat_name(stat)} {units.seconds(limit)}",
                (0, limit),
                (2, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=COLOURS["vermillion"],
                fontsize=SMALL,
            )
        _marks(axes, result, [row["load"] for row in curve])

    return panel(draw, label, height=230, bottom=NAMED_BOTTOM)


def _stat(column: str) -> str:
    return units.stat_name(column.split("_")[1])


def _at_end(
    axes: "Axes", loads: Sequence[float], values: Sequence[float], text: str, colour: str
) -> None:
    axes.annotate(
        text,
        (loads[-1], values[-1]),
        (-2, 6 if values[-1] >= values[-2] else -13),
        textcoords="offset points",
        horizontalalignment="right",
        color=COLOURS[colour],
        fontsize=SMALL,
    )


def _seconds_up(axes: "Axes", values: Sequence[float]) -> None:
    """Seconds on the vertical axis, with a third of it free for the names of the marks."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    low, high = min(values), max(values)
    if high < LINEAR_RANGE * low:
        unit, size = units.clock_unit(high)
        axes.set_ylim(0, high * 1.45)
        ticks = MaxNLocator(4, steps=TICK_STEPS).tick_values(0, high / size)
        shown = [float(tick) for tick in ticks if 0 <= tick <= high * 1.2 / size]
        axes.set_yticks([tick * size for tick in shown], [f"{tick:g} {unit}" for tick in shown])
        return
    axes.set_yscale("log")
    axes.set_ylim(low / 1.3, high * (high / low) ** 0.35)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    shown = [10.0**power for power in powers if low / 1.3 <= 10.0**power]
    axes.yaxis.set_major_locator(FixedLocator(shown))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: units.tick_seconds(value))


def _marks(axes: "Axes", result: Result, loads: Sequence[float]) -> None:
    """Upright lines at this load, the knee, the end of the SLA and the cliff, with their names."""
    low, high = min(loads) / 1.08, max(loads) * 1.08
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = _load_ticks(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("load, as a multiple of the scenario's", fontsize=SMALL + 1)
    axes.tick_params(labelsize=SMALL + 1, length=0)
    room = result["headroom"]
    if room["load"] is not None and room["breaks"] is not None and room["load"] < high:
        axes.axvspan(max(room["load"], low), high, color=COLOURS["vermillion"], alpha=0.09, lw=0)
    rows = [-1.0] * 3
    for load, name, colour in _named_loads(result):
        if not low <= load <= high:
            continue
        axes.axvline(load, color=COLOURS[colour], linewidth=1, linestyle=(0, (1, 2)))
        at = math.log(load / low) / math.log(high / low)
        # About six points a letter of a panel that is some 290 wide.
        length = (len(name) * 6 + 6) / (WIDTH - LEFT - RIGHT)
        start = at if at + length < 1 else at - length
        row = next((i for i, end in enumerate(rows) if end <= start), len(rows) - 1)
        rows[row] = start + length
        axes.annotate(
            name,
            (at, 1),
            (3 if start == at else -3, -11 - 13 * row),
            xycoords="axes fraction",
            textcoords="offset points",
            horizontalalignment="left" if start == at else "right",
            color=COLOURS[colour],
            fontsize=SMALL,
        )


def _load_ticks(low: float, high: float) -> list[float]:
    """Powers of two, with their half as much again where there is room."""
    powers = range(math.ceil(math.log2(low)) - 1, math.floor(math.log2(high)) + 1)
    steps = (1.0, 1.5) if high / low < 10 else (1.0,)
    ticks = [step * 2.0**power for power in powers for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def _named_loads(result: Result) -> list[tuple[float, str, str]]:
    """Load, name and colour of each mark, in order of load."""
    marks = [(1.0, "this load", "ink")]
    bend = knee(result["curve"])
    if bend is not None:
        marks.append((bend, "knee", "green"))
    if result["headroom"]["load"] is not None and result["headroom"]["breaks"] is not None:
        marks.append((result["headroom"]["load"], "SLA breaks", "vermillion"))
    if result["cliff"]["load"] is not None:
        marks.append((result["cliff"]["load"], "cliff", "ink"))
    return sorted(marks, key=lambda mark: mark[0])


# ---------------------------------------------------------------- trade-off


def pareto(result: Result) -> str:
    """Tokens per second of a device against those of a user, and the frontier."""
    label = "Tokens per second per device against per user"
    points = sorted(
        {
            (user, device, point["met"] is not False)
            for point in words.simulated(result)
            for user, device in _speeds(point)
        }
    )
    if not points:
        return message("no point was simulated", label)

    def draw(axes: "Axes") -> None:
        for met, style in ((False, "vermillion"), (True, "blue")):
            shown = [point for point in points if point[2] is met]
            axes.plot(
                [user for user, *_ in shown],
                [device for _, device, _ in shown],
                "o" if met else "x",
                color=COLOURS[style],
                markersize=4.5,
                alpha=0.7 if met else 0.45,
                markeredgewidth=0 if met else 1.2,
            )
        edge = frontier([(user, device) for user, device, _ in points])
        axes.plot(*zip(*edge, strict=True), color=COLOURS["muted"], linewidth=1.2, zorder=1)
        axes.margins(0.12, 0.2)
        axes.autoscale_view()
        axes.set_xlabel("tokens/s per user", fontsize=SMALL + 1)
        axes.tick_params(labelsize=SMALL + 1, length=0)
        axes.yaxis.set_major_formatter(lambda value, _: units.compact(round(value)))
        _name_choices(axes, result)

    return panel(draw, label, height=290, bottom=NAMED_BOTTOM)


def _speeds(choice: Point) -> list[tuple[float, float]]:
    """Tokens per second of a user and of a device; nothing where either is not known."""
    user, device = choice["tokens_per_s_per_user"], choice["tokens_per_s_per_device"]
    return [(user, device)] if user and device else []


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other beats in both, from left to right."""
    edge: list[tuple[float, float]] = []
    for user, device in sorted(set(points), reverse=True):
        if not edge or device > edge[-1][1]:
            edge.append((user, device))
    return edge[::-1]


def _name_choices(axes: "Axes", result: Result) -> None:
    for choice, name, marker, size in (
        (result["default"], "defaults", "D", 7.0),
        (result["best"], "best", "*", 14.0),
    ):
        for user, device in _speeds(choice) if choice is not None else ():
            fill = COLOURS["ink"] if marker == "*" else "none"
            axes.plot(
                user, device, marker, markersize=size, color=COLOURS["ink"], markerfacecolor=fill
            )
            axes.annotate(
                name,
                (user, device),
                (0, 9 if marker == "*" else -17),
                textcoords="offset points",
                horizontalalignment="center",
                fontweight="bold",
                fontsize=SMALL + 1,
            )


# ---------------------------------------------------------------- sensitivity


def tornado(result: Result) -> str:
    """Outcome with each coefficient 15 % lower and higher, the widest swing on top."""
    metric = result["sensitivity_metric"]
    label = f"Sensitivity of the answer: {words.metric_words(metric)}"
    rows = result["sensitivity"][:BARS][::-1]
    if not rows:
        return message("no coefficient was varied", label)

    def draw(axes: "Axes") -> None:
        for place, row in enumerate(rows):
            for end, colour in (("low", "vermillion"), ("high", "blue")):
                width = row[end] - row["base"]
                axes.barh(place, width, 0.5, left=row["base"], color=COLOURS[colour])
            _ends(axes, place, row, metric)
        axes.axvline(rows[-1]["base"], color=COLOURS["ink"], linewidth=1.2)
        ends = [row[key] for row in rows for key in ("low", "base", "high")]
        spare = 0.5 * (max(ends) - min(ends)) or abs(max(ends)) or 1.0
        axes.set_xlim(min(ends) - spare, max(ends) + spare)
        axes.set_ylim(-0.5, len(rows) - 0.5)
        names = ["\n".join(wrap(row["what"], 20)) for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=SMALL + 1)
        axes.tick_params("y", labelcolor=COLOURS["ink"])
        axes.set_xticks([rows[-1]["base"]], [units.headline(metric, rows[-1]["base"])])
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)

    return panel(draw, label, height=BAR_HEIGHT * len(rows) + BOTTOM + TOP, left=135)


def _ends(axes: "Axes", place: int, row: Mapping[str, Any], metric: str) -> None:
    """The outcome written at both ends of a bar that swings enough to see."""
    for end, other in (("low", "high"), ("high", "low")):
        if row[end] == row["base"]:
            continue
        right = row[end] > row["base"]
        # Where both ends lie on one side, only the outer one has room for its number.
        if (row[other] > row["base"]) == right and abs(row[other] - row["base"]) > abs(
            row[end] - row["base"]
        ):
            continue
        axes.annotate(
            units.headline(metric, row[end]),
            (row[end], place),
            (4 if right else -4, -4),
            textcoords="offset points",
            horizontalalignment="left" if right else "right",
            fontsize=SMALL,
        )
