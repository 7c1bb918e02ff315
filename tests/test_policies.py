"""Policies beside vLLM's: batching, waiting limits, swap."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.costmodels.shape import ConstantCost, CostModel
from servecast.sim.plan import SchedulerLimits
from servecast.sim.request import WaitLimit
from servecast.sim.trace import COMPLETED, TIMED_OUT, Trace
from servecast.sim.world import simulate

STEP_NS = 10_000_000
STEP = ConstantCost(STEP_NS / 1e9)
PLAIN = SchedulerLimits(4, 4096, 16, 2000, 1024, enable_prefix_caching=False)


def steps_of(times_ns: Any) -> list[float]:
    return [float(t) for t in np.asarray(times_ns) / STEP_NS]


def assert_same_run(a: Trace, b: Trace) -> None:
    for name, column in a.requests.items():
        np.testing.assert_array_equal(column, b.requests[name], err_msg=name)
    assert a.end_ns == b.end_ns


def test_a_static_batch_returns_together_when_its_longest_ends(table: Any) -> None:
    load = table([0, 0, 0, 0, 0], 100, [3, 9, 1, 5, 2])
    trace = simulate(load, PLAIN, STEP, static_batching=True, batch_wait_ns=50_000_000).trace
    # Four fill the batch: one step of prefill, eight of decoding. The fifth waits for that, and
    # has waited its 50 ms by then.
    assert steps_of(trace.requests["finish_ns"]) == [9, 9, 9, 9, 11]
    np.testing.assert_array_equal(trace.requests["first_token_ns"], trace.requests["finish_ns"])
    assert trace.requests["output_tokens"].tolist() == [3, 9, 1, 5, 2]


def test_a_static_batch_waits_to_be_full(table: Any) -> None:
    trace = simulate(
        table([0.0, 0.03], 100, 2), PLAIN, STEP, static_batching=True, batch_wait_ns=50_000_000
    ).trace
    assert steps_of(trace.requests["admitted_ns"]) == [5, 5]
    assert steps_of(trace.requests["finish_ns"]) == [7, 7]


def test_a_static_batch_is_held_to_what_memory_holds(table: Any) -> None:
    """Blocks for all of a batch are there before it starts: 24 tokens each, 8 blocks of 16."""
    small = replace(PLAIN, num_gpu_blocks=9, max_model_len=128)
    trace = simulate(table([0] * 5, 20, 12), small, STEP, static_batching=True).trace
    assert (trace.requests["preemptions"] == 0).all()
    assert trace.steps["running"].max() == 4
    tighter = replace(small, num_gpu_blocks=5, max_model_len=64)
    trace = simulate(
        table([0] * 5, 20, 12), tighter, STEP, static_batching=True, batch_wait_ns=1
    ).trace
    assert trace.steps["running"].max() == 2
    assert (trace.requests["status"] == COMPLETED).all()


def test_continuous_batching_beats_static_on_the_same_load(table: Any, linear_cost: Any) -> None:
    rng = np.random.default_rng(0)
    load = table(
        np.cumsum(rng.exponential(0.02, 400)), rng.integers(10, 200, 400), rng.integers(1, 80, 400)
    )
    limits = replace(PLAIN, max_num_seqs=16)
    static = simulate(load, limits, linear_cost, static_batching=True, batch_wait_ns=50_000_000)
    moving = simulate(load, limits, linear_cost)
    waits = [
        (run.trace.requests["finish_ns"] - run.trace.requests["arrival_ns"]).mean()
        for run in (static, moving)
    ]
    assert waits[0] > 1.5 * waits[1]
    assert static.trace.gap_count.sum() == moving.trace.gap_count.sum()


def test_unchunked_batching_computes_prompts_whole(table: Any) -> None:
    """Orca: iteration level, no token budget (the budget is what all slots can hold)."""
    whole = replace(PLAIN, enable_chunked_prefill=False, max_num_batched_tokens=4 * 1024)
    trace = simulate(table([0, 0, 0], 1000, 5), whole, STEP).trace
    assert trace.steps["prefill_tokens"][0] == 3000


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_promoted_request_goes_ahead_alone(table: Any, policy: str) -> None:
    """One slot is taken for 20 steps; the interactive request overtakes the batch ones."""
    load = table(
        [0.0, 0.01, 0.02, 0.03],
        10,
        [20, 5, 5, 5],
        klass=np.array([0, 0, 0, 1]),
        wait_limits=(None, WaitLimit(50_000_000, reject=False)),
        class_names=("batch", "interactive"),
    )
    limits = replace(PLAIN, max_num_seqs=2, scheduling_policy=policy)
    trace = simulate(load, replace(limits, max_num_seqs=1), STEP).trace
    assert steps_of(trace.requests["admitted_ns"]) == [0, 25, 30, 20]
    assert trace.requests["promoted"].tolist() == [0, 0, 0, 1]
    # With two slots free at once it still goes alone, and the next one a step later.
    two = simulate(
        table(
            [0, 0, 0.01, 0.02],
            10,
            [20, 20, 5, 5],
            klass=np.array([0, 0, 0, 1]),
            wait_limits=load.wait_limits,
            class_names=load.class_names,
        ),
        limits,
        STEP,
    ).trace
    assert steps_of(two.requests["admitted_ns"]) == [0, 0, 21, 20]


def test_a_rejected_request_leaves_when_its_time_is_up(table: Any) -> None:
    load = table(
        [0.0, 0.01, 0.02],
        10,
        [20, 5, 5],
        klass=np.array([0, 1, 0]),
        wait_limits=(None, WaitLimit(50_000_000, reject=True)),
        class_names=("batch", "interactive"),
    )
    trace = simulate(load, replace(PLAIN, max_num_seqs=1), STEP).trace
    assert trace.requests["status"].tolist() == [COMPLETED, TIMED_OUT, COMPLETED]
    assert trace.requests["admitted_ns"][1] == -1
    assert steps_of(trace.requests["admitted_ns"][[0, 2]]) == [0, 20]


def test_swapped_blocks_come_back_instead_of_being_computed(table: Any) -> None:
    """Two sequences outgrow five blocks; the second is swapped out and continues where it was."""
    tight = replace(PLAIN, num_gpu_blocks=6, max_model_len=80, swap_blocks=10)
    load = table([0, 0], 30, 40)
    swap_s = 0.001
    swapped = simulate(load, tight, STEP, swap_block_s=swap_s).trace
    recomputed = simulate(load, replace(tight, swap_blocks=0), STEP).trace
    assert swapped.requests["preemptions"].tolist() == [0, 1]
    moved = swapped.steps["swap_s"].sum() / swap_s
    # 32 computed tokens are two blocks, out and in again.
    assert moved == pytest.approx(4)
    assert swapped.steps["prefill_tokens"].sum() < recomputed.steps["prefill_tokens"].sum()
    full = simulate(load, replace(tight, swap_blocks=1), STEP, swap_block_s=swap_s).trace
    assert full.steps["swap_s"].sum() == 0


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    static=st.booleans(),
    swap=st.sampled_from([0, 5, 1000]),
    tight=st.booleans(),
    asynchronous=st.booleans(),
    caching=st.booleans(),
    waits=st.sampled_from([(None, None), (5_000_000, None), (30_000_000, 200_000_000)]),
    reject=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_policies_lose_nothing_and_fast_forward_equals_stepped(
    table: Any,
    linear_cost: CostModel,
    seed: int,
    static: bool,
    swap: int,
    tight: bool,
    asynchronous: bool,
    caching: bool,
    waits: tuple[int | None, int | None],
    reject: bool,
    policy: str,
) -> None:
    rng = np.random.default_rng(seed)
    n = 30
    load = table(
        np.cumsum(rng.exponential(0.01, n)),
        rng.integers(1, 120, n),
        rng.integers(1, 60, n),
        klass=rng.integers(0, 2, n),
        priority=rng.integers(0, 3, n),
        class_names=("a", "b"),
        wait_limits=tuple(w and WaitLimit(w, reject) for w in waits),
    )
    limits = SchedulerLimits(
        4,
        64,
        16,
        (20 if tight else 1000),
        256,
        enable_prefix_caching=caching and not static,
        async_scheduling=asynchronous and not static,
        scheduling_policy=policy,
        swap_blocks=swap,
    )
    options: dict[str, Any] = {
        "static_batching": static,
        "batch_wait_ns": 20_000_000,
        "swap_block_s": 2**-12,
    }
    fast = simulate(load, limits, linear_cost, **options).trace
    assert_same_run(fast, simulate(load, limits, linear_cost, fast_forward=False, **options).trace)
    if not static:
        walked = simulate(
            load, limits, linear_cost, fast_forward=False, aggregate=False, **options
        ).trace
        assert_same_run(fast, walked)
        named = simulate(load, limits, linear_cost, private_runs=False, **options).trace
        assert_same_run(fast, named)
    status = fast.requests["status"]
    assert np.isin(status, [COMPLETED, TIMED_OUT]).all()
    if not reject or waits == (None, None):
        assert (status == COMPLETED).all()
    done = status == COMPLETED
    outputs = fast.requests["output_tokens"]
    np.testing.assert_array_equal(outputs, np.where(done, load.output_tokens, 0))
    assert fast.gap_count.sum() == (outputs - 1)[done].sum()
