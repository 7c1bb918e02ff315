"""The facts of a run as Parquet: one row a request, and one row an interval of equal steps."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from servecast.costmodels.shape import NS_PER_S, PARTS
from servecast.reports.files import atomic_write
from servecast.sim.trace import COMPLETED, REFUSED, REQUEST_COLUMNS, STEP_COLUMNS, TIMED_OUT, Trace

if TYPE_CHECKING:
    import pyarrow as pa

Columns = Mapping[str, npt.NDArray[Any]]

STATUS = {COMPLETED: "completed", REFUSED: "refused", TIMED_OUT: "timed_out"}

#: By code, from 0.
STATUS_NAMES = tuple(STATUS[code] for code in range(len(STATUS)))

#: Columns of names; only these repeat enough for a Parquet dictionary.
NAMED = ["class", "status"]

#: Rows converted and written at a time: memory stays flat however long the run.
ROW_GROUP = 1 << 17


def write_requests(trace: Trace, path: Path | str) -> None:
    """Write one row a request.

    Columns are `REQUEST_COLUMNS` with times in seconds (`arrival_s`, null where the time never
    came), `class` and `status` by name.
    """
    _write(trace.requests, path, lambda rows: _request_table(rows, trace.class_names))


def write_steps(trace: Trace, path: Path | str) -> None:
    """Write one row an interval: `STEP_COLUMNS` with times in seconds, and seconds by part."""
    _write(trace.steps, path, _step_table)


def _write(columns: Columns, path: Path | str, table: Callable[[Columns], "pa.Table"]) -> None:
    import pyarrow.parquet as pq

    rows = len(next(iter(columns.values())))
    empty = table({name: column[:0] for name, column in columns.items()})
    with (
        atomic_write(path) as aside,
        pq.ParquetWriter(
            aside, empty.schema, compression="zstd", compression_level=1, use_dictionary=NAMED
        ) as writer,
    ):
        for start in range(0, rows, ROW_GROUP):
            part = {name: column[start : start + ROW_GROUP] for name, column in columns.items()}
            writer.write_table(table(part))


def _request_table(rows: Columns, class_names: tuple[str, ...]) -> "pa.Table":
    import pyarrow as pa

    arrays: dict[str, Any] = {}
    for name in REQUEST_COLUMNS:
        if name == "klass":
            arrays["class"] = _by_name(rows[name], class_names)
        elif name == "status":
            arrays[name] = _by_name(rows[name], STATUS_NAMES)
        else:
            arrays |= _plain(name, rows[name])
    return pa.table(arrays)


def _step_table(rows: Columns) -> "pa.Table":
    import pyarrow as pa

    arrays: dict[str, Any] = {}
    for name in (*STEP_COLUMNS, *(f"{part}_s" for part in PARTS)):
        arrays |= _plain(name, rows[name])
    return pa.table(arrays)


def _plain(name: str, values: npt.NDArray[Any]) -> dict[str, "pa.Array"]:
    """The column itself; nanoseconds become seconds, -1 becomes null."""
    import pyarrow as pa

    if name.endswith("_ns"):
        seconds = pa.array(values / NS_PER_S, mask=values < 0)
        return {name.removesuffix("_ns") + "_s": seconds}
    return {name: pa.array(values)}


def _by_name(codes: npt.NDArray[Any], names: tuple[str, ...]) -> "pa.Array":
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(codes.astype(np.int32), list(names))
