"""Tables in text files, as columns: CSV with a header, or one JSON object a line.

What is wrong in a cell is refused with file, line, column and value.
"""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from servecast.costmodels.errors import InputError
from servecast.sim.request import IntArray


@dataclass(frozen=True)
class Table:
    """Columns as they stand in the file, and the line of each row; at least one row."""

    path: Path
    columns: dict[str, Sequence[Any]]
    lines: Sequence[int]


def read_table(path: Path) -> Table:
    """Read a file by its content; column names in lower case with `_` for blanks.

    Raises
    ------
    InputError : unreadable, empty, or a row that is not like the others
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read: {reason}") from None
    start = text.lstrip()[:1]
    if start == "[":
        raise InputError(f"{path}:1: a JSON array; give one object a line (JSONL)")
    table = _read_jsonl(path, text) if start == "{" else _read_csv(path, text)
    if not table.lines:
        raise InputError(f"{path}: the trace is empty")
    return table


def _read_csv(path: Path, text: str) -> Table:
    reader = csv.reader(io.StringIO(text, newline=""))
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not CSV: {error}") from None
    if not rows:
        raise InputError(f"{path}: the trace is empty")
    header = [_plain_name(name) for name in rows[0]]
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise InputError(
                f"{path}:{line}: {len(row)} fields, the header has {len(header)}"
                + (" (cut short?)" if line == lines[-1] else "")
            )
    return Table(path, dict(zip(header, zip(*rows[1:], strict=True), strict=False)), lines[1:])


def _read_jsonl(path: Path, text: str) -> Table:
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    raw = text.split("\n")
    for number, line in enumerate(raw, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            last = not any(rest.strip() for rest in raw[number:])
            hint = " (cut short?)" if last else ""
            raise InputError(f"{path}:{number}: not a JSON object{hint}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: not a JSON object")
        rows.append(row)
        lines.append(number)
    columns: dict[str, Sequence[Any]] = {}
    for key in rows[0]:
        try:
            columns[_plain_name(key)] = [row[key] for row in rows]
        except KeyError:
            # Optional in real exports; an error only where the column is needed.
            columns[_plain_name(key)] = [row.get(key) for row in rows]
    return Table(path, columns, lines)


def _plain_name(name: str) -> str:
    return re.sub(r"[\s\-]+", "_", name.strip()).lower()


def numbers(table: Table, column: str) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """A column as int64 where all are whole and fit, else as finite float64."""
    values = table.columns[column]
    bad_kind = [not isinstance(v, str | int | float) or isinstance(v, bool) for v in values]
    refuse(table, column, np.array(bad_kind), "is not a number")
    if not any(isinstance(v, float) for v in values):
        try:
            return np.array(list(map(int, values)), dtype=np.int64)
        except (ValueError, OverflowError):
            pass  # not whole, or too long: the float path says which row is at fault
    reals = np.array([_float_or_nan(v) for v in values])
    refuse(table, column, ~np.isfinite(reals), "is not a finite number")
    return reals


def _float_or_nan(value: str | int | float) -> float:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return float("nan")


def is_date(value: Any) -> bool:
    """Whether a cell looks like a calendar time rather than a number."""
    return isinstance(value, str) and bool(re.match(r"\s*\d{4}-\d\d-\d\d", value))


_DATE = re.compile(r"((?:19|20)\d\d-\d\d-\d\d.*?)\s*(?:[zZ]|([+-])(\d\d):?(\d\d))?")


def dates_ns(table: Table, column: str) -> IntArray:
    """ISO dates, with up to nine digits of a second and an optional zone, as ns since 1970."""
    stamps: list[str] = []
    shift_min: list[int] = []
    for value in table.columns[column]:
        parts = _DATE.fullmatch(str(value).strip()) if len(str(value)) < 60 else None
        stamp, sign, hours, minutes = parts.groups("") if parts else ("", "", "", "")
        stamps.append(stamp)
        shift_min.append(int(f"{sign}1") * (int(hours) * 60 + int(minutes)) if sign else 0)
    try:
        times = np.array(stamps, dtype="datetime64[ns]")
    except ValueError:
        times = np.array([_date_or_nat(stamp) for stamp in stamps], dtype="datetime64[ns]")
    refuse(table, column, np.isnat(times), "is not a date")
    return times.astype(np.int64) - np.array(shift_min, dtype=np.int64) * 60_000_000_000


def _date_or_nat(stamp: str) -> np.datetime64:
    try:
        return np.datetime64(stamp, "ns")
    except ValueError:
        return np.datetime64("NaT")


def refuse(table: Table, column: str, bad: npt.NDArray[np.bool_], what: str) -> None:
    """Stop at the first row marked bad, naming file, line, column and value."""
    if bad.any():
        row = int(bad.argmax())
        value = repr(table.columns[column][row])
        raise InputError(f"{table.path}:{table.lines[row]}: {column} {what}: {value[:60]}")
