"""Results of a sweep on disk: one file a point, named by its content.

Killing a sweep anywhere loses only the points under way, and running it again repeats nothing.
Several processes may share a folder: a point is claimed before it is simulated, and a result is
written aside and renamed. A claim whose process is gone counts for nothing.
"""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.reports.files import write_text


class Store:
    """Results by key, in a folder (made if missing) or, without one, in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Any]] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"{folder}: {error.strerror}") from None

    def get(self, key: str) -> dict[str, Any] | None:
        """A finished result; None if there is none, or only a broken one."""
        if self.folder is None:
            return self._memory.get(key)
        try:
            result = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) and result.get("key") == key else None

    def put(self, result: dict[str, Any]) -> None:
        """Keep a result under its key."""
        if self.folder is None:
            self._memory[result["key"]] = result
        else:
            write_text(self._path(result["key"]), to_line(result))

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether this process may work on `key`: False while another living one does."""
        if self.folder is None:
            yield True
            return
        path = self.folder / f"{key}.claim"
        mine = f"{socket.gethostname()} {os.getpid()}"
        got = _create(path, mine) or (_abandoned(path) and _retake(path, mine))
        try:
            yield got
        finally:
            if got:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.json"


def to_line(result: dict[str, Any]) -> str:
    """A result as text, the same for the same result."""
    return json.dumps(result, separators=(",", ":"), allow_nan=False) + "\n"


def _create(path: Path, owner: str) -> bool:
    """Make the claim, whole or not at all: a link to a finished file."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    aside.write_text(owner, encoding="utf-8")
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        aside.unlink()
    return True


def _retake(path: Path, owner: str) -> bool:
    path.unlink(missing_ok=True)
    return _create(path, owner)


def _abandoned(path: Path) -> bool:
    """Whether the process that claimed is known to be gone."""
    try:
        host, pid = path.read_text(encoding="utf-8").split()
        if host != socket.gethostname():
            return False
        os.kill(int(pid), 0)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        # No such process, or no claim of ours.
        return True
    return False
