"""`servecast schedule`: workloads in, schedules out, in the format of the recorded ones."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from servecast.costmodels.errors import InputError
from servecast.sim.replay import replay


def schedule_file(path: Path, write: IO[str]) -> None:
    """Schedule what `path` holds and write JSON lines.

    One workload (`.json`) gives one line a step. Many (`.jsonl`, `.jsonl.gz`, a line each of
    `{"seed": ..., "workload": ...}`) give one line `{"seed": ..., "trace": [...]}` each.

    Raises InputError naming file, line and key.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        for number, line in _lines(path):
            where = f"{path}:{number}"
            entry = _parse(line, where)
            workload = entry.get("workload")
            if not isinstance(workload, dict):
                raise InputError(f"{where}: workload: missing")
            _dump({"seed": entry.get("seed"), "trace": _steps(workload, where)}, write)
        return
    text = "".join(line for _, line in _lines(path))
    for step in _steps(_parse(text, str(path)), str(path)):
        _dump(step, write)


def _steps(workload: dict[str, Any], where: str) -> list[dict[str, Any]]:
    try:
        return list(replay(workload))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opener: Any = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            yield from enumerate(file, 1)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _dump(value: dict[str, Any], write: IO[str]) -> None:
    write.write(json.dumps(value, separators=(",", ":")) + "\n")
