"""`servecast parity`: our schedules against vLLM's, recorded or live, feature by feature."""

import gzip
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from servecast.costmodels.errors import InputError
from servecast.scenarios.random_workloads import Workload, random_workload
from servecast.sim.replay import DEFAULTS, replay

Steps = list[dict[str, Any]]

#: Smaller workloads tried while a mismatch is shrunk.
SHRINK_TRIES = 400

DRIVER = Path(__file__).with_name("vllm_driver.py")


@dataclass(frozen=True)
class Mismatch:
    """Where two schedules part: the place in both, and the two records (None: already over)."""

    seed: Any
    workload: Workload
    position: int
    ours: dict[str, Any] | None
    theirs: dict[str, Any] | None

    @property
    def fields(self) -> list[str]:
        """Names of the fields that differ."""
        ours, theirs = _ordered(self.ours or {}), _ordered(self.theirs or {})
        return [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]


@dataclass
class Tally:
    """Counts of one feature."""

    workloads: int = 0
    steps: int = 0
    mismatches: int = 0


@dataclass
class Matrix:
    """The outcome: counts by feature, and the first mismatch."""

    version: str
    rows: dict[str, Tally] = field(default_factory=dict)
    first: Mismatch | None = None

    def count(self, workload: Workload, theirs: Steps, mismatch: Mismatch | None) -> None:
        for feature in ("all", *features(workload, theirs)):
            tally = self.rows.setdefault(feature, Tally())
            tally.workloads += 1
            tally.steps += len(theirs)
            tally.mismatches += mismatch is not None
        if self.first is None:
            self.first = mismatch


def features(workload: Workload, theirs: Steps) -> list[str]:
    """What a workload exercises, by its settings and by what came of them."""
    config = {**DEFAULTS, **workload["config"]}
    spec = config["spec"]
    asynchronous = bool(config["async_scheduling"])
    outcome = {
        "preemption": any(step.get("preempted") for step in theirs),
        "resumption": any(step.get("resumed") for step in theirs),
        "prefix hits": any(any(step.get("new", {}).values()) for step in theirs),
    }
    settings = {
        "chunked prefill": config["enable_chunked_prefill"],
        "no chunked prefill": not config["enable_chunked_prefill"],
        "long_prefill_token_threshold": config["long_prefill_token_threshold"] > 0,
        "prefix caching": config["enable_prefix_caching"],
        "no prefix caching": not config["enable_prefix_caching"],
        "watermark": config["watermark"] > 0,
        "reserve_full_isl off": not config["reserve_full_isl"],
        "priority policy": config["policy"] == "priority",
        "async scheduling": asynchronous and not spec,
        **{f"{method} speculation": False for method in ("ngram", "draft_model", "eagle")},
        "max_model_len stops": _stops_by_length(workload, config["max_model_len"]),
    }
    if spec:
        settings[f"{spec['method']} speculation"] = not asynchronous
        settings["async with speculation"] = asynchronous
    return [name for name, present in {**settings, **outcome}.items() if present]


def first_difference(seed: Any, workload: Workload, ours: Steps, theirs: Steps) -> Mismatch | None:
    """The first step at which two schedules differ in any field or order."""
    for position in range(max(len(ours), len(theirs))):
        a = ours[position] if position < len(ours) else None
        b = theirs[position] if position < len(theirs) else None
        if a is None or b is None or _ordered(a) != _ordered(b):
            return Mismatch(seed, workload, position, a, b)
    return None


def compare(
    cases: Iterable[tuple[Any, Workload, Steps]],
    matrix: Matrix,
    tell: Callable[[int], None] = lambda done: None,
) -> Matrix:
    """Hold our schedule of each case, planned both ways, against theirs."""
    for done, (seed, workload, theirs) in enumerate(cases, 1):
        mismatch = None
        for aggregate in (True, False):
            ours = list(replay(workload, aggregate=aggregate))
            mismatch = mismatch or first_difference(seed, workload, ours, theirs)
        matrix.count(workload, theirs, mismatch)
        tell(done)
    return matrix


def recorded(paths: Iterable[Path]) -> Iterator[tuple[Any, Workload, Steps]]:
    """Cases from recorded files, or from folders of them.

    Raises InputError for a path without any, and for a line that is not a recorded workload.
    """
    for path in paths:
        files = sorted(path.glob("*.jsonl.gz")) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path}: no recorded schedules (*.jsonl.gz)")
        for file in files:
            yield from _read(file)


def _read(path: Path) -> Iterator[tuple[Any, Workload, Steps]]:
    opener: Any = gzip.open if path.name.endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                entry = json.loads(line)
                if not isinstance(entry["trace"], list) or not isinstance(entry["workload"], dict):
                    raise TypeError("workload and trace are not an object and a list")
                yield entry["seed"], entry["workload"], entry["trace"]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise InputError(f"{path}:{number}: not a recorded workload: {error!r}") from None


class LiveVllm:
    """vLLM's scheduler in another Python, asked over pipes."""

    def __init__(self, python: str) -> None:
        try:
            self._process = subprocess.Popen(
                [python, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise InputError(f"--vllm {python}: {error.strerror}") from None
        self.version = str(self._answer().get("version"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream(self._process.stdin).close()
        self._process.wait()
        self._stream(self._process.stdout).close()

    def schedule(self, workload: Workload) -> Steps:
        """Their schedule; raises RuntimeError with their own words if they refuse it."""
        stdin = self._stream(self._process.stdin)
        stdin.write(json.dumps(workload, separators=(",", ":")) + "\n")
        stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(f"vLLM: {answer['error']}")
        trace: Steps = answer["trace"]
        return trace

    def cases(self, seeds: Iterable[int], large: bool) -> Iterator[tuple[int, Workload, Steps]]:
        """Random workloads with their schedules."""
        for seed in seeds:
            workload = random_workload(seed, large=large)
            yield seed, workload, self.schedule(workload)

    def shrink(self, mismatch: Mismatch) -> Mismatch:
        """The same mismatch in as small a workload as simple cuts can make it."""
        return shrink(mismatch, self.schedule)

    def _answer(self) -> dict[str, Any]:
        line = self._stream(self._process.stdout).readline()
        if not line:
            code = self._process.wait()
            raise InputError(f"--vllm: its Python ended with code {code}; is vLLM installed there?")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise InputError(f"--vllm: its Python answered {line.strip()[:60]!r}: is vLLM there?")
        return answer

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


def shrink(mismatch: Mismatch, schedule: Callable[[Workload], Steps]) -> Mismatch:
    """Cut requests and lengths while the two sides still differ."""
    tries = SHRINK_TRIES
    changed = True
    while changed and tries > 0:
        changed = False
        for candidate in _smaller(mismatch.workload):
            tries -= 1
            found = _differs(mismatch.seed, candidate, schedule)
            if found is not None:
                mismatch, changed = found, True
                break
            if tries == 0:
                break
    return mismatch


def _differs(
    seed: Any, workload: Workload, schedule: Callable[[Workload], Steps]
) -> Mismatch | None:
    try:
        theirs = schedule(workload)
    except RuntimeError:
        return None
    for aggregate in (True, False):
        found = first_difference(
            seed, workload, list(replay(workload, aggregate=aggregate)), theirs
        )
        if found is not None:
            return found
    return None


def _smaller(workload: Workload) -> Iterator[Workload]:
    """Workloads a little smaller than this one, the boldest cuts first."""
    requests = workload["requests"]
    size = len(requests) // 2
    while size:
        for start in range(0, len(requests), size):
            kept = requests[:start] + requests[start + size :]
            if kept:
                yield {**workload, "requests": kept}
        size //= 2
    for i, request in enumerate(requests):
        for key in ("output_len", "prompt_len", "arrival"):
            value = request.get(key, 0)
            for less in {value // 2, value - 1}:
                if less >= (key != "arrival") and less < value:
                    cut = {**request, key: less}
                    yield {**workload, "requests": [*requests[:i], cut, *requests[i + 1 :]]}
        if len(request.get("prompt", ())) > 1:
            cut = {**request, "prompt": request["prompt"][: len(request["prompt"]) // 2]}
            yield {**workload, "requests": [*requests[:i], cut, *requests[i + 1 :]]}


def _stops_by_length(workload: Workload, max_model_len: int) -> bool:
    return any(
        len(r.get("prompt", ())) + r.get("prompt_len", 0) + r["output_len"] > max_model_len
        for r in workload["requests"]
    )


def _ordered(record: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v.items()) if isinstance(v, dict) else v for k, v in record.items()}


def render(matrix: Matrix) -> Any:
    """The matrix as a table, and the first mismatch in full."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"servecast against vLLM {matrix.version}", title_justify="left")
    table.add_column("feature")
    for column in ("workloads", "steps", "mismatches"):
        table.add_column(column, justify="right")
    for feature, tally in matrix.rows.items():
        table.add_row(feature, f"{tally.workloads:,}", f"{tally.steps:,}", f"{tally.mismatches:,}")
    if matrix.first is None:
        return table
    return Group(table, Text("\n".join(_explain(matrix.first))))


def _explain(mismatch: Mismatch) -> Iterator[str]:
    ours, theirs = mismatch.ours or {}, mismatch.theirs or {}
    yield f"first mismatch: seed {mismatch.seed}, record {mismatch.position}"
    for key in mismatch.fields:
        yield f"  {key}"
        yield f"    vLLM      {json.dumps(theirs.get(key))}"
        yield f"    servecast {json.dumps(ours.get(key))}"
    yield f"  state vLLM      {json.dumps(theirs)}"
    yield f"  state servecast {json.dumps(ours)}"
    yield f"  workload {json.dumps(mismatch.workload)}"
