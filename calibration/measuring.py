"""Measuring a device within a time budget: what was planned first, then where it is least known."""

import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

import servecast.costmodels
from servecast.calibration.device.sizes import operand_bytes
from servecast.calibration.shapes import Point
from servecast.costmodels.errors import InputError

WORKER = "servecast.calibration.device.worker"

#: Told how many seconds have gone, of how many.
Tell = Callable[[int, int], None]

#: A worker that says nothing for so long hangs; and so many of them are replaced.
ANSWER_S = 300.0
MOST_RESTARTS = 5

#: Points whose neighbours agree to so many powers of two are as good as measured: 1.4 %.
AGREED = 0.02

#: Doubt of a point on a line of which nothing is known, and powers of two that are far.
UNKNOWN = 1.0
FAR = 4.0

#: Share of the budget that the coarse points may take, and of it a single point; and that is over
#: before rows are looked at again.
COARSE_SHARE = 0.7
POINT_SHARE = 0.02
REFINED_SHARE = 0.9

#: Rows that are looked at again, and what they may differ by in the median before all are.
SAMPLED = 24
AGAIN_WITHIN = 0.02

#: So often the device's clocks are noted down in a budget.
CLOCKS_SEEN = 10

#: A point's cost: operands are drawn, at so many bytes a second, and it is run a few times.
SETUP_S, RUNS = 0.05, 12
DRAWN_BYTES_PER_S, GPU_DRAWN_BYTES_PER_S = 4e8, 1e11


@dataclass(frozen=True)
class Row:
    """A measured point; noise is relative."""

    point: Point
    seconds: float
    noise: float
    runs: int


@dataclass
class Measured:
    """What a device gave.

    Attributes
    ----------
    facts : of the device, as the worker tells them
    refused : family to why the device has no such kernel
    broken : families that cost a process, and are left alone from then on
    changed : median relative difference of rows measured again, minutes later; None where there was
        no time for that
    """

    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    clocks: list[dict[str, float]] = field(default_factory=list)
    all_reduce: dict[int, dict[float, float]] = field(default_factory=dict)
    seconds: float = 0.0
    changed: float | None = None


class Worker:
    """The process that measures."""

    def __init__(self, device: str, python: str = sys.executable, kernels: str = "auto") -> None:
        """Start it; raises InputError where it cannot: no torch, no such device."""
        self._folder = tempfile.TemporaryDirectory(prefix="servecast-")
        self._device, self._python, self._kernels = device, python, kernels
        self._restarts = 0
        self._environment = with_servecast(self._folder.name)
        self._start()

    def _start(self) -> None:
        command = [self._python, "-W", "ignore", "-m", WORKER, self._device, self._kernels]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=self._environment,
            )
        except OSError as error:
            self._errors.close()
            self._folder.cleanup()
            raise InputError(f"--python {self._python}: {error.strerror}") from None
        try:
            self.facts = self._read()
            if "error" in self.facts:
                raise InputError(f"--device {self._device}: {self.facts['error']}")
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One measurement, or why there is none. What leaves a device unusable, or gives no answer
        in `ANSWER_S`, costs the process, and a few times another goes on in its place.

        Raises InputError where the process has died, and after `MOST_RESTARTS`.
        """
        try:
            stdin: IO[str] = _there(self._process.stdin)
            stdin.write(json.dumps(dict(request)) + "\n")
            stdin.flush()
        except OSError:
            raise InputError(self._last_words()) from None
        reply = self._read()
        if reply.get("restart"):
            if self._restarts == MOST_RESTARTS:
                raise InputError(f"given up after {MOST_RESTARTS} restarts: {reply['error']}")
            self._restarts += 1
            self._stop()
            self._start()
        return reply

    def _read(self) -> dict[str, Any]:
        stdout = _there(self._process.stdout)
        # An answer is one line, so nothing of it waits in a buffer.
        if not select.select([stdout], [], [], ANSWER_S)[0]:
            return {"error": f"no answer in {ANSWER_S:.0f} s", "restart": True}
        line = stdout.readline()
        if not line:
            raise InputError(self._last_words())
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError(f"--python: answered {line.strip()[:60]!r}: is it a Python?")
        return found

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        words = last_words(self._errors.read())
        if "No module named 'torch'" in words:
            return (
                "measuring a device needs PyTorch: pip install 'servecast[calibrate]', "
                "or name a Python that has it with --python"
            )
        return f"the measuring process ended: {words}"

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._errors.close()

    def close(self) -> None:
        """End it."""
        self._stop()
        self._folder.cleanup()


def last_words(text: str) -> str:
    """Of what a process printed, the last line that looks like an error's, else the last of all."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["without a word"]
    errors = [line for line in lines if "Error" in line and not line.startswith("File ")]
    return (errors or lines)[-1][:300]


def with_servecast(folder: str) -> dict[str, str]:
    """An environment in which another Python finds this servecast, and nothing else of ours."""
    package = Path(servecast.costmodels.__file__).parent.parent
    parts = Path(folder) / "servecast"
    parts.mkdir(exist_ok=True)
    (parts / "calibration").symlink_to((package / "calibration").resolve(), True)
    return {**os.environ, "PYTHONPATH": folder, "TOKENIZERS_PARALLELISM": "false"}


def _there(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@contextmanager
def started(device: str, python: str, kernels: str) -> Iterator[Worker]:
    """A worker for the length of a block."""
    worker = Worker(device, python, kernels)
    try:
        yield worker
    finally:
        worker.close()


def measure(
    worker: Worker,
    coarse: Sequence[Point],
    fine: Sequence[Point],
    budget_s: float,
    tell: Tell | None = None,
) -> Measured:
    """Measure the coarse points, then fine ones where their neighbours disagree most.

    Ctrl-C ends it early and keeps what was measured: the caller sees fewer rows.
    """
    found = Measured(worker.facts)
    start = time.monotonic()

    def gone() -> float:
        seconds = time.monotonic() - start
        if tell is not None:
            tell(min(int(seconds), int(budget_s)), int(budget_s))
        if seconds > len(found.clocks) * budget_s / CLOCKS_SEEN:
            found.clocks.append(worker.ask({"op": "clocks"}).get("clocks", {}))
        return seconds

    def take(point: Point) -> None:
        reply = worker.ask(point.request)
        if reply.get("restart"):
            found.broken.add(point.family)
        if "error" in reply:
            found.refused.setdefault(point.family, str(reply["error"]))
            return
        found.rows.append(Row(point, reply["seconds"], reply["noise"], reply["runs"]))

    found.clocks.append(worker.ask({"op": "clocks"}).get("clocks", {}))
    on_gpu = "cuda" in worker.facts
    slow = _Slowness(GPU_DRAWN_BYTES_PER_S if on_gpu else DRAWN_BYTES_PER_S)
    try:
        for point in coarse:
            # What is dear waits until its family is known to allow it.
            if gone() > COARSE_SHARE * budget_s:
                break
            if point.family in found.broken:
                continue
            if slow.expected_s(point) < POINT_SHARE * budget_s:
                take(point)
                slow.learn(found.rows)
        taken = {id(row.point) for row in found.rows}
        left = {id(point): point for point in (*coarse, *fine) if id(point) not in taken}
        # A family of which nothing could be measured would be doubted most.
        there = {row.point.family for row in found.rows}
        given_up = (found.refused.keys() - there) | found.broken
        left = {
            key: point for key, point in left.items() if point.axis and point.family not in given_up
        }
        while left and gone() < REFINED_SHARE * budget_s:
            rest = [
                point
                for point in left.values()
                if slow.expected_s(point) < budget_s - gone() and point.family not in found.broken
            ]
            chosen = _least_known(found.rows, rest)
            if chosen is None:
                break
            del left[id(chosen)]
            take(chosen)
            slow.learn(found.rows)
        _look_again(worker, found, lambda: gone() < budget_s)
        found.clocks.append(worker.ask({"op": "clocks"}).get("clocks", {}))
    except KeyboardInterrupt:
        found.facts["interrupted"] = True
    except InputError as error:
        # The process is gone, out of memory most likely: what it gave before is kept.
        found.facts["interrupted"] = str(error)
    found.seconds = time.monotonic() - start
    return found


def _look_again(worker: Worker, found: Measured, has_time: Callable[[], bool]) -> None:
    """Measure a sample again, and all twice more where it has changed: a machine that others use
    too is slower for minutes, and the median of looks that are minutes apart is less so."""
    looks = [[row.seconds] for row in found.rows]
    if len(looks) < SAMPLED:
        return
    sample = range(0, len(looks), len(looks) // SAMPLED)
    rest = sorted(set(range(len(looks))) - set(sample))

    def look(rows: Iterable[int]) -> None:
        for at in rows:
            if not has_time():
                return
            if found.rows[at].point.family in found.broken:
                continue
            reply = worker.ask(found.rows[at].point.request)
            if "error" not in reply:
                looks[at].append(reply["seconds"])
                found.rows[at] = replace(found.rows[at], seconds=float(np.median(looks[at])))

    look(sample)
    changes = [abs(math.log(seen[1] / seen[0])) for seen in looks if len(seen) > 1]
    if changes:
        found.changed = float(np.median(changes))
        if found.changed > AGAIN_WITHIN:
            look((*rest, *sample, *rest))


class _Slowness:
    """How long points take here, from those of the family that were measured."""

    def __init__(self, drawn_bytes_per_s: float) -> None:
        self._over: dict[str, float] = {}
        self._drawn_bytes_per_s = drawn_bytes_per_s

    def learn(self, rows: Sequence[Row]) -> None:
        row = rows[-1] if rows else None
        if row is not None and row.point.form_s:
            over = row.seconds / row.point.form_s
            self._over[row.point.family] = over

    def expected_s(self, point: Point) -> float:
        drawn_s = operand_bytes(point.request) / self._drawn_bytes_per_s
        return SETUP_S + drawn_s + RUNS * point.form_s * self._over.get(point.family, 1.0)


def _least_known(rows: Sequence[Row], candidates: Sequence[Point]) -> Point | None:
    """The candidate between, or beyond, the two neighbours that disagree most."""
    lines: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.point.axis:
            at = np.log2(row.point.shape[row.point.axis])
            correction = np.log2(row.seconds / row.point.form_s)
            lines[row.point.line].append((float(at), float(correction)))
    best, score = None, AGREED
    for point in candidates:
        known = sorted(lines.get(point.line, ()))
        doubt = _doubt(known, float(np.log2(point.shape[point.axis])))
        if doubt > score:
            best, score = point, doubt
    return best


def _doubt(known: Sequence[tuple[float, float]], at: float) -> float:
    """How far the two known neighbours are apart, weighed by the gap; more where there is none."""
    below = [item for item in known if item[0] < at]
    above = [item for item in known if item[0] > at]
    if any(item[0] == at for item in known):
        return 0.0
    if not below and not above:
        return UNKNOWN
    if not below or not above:
        # Far beyond what is known more is learned than next to it.
        beyond = at - known[-1][0] if not above else known[0][0] - at
        if len(known) < 2:
            return UNKNOWN * min(1.0, beyond / FAR)
        pair = known[-2:] if not above else known[:2]
        slope = abs(pair[1][1] - pair[0][1]) / max(pair[1][0] - pair[0][0], 1e-9)
        return slope * min(beyond, FAR) / 2
    gap = min(at - below[-1][0], above[0][0] - at)
    return abs(above[0][1] - below[-1][1]) * min(1.0, gap)
