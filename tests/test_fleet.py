"""Several replicas behind a router."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.costmodels.shape import ConstantCost, CostModel
from servecast.sim.plan import SchedulerLimits
from servecast.sim.trace import COMPLETED
from servecast.sim.world import Fleet, simulate

LIMITS = SchedulerLimits(4, 256, 16, 1000, 1024)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    replicas=st.integers(1, 4),
    router=st.sampled_from(["round_robin", "least_loaded"]),
    closed=st.booleans(),
    asynchronous=st.booleans(),
    fails=st.booleans(),
)
def test_fast_forward_equals_stepped_and_nothing_is_lost(
    table: Any,
    linear_cost: CostModel,
    seed: int,
    replicas: int,
    router: str,
    closed: bool,
    asynchronous: bool,
    fails: bool,
) -> None:
    rng = np.random.default_rng(seed)
    n = 40
    load = table(
        np.cumsum(rng.exponential(0.01, n)),
        rng.integers(1, 300, n),
        rng.integers(1, 60, n),
        concurrency=5 if closed else None,
    )
    failing = replicas - 1 if fails else 0
    fleet = Fleet(replicas, router, failing, 150_000_000)
    limits = replace(LIMITS, async_scheduling=asynchronous)
    fast = simulate(load, limits, linear_cost, fleet=fleet).trace
    slow = simulate(load, limits, linear_cost, fleet=fleet, fast_forward=False).trace
    for name, column in fast.requests.items():
        np.testing.assert_array_equal(column, slow.requests[name], err_msg=name)
    assert fast.end_ns == slow.end_ns
    np.testing.assert_array_equal(fast.requests["request"], np.arange(n))
    assert (fast.requests["status"] == COMPLETED).all()
    np.testing.assert_array_equal(fast.requests["output_tokens"], load.output_tokens)
    assert fast.replicas == replicas
    if not failing:
        assert fast.gap_count.sum() == (load.output_tokens - 1).sum()


def test_round_robin_is_each_replica_with_its_share(table: Any, linear_cost: CostModel) -> None:
    rng = np.random.default_rng(0)
    arrival_s, prompts = np.cumsum(rng.exponential(0.02, 60)), rng.integers(1, 300, 60)
    fleet = simulate(table(arrival_s, prompts, 20), LIMITS, linear_cost, fleet=Fleet(3)).trace
    for i in range(3):
        alone = simulate(table(arrival_s[i::3], prompts[i::3], 20), LIMITS, linear_cost).trace
        np.testing.assert_array_equal(
            fleet.requests["finish_ns"][i::3], alone.requests["finish_ns"]
        )
        np.testing.assert_array_equal(fleet.requests["replica"][i::3], i)


def test_what_a_failed_replica_had_is_computed_again_elsewhere(table: Any) -> None:
    load = table([0, 0], 10, [20, 20])
    fleet = Fleet(2, failing=1, fail_at_ns=105_000_000)
    requests = simulate(load, LIMITS, ConstantCost(0.01), fleet=fleet).trace.requests
    assert requests["replica"].tolist() == [0, 0]
    assert requests["finish_ns"].tolist() == [200_000_000, 310_000_000]
    assert requests["arrival_ns"].tolist() == [0, 0]


def test_a_fleet_must_keep_one_replica() -> None:
    with pytest.raises(ValueError, match="one must be left"):
        Fleet(2, failing=2)
