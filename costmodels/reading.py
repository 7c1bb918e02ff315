"""Keys of a configuration, read with their kind checked: what is wrong is said in one line."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servecast.costmodels.errors import InputError

Config = Mapping[str, Any]

#: No configuration's file is larger.
MAX_BYTES = 5_000_000

#: No count in a model is larger.
MOST = 10**12


def read_bytes(path: Path, most: int, words: str = "cannot be read: ") -> bytes:
    """A file of at most `most` bytes; no more is read, whatever size it is said to have.

    Raises InputError for one that cannot be read, in `words` before the reason, or is larger.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(most + 1) if size <= most else b""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: {words}{reason}") from None
    size = max(size, len(content))
    if size > most:
        raise InputError(f"{path}: {size} bytes is too large, at most {most} are read")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError for a file that is not one."""
    content = read_bytes(path, MAX_BYTES, words="")
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def read_lenient(path: Path, most: int) -> str:
    """Text of such a file; what is not UTF-8 in it becomes a mark."""
    return read_bytes(path, most).decode("utf-8", errors="replace")


def whole(config: Config, *keys: str, default: int | None = None, low: int = 1) -> int:
    """The first of `keys` that is there and not null, a whole number of at least `low`."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MOST:
            raise InputError(
                f"{key}: expected a whole number of at least {low}, got {shown(value)}"
            )
        return value
    if default is None:
        raise InputError(f"{keys[0]}: missing")
    return default


def real(config: Config, key: str, default: float, *, low: float = 0.0) -> float:
    """A number above `low`, or the default where there is none."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= MOST:
        raise InputError(f"{key}: expected a number above {low:g}, got {shown(value)}")
    return float(value)


def block(config: Config, *keys: str) -> Config:
    """The first of `keys` that is there, a mapping; an empty one where none is."""
    for key in keys:
        value = config.get(key)
        if not value and not isinstance(value, int | float):
            continue
        if not isinstance(value, Mapping):
            raise InputError(f"{key}: expected a block of keys, got {shown(value)}")
        return value
    return {}


def items(config: Config, *keys: str) -> list[Any]:
    """The first of `keys` that is there, a list; an empty one where none is."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list):
            raise InputError(f"{key}: expected a list, got {shown(value)}")
        return value
    return []


def word(config: Config, key: str) -> str:
    """A text, empty where there is none."""
    value = config.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{key}: expected text, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value in an error, short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
