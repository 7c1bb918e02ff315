"""The paged KV pool of vLLM V1: which blocks are free, and whose content they still hold.

Physical block numbers are not kept: nothing observable depends on them. A block that holds
hashed content is known by a *handle*, and the free queue of vLLM falls into two parts that
never mix: blocks without content at the front (a count), blocks with content behind them in
order of eviction (`_idle`). Allotting blocks eats the count first, then evicts from the front.

A handle is the content's key itself for the first block that holds it; a second block with the
same content (two prompts computed side by side) gets a negative handle of its own.
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
        self._blank = blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._resident: set[int] = set()
        self._extra_refs: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        self._copied_key: dict[int, int] = {}
        self._next_copy = -1

    @property
    def free(self) -> int:
        """Blocks that can be allotted, those with reusable content included."""
        return self._blank + len(self._idle)

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
        return sum(1 for handle in handles if handle in idle) if idle else 0

    def share(self, handles: Sequence[int]) -> None:
        """Add a user to blocks found by `lookup`."""
        idle, extra = self._idle, self._extra_refs
        for handle in handles:
            if handle in idle:
                del idle[handle]
            else:
                extra[handle] = extra.get(handle, 0) + 1

    def take(self, blocks: int) -> None:
        """Allot `blocks` empty blocks, evicting content where needed.

        Raises RuntimeError if the caller did not check `free` first.
        """
        if blocks <= self._blank:
            self._blank -= blocks
            return
        evict = blocks - self._blank
        if evict > len(self._idle):
            raise RuntimeError(f"{blocks} blocks asked for, {self.free} free of {self.blocks}")
        self._blank = 0
        pop = self._idle.popitem
        evicted = [pop(last=False)[0] for _ in range(evict)]
        self._resident.difference_update(evicted)
        if self._copies:
            for handle in evicted:
                self._forget_copy(handle)

    def register(self, keys: Sequence[int]) -> Sequence[int]:
        """Name the content of blocks in use that have just become full; returns their handles."""
        resident = self._resident
        if not self._copies and resident.isdisjoint(keys):
            resident.update(keys)
            return keys
        return [self._register_one(key) for key in keys]

    def release(self, handles: Sequence[int], blank: int) -> None:
        """Give back a sequence's blocks: `handles` in block order, and `blank` without content.

        Tails are queued first, so that a prefix outlives what hangs on it.
        """
        self._blank += blank
        extra = self._extra_refs
        if not extra or extra.keys().isdisjoint(handles):
            self._idle.update(dict.fromkeys(reversed(handles)))
            return
        for handle in reversed(handles):
            users = extra.get(handle)
            if users is None:
                self._idle[handle] = None
            elif users == 1:
                del extra[handle]
            else:
                extra[handle] = users - 1

    def check(self, tables: Iterable[tuple[Sequence[int], int]]) -> None:
        """Count the pool a second way, from what its users hold: (handles, blank) of each.

        Raises RuntimeError with the numbers if a block is lost, doubled or wrongly named.
        """
        users: dict[int, int] = {}
        blank_used = 0
        for handles, blank in tables:
            blank_used += blank
            for handle in handles:
                users[handle] = users.get(handle, 0) + 1
        if len(users) + blank_used + self.free != self.blocks:
            raise RuntimeError(
                f"{len(users)} + {blank_used} blocks used, {self.free} free of {self.blocks}"
            )
        extra = {handle: n - 1 for handle, n in users.items() if n > 1}
        if extra != self._extra_refs:
            raise RuntimeError(f"shared blocks: counted {extra}, kept {self._extra_refs}")
        if users.keys() & self._idle.keys():
            raise RuntimeError(f"blocks both used and free: {users.keys() & self._idle.keys()}")
        if users.keys() | self._idle.keys() != self._resident:
            raise RuntimeError("named blocks are neither used nor in the free queue")
        named = {h for hs in self._copies.values() for h in hs}
        if not named <= self._resident or self._copied_key.keys() - named:
            raise RuntimeError(f"copies point at blocks that are gone: {named - self._resident}")

    def _register_one(self, key: int) -> int:
        handle = key
        if key in self._resident:
            handle = self._next_copy
            self._next_copy -= 1
            self._copied_key[handle] = key
            self._copies.setdefault(key, [key]).append(handle)
        elif key in self._copies:
            self._copies[key].append(key)
        self._resident.add(handle)
        return handle

    def _forget_copy(self, handle: int) -> None:
        key = self._copied_key.pop(handle, handle)
        held = self._copies.get(key)
        if held is None:
            return
        held.remove(handle)
        if not held or held == [key]:
            del self._copies[key]
