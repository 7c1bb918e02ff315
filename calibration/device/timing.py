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

#: One sample is at least so long, or the clock's own grain would show; on a GPU what lies between
#: two replays would.
SAMPLE_S = 2e-4
GPU_SAMPLE_S = 1e-3

#: A measurement ends after so long, sure or not.
LIMIT_S = 0.25

FEWEST, MOST = 7, 200

#: Samples of what is slower than the limit allows for more.
FEWEST_SLOW = 2

#: A graph takes about so long, and has its calls so many times at most.
GRAPH_S = 1e-3
MOST_REPEATS = 256

#: Cycles of a GPU in which it waits for the first replay to be there: some 100 us.
HEAD_START_CYCLES = 200_000

#: Operands together are so many times the cache, in so many copies at most. A GPU's keeps a good
#: part of twice its size.
TIMES_CACHE, MOST_COPIES = 2.0, 64
GPU_TIMES_CACHE, GPU_MOST_COPIES = 4.0, 256

#: Where the cache is not known.
DEFAULT_CACHE_BYTES = 32 << 20


class BrokenCaptureError(RuntimeError):
    """A graph that could not be captured. PyTorch's allocator and generators may be the worse for
    it: best measured on in a new process."""


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
    times, most = TIMES_CACHE, MOST_COPIES
    if device.type == "cuda":
        times, most = GPU_TIMES_CACHE, GPU_MOST_COPIES
    needed = -(-times * cache_bytes(device) // max(operand_bytes, 1.0))
    return int(min(max(needed, 1), most))


def measure(
    calls: Sequence[Call],
    device: torch.device,
    limit_s: float = LIMIT_S,
    eager: bool = False,
) -> Timing:
    """Time of one call, the calls taken in turn.

    `eager` launches them one by one on a GPU too, as what cannot be captured needs it. Raises
    BrokenCaptureError where that is so and was not said.
    """
    timed = _on_clock
    sample_s = SAMPLE_S
    if device.type == "cuda":
        timed, sample_s = (_on_events if eager else _after_a_head_start), GPU_SAMPLE_S
    if device.type == "cuda" and not eager:
        run, calls = _graph(calls)
    else:
        run = _loop(calls)
    end = time.perf_counter() + limit_s
    timed(run, 1)
    once = timed(run, 1)
    # What takes longer than the limit is warm by now, and counted.
    samples = [once / len(calls)] if once > limit_s else []
    rounds = max(1, int(sample_s / max(once, 1e-9)))
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


def _graph(calls: Sequence[Call]) -> tuple[Call, Sequence[Call]]:
    """One replay of all calls, as a server replays a step: what launching costs is not in it.

    Calls that are over soon are in it several times, as the second value has them: what a replay
    itself takes is spread over them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _loop(calls)()
        once_s = _on_events(_loop(calls), 1)
    torch.cuda.current_stream().wait_stream(stream)
    repeats = min(MOST_REPEATS, max(1, round(GRAPH_S / max(once_s, 1e-9))))
    calls = list(calls) * repeats
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _loop(calls)()
    except Exception as error:
        raise BrokenCaptureError(f"not captured: {error}") from error
    return graph.replay, calls


def _on_events(run: Call, rounds: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _after_a_head_start(run: Call, rounds: int) -> float:
    """The clock starts when the first replay is on its way, not while the host still sends it."""
    torch.cuda._sleep(HEAD_START_CYCLES)
    return _on_events(run, rounds)


def _on_clock(run: Call, rounds: int) -> float:
    start = time.perf_counter()
    for _ in range(rounds):
        run()
    return time.perf_counter() - start
