"""What a sequence holds of the pool: found, allotted, named, swapped and given back."""

from servecast.sim.kv import KVPool
from servecast.sim.plan import SchedulerLimits
from servecast.sim.sequence import Sequence


class SequenceBlocks:
    """The pool as the scheduler uses it, sequence by sequence.

    Parameters
    ----------
    limits : vLLM's settings
    private_runs : keep text that nobody else can ask for as one run; False names every block
    """

    def __init__(self, limits: SchedulerLimits, *, private_runs: bool) -> None:
        self.limits = limits
        self.pool = KVPool(limits.num_gpu_blocks - 1, limits.block_size)
        # Priorities can preempt a sequence in the very step that scheduled it, and EAGLE leaves
        # the last block of a hit: both may compute a cached block again beside the old one.
        self.private_runs = (
            private_runs
            and limits.enable_prefix_caching
            and limits.scheduling_policy == "fcfs"
            and limits.spec_method is None
        )
        self._watermark_blocks = int(limits.watermark * limits.num_gpu_blocks)
        self._swap_room = limits.swap_blocks
        self._size = limits.block_size
        self._lookahead = limits.lookahead_tokens

    def arrive(self, seq: Sequence) -> None:
        """Note how much of a sequence others may share."""
        if self.private_runs and seq.shared:
            seq.shared_blocks = seq.shared[-1][1] // self.limits.block_size

    def names_as_it_grows(self, seq: Sequence) -> bool:
        """Whether blocks that fill from now on are content that others may ask for."""
        return self.limits.enable_prefix_caching and (
            not self.private_runs or len(seq.handles) < seq.shared_blocks
        )

    # ---------------------------------------------------------------- admission

    def hits(self, seq: Sequence) -> tuple[list[int], int]:
        """Cached blocks at the head of a sequence, at least its last token left to compute.

        Returns the handles of named blocks, and how many blocks of its private run follow.
        """
        limits = self.limits
        if not limits.enable_prefix_caching:
            return [], 0
        most = (seq.known_tokens - 1) // limits.block_size
        if not self.private_runs:
            hits = self.pool.lookup(seq.keys(limits.block_size, 0, most))
            if hits and limits.spec_method == "eagle":
                hits.pop()
            return hits, 0
        shared = seq.shared_blocks
        if not shared:
            return [], self.pool.private_blocks(seq.segment_id)
        hits = self.pool.lookup(seq.keys(limits.block_size, 0, min(shared, most)))
        if len(hits) < shared:
            return hits, 0
        return hits, self.pool.private_blocks(seq.segment_id)

    def admissible(
        self, seq: Sequence, upto: int, hits: list[int], private: int, *, alone: bool
    ) -> bool:
        """Whether a sequence may enter with tokens up to `upto`; `alone`: nothing runs yet."""
        limits = self.limits
        free = self.pool.free
        if not alone:
            free -= self._watermark_blocks
        # A hit that lies in the free queue costs a free block all the same.
        held = len(hits) - self.pool.count_idle(hits) if hits else 0
        if limits.scheduler_reserve_full_isl:
            whole = min(seq.known_tokens, limits.max_model_len)
            if -(-whole // limits.block_size) - held > free:
                return False
        return max(self.slots_needed(upto), len(hits) + private) - held <= free

    def enter(self, seq: Sequence, computed: int, upto: int, hits: list[int], private: int) -> None:
        """Give an admitted sequence what was found, and blocks for tokens up to `upto`."""
        if hits:
            self.pool.share(hits)
        if private:
            self.pool.reclaim(seq.segment_id, private)
        seq.handles = hits
        seq.private = private
        seq.blocks = len(hits) + private
        seq.computed_tokens = computed
        self.grow(seq, upto)
        self.name(seq, min(upto, seq.known_tokens))

    # ---------------------------------------------------------------- growth

    def slots_needed(self, tokens: int) -> int:
        """Blocks for so many tokens and a drafter's lookahead."""
        tokens = min(tokens + self._lookahead, self.limits.max_model_len)
        return -(-tokens // self._size)

    def fits(self, seq: Sequence, tokens: int) -> bool:
        """Whether there are blocks for `tokens` more."""
        return self.slots_needed(seq.computed_tokens + tokens) - seq.blocks <= self.pool.free

    def grow(self, seq: Sequence, upto: int) -> None:
        """Allot blocks for tokens up to `upto`."""
        more = self.slots_needed(upto) - seq.blocks
        if more > 0:
            self.pool.take(more)
            seq.blocks += more

    def name(self, seq: Sequence, upto: int) -> None:
        """Name a sequence's full blocks up to token `upto`."""
        if not self.limits.enable_prefix_caching:
            return
        full = upto // self.limits.block_size
        if self.private_runs:
            private = full - seq.shared_blocks
            if private > seq.private:
                seq.private = private
            if not seq.shared_blocks:
                return
            full = min(full, seq.shared_blocks)
        named = len(seq.handles)
        if full > named:
            keys = seq.keys(self.limits.block_size, named, full)
            seq.handles.extend(self.pool.register(keys))

    # ---------------------------------------------------------------- the way out

    def release(self, seq: Sequence) -> None:
        """Give all blocks of a sequence back."""
        blank = seq.blocks - len(seq.handles) - seq.private
        self.pool.release(seq.handles, blank, seq.segment_id, seq.private)
        seq.handles = []
        seq.private = seq.blocks = 0

    def swap_out(self, seq: Sequence) -> int:
        """Keep a sequence's KV in host memory, if there is room: blocks moved."""
        blocks = -(-seq.computed_tokens // self.limits.block_size)
        if blocks > self._swap_room:
            return 0
        self._swap_room -= blocks
        seq.kept_tokens = seq.computed_tokens
        return blocks

    def swap_in(self, seq: Sequence, found: int) -> int:
        """Fetch what a look-up did not find: blocks moved."""
        if not seq.kept_tokens:
            return 0
        blocks = -(-seq.kept_tokens // self.limits.block_size)
        self._swap_room += blocks
        seq.kept_tokens = 0
        return max(0, blocks - found)
