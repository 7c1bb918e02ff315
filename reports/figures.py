"""What a run looked like, in panels: distributions, time lines, and where step time went."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from servecast.costmodels.shape import NS_PER_S
from servecast.reports import units
from servecast.reports.latencies import latency_samples_ns
from servecast.reports.quantiles import WeightedSample
from servecast.reports.svg import BOTTOM, COLOURS, TOP, message, panel
from servecast.reports.timeline import ArrivalGroups, Timeline, timeline
from servecast.sim.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

FloatArray = npt.NDArray[np.float64]

#: A wider range of values than this gets a logarithmic axis.
LINEAR_RANGE = 12

#: Steps of round ticks, in tenths of a power of ten: 6 and 3 suit minutes.
TICK_STEPS = [1, 2, 3, 5, 6, 10]

#: Percents at which a distribution is drawn, closer towards the tail.
CURVE = np.concatenate([np.linspace(0, 95, 160), np.linspace(95, 100, 60)[1:]])

#: Marked percentiles, and where their label stands from the mark: points, and alignment.
MARKS = {50: (6, -13, "left"), 95: (6, -13, "left"), 99: (0, 6, "center")}

#: How an SLA limit is drawn.
LIMIT_LINE: dict[str, Any] = {
    "color": COLOURS["vermillion"],
    "linewidth": 1.2,
    "linestyle": (0, (4, 3)),
}

#: Points from bar to bar.
BAR_HEIGHT = 27


# ---------------------------------------------------------------- distributions


def latency_cdfs(trace: Trace, sla: Mapping[str, float]) -> dict[str, str]:
    """Distributions of `ttft`, `itl`, `tpot`, `e2e`, with percentiles and SLA limits marked."""
    samples = latency_samples_ns(trace)
    return {
        name: latency_cdf(samples[name], units.limits_of(name, sla), units.LATENCY_NAMES[name])
        for name in ("ttft", "itl", "tpot", "e2e")
    }


def latency_cdf(sample: WeightedSample, limits: Mapping[str, float], label: str) -> str:
    """Cumulative distribution of nanoseconds; `limits` are seconds by statistic."""
    if not sample.n:
        return message("nothing to measure", label)

    def draw(axes: "Axes") -> None:
        curve_s = np.array([sample.percentile(percent) for percent in CURVE]) / NS_PER_S
        axes.plot(curve_s, CURVE, color=COLOURS["blue"], linewidth=1.8)
        axes.set_ylim(0, 114)
        axes.set_yticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])
        seconds_axis(axes, curve_s, limits)
        for percent, (right, up, align) in MARKS.items():
            value = sample.percentile(percent) / NS_PER_S
            axes.plot(value, percent, "o", color=COLOURS["ink"], markersize=4.5)
            axes.annotate(
                f"P{percent}",
                (value, percent),
                (right, up),
                textcoords="offset points",
                horizontalalignment=align,
            )
        for stat, limit in limits.items():
            _limit(axes, limit, f"limit {units.stat_name(stat)}")

    return panel(draw, f"Cumulative distribution: {label}")


def seconds_axis(axes: "Axes", curve_s: FloatArray, limits: Mapping[str, float]) -> None:
    """Linear from 0 where that shows the distribution, else logarithmic."""
    floor = 1 / NS_PER_S
    middle = max(float(np.median(curve_s)), floor)
    high = max([float(curve_s[-1]), floor, *limits.values()])
    if high / middle < LINEAR_RANGE:
        axes.set_xlim(0, high * 1.08)
        time_ticks(axes.xaxis, high * 1.08)
        return
    low = max(float(curve_s[0]), high * 1e-6)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.15, high * 1.3)
    ticks = decades(low / 1.15, high * 1.3)
    axes.set_xticks(ticks, [units.tick_seconds(tick) for tick in ticks])
    axes.minorticks_off()


def time_ticks(axis: "Axis", high_s: float) -> None:
    """Round ticks from 0 in the unit that fits the highest, which alone names it."""
    from matplotlib.ticker import MaxNLocator

    unit, size = units.clock_unit(high_s)
    ticks = np.asarray(MaxNLocator(6, steps=TICK_STEPS).tick_values(0, high_s / size))
    ticks = ticks[ticks <= high_s / size]
    labels = [f"{tick:g}" for tick in ticks]
    axis.set_ticks(ticks * size, [*labels[:-1], f"{labels[-1]} {unit}"])


def decades(low: float, high: float) -> list[float]:
    """Powers of ten between, with their threefold where there is room."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    steps = (1.0, 3.0) if len(powers) <= 4 else (1.0,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def _limit(axes: "Axes", limit: float, label: str) -> None:
    axes.axvline(limit, **LIMIT_LINE)
    left = axes.transAxes.inverted().transform(axes.transData.transform((limit, 0)))[0] > 0.6
    axes.annotate(
        label,
        (limit, 0),
        (-4 if left else 4, 6),
        textcoords="offset points",
        horizontalalignment="right" if left else "left",
        color=COLOURS["vermillion"],
    )


# ---------------------------------------------------------------- over time


def timelines(trace: Trace) -> dict[str, str]:
    """Panels over time, by the names of `PANELS`."""
    line = timeline(trace)
    figures = {}
    for name, (label, draw) in PANELS.items():
        if line is None:
            figures[name] = message("no step ran", label)
        elif name == "preemptions" and not line.preemptions.any():
            figures[name] = message("no preemptions", label)
        else:
            figures[name] = _time_panel(line, draw, label)
    return figures


def _time_panel(line: Timeline, draw: Callable[["Axes", Timeline], None], label: str) -> str:
    from matplotlib.ticker import MaxNLocator

    def draw_all(axes: "Axes") -> None:
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: units.compact(value))
        draw(axes, line)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, line.edges_s[-1])
        time_ticks(axes.xaxis, float(line.edges_s[-1]))

    return panel(draw_all, label)


def ttft_over_time(groups: ArrivalGroups, limits: Mapping[str, float]) -> str:
    """P50 and P95 of time to first token by arrival, with its limits."""
    label = "Time to first token by arrival"
    if len(groups.arrival_s) < 2 or not groups.end_s:
        return message("too few arrivals to show over time", label)

    def draw(axes: "Axes") -> None:
        for name, colour in (("p50", "blue"), ("p95", "green")):
            values = groups.ttft_s[name]
            axes.plot(groups.arrival_s, values, color=COLOURS[colour], label=units.stat_name(name))
        for stat, limit in limits.items():
            axes.axhline(limit, label=f"limit {units.stat_name(stat)}", **LIMIT_LINE)
        high = 1.25 * max([float(groups.ttft_s["p95"].max()), 1 / NS_PER_S, *limits.values()])
        axes.set_ylim(0, high)
        time_ticks(axes.yaxis, high)
        axes.set_xlim(0, groups.end_s)
        time_ticks(axes.xaxis, groups.end_s)
        axes.legend(loc="upper left", ncols=3)

    return panel(draw, label)


def _requests(axes: "Axes", line: Timeline) -> None:
    time_s = _middles(line)
    axes.plot(time_s, line.running, color=COLOURS["blue"], label="running")
    axes.plot(time_s, line.waiting, color=COLOURS["vermillion"], label="waiting")
    axes.set_ylim(0, 1.25 * max(line.running.max(), line.waiting.max(), 1))
    axes.legend(loc="upper left", ncols=2)


def _kv(axes: "Axes", line: Timeline) -> None:
    time_s = _middles(line)
    axes.fill_between(time_s, 100 * line.kv_share_peak, color=COLOURS["blue"], alpha=0.2, lw=0)
    axes.plot(time_s, 100 * line.kv_share, color=COLOURS["blue"])
    axes.set_ylim(0, 105)
    axes.set_yticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])


def _output(axes: "Axes", line: Timeline) -> None:
    axes.plot(_middles(line), line.output_tokens_per_s, color=COLOURS["blue"])


def _prefill(axes: "Axes", line: Timeline) -> None:
    axes.plot(_middles(line), line.prefill_tokens_per_s, color=COLOURS["green"])


def _preemptions(axes: "Axes", line: Timeline) -> None:
    axes.stairs(line.preemptions, line.edges_s, fill=True, color=COLOURS["vermillion"])


def _middles(line: Timeline) -> FloatArray:
    return (line.edges_s[1:] + line.edges_s[:-1]) / 2


#: Label, and what goes on the axes.
PANELS: dict[str, tuple[str, Callable[["Axes", Timeline], None]]] = {
    "requests": ("Requests running and waiting", _requests),
    "kv": ("KV cache in use", _kv),
    "output": ("Output tokens per second", _output),
    "prefill": ("Prompt tokens computed per second", _prefill),
    "preemptions": ("Preemptions", _preemptions),
}


# ---------------------------------------------------------------- by part


def step_time(share: Mapping[str, float]) -> str:
    """Bars of `step_time_share`, longest first; parts that took no time are left out."""
    label = "Share of step time by part"
    parts = sorted((part for part in share if share[part] > 0), key=lambda part: share[part])
    if not parts:
        return message("no step ran", label)

    def draw(axes: "Axes") -> None:
        widths = [100 * share[part] for part in parts]
        axes.barh(range(len(parts)), widths, height=0.62, color=COLOURS["blue"])
        for row, part in enumerate(parts):
            text = units.percent(share[part])
            axes.annotate(
                text, (widths[row], row), (5, -4), textcoords="offset points", fontweight="bold"
            )
        axes.set_yticks(range(len(parts)), [units.PART_NAMES[part] for part in parts])
        axes.tick_params("y", labelcolor=COLOURS["ink"])
        axes.set_ylim(-0.5, len(parts) - 0.5)
        axes.set_xlim(0, max(widths) * 1.25)
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)

    return panel(draw, label, height=BAR_HEIGHT * len(parts) + BOTTOM + TOP, left=140)
