"""Figures of a kernel profile: what was measured, and what the profile gives for the same shapes.

Each is a Matplotlib figure of the width of a phone, for a page and for a file alike. Dots are
measured, lines are the profile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from servecast.costmodels.kernels import WEIGHT_BITS
from servecast.reports import units
from servecast.reports.files import atomic_write
from servecast.reports.svg import COLOURS, LEFT, RIGHT, STYLE, WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: Columns of a family's measured rows by name.
Table = Mapping[str, npt.NDArray[Any]]

#: Times of a row: measured, of the physical form, and what the profile gives.
TIMES = ("seconds", "form_s", "fitted_s")

#: Columns of a shape by the first word of a family's name; a block's size may be missing.
SHAPES = {
    "gemm": ("m", "n", "k"),
    "prefill": ("new", "heads", "group"),
    "decode": ("sequences", "context", "kv_heads", "group", "block_size"),
    "packed": ("new", "context", "heads"),
}

#: Points of height: of an axes, of the title above it, of ticks below, of the axis' name.
HIGH, TITLE, TICKS, NAME = 150, 24, 20, 18

#: Points between two columns of axes.
GAP = 14

SMALL = 10

#: Colours of the lines of one axes, in order; more lines than these are not drawn.
LINES = ("blue", "vermillion", "green", "ink")

#: Pairs of n and k that are drawn at most, and columns of them.
PAIRS, COLUMNS = 6, 2

#: What attention is drawn at, or nearest to, where it was measured at many: the KV heads and query
#: heads a KV head of Llama 3 8B and Qwen3 8B, vLLM's default block.
USUAL = {"kv_heads": 8, "group": 4, "block_size": 16, "sequences": 32}

WORDS = {
    "kv_heads": "KV heads",
    "group": "queries a KV head",
    "block_size": "block",
    "sequences": "batch",
    "heads": "heads",
}

#: Shapes with fewer rows than this part of the most show too little of a curve.
ENOUGH = 0.25

#: Cells of the roofline along and up; one dot stands for all rows of a cell.
CELLS = (72, 48)

#: Bars of a family's errors, points of height of its axes, room for its name.
BARS, BARS_HIGH, NAMES = 60, 34, 84

#: Widest and narrowest range of errors, as logarithms of fitted over measured.
WIDEST, NARROWEST = np.log(2), np.log(1.1)

#: How errors are drawn: of measured rows, and of shapes that the fit did not see.
LOOKS: dict[str, dict[str, Any]] = {
    "bars": {"fill": True, "color": COLOURS["blue"], "alpha": 0.35, "linewidth": 0},
    "outline": {"color": COLOURS["ink"], "linewidth": 1.1},
}

#: Errors that may be marked.
MARKED = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)

DOTS_PER_INCH = 200


def profile_figures(
    facts: Mapping[str, Any],
    rows: Mapping[str, Table],
    peaks: Mapping[str, float | None],
    bandwidth: float | None,
) -> dict[str, "Figure"]:
    """Every figure that there is data for: "roofline", one by each family's name, "residuals".

    Parameters
    ----------
    facts : as `servecast calibrate --show --json` prints
    rows : measured rows by family ("gemm 16bit", "decode 16"); each with the columns of its
        `SHAPES` and `TIMES` in seconds
    peaks : FLOP/s of the device's datasheet by compute type
    bandwidth : bytes/s of the device's memory
    """
    measured = {name: _usable(table, SHAPES.get(kind(name), ())) for name, table in rows.items()}
    measured = {name: table for name, table in measured.items() if len(table["seconds"])}
    with styled():
        figures = {}
        gemms = {name: table for name, table in measured.items() if kind(name) == "gemm"}
        if gemms:
            figures["roofline"] = _roofline(gemms, peaks, bandwidth)
        for name, table in measured.items():
            if kind(name) in DRAWN:
                figures[name] = DRAWN[kind(name)](table)
        errors = _residuals(facts, measured)
        if errors is not None:
            figures["residuals"] = errors
    return figures


def write_pngs(figures: Mapping[str, "Figure"], folder: Path | str) -> list[Path]:
    """Write each figure as `NAME.png`, whole or not at all; equal figures give equal bytes."""
    paths = []
    for name, figure in figures.items():
        path = Path(folder) / f"{name.replace(' ', '-')}.png"
        with styled(), atomic_write(path) as aside:
            figure.savefig(
                aside,
                format="png",
                dpi=DOTS_PER_INCH,
                facecolor="white",
                metadata={"Software": None},
            )
        paths.append(path)
    return paths


def kind(family: str) -> str:
    """Of "gemm 16bit" the first word."""
    return family.partition(" ")[0]


@contextmanager
def styled(salt: str = "") -> Iterator[None]:
    """Matplotlib in the style of the reports, when figures are made and when they are written."""
    import matplotlib

    # A user's own matplotlibrc must not leak into a report.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": salt})
        yield


def _usable(table: Table, shape: Sequence[str]) -> dict[str, FloatArray]:
    """Rows whose numbers are all above 0, as logarithms need them."""
    names = [name for name in (*shape, *TIMES) if name in table]
    columns = {name: np.asarray(table[name], np.float64) for name in names}
    kept = np.ones(len(columns["seconds"]), bool)
    for column in columns.values():
        kept &= np.isfinite(column) & (column > 0)
    return {name: column[kept] for name, column in columns.items()}


def _take(table: Table, kept: BoolArray) -> dict[str, FloatArray]:
    return {name: column[kept] for name, column in table.items()}


# ---------------------------------------------------------------- axes


def _axes(
    titles: Sequence[str], columns: int = 1, high: int = HIGH, head: str = ""
) -> tuple["Figure", list["Axes"]]:
    """A figure, and its axes in rows and columns, by their titles."""
    from matplotlib.figure import Figure

    rows = -(-len(titles) // columns)
    # Columns share the name below the last row; one below another, each has its own.
    step = TITLE + high + TICKS + (NAME if columns == 1 else 0)
    over = NAME if head else 0
    height = over + rows * step + (NAME if columns > 1 else 0)
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    figure.text(0, 1 - 11 / height, head, fontsize=SMALL, color=COLOURS["muted"])
    wide = (WIDTH - LEFT - RIGHT - GAP * (columns - 1)) / columns
    found = []
    for place, title in enumerate(titles):
        row, column = divmod(place, columns)
        left, top = LEFT + column * (wide + GAP), over + row * step + TITLE
        box = (left / WIDTH, 1 - (top + high) / height, wide / WIDTH, high / height)
        axes = figure.add_axes(box)
        # Over the tick labels where there is one column, so that a long title fits.
        start = -LEFT / wide if columns == 1 else 0.0
        axes.set_title(title, x=start, loc="left", fontsize=SMALL, color=COLOURS["muted"], pad=8)
        axes.tick_params(labelsize=SMALL)
        found.append(axes)
    return figure, found


def _name_along(axes: "Axes", text: str) -> None:
    axes.set_xlabel(text, fontsize=SMALL, labelpad=3)


def _doubling(axes: "Axes", values: FloatArray, most: int) -> None:
    """A logarithmic axis along, with few powers of two marked."""
    low, high = float(values.min()), float(values.max())
    axes.set_xscale("log", base=2)
    room = max(1.06, (high / low) ** 0.04)
    axes.set_xlim(low / room, high * room)
    first, last = int(np.ceil(np.log2(low / room))), int(np.floor(np.log2(high * room)))
    every = max(1, -(-(last - first + 1) // most))
    ticks = [2.0**power for power in range(first, last + 1, every)] or [low]
    axes.set_xticks(ticks, [_tokens(tick) for tick in ticks])
    axes.minorticks_off()


def _tokens(value: float) -> str:
    """Powers of two as they are spoken of: 131072 is 128k."""
    for suffix, size in (("M", 2**20), ("k", 2**10)):
        if value >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def _shares_up(axes: "Axes", highest: float, room: float) -> None:
    """Shares from 0, with `room` times the highest for a legend above."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(0, room * highest)
    ticks = np.asarray(MaxNLocator(4, steps=[1, 2.5, 5, 10]).tick_values(0, highest))
    ticks = ticks[(ticks >= 0) & (ticks <= 1.04 * highest)]
    axes.set_yticks(ticks, [f"{100 * tick:.4g} %" for tick in ticks])


def _rate(value: float) -> str:
    """9.89e14 is 989 T."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= 0.999 * size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten between, at most six of them."""
    powers = range(int(np.ceil(np.log10(low))), int(np.floor(np.log10(high))) + 1)
    return [10.0**power for power in powers[:: max(1, -(-len(powers) // 6))]]


# ---------------------------------------------------------------- choices


def _evenly(values: Sequence[Any], most: int) -> list[Any]:
    """First and last, and what lies evenly between."""
    places = np.linspace(0, len(values) - 1, min(most, len(values)))
    return [values[place] for place in places.round().astype(int)]


def _usual(table: Table, names: Sequence[str]) -> tuple[BoolArray, dict[str, float]]:
    """Rows that share values of some columns: the nearest to `USUAL` that was measured enough."""
    shapes = np.column_stack([table[name] for name in names])
    values, of, counts = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)
    away = np.abs(np.log(values / [USUAL[name] for name in names])).sum(axis=1)
    chosen = int(np.argmin(np.where(counts >= ENOUGH * counts.max(), away, np.inf)))
    return of.ravel() == chosen, dict(zip(names, values[chosen].tolist(), strict=True))


def _several_blocks(table: Table) -> BoolArray:
    """Rows of shapes that were measured with more than one block size."""
    shapes = np.column_stack([table[name] for name in SHAPES["decode"] if name != "block_size"])
    _, of = np.unique(shapes, axis=0, return_inverse=True)
    pairs = np.unique(np.column_stack([of.ravel(), table["block_size"]]), axis=0)
    several: BoolArray = np.bincount(pairs[:, 0].astype(int))[of.ravel()] > 1
    return several


def _curves(axes: "Axes", table: Table, along: str, by: str, name: str, seconds: bool) -> None:
    """A few values of column `by` as lines over another: shares of the form, or seconds."""
    chosen = _evenly(np.unique(table[by]).tolist(), len(LINES))
    for colour, value in zip(LINES, chosen, strict=False):
        rows = _take(table, table[by] == value)
        _curve(axes, rows, along, colour, name.format(_tokens(value)), seconds)


def _curve(
    axes: "Axes", table: Table, along: str, colour: str, name: str, seconds: bool = False
) -> None:
    tone = COLOURS[colour]
    points, line = table["seconds"], table["fitted_s"]
    if not seconds:
        points, line = table["form_s"] / points, table["form_s"] / line
    axes.plot(table[along], points, "o", color=tone, markersize=3.4, markeredgewidth=0)
    places, first = np.unique(table[along], return_index=True)
    axes.plot(places, line[first], color=tone, linewidth=1.3, label=name)


def _legend(axes: "Axes", lines: int) -> None:
    axes.legend(loc="upper left", ncols=lines, fontsize=SMALL, columnspacing=1.1, handlelength=1)


# ---------------------------------------------------------------- matrices


def _roofline(
    gemms: Mapping[str, Table], peaks: Mapping[str, float | None], bandwidth: float | None
) -> "Figure":
    """FLOP/s over FLOPs a byte; inputs and outputs of 16 bits, as the form has them."""
    figure, (axes,) = _axes(["FLOP/s reached, by FLOPs for each byte moved"], high=210)
    places = {}
    for name, table in gemms.items():
        m, n, k = (table[column] for column in ("m", "n", "k"))
        flops = 2 * m * n * k
        weight_bits = WEIGHT_BITS.get(_format(name), 16.0)
        moved = n * k * weight_bits / 8 + 2 * m * (n + k)
        places[name] = flops / moved, flops / table["seconds"]
    low, high = _ends([intensity for intensity, _ in places.values()])
    roofs = {name: _roof(peaks.get(_format(name)), bandwidth) for name in places}
    bottom, top = _ends([rate for _, rate in places.values()])
    for colour, (name, (intensity, rate)) in zip(LINES, places.items(), strict=False):
        shown = _sparse(np.log(intensity), np.log(rate))
        axes.plot(
            intensity[shown], rate[shown], "o", color=COLOURS[colour], markersize=2.6,
            markeredgewidth=0, alpha=0.7, label=_named(name, peaks.get(_format(name))),
        )  # fmt: skip
        along = np.geomspace(low / 1.4, high * 1.4, 200)
        roof = roofs[name](along)
        if np.isfinite(roof).all():
            axes.plot(along, roof, color=COLOURS[colour], linewidth=1.3)
            top = max(top, float(roof.max()))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low / 1.4, high * 1.4)
    axes.set_ylim(bottom / 1.6, top * 2.2)
    along = np.asarray(_powers(low / 1.4, high * 1.4))
    axes.set_xticks(along, [f"{tick:,.12g}" for tick in along])
    up = _powers(bottom / 1.6, top * 2.2)
    axes.set_yticks(up, [_rate(tick).strip() for tick in up])
    axes.minorticks_off()
    axes.legend(
        loc="lower right", fontsize=SMALL, handletextpad=0.2, markerscale=1.8, alignment="left",
        title=f"memory {_rate(bandwidth)}B/s" if bandwidth else None, title_fontsize=SMALL,
    )  # fmt: skip
    _name_along(axes, "FLOPs for each byte")
    return figure


def _format(family: str) -> str:
    """Of "gemm 16bit" the second word."""
    return family.partition(" ")[2]


def _roof(peak: float | None, bandwidth: float | None) -> Callable[[FloatArray], FloatArray]:
    """FLOP/s that the datasheet allows at so many FLOPs a byte; infinite where it says nothing."""

    def roof(intensity: FloatArray) -> FloatArray:
        slope = intensity * bandwidth if bandwidth else np.full_like(intensity, np.inf)
        return np.minimum(slope, peak or np.inf)

    return roof


def _ends(arrays: Sequence[FloatArray]) -> tuple[float, float]:
    return min(float(array.min()) for array in arrays), max(float(a.max()) for a in arrays)


def _named(family: str, peak: float | None) -> str:
    return f"{_format(family)}, peak {_rate(peak)}FLOP/s" if peak else _format(family)


def _sparse(along: FloatArray, up: FloatArray) -> npt.NDArray[np.int64]:
    """The first row of each cell: tens of thousands of dots on one another show no more."""
    cells = []
    for values, count in zip((along, up), CELLS, strict=True):
        span = float(np.ptp(values)) or 1.0
        cells.append(((values - values.min()) / span * count).astype(int))
    _, first = np.unique(np.column_stack(cells), axis=0, return_index=True)
    return np.sort(first)


def _gemm(table: Table) -> "Figure":
    """The share of the roof over m, an axes for each of a few n and k."""
    pairs, of, counts = np.unique(
        np.column_stack([table["n"], table["k"]]), axis=0, return_inverse=True, return_counts=True
    )
    # Pairs that were measured for few m show no curve.
    shown = [place for place in range(len(pairs)) if 2 * counts[place] >= counts.max()]
    shown.sort(key=lambda place: (pairs[place].prod(), place))
    shown = _evenly(shown, PAIRS)
    titles = ["n {:,.0f}, k {:,.0f}".format(*pairs[place]) for place in shown]
    figure, every = _axes(titles, min(COLUMNS, len(shown)), 88, "Share of the roof, by m")
    tables = [_take(table, of.ravel() == place) for place in shown]
    times = [(rows["form_s"], rows[time]) for rows in tables for time in ("seconds", "fitted_s")]
    highest = max(float((form_s / time_s).max()) for form_s, time_s in times)
    m = np.concatenate([t["m"] for t in tables])
    for place, (axes, rows) in enumerate(zip(every, tables, strict=True)):
        _curve(axes, rows, "m", "blue", "")
        _doubling(axes, m, 4 if len(every) > 1 else 8)
        _shares_up(axes, max(1.0, highest), 1.04)
        if place % COLUMNS:
            axes.set_yticklabels([])
    for axes in every[-COLUMNS:]:
        _name_along(axes, "m")
    return figure


# ---------------------------------------------------------------- attention


def _decode(table: Table) -> "Figure":
    """The share of the bandwidth over context; below it seconds over the KV block's size."""
    by_block = "block_size" in table and len(np.unique(table["block_size"])) > 1
    same, fixed = _usual(table, ["kv_heads", "group", *(["block_size"] if by_block else [])])
    titles = [f"Share of bandwidth: {_told(fixed)}"]
    varied = _take(table, _several_blocks(table)) if by_block else {"seconds": np.empty(0)}
    if len(varied["seconds"]):
        alike, fixed = _usual(varied, ["kv_heads", "group", "sequences"])
        varied = _take(varied, alike)
        titles.append(f"Seconds: {_told(fixed)}")
    figure, (first, *second) = _axes(titles)
    rows = _take(table, same)
    _curves(first, rows, "context", "sequences", "batch {}", False)
    _finish_shares(first, rows["context"], "context, tokens")
    for axes in second:
        _curves(axes, varied, "block_size", "context", "{}", True)
        _finish_seconds(axes, varied["block_size"])
    return figure


def _told(fixed: Mapping[str, float]) -> str:
    return ", ".join(f"{WORDS[name]} {value:g}" for name, value in fixed.items())


def _prefill(table: Table) -> "Figure":
    """The share of the peak over new tokens."""
    return _peak_shares(table, "group", "new", "new tokens", "heads", "heads {}")


def _packed(table: Table) -> "Figure":
    """The share of the peak over all keys of a step."""
    return _peak_shares(table, "heads", "context", "keys of a step", "new", "queries {}")


def _peak_shares(table: Table, held: str, along: str, name: str, by: str, label: str) -> "Figure":
    """Shares of the peak along one column, a line for each value of another."""
    same, fixed = _usual(table, [held])
    figure, (axes,) = _axes([f"Share of peak FLOP/s: {_told(fixed)}"])
    rows = _take(table, same)
    _curves(axes, rows, along, by, label, False)
    _finish_shares(axes, rows[along], name)
    return figure


def _finish_shares(axes: "Axes", along: FloatArray, name: str) -> None:
    highest = max(float(np.max(line.get_ydata())) for line in axes.lines)
    _doubling(axes, along, 7)
    _shares_up(axes, max(1.0, highest), 1.28)
    _legend(axes, len(LINES))
    _name_along(axes, name)


def _finish_seconds(axes: "Axes", blocks: FloatArray) -> None:
    seen = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    low, high = float(seen.min()), float(seen.max())
    _doubling(axes, blocks, 7)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.5, high * 1.5 * (high / low) ** 0.3)
    ticks = _powers(low / 1.5, high * 1.5) or [float(f"{high:.1g}")]
    axes.set_yticks(ticks, [units.tick_seconds(tick) for tick in ticks])
    axes.minorticks_off()
    _legend(axes, len(LINES))
    _name_along(axes, "tokens a KV block; lines by context")


DRAWN: dict[str, Callable[[Table], "Figure"]] = {
    "gemm": _gemm,
    "prefill": _prefill,
    "decode": _decode,
    "packed": _packed,
}


# ---------------------------------------------------------------- errors


def _residuals(facts: Mapping[str, Any], measured: Mapping[str, Table]) -> "Figure | None":
    """Errors by family: bars of the rows, an outline of shapes that the fit did not see."""
    seen = {name: np.log(table["fitted_s"] / table["seconds"]) for name, table in measured.items()}
    left_out = {
        name: np.sort(np.asarray(family.get("residuals") or [], np.float64))
        for name, family in facts["families"].items()
    }
    left_out = {name: quantiles for name, quantiles in left_out.items() if len(quantiles) > 1}
    names = list(dict.fromkeys([*facts["families"], *seen]))
    names = [name for name in names if name in seen or name in left_out]
    if not names:
        return None
    ends = [np.percentile(np.abs(logs), 98) for logs in (*seen.values(), *left_out.values())]
    edge = float(np.clip(max(ends), NARROWEST, WIDEST))
    bins = np.linspace(-edge, edge, BARS + 1)
    figure, every = _stacked(names)
    for name, axes in zip(names, every, strict=True):
        shares = {}
        if name in seen:
            counts, _ = np.histogram(np.clip(seen[name], -edge, edge), bins)
            shares["bars"] = counts / counts.sum()
        if name in left_out:
            shares["outline"] = _binned(left_out[name], bins)
        highest = max(float(share.max()) for share in shares.values())
        for look, share in shares.items():
            axes.stairs(share / highest, bins, **LOOKS[look])
        axes.axvline(0, color=COLOURS["muted"], linewidth=0.8)
        axes.set_xlim(-edge, edge)
        _error_ticks(axes, edge, axes is every[-1])
    _name_along(every[-1], "fitted against measured")
    return figure


def _stacked(names: Sequence[str]) -> tuple["Figure", list["Axes"]]:
    """A figure, and low axes one above the other, each with its family's name at its left."""
    from matplotlib.figure import Figure

    step = BARS_HIGH + 6
    height = len(names) * step + 6 + TICKS + NAME
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    found = []
    for place, name in enumerate(names):
        top = place * step + 6
        wide = WIDTH - NAMES - RIGHT
        box = (NAMES / WIDTH, 1 - (top + BARS_HIGH) / height, wide / WIDTH, BARS_HIGH / height)
        axes = figure.add_axes(box)
        axes.set_ylim(0, 1.08)
        axes.set_yticks([0.3], [name])
        axes.tick_params("y", labelcolor=COLOURS["ink"], labelsize=SMALL)
        axes.grid(visible=False)
        found.append(axes)
    return figure, found


def _binned(quantiles: FloatArray, bins: FloatArray) -> FloatArray:
    """Probability of each bin, from quantiles at equal steps; what lies outside is at the ends."""
    steps = np.linspace(0, 1, len(quantiles))
    # A step of the distribution between equal quantiles needs some width.
    spread = quantiles + np.arange(len(quantiles)) * 1e-9
    below = np.interp(bins, spread, steps)
    below[0], below[-1] = 0.0, 1.0
    found: FloatArray = np.diff(below)
    return found


def _error_ticks(axes: "Axes", edge: float, named: bool) -> None:
    """Marks in percent, evenly in ratios: 1/2 is as far from none as 2."""
    outer = [error for error in MARKED if np.log1p(error) <= 0.97 * edge][-1]
    inner = next((error for error in MARKED[::-1] if error <= outer / 2.2), None)
    ratios = [1 + error for error in (inner, outer) if error is not None]
    places = sorted([0.0, *np.log(ratios), *(-np.log(ratios))])
    labels = [f"{100 * np.expm1(place):+.0f} %" if place else "0" for place in places]
    axes.set_xticks(places, labels if named else [])
    axes.tick_params("x", labelsize=SMALL)
