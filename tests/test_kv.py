"""The pool under random use, counted a second way after every move."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servecast.sim.kv import KVPool

BLOCKS = 24


class Owner:
    def __init__(self, keys: list[int], segment_id: int) -> None:
        self.keys = keys
        self.segment_id = segment_id
        self.handles: list[int] = []
        self.private = 0
        self.blank = 0


class PoolMachine(RuleBasedStateMachine):
    """Owners allot, fill, share and free blocks; a plain model of the free queue runs beside."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(BLOCKS, 16)
        self.owners: list[Owner] = []
        self.runs: dict[int, int] = {}
        self.segments = count(1)
        #: the model: content of free blocks in order of eviction, a private run as its blocks
        self.queue: list[tuple[str, int]] = []

    def model_take(self, blocks: int) -> None:
        empty = BLOCKS - len(self.queue) - self.used()
        del self.queue[: max(0, blocks - empty)]

    def used(self) -> int:
        named = {handle for owner in self.owners for handle in owner.handles}
        return len(named) + sum(owner.private + owner.blank for owner in self.owners)

    @rule(head=st.integers(0, 2), length=st.integers(1, 6), private=st.booleans())
    def admit(self, head: int, length: int, private: bool) -> None:
        """Look a prefix up, share what is there, allot and name the rest."""
        keys = [head * 100 + i for i in range(length)]
        owner = Owner(keys, next(self.segments))
        hits = self.pool.lookup(keys)
        assert hits == [h for h in hits if h < 0 or h in keys]
        need = length - len(hits) + self.pool.count_idle(hits)
        if need > self.pool.free:
            return
        self.pool.share(hits)
        self.queue = [e for e in self.queue if e not in [("block", h) for h in hits]]
        owner.handles = list(hits)
        self.owners.append(owner)
        more = length - len(hits)
        self.model_take(more)
        self.pool.take(more)
        if private:
            owner.private = more
        else:
            owner.handles.extend(self.pool.register(keys[len(hits) :]))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        if self.pool.free:
            self.model_take(1)
            self.pool.take(1)
            owner.blank += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        still = {handle for other in self.owners for handle in other.handles}
        self.pool.release(owner.handles, owner.blank, owner.segment_id, owner.private)
        self.queue += [("run", owner.segment_id)] * owner.private
        self.queue += [("block", h) for h in reversed(owner.handles) if h not in still]
        if owner.private:
            self.runs[owner.segment_id] = owner.private

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        """The owner of a private run comes back for it."""
        segment = data.draw(st.sampled_from(sorted(self.runs)))
        blocks = self.pool.private_blocks(segment)
        assert blocks == self.queue.count(("run", segment))
        del self.runs[segment]
        if blocks:
            self.pool.reclaim(segment, blocks)
            self.queue = [entry for entry in self.queue if entry != ("run", segment)]
            owner = Owner([], segment)
            owner.private = blocks
            self.owners.append(owner)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check((o.handles, o.private + o.blank) for o in self.owners)
        assert self.pool.free == BLOCKS - self.used()

    @invariant()
    def evicts_in_the_order_of_the_model(self) -> None:
        for key in (0, 100, 200):
            held = {h for o in self.owners for h in o.handles} | {
                h for kind, h in self.queue if kind == "block"
            }
            if not any(h < 0 for h in held):
                assert bool(self.pool.lookup([key])) == (key in held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_look_up_returns_the_copy_named_first() -> None:
    pool = KVPool(8, 16)
    pool.take(2)
    (first,) = pool.register([7])
    (second,) = pool.register([7])
    assert pool.lookup([7]) == [first]
    pool.release([first], 0)
    pool.take(7)  # evicts the first copy
    assert pool.lookup([7]) == [second]


def test_tails_are_evicted_before_heads() -> None:
    pool = KVPool(4, 16)
    pool.take(4)
    handles = pool.register([1, 2, 3, 4])
    pool.release(handles, 0)
    pool.take(1)
    assert pool.lookup([1, 2, 3, 4]) == [1, 2, 3]


def test_taking_more_than_is_free_is_a_broken_law() -> None:
    pool = KVPool(4, 16)
    with pytest.raises(RuntimeError, match="5 blocks asked for, 4 free of 4"):
        pool.take(5)


def test_check_finds_a_lost_block() -> None:
    pool = KVPool(4, 16)
    pool.take(1)
    with pytest.raises(RuntimeError, match="of 4"):
        pool.check([])
