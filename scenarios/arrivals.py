"""When requests arrive: a process of rate one, stretched to the rate asked for.

Gaps of mean one are drawn by request index; a clock then maps the sum of gaps to seconds,
by dividing by the rate or by inverting the integral of a changing one. So a change of rate
moves every arrival but neither their order nor their relative gaps.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from servecast.costmodels.errors import InputError
from servecast.scenarios.fields import MAX_REQUESTS
from servecast.scenarios.schema import (
    Burst,
    ClosedLoop,
    Constant,
    Diurnal,
    Gamma,
    OnOff,
    Poisson,
    Stage,
)
from servecast.sim.request import IntArray
from servecast.sim.rng import stream

FloatArray = npt.NDArray[np.float64]
Gaps = Callable[[int], FloatArray]
Generated = Poisson | Gamma | Constant | OnOff | Diurnal | ClosedLoop | Burst

#: Points of one period at which the integral of a diurnal rate is tabulated.
_PERIOD_POINTS = 4097
_LAST_NS = 2.0**62


def arrival_times(arrivals: Generated, seed: int) -> IntArray:
    """Arrival of each request (or session) in nanoseconds, ascending.

    Clients of a closed loop have no arrival times of their own: all zeros.

    Raises
    ------
    InputError : nobody arrives, or more than `MAX_REQUESTS`, or beyond the clock's range
    """
    if isinstance(arrivals, ClosedLoop):
        return np.zeros(arrivals.requests, dtype=np.int64)
    if isinstance(arrivals, Burst):
        size, interval_s = arrivals.size or arrivals.requests, arrivals.interval_s or 0.0
        burst = np.arange(arrivals.requests) // size
        return _to_ns(burst.astype(np.float64) * interval_s)
    if isinstance(arrivals, OnOff | Diurnal):
        times_s, masses = _periodic_clock(arrivals)
        mass = _mass_until(arrivals.duration_s, times_s, masses)
        points = _points(_gaps(arrivals, seed), arrivals.requests, mass)
        cycles, rest = np.divmod(points, masses[-1])
        return _to_ns(cycles * times_s[-1] + np.interp(rest, masses, times_s))
    if arrivals.stages is not None:
        times_s, masses = _stage_clock(arrivals.stages)
        points = _points(_gaps(arrivals, seed), None, float(masses[-1]))
        return _to_ns(np.interp(points, masses, times_s))
    rate = arrivals.rate_per_s or 1.0
    mass = rate * (arrivals.duration_s or 0.0)
    return _to_ns(_points(_gaps(arrivals, seed), arrivals.requests, mass) / rate)


def _gaps(arrivals: Poisson | Gamma | Constant | OnOff | Diurnal, seed: int) -> Gaps | None:
    """Draws the next gaps, of mean one; None where gaps are all equal."""
    if isinstance(arrivals, Constant):
        return None
    rng = stream(seed, "arrivals")
    if isinstance(arrivals, Gamma):
        shape = arrivals.cv**-2.0  # a gamma variable's cv is shape ** -0.5
        return lambda count: rng.standard_gamma(shape, count) / shape
    return lambda count: rng.standard_exponential(count)


def _points(gaps: Gaps | None, count: int | None, mass: float) -> FloatArray:
    """A process of rate one: its first `count` points, or without a count those below `mass`."""
    if count is None and mass > MAX_REQUESTS:
        raise InputError(
            f"workload.arrivals: about {mass:.4g} requests, at most {MAX_REQUESTS} are simulated"
        )
    if gaps is None:
        # The margin keeps 0.1 per second over 30 s at 3 requests, whatever 0.1 * 30 rounds to.
        return np.arange(count if count is not None else max(0, np.ceil(mass - 1e-9)), dtype=float)
    if count is not None:
        return np.cumsum(gaps(count))
    drawn = gaps(_likely(mass))
    while (points := np.cumsum(drawn))[-1] < mass:
        drawn = np.concatenate([drawn, gaps(_likely(mass - float(points[-1])))])
    return points[: np.searchsorted(points, mass)]


def _likely(mass: float) -> int:
    """Enough draws to pass `mass`, most times."""
    return int(mass + 6 * mass**0.5) + 16


def _stage_clock(stages: tuple[Stage, ...]) -> tuple[FloatArray, FloatArray]:
    """Ends of the stages in seconds, and the arrivals expected by then; both from 0."""
    durations = np.array([stage.duration_s for stage in stages])
    rates = np.array([stage.rate_per_s for stage in stages])
    return _from_zero(durations), _from_zero(durations * rates)


def _periodic_clock(arrivals: OnOff | Diurnal) -> tuple[FloatArray, FloatArray]:
    """Times within one period in seconds, and the arrivals expected by then; both from 0."""
    if isinstance(arrivals, OnOff):
        durations = np.array([arrivals.on_s, arrivals.off_s])
        rates = np.array([arrivals.rate_per_s, arrivals.off_rate_per_s])
        return _from_zero(durations), _from_zero(durations * rates)
    period_s = arrivals.period_s
    peak_s = arrivals.peak_s if arrivals.peak_s is not None else period_s / 2
    times_s = np.linspace(0.0, period_s, _PERIOD_POINTS)
    angle = 2 * np.pi / period_s
    # The integral of rate * (1 + amplitude * cos(angle * (t - peak))) from 0 to t.
    swing = (np.sin(angle * (times_s - peak_s)) + np.sin(angle * peak_s)) / angle
    return times_s, arrivals.rate_per_s * (times_s + arrivals.amplitude * swing)


def _from_zero(steps: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(steps)])


def _mass_until(duration_s: float | None, times_s: FloatArray, masses: FloatArray) -> float:
    """Arrivals expected until then, for a rate that repeats."""
    cycles, rest = divmod(duration_s or 0.0, float(times_s[-1]))
    return cycles * float(masses[-1]) + float(np.interp(rest, times_s, masses))


def _to_ns(times_s: FloatArray) -> IntArray:
    if not len(times_s):
        raise InputError("workload.arrivals: no request arrives in the time given")
    if times_s[-1] * 1e9 > _LAST_NS:
        raise InputError(
            f"workload.arrivals: the last request arrives after {times_s[-1]:.3g} s, "
            "more than the clock holds (146 years)"
        )
    return np.rint(times_s * 1e9).astype(np.int64)
