"""`servecast size`: the engine flags that serve a load best, and how sure that is.

1. Screening without simulation: candidates that do not start, that flags contradict, or whose
   service rate by the roofline stays far below the best one's.
2. Successive halving on the first requests of the load, all candidates on the same requests
   (common random numbers). Where the time to first token still grows at the end of such a run,
   the growth is carried on to the end of the load: near saturation the first minute looks well.
3. The last ones on the whole load with several seeds, paired, until the winner is told from the
   runner-up or the difference does not matter (2 % of goodput).
4. Around the winner: latency against load, where a clause breaks, where preemption begins, and
   which coefficient of the cost model would change the outcome most.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from servecast.costmodels.catalogue import load_hardware
from servecast.costmodels.errors import InputError
from servecast.reports.stats import paired_interval
from servecast.scenarios.answer import block_size_words, choice, vllm_command
from servecast.scenarios.around import limit, sensitivity, surroundings
from servecast.scenarios.build import beside, set_up
from servecast.scenarios.candidates import (
    Candidate,
    Changes,
    clause_probabilities,
    idle_knobs,
    score_of,
    table_row,
)
from servecast.scenarios.exploration import explore
from servecast.scenarios.factors import change
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.runner import Runner
from servecast.scenarios.screening import offered, service_rate_per_s
from servecast.scenarios.sweep import Sweep

Tell = Callable[[str], None]

DEFAULT_KNOBS: dict[str, tuple[int, ...]] = {
    "engine.max_num_seqs": (8, 16, 32, 48, 64, 96, 128, 256, 512, 1024),
    "engine.max_num_batched_tokens": (512, 1024, 2048, 4096, 8192, 16384),
    "engine.block_size": (16, 32, 64, 128, 256),
}

OBJECTIVES = ("goodput", "rate", "cost")

#: A difference of goodput that does not matter, as a share of it.
INDIFFERENT = 0.02

#: Room under a clause that does not matter, as a share of its limit.
ROOM = 0.05

#: Candidates whose bound on the service rate is below this share of the best are not simulated.
HOPELESS = 0.7

#: Requests of a short, a medium and a probing run, as shares of the load at most, and the least
#: that say anything.
SHORT, MEDIUM, PROBE, LEAST_REQUESTS = 1 / 3, 1 / 2, 1 / 4, 60

#: Shares of the budget that the short runs may use, and all up to the choice.
FIRST_SHARE, CHOICE_SHARE = 0.2, 0.65

#: Runs around the answer: loads for the curve, and coefficients up and down.
RUNS_AROUND = 22

#: Candidates that go on from the short runs, and from the medium ones.
KEPT_SHORT, KEPT_MEDIUM = 6, 3

#: The knob that is varied last: it matters least, and alike for every value of the others.
LAST_KNOB = "engine.block_size"

#: More candidates than this are not all looked at: Optuna proposes which.
MANY = 5000

SEEDS, MOST_SEEDS = 3, 8


def size(
    loaded: LoadedScenario,
    sweep: Sweep,
    *,
    knobs: dict[str, Sequence[Any]] | None = None,
    objective: str = "goodput",
    budget_requests: int | None = None,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """Search, and everything that the answer says (`servecast size --json`).

    Parameters
    ----------
    knobs : dotted keys to the values tried
    objective : "goodput" at the given load; "rate", the load that the SLA allows; "cost", the
        least price at which the SLA holds
    budget_requests : simulated requests that the search may use

    Raises InputError for an empty grid, a knob that does nothing, and an SLA that fails even for
    one request alone on an idle server.
    """
    search = _Search(loaded, sweep, knobs, objective, budget_requests, tell)
    return search.answer()


class _Search:
    def __init__(
        self,
        loaded: LoadedScenario,
        sweep: Sweep,
        knobs: dict[str, Sequence[Any]] | None,
        objective: str,
        budget_requests: int | None,
        tell: Tell,
    ) -> None:
        if objective not in OBJECTIVES:
            raise InputError(f"--objective {objective}: expected one of {', '.join(OBJECTIVES)}")
        self.loaded, self.objective, self.tell = loaded, objective, tell
        self.runner = Runner(loaded, sweep)
        self.knobs = knobs or _default_knobs(loaded)
        for key, values in self.knobs.items():
            if not values:
                raise InputError(f"--knobs {key}: no values to try")
        self.seed = loaded.scenario.seed
        self.load = offered(loaded)
        self.size = math.prod(len(values) for values in self.knobs.values())
        self.candidates: list[Candidate] = []
        if self.size <= MANY:
            self.candidates = [
                Candidate(dict(zip(self.knobs, values, strict=True)))
                for values in product(*self.knobs.values())
            ]
        n = self.load.requests
        self.budget = budget_requests or max(30 * n, min(self.size, MANY) * n // 10)

    # ---------------------------------------------------------------- the search

    def answer(self) -> dict[str, Any]:
        self._check_idle()
        alive = self._halve(self._screen() if self.candidates else self._explore())
        best, runner_up = self._decide(alive)
        idle = idle_knobs(self.candidates, self.knobs)
        if len(idle) == len(self.knobs):
            raise InputError(
                f"{self.loaded.path}: {', '.join(idle)}: varying it does nothing to this load"
            )
        default = self._default()
        self.tell("latency against load, the limit and the cliff")
        left = self.budget - self.runner.sweep.used_requests
        requests = min(self._probe(), max(LEAST_REQUESTS, left // RUNS_AROUND))
        around = surroundings(self.runner, best, self.load.rate_per_s, requests)
        self.tell("which coefficient matters most")
        around |= sensitivity(self.runner, best, requests)
        notes = [f"{key}: varying it does nothing to this load" for key in idle]
        return {**self._result(best, runner_up, default, around), "notes": notes}

    def _check_idle(self) -> None:
        """One request at a time: a clause that fails there can never hold."""
        alone = {"workload.arrivals": {"kind": "closed_loop", "concurrency": 1, "requests": 40}}
        workload = self.loaded.scenario.workload
        if workload.arrivals.kind == "trace" or not self.loaded.scenario.sla:
            return
        changes = {**alone, "workload.sessions": None}
        (result,) = self.runner.run([changes])
        if result["error"] is not None:
            return
        for clause in result["summary"]["sla"]["clauses"]:
            if not clause["met"]:
                raise InputError(
                    f"{self.loaded.path}: sla.{clause['clause']}: {clause['limit']:g} cannot be "
                    f"met: {clause['value']:.4g} even for one request alone on an idle server"
                )

    def _screen(self) -> list[Candidate]:
        """Leave out what does not start or cannot keep up; collapse what cannot differ."""
        rates: dict[int, float] = {}
        for number, candidate in enumerate(self.candidates):
            try:
                scenario = change(self.loaded.scenario, candidate.changes)
                rates[number] = service_rate_per_s(
                    LoadedScenario(scenario, self.loaded.path, ""), self.load
                )
            except InputError as error:
                candidate.error = str(error)
        if not rates:
            first = self.candidates[0].error
            raise InputError(f"none of {len(self.candidates)} candidates starts: {first}")
        wanted = min(max(rates.values()), self.load.rate_per_s)
        alive = [self.candidates[i] for i, rate in rates.items() if rate >= HOPELESS * wanted]
        self.tell(f"screened {len(self.candidates)} candidates, {len(alive)} may serve the load")
        return self._collapse(alive)

    def _explore(self) -> list[Candidate]:
        """The candidates that Optuna proposed, with their short runs."""
        short = max(LEAST_REQUESTS, self.load.requests // 20)
        by_changes: dict[str, Candidate] = {}

        def score(batch: list[Changes]) -> list[float]:
            candidates = [Candidate(changes, stage="short") for changes in batch]
            runnable = [c for c in candidates if self._is_valid(c)]
            results = self.runner.run((c.changes for c in runnable), requests=short)
            self._take(runnable, results, "short")
            by_changes.update((repr(c.changes), c) for c in candidates)
            self.tell(f"{len(by_changes)} of {self.size:,} candidates tried")
            return [score_of(c) for c in candidates]

        trials = max(4 * KEPT_SHORT, round(FIRST_SHARE * self.budget / short))
        folder = self.runner.sweep.store.folder
        tried = explore(
            self.knobs,
            trials,
            score,
            seed=self.seed,
            journal=folder / "optuna.journal" if folder is not None else None,
            name=self.runner.point({}, requests=short).key,
        )
        for changes in tried:
            # Trials of an earlier run, or of another machine: their results are in the store.
            if repr(changes) not in by_changes:
                score([changes])
        self.candidates = list(by_changes.values())
        alive = [c for c in self.candidates if c.results]
        if not alive:
            raise InputError(f"none of {len(self.candidates)} candidates tried starts")
        return self._ranked(alive)[:KEPT_SHORT]

    def _is_valid(self, candidate: Candidate) -> bool:
        try:
            change(self.loaded.scenario, candidate.changes)
        except InputError as error:
            candidate.error = str(error)
        return candidate.error is None

    def _collapse(self, alive: list[Candidate]) -> list[Candidate]:
        """More slots than are ever taken, or tokens than are ever scheduled, change nothing.

        One run of the most generous candidate says how many that is; of the values above it only
        the smallest is tried.
        """
        generous = max(alive, key=lambda c: [_number(v) for v in c.changes.values()])
        (result,) = self.runner.run([generous.changes], requests=self._probe())
        peak = result["pressure"]
        needed = {
            "engine.max_num_seqs": 1.5 * peak["peak_running"],
            "engine.max_num_batched_tokens": peak["largest_step"],
        }
        caps = {
            key: min(
                (v for v in self.knobs[key] if isinstance(v, int | float) and v >= need),
                default=None,
            )
            for key, need in needed.items()
            if key in self.knobs and result["error"] is None
        }
        kept = []
        for candidate in alive:
            over = [k for k, cap in caps.items() if cap is not None and candidate.changes[k] > cap]
            if over:
                names = ", ".join(f"{key} {caps[key]}" for key in over)
                candidate.stage = f"same as {names}"
            else:
                kept.append(candidate)
        return kept or alive

    def _probe(self) -> int:
        return max(LEAST_REQUESTS, round(self.load.requests * PROBE))

    def _halve(self, alive: list[Candidate]) -> list[Candidate]:
        """Short runs of all, at one block size; medium runs of the best, at every block size."""
        n = self.load.requests
        first = alive
        sizes = [c.changes[LAST_KNOB] for c in alive if LAST_KNOB in c.changes]
        if sizes and all(c.results is None for c in alive):
            first = [c for c in alive if c.changes[LAST_KNOB] == min(sizes, key=_number)]
        affordable = round(FIRST_SHARE * self.budget)
        if len(first) > KEPT_SHORT:
            if len(first) * LEAST_REQUESTS > affordable:
                first = self._spread(first, max(KEPT_SHORT, affordable // LEAST_REQUESTS))
            short = min(round(n * SHORT), max(LEAST_REQUESTS, affordable // len(first)))
            first = self._ranked(self._stage("short", first, short))[:KEPT_SHORT]
        if not first:
            return []
        rest = _without(first[0].changes, LAST_KNOB)
        others = [c for c in alive if c not in first and _without(c.changes, LAST_KNOB) == rest]
        second = [*first, *others]
        if len(second) <= KEPT_MEDIUM:
            return second
        medium = max(LEAST_REQUESTS, round(n * MEDIUM))
        return self._finalists(self._stage("medium", second, medium))

    def _finalists(self, alive: list[Candidate]) -> list[Candidate]:
        """The best few, no two of which differ in nothing but the last knob.

        One of them is the best by goodput alone: room under a clause at one seed does not tell
        how it fares at another.
        """
        ranked = self._ranked(alive)
        fastest = max((c for c in ranked if c.met), key=_goodput, default=None)
        finalists: list[Candidate] = []
        for candidate in [*ranked[:1], *([fastest] if fastest else []), *ranked[1:]]:
            rest = _without(candidate.changes, LAST_KNOB)
            if all(rest != _without(f.changes, LAST_KNOB) for f in finalists):
                finalists.append(candidate)
        return finalists[:KEPT_MEDIUM]

    def _stage(self, stage: str, alive: list[Candidate], requests: int) -> list[Candidate]:
        self.tell(f"{stage} runs: {len(alive)} candidates, {requests} requests each")
        results = self.runner.run((c.changes for c in alive), requests=requests)
        return self._take(alive, results, stage)

    def _spread(self, alive: list[Candidate], count: int) -> list[Candidate]:
        """An even choice where there are too many to try: every so manyth, in grid order."""
        at = np.unique(np.linspace(0, len(alive) - 1, count).astype(int))
        return [alive[i] for i in at]

    def _take(
        self, alive: list[Candidate], results: list[dict[str, Any]], stage: str
    ) -> list[Candidate]:
        started = []
        for candidate, result in zip(alive, results, strict=True):
            candidate.stage, candidate.error = stage, result["error"]
            if result["error"] is None:
                candidate.results = [result]
                unseen = self.load.requests - result["requests"]
                candidate.unseen_s = unseen / self.load.rate_per_s
                started.append(candidate)
        return started

    def _ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Best first: the SLA, then goodput, then the room under the tightest clause.

        Where these do not tell candidates apart, more slots leave more room for the load to
        grow, and a smaller block wastes less.
        """
        if not candidates:
            return []
        best = max(c.expected_goodput_per_s for c in candidates)

        def key(candidate: Candidate) -> tuple[float, ...]:
            met = candidate.met
            price = candidate.price_per_hour if self.objective == "cost" else 0.0
            goodput = candidate.expected_goodput_per_s
            goodput = best if goodput >= (1 - INDIFFERENT) * best else goodput
            slots = _number(candidate.changes.get("engine.max_num_seqs"))
            block = _number(candidate.changes.get("engine.block_size"))
            return (met, -price, goodput, round(candidate.margin / ROOM), slots, -block)

        return sorted(candidates, key=key, reverse=True)

    def _decide(self, alive: list[Candidate]) -> tuple[Candidate, Candidate | None]:
        """Whole loads, seed after seed, until the first is told from the second."""
        for candidate in alive:
            candidate.results, candidate.unseen_s = [], 0.0
        contenders = alive
        for number in range(MOST_SEEDS):
            self.tell(f"whole load, seed {self.seed + number}: {len(contenders)} candidates")
            results = self.runner.run((c.changes for c in contenders), seed=self.seed + number)
            for candidate, result in zip(contenders, results, strict=True):
                candidate.stage, candidate.error = "full", result["error"]
                assert candidate.results is not None
                if result["error"] is None:
                    candidate.results.append(result)
            contenders = self._ranked([c for c in contenders if c.results])
            if number + 1 >= SEEDS:
                contenders = contenders[:2]
            if number + 1 >= SEEDS and (self._told(contenders) or self._spent(CHOICE_SHARE)):
                break
        if not contenders:
            raise InputError(f"{self.loaded.path}: no candidate starts")
        if self.objective == "rate":
            contenders.sort(
                key=lambda c: limit(self.runner, c.changes, self._probe())[0], reverse=True
            )
        return contenders[0], contenders[1] if len(contenders) > 1 else None

    def _spent(self, share: float) -> bool:
        """Whether another pair of whole loads would pass this share of the budget."""
        next_pair = self.runner.sweep.used_requests + 2 * self.load.requests
        return next_pair > share * self.budget

    def _told(self, ranked: list[Candidate]) -> bool:
        """Whether first and second differ beyond doubt, or by too little to matter."""
        if len(ranked) < 2:
            return True
        first, second = ranked[:2]
        n = min(len(first.goodputs), len(second.goodputs))
        low, high = paired_interval(first.goodputs[:n], second.goodputs[:n])
        small = INDIFFERENT * first.goodput_per_s
        return low > 0 or high < 0 or (-small < low and high < small)

    # ---------------------------------------------------------------- around the answer

    def _default(self) -> Candidate:
        """The scenario with the knobs left to vLLM."""
        # A key inside a block has no default of vLLM's: the scenario's value stands.
        left = {key: None for key in self.knobs if key.count(".") == 1}
        default = Candidate(left, stage="default", results=[])
        seeds = range(self.seed, self.seed + SEEDS)
        runs = [self.runner.run([default.changes], seed=seed)[0] for seed in seeds]
        default.error = runs[0]["error"]
        default.results = [run for run in runs if run["error"] is None]
        if default.results:
            engine = default.results[0]["engine"]
            for key in default.changes:
                default.changes[key] = engine.get(key.removeprefix("engine."))
        return default

    # ---------------------------------------------------------------- the answer

    def _result(
        self,
        best: Candidate,
        runner_up: Candidate | None,
        default: Candidate,
        around: dict[str, Any],
    ) -> dict[str, Any]:
        assert best.results
        first = best.results[0]["summary"]
        scenario = change(self.loaded.scenario, best.changes)
        told = [c for c in self.candidates if c.results]
        return {
            "scenario": self.loaded.scenario.name,
            "objective": self.objective,
            "knobs": {key: list(values) for key, values in self.knobs.items()},
            "best": choice(best.changes, best.results),
            "runner_up": choice(runner_up.changes, runner_up.results or []) if runner_up else None,
            "default": choice(default.changes, default.results or []) if default.results else None,
            "default_error": default.error,
            "sla": clause_probabilities(best.results),
            **around,
            "block_size": block_size_words(self.knobs, told),
            "points": [table_row(candidate) for candidate in self.candidates],
            "devices": set_up(replace(self.loaded, scenario=scenario)).devices * scenario.replicas,
            "price_per_hour": first.get("cost", {}).get("price_per_hour"),
            "simulated_requests": self.runner.sweep.used_requests,
            "exhaustive_requests": self.size * self.load.requests,
            "points_simulated": self.runner.sweep.used_points,
            "vllm_command": vllm_command(scenario),
            "calibration": first["provenance"]["calibration"],
            "version": first["provenance"]["version"],
        }


def _default_knobs(loaded: LoadedScenario) -> dict[str, Sequence[Any]]:
    hardware = load_hardware(beside(loaded.scenario.hardware, loaded.path))
    multiple = hardware.block_size_multiple
    sizes = DEFAULT_KNOBS["engine.block_size"]
    allowed = tuple(size for size in sizes if size % multiple == 0)
    return {**DEFAULT_KNOBS, "engine.block_size": allowed or (hardware.default_block_size,)}


def _goodput(candidate: Candidate) -> float:
    return candidate.expected_goodput_per_s


def _without(changes: Changes, knob: str) -> Changes:
    return {key: value for key, value in changes.items() if key != knob}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
