"""The load, as columns: what arrives, when, and what it shares with others.

Content is described, never stored token by token. A request's text is a chain of *segments*;
two requests share a block of KV exactly if the segment that holds the block's last token is
the same, because a segment's number stands for everything before it too (as a chained block
hash does). The key of block i in segment s is `s << 24 | i`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

#: (segment id, end token): the segment reaches from the end of the one before it to `end token`.
Segments = tuple[tuple[int, int], ...]

BLOCK_INDEX_BITS = 24


@dataclass(frozen=True)
class WaitLimit:
    """How long a request of a class may wait for its first admission, and what happens then.

    `reject` gives it up; otherwise it goes ahead of the queue.
    """

    wait_ns: int
    reject: bool


@dataclass(frozen=True)
class RequestTable:
    """One row a request; row i is request i everywhere.

    Attributes
    ----------
    arrival_ns : when it is sent; ignored where `after` or `concurrency` decides
    prompt_tokens, output_tokens : lengths, at least 1 each
    priority : vLLM's request priority, lower first
    klass : index into `class_names`
    segment_id : the request's own segment (its private text, prompt and output). Equal numbers
        mean one growing text: the turns of a session
    shared : segments at the head of the prompt that others may have too
    after : the request whose end releases this one, `think_ns` later; -1 for none
    concurrency : clients of a closed loop, each sending the next row when its last is done
    wait_limits : of each class, None where it waits as long as it takes; empty for none at all
    """

    arrival_ns: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    priority: IntArray
    klass: IntArray
    segment_id: IntArray
    shared: Sequence[Segments] | None = None
    after: IntArray | None = None
    think_ns: IntArray | None = None
    concurrency: int | None = None
    class_names: tuple[str, ...] = field(default=("default",))
    wait_limits: tuple[WaitLimit | None, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def head(self, rows: int) -> "RequestTable":
        """The first `rows` requests; what comes after another comes after an earlier row."""

        def cut(column: IntArray | None) -> IntArray | None:
            return None if column is None else column[:rows]

        return replace(
            self,
            arrival_ns=self.arrival_ns[:rows],
            prompt_tokens=self.prompt_tokens[:rows],
            output_tokens=self.output_tokens[:rows],
            priority=self.priority[:rows],
            klass=self.klass[:rows],
            segment_id=self.segment_id[:rows],
            shared=None if self.shared is None else self.shared[:rows],
            after=cut(self.after),
            think_ns=cut(self.think_ns),
        )

    def scaled(self, prompt: float, output: float) -> "RequestTable":
        """The same requests with lengths multiplied; not for sessions, whose turns add up."""
        shared = self.shared
        if shared is not None and prompt != 1:
            shared = [
                tuple((segment, max(1, round(end * prompt))) for segment, end in row)
                for row in shared
            ]
        return replace(
            self,
            prompt_tokens=scaled_tokens(self.prompt_tokens, prompt),
            output_tokens=scaled_tokens(self.output_tokens, output),
            shared=shared,
        )


def block_keys(
    segment_id: int, shared: Segments, block_size: int, start: int, stop: int
) -> Sequence[int]:
    """Keys of blocks [start, stop) of a request's text."""
    own = segment_id << BLOCK_INDEX_BITS
    if not shared or start * block_size >= shared[-1][1]:
        return range(own + start, own + stop)
    keys: list[int] = []
    i = start
    for segment, end_token in shared:
        last = min(stop, end_token // block_size)
        if last > i:
            base = segment << BLOCK_INDEX_BITS
            keys.extend(range(base + i, base + last))
            i = last
    keys.extend(range(own + i, own + stop))
    return keys


def scaled_tokens(tokens: IntArray, factor: float) -> IntArray:
    """Lengths multiplied by a factor and rounded, at least 1 each."""
    scaled: IntArray = np.maximum(np.rint(tokens * factor), 1).astype(np.int64)
    return scaled
