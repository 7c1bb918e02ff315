"""The one source of requests: it hands each over at its time, and says when the next comes.

Arrivals are urgent SimPy events: a request that arrives at the very moment a step is planned is
seen by that plan, however the two events were scheduled.
"""

import heapq
from collections.abc import Callable

import numpy as np
from simpy.events import Event

from servecast.sim.clock import Alarm, Clock
from servecast.sim.request import RequestTable
from servecast.sim.sequence import Sequence

NEVER = 1 << 62


class Source:
    """Turns rows of a request table into sequences at the right time.

    Parameters
    ----------
    submit : takes each sequence as it arrives
    max_model_len : outputs are cut to what the model's context leaves
    """

    def __init__(
        self,
        env: Clock,
        table: RequestTable,
        max_model_len: int,
        submit: Callable[[Sequence], None],
    ) -> None:
        self._env = env
        self._submit = submit
        self._prompt = table.prompt_tokens.tolist()
        self._limit = np.minimum(
            table.output_tokens, np.maximum(max_model_len - table.prompt_tokens, 1)
        ).tolist()
        self._priority = table.priority.tolist()
        self._klass = table.klass.tolist()
        self._segment = table.segment_id.tolist()
        self._shared = table.shared
        self._think = [] if table.think_ns is None else table.think_ns.tolist()
        self._order = 0
        self._released: list[tuple[int, int]] = []
        self._followers: dict[int, list[int]] = {}
        self._open = self._open_rows(table)
        self._closed = table.concurrency is not None
        self._next_client_row = 0
        if self._closed:
            for _ in range(min(table.concurrency or 0, len(table))):
                self._release_client(0)
        self._at = 0
        self.next_open_ns = NEVER
        self._arm()

    @property
    def next_ns(self) -> int:
        """When the next request is sure to arrive, as far as is known now."""
        return min(self.next_open_ns, self._released[0][0]) if self._released else self.next_open_ns

    def finished(self, seq: Sequence) -> None:
        """A request has ended: send what waited for it."""
        if self._closed:
            self._release_client(self._env.now)
        for row in self._followers.pop(seq.index, ()):
            self._release(row, self._env.now)

    def _open_rows(self, table: RequestTable) -> list[tuple[int, int]]:
        if table.concurrency is not None:
            return []
        after = table.after
        rows = np.arange(len(table))
        if after is not None:
            for row in rows[after >= 0].tolist():
                self._followers.setdefault(int(after[row]), []).append(row)
            rows = rows[after < 0]
        times = table.arrival_ns[rows]
        order = np.argsort(times, kind="stable")
        return list(zip(times[order].tolist(), rows[order].tolist(), strict=True))

    def _arm(self) -> None:
        if self._at == len(self._open):
            self.next_open_ns = NEVER
            return
        self.next_open_ns = self._open[self._at][0]
        alarm = Alarm(self._env, self.next_open_ns - self._env.now)
        assert alarm.callbacks is not None
        alarm.callbacks.append(self._arrive)

    def _arrive(self, _: Event) -> None:
        now, rows = self._env.now, self._open
        while self._at < len(rows) and rows[self._at][0] <= now:
            self._send(rows[self._at][1])
            self._at += 1
        self._arm()

    def _release_client(self, now: int) -> None:
        if self._next_client_row < len(self._prompt):
            self._next_client_row += 1
            self._release(self._next_client_row - 1, now)

    def _release(self, row: int, now: int) -> None:
        at = now + (self._think[row] if self._think else 0)
        heapq.heappush(self._released, (at, row))
        alarm = Alarm(self._env, at - self._env.now)
        assert alarm.callbacks is not None
        alarm.callbacks.append(self._arrive_released)

    def _arrive_released(self, _: Event) -> None:
        now = self._env.now
        while self._released and self._released[0][0] <= now:
            self._send(heapq.heappop(self._released)[1])

    def _send(self, row: int) -> None:
        seq = Sequence(
            row,
            self._prompt[row],
            self._limit[row],
            segment_id=self._segment[row],
            shared=self._shared[row] if self._shared is not None else (),
            priority=self._priority[row],
            klass=self._klass[row],
            arrival_ns=self._env.now,
            order=self._order,
        )
        self._order += 1
        self._submit(seq)
