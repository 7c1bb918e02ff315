"""One profile held against another of the same device, operator by operator."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from servecast.calibration.fit import over_plain_form
from servecast.calibration.store import AXES, KernelProfile
from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import Curve
from servecast.costmodels.specs import HardwareSpec

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """Times of one operator over the other profile's, where both have it.

    Attributes
    ----------
    points : shapes that lie within what the other was measured at
    ratio : median of this over that
    median, p95 : of the absolute difference, relative to the other
    """

    name: str
    points: int
    ratio: float
    median: float
    p95: float


def hold_against(
    profile: KernelProfile,
    rows: Mapping[str, Mapping[str, Any]],
    other: KernelProfile,
    hardware: HardwareSpec,
) -> list[Difference]:
    """Every operator of both: measured rows where there are some, else the points of the grid.

    Raises InputError for profiles of two devices, and where they share no operator.
    """
    if profile.hardware != other.hardware:
        raise InputError(
            f"--against {other.name}: of {other.hardware}, and {profile.name} is of "
            f"{profile.hardware}"
        )
    found = [
        difference
        for name, ratios in _ratios(profile, rows, other, hardware)
        if (difference := _difference(name, ratios)) is not None
    ]
    if not found:
        raise InputError(f"--against {other.name}: has no operator that {profile.name} has")
    return found


def _ratios(
    profile: KernelProfile,
    rows: Mapping[str, Mapping[str, Any]],
    other: KernelProfile,
    hardware: HardwareSpec,
) -> Iterator[tuple[str, FloatArray]]:
    for name, theirs in other.families.items():
        own = profile.families.get(name)
        if own is None:
            continue
        axes = AXES[name.split(" ")[0]]
        if name in rows:
            table = rows[name]
            points = [np.asarray(table[axis], float) for axis in axes]
            seen = np.asarray(table["seconds"], float) / np.asarray(table["form_s"], float)
            if "block_size" in table and name.startswith("decode "):
                # Rows of other block sizes lie beside those of the grid's.
                sizes, counts = np.unique(np.asarray(table["block_size"]), return_counts=True)
                main = np.asarray(table["block_size"]) == sizes[counts.argmax()]
                points, seen = [point[main] for point in points], seen[main]
        else:
            grids = np.meshgrid(*(np.asarray(axis) for axis in own.grid.axes), indexing="ij")
            points = [grid.ravel() for grid in grids]
            seen = over_plain_form(name, own, points, hardware)
        inside = np.all(
            [
                (axis[0] <= point) & (point <= axis[-1])
                for axis, point in zip(theirs.grid.axes, points, strict=True)
            ],
            axis=0,
        )
        yield name, (seen / over_plain_form(name, theirs, points, hardware))[inside]
    curves: list[tuple[str, Curve | None, Curve | None]] = [
        ("small kernels of a layer", profile.small, other.small),
        ("sampling", profile.sampling, other.sampling),
    ]
    for ranks, curve in profile.all_reduce.items():
        curves.append((f"all-reduce of {ranks}", curve, other.all_reduce.get(ranks)))
    for name, first, second in curves:
        if first is not None and second is not None:
            shared = [size for size in first.sizes if second.sizes[0] <= size <= second.sizes[-1]]
            yield name, np.array([first.at(size) / second.at(size) for size in shared])


def _difference(name: str, ratios: FloatArray) -> Difference | None:
    if not len(ratios):
        return None
    off = np.abs(ratios - 1.0)
    return Difference(
        name,
        len(ratios),
        float(np.median(ratios)),
        float(np.median(off)),
        float(np.percentile(off, 95)),
    )
