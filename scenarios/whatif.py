"""`servecast whatif`: a grid of changes, each served with the same seeds as the base.

Anything may be varied: keys of the scenario (hardware, an engine flag, replicas, a failure) and
factors of its load. All points meet the same luck, so what differs from the base is the change's.
"""

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.scenarios.draft_map import KEY as DRAFTS
from servecast.scenarios.draft_map import draft_map
from servecast.scenarios.explain import explain
from servecast.scenarios.factors import LOAD_FACTORS, change
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.paired import (
    METRICS,
    differences,
    means,
    same_outcome,
    sla_met,
    sla_rows,
)
from servecast.scenarios.points import Point
from servecast.scenarios.run import servecast_version
from servecast.scenarios.schema import Scenario
from servecast.scenarios.sweep import Result, Sweep

#: A key or factor, and the values it takes.
Vary = tuple[str, list[Any]]

Changes = dict[str, Any]

#: Told how many runs are done, of how many.
Tell = Callable[[int, int], None]

#: Points x replications that are simulated at most.
BUDGET = 2000


# ---------------------------------------------------------------- the grid


def whatif(
    loaded: LoadedScenario,
    vary: Sequence[Vary],
    replications: int,
    sweep: Sweep,
    tell: Tell = lambda done, total: None,
    *,
    budget: int = BUDGET,
) -> dict[str, Any]:
    """Serve the load at every point of the grid, and say what differs from the base and why.

    Parameters
    ----------
    vary : keys or factors with their values; the grid is their product
    replications : runs a point, with seeds `seed`, `seed + 1`, ... of the scenario

    Returns
    -------
    `{kind, scenario, varied, seeds, base, points, drafts, notes, runs, calibration, version}`, fit
    for JSON. The base and every point have `label`, `sla` (rows of `sla_rows`), `sla_met` and
    `metrics` (means); a point also `changes`, `error` (why it does not run; the rest is then
    empty), `deltas` (of `differences`), `explanation` (of `explain`) and `same_as_base`.

    Raises
    ------
    InputError : a key, or a value that fits nowhere; a grid above the budget; a base that does
        not run
    """
    _check(vary, replications, budget)
    grid = [dict(zip((key for key, _ in vary), row, strict=True)) for row in _rows(vary)]
    scenarios = _changed(loaded.scenario, vary, grid)
    seeds = [loaded.scenario.seed + i for i in range(replications)]
    found = _Runs(loaded, seeds, sweep, [loaded.scenario, *filter(None, scenarios)], tell)
    base = found.of(loaded.scenario)
    if base[0]["error"] is not None:
        raise InputError(base[0]["error"])
    points = []
    served: list[list[Result] | None] = []
    for changes, scenario in zip(grid, scenarios, strict=True):
        results = found.of(scenario) if scenario is not None else None
        error = found.refusal(loaded.scenario, changes) if results is None else results[0]["error"]
        served.append(None if error is not None else results)
        replicas = (loaded.scenario.replicas, scenario.replicas if scenario is not None else 1)
        points.append(_point(changes, error, base, results, replicas))
    return {
        "kind": "whatif",
        "scenario": loaded.scenario.name,
        "varied": [
            {"key": key, "values": values, "base": _base_value(loaded.scenario, base[0], key)}
            for key, values in vary
        ],
        "seeds": seeds,
        "base": {"label": "base", **_outcome(base)},
        "points": points,
        "drafts": draft_map(list(zip(grid, served, strict=True))),
        "notes": _notes(vary, grid, base, served, replications),
        "runs": found.runs,
        "calibration": _labels([base, *filter(None, served)]),
        "version": servecast_version(),
    }


def _check(vary: Sequence[Vary], replications: int, budget: int) -> None:
    keys = [key for key, _ in vary]
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(f"--vary {key}: given twice; list its values in one")
    points = 1
    for _, values in vary:
        points *= len(values)
    if points * replications > budget:
        raise InputError(
            f"--vary {', '.join(keys)}: {points:,} points x {replications:,} replications are "
            f"{points * replications:,} runs, the budget is {budget:,}"
        )


def _rows(vary: Sequence[Vary]) -> list[tuple[Any, ...]]:
    # The product of nothing is one empty row: the base itself.
    return list(product(*(values for _, values in vary))) if vary else []


def _changed(
    scenario: Scenario, vary: Sequence[Vary], grid: Sequence[Changes]
) -> list[Scenario | None]:
    """The scenario of each point; None where the changes contradict each other.

    Raises InputError for a value that fits into no point: it is misspelt.
    """
    changed: list[Scenario | None] = []
    errors: dict[int, InputError] = {}
    for number, changes in enumerate(grid):
        try:
            changed.append(change(scenario, changes))
        except InputError as error:
            changed.append(None)
            errors[number] = error
    for key, values in vary:
        for value in values:
            mine = [i for i, changes in enumerate(grid) if changes[key] == value]
            if all(i in errors for i in mine):
                raise InputError(f"--vary {errors[mine[0]]}")
    return changed


class _Runs:
    """Results of scenarios, seed by seed; equal scenarios are run once."""

    def __init__(
        self,
        loaded: LoadedScenario,
        seeds: Sequence[int],
        sweep: Sweep,
        scenarios: Sequence[Scenario],
        tell: Tell,
    ) -> None:
        self._path = loaded.path
        self._seeds = seeds
        points = {p.key: p for scenario in scenarios for p in self._points(scenario)}
        self.runs = len(points)
        results = sweep.run(points.values(), lambda done: tell(done, self.runs))
        self._results = {result["key"]: result for result in results}

    def _points(self, scenario: Scenario) -> list[Point]:
        return [Point(scenario, self._path, seed) for seed in self._seeds]

    def of(self, scenario: Scenario) -> list[Result]:
        """In the order of the seeds; an error without the file's name."""
        found = [dict(self._results[point.key]) for point in self._points(scenario)]
        for result in found:
            if result["error"] is not None:
                result["error"] = str(result["error"]).removeprefix(f"{self._path}: ")
        return found

    def refusal(self, scenario: Scenario, changes: Changes) -> str | None:
        """Why changes do not go together."""
        try:
            change(scenario, changes)
        except InputError as error:
            return str(error)
        return None


# ---------------------------------------------------------------- what a point says


def _outcome(results: Sequence[Result]) -> dict[str, Any]:
    return {"sla": sla_rows(results), "sla_met": sla_met(results), "metrics": means(results)}


def _point(
    changes: Changes,
    error: str | None,
    base: Sequence[Result],
    results: Sequence[Result] | None,
    replicas: tuple[int, int],
) -> dict[str, Any]:
    point: dict[str, Any] = {"label": label(changes), "changes": changes, "error": error}
    if error is not None or results is None:
        nothing: dict[str, Any] = {
            "sla": [],
            "sla_met": None,
            "metrics": dict.fromkeys(METRICS),
            "deltas": {},
        }
        return {**point, **nothing, "explanation": [], "same_as_base": False}
    return {
        **point,
        **_outcome(results),
        "deltas": differences(base, results),
        "explanation": explain(base, results, replicas),
        "same_as_base": same_outcome(base, results),
    }


def label(changes: Changes) -> str:
    """Changes in short: `load x2, max_num_seqs 64`."""
    return ", ".join(
        f"{key} x{value:g}"
        if key in LOAD_FACTORS and key != "burstiness"
        else f"{key.removeprefix('engine.').removeprefix('workload.')} {told(value)}"
        for key, value in changes.items()
    )


def told(value: Any) -> str:
    """A value as YAML would have it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {told(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _base_value(scenario: Scenario, result: Result, key: str) -> Any:
    """What the base has where something else is tried; None if nothing."""
    arrivals = scenario.workload.arrivals
    if key == "burstiness":
        known = {"poisson": 1.0, "constant": 0.0}
        return getattr(arrivals, "cv", known.get(arrivals.kind))
    if key in LOAD_FACTORS:
        return 1
    node: Any = scenario.model_dump()
    for step in key.split("."):
        node = node.get(step) if isinstance(node, dict) else None
    if node is None and key.startswith("engine."):
        # Left to vLLM: the default that this hardware gets.
        return result["engine"].get(key.removeprefix("engine."))
    return node


def _notes(
    vary: Sequence[Vary],
    grid: Sequence[Changes],
    base: Sequence[Result],
    served: Sequence[Sequence[Result] | None],
    replications: int,
) -> list[str]:
    """One line each on a grid or a knob that says nothing."""
    if not grid:
        return ["nothing is varied: only the base was run (--vary key=value,value)"]
    notes = []
    known = [results for results in served if results is not None]
    every = "the only replication" if replications == 1 else f"all {replications} replications"
    if not known:
        notes.append("no point of the grid runs")
    elif all(same_outcome(base, results) for results in known):
        keys = " and ".join(key for key, _ in vary)
        notes.append(f"{keys}: no effect on this load, every result equals the base's in {every}")
    else:
        notes += [
            f"{key}: no effect on this load, {', '.join(map(told, values))} give the same results "
            f"in {every}"
            for key, values in vary
            if len(vary) > 1 and len(values) > 1 and _does_nothing(key, grid, served)
        ]
    for key, values in vary:
        if key == DRAFTS and 0 not in values:
            notes.append(f"{key}: without 0 among its values there is nothing to break even with")
    if replications == 1:
        notes.append("one replication: differences have no interval (--replications 5 gives one)")
    return notes


def _does_nothing(
    key: str, grid: Sequence[Changes], served: Sequence[Sequence[Result] | None]
) -> bool:
    """Whether points that differ in one key alone are served alike."""
    first: dict[str, Sequence[Result]] = {}
    compared = False
    for changes, results in zip(grid, served, strict=True):
        if results is None:
            continue
        rest = json.dumps({name: value for name, value in changes.items() if name != key})
        if rest in first:
            compared = True
            if not same_outcome(first[rest], results):
                return False
        first.setdefault(rest, results)
    return compared


def _labels(found: Sequence[Sequence[Result]]) -> str:
    """What step times rest on; more than one label where devices differ."""
    labels = {r["summary"]["provenance"]["calibration"]: None for results in found for r in results}
    return "; ".join(labels)
