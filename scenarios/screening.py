"""Bounds that need no simulation: what a load asks for, and the most that an engine can serve."""

from dataclasses import dataclass

import numpy as np

from servecast.costmodels.shape import StepShape
from servecast.scenarios.build import build
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.workload import build_requests


@dataclass(frozen=True)
class Load:
    """What arrives: how many requests, how fast, and their mean lengths in tokens."""

    requests: int
    rate_per_s: float
    prompt_tokens: float
    output_tokens: float


def offered(loaded: LoadedScenario) -> Load:
    """The load of a scenario; a closed loop asks for as much as it can get."""
    scenario = loaded.scenario
    table = build_requests(scenario, loaded.path.parent, scenario.seed, lambda line: None)
    rate = float("inf")
    if table.concurrency is None:
        span_s = (int(table.arrival_ns.max()) - int(table.arrival_ns.min())) / 1e9
        rate = (len(table) - 1) / span_s if span_s > 0 else float("inf")
    return Load(
        len(table), rate, float(np.mean(table.prompt_tokens)), float(np.mean(table.output_tokens))
    )


def service_rate_per_s(loaded: LoadedScenario, load: Load) -> float:
    """Requests a second that a deployment can at most finish, on average lengths.

    With n sequences always running, each step gives each of them a token; a request takes its
    share of the steps of its outputs, and its prompt a share of steps of full token budget. n is
    what slots and KV memory allow. Prefix hits are left out of account, so with them this is no
    bound; candidates share them alike.

    Raises InputError if it does not start.
    """
    deployment = build(loaded)
    limits, cost = deployment.limits, deployment.cost
    context = load.prompt_tokens + load.output_tokens / 2
    in_memory = limits.num_gpu_blocks * limits.block_size / context
    n = max(1, int(min(limits.max_num_seqs, in_memory)))
    decode_s = cost.decode(n).cost(round(n * context)).total_s / n
    budget = max(1, limits.max_num_batched_tokens - n)
    chunk = min(budget, max(1, round(load.prompt_tokens)))
    whole = cost.step(StepShape(((chunk, 0),), n, n, round(n * context), n)).total_s
    alone = cost.step(StepShape((), n, n, round(n * context), n)).total_s
    prefill_s = max(0.0, whole - alone) * load.prompt_tokens / chunk
    return loaded.scenario.replicas / (prefill_s + load.output_tokens * decode_s)
