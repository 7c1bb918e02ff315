"""Evaluate many points: here, on all cores, or on a Ray cluster, with results kept as they come."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Self

from servecast.costmodels.errors import InputError
from servecast.scenarios.points import Point, evaluate
from servecast.scenarios.store import Store

Result = dict[str, Any]

#: Told after each point how many are done.
Tell = Callable[[int], None]

#: Points handed to the workers ahead of their turn, for each worker.
AHEAD = 3

#: How often a point that another process works on is looked for, seconds.
POLL_S = 0.2


class Sweep:
    """Evaluates points with a number of workers, or a Ray address, and a store.

    `workers`: "1" for this process alone, "N" for N processes, "ray" for a local cluster, or
    "ray://host:port" for one that runs. Results are the same bytes whoever computes them.
    `evaluated` counts the points that this sweep simulated itself.
    """

    def __init__(self, store: Store, workers: str = "1") -> None:
        self.store = store
        self.evaluated = 0
        self._used: dict[str, int] = {}
        self._pool: _Pool = _pool(workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.close(cancel=error is not None)

    @property
    def used_points(self) -> int:
        """Distinct points that were asked for, whether simulated now or by an earlier sweep."""
        return len(self._used)

    @property
    def used_requests(self) -> int:
        """Requests in these points: what decides by it decides alike when a sweep goes on."""
        return sum(self._used.values())

    def run(self, points: Iterable[Point], tell: Tell = lambda done: None) -> Iterator[Result]:
        """Results in the order of the points, as soon as each can be given."""
        for done, result in enumerate(self._in_order(iter(points)), 1):
            tell(done)
            yield result

    def _in_order(self, points: Iterator[Point]) -> Iterator[Result]:
        """Keep a window of points under way; results leave it in order."""
        window: list[_Work] = []
        with ExitStack() as claims:
            exhausted = False
            while True:
                while not exhausted and len(window) < self._pool.workers * AHEAD:
                    point = next(points, None)
                    if point is None:
                        exhausted = True
                    else:
                        window.append(_Work(point, self, claims))
                if not window:
                    return
                window[0].finish()
                work = window.pop(0)
                assert work.result is not None
                self._used[work.point.key] = work.result.get("requests", 0)
                yield work.result


class _Work:
    """A point on its way: known already, under way here, or somewhere else."""

    def __init__(self, point: Point, sweep: Sweep, claims: ExitStack) -> None:
        self.point = point
        self.result = sweep.store.get(point.key)
        self._sweep = sweep
        self._claims = claims
        self._claim: ExitStack | None = None
        self._future: Future[Result] | None = None
        if self.result is None:
            self._start()

    def _start(self) -> None:
        self._claim = self._claims.enter_context(ExitStack())
        if self._claim.enter_context(self._sweep.store.claim(self.point.key)):
            # Its last owner may have finished between our look and our claim.
            self.result = self._sweep.store.get(self.point.key)
            if self.result is None:
                self._future = self._sweep._pool.submit(self.point)

    def finish(self) -> None:
        """Wait until the result is there, and keep it."""
        while self.result is None:
            if self._future is not None:
                self.result = self._future.result()
                self._sweep.store.put(self.result)
                self._sweep.evaluated += 1
            else:
                # Somebody else has claimed it: wait for the result, or for the claim to fall.
                time.sleep(POLL_S)
                self.result = self._sweep.store.get(self.point.key)
                if self.result is None:
                    self._start()
        if self._claim is not None:
            self._claim.close()


class _Pool:
    """This process alone: a point is evaluated when it is submitted."""

    workers = 1

    def submit(self, point: Point) -> "Future[Result]":
        future: Future[Result] = Future()
        future.set_result(evaluate(point))
        return future

    def close(self, *, cancel: bool) -> None:
        """Nothing is left running."""


class _Processes(_Pool):
    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._executor = ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_leave_interrupts
        )

    def submit(self, point: Point) -> "Future[Result]":
        return self._executor.submit(evaluate, point)

    def close(self, *, cancel: bool) -> None:
        self._executor.shutdown(wait=True, cancel_futures=cancel)


def _leave_interrupts() -> None:
    """Ctrl-C goes to the whole group of processes; only the first has an answer to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Ray(_Pool):
    def __init__(self, address: str) -> None:
        try:
            ray: Any = import_module("ray")
        except ImportError:
            raise InputError(
                f"--workers {address}: needs Ray: pip install 'servecast[ray]'"
            ) from None
        self._ray = ray
        try:
            if address == "ray":
                ray.init(include_dashboard=False, log_to_driver=False)
            else:
                ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"--workers {address}: {' '.join(str(error).split())}") from None
        self.workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
        # A worker that dies takes nothing with it: its point is a pure function, tried again.
        self._remote = ray.remote(max_retries=5, retry_exceptions=False)(evaluate)

    def submit(self, point: Point) -> "Future[Result]":
        future: Future[Result] = self._remote.remote(point).future()
        return future

    def close(self, *, cancel: bool) -> None:
        self._ray.shutdown()


def _pool(workers: str) -> _Pool:
    if workers.startswith("ray"):
        return _Ray(workers)
    if not workers.isdigit() or int(workers) < 1:
        raise InputError(f"--workers {workers}: expected a number of processes, or ray://host:port")
    return _Pool() if workers == "1" else _Processes(int(workers))
