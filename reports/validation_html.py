"""Predictions beside measured runs as one HTML file, without scripts or anything from elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from servecast.reports import units
from servecast.reports.figures import CURVE, decades, seconds_axis, time_ticks
from servecast.reports.page import card, grid, page, section, table
from servecast.reports.svg import COLOURS, message, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = npt.NDArray[np.float64]
Row = Mapping[str, Any]

STYLE = """
.rows :is(th, td):nth-child(2) { text-align: left; }
.rows td { padding-top: 3px; padding-bottom: 3px; }
@media (max-width: 760px) { .values td:first-child, .rows td:first-child { min-width: 9em; } }
"""

#: Cases that get figures; of more the table alone.
DRAWN = 12

#: Moments of a time line at most.
MOMENTS = 200

#: Latencies with their colours in the scatter, in the order of the page.
METRICS = {"ttft_s": "blue", "tpot_s": "green", "e2e_s": "vermillion"}

#: How both sides are drawn.
LOOKS: dict[str, dict[str, Any]] = {
    "predicted": {"color": COLOURS["blue"], "linewidth": 1.8},
    "measured": {"color": COLOURS["ink"], "linewidth": 1.2, "linestyle": (0, (4, 2))},
}

#: Panels over time by the keys of a time line.
TIMELINES = {
    "running": "Requests running",
    "waiting": "Requests waiting",
    "kv_share": "KV cache in use",
}

#: Points of height of the scatter, and points that its numbers and the axis' name take.
SCATTER_HEIGHT, SCATTER_LEFT, SCATTER_BOTTOM = 320, 58, 44

SMALL = 10


def validation_page(answer: Mapping[str, Any], overlays: Sequence[Mapping[str, Any]]) -> str:
    """The whole page; equal input gives equal bytes.

    Parameters
    ----------
    answer : as `servecast validate` finds it: rows, medians by metric, the share inside
    overlays : by case: its name (`case`), latencies in seconds of each request (`predicted`, and
        `measured` or None: ttft_s, tpot_s, e2e_s), and means over time (`timeline`, and
        `measured_timeline` or None: t_s, running, waiting, kv_share)
    """
    drawn = overlays[:DRAWN]
    parts = (
        _header(answer, len(overlays)),
        _cards(answer),
        _metrics(answer),
        *(_case(overlay, _of_case(answer["rows"], overlay["case"])) for overlay in drawn),
        _every_row(answer["rows"]),
    )
    return page("Predicted and measured", parts, STYLE)


def _of_case(rows: Sequence[Row], case: str) -> list[Row]:
    return [row for row in rows if row["case"] == case]


def _header(answer: Mapping[str, Any], overlays: int) -> str:
    rows = answer["rows"]
    cases = len({row["case"] for row in rows})
    told = f"{len(rows):,} measured values of {cases:,} case{'' if cases == 1 else 's'}."
    if overlays > DRAWN:
        told += (
            f" Figures are of the first {DRAWN} of {overlays:,} cases; the table at the end has "
            "every row."
        )
    if answer["inside"] is None:
        told += " No intervals: they come from a profile's kernels."
    return (
        "<header>\n<h1>Predicted and measured</h1>\n"
        f'<p class="lead">{told}</p>\n'
        "<p>An error is predicted over measured, less one: above 0 the prediction is too slow.</p>"
        "\n</header>"
    )


# ---------------------------------------------------------------- over all cases


def _cards(answer: Mapping[str, Any]) -> str:
    rows = answer["rows"]
    if not rows:
        return ""
    worst = max(rows, key=lambda row: abs(row["error"]))
    off = [row["error"] for row in rows]
    known = [row for row in rows if row["inside"] is not None]
    held = sum(row["inside"] for row in known)
    cards = [
        card(
            "Median error",
            units.percent(float(np.median(np.abs(off)))),
            f"{_signed(float(np.median(off)))} with its sign",
        ),
        card(
            "Worst error",
            _signed(worst["error"]),
            f"{escape(worst['case'])}, {_metric(worst['metric'])}",
        ),
        card(
            "Inside the 90&nbsp;% interval",
            _coverage(answer["inside"]),
            f"{held:,} of {len(known):,} values" if known else "no intervals",
        ),
    ]
    return f'<section class="cards">{"".join(cards)}</section>'


def _metrics(answer: Mapping[str, Any]) -> str:
    """Medians, worst and coverage by metric, and every value against its prediction."""
    if not answer["rows"]:
        return section("By metric", "", "<p>Nothing was measured.</p>")
    head = ("Metric", "Values", "Median error", "With its sign", "Worst", "Inside")
    rows = [
        (
            _metric(name),
            f"{found['values']:,}",
            units.percent(found["median_error"]),
            _signed(found["median_signed_error"]),
            units.percent(found["worst_error"]),
            _coverage(found["inside"]),
        )
        for name, found in answer["metrics"].items()
    ]
    caption = "Predicted against measured; on the line they are equal, bars are 90&nbsp;% intervals"
    figure = grid([(caption, _scatter(answer["rows"]))])
    return section("By metric", "", table(head, rows, "values") + figure)


def _scatter(rows: Sequence[Row]) -> str:
    """Every value on logarithmic axes, those of a metric in one colour."""
    label = "Predicted against measured"
    shown = [row for row in rows if row["measured"] > 0 and row["predicted"] > 0]
    if not shown:
        return message("nothing was measured", label)

    def draw(axes: "Axes") -> None:
        seen = [row[key] for row in shown for key in ("measured", "predicted")]
        low, high = min(seen) / 1.5, max(seen) * 1.5
        axes.plot([low, high], [low, high], color=COLOURS["muted"], linewidth=1)
        for metric, colour in METRICS.items():
            tone = COLOURS[colour]
            of = [row for row in shown if row["metric"].startswith(metric)]
            if not of:
                continue
            barred = [row for row in of if row["lo"] is not None and row["lo"] > 0]
            axes.vlines(
                [row["measured"] for row in barred],
                [row["lo"] for row in barred],
                [row["hi"] for row in barred],
                color=tone,
                linewidth=1.2,
                alpha=0.45,
            )
            axes.plot(
                [row["measured"] for row in of],
                [row["predicted"] for row in of],
                "o",
                color=tone,
                markersize=4,
                markeredgewidth=0,
                alpha=0.8,
                label=_latency(metric),
            )
        for axis, scale, limit in (
            (axes.xaxis, axes.set_xscale, axes.set_xlim),
            (axes.yaxis, axes.set_yscale, axes.set_ylim),
        ):
            scale("log")
            limit(low, high)
            ticks = decades(low, high)
            axis.set_ticks(ticks, [units.tick_seconds(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("measured", fontsize=SMALL + 1)
        axes.set_ylabel("predicted", fontsize=SMALL + 1)
        axes.tick_params(labelsize=SMALL)
        axes.legend(loc="upper left", fontsize=SMALL, handletextpad=0.2)

    return panel(draw, label, SCATTER_HEIGHT, SCATTER_LEFT, SCATTER_BOTTOM)


def _every_row(rows: Sequence[Row]) -> str:
    """Worst first, whatever the case."""
    if not rows:
        return ""
    head = ("Case", "Metric", "Measured", "Predicted", "Error", "90&nbsp;% interval", "Inside")
    ordered = sorted(rows, key=lambda row: -abs(row["error"]))
    cells = [(escape(row["case"]), *_cells(row)) for row in ordered]
    return section("Every value", "Worst error first.", table(head, cells, "rows"))


# ---------------------------------------------------------------- one case


def _case(overlay: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A case's values, its distributions, and how it went over time."""
    case, measured, predicted = (overlay[key] for key in ("case", "measured", "predicted"))
    drawn = [
        _distribution(
            case,
            metric,
            _known(predicted, metric),
            _known(measured, metric),
            _statistics(rows, metric) if measured is None else {},
        )
        for metric in METRICS
    ]
    lines = overlay["timeline"], overlay["measured_timeline"]
    drawn += [
        (caption, _over_time(key, f"{case}: {caption}", *lines))
        for key, caption in TIMELINES.items()
    ]
    note = "Blue is predicted, dashed is measured."
    if measured is None:
        note += " Of the latencies only statistics were measured: they stand as upright lines."
    head = ("Metric", "Measured", "Predicted", "Error", "90&nbsp;% interval", "Inside")
    values = table(head, [_cells(row) for row in rows], "values") if rows else ""
    return section(escape(case), note, values + grid(drawn))


def _distribution(
    case: str,
    metric: str,
    predicted: FloatArray,
    measured: FloatArray,
    marks: Mapping[str, float],
) -> tuple[str, str]:
    """Caption and panel: cumulative distributions, or one with statistics as `marks`, seconds."""
    caption = f"{_latency(metric)}, n = {len(predicted):,}"
    if len(measured):
        caption += f", measured {len(measured):,}"
    label = f"{case}: cumulative distribution, {_latency(metric)}"
    sides = {"predicted": predicted, "measured": measured}
    sides = {side: values for side, values in sides.items() if len(values)}
    if not sides:
        return caption, message("nothing to measure", label)

    def draw(axes: "Axes") -> None:
        curves = {side: np.percentile(values, CURVE) for side, values in sides.items()}
        for side, curve in curves.items():
            axes.plot(curve, CURVE, label=side, **LOOKS[side])
        axes.set_ylim(0, 125 if len(curves) > 1 else 114)
        axes.set_yticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])
        seconds_axis(axes, np.sort(np.concatenate(list(curves.values()))), marks)
        for place, (stat, value) in enumerate(marks.items()):
            _mark(axes, stat, value, place)
        if len(curves) > 1:
            axes.legend(loc="upper left", ncols=2)

    return caption, panel(draw, label)


def _mark(axes: "Axes", stat: str, value: float, place: int) -> None:
    """A measured statistic as an upright line; names are staggered, for they may be close."""
    axes.axvline(value, **LOOKS["measured"])
    left = axes.transAxes.inverted().transform(axes.transData.transform((value, 0)))[0] > 0.6
    axes.annotate(
        units.stat_name(stat),
        (value, 0),
        (-4 if left else 4, 6 + 16 * place),
        textcoords="offset points",
        horizontalalignment="right" if left else "left",
    )


def _over_time(
    key: str,
    label: str,
    predicted: Mapping[str, Any] | None,
    measured: Mapping[str, Any] | None,
) -> str:
    lines = {
        side: _line(found, key)
        for side, found in (("predicted", predicted), ("measured", measured))
        if found is not None and key in found and "t_s" in found
    }
    lines = {side: line for side, line in lines.items() if len(line[0])}
    if not lines:
        return message("not recorded", label)

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        for side, (time_s, values) in lines.items():
            marker = "o" if len(time_s) == 1 else ""
            axes.plot(time_s, values, label=side, marker=marker, markersize=4, **LOOKS[side])
        if key == "kv_share":
            axes.set_ylim(0, 1.25)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
        else:
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_formatter(lambda value, _: units.compact(value))
            axes.set_ylim(0, 1.25 * max(1.0, *(float(line[1].max()) for line in lines.values())))
        end_s = max(float(line[0][-1]) for line in lines.values()) or 1.0
        axes.set_xlim(0, end_s)
        time_ticks(axes.xaxis, end_s)
        if len(lines) > 1:
            axes.legend(loc="upper left", ncols=2)

    return panel(draw, label)


def _line(found: Mapping[str, Any], key: str) -> tuple[FloatArray, FloatArray]:
    """Times and values, means over equal spans where there are many; gaps are left out."""
    time_s, values = np.asarray(found["t_s"], float), np.asarray(found[key], float)
    known = np.isfinite(time_s) & np.isfinite(values)
    time_s, values = time_s[known], values[known]
    if len(time_s) <= MOMENTS:
        return time_s, values
    edges = np.linspace(time_s.min(), time_s.max(), MOMENTS + 1)
    of = np.clip(np.searchsorted(edges, time_s, side="right") - 1, 0, MOMENTS - 1)
    counts = np.bincount(of, minlength=MOMENTS)
    filled = counts > 0
    means = [np.bincount(of, column, MOMENTS)[filled] for column in (time_s, values)]
    return means[0] / counts[filled], means[1] / counts[filled]


def _known(latencies: Mapping[str, Any] | None, metric: str) -> FloatArray:
    if latencies is None or metric not in latencies:
        return np.empty(0)
    values: FloatArray = np.asarray(latencies[metric], float)
    return values[np.isfinite(values)]


def _statistics(rows: Sequence[Row], metric: str) -> dict[str, float]:
    return {
        row["metric"].partition(" ")[2]: row["measured"]
        for row in rows
        if row["metric"].startswith(metric)
    }


# ---------------------------------------------------------------- words


def _latency(metric: str) -> str:
    """Of "ttft_s" in words."""
    name = metric.removesuffix("_s")
    return units.LATENCY_NAMES.get(name, name.capitalize())


def _metric(name: str) -> str:
    """Of "ttft_s p50" in words."""
    metric, _, stat = name.partition(" ")
    return f"{_latency(metric)}, {units.stat_name(stat)}"


def _cells(row: Row) -> tuple[str, ...]:
    low, high, inside = row["lo"], row["hi"], row["inside"]
    mark = units.NONE
    if inside is not None:
        kind, told = ("good", "✓") if inside else ("bad", "✗ outside")
        mark = f'<b class="mark {kind}">{told}</b>'
    return (
        _metric(row["metric"]),
        units.seconds(row["measured"]),
        units.seconds(row["predicted"]),
        _signed(row["error"]),
        units.NONE if low is None else f"{units.seconds(low)} to {units.seconds(high)}",
        mark,
    )


def _signed(error: float) -> str:
    # The zero takes the sign off what rounds to none.
    return f"{round(100 * error, 1) + 0.0:+,.1f} %"


def _coverage(share: float | None) -> str:
    return units.NONE if share is None else f"{100 * share:.0f} %"
