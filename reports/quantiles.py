"""Mean and percentiles of a weighted sample, equal to those of the sample written out."""

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]


class WeightedSample:
    """Values with multiplicities, sorted.

    A million requests have a hundred million gaps between tokens but only as many different
    ones as there were steps: the sample is never expanded.

    Parameters
    ----------
    values : (k,) numbers without NaN
    counts : (k,) how often each occurs, >= 0; once each if None

    Attributes
    ----------
    values : (k,) ascending
    cumulative : (k,) members at or below each value, counted in sorted order
    """

    def __init__(self, values: Numbers, counts: npt.NDArray[np.int64] | None = None) -> None:
        if counts is None:
            self.values = np.sort(values)
            counts = np.ones(len(values), np.int64)
        else:
            order = np.argsort(values, kind="stable")
            order = order[counts[order] > 0]
            self.values, counts = values[order], counts[order]
        self._counts = counts
        self.cumulative = np.cumsum(counts)

    @property
    def n(self) -> int:
        """Members of the sample."""
        return int(self.cumulative[-1]) if len(self.cumulative) else 0

    def mean(self) -> float:
        """Arithmetic mean. Raises ValueError for an empty sample."""
        if not self.n:
            raise ValueError("an empty sample has no mean")
        return float((self.values * self._counts.astype(np.float64)).sum() / self.n)

    def percentile(self, percent: float) -> float:
        """The same number, bit for bit, as `np.percentile(np.repeat(values, counts), percent)`.

        That is Hyndman and Fan's definition 7, linear between the two members around position
        `percent / 100 * (n - 1)`. Raises ValueError for an empty sample or outside [0, 100].
        """
        if not self.n or not 0 <= percent <= 100:
            raise ValueError(f"no percentile {percent} of {self.n} values")
        position = percent / 100 * (self.n - 1)
        below = int(position)
        fraction = position - below
        low, high = float(self._member(below)), float(self._member(min(below + 1, self.n - 1)))
        # numpy interpolates from the nearer end, so that the result is monotone in `percent`.
        if fraction < 0.5:
            return low + (high - low) * fraction
        return high - (high - low) * (1 - fraction)

    def _member(self, index: int) -> Any:
        return self.values[np.searchsorted(self.cumulative, index, side="right")]
