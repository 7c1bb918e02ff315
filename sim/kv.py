"""The paged KV pool of vLLM V1: which blocks are free, and whose content they still hold.

Physical block numbers are not kept: nothing observable depends on them. The free queue of vLLM
falls into two parts that never mix: blocks without content at the front (a count), and blocks
with content behind them in order of eviction (`_idle`). Allotting blocks eats the count first,
then evicts from the front. Content is known in one of two ways:

- *named blocks*, one by one, by a handle: what several requests may share. The handle is the
  content's key for the first block that holds it; a second block with the same content (two
  prompts computed side by side) gets a negative handle of its own.
- a *private run*: the blocks of a text that only one request (or one session, a turn at a time)
  can ever ask for. It is one entry of the queue, with a length that eviction eats from the tail.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class KVPool:
    """Blocks of one replica.

    Parameters
    ----------
    blocks : usable blocks (vLLM's `num_gpu_blocks` less its null block)
    block_size : tokens a block holds
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"blocks and block_size must be positive: {blocks}, {block_size}")
        self.blocks = blocks
        self.block_size = block_size
        #: blocks that can be allotted, those with reusable content included
        self.free = blocks
        self._blank = blocks
        #: handle or private run, to blocks it stands for
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._resident: set[int] = set()
        self._extra_refs: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        self._copied_key: dict[int, int] = {}
        self._next_copy = -1

    def lookup(self, keys: Iterable[int]) -> list[int]:
        """Handles of the longest run of `keys`, from the first on, whose content is held."""
        resident, copies = self._resident, self._copies
        hits: list[int] = []
        for key in keys:
            if copies and key in copies:
                hits.append(copies[key][0])
            elif key in resident:
                hits.append(key)
            else:
                break
        return hits

    def count_idle(self, handles: Sequence[int]) -> int:
        """How many of `handles` lie in the free queue: using them takes free blocks too."""
        idle = self._idle
        return sum(1 for handle in handles if handle in idle)

    def share(self, handles: Sequence[int]) -> None:
        """Add a user to blocks found by `lookup`."""
        idle, extra = self._idle, self._extra_refs
        for handle in handles:
            if handle in idle:
                del idle[handle]
                self.free -= 1
            else:
                extra[handle] = extra.get(handle, 0) + 1

    def private_blocks(self, segment_id: int) -> int:
        """Blocks that a private run still holds."""
        return self._idle.get(_run(segment_id), 0)

    def reclaim(self, segment_id: int, blocks: int) -> None:
        """Put a whole private run, found by `private_blocks`, to use again."""
        if blocks and self._idle.pop(_run(segment_id)) != blocks:
            raise RuntimeError(f"private run {segment_id} reclaimed in part: {blocks} blocks")
        self.free -= blocks

    def take(self, blocks: int) -> None:
        """Allot `blocks` empty blocks, evicting content where needed.

        Raises RuntimeError if the caller did not check `free` first.
        """
        if blocks > self.free:
            raise RuntimeError(f"{blocks} blocks asked for, {self.free} free of {self.blocks}")
        self.free -= blocks
        self._blank -= blocks
        idle = self._idle
        while self._blank < 0:
            entry = next(iter(idle))
            held = idle[entry]
            if held + self._blank > 0:
                idle[entry] = held + self._blank
                self._blank = 0
            else:
                del idle[entry]
                self._blank += held
                self._forget(entry)

    def register(self, keys: Sequence[int]) -> Sequence[int]:
        """Name the content of blocks in use that have just become full; returns their handles."""
        resident = self._resident
        if not self._copies and resident.isdisjoint(keys):
            resident.update(keys)
            return keys
        return [self._register_one(key) for key in keys]

    def release(
        self, handles: Sequence[int], blank: int, segment_id: int = 0, private: int = 0
    ) -> None:
        """Give back a sequence's blocks.

        Tails are queued first, so that a prefix outlives what hangs on it.

        Parameters
        ----------
        handles : its named blocks, in block order; they stand before its private ones
        blank : blocks without content
        private : named blocks of its private run `segment_id`
        """
        self._blank += blank
        self.free += blank + private
        idle = self._idle
        if private:
            run = _run(segment_id)
            if run in idle:
                raise RuntimeError(f"private run {segment_id} has two owners")
            idle[run] = private
        extra = self._extra_refs
        for handle in reversed(handles):
            users = extra.get(handle)
            if users is None:
                idle[handle] = 1
                self.free += 1
            elif users == 1:
                del extra[handle]
            else:
                extra[handle] = users - 1

    def check(self, tables: Iterable[tuple[Sequence[int], int]]) -> None:
        """Count the pool a second way, from what its users hold.

        `tables` has, for each user, its handles and the number of its other blocks. Raises
        RuntimeError with the numbers if a block is lost, doubled or wrongly named.
        """
        users: dict[int, int] = {}
        other = 0
        for handles, rest in tables:
            other += rest
            for handle in handles:
                users[handle] = users.get(handle, 0) + 1
        free = self._blank + sum(self._idle.values())
        if free != self.free or len(users) + other + free != self.blocks:
            raise RuntimeError(
                f"{len(users)} + {other} blocks used, {self.free} free (counted {free}) "
                f"of {self.blocks}"
            )
        extra = {handle: n - 1 for handle, n in users.items() if n > 1}
        if extra != self._extra_refs:
            raise RuntimeError(f"shared blocks: counted {extra}, kept {self._extra_refs}")
        if users.keys() & self._idle.keys():
            raise RuntimeError(f"blocks both used and free: {users.keys() & self._idle.keys()}")
        named = {entry for entry in self._idle if not _is_run(entry)}
        if users.keys() | named != self._resident:
            raise RuntimeError("named blocks are neither used nor in the free queue")
        copies = {handle for handles in self._copies.values() for handle in handles}
        if not copies <= self._resident or self._copied_key.keys() - copies:
            raise RuntimeError(f"copies point at blocks that are gone: {copies - self._resident}")

    def _register_one(self, key: int) -> int:
        handle = key
        if key in self._resident:
            handle = self._next_copy
            self._next_copy -= 2
            self._copied_key[handle] = key
            self._copies.setdefault(key, [key]).append(handle)
        elif key in self._copies:
            self._copies[key].append(key)
        self._resident.add(handle)
        return handle

    def _forget(self, entry: int) -> None:
        if _is_run(entry):
            return
        self._resident.discard(entry)
        key = self._copied_key.pop(entry, entry)
        held = self._copies.get(key)
        if held is None:
            return
        held.remove(entry)
        if not held or held == [key]:
            del self._copies[key]


def _run(segment_id: int) -> int:
    """The queue's name of a private run: even and negative, where copies are odd."""
    return -2 * segment_id - 2


def _is_run(entry: int) -> bool:
    return entry < 0 and entry % 2 == 0
