"""A request as the scheduler sees it, and the two orders in which requests wait."""

import heapq
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from servecast.sim.request import Segments, block_keys

WAITING, RUNNING, PREEMPTED, FINISHED = range(4)


class Sequence:
    """Mutable state of one request inside the engine.

    `output_limit` is the request's own max_tokens, cut to the model's length: requests stop by
    length, as benchmark clients ask for with `ignore_eos`. Nothing else tells the scheduler
    when a request will end.

    While a sequence is held in the decode aggregate (`aggregated`), `computed_tokens` and
    `known_tokens` are derived from the scheduler's tick and stand still here.
    """

    __slots__ = (
        "accepted_tokens",
        "adapted",
        "admitted_ns",
        "aggregated",
        "arrival_ns",
        "asked_tokens",
        "base",
        "blocks",
        "computed_tokens",
        "draft_rounds",
        "draft_tokens",
        "drafting",
        "drafts",
        "end_tick",
        "first_token_ns",
        "handles",
        "index",
        "kept_tokens",
        "klass",
        "known_tokens",
        "last_token_ns",
        "luck",
        "luck_by_position",
        "naming",
        "order",
        "output_limit",
        "placeholders",
        "preemptions",
        "prefilling",
        "prefix_hit_tokens",
        "priority",
        "private",
        "promoted",
        "prompt_tokens",
        "rounds",
        "scheduled_step",
        "segment_id",
        "serial",
        "shared",
        "shared_blocks",
        "stale",
        "status",
        "window_accepted",
        "window_drafts",
        "window_rounds",
    )

    def __init__(
        self,
        index: int,
        prompt_tokens: int,
        output_limit: int,
        *,
        segment_id: int,
        shared: Segments = (),
        priority: int = 0,
        klass: int = 0,
        arrival_ns: int = 0,
        order: int | None = None,
    ) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.output_limit = output_limit
        #: what the client gets of it, where a static batch makes it decode for longer
        self.asked_tokens = output_limit
        self.segment_id = segment_id
        self.shared = shared
        self.priority = priority
        self.klass = klass
        self.arrival_ns = arrival_ns
        #: place in the order of arrival, which breaks ties of priority
        self.order = index if order is None else order
        self.status = WAITING
        self.known_tokens = prompt_tokens
        self.computed_tokens = 0
        self.placeholders = 0
        self.drafts = 0
        self.stale = False
        self.prefilling = False
        #: computed tokens whose KV waits in host memory
        self.kept_tokens = 0
        #: has waited its limit, and goes first
        self.promoted = False
        self.scheduled_step = -1
        self.serial = -1
        self.blocks = 0
        #: named blocks, and behind them the full blocks of the private run
        self.handles: list[int] = []
        self.private = 0
        #: full blocks of the shared head; the scheduler sets it if it keeps private runs
        self.shared_blocks = 0
        self.aggregated = False
        #: whether blocks must be named as they fill, because others may ask for them
        self.naming = False
        self.base = 0
        self.end_tick = -1
        self.admitted_ns = self.first_token_ns = self.last_token_ns = -1
        self.preemptions = self.prefix_hit_tokens = 0
        #: what each round accepts, one added, and whether by round or by output position
        self.luck = b""
        self.luck_by_position = False
        #: rounds that have passed, and those of them that verified a draft
        self.rounds = self.draft_rounds = 0
        self.draft_tokens = self.accepted_tokens = 0
        #: drafts to be made after the step that is planned
        self.drafting = 0
        #: k of an adaptive request, and what its window has seen
        self.adapted = self.window_rounds = self.window_drafts = self.window_accepted = 0

    def anew(self) -> "Sequence":
        """The same request, sent again: nothing of it is computed."""
        seq = Sequence(
            self.index,
            self.prompt_tokens,
            self.asked_tokens,
            segment_id=self.segment_id,
            shared=self.shared,
            priority=self.priority,
            klass=self.klass,
            arrival_ns=self.arrival_ns,
            order=self.order,
        )
        seq.preemptions = self.preemptions
        seq.draft_rounds, seq.draft_tokens = self.draft_rounds, self.draft_tokens
        seq.accepted_tokens = self.accepted_tokens
        return seq

    @property
    def output_tokens(self) -> int:
        """Tokens delivered so far (not while aggregated)."""
        return self.known_tokens - self.prompt_tokens

    @property
    def last_position(self) -> int:
        """Computed tokens once the last needed token is in flight."""
        return self.prompt_tokens + self.output_limit - 1

    def keys(self, block_size: int, start: int, stop: int) -> Seq[int]:
        """Content keys of blocks [start, stop)."""
        return block_keys(self.segment_id, self.shared, block_size, start, stop)


class FCFSQueue(deque[Sequence]):
    """First come, first served; a preempted sequence goes to the head."""

    def peek(self) -> Sequence:
        return self[0]

    def put_back(self, seq: Sequence) -> None:
        self.appendleft(seq)

    def promote(self, seq: Sequence) -> None:
        """Move a waiting sequence to the head, behind those promoted before it."""
        self.remove(seq)
        ahead = 0
        while ahead < len(self) and self[ahead].promoted:
            ahead += 1
        seq.promoted = True
        self.insert(ahead, seq)


class PriorityQueue:
    """Lowest (priority, arrival) first; a preempted sequence goes back to its place.

    Removing marks an entry as gone; it leaves the heap when it comes to the top.
    """

    def __init__(self) -> None:
        #: (0 for a promoted one, priority, order, number of the entry, sequence)
        self._heap: list[tuple[int, int, int, int, Sequence]] = []
        self._entry: dict[Sequence, int] = {}
        self._entries = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[4] for entry in sorted(self._heap, key=lambda e: e[:4]) if self._holds(entry))

    def append(self, seq: Sequence) -> None:
        self._entries += 1
        self._entry[seq] = self._entries
        entry = (int(not seq.promoted), seq.priority, seq.order, self._entries, seq)
        heapq.heappush(self._heap, entry)

    put_back = append

    def peek(self) -> Sequence:
        while not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][4]

    def popleft(self) -> Sequence:
        seq = self.peek()
        heapq.heappop(self._heap)
        del self._entry[seq]
        return seq

    def remove(self, seq: Sequence) -> None:
        del self._entry[seq]

    def promote(self, seq: Sequence) -> None:
        """Let a waiting sequence go before all that are not promoted."""
        self.remove(seq)
        seq.promoted = True
        self.append(seq)

    def _holds(self, entry: tuple[int, int, int, int, Sequence]) -> bool:
        return self._entry.get(entry[4]) == entry[3]
