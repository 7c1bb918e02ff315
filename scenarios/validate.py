"""`servecast validate`: predictions held against measured runs, metric by metric.

A case is a YAML file: `scenario` (a file beside it), `measured`, and `client: true` where the
latencies were taken at a client. `measured` holds either `requests`, a file of vLLM's own time
stamps, or metrics (`ttft_s`, `tpot_s`, `e2e_s`) with their `mean`, `p50`, `p95` or `p99`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from servecast.calibration.measured import (
    CLIENT_PATH_S,
    METRICS,
    OF_REQUESTS,
    STATS,
    Latencies,
    read_requests,
)
from servecast.calibration.profile import GENERIC, Profile
from servecast.calibration.spread import step_spread
from servecast.calibration.store import load_profile
from servecast.costmodels.errors import InputError
from servecast.costmodels.reading import read_bytes
from servecast.costmodels.shape import NS_PER_S, PARTS
from servecast.scenarios.build import beside, build, set_up
from servecast.scenarios.load import LoadedScenario, load_scenario
from servecast.scenarios.measured import measured
from servecast.scenarios.run import fleet_of
from servecast.scenarios.workload import build_requests
from servecast.scenarios.yamlfile import parse
from servecast.sim.trace import COMPLETED, Trace

MAX_BYTES = 1_000_000

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A scenario, and what was measured of it.

    Attributes
    ----------
    values : (metric, statistic) to seconds
    client : latencies include a client's path to the engine
    """

    name: str
    loaded: LoadedScenario
    values: Mapping[tuple[str, str], float]
    client: bool = False


def load_case(path: Path) -> Case:
    """Read a case and its scenario; raises InputError for whatever is wrong in either."""
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: cannot be read: not UTF-8 text") from None
    data = parse(text, lambda line: f"{path}:{line}").value
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected scenario and measured")
    unknown = sorted(set(data) - {"scenario", "measured", "client"})
    if unknown:
        raise InputError(f"{path}: {unknown[0]}: unknown key (known: scenario, measured, client)")
    if not isinstance(data.get("scenario"), str):
        raise InputError(f"{path}: scenario: expected a file")
    if not isinstance(data.get("client", False), bool):
        raise InputError(f"{path}: client: expected true or false")
    values = _values(data.get("measured"), path)
    loaded = load_scenario(path.parent / data["scenario"])
    return Case(path.stem.removesuffix(".case"), loaded, values, data.get("client", False))


def _values(block: Any, path: Path) -> dict[tuple[str, str], float]:
    if not isinstance(block, dict) or not block:
        raise InputError(f"{path}: measured: expected requests, or metrics")
    if "requests" in block:
        if len(block) > 1 or not isinstance(block["requests"], str):
            raise InputError(f"{path}: measured.requests: expected a file, and no metrics beside")
        latencies = read_requests(path.parent / block["requests"])
        return {(m, s): latencies.stat(m, s) for m in METRICS for s in OF_REQUESTS}
    found: dict[tuple[str, str], float] = {}
    for metric, stats in block.items():
        if metric not in METRICS or not isinstance(stats, dict):
            raise InputError(
                f"{path}: measured.{metric}: expected one of {', '.join(METRICS)}, with statistics"
            )
        for stat, value in stats.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if stat not in STATS or not number or not 0 < value < math.inf:
                raise InputError(
                    f"{path}: measured.{metric}.{stat}: expected {', '.join(STATS)}, with seconds "
                    "above 0"
                )
            found[metric, stat] = float(value)
    return found


def validate(cases: Sequence[Case], profile: str | None = None) -> dict[str, Any]:
    """Predict every case.

    Parameters
    ----------
    profile : kernels for all of them, in place of the scenarios' own

    Returns `{rows, metrics, inside}`: a row for each measured value, medians and worst by
    metric and statistic, and the share of intervals that hold what was measured, of each and of
    all. Intervals come from the errors of the profile's kernels; without a profile there are none.
    """
    rows = [row for case in cases for row in _rows(case, profile)]
    names = dict.fromkeys(row["metric"] for row in rows)
    return {
        "rows": rows,
        "metrics": {
            name: _summary([row for row in rows if row["metric"] == name]) for name in names
        },
        "inside": _inside(rows),
    }


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    off = [row["error"] for row in rows]
    return {
        "values": len(off),
        "median_error": float(np.median(np.abs(off))),
        "worst_error": float(np.max(np.abs(off))),
        "median_signed_error": float(np.median(off)),
        "inside": _inside(rows),
    }


def _inside(rows: Sequence[Row]) -> float | None:
    held = [row["inside"] for row in rows if row["inside"] is not None]
    return sum(held) / len(held) if held else None


def _rows(case: Case, profile: str | None) -> list[Row]:
    name = profile or case.loaded.scenario.profile
    # The profile is chosen here; the scenario's own would be read again.
    scenario = case.loaded.scenario.model_copy(update={"profile": None})
    loaded = replace(case.loaded, scenario=scenario)
    table = build_requests(scenario, loaded.path.parent, scenario.seed, _quiet)

    def predict(profile: Profile) -> tuple[Latencies, Trace]:
        trace = build(loaded, profile).simulate(table, fleet=fleet_of(scenario)).trace
        return _latencies(trace, loaded.path, CLIENT_PATH_S if case.client else 0.0), trace

    bounds: list[Latencies] = []
    if name is None:
        predicted, _ = predict(GENERIC)
    else:
        setup, own = set_up(loaded), beside(name, loaded.path)
        kv = setup.memory.kv
        chosen = measured(GENERIC, own, setup.model, setup.hardware, kv)
        predicted, trace = predict(chosen)
        parts_s = {f"{part}_s": float(trace.steps[f"{part}_s"].sum()) for part in PARTS}
        spread = step_spread(load_profile(own), setup.model, setup.memory.tensor, kv.bits, parts_s)
        bounds = [predict(chosen.slower(math.exp(sign * spread)))[0] for sign in (-1, 1)]
    rows = []
    for (metric, stat), value in case.values.items():
        ours = predicted.stat(metric, stat)
        ends = sorted(bound.stat(metric, stat) for bound in bounds)
        rows.append(
            {
                "case": case.name,
                "metric": f"{metric} {stat}",
                "measured": value,
                "predicted": ours,
                "error": ours / value - 1,
                "lo": ends[0] if ends else None,
                "hi": ends[-1] if ends else None,
                "inside": ends[0] <= value <= ends[-1] if ends else None,
            }
        )
    return rows


def _latencies(trace: Trace, path: Path, path_s: float) -> Latencies:
    """Of the requests that complete, `path_s` later than the engine has them."""
    rows = trace.requests
    done = rows["status"] == COMPLETED
    if not done.any():
        raise InputError(f"{path}: no request completes")
    sent, first, last = (
        rows[f"{column}_ns"][done] / NS_PER_S for column in ("arrival", "first_token", "finish")
    )
    outputs = rows["output_tokens"][done].astype(np.float64)
    return Latencies.from_times(sent, first + path_s, last + path_s, outputs)


def _quiet(line: str) -> None:
    """Notes on a load are those of `servecast run`."""
