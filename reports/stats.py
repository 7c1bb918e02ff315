"""Intervals: what a handful of seeds lets one say."""

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95


def mean_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float | None, float | None]:
    """Student's interval of the mean; (None, None) for fewer than two values."""
    n = len(values)
    if n < 2:
        return None, None
    from scipy.special import stdtrit

    sample = np.asarray(values, np.float64)
    half = float(stdtrit(n - 1, (1 + confidence) / 2) * sample.std(ddof=1) / np.sqrt(n))
    mean = float(sample.mean())
    return mean - half, mean + half


def paired_interval(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Student's interval of the mean of `first - second`, seed by seed; infinite for one pair."""
    low, high = mean_interval([a - b for a, b in zip(first, second, strict=True)], confidence)
    return (-np.inf, np.inf) if low is None or high is None else (low, high)


def clopper_pearson(met: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of a share, exact for the binomial (Clopper and Pearson, Biometrika 26, 1934)."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = float(betaincinv(met, n - met + 1, tail)) if met else 0.0
    high = float(betaincinv(met + 1, n - met, 1 - tail)) if met < n else 1.0
    return low, high
