"""How long a kernel takes: the median of repeated runs on operands that no cache holds.

Operands rotate: each call has its own, and together they are larger than the last-level cache, as
the layers of a model are. Runs are repeated until the median is sure to `STABLE`, or `LIMIT_S`
is over. Clocks and power are left alone.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]

#: Relative standard error of the median at which a measurement ends.
STABLE = 0.005

#: One sample is at least so long, or the clock's own grain would show.
SAMPLE_S = 2e-4

#: A measurement ends after so long, sure or not.
LIMIT_S = 0.25

FEWEST, MOST = 7, 200

#: Samples of what is slower than the limit allows for more.
FEWEST_SLOW = 2

#: Calls of a captured graph, at least.
LEAST_CALLS = 16

#: Operands together are so many times the cache.
TIMES_CACHE = 2.0

#: Where the cache is not known, and the most copies of small operands.
DEFAULT_CACHE_BYTES = 32 << 20
MOST_COPIES = 64


@dataclass(frozen=True)
class Timing:
    """Seconds of one call; noise is the relative standard error of the median."""

    seconds: float
    noise: float
    runs: int


def cache_bytes(device: torch.device) -> int:
    """Of the last level: L2 of a GPU, L3 of a CPU."""
    if device.type == "cuda":
        found = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        return int(found) or DEFAULT_CACHE_BYTES
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return DEFAULT_CACHE_BYTES


def copies(operand_bytes: float, device: torch.device) -> int:
    """So many sets of operands that they do not stay in the cache from call to call."""
    needed = -(-TIMES_CACHE * cache_bytes(device) // max(operand_bytes, 1.0))
    return int(min(max(needed, 1), MOST_COPIES))


def measure(
    calls: Sequence[Call],
    device: torch.device,
    limit_s: float = LIMIT_S,
    eager: bool = False,
) -> Timing:
    """Time of one call, the calls taken in turn.

    `eager` launches them one by one on a GPU too, as what cannot be captured needs it.
    """
    timed = _on_events if device.type == "cuda" else _on_clock
    if device.type == "cuda" and not eager:
        # What a replay itself takes is spread over several calls.
        calls = list(calls) * max(1, LEAST_CALLS // len(calls))
        run = _graph(calls)
    else:
        run = _loop(calls)
    end = time.perf_counter() + limit_s
    timed(run, 1)
    once = timed(run, 1)
    # What takes longer than the limit is warm by now, and counted.
    samples = [once / len(calls)] if once > limit_s else []
    rounds = max(1, int(SAMPLE_S / max(once, 1e-9)))
    while len(samples) < MOST:
        samples.append(timed(run, rounds) / rounds / len(calls))
        late = time.perf_counter() > end
        if late and len(samples) >= FEWEST_SLOW:
            break
        if len(samples) >= FEWEST and noise(samples) < STABLE:
            break
    return Timing(statistics.median(samples), noise(samples), len(samples))


def noise(samples: Sequence[float]) -> float:
    """Relative standard error of the median, by the quartiles, as for a normal distribution."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return 1.2533 * (high - low) / 1.349 / max(middle, 1e-12) / len(samples) ** 0.5


def _loop(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _graph(calls: Sequence[Call]) -> Call:
    """One replay of all calls, as a server replays a step: what launching costs is not in it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _loop(calls)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    ordinary = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            _loop(calls)()
    except BaseException:
        # A broken capture leaves its stream behind as the current one.
        torch.cuda.set_stream(ordinary)
        raise
    return graph.replay


def _on_events(run: Call, rounds: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _on_clock(run: Call, rounds: int) -> float:
    start = time.perf_counter()
    for _ in range(rounds):
        run()
    return time.perf_counter() - start
