"""`servecast compare`: two deployments, A and B, paired on the same arrivals.

B sees what A sees (shadow traffic), seed by seed, so their difference is the deployments' own.
The load is then scaled to find where they part; and, when asked, a share of the requests goes to
B as a canary while A keeps the rest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servecast.costmodels.errors import InputError
from servecast.reports import units
from servecast.reports.deltas import change_words
from servecast.scenarios.canary import canary_shares
from servecast.scenarios.explain import explain
from servecast.scenarios.factors import change
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.paired import (
    METRICS,
    difference,
    differences,
    means,
    probability_better,
    same_outcome,
    sla_met,
    sla_rows,
    sla_verdicts,
    told_apart,
    values,
)
from servecast.scenarios.points import Point
from servecast.scenarios.run import servecast_version
from servecast.scenarios.sweep import Result, Sweep

#: Told how many runs are done, of how many at most.
Tell = Callable[[int, int], None]

#: Load factors tried for where A and B part, and halvings (of the ratio) once that is bracketed.
LOADS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
HALVINGS = 3

#: A difference of goodput below this share of it does not matter, whatever its interval.
INDIFFERENT = 0.02

#: Metrics that the verdict speaks of, in this order, and the least difference worth a word.
VERDICT = (
    "goodput_per_s",
    "output_tokens_per_s",
    "ttft_p95_s",
    "itl_p99_s",
    "e2e_p95_s",
    "unserved_share",
    "cost_per_million_output_tokens",
)
#: The same where either side speculates: gaps between deliveries grow then, and say nothing.
VERDICT_WITH_DRAFTS = tuple("tpot_mean_s" if name == "itl_p99_s" else name for name in VERDICT)
LEAST = 0.01

METHOD = (
    "posterior of the mean paired difference under a flat prior: Student's t with n - 1 degrees "
    "of freedom"
)


def compare(
    a: LoadedScenario,
    b: LoadedScenario,
    replications: int,
    sweep: Sweep,
    canary: float | None = None,
    tell: Tell = lambda done, total: None,
) -> dict[str, Any]:
    """Serve the same load with A and with B, and say which is better, by how much, how surely.

    Both run with seeds `seed`, `seed + 1`, ... of A. Where the workloads differ each serves its
    own, which a note says.

    Parameters
    ----------
    canary : share of A's requests, between 0 and 1, that B gets while A keeps the rest

    Returns
    -------
    `{kind, a, b, differs, metrics, method, verdict, explanation, parting, canary, seeds, notes,
    calibration, version}`, fit for JSON. `a` and `b` have `name`, `error`, `sla`, `sla_met` and
    `metrics`; `metrics` has a row `{metric, better, a, b, delta, p_b_better}` each, `delta` being
    B - A as of `difference`. Where one does not start only `a`, `b`, `differs` and `verdict` say
    anything.

    Raises
    ------
    InputError : a canary that is no share or gets no request, a load that cannot be read
    """
    if canary is not None and not 0 < canary < 1:
        raise InputError(f"--canary {canary:g}: expected a share between 0 and 1, such as 0.05")
    seeds = [a.scenario.seed + i for i in range(replications)]
    pair = _Pair(a, b, seeds, sweep, tell)
    first, second = pair.at(None)
    result: dict[str, Any] = {
        "kind": "compare",
        "a": _side(a, first),
        "b": _side(b, second),
        "differs": list(_differing(_settings(a, first), _settings(b, second))),
        "metrics": [],
        "method": METHOD,
        "verdict": "",
        "explanation": [],
        "parting": None,
        "canary": None,
        "seeds": seeds,
        "notes": _notes(a, b, replications),
        "calibration": _calibration(first, second),
        "version": servecast_version(),
    }
    errors = {side: result[side]["error"] for side in ("a", "b")}
    if any(errors.values()):
        told = [f"{side.upper()} does not run: {error}" for side, error in errors.items() if error]
        return {**result, "verdict": "; ".join(told)}
    rows = _rows(first, second)
    replicas = (a.scenario.replicas, b.scenario.replicas)
    result |= {
        "metrics": rows,
        "verdict": _verdict(rows, first, second),
        "explanation": explain(first, second, replicas),
        "parting": _parting(pair),
    }
    if canary is not None:
        result["canary"] = canary_shares(a, b, canary, seeds)
    return result


class _Pair:
    """Results of A and B at load factors, seed by seed."""

    def __init__(
        self,
        a: LoadedScenario,
        b: LoadedScenario,
        seeds: Sequence[int],
        sweep: Sweep,
        tell: Tell,
    ) -> None:
        self._sides = (a, b)
        kinds = {side.scenario.workload.arrivals.kind for side in self._sides}
        self.open_loop = not kinds & {"closed_loop", "burst"}
        self._seeds = seeds
        self._sweep = sweep
        self._tell = tell
        self._done = 0
        self._most = 2 * len(seeds) * (1 + len(LOADS) + HALVINGS)

    def at(self, load: float | None) -> tuple[list[Result], list[Result]]:
        """Both at a multiple of the load, None for the load as it is."""
        points = []
        for side in self._sides:
            scenario = side.scenario
            if load is not None and load != 1:
                scenario = change(scenario, {"load": load})
            points += [Point(scenario, side.path, seed) for seed in self._seeds]
        results = list(self._sweep.run(points, lambda done: self._count(done)))
        self._done += len(points)
        return results[: len(self._seeds)], results[len(self._seeds) :]

    def _count(self, done: int) -> None:
        self._tell(self._done + done, self._most)


# ---------------------------------------------------------------- the two sides


def _side(loaded: LoadedScenario, results: Sequence[Result]) -> dict[str, Any]:
    error = results[0]["error"]
    named = {
        "name": loaded.scenario.name,
        "model": loaded.scenario.model,
        "hardware": loaded.scenario.hardware,
        "replicas": loaded.scenario.replicas,
        "error": None if error is None else str(error).removeprefix(f"{loaded.path}: "),
    }
    if error is not None:
        return {**named, "sla": [], "sla_met": None, "metrics": dict.fromkeys(METRICS)}
    measured = {"sla": sla_rows(results), "sla_met": sla_met(results), "metrics": means(results)}
    return {**named, **measured}


def _calibration(*found: Sequence[Result]) -> str:
    served = [r for results in found for r in results if r["error"] is None]
    return "; ".join({r["summary"]["provenance"]["calibration"]: None for r in served})


def _settings(loaded: LoadedScenario, results: Sequence[Result]) -> dict[str, Any]:
    """The scenario, with the flags that are left to vLLM as it would choose them."""
    settings = loaded.scenario.model_dump()
    chosen = results[0].get("engine", {})
    flags = settings["engine"].items()
    return {**settings, "engine": {k: chosen.get(k) if v is None else v for k, v in flags}}


def _differing(a: Any, b: Any, key: str = "") -> Iterator[dict[str, Any]]:
    """Keys that the two scenarios set differently, what they are called aside."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in {**a, **b}:
            if key or name not in ("name", "description", "seed"):
                yield from _differing(a.get(name), b.get(name), f"{key}.{name}" if key else name)
    elif a != b:
        yield {"key": key, "a": a, "b": b}


def _notes(a: LoadedScenario, b: LoadedScenario, replications: int) -> list[str]:
    notes = []
    if _load_of(a) != _load_of(b):
        notes.append(
            "the workloads differ: each serves its own, with the same seeds, so the differences "
            "are those of the loads too"
        )
    if a.scenario.sla != b.scenario.sla:
        notes.append("the SLAs differ: each is judged by its own limits")
    if replications == 1:
        notes.append("one replication: differences have no interval (--replications 5 gives one)")
    return notes


def _load_of(loaded: LoadedScenario) -> Any:
    """What decides the arrivals: the workload without its limits, files by their content."""
    workload = loaded.scenario.workload.model_dump()
    for entry in workload["classes"] or ():
        entry.pop("sla")

    def read(node: Any) -> Any:
        if isinstance(node, dict):
            return {
                key: _content(loaded.path.parent / item) if key == "path" else read(item)
                for key, item in node.items()
            }
        return [read(item) for item in node] if isinstance(node, list | tuple) else node

    return read(workload)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


# ---------------------------------------------------------------- which is better


def _rows(first: Sequence[Result], second: Sequence[Result]) -> list[dict[str, Any]]:
    found = differences(first, second)
    rows = []
    for name, delta in found.items():
        a, b = (values(results, METRICS[name].read) for results in (first, second))
        assert a is not None and b is not None
        better = METRICS[name].better
        rows.append(
            {
                "metric": name,
                "better": better,
                "a": float(np.mean(a)),
                "b": float(np.mean(b)),
                "delta": delta,
                "p_b_better": probability_better(a, b, better),
            }
        )
    return rows


def _verdict(
    rows: Sequence[Mapping[str, Any]], first: Sequence[Result], second: Sequence[Result]
) -> str:
    """Which is better on the metrics of `VERDICT`, in a sentence or two."""
    if same_outcome(first, second):
        return "A and B serve this load exactly alike, in every replication."
    by_name = {row["metric"]: row for row in rows}
    gains: dict[bool, list[str]] = {True: [], False: []}
    drafted = any("speculation" in result["summary"] for result in (*first, *second))
    for name in VERDICT_WITH_DRAFTS if drafted else VERDICT:
        row = by_name.get(name)
        if row is None or not told_apart(row["delta"]) or _small(row):
            continue
        gains[row["delta"]["mean"] * row["better"] > 0].append(change_words(row))
    better, worse = ", ".join(gains[True]), ", ".join(gains[False])
    if better and worse:
        told = f"B wins: {better}. It loses: {worse}."
    elif better:
        told = f"B is better: {better}."
    elif worse:
        told = f"A is better; of B: {worse}."
    else:
        n = len(first)
        told = f"No difference of {LEAST * 100:.0f} % or more that {n} replications can tell."
    return f"{told} {_sla_words(first, second)}".strip()


def _small(row: Mapping[str, Any]) -> bool:
    relative = row["delta"]["relative"]
    return relative is not None and abs(relative) < LEAST


def _sla_words(first: Sequence[Result], second: Sequence[Result]) -> str:
    held = [sla_verdicts(results) for results in (first, second)]
    if held[0] is None or held[1] is None:
        return ""
    n = len(first)
    if all(held[0]) and all(held[1]):
        return "Both meet the SLA in every replication."
    if not any(held[0]) and not any(held[1]):
        return "Neither meets the SLA."
    return f"A meets the SLA in {sum(held[0])} of {n} replications, B in {sum(held[1])}."


# ---------------------------------------------------------------- where they part


def _parting(pair: _Pair) -> dict[str, Any]:
    """The smallest load factor found at which goodput or the SLA's verdict differ.

    `load` is None where they do not part up to the largest tried, `below` the largest tried factor
    at which they have not parted (None if they part at the smallest), `loads` what was tried.
    """
    tried: dict[float, dict[str, Any]] = {}
    below: float | None = None
    parted: float | None = None
    for load in LOADS:
        try:
            tried[load] = _tried(pair, load)
        except InputError:
            # Beyond what a scenario may ask for, such as ten million requests.
            break
        if tried[load]["parted"]:
            parted = load
            break
        below = load
    for _ in range(HALVINGS if parted is not None and below is not None else 0):
        assert parted is not None and below is not None
        middle = float(f"{np.sqrt(parted * below):.3g}")
        tried[middle] = _tried(pair, middle)
        if tried[middle]["parted"]:
            parted = middle
        else:
            below = middle
    loads = [tried[load] for load in sorted(tried)]
    why = tried[parted]["parted"] if parted is not None else None
    return {"load": parted, "below": below, "why": why, "loads": loads}


def _tried(pair: _Pair, load: float) -> dict[str, Any]:
    first, second = pair.at(load)
    a, b = (values(results, METRICS["goodput_per_s"].read) for results in (first, second))
    held = [sla_met(results) for results in (first, second)]
    return {
        "load": load,
        "goodput_per_s": [means(results)["goodput_per_s"] for results in (first, second)],
        "delta": difference(a, b),
        "met": [share["met"] if share else None for share in held],
        "parted": _parted(pair, first, second),
    }


def _parted(pair: _Pair, first: Sequence[Result], second: Sequence[Result]) -> str | None:
    """Why two results are apart, in words; None if they are not.

    Goodput differs beyond its interval and by what matters, or one meets the SLA more often beyond
    the interval of that difference. Where arrivals do not wait for answers, goodput is the share
    of requests within the SLA: per second, a short run differs by how long its last request takes.
    """
    held = [sla_verdicts(results) for results in (first, second)]
    shared = pair.open_loop and held[0] is not None and held[1] is not None
    read = _good_share if shared else METRICS["goodput_per_s"].read
    a, b = (values(results, read) for results in (first, second))
    delta = difference(a, b)
    if delta is not None and a is not None and b is not None and _matters(delta):
        if shared:
            was, now = (units.percent(float(np.mean(good))) for good in (a, b))
            return f"{now} of the requests within the SLA with B, {was} with A"
        return f"goodput {np.mean(b):.3g}/s with B, {np.mean(a):.3g}/s with A"
    if held[0] is None or held[1] is None:
        return None
    met = difference([float(m) for m in held[0]], [float(m) for m in held[1]])
    if met is not None and told_apart(met):
        n = len(held[0])
        return f"the SLA is met in {sum(held[0])} of {n} replications by A, in {sum(held[1])} by B"
    return None


def _matters(delta: Mapping[str, Any]) -> bool:
    relative = delta["relative"]
    return told_apart(delta) and (relative is None or abs(relative) >= INDIFFERENT)


def _good_share(summary: Mapping[str, Any]) -> float | None:
    """Share of the requests sent that stay within every limit of their class."""
    sent = summary["requests"]["sent"]
    return summary["goodput_per_s"] * summary["duration_s"] / sent if sent else None
