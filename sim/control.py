"""Adaptive control: a token budget that gives way when a latency passes its limit.

At the end of every window the P95 of what was seen in it is held against the limit: above it the
budget goes down by a step, below `CALM` of it the budget goes up again; in between it stays, so
that it does not swing.
"""

from dataclasses import dataclass, field

import numpy as np

#: Share of the limit below which the budget is raised again.
CALM = 0.8


@dataclass(frozen=True)
class ControlSettings:
    """Attributes
    ----------
    metric : "itl" (gaps between tokens) or "ttft"
    limit_ns : what its P95 over a window should stay under
    window_ns : length of a window
    step : share by which the budget is changed
    least_tokens : the budget never goes below this
    """

    metric: str
    limit_ns: int
    window_ns: int
    step: float
    least_tokens: int

    def __post_init__(self) -> None:
        if self.metric not in ("itl", "ttft"):
            raise ValueError(f"metric must be itl or ttft: {self.metric}")
        if self.window_ns < 1 or self.limit_ns < 1 or not 0 < self.step < 1:
            raise ValueError("window and limit must be positive, step between 0 and 1")


@dataclass
class BudgetControl:
    """The state of the control of one replica.

    `history` has (time, P95 of the window in ns or -1, budget from then on).
    """

    settings: ControlSettings
    most_tokens: int
    budget: int = 0
    window_ends_ns: int = 0
    history: list[tuple[int, int, int]] = field(default_factory=list)
    _values: list[int] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = self.most_tokens
        self.window_ends_ns = self.settings.window_ns

    def see(self, value_ns: int, count: int = 1) -> None:
        """Note a latency, or several equal ones, in the window that is open."""
        self._values.append(value_ns)
        self._counts.append(count)

    def pass_to(self, now_ns: int) -> int:
        """End the windows that are over by now; returns the budget from then on."""
        while self.window_ends_ns <= now_ns:
            self._close_window()
        return self.budget

    def _close_window(self) -> None:
        seen = _p95(self._values, self._counts)
        self._values.clear()
        self._counts.clear()
        s = self.settings
        if seen > s.limit_ns:
            self.budget = max(s.least_tokens, round(self.budget * (1 - s.step)))
        elif seen < CALM * s.limit_ns:
            self.budget = min(
                self.most_tokens, max(self.budget + 1, round(self.budget * (1 + s.step)))
            )
        self.history.append((self.window_ends_ns, seen, self.budget))
        self.window_ends_ns += s.window_ns


def _p95(values: list[int], counts: list[int]) -> int:
    """The smallest value that 95 % of the sample do not exceed; -1 of nothing."""
    if not values:
        return -1
    order = np.argsort(values)
    total = np.cumsum(np.asarray(counts)[order])
    at = int(np.searchsorted(total, 0.95 * total[-1]))
    return values[int(order[at])]
