"""Run a workload whose arrivals are numbered steps, and record what the scheduler decides.

The format is that of the recorded vLLM schedules (`docs/parity.md`): a workload of `config` and
`requests` with explicit tokens, and one record a step. There is no time here, so that nothing but
the schedule is compared.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.sim.plan import SchedulerLimits, StepPlan
from servecast.sim.request import Segments
from servecast.sim.scheduler import Scheduler
from servecast.sim.sequence import FINISHED, Sequence
from servecast.sim.speculation import FullDrafts

DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "block_size": 16,
    "num_blocks": 64,
    "enable_prefix_caching": True,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "watermark": 0.0,
    "max_model_len": 1024,
    "reserve_full_isl": True,
    "async_scheduling": False,
    "spec": None,
}

#: Steps without work after which a schedule that still has requests is given up.
IDLE_STEPS = 3


def limits_from(config: Mapping[str, Any]) -> SchedulerLimits:
    """Scheduler settings from a workload's `config`; raises InputError for a bad key or value."""
    if not isinstance(config, Mapping):
        raise InputError(f"config: expected an object, got {config!r}")
    unknown = config.keys() - DEFAULTS.keys()
    if unknown:
        raise InputError(f"config: unknown key {sorted(unknown)[0]}")
    c = {**DEFAULTS, **config}
    for key, default in DEFAULTS.items():
        if key != "spec" and not _is_like(c[key], default):
            raise InputError(f"config.{key}: expected {type(default).__name__}, got {c[key]!r}")
    spec = c["spec"] or {}
    if not isinstance(spec, Mapping):
        raise InputError(f"config.spec: expected an object, got {spec!r}")
    if spec and spec.get("method") not in ("ngram", "draft_model", "eagle"):
        raise InputError(f"config.spec.method: unknown {spec.get('method')!r}")
    if spec and not (_is_like(spec.get("k"), 1) and spec["k"] > 0):
        raise InputError(f"config.spec.k: expected a number above 0, got {spec.get('k')!r}")
    try:
        return SchedulerLimits(
            max_num_seqs=c["max_num_seqs"],
            max_num_batched_tokens=c["max_num_batched_tokens"],
            block_size=c["block_size"],
            num_gpu_blocks=c["num_blocks"],
            max_model_len=c["max_model_len"],
            enable_chunked_prefill=c["enable_chunked_prefill"],
            enable_prefix_caching=c["enable_prefix_caching"],
            scheduling_policy=c["policy"],
            long_prefill_token_threshold=c["long_prefill_token_threshold"],
            watermark=c["watermark"],
            scheduler_reserve_full_isl=c["reserve_full_isl"],
            async_scheduling=c["async_scheduling"],
            spec_method=spec.get("method"),
            num_speculative_tokens=spec.get("k", 0),
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"config: {error}") from error


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value has the type of a default; a whole number may stand for a float."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, int | float if isinstance(default, float) else type(default))


def _check_requests(requests: Any) -> None:
    if not isinstance(requests, list):
        raise InputError(f"requests: expected a list, got {type(requests).__name__}")
    seen: set[str] = set()
    for i, request in enumerate(requests):
        where = f"requests[{i}]"
        if not isinstance(request, dict):
            raise InputError(f"{where}: expected an object, got {request!r}")
        for key in ("id", "arrival", "output_len"):
            if key not in request:
                raise InputError(f"{where}: {key}: missing")
        if not isinstance(request["id"], str) or request["id"] in seen:
            raise InputError(f"{where}: id: expected a text of its own, got {request['id']!r}")
        seen.add(request["id"])
        for key in ("arrival", "output_len", "prompt_len", "priority"):
            if key in request and not _is_like(request[key], 1):
                raise InputError(f"{where}: {key}: expected a number, got {request[key]!r}")
        for key in ("prompt", "output", "accept", "drafts"):
            numbers = request.get(key)
            if numbers is not None and not (
                isinstance(numbers, list) and all(_is_like(n, 1) for n in numbers)
            ):
                raise InputError(f"{where}: {key}: expected a list of numbers")
        if request.get("prompt") is None and "prompt_len" not in request:
            raise InputError(f"{where}: prompt or prompt_len: missing")


def tokens_of(index: int, request: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """(prompt, output) token ids: given, or distinct ids by the recorder's convention."""
    prompt = request.get("prompt")
    if prompt is None:
        start = 1_000_000 + index * 10_000
        prompt = range(start, start + request["prompt_len"])
    output = request.get("output")
    if output is None:
        start = 10_000_000 + index * 100_000
        output = range(start, start + request["output_len"])
    return list(prompt), list(output)


class _Interner:
    """One number for every distinct run of blocks from the start of a text."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def segments(self, tokens: list[int]) -> Segments:
        size, parent = self.block_size, 0
        chain: list[tuple[int, int]] = []
        for end in range(size, len(tokens) + 1, size):
            block = (parent, tuple(tokens[end - size : end]))
            parent = self._known.setdefault(block, len(self._known) + 1)
            chain.append((parent, end))
        return tuple(chain)


def _sequences(workload: Mapping[str, Any], limits: SchedulerLimits) -> list[Sequence]:
    requests = workload["requests"]
    interner = _Interner(limits.block_size)
    rank = {
        i: place
        for place, i in enumerate(
            sorted(range(len(requests)), key=lambda i: (requests[i]["arrival"], i))
        )
    }
    sequences = []
    for i, request in enumerate(requests):
        prompt, output = tokens_of(i, request)
        if not prompt or request["output_len"] < 1:
            raise InputError(f"request {request['id']}: prompt and output must not be empty")
        if len(prompt) >= limits.max_model_len:
            raise InputError(
                f"request {request['id']}: prompt of {len(prompt)} tokens leaves no room in "
                f"max_model_len {limits.max_model_len}"
            )
        sequences.append(
            Sequence(
                i,
                len(prompt),
                min(request["output_len"], limits.max_model_len - len(prompt)),
                segment_id=0,
                shared=interner.segments(prompt + output),
                priority=request.get("priority", 0),
                order=rank[i],
            )
        )
    return sequences


class _Prescribed(FullDrafts):
    """Drafts made and accepted as a workload has them, each list of a request used cyclically."""

    def __init__(self, requests: list[Any], tokens: int) -> None:
        super().__init__(tokens)
        self._requests = requests
        self._used: Counter[tuple[str, Sequence]] = Counter()

    def proposal(self, seq: Sequence, tokens: int) -> int:
        return self._next("drafts", seq, tokens)

    def accept(self, seq: Sequence, drafts: int, *, padded: bool) -> int:
        return min(drafts, self._next("accept", seq, 0))

    def _next(self, key: str, seq: Sequence, otherwise: int) -> int:
        values = self._requests[seq.index].get(key)
        if not values:
            return otherwise
        self._used[key, seq] += 1
        return int(values[(self._used[key, seq] - 1) % len(values)])


def replay(
    workload: Mapping[str, Any], *, aggregate: bool = True, check: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the record of every step of `workload` (fields: `docs/parity.md`).

    `aggregate` chooses between the counted and the walked way of planning; `check` holds the
    pool against its users after every step. Raises InputError for a workload that is not one.
    """
    limits = limits_from(workload.get("config", {}))
    requests = workload.get("requests")
    _check_requests(requests)
    assert isinstance(requests, list)
    sequences = _sequences(workload, limits)
    names = [request["id"] for request in requests]
    arrivals = [request["arrival"] for request in requests]
    drafting = _Prescribed(requests, limits.num_speculative_tokens)
    scheduler = Scheduler(limits, aggregate=aggregate, keep_order=True, drafting=drafting)
    pending = deque(sorted(sequences, key=lambda seq: (arrivals[seq.index], seq.index)))
    in_flight: deque[tuple[StepPlan, dict[str, Any]]] = deque()
    depth = 2 if limits.async_scheduling else 1
    step = idle = 0
    # The engine makes one more, empty step to tell its workers which requests have ended.
    ended = False
    while True:
        while pending and arrivals[pending[0].index] <= step:
            scheduler.add(pending.popleft())
        work = scheduler.unfinished or ended
        if not work and not in_flight:
            if not pending:
                return
            step = arrivals[pending[0].index]
            continue
        if work:
            ended = False
            plan = scheduler.plan()
            record = _record(step, plan, scheduler, names)
            in_flight.append((plan, record))
            waits = plan.empty and not scheduler.unfinished
            if len(in_flight) < depth and not waits:
                step += 1
                continue
            idle = 0 if not plan.empty or len(in_flight) > 1 else idle + 1
        plan, record = in_flight.popleft()
        _commit(plan, record, scheduler, names)
        ended = ended or bool(record["finished"])
        if check:
            scheduler.check()
        yield record
        step += 1
        if idle > IDLE_STEPS and not pending:
            yield {"step": step, "deadlock": [names[seq.index] for seq in scheduler.waiting]}
            return


def _record(step: int, plan: StepPlan, scheduler: Scheduler, names: list[str]) -> dict[str, Any]:
    def by_name(pairs: Iterable[tuple[Sequence, int]]) -> dict[str, int]:
        return {names[seq.index]: n for seq, n in pairs}

    return {
        "step": step,
        "scheduled": by_name(plan.entries()),
        "spec": by_name(plan.spec.items()),
        "new": by_name(plan.admitted),
        "resumed": by_name(plan.resumed),
        "preempted": [names[seq.index] for seq in plan.preempted],
        "finished": [],
        "running": [names[seq.index] for seq in scheduler.running.values()],
        "waiting": [names[seq.index] for seq in scheduler.waiting],
        "free_blocks": scheduler.pool.free,
    }


def _commit(plan: StepPlan, record: dict[str, Any], scheduler: Scheduler, names: list[str]) -> None:
    alive = [seq for seq, _ in plan.entries() if seq.status != FINISHED]
    delivered = dict(scheduler.commit(plan))
    if scheduler.aggregate:
        explicit = {seq for seq, _, _ in plan.chunks}
        delivered.update((seq, 1) for seq in alive if seq not in explicit)
    record["emitted"] = {names[seq.index]: delivered[seq] for seq in alive if delivered.get(seq)}
    record["finished"] = [names[seq.index] for seq in alive if seq.status == FINISHED]
    record["free_blocks_after"] = scheduler.pool.free
