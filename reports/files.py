"""Files that are whole or not there: written aside, then renamed."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Yield a path beside `path` to write to; it takes the name `path` when the block ends well.

    Whatever ends the block early, Ctrl-C among it, leaves what was at `path` untouched and
    nothing beside it. Missing folders are made, links followed; what is no file (/dev/stdout) is
    written as it is. Raises OSError as writing does.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, for only within a file system is a rename one step; by process, so that
    # two runs into one folder do not write into each other.
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: Path | str, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path | str, data: Mapping[str, Any]) -> None:
    """Write `to_json(data)`, whole or not at all."""
    write_text(path, to_json(data))


def to_json(data: Mapping[str, Any]) -> str:
    """JSON in the order of `data`, one key a line; NaN and infinity are a ValueError."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
