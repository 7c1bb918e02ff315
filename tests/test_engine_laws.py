"""Laws of a run, each over random loads: the fast way equals the slow one, nothing is lost.

The numbers are those of `docs/laws.md`.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.costmodels.shape import ConstantCost, CostModel
from servecast.sim.plan import SchedulerLimits
from servecast.sim.request import RequestTable
from servecast.sim.trace import COMPLETED, REFUSED, Trace
from servecast.sim.world import simulate


@st.composite
def loads(draw: st.DrawFn) -> tuple[RequestTable, SchedulerLimits]:
    """Small loads with every feature that a table can carry, half of them short of memory."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 40))
    block_size = draw(st.sampled_from([4, 16]))
    max_model_len = 256
    prompts = rng.integers(1, 150, n)
    outputs = rng.integers(1, 60, n)
    seqs = draw(st.sampled_from([1, 3, 8, 64]))
    tight = draw(st.booleans())
    blocks = max_model_len // block_size + (draw(st.integers(1, 12)) if tight else 2000)
    shared = None
    if draw(st.booleans()):
        heads = rng.integers(1, 4, n)
        ends = np.minimum(prompts, heads * 20)
        shared = [((int(h), int(e)),) for h, e in zip(heads, ends, strict=True)]
    columns: dict[str, Any] = {
        "arrival_ns": np.cumsum(rng.exponential(draw(st.sampled_from([1e5, 1e7, 1e8])), n)).astype(
            np.int64
        ),
        "priority": rng.integers(0, 3, n),
        "klass": np.zeros(n, np.int64),
        "segment_id": np.arange(n) + 1000,
        "shared": shared,
    }
    kind = draw(st.sampled_from(["open", "closed", "sessions"]))
    if kind == "closed":
        columns["concurrency"] = draw(st.integers(1, 10))
        columns["think_ns"] = rng.integers(0, 2, n) * 5_000_000
    if kind == "sessions" and shared is None:
        turn = np.arange(n) % 3
        columns["after"] = np.where(turn > 0, np.arange(n) - 1, -1)
        columns["segment_id"] = np.arange(n) // 3 + 1000
        columns["think_ns"] = np.full(n, 3_000_000)
        outputs = np.minimum(outputs, 20)
        for i in range(n):
            if turn[i]:
                prompts[i] = prompts[i - 1] + outputs[i - 1] + 1 + prompts[i] % 20
    table = RequestTable(prompt_tokens=prompts, output_tokens=outputs, **columns)
    limits = SchedulerLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, draw(st.sampled_from([16, 64, 300]))),
        block_size=block_size,
        num_gpu_blocks=blocks + 1,
        max_model_len=max_model_len,
        enable_prefix_caching=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 20])),
        watermark=draw(st.sampled_from([0.0, 0.05])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
    )
    return table, limits


def assert_same_run(a: Trace, b: Trace) -> None:
    for name, column in a.requests.items():
        np.testing.assert_array_equal(column, b.requests[name], err_msg=name)
    np.testing.assert_array_equal(expanded_gaps(a), expanded_gaps(b))
    assert a.end_ns == b.end_ns
    assert a.flops == pytest.approx(b.flops) and a.bytes == pytest.approx(b.bytes)
    assert sum(a.steps["steps"]) == sum(b.steps["steps"])
    for name in ("prefill_tokens", "decoded_tokens"):
        assert a.steps[name].sum() == b.steps[name].sum(), name
    np.testing.assert_array_equal(busy_ns(a), busy_ns(b))


def expanded_gaps(trace: Trace) -> Any:
    return np.sort(np.repeat(trace.gap_ns, trace.gap_count))


def busy_ns(trace: Trace) -> Any:
    return np.sum(trace.steps["end_ns"] - trace.steps["start_ns"])


@settings(max_examples=150, deadline=None)
@given(loads())
def test_law_1_fast_forward_equals_stepped(
    linear_cost: CostModel, load: tuple[RequestTable, SchedulerLimits]
) -> None:
    table, limits = load
    fast = simulate(table, limits, linear_cost)
    assert_same_run(fast.trace, simulate(table, limits, linear_cost, fast_forward=False).trace)


@settings(max_examples=150, deadline=None)
@given(loads())
def test_law_2_counted_equals_walked(
    linear_cost: CostModel, load: tuple[RequestTable, SchedulerLimits]
) -> None:
    table, limits = load
    fast = simulate(table, limits, linear_cost)
    slow = simulate(
        table, limits, linear_cost, fast_forward=False, aggregate=False, private_runs=False
    )
    assert_same_run(fast.trace, slow.trace)


@settings(max_examples=100, deadline=None)
@given(loads())
def test_law_3_nothing_is_lost(
    linear_cost: CostModel, load: tuple[RequestTable, SchedulerLimits]
) -> None:
    """Every request leaves once, with all its tokens, and time runs forward."""
    table, limits = load
    run = simulate(table, limits, linear_cost)
    requests, steps = run.trace.requests, run.trace.steps
    np.testing.assert_array_equal(requests["request"], np.arange(len(table)))
    refused = table.prompt_tokens >= limits.max_model_len
    np.testing.assert_array_equal(requests["status"], np.where(refused, REFUSED, COMPLETED))
    assert len(run.refusals) == refused.sum()
    outputs = np.minimum(table.output_tokens, limits.max_model_len - table.prompt_tokens)
    np.testing.assert_array_equal(requests["output_tokens"], np.where(refused, 0, outputs))
    done = ~refused
    for earlier, later in (
        ("arrival_ns", "admitted_ns"),
        ("admitted_ns", "first_token_ns"),
        ("first_token_ns", "finish_ns"),
    ):
        assert (requests[earlier] <= requests[later])[done].all()
    assert run.trace.gap_count.sum() == (outputs - 1)[done].sum()
    gaps_ns = (requests["finish_ns"] - requests["first_token_ns"])[done].sum()
    assert (run.trace.gap_ns * run.trace.gap_count).sum() == gaps_ns
    assert (steps["start_ns"][1:] >= steps["end_ns"][:-1]).all()
    assert (steps["end_ns"] > steps["start_ns"]).all()
    assert steps["kv_blocks"].max(initial=0) <= run.trace.kv_blocks
    assert steps["running"].max(initial=0) <= limits.max_num_seqs


@settings(max_examples=30, deadline=None)
@given(loads())
def test_law_4_same_load_same_trace(
    linear_cost: CostModel, load: tuple[RequestTable, SchedulerLimits]
) -> None:
    table, limits = load
    a, b = (simulate(table, limits, linear_cost).trace for _ in range(2))
    for name in a.requests:
        assert a.requests[name].tobytes() == b.requests[name].tobytes()
    for name in a.steps:
        assert a.steps[name].tobytes() == b.steps[name].tobytes()


def test_law_5_a_request_alone_takes_the_sum_of_its_steps(table: Any) -> None:
    """Prefill in three chunks, then one step a token."""
    limits = SchedulerLimits(4, 100, 16, 1000, 1000)
    trace = simulate(table([0.25], 250, 7), limits, ConstantCost(0.01)).trace
    assert trace.requests["first_token_ns"][0] == 250_000_000 + 3 * 10_000_000
    assert trace.requests["finish_ns"][0] == 250_000_000 + 9 * 10_000_000


@settings(max_examples=40, deadline=None)
@given(loads(), st.integers(2, 5))
def test_law_6_a_slower_device_delays_everybody(
    linear_cost: Any, load: tuple[RequestTable, SchedulerLimits], factor: int
) -> None:
    """One slot, first come first served: times scale at least with the device."""
    table, limits = load
    if table.concurrency or table.after is not None:
        return
    one = SchedulerLimits(
        1, limits.max_num_batched_tokens, limits.block_size, limits.num_gpu_blocks, 256
    )
    fast = simulate(table, one, ConstantCost(0.001)).trace.requests["finish_ns"]
    slow = simulate(table, one, ConstantCost(0.001 * factor)).trace.requests["finish_ns"]
    assert (slow >= fast).all()


def test_a_sequence_preempted_with_its_last_token_in_flight(table: Any, linear_cost: Any) -> None:
    """Its blocks are named up to there all the same: the next turn of its session finds them."""
    load = table(
        [0, 0, 0, 0, 0],
        [87, 40, 80, 66, 66 + 56 + 131],
        [95, 23, 1, 56, 3],
        segment_id=np.array([100, 101, 102, 103, 103]),
        after=np.array([-1, -1, -1, -1, 3]),
        think_ns=np.zeros(5, np.int64),
    )
    for blocks in range(17, 24):
        limits = SchedulerLimits(4, 256, 16, blocks, 256, async_scheduling=True)
        fast = simulate(load, limits, linear_cost)
        slow = simulate(load, limits, linear_cost, fast_forward=False, aggregate=False)
        assert_same_run(fast.trace, slow.trace)
