"""The running decodes in aggregate: what makes a step cost the same for 1 and 1,024 sequences.

Every member computes exactly one token a step, so a member's computed tokens are a constant of
its own (`base`) plus the number of steps made (`tick`). Kept are: how many there are, the sum
of their bases, the ticks at which members end, and one bucket for each residue of the tick, which
says who starts a new block at this step.
"""

import heapq
from bisect import bisect_left, bisect_right, insort

from servecast.sim.sequence import Sequence


class DecodeAggregate:
    """Sequences that decode one token in every step; `tail` is how many of the longest are told."""

    def __init__(self, block_size: int, tail: int = 0) -> None:
        self.block_size = block_size
        self.tail = tail
        self.tick = 0
        self.count = 0
        self.base_sum = 0
        #: members whose blocks must be named as they fill
        self.naming = 0
        #: members by the residue of the tick before which their last block is full
        self.buckets: list[dict[Sequence, None]] = [{} for _ in range(block_size)]
        #: ascending, where somebody asks for the longest
        self._bases: list[int] = []
        self._ends: dict[int, list[Sequence]] = {}
        self._end_ticks: list[int] = []

    @property
    def context_tokens(self) -> int:
        """Computed tokens of all members."""
        return self.base_sum + self.count * self.tick

    def longest(self) -> list[int]:
        """Tokens that the `tail` members that have most read next, of all if there are fewer."""
        after = self.tick + 1
        return [base + after for base in self._bases[-self.tail :]] if self.tail else []

    def join(self, seq: Sequence) -> None:
        """Take in a sequence whose computed tokens have caught up with what is known."""
        base = seq.base = seq.computed_tokens - self.tick
        seq.aggregated = True
        self.count += 1
        self.base_sum += base
        if self.tail:
            insort(self._bases, base)
        self.naming += seq.naming
        self.buckets[-base % self.block_size][seq] = None
        end = seq.end_tick = seq.last_position - base
        ends = self._ends.get(end)
        if ends is None:
            self._ends[end] = [seq]
            heapq.heappush(self._end_ticks, end)
        else:
            ends.append(seq)

    def leave(self, seq: Sequence) -> None:
        """Let a member go; its explicit counters are right again afterwards."""
        base = seq.base
        seq.aggregated = False
        self.count -= 1
        self.base_sum -= base
        if self.tail:
            del self._bases[bisect_left(self._bases, base)]
        self.naming -= seq.naming
        del self.buckets[-base % self.block_size][seq]
        seq.computed_tokens = computed = base + self.tick
        seq.blocks = -(-computed // self.block_size)

    def crossing(self) -> dict[Sequence, None]:
        """Members that need a block for the token they compute next."""
        return self.buckets[self.tick % self.block_size]

    def crossings(self, steps: int) -> int:
        """Blocks that members need over the next `steps` steps."""
        size, buckets, tick = self.block_size, self.buckets, self.tick
        rounds, rest = divmod(steps, size)
        some = sum(len(buckets[(tick + j) % size]) for j in range(rest))
        return rounds * self.count + some

    def steps_within(self, blocks: int, limit: int) -> int:
        """The largest number of steps up to `limit` that need no more than `blocks` blocks."""
        if (limit // self.block_size + 1) * self.count <= blocks:
            return limit
        return bisect_right(range(1, limit + 1), blocks, key=self.crossings)

    def steps_to_end(self) -> int:
        """Steps until the next member computes its last token; 0 if there is no member."""
        ticks = self._end_ticks
        return ticks[0] - self.tick if ticks else 0

    def advance(self, steps: int = 1) -> list[Sequence]:
        """Make `steps` steps; returns the members that end with the last one, in running order.

        No end may lie before the last step.
        """
        tick = self.tick = self.tick + steps
        ticks = self._end_ticks
        if not ticks or ticks[0] > tick:
            return []
        heapq.heappop(ticks)
        ended = [s for s in self._ends.pop(tick) if s.aggregated and s.end_tick == tick]
        for seq in ended:
            self.leave(seq)
        ended.sort(key=_serial)
        return ended

    def dissolve(self) -> list[Sequence]:
        """Let all members go."""
        members = [seq for bucket in self.buckets for seq in bucket]
        for seq in members:
            self.leave(seq)
        self._ends.clear()
        self._end_ticks.clear()
        return members


def _serial(seq: Sequence) -> int:
    return seq.serial
