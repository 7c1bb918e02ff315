"""The constants of SRAM devices, fitted to published single-stream speeds, and what is left open.

The latency of a token is a sum of four unknowns times known amounts (`costmodels.wafer.Terms`), and
a few published speeds do not determine four unknowns. So two things are kept: one set of constants
that has the speeds, the one that spreads the explanation most evenly; and the range of every other
latency over all sets, none negative, that have the fitted speeds within a tenth (two linear
programs).
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import BFLOAT16
from servecast.costmodels.reading import read_bytes
from servecast.costmodels.specs import SRAM
from servecast.costmodels.wafer import MOST_UNITS, FabricConstants, Terms, place, terms_of

HERE = Path(__file__).parent / "fabric_profiles"
BUNDLED = HERE / "cerebras.yaml"

MAX_BYTES = 1_000_000

#: Published speeds are round, and "more than": so much off is still the speed.
TOLERANCE = 0.1

#: How many times as fast drafts and later software made the one model that was published with and
#: without: Llama-3.1-70B, 450 and 2,100 tokens/s.
SPECULATION_GAIN = 2100 / 450

#: Of a constant that no point says anything of.
MOST_LINK_S = 1e-3

#: How the systems of a list of points are called in the catalogue; the first that is in the name.
SYSTEMS = (
    (r"wse-?3|cs-?3", "cerebras-wse3"),
    (r"wse-?2|cs-?2", "cerebras-wse2"),
    (r"groq", "groq-lpu"),
)

#: How a list says whether drafts ran.
DRAFTS = {"no": "no", "none": "no", "false": "no", "yes": "yes", "true": "yes"}


@dataclass(frozen=True)
class Point:
    """A speed that somebody saw a single user get.

    Attributes
    ----------
    units : wafers or chips; None where that was not told
    drafts : "no", "yes" or "unknown": whether the speed is one of speculative decoding
    """

    hardware: str
    model: str
    units: int | None
    tokens_per_s: float
    drafts: str = "no"

    @property
    def seconds(self) -> float:
        """Of a token."""
        return 1.0 / self.tokens_per_s

    @property
    def key(self) -> tuple[str, str, float]:
        """What tells it from the others, however its model is written."""
        return self.hardware, self.model.rpartition("/")[2], self.tokens_per_s

    def terms(self) -> Terms:
        """What its latency is made of.

        Raises InputError where the model does not fit.
        """
        return _terms(self.hardware, self.model, self.units)


@lru_cache(maxsize=1000)
def _terms(hardware_name: str, model_name: str, units: int | None) -> Terms:
    hardware, model = load_hardware(hardware_name), load_model(model_name)
    longest = min(8192, model.max_position_embeddings)
    placement = place(model, hardware, BFLOAT16, units, tokens=longest)
    return terms_of(model, hardware, placement)


@dataclass(frozen=True)
class FabricFit:
    """Constants, and the points that they were fitted to."""

    name: str
    source: str
    points: tuple[Point, ...]
    constants: FabricConstants

    @property
    def label(self) -> str:
        """What a report says of step times that rest on it."""
        whose = "vendor's figures" if self.name == BUNDLED.stem else self.name
        return (
            f"constants fitted to {len(self.points)} single-stream speeds ({whose}); several users "
            "at a time are extrapolated (uncalibrated)"
        )

    def extremes(self, terms: Terms) -> tuple[FabricConstants, FabricConstants]:
        """Of all constants that have the fitted speeds: those of the least and the most latency."""
        found = [self._extreme(terms, sign) for sign in (1.0, -1.0)]
        return found[0], found[1]

    def ends(self, *of: Terms) -> list[FabricConstants]:
        """Sets of constants that have the fitted speeds and differ most: those that make each of
        some latencies least and most, and those that have all speeds a tenth higher or lower."""
        found = [constants for terms in of for constants in self.extremes(terms)]
        for factor in (1 - TOLERANCE, 1 + TOLERANCE):
            shifted = _solve(
                [replace(p, tokens_per_s=p.tokens_per_s / factor) for p in self.points]
            )
            if all(abs(_off(point, shifted)) <= TOLERANCE + 1e-3 for point in self.points):
                found.append(shifted)
        return list(dict.fromkeys(found))

    def range_s(self, terms: Terms) -> tuple[float, float]:
        """The least and the most seconds of a token."""
        low, high = (terms.seconds(constants) for constants in self.extremes(terms))
        return low, high

    def _extreme(self, terms: Terms, sign: float) -> FabricConstants:
        from scipy.optimize import linprog

        rows, bounds = [], []
        for point in self.points:
            own = point.terms()
            amounts = _amounts(own)
            rows += [amounts, [-amount for amount in amounts]]
            bounds += [
                point.seconds * (1 + TOLERANCE) - own.const_s,
                own.const_s - point.seconds * (1 - TOLERANCE),
            ]
        scales = _scales(self.points)
        table = np.array(rows) * scales
        found = linprog(
            sign * np.array(_amounts(terms)) * scales,
            A_ub=table / np.abs(bounds)[:, None],
            b_ub=np.sign(bounds),
            # No constant explains more than a whole point; of links one wafer tells nothing.
            bounds=(0, 1 + 2 * TOLERANCE),
            method="highs",
        )
        if not found.success or found.x is None:
            raise InputError(f"points: no constants have all of them within {TOLERANCE:.0%}")
        return FabricConstants(*(float(v) for v in found.x * scales))


def _off(point: Point, constants: FabricConstants) -> float:
    """How far the constants are off the time of a point's token, as a share of it."""
    return point.terms().seconds(constants) / point.seconds - 1


def _amounts(terms: Terms) -> list[float]:
    return [terms.fixed, terms.hops, terms.words, terms.link]


def _scales(points: Sequence[Point]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of each constant: what alone would make up the point that it explains with least."""
    alone = []
    for point in points:
        terms = point.terms()
        left = point.seconds - terms.const_s
        if left <= 0:
            raise InputError(
                f"points: {point.model} on {point.hardware}: {point.tokens_per_s:g} tokens/s are "
                f"more than its arithmetic and bytes allow ({1 / terms.const_s:,.0f})"
            )
        alone.append([left / a if a else np.inf for a in _amounts(terms)])
    scales: np.ndarray[Any, np.dtype[np.float64]] = np.min(alone, axis=0)
    scales[~np.isfinite(scales)] = MOST_LINK_S
    return scales


def fit_fabric(points: Iterable[Point], name: str, source: str) -> FabricFit:
    """The constants that have the speeds and spread the explanation most evenly.

    Raises InputError where no constants come near.
    """
    kept = tuple(points)
    if not kept:
        raise InputError("points: none that can be fitted")
    constants = _solve(kept)
    for point in kept:
        miss = _off(point, constants)
        if abs(miss) > TOLERANCE:
            raise InputError(
                f"points: {point.model} on {point.hardware}: no constants come nearer than "
                f"{miss:+.0%} to its {point.tokens_per_s:g} tokens/s together with the others"
            )
    return FabricFit(name, source, kept, constants)


def _solve(points: Sequence[Point]) -> FabricConstants:
    """Non-negative least squares on relative errors, and on the constants in units of what each
    alone would explain, a hundredth as heavy."""
    from scipy.optimize import nnls

    scales = _scales(points)
    rows, wanted = [], []
    for point in points:
        terms = point.terms()
        rows.append(np.array(_amounts(terms)) * scales / point.seconds)
        wanted.append(1.0 - terms.const_s / point.seconds)
    table = np.vstack([np.array(rows), 0.01 * np.eye(4)])
    shares, _ = nnls(table, np.concatenate([wanted, np.zeros(4)]))
    return FabricConstants(*(float(v) for v in shares * scales))


def fit_of(name_or_path: str) -> FabricFit | None:
    """The fit of a profile by name or file; None where it is of another kind.

    Raises InputError for a file of this kind that cannot be read.
    """
    path = Path(name_or_path)
    if name_or_path == BUNDLED.stem:
        path = BUNDLED
    elif path.suffix not in (".yaml", ".yml"):
        return None
    content = read_bytes(path, 10 * MAX_BYTES)
    if b"kind: fabric" not in content[:200]:
        return None
    return _fit_of(path, content)


@lru_cache(maxsize=8)
def _fit_of(path: Path, content: bytes) -> FabricFit:
    try:
        row = yaml.safe_load(content.decode("utf-8"))
        points = [_point_of(entry) for entry in row["points"]]
        return fit_fabric(points, path.stem, " ".join(str(row["source"]).split()))
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        text = " ".join(f"{type(error).__name__} {error}".split())
        raise InputError(f"{path}: not a fabric's profile: {text[:160]}") from None


def bundled_fabric() -> FabricFit:
    """What every SRAM device of the catalogue runs with."""
    found = fit_of(BUNDLED.stem)
    assert found is not None
    return found


def _point_of(row: Mapping[str, Any]) -> Point:
    units = row.get("wafers")
    speed = float(row["output_tok_s_per_user"])
    if not 0 < speed < 1e9 or (units is not None and int(units) < 1):
        raise ValueError(f"{row}: expected a speed above 0 and at least one wafer")
    return Point(str(row["hardware"]), str(row["model"]), units and int(units), speed)


def fabric_text(fit: FabricFit) -> str:
    """A profile as a file."""
    points = [
        {
            "hardware": point.hardware,
            "model": point.model,
            **({} if point.units is None else {"wafers": point.units}),
            "output_tok_s_per_user": point.tokens_per_s,
        }
        for point in fit.points
    ]
    return yaml.safe_dump(
        {"kind": "fabric", "source": fit.source, "points": points}, sort_keys=False, width=100
    )


# ---------------------------------------------------------------- lists of points


def read_points(path: Path) -> tuple[list[Point], list[str]]:
    """Speeds of a CSV with `system`, `model`, `output_tok_s_per_user`, and if told `devices` and
    `spec_decode`; and why each other row is left out. A list without `spec_decode` is one of speeds
    without drafts.

    Raises InputError naming file and line for a row that cannot be read.
    """
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    rows = csv.DictReader(io.StringIO(text))
    missing = {"system", "model", "output_tok_s_per_user"} - set(rows.fieldnames or ())
    if missing:
        raise InputError(f"{path}: no column {min(missing)}")
    points, notes = [], []
    for number, row in enumerate(rows, 2):
        where = f"{path}:{number}"
        try:
            speed = float(row["output_tok_s_per_user"])
        except (TypeError, ValueError):
            raise InputError(
                f"{where}: output_tok_s_per_user: expected a number, got "
                f"{row['output_tok_s_per_user']!r}"
            ) from None
        if not 0 < speed < 1e9:
            raise InputError(
                f"{where}: output_tok_s_per_user: expected a number above 0: {speed:g}"
            )
        units = _units(str(row.get("devices") or "").strip(), where)
        system = str(row["system"]).strip().lower()
        hardware = next((name for word, name in SYSTEMS if re.search(word, system)), system)
        drafts = "no"
        if "spec_decode" in (rows.fieldnames or ()):
            word = re.match(r"\w*", str(row["spec_decode"] or "").strip().lower())
            drafts = DRAFTS.get(word.group() if word else "", "unknown")
        try:
            if load_hardware(hardware).kind != SRAM:
                raise InputError(f"{hardware} is no SRAM device")
            model = _model_named(str(row["model"]).partition(" (")[0].strip())
            point = Point(hardware, model, units, speed, drafts)
            point.terms()
        except InputError as error:
            notes.append(f"{where}: left out: {error}")
            continue
        points.append(point)
    return points, notes


def _units(told: str, where: str) -> int | None:
    """A number of devices; None where a list has words for it."""
    try:
        units = float(told)
    except ValueError:
        return None
    if not 1 <= units <= MOST_UNITS or units != int(units):
        raise InputError(f"{where}: devices: expected a whole number from 1, got {told}")
    return int(units)


def _model_named(name: str) -> str:
    """The catalogue's name for a model as people write it: `Llama-2-7B` is Llama-2-7b-hf."""
    for candidate in (name, f"{name}-hf", f"{name}-v0.1", f"{name}-Instruct"):
        try:
            load_model(candidate)
        except InputError:
            continue
        return candidate
    load_model(name)
    raise AssertionError("unreachable")


def held_against(fit: FabricFit, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Each point as the constants have it: `{hardware, model, units, drafts, measured, predicted,
    low, high, inside, fitted}` in tokens a second; where drafts may have run, `high` has what they
    bring."""
    rows = []
    fitted = {point.key for point in fit.points}
    for point in points:
        terms = point.terms()
        least_s, most_s = fit.range_s(terms)
        gain = 1.0 if point.drafts == "no" else SPECULATION_GAIN
        low, high = 1 / most_s, gain / least_s
        own = point.key in fitted
        rows.append(
            {
                "hardware": point.hardware,
                "model": point.model,
                "units": point.units,
                "drafts": point.drafts,
                "measured": point.tokens_per_s,
                "predicted": 1 / terms.seconds(fit.constants),
                "low": low,
                "high": high,
                "inside": abs(_off(point, fit.constants)) <= TOLERANCE
                if own
                else low <= point.tokens_per_s <= high,
                "fitted": own,
            }
        )
    return rows
