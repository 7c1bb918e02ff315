"""Rows of measured kernels to grids, and how far the grids are from shapes left out.

Rows of one shape are taken by their median. A grid holds the median correction of a shape's row at
each coordinate; coordinates that were measured for some shapes only are filled from their
neighbours, along one axis after another. The error that counts is on whole coordinates left out
(every row of an m, an n, a k, a context), predicted from their neighbours.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from servecast.calibration.store import KEPT_RESIDUALS, Family
from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import WEIGHT_BITS, Curve, Grid, gemm_form_s, tiled_over_whole
from servecast.costmodels.lines import rising
from servecast.costmodels.specs import HardwareSpec

FloatArray = npt.NDArray[np.float64]

#: A coordinate in so many is left out at a time, first and last never.
LEFT_OUT_EVERY = 4


@dataclass(frozen=True)
class Rows:
    """Measured kernels of one family.

    Attributes
    ----------
    shape : name of each dimension to its column
    seconds : measured
    form_s : what the physical form gives
    whole : number of the thing that a row belongs to, where it is things that are left out of a
        fit to see how good it is, and not coordinates
    """

    shape: Mapping[str, FloatArray]
    seconds: FloatArray
    form_s: FloatArray
    whole: npt.NDArray[np.int64] | None = None

    def take(self, kept: npt.NDArray[np.bool_]) -> "Rows":
        """Some of the rows."""
        columns = {name: column[kept] for name, column in self.shape.items()}
        whole = None if self.whole is None else self.whole[kept]
        return Rows(columns, self.seconds[kept], self.form_s[kept], whole)


@dataclass(frozen=True)
class HeldOut:
    """Relative errors on coordinates that the fit did not see.

    Attributes
    ----------
    median, p95 : absolute
    log_errors : natural logarithm of predicted over measured, sorted: the family's distribution;
        empty where there was too little to leave any out
    """

    rows: int
    median: float
    p95: float
    log_errors: FloatArray


def fit_grid(
    rows: Rows, axes: Mapping[str, Sequence[float]], first: Sequence[str] | None = None
) -> Grid:
    """Median corrections of the rows nearest to each grid point, gaps filled from neighbours.

    Tables have nearly all of a grid: gaps are filled along one axis after another, from the last.
    A device is measured where its neighbours disagree, at more points of some shapes than of
    others: with `first`, which may be empty, gaps are filled along those axes, and then from what
    was measured nearest. Raises ValueError without rows.
    """
    if not len(rows.seconds):
        raise ValueError("no rows to fit")
    names = list(axes)
    logs = [np.log2(np.asarray(axes[name], float)) for name in names]
    index = tuple(
        _nearest(log, np.log2(rows.shape[name])) for log, name in zip(logs, names, strict=True)
    )
    shape = tuple(len(log) for log in logs)
    flat = np.ravel_multi_index(index, shape)
    correction = np.log2(rows.seconds / rows.form_s)
    values = np.full(shape, np.nan).ravel()
    order = np.argsort(flat, kind="stable")
    starts = np.flatnonzero(np.diff(flat[order], prepend=-1))
    for group in np.split(order, starts)[1:]:
        values[flat[group[0]]] = np.median(correction[group])
    if first is None:
        filled = _fill(values.reshape(shape), logs, range(len(names))[::-1])
    else:
        ahead = [names.index(name) for name in reversed(first)]
        filled = _fill_by_nearness(_fill(values.reshape(shape), logs, ahead), logs)
    return Grid(tuple(tuple(float(x) for x in axes[name]) for name in names), filled)


def fit_curve(sizes: FloatArray, seconds: FloatArray) -> Curve | None:
    """Medians of equal sizes, never falling; None for fewer than two sizes."""
    distinct = np.unique(sizes)
    if len(distinct) < 2:
        return None
    order = np.argsort(sizes, kind="stable")
    starts = np.searchsorted(sizes[order], distinct)
    medians = [np.median(group) for group in np.split(seconds[order], starts[1:])]
    return Curve(tuple(distinct.tolist()), tuple(rising(np.array(medians)).tolist()))


def _nearest(logs: FloatArray, points: FloatArray) -> npt.NDArray[np.int64]:
    edges = (logs[1:] + logs[:-1]) / 2
    return np.searchsorted(edges, points).astype(np.int64)


def _fill(values: FloatArray, logs: Sequence[FloatArray], order: Iterable[int]) -> FloatArray:
    """Gaps along one axis after another: interpolated, and flat beyond the ends."""
    values = values.copy()
    for axis in order:
        lines = np.moveaxis(values, axis, -1)
        for at in np.ndindex(lines.shape[:-1]):
            line = lines[at]
            known = np.flatnonzero(~np.isnan(line))
            if 0 < len(known) < len(line):
                lines[at] = np.interp(logs[axis], logs[axis][known], line[known])
    return values


def _fill_by_nearness(values: FloatArray, logs: Sequence[FloatArray]) -> FloatArray:
    """Gaps from all axes together, each by how near its two neighbours are; those beyond an end
    only when no gap lies between two."""
    beyond = False
    while np.isnan(values).any():
        filled = _filled_once(values, logs, beyond)
        beyond = bool(np.isnan(filled).sum() == np.isnan(values).sum())
        values = filled
    return values


def _filled_once(values: FloatArray, logs: Sequence[FloatArray], beyond: bool) -> FloatArray:
    total, weight = np.zeros(values.shape), np.zeros(values.shape)
    for axis, log in enumerate(logs):
        lines, sums, weights = (np.moveaxis(x, axis, -1) for x in (values, total, weight))
        for at in np.ndindex(lines.shape[:-1]):
            known = np.flatnonzero(~np.isnan(lines[at]))
            gaps = np.flatnonzero(np.isnan(lines[at]))
            if not len(known) or not len(gaps):
                continue
            after = np.searchsorted(known, gaps)
            inside = (after > 0) & (after < len(known))
            low = log[known[np.maximum(after - 1, 0)]]
            high = log[known[np.minimum(after, len(known) - 1)]]
            # Beyond an end both are the same, and count as twice as far.
            apart = np.where(inside, high - low, 2 * np.abs(log[gaps] - low))
            own = np.where(inside | beyond, 1.0 / apart**2, 0.0)
            found = np.interp(log[gaps], log[known], lines[at][known])
            sums[at][gaps] += own * found
            weights[at][gaps] += own
    reached = np.isnan(values) & (weight > 0)
    filled = values.copy()
    filled[reached] = total[reached] / weight[reached]
    return filled


def held_out(
    rows: Rows,
    axes: Mapping[str, Sequence[float]],
    along: Sequence[str] = (),
    first: Sequence[str] | None = None,
) -> HeldOut:
    """Errors over all dimensions, or those `along`, that have enough coordinates to leave some out;
    `first` as `fit_grid` has it.

    Where none has enough for a quarter of them to be left out, they go one at a time.
    """
    if rows.whole is not None:
        wholes = np.unique(rows.whole)
        errors = [_missed(rows, rows.whole == at, axes, first) for at in wholes]
        return _summed_up(rows, errors)
    columns = {name: rows.shape[name] for name in (along or rows.shape)}
    enough = any(len(np.unique(column)) > LEFT_OUT_EVERY for column in columns.values())
    errors = []
    for name, column in columns.items():
        measured = np.unique(column)
        inside = measured[1:-1]
        if enough:
            groups = [measured[first::LEFT_OUT_EVERY] for first in range(1, LEFT_OUT_EVERY)]
        else:
            groups = [inside[at : at + 1] for at in range(len(inside))]
        for group in groups:
            gone = [x for x in group if x in inside]
            out = np.isin(column, gone)
            if (enough and len(measured) <= LEFT_OUT_EVERY) or not out.any():
                continue
            kept = {**axes, name: [x for x in axes[name] if x not in gone] or list(axes[name])}
            errors.append(_missed(rows, out, kept, first))
    return _summed_up(rows, errors)


def _missed(
    rows: Rows,
    out: npt.NDArray[np.bool_],
    axes: Mapping[str, Sequence[float]],
    first: Sequence[str] | None,
) -> FloatArray:
    """Log errors of some rows, by a fit of the others; none where those are all."""
    if out.all():
        return np.zeros(0)
    grid = fit_grid(rows.take(~out), axes, first)
    seen = rows.take(out)
    errors: FloatArray = np.log(
        seen.form_s * grid.factor(*(seen.shape[key] for key in axes)) / seen.seconds
    )
    return errors


def _summed_up(rows: Rows, errors: Sequence[FloatArray]) -> HeldOut:
    logs = np.sort(np.concatenate([*errors, np.zeros(0)]))
    absolute = np.abs(np.expm1(logs)) if len(logs) else np.zeros(1)
    return HeldOut(
        rows=len(rows.seconds),
        median=float(np.percentile(absolute, 50)),
        p95=float(np.percentile(absolute, 95)),
        log_errors=logs,
    )


#: Grid points of a family, as far as the tables have rows near them.
WIDTHS = tuple(256.0 * w for w in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256))

#: Tokens likewise. Libraries take rows in tiles, and another tile begins with the next row: both
#: sides of such an edge are kept.
TOKENS = (
    *(1, 2, 4, 8, 16, 17, 32, 48, 64, 65, 96, 128, 129, 160, 192, 224, 256, 257, 384, 512),
    *(513, 768, 769, 1024, 1025, 1536, 1537, 2048, 2049, 3072, 3073, 4096, 4097, 8192, 16384),
)
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "gemm": {"m": TOKENS, "n": WIDTHS, "k": WIDTHS},
    "experts": {
        "rows": tuple(2.0 ** (power / 2) for power in range(29)),
        "intermediate": tuple(2.0 ** (power / 2) for power in range(8, 30)),
        "met": tuple(2.0 ** (power / 2) for power in range(21)),
    },
    "prefill": {
        "new": (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384),
        "heads": (1, 2, 4, 8, 16, 32, 64),
        "group": (1, 2, 4, 8, 16),
    },
    "decode": {
        "sequences": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        "context": tuple(2.0**power for power in range(1, 18)),
        "kv_heads": (1, 2, 4, 8),
        "group": (1, 2, 4, 5, 8, 12, 16),
    },
    "packed": {
        "new": tuple(2.0**power for power in range(15)),
        "context": tuple(2.0**power for power in range(4, 22)),
        "heads": (1, 2, 4, 8, 16, 32, 64),
    },
    "mixed": {
        "new": (16, 128, 512, 1024, 2048),
        "streams": (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
        "context": (16, 64, 256, 1024, 4096, 16384),
        "group": (1, 2, 4, 8, 16),
    },
}

#: Matrices narrower than this (gates, routers) are not fitted: nothing of a step's time is in them.
NARROWEST = 256

#: Coordinates up to so many are all kept.
FEW = 24

#: Steps of probability at which residuals are kept.
PROBABILITIES = np.linspace(2.5, 97.5, KEPT_RESIDUALS)


def fit_family(
    kind: str,
    rows: Rows,
    few: int = FEW,
    narrowest: float = NARROWEST,
    along: Sequence[str] = (),
    first: Sequence[str] | None = None,
) -> Family:
    """A grid over the family's usual points, with its errors on shapes left out.

    `few` and `narrowest` in place of `FEW` and `NARROWEST`; `along` as `held_out` has it, `first`
    as `fit_grid`. Raises InputError where nothing of the family was measured.
    """
    if kind == "gemm":
        rows = rows.take((rows.shape["n"] >= narrowest) & (rows.shape["k"] >= narrowest))
    if not len(rows.seconds):
        raise InputError(f"no rows of {kind} kernels")
    # What only one whole has is no coordinate of another.
    axes = _axes(kind, rows, few if rows.whole is None else 0)
    left_out = held_out(rows, axes, along, first)
    return Family(
        grid=fit_grid(rows, axes, first),
        rows=left_out.rows,
        median=left_out.median,
        p95=left_out.p95,
        residuals=tuple(np.percentile(left_out.log_errors, PROBABILITIES).tolist())
        if len(left_out.log_errors)
        else (),
    )


#: Rows that a library may compute together: what shapes left out bear out is taken.
CUTS = (1, 64, 128, 256)

#: Median and 95th percentile of the errors that are aimed for, to weigh one against the other.
AIMS = (0.05, 0.20)


def fit_matrices(
    rows: Rows,
    compute: str,
    hardware: HardwareSpec,
    few: int = FEW,
    narrowest: float = NARROWEST,
    along: Sequence[str] = (),
    first: Sequence[str] | None = None,
    worth: float = 1.0,
) -> Family:
    """A family of matrices, with whichever cut into tiles predicts tokens left out best, if that is
    by less than `worth` of the error without tiles.

    The form of `rows` is not looked at; the rest as `fit_family` has it. Raises InputError where
    nothing was measured.
    """
    m, n, k = (rows.shape[name] for name in "mnk")
    wide = (n >= narrowest) & (k >= narrowest)
    if not wide.any():
        raise InputError(f"no rows of gemm kernels of {narrowest:g} and more each way")
    peak, bandwidth = hardware.peak_flops_per_s(compute), hardware.memory_bandwidth_bytes_per_s

    def cut(tile_rows: int) -> Rows:
        form = gemm_form_s(m, n, k, peak, bandwidth, WEIGHT_BITS[compute], tile_rows)
        return replace(rows, form_s=form)

    def off(tile_rows: int) -> float:
        own = cut(tile_rows).take(wide)
        found = held_out(own, _axes("gemm", own, few), ("m",), first)
        return found.median / AIMS[0] + found.p95 / AIMS[1]

    found = {tile_rows: off(tile_rows) for tile_rows in CUTS}
    best = min(found, key=found.__getitem__)
    if found[best] > worth * found[1]:
        best = 1
    family = fit_family("gemm", cut(best), few, narrowest, along, first)
    return replace(family, tile_rows=best)


def over_plain_form(
    name: str, family: Family, points: Sequence[FloatArray], hardware: HardwareSpec
) -> FloatArray:
    """Times of a family over the form that has no tiles, at points of its axes."""
    found = family.grid.factor(*points)
    if family.tile_rows > 1:
        m, n, k = points
        found = found * tiled_over_whole(m, n, k, name.split(" ")[1], family.tile_rows, hardware)
    return found


def _axes(kind: str, rows: Rows, few: int) -> dict[str, tuple[float, ...]]:
    return {name: _covered(points, rows.shape[name], few) for name, points in GRIDS[kind].items()}


def _covered(points: tuple[float, ...], column: FloatArray, few: int) -> tuple[float, ...]:
    """What was measured where that is little, else the usual points within; two at least."""
    measured = np.unique(column)
    inside = [point for point in points if measured[0] <= point <= measured[-1]]
    axis = measured.tolist() if len(measured) <= few or len(inside) < 2 else inside
    return tuple(axis) if len(axis) > 1 else (axis[0], 2 * axis[0])
