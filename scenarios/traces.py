"""Recorded loads, read by what they contain: CSV with a header, or one JSON object a line.

A layout is a row of `LAYOUTS`: which columns hold arrival, prompt, output and shared blocks.
Arrivals are counted from the first request. A row in error is refused with its line; what can
be mended without changing the load's meaning is mended with a warning.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from servecast.costmodels.errors import InputError
from servecast.scenarios.columns import Table, dates_ns, is_date, numbers, read_table, refuse
from servecast.scenarios.yamlfile import one_line
from servecast.sim.request import IntArray, Segments

Warn = Callable[[str], None]

MAX_TOKENS = 10_000_000
#: Longest span of arrivals that int64 nanoseconds hold with room to spare.
MAX_SPAN_NS = 2**62

_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}


@dataclass(frozen=True)
class TraceRows:
    """A recorded load in order of arrival.

    Attributes
    ----------
    arrival_ns : from the first request, ascending
    prompt_tokens, output_tokens : at least 1 each
    shared : per request the segments that other requests have too, with segment ids
        1 to `segments`; None where nothing is shared
    segments : how many shared segments there are
    source : file and layout, for reports
    """

    arrival_ns: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    shared: Sequence[Segments] | None
    segments: int
    source: str

    def __len__(self) -> int:
        return len(self.arrival_ns)


@dataclass(frozen=True)
class Layout:
    """Column names, first match wins; compared in lower case with `_` for blanks.

    Attributes
    ----------
    arrival : column name to unit (`ns`, `us`, `ms`, `s`; `date` for a calendar time)
    blocks : column of chained block ids, if there is one, to the tokens of one block
    """

    arrival: dict[str, str]
    prompt: tuple[str, ...]
    output: tuple[str, ...]
    blocks: dict[str, int]


_STEMS = ("arrival_time", "arrival", "timestamp", "time")
_PLAIN_ARRIVAL = {
    **{f"{stem}_{unit}": unit for stem in _STEMS for unit in _NS},
    **dict.fromkeys((*_STEMS, "arrived_at", "start_time", "sent_at", "ts", "t"), "s"),
}
_PLAIN_PROMPT = (
    *("prompt_tokens", "input_tokens", "context_tokens", "input_toks", "input_length"),
    *("prompt_length", "prompt_len", "input_len", "num_prefill_tokens", "request_tokens"),
    *("contexttokens", "prompt", "input", "isl"),
)
_PLAIN_OUTPUT = (
    *("output_tokens", "completion_tokens", "generated_tokens", "output_toks", "output_length"),
    *("output_len", "num_decode_tokens", "response_tokens", "decode_tokens"),
    *("generatedtokens", "output", "completion", "osl"),
)
_BLOCKS = {"hash_ids": 512, "block16_prefix_ids": 16}

#: Azure: github.com/Azure/AzurePublicDataset. Mooncake: FAST'25 release, block of 512 tokens.
#: BurstGPT: github.com/HPMLL/BurstGPT. ShareGPT lengths and requests: LLMServingSim's files.
LAYOUTS = {
    "azure": Layout({"timestamp": "date"}, ("contexttokens",), ("generatedtokens",), {}),
    "mooncake": Layout(
        {"timestamp": "ms"}, ("input_length",), ("output_length",), {"hash_ids": 512}
    ),
    "burstgpt": Layout({"timestamp": "s"}, ("request_tokens",), ("response_tokens",), {}),
    "sharegpt": Layout(
        {"arrival_time_ns": "ns"}, ("input_toks",), ("output_toks",), {"block16_prefix_ids": 16}
    ),
    "requests": Layout({"arrival_time": "s"}, ("input_toks",), ("output_toks",), {}),
    "plain": Layout(_PLAIN_ARRIVAL, _PLAIN_PROMPT, _PLAIN_OUTPUT, _BLOCKS),
}


def read_trace(path: Path, warn: Warn, layout: str = "auto", limit: int | None = None) -> TraceRows:
    """Read a recorded load.

    Parameters
    ----------
    path : CSV or JSONL file
    warn : takes one line about what was mended
    layout : a key of `LAYOUTS`, or `auto` for the first whose columns are all there
    limit : keep the first so many requests

    Raises
    ------
    InputError : names file, line and column
    """
    table = read_table(path)
    name = _find_layout(table) if layout == "auto" else layout
    shape = LAYOUTS[name]
    arrival = _column(table, shape.arrival, "arrival")
    prompt = _column(table, shape.prompt, "prompt")
    output = _column(table, shape.output, "output")
    arrival_ns = _times(table, arrival, shape.arrival[arrival])
    prompt_tokens = _tokens(table, prompt, warn)
    output_tokens = _tokens(table, output, warn)
    blocks = next((key for key in shape.blocks if key in table.columns), None)
    ids = _block_ids(table, blocks) if blocks else None

    order: npt.NDArray[np.intp] = np.arange(len(arrival_ns))
    backwards = int((np.diff(arrival_ns) < 0).sum())
    if backwards:
        warn(f"{path}: {arrival} goes backwards at {backwards} rows; sorted")
        order = np.argsort(arrival_ns, kind="stable")
    order = order[:limit]
    arrival_ns, prompt_tokens = arrival_ns[order], prompt_tokens[order]
    shared, segments = None, 0
    if ids is not None and blocks is not None:
        chosen = [ids[i] for i in order.tolist()]
        shared, segments = share_blocks(chosen, prompt_tokens, shape.blocks[blocks])
    return TraceRows(
        arrival_ns - arrival_ns[0],
        prompt_tokens,
        output_tokens[order],
        shared if segments else None,
        segments,
        f"{path.name} ({name}, {len(order)} requests)",
    )


def share_blocks(
    ids: Sequence[Sequence[int]], prompt_tokens: IntArray, block_tokens: int
) -> tuple[list[Segments], int]:
    """Segments from chained block ids: what at least two prompts have in common.

    Blocks that all the same prompts pass through become one segment, so that a request has
    few of them. Segment ids count from 1 in order of appearance.

    Parameters
    ----------
    ids : per request its blocks from the prompt's start; the last may be partly filled
    block_tokens : tokens of one block

    Returns
    -------
    segments per request, and how many different ones there are
    """
    # A node is a block and all before it, so equal ids in different places stay apart.
    node_of: dict[tuple[int, int], int] = {}
    visits = [0]
    paths: list[list[int]] = []
    for row in ids:
        node, path = 0, []
        for block in row:
            node = node_of.setdefault((node, block), len(visits))
            if node == len(visits):
                visits.append(0)
            visits[node] += 1
            path.append(node)
        paths.append(path)

    # Visits never rise along a path; where they stay equal nobody leaves it.
    segment_of: dict[int, int] = {}
    shared: list[Segments] = []
    for path, length in zip(paths, prompt_tokens.tolist(), strict=True):
        segments: list[tuple[int, int]] = []
        before = 0
        for i, node in enumerate(path):
            count = visits[node]
            if count == 1 or i * block_tokens >= length:
                break
            end = min((i + 1) * block_tokens, length)
            if count == before:
                segments[-1] = segments[-1][0], end
            else:
                segments.append((segment_of.setdefault(node, len(segment_of) + 1), end))
            before = count
        shared.append(tuple(segments))
    return shared, len(segment_of)


def _find_layout(table: Table) -> str:
    for name, layout in LAYOUTS.items():
        needed = (layout.arrival, layout.prompt, layout.output)
        if name == "azure" and not _has_dates(table):
            continue
        if all(any(key in table.columns for key in names) for names in needed):
            return name
    return "plain"


def _has_dates(table: Table) -> bool:
    return is_date(next(iter(table.columns.get("timestamp", ())), None))


def _column(table: Table, names: Iterable[str], what: str) -> str:
    names = tuple(names)
    for name in names:
        if name in table.columns:
            return name
    known = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    found = one_line(", ".join(table.columns))
    raise InputError(f"{table.path}: no column for the {what} ({known}); columns found: {found}")


def _times(table: Table, column: str, unit: str) -> IntArray:
    """Arrivals as nanoseconds from the earliest."""
    if unit == "date" or is_date(table.columns[column][0]):
        stamps: IntArray | npt.NDArray[np.float64] = dates_ns(table, column)
        unit = "ns"
    else:
        stamps = numbers(table, column)
    if unit != "ns":
        stamps = stamps.astype(np.float64)
    # Subtract before scaling: seconds of the epoch leave a double no digits for nanoseconds.
    first = stamps.min()
    _check_span(table, column, (float(stamps.max()) - float(first)) * _NS[unit])
    spans = (stamps - first) * _NS[unit]
    return np.asarray(spans if spans.dtype == np.int64 else np.rint(spans), dtype=np.int64)


def _check_span(table: Table, column: str, span_ns: float) -> None:
    if span_ns > MAX_SPAN_NS:
        raise InputError(f"{table.path}: {column} spans {span_ns:.3g} ns, more than 146 years")


def _tokens(table: Table, column: str, warn: Warn) -> IntArray:
    counts = numbers(table, column)
    refuse(table, column, counts < 0, "is negative")
    refuse(table, column, counts > MAX_TOKENS, f"is above {MAX_TOKENS} tokens")
    refuse(table, column, counts != np.rint(counts), "is not a whole number")
    empty = int((counts == 0).sum())
    if empty:
        warn(f"{table.path}: {column} is 0 in {empty} rows; counted as 1 token")
    return np.maximum(counts.astype(np.int64), 1)


def _block_ids(table: Table, column: str) -> list[list[int]]:
    ids: list[list[int]] = []
    for row, value in enumerate(table.columns[column]):
        parts = value.split() if isinstance(value, str) else value
        try:
            blocks = [int(part) for part in parts]
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"{table.path}:{table.lines[row]}: {column} is not a list of block ids"
            ) from None
        ids.append(blocks)
    return ids
