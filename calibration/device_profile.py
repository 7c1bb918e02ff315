"""From what a device gave to its profile, and the raw rows beside it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servecast.calibration.fit import (
    Rows,
    fit_curve,
    fit_family,
    fit_matrices,
    over_plain_form,
)
from servecast.calibration.measuring import Measured, Row
from servecast.calibration.store import AXES, Family, Host, KernelProfile
from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import Curve
from servecast.costmodels.specs import HardwareSpec

#: Coordinates up to so many are all kept: a device is measured at the shapes of its models.
FEW = 64

#: What is left out to see how good a fit is: between a model's own widths and heads, all of which
#: were measured, nothing has to be guessed.
ALONG = {
    "gemm": ("m",),
    "decode": ("sequences", "context"),
    "prefill": ("new",),
    "packed": ("new", "context"),
    "experts": ("rows",),
}

#: Along what gaps are filled first: matrices are measured at more tokens where neighbours disagree,
#: one shape here and another there.
FIRST = {"gemm": ("m",), "experts": ("rows",)}

#: Rows are few: tiles of matrices must be worth it.
TILES_WORTH = 0.9

#: Points that a family needs, or its grid says nothing.
FEWEST = 4

#: Between the fewest and the most tokens of a family of matrices, at least.
WIDE = 16.0

#: Columns of the raw rows beside each family's coordinates.
MEASURES = ("seconds", "form_s", "fitted_s", "noise", "runs")


def device_profile(
    measured: Measured, hardware: HardwareSpec, name: str, date: str, host: Host | None = None
) -> KernelProfile:
    """Fit every family that was measured.

    Raises InputError where there was not even time for the matrices.
    """
    groups = by_family(measured.rows)
    families: dict[str, Family] = {}
    for family, rows in groups.items():
        kind = family.split(" ")[0]
        if kind in AXES and len(rows) >= FEWEST and rows[0].point.form_s and _wide(kind, rows):
            families[family] = _fitted(family, rows, hardware)
    if not any(family.startswith("gemm") for family in families):
        why = next((w for f, w in measured.refused.items() if f.startswith("gemm")), "")
        raise InputError(f"too little was measured for a profile: {why or 'give more --minutes'}")
    return KernelProfile(
        name=name,
        hardware=hardware.name,
        device=str(measured.facts["device"]),
        source=_source(measured, date),
        families=families,
        all_reduce=_all_reduce(measured),
        small=_curve(groups.get("small", ()), "bytes"),
        sampling=_curve(groups.get("sampling", ()), "logits"),
        block_factor=_factors(groups.get("block_size", ()), "block_size", _main_block(groups)),
        query_factor=_factors(groups.get("query_len", ()), "query_len", 1),
        whole_factor=_wholes(groups, "layer"),
        host=host,
        extras=_extras(groups),
    )


def _fitted(family: str, rows: Sequence[Row], hardware: HardwareSpec) -> Family:
    kind, key = family.split(" ")
    along, first = ALONG[kind], FIRST.get(kind, ())
    if kind == "gemm":
        own = as_rows(kind, rows)
        return fit_matrices(own, key, hardware, FEW, 1, along, first, TILES_WORTH)
    return fit_family(kind, as_rows(kind, rows), FEW, 1, along, first)


def _wide(kind: str, rows: Sequence[Row]) -> bool:
    """Matrices of a few tokens alone say nothing of many."""
    tokens = [float(row.point.shape["m"]) for row in rows] if kind == "gemm" else [1.0, WIDE]
    return max(tokens) >= WIDE * min(tokens)


def by_family(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each family, in the order they were measured."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.point.family].append(row)
    return found


def as_rows(kind: str, rows: Sequence[Row]) -> Rows:
    """As a fit takes them."""
    return Rows(
        {axis: np.array([float(row.point.shape[axis]) for row in rows]) for axis in AXES[kind]},
        np.array([row.seconds for row in rows]),
        np.array([row.point.form_s for row in rows]),
    )


def _source(measured: Measured, date: str) -> dict[str, str]:
    facts = measured.facts
    noise = float(np.median([row.noise for row in measured.rows])) if measured.rows else 0.0
    found = {
        "what": "servecast calibrate",
        "date": date,
        "kernels": str(facts["kernels"]),
        "timed": "medians, weights and KV larger than the cache"
        + (
            " (256 sets at most), in CUDA graphs but for copies to and from the host"
            if "cuda" in facts
            else f" (64 sets at most), {facts['threads']} threads"
        ),
        "minutes": f"{measured.seconds / 60:.1f}",
        "noise": f"{noise:.2%} (median relative standard error)",
    }
    if measured.changed is not None:
        found["measured again"] = f"{measured.changed:.1%} apart (median)"
    found |= {
        name: str(facts[name])
        for name in ("driver", "torch", "triton", "cuda", "cudnn", "python")
        if name in facts
    }
    seen = [clock for clock in measured.clocks if clock]
    for key in ("clock_mhz", "memory_clock_mhz", "temperature_c", "power_w"):
        values = [clock[key] for clock in seen if key in clock]
        if values:
            found[key] = " to ".join(f"{value:.0f}" for value in (min(values), max(values)))
    there = {row.point.family for row in measured.rows}
    refused = {family: why for family, why in measured.refused.items() if family not in there}
    if refused:
        found["not measured"] = "; ".join(f"{k}: {v}" for k, v in refused.items())[:500]
    if measured.refused.keys() & there:
        found["refused in part"] = ", ".join(sorted(measured.refused.keys() & there))
    for key in ("interrupted", "host"):
        if facts.get(key):
            found[key] = "yes" if facts[key] is True else str(facts[key])
    return found


def _all_reduce(measured: Measured) -> dict[int, Curve]:
    curves = {
        ranks: fit_curve(np.array([*sizes]), np.array([*sizes.values()]))
        for ranks, sizes in measured.all_reduce.items()
    }
    return {ranks: curve for ranks, curve in curves.items() if curve is not None}


def _curve(rows: Sequence[Row], key: str) -> Curve | None:
    """Of models together."""
    sizes = np.array([float(row.point.shape[key]) for row in rows])
    return fit_curve(sizes, np.array([row.seconds for row in rows]))


def _main_block(groups: Mapping[str, Sequence[Row]]) -> int:
    rows = groups.get(main_decode(groups), ())
    return int(rows[0].point.request["block_size"]) if rows else 0


def main_decode(families: Iterable[str]) -> str:
    """The family that block sizes were compared in, that of the widest KV; "" without any."""
    decodes = [family for family in families if family.startswith("decode ")]
    return max(decodes, key=lambda family: int(family.split(" ")[1]), default="")


def _factors(rows: Sequence[Row], key: str, base: int) -> dict[int, float]:
    """Over the time at `base`; none where that was not measured."""
    seconds = {int(row.point.shape[key]): row.seconds for row in rows}
    if base not in seconds or len(seconds) < 2:
        return {}
    return {size: seconds[size] / seconds[base] for size in sorted(seconds)}


def _extras(groups: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Copies in bytes a second, launches in seconds, wholes over the sum of their parts."""
    found: dict[str, float] = {}
    for family, rows in groups.items():
        if family.startswith("copy"):
            fastest = max(float(row.point.request["bytes"]) / row.seconds for row in rows)
            found[f"{family} bytes_per_s"] = fastest
        elif family.startswith("launch"):
            found[f"{family}_s"] = rows[0].seconds
        elif family == "skew":
            equal = next((row.seconds for row in rows if row.point.shape["skew"] == 0.0), None)
            for row in rows:
                if equal:
                    found[f"skew {row.point.shape['skew']:g} over equal contexts"] = (
                        row.seconds / equal
                    )
    for whole in ("layer", "model"):
        for tokens, ratio in _wholes(groups, whole).items():
            found[f"{whole} of {tokens} tokens over its parts"] = ratio
    return found


def _wholes(groups: Mapping[str, Sequence[Row]], family: str) -> dict[int, float]:
    """Measured wholes over the sums of their parts, by tokens; of several models the median."""
    seconds = {_key(row.point.request): row.seconds for rows in groups.values() for row in rows}
    found: dict[int, list[float]] = defaultdict(list)
    for row in groups.get(family, ()):
        parts = [seconds.get(_key(part)) for part in row.point.request["parts"]]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            together = sum(known) * row.point.request.get("repeat", 1)
            found[int(row.point.shape["tokens"])].append(row.seconds / together)
    return {tokens: float(np.median(found[tokens])) for tokens in sorted(found)}


def _key(request: Mapping[str, Any]) -> str:
    return repr(sorted((key, str(value)) for key, value in request.items()))


def write_rows(
    measured: Measured, profile: KernelProfile, hardware: HardwareSpec, path: Path
) -> None:
    """All rows as Parquet: family, coordinates, seconds, form, what the profile gives, noise."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [
        {
            "family": row.point.family,
            **{name: float(value) for name, value in row.point.shape.items()},
            "block_size": float(row.point.request.get("block_size", np.nan)),
            "seconds": row.seconds,
            "form_s": row.point.form_s,
            "fitted_s": fitted_s(profile, hardware, row),
            "noise": row.noise,
            "runs": row.runs,
            "request": repr(dict(row.point.request)),
        }
        for row in measured.rows
    ]
    columns = dict.fromkeys(name for row in table for name in row)
    pq.write_table(pa.table({name: [row.get(name) for row in table] for name in columns}), path)


def fitted_s(profile: KernelProfile, hardware: HardwareSpec, row: Row) -> float:
    """What a profile gives for a row of a family, or of a block size; NaN for others."""
    name, factor = row.point.family, 1.0
    if name == "block_size":
        name = main_decode(profile.families)
        factor = profile.block_factor.get(int(row.point.shape["block_size"]), float("nan"))
    family = profile.families.get(name)
    if family is None:
        return float("nan")
    at = [np.array([float(row.point.shape[axis])]) for axis in AXES[name.split(" ")[0]]]
    found = over_plain_form(name, family, at, hardware)
    return factor * row.point.form_s * float(found[0])


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Raw rows by family, for figures: coordinates and `MEASURES`.

    Raises InputError for a file that is not one of them.
    """
    import pyarrow
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        columns = {name: table[name].to_numpy() for name in table.column_names}
        families = columns.pop("family").astype(str)
        columns.pop("request", None)
        for name in MEASURES:
            columns[name] = columns[name].astype(float)
    except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not the rows of a profile: {error}") from None
    found: dict[str, dict[str, Any]] = {}
    for family in dict.fromkeys(families.tolist()):
        # Other block sizes are decode attention too.
        kept = families == family
        if family == main_decode(families.tolist()):
            kept |= families == "block_size"
        own = {name: column[kept] for name, column in columns.items()}
        found[family] = {
            name: column
            for name, column in own.items()
            if name in MEASURES or not np.isnan(column.astype(float)).all()
        }
    return found
