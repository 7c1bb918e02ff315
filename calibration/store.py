"""Profiles as files: the corrections of a device's kernels, where they are from, how good they are.

YAML; a grid is a block of whole numbers, hundredths of a power of two, a line for each run of its
last axis.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import (
    SMALL_KERNEL_S,
    WEIGHT_BITS,
    Beside,
    Curve,
    Grid,
    Kernels,
    Tail,
)
from servecast.costmodels.reading import read_bytes

HERE = Path(__file__).parent / "profiles"

FORMAT = 1
MAX_BYTES = 5_000_000

#: Steps of a power of two that are kept: a hundredth is 0.7 %.
STEPS = 100

#: Axes of each family's grid.
AXES = {
    "gemm": ("m", "n", "k"),
    "experts": ("rows", "intermediate", "met"),
    "prefill": ("new", "heads", "group"),
    "decode": ("sequences", "context", "kv_heads", "group"),
    "packed": ("new", "context", "heads"),
    "mixed": ("new", "streams", "context", "group"),
}

MOST_POINTS = 1_000_000

#: Errors of a family that are kept, as quantiles.
KEPT_RESIDUALS = 20


@dataclass(frozen=True)
class Family:
    """One kernel family of a profile.

    Attributes
    ----------
    grid : corrections
    rows : measured rows behind it
    median, p95 : relative errors on shapes that the fit did not see
    residuals : log(predicted / measured) at equal steps of probability, those shapes again; none
        where nothing could be left out, and then the errors say nothing
    tile_rows : of matrices, those that the form takes together
    """

    grid: Grid
    rows: int
    median: float
    p95: float
    residuals: tuple[float, ...] = ()
    tile_rows: int = 1


@dataclass(frozen=True)
class Host:
    """Time of an engine on the CPU, from steps in which a device has next to nothing to do.

    Attributes
    ----------
    engine : name and version
    step_s, sequence_s : of a step, and of each sequence in it
    layer_s : launching one layer's kernels one by one; None where that was not measured
    """

    engine: str
    step_s: float
    sequence_s: float
    layer_s: float | None


@dataclass(frozen=True)
class KernelProfile(Beside):
    """What a file holds.

    Attributes
    ----------
    hardware : the catalogue's device whose datasheet the corrections are of
    source : what was measured, by whom, under which licence
    families : by "gemm 16bit", "decode 8" and so on
    host : of an engine, where one was run
    extras : what else was measured, by name: seconds, bytes a second, ratios
    """

    name: str
    hardware: str
    device: str
    source: Mapping[str, str]
    families: Mapping[str, Family]
    host: Host | None = None
    extras: Mapping[str, float] = field(default_factory=dict)

    def kernels(self) -> Kernels:
        """As a cost model takes them."""

        def of(kind: str) -> dict[str, Grid]:
            chosen = (name for name in self.families if name.startswith(f"{kind} "))
            return {name.split(" ")[1]: self.families[name].grid for name in chosen}

        return Kernels(
            label=f"kernels measured on {self.device} ({self.source['what']})",
            gemm=of("gemm"),
            tiles={
                name.split(" ")[1]: family.tile_rows
                for name, family in self.families.items()
                if family.tile_rows > 1
            },
            experts=of("experts"),
            prefill={int(bits): grid for bits, grid in of("prefill").items()},
            decode={int(bits): grid for bits, grid in of("decode").items()},
            packed={int(bits): grid for bits, grid in of("packed").items()},
            mixed={int(bits): grid for bits, grid in of("mixed").items()},
            **{own.name: getattr(self, own.name) for own in fields(Beside)},
        )


def profile_names() -> tuple[str, ...]:
    """The bundled ones."""
    return tuple(sorted(path.stem for path in HERE.glob("*.yaml")))


def load_profile(name_or_path: str) -> KernelProfile:
    """A bundled profile by name, or a file; read once as long as the file does not change.

    Raises InputError for an unknown name, and for a file that is not one.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = HERE / f"{name_or_path}.yaml"
        if name_or_path not in profile_names():
            known = ", ".join(profile_names())
            raise InputError(f"profile: {name_or_path!r} is not known; one of {known}, or a file")
    try:
        told = path.stat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return _load(path, (told.st_mtime_ns, told.st_size))


@lru_cache(maxsize=32)
def _load(path: Path, state: tuple[int, int]) -> KernelProfile:
    content = read_bytes(path, MAX_BYTES)
    try:
        text = content.decode("utf-8")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return _profile(yaml.load(text, Loader=loader), path)
    except (
        ArithmeticError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        raise InputError(f"{path}: not a profile: {_short(error)}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {_short(error)}") from None


def _short(error: Exception) -> str:
    told = f"misses {error}" if type(error) is KeyError else f"{type(error).__name__} {error}"
    text = " ".join(told.split())
    return text if len(text) <= 160 else text[:157] + "..."


def _profile(data: Any, path: Path) -> KernelProfile:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"expected format: {FORMAT}")
    if "what" not in data["source"]:
        raise ValueError("source: expected what was measured")
    return KernelProfile(
        name=path.stem,
        hardware=str(data["hardware"]),
        device=str(data["device"]),
        source={str(key): str(value) for key, value in data["source"].items()},
        families={str(name): _family(str(name), row) for name, row in data["families"].items()},
        small_kernel_s=_small(data.get("small_kernel_s", SMALL_KERNEL_S)),
        all_reduce={
            int(ranks): _curve(row) for ranks, row in (data.get("all_reduce") or {}).items()
        },
        small=_curve(data["small"]) if "small" in data else None,
        sampling=_curve(data["sampling"]) if "sampling" in data else None,
        block_factor=_factors(data, "block_factor"),
        query_factor=_factors(data, "query_factor"),
        whole_factor=_factors(data, "whole_factor"),
        tail=_tail(data["tail"]) if "tail" in data else None,
        host=_host(data["host"]) if "host" in data else None,
        extras={str(name): _number(value) for name, value in (data.get("extras") or {}).items()},
    )


def _factors(data: Mapping[str, Any], key: str) -> dict[int, float]:
    found = {int(size): _number(value) for size, value in (data.get(key) or {}).items()}
    if any(size < 1 or not 0 < value < 1e3 for size, value in found.items()):
        raise ValueError(f"{key}: expected factors above 0 by size")
    return found


def _tail(row: Mapping[str, Any]) -> Tail:
    streams = _number(row["streams"])
    shares = [
        {int(size): _number(value) for size, value in (row.get(key) or {}).items()}
        for key in ("alone", "beside_prompt")
    ]
    sound = all(size >= 1 and 0 <= share < 1e3 for own in shares for size, share in own.items())
    if not 1 <= streams < 1e5 or not sound:
        raise ValueError("tail: expected streams, 1 or more, and shares of 0 or more by streams")
    return Tail(streams, *shares)


def _host(row: Mapping[str, Any]) -> Host:
    step_s, sequence_s = _number(row["step_s"]), _number(row["sequence_s"])
    layer_s = None if row.get("layer_s") is None else _number(row["layer_s"])
    if not all(0 <= value < 1e3 for value in (step_s, sequence_s, layer_s or 0.0)):
        raise ValueError("host: expected seconds, 0 or more")
    return Host(str(row["engine"]), step_s, sequence_s, layer_s)


def _number(value: Any) -> float:
    number = float(value)
    if not np.isfinite(number):
        raise ValueError(f"expected a number: {value}")
    return number


def _small(value: Any) -> float:
    if not 0 <= float(value) < 1:
        raise ValueError(f"small_kernel_s: expected 0 to 1, got {value}")
    return float(value)


def _family(name: str, row: Mapping[str, Any]) -> Family:
    kind, _, key = name.partition(" ")
    bits = kind in ("prefill", "decode", "packed", "mixed")
    if kind not in AXES or not (key.isdigit() if bits else key in WEIGHT_BITS):
        raise ValueError(f"{name}: not a family of kernels")
    axes = tuple(_axis(row["axes"][axis]) for axis in AXES[kind])
    shape = tuple(map(len, axes))
    if np.prod(shape) > MOST_POINTS:
        raise ValueError(f"{name}: more than {MOST_POINTS} points")
    values = np.array(str(row["log2"]).split(), dtype=np.int64).reshape(shape) / STEPS
    if (np.abs(values) > 30).any():
        raise ValueError(f"{name}: a correction beyond 2^30")
    residuals = tuple(float(value) for value in row["residuals"])
    if len(residuals) not in (0, KEPT_RESIDUALS):
        raise ValueError(f"{name}: expected {KEPT_RESIDUALS} residuals, or none")
    median, p95 = float(row["median"]), float(row["p95"])
    if not np.isfinite([median, p95, *residuals]).all():
        raise ValueError(f"{name}: errors must be numbers")
    tile_rows = int(row.get("tile_rows", 1))
    if not 1 <= tile_rows <= 4096 or (tile_rows > 1 and kind != "gemm"):
        raise ValueError(f"tile_rows: expected 1 to 4096, of matrices, got {tile_rows}")
    return Family(Grid(axes, values), int(row["rows"]), median, p95, residuals, tile_rows)


def _axis(values: Any) -> tuple[float, ...]:
    axis = tuple(float(value) for value in values)
    if len(axis) < 2 or axis[0] <= 0 or not all(a < b for a, b in pairwise(axis)):
        raise ValueError(f"an axis needs two or more ascending numbers above 0: {axis[:4]}")
    if not np.isfinite(axis).all():
        raise ValueError("an axis must be numbers")
    return axis


def _curve(row: Mapping[str, Any]) -> Curve:
    sizes, seconds = _axis(row["bytes"]), tuple(float(value) for value in row["seconds"])
    positive = all(0 < value < 1e6 for value in seconds)
    if len(sizes) != len(seconds) or not positive:
        raise ValueError("a curve needs as many positive seconds as sizes")
    return Curve(sizes, seconds)


def profile_facts(profile: KernelProfile) -> dict[str, Any]:
    """A profile without its grids, fit for JSON."""
    return {
        "name": profile.name,
        "hardware": profile.hardware,
        "device": profile.device,
        "source": dict(profile.source),
        "small_kernel_s": profile.small_kernel_s,
        "all_reduce_ranks": sorted(profile.all_reduce),
        "block_factor": {str(size): value for size, value in profile.block_factor.items()},
        "query_factor": {str(size): value for size, value in profile.query_factor.items()},
        "whole_factor": {str(size): value for size, value in profile.whole_factor.items()},
        "tail": None if profile.tail is None else _tail_rows(profile.tail),
        "host": None if profile.host is None else asdict(profile.host),
        "extras": dict(profile.extras),
        "families": {
            name: {
                "rows": family.rows,
                "tile_rows": family.tile_rows,
                "grid": [len(axis) for axis in family.grid.axes],
                "median": family.median,
                "p95": family.p95,
                "residuals": list(family.residuals),
            }
            for name, family in profile.families.items()
        },
    }


def profile_text(profile: KernelProfile) -> str:
    """A profile as a file."""
    head = {
        "format": FORMAT,
        "hardware": profile.hardware,
        "device": profile.device,
        "source": dict(profile.source),
        "small_kernel_s": float(f"{profile.small_kernel_s:.4g}"),
    }
    lines = [yaml.safe_dump(head, sort_keys=False).rstrip("\n"), "families:"]
    for name, family in profile.families.items():
        lines.append(f"  {name}:")
        lines.append(f"    rows: {family.rows}")
        lines.append(f"    median: {family.median:.4f}")
        lines.append(f"    p95: {family.p95:.4f}")
        lines.append(f"    residuals: [{', '.join(f'{r:.4f}' for r in family.residuals)}]")
        if family.tile_rows > 1:
            lines.append(f"    tile_rows: {family.tile_rows}")
        lines.append("    axes:")
        for axis, values in zip(AXES[name.split(" ")[0]], family.grid.axes, strict=True):
            lines.append(f"      {axis}: [{', '.join(f'{value:g}' for value in values)}]")
        lines.append("    log2: |")
        steps = np.rint(family.grid.values * STEPS).astype(int)
        for row in steps.reshape(-1, steps.shape[-1]):
            lines.append("      " + " ".join(map(str, row.tolist())))
    if profile.all_reduce:
        lines.append("all_reduce:")
        for ranks, curve in profile.all_reduce.items():
            lines += [f"  {ranks}:", *_curve_lines(curve, "    ")]
    for name, measured in (("small", profile.small), ("sampling", profile.sampling)):
        if measured is not None:
            lines += [f"{name}:", *_curve_lines(measured, "  ")]
    rest: dict[str, Any] = {
        "block_factor": _rounded(profile.block_factor),
        "query_factor": _rounded(profile.query_factor),
        "whole_factor": _rounded(profile.whole_factor),
        "extras": _rounded(profile.extras),
    }
    if profile.tail is not None:
        rest["tail"] = _tail_rows(profile.tail)
    if profile.host is not None:
        rest["host"] = {
            key: float(f"{value:.4g}") if isinstance(value, float) else value
            for key, value in asdict(profile.host).items()
            if value is not None
        }
    rest = {name: value for name, value in rest.items() if value}
    if rest:
        lines.append(yaml.safe_dump(rest, sort_keys=False).rstrip("\n"))
    return "\n".join(lines) + "\n"


def _tail_rows(tail: Tail) -> dict[str, Any]:
    return {
        "streams": float(f"{tail.streams:.4g}"),
        "alone": _rounded(tail.alone),
        "beside_prompt": _rounded(tail.beside_prompt),
    }


def _rounded(values: Mapping[Any, float]) -> dict[Any, float]:
    return {key: float(f"{value:.4g}") for key, value in values.items()}


def _curve_lines(curve: Curve, indent: str) -> list[str]:
    return [
        f"{indent}bytes: [{', '.join(f'{size:.0f}' for size in curve.sizes)}]",
        f"{indent}seconds: [{', '.join(f'{s:.4g}' for s in curve.seconds)}]",
    ]
