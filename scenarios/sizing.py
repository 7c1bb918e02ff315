"""`servecast size`: the engine flags that serve a load best, and how sure that is.

1. Screening without simulation: candidates that do not start, that flags contradict, or whose
   service rate by the roofline stays far below the best one's.
2. Successive halving on the first requests of the load, all candidates on the same requests
   (common random numbers): a third goes on each time.
3. The last ones on the whole load with several seeds, paired, until the winner is told from the
   runner-up or the difference does not matter (2 % of goodput).
4. Around the winner: latency against load, where a clause breaks, where preemption begins, and
   which coefficient of the cost model would change the outcome most.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from servecast.calibration.profile import GENERIC, Profile
from servecast.costmodels.catalogue import load_hardware
from servecast.costmodels.errors import InputError
from servecast.reports.stats import clopper_pearson, paired_interval
from servecast.scenarios.answer import binding_words, block_size_words, choice, vllm_command
from servecast.scenarios.exploration import explore
from servecast.scenarios.factors import change
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.points import Point
from servecast.scenarios.screening import offered, service_rate_per_s
from servecast.scenarios.sweep import Sweep

Changes = dict[str, Any]
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

#: Requests of a short and of a medium run, as shares of the load, and the least that say anything.
SHORT, MEDIUM, LEAST_REQUESTS = 1 / 20, 1 / 4, 60

#: Candidates that go on from the short runs, and from the medium ones.
KEPT_SHORT, KEPT_MEDIUM = 12, 3

#: More candidates than this are not all looked at: Optuna proposes which.
MANY = 5000

SEEDS, MOST_SEEDS = 3, 8

#: Loads tried around the winner, in order; the search for the limit goes on by halving.
LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
FAR_LOADS = (8.0, 16.0)
HALVINGS = 2

#: How far a coefficient may be off, for the tornado.
SWING = 0.15
COEFFICIENTS = {
    "gemm_bandwidth": "memory bandwidth of dense layers",
    "gemm_flops": "compute rate of dense layers",
    "attention_decode_bandwidth": "memory bandwidth of decode attention",
    "attention_prefill_flops": "compute rate of prefill attention",
    "host_step_s": "host time of a step",
}


@dataclass
class Candidate:
    """A combination of knobs and what is known of it so far."""

    changes: Changes
    stage: str = "screened"
    error: str | None = None
    results: list[dict[str, Any]] | None = None

    @property
    def goodput_per_s(self) -> float:
        """Mean over the seeds run so far."""
        return float(np.mean(self.goodputs))

    @property
    def goodputs(self) -> list[float]:
        return [r["summary"]["goodput_per_s"] for r in self.results or ()]

    @property
    def met(self) -> bool:
        """Every clause holds in most of the runs so far."""
        verdicts = [r["summary"]["sla"]["met"] is not False for r in self.results or ()]
        return 2 * sum(verdicts) > len(verdicts)

    @property
    def margin(self) -> float:
        """Room under the tightest clause, as a share of its limit; 1 without clauses."""
        rooms = [
            1 - clause["value"] / clause["limit"]
            for result in self.results or ()
            for clause in result["summary"]["sla"]["clauses"]
            if clause["value"] is not None and clause["limit"] > 0
        ]
        return min(rooms, default=1.0)


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
        self.loaded, self.sweep, self.objective, self.tell = loaded, sweep, objective, tell
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
        idle = self._idle_knobs()
        if len(idle) == len(self.knobs):
            raise InputError(
                f"{self.loaded.path}: {', '.join(idle)}: varying it does nothing to this load"
            )
        default = self._default()
        around = self._around(best)
        notes = [f"{key}: varying it does nothing to this load" for key in idle]
        return {**self._result(best, runner_up, default, around), "notes": notes}

    def _point(self, changes: Changes, seed: int, requests: int | None, profile: Profile) -> Point:
        scenario = change(self.loaded.scenario, changes)
        return Point(scenario, self.loaded.path, seed, requests, profile)

    def _run(
        self,
        changes: Iterable[Changes],
        *,
        seed: int | None = None,
        requests: int | None = None,
        profile: Profile = GENERIC,
    ) -> list[dict[str, Any]]:
        seed = self.seed if seed is None else seed
        return list(self.sweep.run(self._point(c, seed, requests, profile) for c in changes))

    def _check_idle(self) -> None:
        """One request at a time: a clause that fails there can never hold."""
        alone = {"workload.arrivals": {"kind": "closed_loop", "concurrency": 1, "requests": 40}}
        workload = self.loaded.scenario.workload
        if workload.arrivals.kind == "trace" or not self.loaded.scenario.sla:
            return
        changes = {**alone, "workload.sessions": None}
        (result,) = self._run([changes])
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
        short = self._short()
        by_changes: dict[str, Candidate] = {}

        def score(batch: list[Changes]) -> list[float]:
            candidates = [Candidate(changes, stage="short") for changes in batch]
            runnable = [c for c in candidates if self._is_valid(c)]
            results = self._run((c.changes for c in runnable), requests=short)
            self._take(runnable, results, "short")
            by_changes.update((repr(c.changes), c) for c in candidates)
            self.tell(f"{len(by_changes)} of {self.size:,} candidates tried")
            return [_score(c) for c in candidates]

        trials = max(2 * KEPT_SHORT, self.budget // 4 // short)
        folder = self.sweep.store.folder
        tried = explore(
            self.knobs,
            trials,
            score,
            seed=self.seed,
            journal=folder / "optuna.journal" if folder is not None else None,
            name=self._point({}, self.seed, short, GENERIC).key,
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

    def _short(self) -> int:
        return max(LEAST_REQUESTS, round(self.load.requests * SHORT))

    def _collapse(self, alive: list[Candidate]) -> list[Candidate]:
        """More slots than are ever taken, or tokens than are ever scheduled, change nothing.

        One run of the most generous candidate says how many that is; of the values above it only
        the smallest is tried.
        """
        generous = max(alive, key=lambda c: [_number(v) for v in c.changes.values()])
        (result,) = self._run([generous.changes], requests=self._medium())
        peak = result["pressure"]
        needed = {
            "engine.max_num_seqs": 1.5 * peak["peak_running"],
            "engine.max_num_batched_tokens": peak["largest_step"],
        }
        caps = {
            key: min((v for v in self.knobs[key] if v >= need), default=None)
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

    def _medium(self) -> int:
        return max(LEAST_REQUESTS, round(self.load.requests * MEDIUM))

    def _halve(self, alive: list[Candidate]) -> list[Candidate]:
        short = self._short()
        affordable = max(KEPT_SHORT, self.budget // 4 // short)
        if len(alive) > affordable:
            alive = self._spread(alive, affordable)
        for stage, requests, kept in (
            ("short", short, KEPT_SHORT),
            ("medium", self._medium(), KEPT_MEDIUM),
        ):
            if len(alive) <= kept:
                continue
            self.tell(f"{stage} runs: {len(alive)} candidates, {requests} requests each")
            results = self._run((c.changes for c in alive), requests=requests)
            alive = self._take(alive, results, stage)
            alive = self._ranked(alive)[:kept]
        return alive

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
                started.append(candidate)
        return started

    def _ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Best first: the SLA, then goodput, then the room under the tightest clause.

        Where these do not tell candidates apart, more slots leave more room for the load to
        grow, and a smaller block wastes less.
        """
        if not candidates:
            return []
        best = max(c.goodput_per_s for c in candidates)

        def key(candidate: Candidate) -> tuple[float, ...]:
            met = candidate.met
            price = self._price(candidate) if self.objective == "cost" else 0.0
            near = candidate.goodput_per_s >= (1 - INDIFFERENT) * best
            goodput = best if near else candidate.goodput_per_s
            slots = _number(candidate.changes.get("engine.max_num_seqs"))
            block = _number(candidate.changes.get("engine.block_size"))
            return (met, -price, goodput, round(candidate.margin / ROOM), slots, -block)

        return sorted(candidates, key=key, reverse=True)

    def _price(self, candidate: Candidate) -> float:
        result = (candidate.results or [{}])[0]
        return float(result.get("summary", {}).get("cost", {}).get("price_per_hour", 0.0))

    def _decide(self, alive: list[Candidate]) -> tuple[Candidate, Candidate | None]:
        """Whole loads, seed after seed, until the first is told from the second."""
        for candidate in alive:
            candidate.results = []
        contenders = alive
        for number in range(MOST_SEEDS):
            self.tell(f"whole load, seed {self.seed + number}: {len(contenders)} candidates")
            results = self._run((c.changes for c in contenders), seed=self.seed + number)
            for candidate, result in zip(contenders, results, strict=True):
                candidate.stage, candidate.error = "full", result["error"]
                assert candidate.results is not None
                if result["error"] is None:
                    candidate.results.append(result)
            contenders = self._ranked([c for c in contenders if c.results])[:2]
            if number + 1 >= SEEDS and self._told(contenders):
                break
        if not contenders:
            raise InputError(f"{self.loaded.path}: no candidate starts")
        if self.objective == "rate":
            contenders.sort(key=lambda c: self._limit(c.changes)[0], reverse=True)
        return contenders[0], contenders[1] if len(contenders) > 1 else None

    def _idle_knobs(self) -> list[str]:
        """Knobs whose values all gave the same latencies wherever nothing else differed."""
        idle = []
        for key, values in self.knobs.items():
            groups: dict[str, set[str]] = {}
            compared = False
            for candidate in self.candidates:
                if candidate.results:
                    rest = {k: v for k, v in candidate.changes.items() if k != key}
                    seen = groups.setdefault(f"{candidate.stage} {rest}", set())
                    compared |= bool(seen)
                    seen.add(_fingerprint(candidate.results[0]))
            if len(values) > 1 and compared and all(len(seen) == 1 for seen in groups.values()):
                idle.append(key)
        return idle

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
        default = Candidate({key: None for key in self.knobs}, stage="default", results=[])
        seeds = range(self.seed, self.seed + SEEDS)
        runs = [self._run([default.changes], seed=seed)[0] for seed in seeds]
        default.error = runs[0]["error"]
        default.results = [run for run in runs if run["error"] is None]
        return default

    def _at_load(self, changes: Changes, load: float) -> dict[str, Any]:
        (result,) = self._run([{**changes, "load": load}], requests=self._medium())
        return {"load": load, **result}

    def _limit(self, changes: Changes) -> tuple[float, str | None, list[dict[str, Any]]]:
        """(largest load factor that holds, the clause that breaks, all loads tried)."""
        tried: list[dict[str, Any]] = []
        held, broken = 0.0, None
        for load in LOADS:
            tried.append(self._at_load(changes, load))
            if _holds(tried[-1]):
                held = load
            else:
                broken = load
                break
        for _ in range(HALVINGS if broken is not None else 0):
            assert broken is not None
            tried.append(self._at_load(changes, (held + broken) / 2))
            if _holds(tried[-1]):
                held = tried[-1]["load"]
            else:
                broken = tried[-1]["load"]
        first = min((t for t in tried if not _holds(t)), key=lambda t: t["load"], default=None)
        return held, _broken_clause(first), tried

    def _around(self, best: Candidate) -> dict[str, Any]:
        self.tell("latency against load, the limit and the cliff")
        held, breaks, tried = self._limit(best.changes)
        for load in FAR_LOADS:
            if any(_preemptions(t) for t in tried):
                break
            tried.append(self._at_load(best.changes, load))
        tried.sort(key=lambda t: t["load"])
        cliff = next((t for t in tried if _preemptions(t)), None)
        strained = next((t for t in tried if not _holds(t)), tried[-1])
        self.tell("which coefficient matters most")
        return {
            "headroom": {"load": held, "breaks": breaks},
            "cliff": {
                "load": cliff["load"] if cliff else None,
                "preemptions": _preemptions(cliff) if cliff else 0,
            },
            "curve": [self._curve_row(t) for t in tried if t["error"] is None],
            "binding": binding_words(strained),
            **self._sensitivity(best),
        }

    def _curve_row(self, tried: dict[str, Any]) -> dict[str, Any]:
        summary = tried["summary"]
        return {
            "load": tried["load"],
            "rate_per_s": self.load.rate_per_s * tried["load"],
            "goodput_per_s": summary["goodput_per_s"],
            "output_tokens_per_s": summary["output_tokens_per_s"],
            "ttft_p50_s": summary["ttft_s"]["p50"],
            "ttft_p95_s": summary["ttft_s"]["p95"],
            "itl_p99_s": summary["itl_s"]["p99"],
            "e2e_p95_s": summary["e2e_s"]["p95"],
            "preemptions": summary["preemptions"],
            "met": _holds(tried),
        }

    def _sensitivity(self, best: Candidate) -> dict[str, Any]:
        """The tightest clause (or the mean gap) with each coefficient off by `SWING`."""
        metric = _tightest(best)
        requests = max(LEAST_REQUESTS, self.load.requests // 10)

        def outcome(profile: Profile) -> float | None:
            (result,) = self._run([best.changes], requests=requests, profile=profile)
            return _metric(result, metric)

        base = outcome(GENERIC)
        rows = []
        for name, what in COEFFICIENTS.items():
            low, high = (outcome(_off(name, factor)) for factor in (1 - SWING, 1 + SWING))
            if None not in (low, high, base):
                rows.append({"what": what, "low": low, "high": high, "base": base})
        rows.sort(key=lambda row: -abs(float(row["high"] or 0) - float(row["low"] or 0)))
        return {"sensitivity": rows, "sensitivity_metric": metric}

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
            "sla": _clause_probabilities(best.results),
            **around,
            "block_size": block_size_words(self.knobs, told),
            "points": [_row(candidate) for candidate in self.candidates],
            "devices": best.results[0]["engine"]["tensor_parallel_size"]
            * best.results[0]["engine"]["pipeline_parallel_size"]
            * scenario.replicas,
            "price_per_hour": first.get("cost", {}).get("price_per_hour"),
            "simulated_requests": self.sweep.simulated_requests,
            "exhaustive_requests": self.size * self.load.requests,
            "points_simulated": self.sweep.evaluated,
            "vllm_command": vllm_command(scenario),
            "calibration": first["provenance"]["calibration"],
            "version": first["provenance"]["version"],
        }


def _fingerprint(result: dict[str, Any]) -> str:
    """All latencies of a run: what a knob must change to have done anything."""
    metrics = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s")
    return repr([result["summary"][metric] for metric in metrics])


def _score(candidate: Candidate) -> float:
    """What Optuna climbs: goodput, halved where the SLA does not hold."""
    if not candidate.results:
        return 0.0
    return candidate.goodput_per_s * (1.0 if candidate.met else 0.5)


def _default_knobs(loaded: LoadedScenario) -> dict[str, Sequence[Any]]:
    hardware = load_hardware(_beside(loaded, loaded.scenario.hardware))
    multiple = hardware.block_size_multiple
    sizes = DEFAULT_KNOBS["engine.block_size"]
    allowed = tuple(size for size in sizes if size % multiple == 0)
    return {**DEFAULT_KNOBS, "engine.block_size": allowed or (hardware.default_block_size,)}


def _beside(loaded: LoadedScenario, name: str) -> str:
    return str(loaded.path.parent / name) if name.endswith((".yaml", ".yml")) else name


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _holds(result: dict[str, Any]) -> bool:
    return result["error"] is None and result["summary"]["sla"]["met"] is not False


def _preemptions(result: dict[str, Any]) -> int:
    return 0 if result["error"] is not None else int(result["summary"]["preemptions"])


def _broken_clause(result: dict[str, Any] | None) -> str | None:
    if result is None or result["error"] is not None:
        return None
    missed = [c["clause"] for c in result["summary"]["sla"]["clauses"] if not c["met"]]
    return missed[0] if missed else None


def _tightest(best: Candidate) -> str:
    """The clause with the least room, else the mean gap between tokens."""
    assert best.results
    clauses = best.results[0]["summary"]["sla"]["clauses"]
    bounded = [c for c in clauses if c["value"] is not None and c["clause"].endswith("_s")]
    if not bounded:
        return "tpot_mean_s"
    return str(max(bounded, key=lambda c: c["value"] / c["limit"])["clause"])


def _metric(result: dict[str, Any], name: str) -> float | None:
    if result["error"] is not None:
        return None
    metric, stat, _ = name.split("_")
    value = result["summary"][f"{metric}_s"][stat]
    return None if value is None else float(value)


def _off(name: str, factor: float) -> Profile:
    """The generic profile with one coefficient off."""
    label = f"{GENERIC.label}, {name} x {factor:g}"
    if name == "host_step_s":
        efficiency = replace(GENERIC.efficiency, label=label)
        return replace(GENERIC, host_step_s=GENERIC.host_step_s * factor, efficiency=efficiency)
    value = min(1.0, getattr(GENERIC.efficiency, name) * factor)
    changes: dict[str, Any] = {name: value, "label": label}
    return replace(GENERIC, efficiency=replace(GENERIC.efficiency, **changes))


def _clause_probabilities(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """P(met) of each clause over the seeds, with a 90 % interval."""
    rows = []
    for i, clause in enumerate(results[0]["summary"]["sla"]["clauses"]):
        runs = [result["summary"]["sla"]["clauses"][i] for result in results]
        met = sum(bool(run["met"]) for run in runs)
        values = [run["value"] for run in runs if run["value"] is not None]
        low, high = clopper_pearson(met, len(runs), 0.9)
        rows.append(
            {
                "clause": clause["clause"],
                "limit": clause["limit"],
                "value": float(np.mean(values)) if values else None,
                "probability": met / len(runs),
                "lo": low,
                "hi": high,
            }
        )
    return rows


def _row(candidate: Candidate) -> dict[str, Any]:
    """One line of the table of every point."""
    row: dict[str, Any] = {
        "changes": candidate.changes,
        "stage": candidate.stage,
        "error": candidate.error,
        "met": None,
        **dict.fromkeys(
            (
                "goodput_per_s",
                "ttft_p95_s",
                "itl_p99_s",
                "tokens_per_s_per_device",
                "tokens_per_s_per_user",
                "preemptions",
                "kv_peak_use",
            )
        ),
    }
    if candidate.results:
        found = choice(candidate.changes, candidate.results)
        row |= {key: found[key] for key in row if key in found}
        row["met"] = candidate.met
    return row
