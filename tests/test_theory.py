"""Closed forms of queueing theory, each with an interval from replications."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from servecast.costmodels.shape import ConstantCost
from servecast.sim.plan import SchedulerLimits
from servecast.sim.request import RequestTable
from servecast.sim.world import simulate

STEP_S = 0.01
REPLICATIONS = 12


def limits(max_num_seqs: int) -> SchedulerLimits:
    return SchedulerLimits(max_num_seqs, 4096, 16, 100_000, 50_000, enable_prefix_caching=False)


def sojourn_s(table: RequestTable, max_num_seqs: int, cost: Any) -> Any:
    requests = simulate(table, limits(max_num_seqs), cost).trace.requests
    return (requests["finish_ns"] - requests["arrival_ns"]) / 1e9


def assert_covers(samples: list[float], theory: float) -> None:
    """The 99 % interval of the replications covers the theory, and is narrow enough to say so."""
    mean, error = np.mean(samples), stats.sem(samples)
    half = float(error * stats.t.ppf(0.995, len(samples) - 1))
    assert abs(mean - theory) <= half, (mean, theory, half)
    assert half < 0.08 * theory, (half, theory)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_slot_and_equal_steps_are_m_d_1(table: Any, load: float) -> None:
    """Pollaczek-Khinchine with constant service: W = D + rho D / (2 (1 - rho))."""
    means = []
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng(seed)
        arrival_s = np.cumsum(rng.exponential(STEP_S / load, 8000))
        means.append(sojourn_s(table(arrival_s, 1, 1), 1, ConstantCost(STEP_S))[500:].mean())
    assert_covers(means, STEP_S + load * STEP_S / (2 * (1 - load)))


def test_one_slot_and_geometric_outputs_are_near_m_m_1(table: Any) -> None:
    """Service of geometric length: Pollaczek-Khinchine with the moments of the lengths drawn."""
    load, mean_tokens = 0.5, 40
    means = []
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng(seed)
        outputs = rng.geometric(1 / mean_tokens, 8000)
        arrival_s = np.cumsum(rng.exponential(mean_tokens * STEP_S / load, 8000))
        means.append(sojourn_s(table(arrival_s, 1, outputs), 1, ConstantCost(STEP_S))[500:].mean())
    p = 1 / mean_tokens
    service, second = mean_tokens * STEP_S, (2 - p) / p**2 * STEP_S**2
    rate = load / service
    assert_covers(means, service + rate * second / (2 * (1 - load)))


def test_steps_as_long_as_the_batch_are_processor_sharing(table: Any, linear_cost: Any) -> None:
    """M/G/1-PS is insensitive to the law of the lengths: W = E[S] / (1 - rho)."""
    load, mean_tokens, token_s = 0.5, 200, 2**-10
    shared = type(linear_cost)(0.0, token_s, 0.0)
    means = []
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng(seed)
        outputs = rng.integers(1, 2 * mean_tokens, 4000)
        arrival_s = np.cumsum(rng.exponential(mean_tokens * token_s / load, 4000))
        means.append(sojourn_s(table(arrival_s, 1, outputs), 1000, shared)[300:].mean())
    assert_covers(means, mean_tokens * token_s / (1 - load))


def test_littles_law(table: Any, linear_cost: Any) -> None:
    """Mean number in the engine = rate x mean time in it, both measured over one whole run."""
    rng = np.random.default_rng(0)
    n = 3000
    arrival_s = np.cumsum(rng.exponential(0.05, n))
    load = table(arrival_s, rng.integers(1, 400, n), rng.integers(1, 100, n))
    trace = simulate(load, limits(64), linear_cost).trace
    requests = trace.requests
    events = np.concatenate([requests["arrival_ns"], requests["finish_ns"]])
    change = np.repeat([1, -1], n)
    order = np.argsort(events, kind="stable")
    inside = np.cumsum(change[order])[:-1]
    area = float((inside * np.diff(events[order])).sum())
    assert area == float((requests["finish_ns"] - requests["arrival_ns"]).sum())
    busy = (trace.steps["end_ns"] - trace.steps["start_ns"]).sum()
    in_service = (requests["finish_ns"] - requests["admitted_ns"]).sum()
    assert in_service <= 64 * busy
