"""`servecast validate`: predictions held against measured runs, metric by metric.

A case is a YAML file: `scenario` (a file beside it), `measured`, `client: true` where the
latencies were taken at a client, and `timeline` (a CSV of what ran and waited) for the page.
`measured` holds either `requests`, a file of vLLM's own time stamps, or metrics (`ttft_s`,
`tpot_s`, `e2e_s`) with their `mean`, `p50`, `p95` or `p99`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from servecast.calibration.measured import (
    CLIENT_PATH,
    METRICS,
    OF_REQUESTS,
    STATS,
    Latencies,
    read_requests,
    read_timeline,
)
from servecast.costmodels.errors import InputError
from servecast.costmodels.memory import Z90
from servecast.costmodels.reading import read_bytes
from servecast.costmodels.shape import NS_PER_S
from servecast.scenarios.build import (
    Deployment,
    build,
    slower_and_faster,
    speculation_for,
    spread_of,
)
from servecast.scenarios.load import LoadedScenario, load_scenario
from servecast.scenarios.run import fleet_of
from servecast.scenarios.workload import build_requests
from servecast.scenarios.yamlfile import parse
from servecast.sim.request import RequestTable
from servecast.sim.rng import stream
from servecast.sim.trace import COMPLETED, Trace

MAX_BYTES = 1_000_000

CASE_KEYS = ("scenario", "measured", "client", "timeline")

#: Loads of the same kind with other seeds, to see what the draw does.
FURTHER_DRAWS = 2

Row = dict[str, Any]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A scenario, and what was measured of it.

    Attributes
    ----------
    values : (metric, statistic) to seconds
    client : latencies include a client's path to the engine
    latencies : of each request, where they are known
    timeline : columns `t_s`, `running`, `waiting`, `kv_share` of what was measured
    """

    name: str
    loaded: LoadedScenario
    values: Mapping[tuple[str, str], float]
    client: bool = False
    latencies: Latencies | None = None
    timeline: Mapping[str, FloatArray] | None = None


def load_case(path: Path) -> Case:
    """Read a case and its scenario; raises InputError for whatever is wrong in either."""
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: cannot be read: not UTF-8 text") from None
    data = parse(text, lambda line: f"{path}:{line}").value
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected scenario and measured")
    unknown = sorted(set(data) - set(CASE_KEYS))
    if unknown:
        raise InputError(f"{path}: {unknown[0]}: unknown key (known: {', '.join(CASE_KEYS)})")
    if not isinstance(data.get("scenario"), str):
        raise InputError(f"{path}: scenario: expected a file")
    if not isinstance(data.get("client", False), bool):
        raise InputError(f"{path}: client: expected true or false")
    block = data.get("measured")
    if not isinstance(block, dict) or not block:
        raise InputError(f"{path}: measured: expected requests, or metrics")
    latencies = _requests(block, path) if "requests" in block else None
    values = _values(block, path) if latencies is None else statistics(latencies)
    loaded = load_scenario(path.parent / data["scenario"])
    name, client = path.stem.removesuffix(".case"), data.get("client", False)
    timeline = None
    if "timeline" in data:
        if not isinstance(data["timeline"], str):
            raise InputError(f"{path}: timeline: expected a file")
        timeline = read_timeline(path.parent / data["timeline"])
    return Case(name, loaded, values, client, latencies, timeline)


def _requests(block: dict[str, Any], path: Path) -> Latencies:
    if len(block) > 1 or not isinstance(block["requests"], str):
        raise InputError(f"{path}: measured.requests: expected a file, and no metrics beside")
    return read_requests(path.parent / block["requests"])


def statistics(latencies: Latencies) -> dict[tuple[str, str], float]:
    """Every metric's mean, p50 and p99."""
    return {(m, s): latencies.stat(m, s) for m in METRICS for s in OF_REQUESTS}


def _values(block: dict[str, Any], path: Path) -> dict[tuple[str, str], float]:
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

    Returns `{rows, metrics, inside}`, as `summed_up` has it.
    """
    return summed_up([row for case in cases for row in predict(case, profile).rows])


def summed_up(rows: Sequence[Row]) -> dict[str, Any]:
    """`{rows, metrics, inside}`: rows, medians and worst by metric and statistic, and the share of
    intervals that hold what was measured, of each and of all.

    Intervals come from the errors of the profile's kernels; without a profile there are none.
    """
    names = dict.fromkeys(row["metric"] for row in rows)
    return {
        "rows": list(rows),
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


@dataclass(frozen=True)
class Prediction:
    """A case predicted.

    Attributes
    ----------
    rows : one a measured value
    latencies : of the simulated requests
    trace : of the simulation
    spread : half of the 90 % interval of a step time's logarithm; 0 without a profile
    deployment : what was simulated
    """

    rows: list[Row]
    latencies: Latencies
    trace: Trace
    spread: float
    deployment: Deployment


def predict(case: Case, profile: str | None = None) -> Prediction:
    """Simulate a case, and again with what is unsure of it at both ends.

    Those are the time of every step (`spread_of`), the draw of the load, and a client's way to
    the engine. Raises InputError for a profile that cannot be read or is another device's, and for
    a load of which nothing completes.
    """
    scenario = case.loaded.scenario
    if profile is not None:
        file = profile.endswith((".yaml", ".yml"))
        scenario = scenario.model_copy(
            update={"profile": os.path.abspath(profile) if file else profile}
        )
    loaded = replace(case.loaded, scenario=scenario)
    path_s, path_low_s, path_high_s = CLIENT_PATH if case.client else (0.0, 0.0, 0.0)

    def run(deployed: Deployment, path_s: float, further: int = 0) -> tuple[Latencies, Trace]:
        seed = scenario.seed + further
        table = build_requests(scenario, loaded.path.parent, seed, _quiet)
        if case.client and table.concurrency is not None:
            table = _returning(table, path_s, seed)
        speculation = speculation_for(deployed, scenario, loaded.path.parent, scenario.seed)
        fleet = fleet_of(scenario)
        trace = deployed.simulate(table, fleet=fleet, speculation=speculation).trace
        return _latencies(trace, loaded.path, path_s), trace

    deployment = build(loaded)
    predicted, trace = run(deployment, path_s)
    spread = spread_of(loaded, deployment, trace)
    ends = slower_and_faster(loaded, deployment, spread)
    paths_s = path_low_s, path_high_s
    bounds = [run(end, own_s)[0] for end, own_s in zip(ends, paths_s, strict=False)]
    # Where each request is known, so is the load.
    further_draws = FURTHER_DRAWS if ends and case.latencies is None else 0
    draws = [run(deployment, path_s, further)[0] for further in range(1, further_draws + 1)]
    rows = [
        held(
            case.name,
            f"{metric} {stat}",
            value,
            predicted.stat(metric, stat),
            [bound.stat(metric, stat) for bound in bounds],
            [draw.stat(metric, stat) for draw in draws],
        )
        for (metric, stat), value in case.values.items()
    ]
    return Prediction(rows, predicted, trace, spread, deployment)


def _returning(table: RequestTable, path_s: float, seed: int) -> RequestTable:
    """A closed loop whose clients are as long between an answer and their next request as the way
    to the engine takes, some more and some less: those whose requests are all alike would send in
    step for ever."""
    away_s = path_s * stream(seed, "client").standard_exponential(len(table))
    away_s[: table.concurrency] = 0.0
    think_ns = np.rint(away_s * NS_PER_S).astype(np.int64)
    if table.think_ns is not None:
        think_ns = think_ns + table.think_ns
    return replace(table, think_ns=think_ns)


def overlay(case: Case, prediction: Prediction) -> dict[str, Any]:
    """Measured and predicted, request by request and over time, for a page."""
    steps = prediction.trace.steps
    start = float(prediction.trace.requests["arrival_ns"].min(initial=0))
    timeline = {
        "t_s": (steps["end_ns"] - start) / NS_PER_S,
        "running": steps["running"].astype(np.float64),
        "waiting": steps["waiting"].astype(np.float64),
        "kv_share": steps["kv_blocks"] / max(1, prediction.trace.kv_blocks),
    }
    return {
        "case": case.name,
        "measured": None if case.latencies is None else asdict(case.latencies),
        "predicted": asdict(prediction.latencies),
        "timeline": timeline,
        "measured_timeline": case.timeline,
    }


def held(
    case: str,
    metric: str,
    value: float,
    ours: float,
    bounds: Sequence[float],
    draws: Sequence[float] = (),
) -> Row:
    """A row: what was measured, what was predicted, and the interval if there is one.

    `bounds` are predictions with unsure things at their ends, `draws` those of other loads of the
    kind; the two widths are independent. A queue may answer slower kernels with a lower
    percentile: the prediction is in its interval all the same.
    """
    low = high = None
    if bounds:
        drawn = Z90 * float(np.std([*draws, ours], ddof=1)) if draws else 0.0
        low = ours - math.hypot(ours - min(*bounds, ours), drawn)
        high = ours + math.hypot(max(*bounds, ours) - ours, drawn)
        low = max(low, 0.0)
    return {
        "case": case,
        "metric": metric,
        "measured": value,
        "predicted": ours,
        "error": ours / value - 1,
        "lo": low,
        "hi": high,
        "inside": None if low is None or high is None else low <= value <= high,
    }


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
