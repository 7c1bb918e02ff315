"""Adaptive control of the token budget."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from servecast.sim.control import BudgetControl, ControlSettings
from servecast.sim.plan import SchedulerLimits
from servecast.sim.world import simulate

MS = 1_000_000
SETTINGS = ControlSettings("itl", 20 * MS, 500 * MS, 0.25, 64)
LIMITS = SchedulerLimits(16, 4096, 16, 4000, 4096)


def bursty(table: Any) -> Any:
    """Long prompts among short ones, which stretch the gaps of those that decode."""
    rng = np.random.default_rng(0)
    n = 400
    prompts = np.where(rng.random(n) < 0.5, 3000, 50)
    return table(np.cumsum(rng.exponential(0.05, n)), prompts, rng.integers(20, 100, n))


def test_the_budget_falls_above_the_limit_rises_when_calm_and_rests_in_between() -> None:
    control = BudgetControl(SETTINGS, 1000)
    budgets = []
    for window, gap_ms in enumerate((30, 30, 18, 10, 10, 10), 1):
        control.see(gap_ms * MS, 10)
        budgets.append(control.pass_to(window * SETTINGS.window_ns))
    assert budgets == [750, 562, 562, 702, 878, 1000]


def test_an_empty_window_lets_the_budget_recover() -> None:
    control = BudgetControl(SETTINGS, 1000)
    control.see(50 * MS)
    assert control.pass_to(SETTINGS.window_ns - 1) == 1000
    assert control.pass_to(2 * SETTINGS.window_ns) == 938
    assert control.history[-1] == (2 * SETTINGS.window_ns, -1, 938)


def test_it_never_goes_below_the_least() -> None:
    control = BudgetControl(SETTINGS, 100)
    for window in range(1, 10):
        control.see(50 * MS)
        control.pass_to(window * SETTINGS.window_ns)
    assert control.budget == SETTINGS.least_tokens


def test_gaps_are_shorter_under_control_and_nothing_is_lost(table: Any, linear_cost: Any) -> None:
    load = bursty(table)
    fixed = simulate(load, LIMITS, linear_cost).trace
    adapted = simulate(load, LIMITS, linear_cost, control=SETTINGS).trace

    def long_gaps(trace: Any) -> float:
        late = trace.gap_ns > SETTINGS.limit_ns
        return float(trace.gap_count[late].sum() / trace.gap_count.sum())

    assert long_gaps(adapted) < 0.7 * long_gaps(fixed)
    assert adapted.gap_count.sum() == fixed.gap_count.sum()
    budgets = {entry[3] for entry in adapted.control}
    assert min(budgets) < LIMITS.max_num_batched_tokens
    tokens = adapted.steps["prefill_tokens"] + adapted.steps["decodes"]
    assert tokens.max() <= LIMITS.max_num_batched_tokens


@pytest.mark.parametrize("metric", ["itl", "ttft"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_fast_forward_equals_stepped_under_control(
    table: Any, linear_cost: Any, metric: str, asynchronous: bool
) -> None:
    load = bursty(table)
    settings = replace(SETTINGS, metric=metric)
    limits = replace(LIMITS, async_scheduling=asynchronous)
    fast = simulate(load, limits, linear_cost, control=settings).trace
    slow = simulate(load, limits, linear_cost, control=settings, fast_forward=False).trace
    np.testing.assert_array_equal(fast.requests["finish_ns"], slow.requests["finish_ns"])
    assert fast.control == slow.control


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="metric"):
        replace(SETTINGS, metric="e2e")
    with pytest.raises(ValueError, match="step"):
        replace(SETTINGS, step=1.5)
