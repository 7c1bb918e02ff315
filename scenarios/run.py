"""Run a scenario: once, or several times with other seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.shape import NS_PER_S
from servecast.reports.latencies import value_at
from servecast.reports.metrics import SPAN_METRICS, RunFacts, merge_replications, summarise
from servecast.reports.speculation import speedup
from servecast.scenarios.build import (
    Deployment,
    bounds_of,
    build,
    memory_summary,
    slower_and_faster,
    speculation_for,
    spread_of,
)
from servecast.scenarios.drafting import acceptance_source
from servecast.scenarios.factors import change
from servecast.scenarios.idle_keys import idle_keys
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.schema import Scenario
from servecast.scenarios.workload import build_requests
from servecast.sim.request import RequestTable
from servecast.sim.trace import Trace
from servecast.sim.world import Fleet

#: Told how many requests are done, of how many, over all replications.
Progress = Callable[[int, int], None]

#: A load of more requests is not served again with slower and faster kernels.
MOST_FOR_INTERVAL = 5_000

#: Refused requests are counted in the summary; this many are told in words.
REFUSALS_TOLD = 3


@dataclass(frozen=True)
class Result:
    """What a run answers.

    Attributes
    ----------
    summary : `summary.json`; with several replications their means carry intervals
    facts : what was simulated
    trace : of the first replication
    """

    summary: dict[str, Any]
    facts: RunFacts
    trace: Trace


def run(
    loaded: LoadedScenario,
    *,
    seed: int | None = None,
    replications: int = 1,
    progress: Progress | None = None,
) -> Result:
    """Simulate `replications` runs with seeds `seed`, `seed + 1`, ... (the scenario's by default).

    Where the scenario speculates, each load is served without speculation too, and the summary says
    how many times as fast it was.

    Raises InputError for anything that keeps the scenario from running.
    """
    deployment = build(loaded)
    first = loaded.scenario.seed if seed is None else seed
    runs = [(loaded, deployment)]
    if deployment.speculative is not None:
        plain = replace(loaded, scenario=without_speculation(loaded.scenario))
        runs.append((plain, build(plain)))
    first_load = _requests(loaded, first)
    bounds = bounds_of(loaded, deployment)
    unsure = deployment.profile.kernels is not None and len(first_load[0]) <= MOST_FOR_INTERVAL
    total = replications * len(runs) + (2 if unsure else len(bounds))
    results = []
    for i in range(replications):
        load = _requests(loaded, first + i) if i else first_load
        with_speculation, *without = (
            _replicate(*each, load, first + i, i * len(runs) + number, total, progress)
            for number, each in enumerate(runs)
        )
        if without:
            _compare(with_speculation[0], without[0][0])
        results.append(with_speculation)
    summary, facts, trace = results[0]
    if unsure:
        bounds = slower_and_faster(loaded, deployment, spread_of(loaded, deployment, trace))
    if bounds:
        before = total - len(bounds)
        summary["calibration_interval"] = _span(
            [summary]
            + [
                _replicate(loaded, bound, first_load, first, before + i, total, progress)[0]
                for i, bound in enumerate(bounds)
            ]
        )
    if replications > 1:
        summary = merge_replications([result[0] for result in results])
    return Result(summary, facts, trace)


def _span(ends: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Least and most of headline metrics over the run and the ends of what its calibration leaves
    open."""
    found: dict[str, list[float | None]] = {}
    for name, path in SPAN_METRICS.items():
        values = [v for summary in ends if (v := value_at(summary, path)) is not None]
        found[name] = [min(values), max(values)] if len(values) == len(ends) else [None, None]
    return found


def without_speculation(scenario: Scenario) -> Scenario:
    """The same with nothing drafted."""
    return change(scenario, {"engine.speculative_config": None})


def _compare(summary: dict[str, Any], without: dict[str, Any]) -> None:
    """Write into a summary how many times as fast it is, over all and by class."""
    summary["speculation"]["speedup"] = speedup(summary, without)
    for name, entry in summary.get("classes", {}).items():
        own = {"output_tokens_per_s": None, **entry}
        other = {"output_tokens_per_s": None, **without["classes"][name]}
        entry["speculation"]["speedup"] = speedup(own, other)


def _requests(loaded: LoadedScenario, seed: int) -> tuple[RequestTable, tuple[str, ...]]:
    """The load, and what is to be said of it."""
    warnings: list[str] = []
    try:
        table = build_requests(loaded.scenario, loaded.path.parent, seed, warnings.append)
    except InputError as error:
        raise InputError(f"{loaded.path}: {error}") from None
    return table, tuple(warnings)


def _replicate(
    loaded: LoadedScenario,
    deployment: Deployment,
    load: tuple[RequestTable, tuple[str, ...]],
    seed: int,
    number: int,
    replications: int,
    progress: Progress | None,
) -> tuple[dict[str, Any], RunFacts, Trace]:
    table, warnings = load[0], list(load[1])
    warnings += idle_keys(loaded.scenario, deployment.hardware)
    if deployment.engine["batching"] == "static" and any(
        clause.startswith(("itl", "tpot")) for clause in loaded.scenario.sla
    ):
        warnings.append("a static batch delivers all tokens at once: gaps between them are 0")
    tell = None
    if progress is not None:
        before, total, report = number * len(table), replications * len(table), progress

        def tell(done: int) -> None:
            report(before + done, total)

    try:
        speculation = speculation_for(deployment, loaded.scenario, loaded.path.parent, seed)
    except InputError as error:
        raise InputError(f"{loaded.path}: {error}") from None
    finished = deployment.simulate(table, tell, fleet_of(loaded.scenario), speculation)
    warnings.extend(finished.refusals[:REFUSALS_TOLD])
    if len(finished.refusals) > REFUSALS_TOLD:
        warnings.append(f"{len(finished.refusals)} requests refused in all")
    facts = run_facts(loaded, deployment, seed, tuple(warnings))
    return summarise(finished.trace, facts), facts, finished.trace


def fleet_of(scenario: Scenario) -> Fleet:
    """The replicas that a scenario asks for."""
    failure = scenario.failure
    if failure is None:
        return Fleet(scenario.replicas, scenario.router)
    at_ns = round(failure.at_s * NS_PER_S)
    return Fleet(scenario.replicas, scenario.router, failure.replicas, at_ns)


def run_facts(
    loaded: LoadedScenario, deployment: Deployment, seed: int, warnings: tuple[str, ...] = ()
) -> RunFacts:
    """What the summary and the report need to know beside the trace."""
    scenario, hardware, memory = loaded.scenario, deployment.hardware, deployment.memory
    price = scenario.price_per_hour
    return RunFacts(
        name=scenario.name,
        model=deployment.model.name,
        hardware=hardware.name,
        devices=deployment.devices * scenario.replicas,
        block_size=deployment.limits.block_size,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        memory=memory_summary(memory),
        peak_flops_per_s=hardware.peak_flops_per_s(deployment.model.compute),
        bandwidth_bytes_per_s=hardware.memory_bandwidth_bytes_per_s,
        sla=dict(scenario.sla),
        class_sla={c.name: c.sla for c in scenario.workload.classes or () if c.sla is not None},
        price_per_hour=deployment.price_per_hour if price is None else price,
        version=servecast_version(),
        scenario_sha256=loaded.sha256,
        calibration=deployment.profile.label,
        seed=seed,
        engine=deployment.engine,
        warnings=warnings,
        pipeline=_pipeline(deployment),
        acceptance=""
        if deployment.speculative is None
        else acceptance_source(deployment.speculative),
    )


def _pipeline(deployment: Deployment) -> dict[str, float] | None:
    """Stages of an SRAM device, and how many tokens they hold."""
    wafer = deployment.wafer
    if wafer is None:
        return None
    return {
        "wafers": wafer.placement.units,
        "stages": len(wafer.placement.stages),
        "slots": wafer.slots,
        "token_latency_s": wafer.latency_s,
        "slowest_stage_s": wafer.stage_s,
    }


def servecast_version() -> str:
    """Version of the installed package."""
    try:
        return version("servecast")
    except PackageNotFoundError:
        return "uninstalled"
