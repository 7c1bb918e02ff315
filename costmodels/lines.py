"""Straight lines between measured points: seconds by a count of tokens, fast to look up.

A scalar and an array of the same counts give the same bits: the line is chosen by the count, and
then one multiplication and the same additions follow.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lines:
    """offset + slope x count; the first line that ends above the count holds.

    Attributes
    ----------
    ends : ascending; one less than lines, the last of which goes on for ever
    offsets, slopes : of the lines
    """

    ends: tuple[float, ...]
    offsets: tuple[float, ...]
    slopes: tuple[float, ...]

    def line(self, count: float) -> tuple[float, float]:
        """(offset, slope) at a count."""
        at = bisect_right(self.ends, count)
        return self.offsets[at], self.slopes[at]

    def at(self, count: float, more: float = 0.0) -> float:
        """Seconds, and `more` of them."""
        offset, slope = self.line(count)
        return (offset + more) + slope * count

    def at_all(self, counts: FloatArray | npt.NDArray[np.int64], more: float = 0.0) -> FloatArray:
        """Seconds of many counts, and `more` for each."""
        at = np.searchsorted(self.ends, counts, side="right")
        found: FloatArray = (np.take(self.offsets, at) + more) + np.take(self.slopes, at) * counts
        return found


def straight(offset: float, slope: float) -> Lines:
    """One line."""
    return Lines((), (offset,), (slope,))


def rising(values: FloatArray) -> FloatArray:
    """Half way between the most so far and the least to come, both of which never fall."""
    found: FloatArray = np.maximum.accumulate(values) + np.minimum.accumulate(values[::-1])[::-1]
    return found / 2


def through(
    counts: Sequence[float] | FloatArray,
    seconds: Sequence[float] | FloatArray,
    dips: bool = False,
) -> Lines:
    """Lines through points, the first and the last going on.

    `counts` ascend; there are two at least. With `dips`, more work may take less time, as where
    another kernel takes over. Raises ValueError for what are no such counts.
    """
    x, y = np.asarray(counts, float), np.asarray(seconds, float)
    if len(x) < 2 or (np.diff(x) <= 0).any():
        raise ValueError("lines need two points or more, with ascending counts")
    if not dips:
        y = rising(y)
    slopes = np.diff(y) / np.diff(x)
    offsets = y[:-1] - slopes * x[:-1]
    return Lines(tuple(x[1:-1].tolist()), tuple(offsets.tolist()), tuple(slopes.tolist()))
