"""Static batching: fill a batch, run it until its last sequence ends, return all together.

The baseline before continuous batching. A batch goes when `max_num_seqs` requests wait or one
has waited its time. Prompts are computed whole, in one step; every sequence decodes as long as
the longest, and nothing is delivered before the end. Blocks for all of it are there before it
starts, so nothing is preempted.
"""

from servecast.sim.plan import SchedulerLimits, StepPlan
from servecast.sim.scheduler import Scheduler
from servecast.sim.sequence import RUNNING, WAITING, Sequence


class StaticScheduler(Scheduler):
    """A scheduler that admits only when nothing runs."""

    streams = False

    def __init__(self, limits: SchedulerLimits, tail_sequences: int = 0) -> None:
        if limits.async_scheduling or limits.enable_prefix_caching or limits.spec_method:
            raise ValueError("a static batch knows no async scheduling, prefix cache or drafts")
        super().__init__(limits, tail_sequences=tail_sequences)
        #: sequences that have waited their time for a full batch
        self._overdue: set[Sequence] = set()

    @property
    def patient(self) -> bool:
        return not self.running and not self._due()

    def hurry(self, seq: Sequence) -> None:
        self._overdue.add(seq)

    def plan(self) -> StepPlan:
        plan = StepPlan(self._number)
        self._number += 1
        if self.running:
            self._decode(plan)
        elif self._due():
            self._fill(plan)
        if not plan.empty:
            self._in_flight = plan
        return plan

    def commit(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        for seq in plan.finishing:
            seq.output_limit = seq.asked_tokens
        super().commit(plan)
        return []

    def _due(self) -> bool:
        waiting = self.waiting
        if not waiting:
            return False
        if len(waiting) >= self.limits.max_num_seqs or waiting.peek().promoted:
            return True
        self._overdue = {seq for seq in self._overdue if seq.status == WAITING}
        return bool(self._overdue)

    def _fill(self, plan: StepPlan) -> None:
        batch: list[Sequence] = []
        alone = self.waiting.peek().promoted
        for seq in self.waiting:
            if len(batch) == self.limits.max_num_seqs or (alone and not seq.promoted):
                break
            if self._blocks([*batch, seq]) > self.pool.free:
                break
            batch.append(seq)
        longest = max((seq.output_limit for seq in batch), default=0)
        for seq in batch:
            self.waiting.popleft()
            seq.output_limit = longest
            self._enter(seq, 0, seq.prompt_tokens, [], 0)
            seq.status = RUNNING
            plan.chunks.append((seq, seq.prompt_tokens, 0))
        plan.admitted = [(seq, 0) for seq in batch]
        if batch:
            self._advance_chunks(plan)

    def _blocks(self, batch: list[Sequence]) -> int:
        """Blocks of a batch in which every sequence grows by the longest output."""
        longest = max(seq.output_limit for seq in batch)
        size = self.limits.block_size
        return sum(-(-(seq.prompt_tokens + longest) // size) for seq in batch)
