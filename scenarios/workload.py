"""From the workload of a scenario to the table of its requests.

Rows stand in order of arrival; the turns of a session are neighbours. Each kind of luck has
its own stream (arrivals, lengths, prefixes, classes, sessions), read by position.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from servecast.costmodels.errors import InputError
from servecast.costmodels.shape import NS_PER_S
from servecast.scenarios.arrivals import Generated, arrival_times
from servecast.scenarios.fields import MAX_REQUESTS, MAX_TOKENS
from servecast.scenarios.lengths import draw_lengths
from servecast.scenarios.schema import (
    ClosedLoop,
    Prefixes,
    Scenario,
    Sessions,
    TraceArrivals,
    Workload,
)
from servecast.scenarios.traces import read_trace
from servecast.sim.request import IntArray, RequestTable, Segments, WaitLimit, scaled_tokens
from servecast.sim.rng import stream

FloatArray = npt.NDArray[np.float64]
Warn = Callable[[str], None]


def build_requests(scenario: Scenario, base_dir: Path, seed: int, warn: Warn) -> RequestTable:
    """The load of a scenario, the same for the same seed.

    Parameters
    ----------
    base_dir : folder where relative paths start: the scenario file's
    seed : in place of the scenario's own, so that replications differ
    warn : takes one line about input that was mended

    Raises
    ------
    InputError : a trace that cannot be read, or a load that is empty or too large
    """
    workload = scenario.workload
    if isinstance(workload.arrivals, TraceArrivals):
        return _replayed(workload, workload.arrivals, base_dir, seed, warn)
    return _generated(workload, workload.arrivals, base_dir, seed, warn)


def _replayed(
    workload: Workload, arrivals: TraceArrivals, base_dir: Path, seed: int, warn: Warn
) -> RequestTable:
    rows = read_trace(base_dir / arrivals.path, warn, arrivals.format, arrivals.limit)
    n = len(rows)
    klass = _draw_classes(workload, n, seed)
    ranks = _ranks(seed, "input", n), _ranks(seed, "output", n)
    own = rows.prompt_tokens, rows.output_tokens
    prompt, output = _lengths_by_class(workload, klass, ranks, own, base_dir, warn)
    # Replaced lengths are other prompts, so nothing is known of what they share.
    kept = prompt is rows.prompt_tokens
    table = RequestTable(
        arrival_ns=np.rint(rows.arrival_ns / arrivals.rate_scale).astype(np.int64),
        prompt_tokens=prompt,
        output_tokens=output,
        priority=_priorities(workload)[klass],
        klass=klass,
        segment_id=np.arange(n, dtype=np.int64) + rows.segments + 1,
        shared=rows.shared if kept else None,
        class_names=_class_names(workload),
        wait_limits=_wait_limits(workload),
    )
    if workload.input_scale == workload.output_scale == 1:
        return table
    return table.scaled(workload.input_scale, workload.output_scale)


def _generated(
    workload: Workload, arrivals: Generated, base_dir: Path, seed: int, warn: Warn
) -> RequestTable:
    opened_ns = arrival_times(arrivals, seed)
    sessions = len(opened_ns)
    turns = _turns(workload.sessions, sessions, seed)
    session = np.repeat(np.arange(sessions), turns)
    opens = np.concatenate([[True], session[1:] != session[:-1]])
    n = len(session)

    klass_of = _draw_classes(workload, sessions, seed)
    klass = klass_of[session]
    prefixes = workload.prefixes
    prompt_of = _draw_prompts(prefixes, sessions, seed)
    rank_in, rank_out = _ranks(seed, "input", n), _ranks(seed, "output", n)
    if prefixes is not None and prefixes.prompts_per_group is not None:
        # A fixed prompt has one length, however often it is drawn.
        by_prompt = _ranks(seed, "prompt", prefixes.groups * prefixes.prompts_per_group)
        rank_in[opens] = by_prompt[prompt_of]
    inputs, output = _lengths_by_class(workload, klass, (rank_in, rank_out), None, base_dir, warn)
    inputs = scaled_tokens(inputs, workload.input_scale)
    output = scaled_tokens(output, workload.output_scale)
    if prefixes is not None and workload.input_scale != 1:
        head = max(1, round(prefixes.prefix_tokens * workload.input_scale))
        prefixes = prefixes.model_copy(update={"prefix_tokens": head})

    prompt = inputs + _history(inputs + output, opens, session)
    prompt += prefixes.prefix_tokens if prefixes is not None else 0
    if int((prompt + output).max()) > MAX_TOKENS:
        raise InputError(f"workload: a prompt grows beyond {MAX_TOKENS} tokens")
    shared, segments = _shared(prefixes, prompt_of, klass_of, prompt[opens])
    after, think_ns, concurrency = _followers(workload, opens, seed)
    return RequestTable(
        arrival_ns=opened_ns[session],
        prompt_tokens=prompt,
        output_tokens=output,
        priority=_priorities(workload)[klass],
        klass=klass,
        segment_id=session + segments + 1,
        shared=[shared[i] for i in session.tolist()] if shared is not None else None,
        after=after,
        think_ns=think_ns,
        concurrency=concurrency,
        class_names=_class_names(workload),
        wait_limits=_wait_limits(workload),
    )


def _ranks(seed: int, purpose: str, count: int) -> FloatArray:
    """Numbers strictly between 0 and 1, one a position."""
    return np.maximum(stream(seed, purpose).random(count), 2.0**-54)


def _lengths_by_class(
    workload: Workload,
    klass: IntArray,
    ranks: tuple[FloatArray, FloatArray],
    own: tuple[IntArray, IntArray] | None,
    base_dir: Path,
    warn: Warn,
) -> tuple[IntArray, IntArray]:
    """Lengths of the class, else of the workload, else `own` (a trace's)."""
    classes = workload.classes or ()
    base = workload.lengths
    if base is not None:
        prompt, output = draw_lengths(base, *ranks, base_dir, warn)
    elif own is not None:
        prompt, output = own
    else:
        prompt, output = np.zeros_like(klass), np.zeros_like(klass)
    if any(c.lengths is not None for c in classes):
        prompt, output = prompt.copy(), output.copy()
    for number, c in enumerate(classes):
        if c.lengths is not None:
            rows = np.flatnonzero(klass == number)
            mine = ranks[0][rows], ranks[1][rows]
            prompt[rows], output[rows] = draw_lengths(c.lengths, *mine, base_dir, warn)
    return prompt, output


def _draw_classes(workload: Workload, count: int, seed: int) -> IntArray:
    if workload.classes is None:
        return np.zeros(count, dtype=np.int64)
    edges = np.cumsum([c.weight for c in workload.classes])
    # Without the last edge: a rank close to 1 must not round into a class beyond it.
    return np.searchsorted(edges[:-1] / edges[-1], _ranks(seed, "classes", count), side="right")


def _priorities(workload: Workload) -> IntArray:
    return np.array([c.priority for c in workload.classes or ()] or [0], dtype=np.int64)


def _wait_limits(workload: Workload) -> tuple[WaitLimit | None, ...]:
    """Of each class; empty if none has one."""
    limits = tuple(
        WaitLimit(round(c.max_wait_s * NS_PER_S), c.on_timeout == "reject")
        if c.max_wait_s is not None
        else None
        for c in workload.classes or ()
    )
    return limits if any(limits) else ()


def _class_names(workload: Workload) -> tuple[str, ...]:
    return tuple(c.name for c in workload.classes or ()) or ("default",)


def _turns(sessions: Sessions | None, count: int, seed: int) -> IntArray:
    """Turns of each session, at least 1."""
    turns = np.full(count, sessions.turns if sessions is not None else 1, dtype=np.int64)
    if sessions is not None and sessions.turns_distribution == "geometric" and sessions.turns > 1:
        # Each turn is the last with probability 1 / mean; the inverse of its distribution.
        rank = _ranks(seed, "turns", count)
        turns = 1 + np.floor(np.log(rank) / np.log1p(-1 / sessions.turns)).astype(np.int64)
    if int(turns.sum()) > MAX_REQUESTS:
        raise InputError(
            f"workload.sessions: {turns.sum()} requests in all, at most {MAX_REQUESTS}"
        )
    return turns


def _history(tokens: IntArray, opens: npt.NDArray[np.bool_], session: IntArray) -> IntArray:
    """Tokens said in the session before each turn; `tokens` are those of the turn itself."""
    before = np.cumsum(tokens) - tokens
    return before - before[opens][session]


def _draw_prompts(prefixes: Prefixes | None, count: int, seed: int) -> IntArray:
    """Number of the fixed prompt (or of the group, where there are none) of each session."""
    if prefixes is None:
        return np.zeros(count, dtype=np.int64)
    choices = prefixes.groups * (prefixes.prompts_per_group or 1)
    if choices > MAX_REQUESTS:
        raise InputError(f"workload.prefixes: {choices} prompts, at most {MAX_REQUESTS}")
    return (_ranks(seed, "prefixes", count) * choices).astype(np.int64)


def _shared(
    prefixes: Prefixes | None, prompt_of: IntArray, klass_of: IntArray, prompt_tokens: IntArray
) -> tuple[Sequence[Segments] | None, int]:
    """Segments each session begins with, and the highest segment id among them.

    Ids are 1 to `groups` for prefixes, then one for each fixed prompt of each class: a class
    may have other lengths, and a prompt of another length is another prompt.
    """
    if prefixes is None:
        return None, 0
    per_group = prefixes.prompts_per_group or 1
    group = prompt_of // per_group + 1
    end = prefixes.prefix_tokens
    if prefixes.prompts_per_group is None:
        heads: list[Segments] = [((g, end),) for g in range(1, prefixes.groups + 1)]
        return [heads[g - 1] for g in group.tolist()], prefixes.groups
    own = prefixes.groups + 1 + klass_of * (prefixes.groups * per_group) + prompt_of
    rows = zip(group.tolist(), own.tolist(), prompt_tokens.tolist(), strict=True)
    return [((g, end), (s, whole)) for g, s, whole in rows], int(own.max())


def _followers(
    workload: Workload, opens: npt.NDArray[np.bool_], seed: int
) -> tuple[IntArray | None, IntArray | None, int | None]:
    """Who releases whom and after what pause: `after`, `think_ns`, `concurrency`."""
    loop = workload.arrivals if isinstance(workload.arrivals, ClosedLoop) else None
    n = len(opens)
    first = np.flatnonzero(opens)
    pause_s = np.zeros(n)
    if loop is not None:
        # The first request of a client waits for nobody.
        pause_s[first[loop.concurrency :]] = loop.think_time_s
    after, clients = None, loop.concurrency if loop is not None else None
    if workload.sessions is not None:
        after, clients = np.where(opens, -1, np.arange(n) - 1), None
        pause_s[~opens] = _think_times_s(workload.sessions, n, seed)[~opens]
        if loop is not None:
            # Client c goes through sessions c, c + concurrency, ..., one after the other.
            last = np.append(first[1:], n) - 1
            after[first[loop.concurrency :]] = last[: -loop.concurrency]
    think_ns = np.rint(pause_s * 1e9).astype(np.int64) if pause_s.any() else None
    return after, think_ns, clients


def _think_times_s(sessions: Sessions, count: int, seed: int) -> FloatArray:
    if sessions.think_time_distribution == "exponential":
        return sessions.think_time_s * stream(seed, "think").standard_exponential(count)
    return np.full(count, sessions.think_time_s)
