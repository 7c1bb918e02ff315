"""vLLM V1's scheduler: each step lets computed tokens catch up with known tokens.

No clock and no SimPy here. `plan` decides one step, `commit` takes its output; with asynchronous
scheduling the next step is planned before the output of the last one is committed. The rules are
those recorded from vLLM 0.32.0; `docs/parity.md` lists them with the traces that hold them.

Two ways lead to the same plan. `_walk` visits every running sequence in order, as vLLM does: it
is the reference, and it alone can preempt or let the budget bind in the middle.
`_plan_aggregate` serves the common step in which every running sequence gets what it wants: decodes
are counted, not visited. It steps aside whenever the order could matter. With drafts every
sequence has luck of its own and is visited; where all get what they want, `_walk_together` adds
their wants up first.
"""

from collections.abc import Iterable

from servecast.sim.blocks import SequenceBlocks
from servecast.sim.decodes import DecodeAggregate
from servecast.sim.plan import SchedulerLimits, StepPlan
from servecast.sim.sequence import (
    FINISHED,
    PREEMPTED,
    RUNNING,
    WAITING,
    FCFSQueue,
    PriorityQueue,
    Sequence,
)
from servecast.sim.speculation import Drafting, FullDrafts


class Scheduler:
    """Queues, pool and running sequences of one replica.

    Parameters
    ----------
    limits : vLLM's settings
    aggregate : count decodes where possible; False walks every sequence in every step
    keep_order : let every plan list its sequences in scheduling order
    private_runs : see `SequenceBlocks`
    drafting : how many tokens are drafted, and accepted; full drafts, none accepted, if left out
    tail_sequences : of the longest decodes, how many a plan tells
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        aggregate: bool = True,
        keep_order: bool = False,
        private_runs: bool = True,
        drafting: Drafting | None = None,
        tail_sequences: int = 0,
    ) -> None:
        self.limits = limits
        self.kv = SequenceBlocks(limits, private_runs=private_runs)
        self.pool = self.kv.pool
        self.waiting: FCFSQueue | PriorityQueue = (
            FCFSQueue() if limits.scheduling_policy == "fcfs" else PriorityQueue()
        )
        #: in running order, which is the order of admission: keyed by `serial`
        self.running: dict[int, Sequence] = {}
        #: running sequences outside the aggregate that have tokens to compute, in running order
        self.explicit: list[Sequence] = []
        self.decodes = DecodeAggregate(limits.block_size, tail_sequences)
        self.aggregate = aggregate and limits.spec_method is None
        self.keep_order = keep_order
        self._drafting = drafting or FullDrafts(limits.num_speculative_tokens)
        self._in_flight: StepPlan | None = None
        #: tokens of a step; adaptive control may lower it, never below max_num_seqs
        self.token_budget = limits.max_num_batched_tokens
        self._serial = 0
        self._number = 0

    # ---------------------------------------------------------------- what the engine calls

    #: whether tokens are delivered as they come
    streams = True

    @property
    def patient(self) -> bool:
        """Whether an empty plan means that more requests are waited for."""
        return False

    def hurry(self, seq: Sequence) -> None:
        """Do not let this one wait for more requests."""

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that has just arrived."""
        self.kv.arrive(seq)
        self.waiting.append(seq)

    @property
    def unfinished(self) -> bool:
        """Anything waiting or running."""
        return bool(self.running) or len(self.waiting) > 0

    def plan(self) -> StepPlan:
        """Decide the next step and allot its blocks."""
        plan = StepPlan(self._number)
        self._number += 1
        if not (self.aggregate and self._plan_aggregate(plan)):
            self._walk(plan)
        if not plan.empty:
            self._in_flight = plan
        return plan

    def steps_alike(self, plan: StepPlan) -> int:
        """How many more steps, beyond `plan` just made, are sure to be planned the same.

        Holds as long as nobody arrives and no step in flight frees anything. A queue whose head
        did not fit stays blocked: decodes only take blocks, and slots and budget stand still.
        """
        if self.explicit or not plan.uniform or plan.admitted or plan.resumed:
            return 0
        return self.decodes.steps_within(self.pool.free, self.decodes.steps_to_end())

    def extend(self, plan: StepPlan, steps: int) -> None:
        """Let `plan`, just made, cover `steps` more steps (at most `steps_alike`)."""
        if steps:
            self._advance_decodes(plan, steps)
            plan.steps += steps

    def commit(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Take the output of a plan's last step; returns (sequence, tokens) as delivered.

        Sequences that stay in the aggregate deliver one token each and are not listed.
        """
        if self._in_flight is plan:
            self._in_flight = None
        if not (plan.chunks or plan.finishing or plan.unsettled):
            return []
        return self._commit_aggregate(plan) if self.aggregate else self._commit_walk(plan)

    def check(self) -> None:
        """Hold the pool and the aggregate against what the sequences say (slow; for tests)."""
        size, tick = self.limits.block_size, self.decodes.tick
        tables = []
        members = 0
        for seq in self.running.values():
            blocks = seq.blocks
            if seq.aggregated:
                members += 1
                blocks = -(-(seq.base + tick) // size)
            tables.append((seq.handles, blocks - len(seq.handles)))
        self.pool.check(tables)
        if members != self.decodes.count:
            raise RuntimeError(f"{members} sequences decode, {self.decodes.count} counted")
        if len(self.running) > self.limits.max_num_seqs:
            raise RuntimeError(f"{len(self.running)} run, over {self.limits.max_num_seqs}")

    # ---------------------------------------------------------------- the common step

    def _plan_aggregate(self, plan: StepPlan) -> bool:
        """Plan a step in which nobody has to give way; False (nothing touched) otherwise."""
        decodes = self.decodes
        budget = self.token_budget - decodes.count
        need = len(decodes.crossing())
        chunks: list[tuple[Sequence, int]] = []
        if self.explicit:
            if budget < self._wanted() and not self._explicit_last():
                return False
            chunks, budget, more = self._chunks(budget)
            need += more
        if need > self.pool.free:
            return False
        if self.keep_order:
            plan.scheduled = self._in_running_order(chunks)
        if decodes.count:
            self._decode(plan)
        for seq, tokens in chunks:
            self.kv.grow(seq, seq.computed_tokens + tokens)
            self.kv.name(seq, min(seq.computed_tokens + tokens, seq.known_tokens))
            plan.chunks.append((seq, tokens, seq.computed_tokens))
        if self.waiting:
            self._admit(plan, budget, budget)
        if plan.chunks:
            self._advance_chunks(plan)
        return True

    def _wanted(self) -> int:
        threshold = self._threshold()
        wanted = 0
        for seq in self.explicit:
            want = seq.known_tokens + seq.placeholders - seq.computed_tokens
            wanted += min(want, threshold) if threshold else want
        return wanted

    def _explicit_last(self) -> bool:
        """Whether every decode stands before every explicit sequence in running order."""
        first = self.explicit[0].serial
        for seq in reversed(self.running.values()):
            if seq.aggregated:
                return seq.serial < first
        return True

    def _chunks(self, budget: int) -> tuple[list[tuple[Sequence, int]], int, int]:
        """What explicit sequences get of `budget`: the chunks, what is left, blocks they need."""
        threshold, size = self._threshold(), self.limits.block_size
        chunks: list[tuple[Sequence, int]] = []
        need = 0
        for seq in self.explicit:
            if budget == 0:
                break
            want = seq.known_tokens + seq.placeholders - seq.computed_tokens
            if 0 < threshold < want:
                want = threshold
            tokens = min(want, budget, self.limits.max_model_len - seq.computed_tokens - 1)
            if tokens <= 0:
                continue
            budget -= tokens
            need += -(-(seq.computed_tokens + tokens) // size) - seq.blocks
            chunks.append((seq, tokens))
        return chunks, budget, need

    def _in_running_order(self, chunks: list[tuple[Sequence, int]]) -> dict[Sequence, int]:
        given = dict(chunks)
        return {
            seq: given.get(seq, 1)
            for seq in self.running.values()
            if seq.aggregated or seq in given
        }

    def _decode(self, plan: StepPlan) -> None:
        """Let every member of the aggregate decode in a step."""
        decodes = self.decodes
        plan.decodes = decodes.count
        plan.context_tokens = decodes.context_tokens + decodes.count
        plan.longest = decodes.longest()
        self._advance_decodes(plan, 1)

    def _advance_decodes(self, plan: StepPlan, steps: int) -> None:
        """Allot the blocks of `steps` decode steps, name what becomes full, move the tick."""
        decodes = self.decodes
        size, tick, buckets = decodes.block_size, decodes.tick, decodes.buckets
        need = len(decodes.crossing()) if steps == 1 else decodes.crossings(steps)
        if need:
            self.pool.take(need)
        if decodes.naming:
            # A block is named once its last token is known: when the step that computes it is
            # planned, or, if outputs lag a step behind, one step later.
            lag = 0 if self.limits.async_scheduling else 1
            for j in range(min(steps, size)):
                bucket = buckets[(tick + j + lag) % size]
                if bucket:
                    rounds = (steps - 1 - j) // size
                    for seq in bucket:
                        self.kv.name(seq, seq.base + tick + j + lag + rounds * size)
        ended = decodes.advance(steps)
        if ended:
            plan.finishing = ended
            if self.limits.async_scheduling:
                # They are running until their output is in, and may be preempted before.
                for seq in ended:
                    self.kv.name(seq, seq.last_position - 1)

    def _advance_chunks(self, plan: StepPlan) -> None:
        """Move explicit sequences on; those that caught up decode from now on."""
        number, late = plan.number, self.limits.async_scheduling
        still: list[Sequence] = []
        completing: list[Sequence] = []
        finishing: list[Sequence] = []
        for seq, tokens, _ in plan.chunks:
            seq.computed_tokens += tokens
            seq.scheduled_step = number
            if seq.computed_tokens < seq.known_tokens + seq.placeholders:
                still.append(seq)
                continue
            completing.append(seq)
            if late:
                seq.placeholders += 1
            if seq.computed_tokens >= seq.last_position:
                finishing.append(seq)
            else:
                self._join(seq)
        plan.completing = completing
        if finishing:
            plan.finishing = sorted((*plan.finishing, *finishing), key=_serial)
        if self.explicit:
            moved = {seq for seq, _, _ in plan.chunks}
            kept = [seq for seq in self.explicit if seq not in moved]
            still = sorted(kept + still, key=_serial) if kept else still
        self.explicit = still

    def _join(self, seq: Sequence) -> None:
        """Let a sequence decode in the aggregate from the next step on."""
        seq.naming = self.kv.names_as_it_grows(seq)
        self.decodes.join(seq)

    # ---------------------------------------------------------------- the walk

    def _walk(self, plan: StepPlan) -> None:
        """Plan a step as vLLM does, one running sequence after the other."""
        limits = self.limits
        if limits.spec_method and self._walk_together(plan):
            return
        before = self._dissolve() if self.aggregate else []
        slots = limits.draft_slots
        budget = room = self.token_budget
        threshold = self._threshold()
        scheduled: dict[Sequence, int] = {}
        spec: dict[Sequence, int] = {}
        preempted: list[Sequence] = []
        prefilling = False
        order = list(self.running.values())
        i = 0
        while i < len(order) and budget > 0 and room > slots:
            seq = order[i]
            i += 1
            tokens = self._wants(seq, threshold, min(budget, room - slots))
            if tokens <= 0:
                continue
            while not self.kv.fits(seq, tokens):
                victim = self._victim(order)
                at = order.index(victim)
                del order[at]
                if at < i:
                    i -= 1
                given = scheduled.pop(victim, None)
                if given is not None:
                    budget += given
                    room += given + slots
                    spec.pop(victim, None)
                plan.swapped += self._preempt(victim)
                preempted.append(victim)
                if victim is seq:
                    break
            else:
                prefilling |= seq.prefilling
                self._schedule_running(seq, tokens, spec)
                scheduled[seq] = tokens
                budget -= tokens
                room -= tokens + slots
                continue
            break
        plan.chunks = [(seq, tokens, seq.computed_tokens) for seq, tokens in scheduled.items()]
        plan.scheduled = scheduled
        plan.spec = spec
        plan.preempted = preempted
        if not preempted and self.waiting:
            self._admit(plan, budget, room, pads=not prefilling, decoding=bool(scheduled))
        if self.aggregate:
            self._regroup(plan, before)
        else:
            self._advance_walk(plan)

    def _walk_together(self, plan: StepPlan) -> bool:
        """The same where every running sequence gets what it wants; False (nothing touched) else.

        Wants and blocks are added up first, so that nobody is asked for twice.
        """
        limits, kv = self.limits, self.kv
        if self._threshold():
            return False
        longest, size, slots = limits.max_model_len, limits.block_size, limits.draft_slots
        lookahead = limits.lookahead_tokens
        left, need, prefilling = self.token_budget, 0, False
        wanted: list[tuple[Sequence, int, int]] = []
        for seq in self.running.values():
            computed, ahead = seq.computed_tokens, seq.placeholders
            if ahead > 0 and computed + 2 - ahead >= seq.prompt_tokens + seq.output_limit:
                continue
            tokens = seq.known_tokens + seq.drafts + ahead - computed
            if tokens >= longest - computed:
                tokens = longest - computed - 1
            if tokens <= 0:
                continue
            left -= tokens + slots
            upto = computed + tokens + lookahead
            more = -(-(upto if upto < longest else longest) // size) - seq.blocks
            if more > 0:
                need += more
            prefilling |= seq.prefilling
            wanted.append((seq, tokens, more))
        if left < 0 or need > self.pool.free:
            return False
        if need:
            self.pool.take(need)
        spec: dict[Sequence, int] = {}
        naming = limits.enable_prefix_caching
        decodes = verified = context = 0
        contexts: list[int] = []
        for seq, tokens, more in wanted:
            if more > 0:
                seq.blocks += more
            computed, known = seq.computed_tokens, seq.known_tokens
            upto = computed + tokens
            if naming and (upto if upto < known else known) // size > len(seq.handles):
                kv.name(seq, min(upto, known))
            drafts = seq.drafts
            made = 0
            if drafts:
                made = upto - known - seq.placeholders
                if made > 0:
                    spec[seq] = made = made if made < drafts else drafts
                seq.drafts = 0
            if tokens == 1 + made and computed >= seq.prompt_tokens:
                decodes += 1
                verified += tokens
                context += upto
                contexts.append(upto)
        plan.chunks = [(seq, tokens, seq.computed_tokens) for seq, tokens, _ in wanted]
        plan.scheduled = {seq: tokens for seq, tokens, _ in wanted}
        plan.spec = spec
        if self.waiting:
            budget = left + slots * len(wanted)
            self._admit(plan, budget, left, pads=not prefilling, decoding=bool(wanted))
        elif decodes == len(wanted):
            plan.verifying = decodes, verified, context
            plan.longest = self._longest(contexts)
        self._advance_walk(plan)
        return True

    def _longest(self, contexts: list[int]) -> list[int]:
        tail = self.decodes.tail
        return sorted(contexts)[-tail:] if tail else []

    def _dissolve(self) -> list[Sequence]:
        """Give every decode its own counters back, as they stand before the next step."""
        members = self.decodes.dissolve()
        pending = 1 if self._in_flight is not None else 0
        for seq in members:
            seq.placeholders = pending
            seq.known_tokens = seq.computed_tokens + 1 - pending
            self.kv.name(seq, seq.computed_tokens - pending)
        return members

    def _wants(self, seq: Sequence, threshold: int, most: int) -> int:
        """Tokens to schedule for a running sequence, 0 or less for none."""
        if (
            seq.placeholders > 0
            and seq.computed_tokens + 2 - seq.placeholders >= seq.prompt_tokens + seq.output_limit
        ):
            return 0
        tokens = seq.known_tokens + seq.drafts + seq.placeholders - seq.computed_tokens
        if 0 < threshold < tokens:
            tokens = threshold
        return min(tokens, most, self.limits.max_model_len - seq.computed_tokens - 1)

    def _victim(self, order: list[Sequence]) -> Sequence:
        if self.limits.scheduling_policy == "priority":
            return max(order, key=lambda seq: (seq.priority, seq.order))
        return order[-1]

    def _schedule_running(self, seq: Sequence, tokens: int, spec: dict[Sequence, int]) -> None:
        self.kv.grow(seq, seq.computed_tokens + tokens)
        self.kv.name(seq, min(seq.computed_tokens + tokens, seq.known_tokens))
        if seq.drafts:
            drafts = tokens + seq.computed_tokens - seq.known_tokens - seq.placeholders
            if drafts > 0:
                spec[seq] = min(drafts, seq.drafts)
            seq.drafts = 0

    def _preempt(self, seq: Sequence) -> int:
        """Take everything from a running sequence and put it at the head of the queue.

        Returns the blocks that go to host memory.
        """
        in_flight = self._in_flight
        swapped = self.kv.swap_out(seq)
        self.kv.release(seq)
        seq.computed_tokens = 0
        seq.drafts = 0
        if in_flight is not None and seq.scheduled_step == in_flight.number:
            seq.stale = in_flight.stale = True
        seq.placeholders = 0
        seq.preemptions += 1
        seq.status = PREEMPTED
        del self.running[seq.serial]
        if seq in self.explicit:
            self.explicit.remove(seq)
        self.waiting.put_back(seq)
        return swapped

    def _regroup(self, plan: StepPlan, before: list[Sequence]) -> None:
        """After a walk: those that decoded go back into the aggregate, the rest wait outside."""
        scheduled = plan.scheduled or {}
        decoding = [seq for seq in before if seq in scheduled]
        paused = [seq for seq in before if seq not in scheduled]
        chunked = set(decoding)
        plan.chunks = [entry for entry in plan.chunks if entry[0] not in chunked]
        late = self.limits.async_scheduling
        if paused:
            plan.interrupted = paused
            if self._in_flight is not None:
                self._in_flight.unsettled = paused
            self.explicit += [seq for seq in paused if seq.status == RUNNING]
            self.explicit.sort(key=_serial)
        plan.decodes += len(decoding)
        plan.longest = self._longest([seq.computed_tokens + 1 for seq in decoding])
        finishing: list[Sequence] = []
        for seq in decoding:
            seq.computed_tokens += 1
            seq.placeholders = 1 if late else 0
            seq.scheduled_step = plan.number
            plan.context_tokens += seq.computed_tokens
            if seq.computed_tokens >= seq.last_position:
                finishing.append(seq)
            else:
                self._join(seq)
        plan.finishing = sorted(finishing, key=_serial)
        if plan.chunks:
            self._advance_chunks(plan)

    def _advance_walk(self, plan: StepPlan) -> None:
        """Move every scheduled sequence on, as vLLM does after scheduling.

        Those that emit draft for their next step; with asynchronous scheduling the drafts are
        placeholders of that step at once.
        """
        late, spec, number = self.limits.async_scheduling, plan.spec, plan.number
        alike: int | None = 0
        if self.limits.spec_method:
            alike = self._drafting.begin(len(self.running), self._context_tokens)
        emitting: dict[Sequence, int] = {}
        context = 0
        for seq, tokens, _ in plan.chunks:
            seq.computed_tokens = computed = seq.computed_tokens + tokens
            seq.scheduled_step = number
            seq.prefilling = prefilling = computed < seq.known_tokens + seq.placeholders
            if prefilling:
                continue
            emitting[seq] = drafts = spec.get(seq, 0)
            context += computed
            if late:
                seq.placeholders += 1 + drafts
            if alike is not None:
                seq.drafting = alike
                if late:
                    seq.drafts = alike
        plan.emitting = emitting
        if alike is None:
            self._draft_unlike(plan, emitting)
        elif alike and emitting:
            plan.draft_passes = (len(emitting),) * min(alike, self._drafting.depth)
            plan.draft_context_tokens = context

    def _draft_unlike(self, plan: StepPlan, emitting: Iterable[Sequence]) -> None:
        """Let each sequence draft as many tokens as it may."""
        counts = [0] * self._drafting.depth
        for seq in emitting:
            tokens = seq.drafting = self._drafting.tokens(seq)
            if self.limits.async_scheduling:
                seq.drafts = tokens
            if tokens:
                for at in range(min(tokens, len(counts))):
                    counts[at] += 1
                plan.draft_context_tokens += seq.computed_tokens
        plan.draft_passes = tuple(count for count in counts if count)

    def _context_tokens(self) -> int:
        return sum(seq.computed_tokens for seq in self.running.values())

    # ---------------------------------------------------------------- admission

    def _admit(
        self,
        plan: StepPlan,
        budget: int,
        room: int,
        *,
        pads: bool = False,
        decoding: bool = False,
    ) -> None:
        """Let waiting sequences in while slots, tokens and blocks last; a misfit ends it.

        `pads`: one-token admissions may be widened to the shape of a verification; `decoding`:
        running sequences are scheduled beside them.
        """
        limits, waiting, running = self.limits, self.waiting, self.running
        if len(running) >= limits.max_num_seqs:
            return
        threshold, slots = self._threshold(), limits.draft_slots
        admitted: list[tuple[Sequence, int]] = []
        resumed: list[tuple[Sequence, int]] = []
        # Those that waited too long go ahead alone, in a batch as small as they are few.
        ahead = False
        while budget > 0 and room > slots and waiting and len(running) < limits.max_num_seqs:
            seq = waiting.peek()
            hits, private = self.kv.hits(seq)
            found = len(hits) + private
            computed = max(found * limits.block_size, seq.kept_tokens)
            most = min(budget, room - slots)
            tokens = seq.known_tokens - computed
            padded = 0
            if tokens == 1 and pads and self._may_pad(computed, decoding):
                padded = limits.num_speculative_tokens
                if 1 + padded > most:
                    break
                tokens += padded
            if 0 < threshold < tokens:
                tokens = threshold
            if tokens > most:
                if not limits.enable_chunked_prefill:
                    break
                tokens = most
            if not self.kv.admissible(seq, computed + tokens, hits, private, alone=not running):
                break
            if ahead and not seq.promoted:
                break
            ahead = seq.promoted
            waiting.popleft()
            plan.swapped += self.kv.swap_in(seq, found)
            self._enter(seq, computed, computed + tokens, hits, private)
            (admitted if seq.status == WAITING else resumed).append((seq, computed))
            seq.status = RUNNING
            plan.chunks.append((seq, tokens, computed))
            if plan.scheduled is not None:
                plan.scheduled[seq] = tokens
            if padded:
                plan.spec = {**plan.spec, seq: padded}
                plan.padded = [*plan.padded, seq]
            budget -= tokens
            room -= tokens + slots
        if admitted:
            plan.admitted = admitted
        if resumed:
            plan.resumed = resumed

    def _enter(
        self, seq: Sequence, computed: int, upto: int, hits: list[int], private: int
    ) -> None:
        """Give an admitted sequence its blocks for tokens up to `upto`, and its place."""
        self.kv.enter(seq, computed, upto, hits, private)
        seq.serial = self._serial
        self._serial += 1
        self.running[seq.serial] = seq

    def _may_pad(self, computed: int, decoding: bool) -> bool:
        """Whether there is reason and room to widen an admission of one token."""
        k = self.limits.num_speculative_tokens
        return (
            k > 0 and (decoding or computed > 0) and computed + 2 + k <= self.limits.max_model_len
        )

    def _threshold(self) -> int:
        """The cap on a long prefill, which holds only while there is somebody to starve."""
        threshold = self.limits.long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            return threshold
        return 0

    # ---------------------------------------------------------------- outputs

    def _commit_aggregate(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        for seq in plan.unsettled:
            seq.known_tokens += 1
            seq.stale = False
            if seq.status == RUNNING:
                seq.placeholders -= 1
                self.kv.name(seq, seq.computed_tokens - seq.placeholders)
        for seq in plan.finishing:
            seq.known_tokens = seq.prompt_tokens + seq.output_limit
            if seq.status == RUNNING:
                self.kv.name(seq, seq.last_position)
            self._finish(seq)
        return [(seq, 1) for seq in plan.completing]

    def _commit_walk(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        limits, drafting = self.limits, self._drafting
        late, size, naming = (
            limits.async_scheduling,
            limits.block_size,
            limits.enable_prefix_caching,
        )
        proposes = limits.spec_method is not None and not late
        delivered: list[tuple[Sequence, int]] = []
        finishing: list[Sequence] = []
        stales: set[Sequence] = set()
        if plan.stale:
            stales = {seq for seq, _ in plan.entries() if seq.stale}
            for seq in stales:
                seq.stale = False
        for seq, drafts in plan.emitting.items():
            if seq.status == FINISHED:
                continue
            stale = seq in stales
            new = 1
            if drafts:
                padded = seq in plan.padded
                accepted = drafting.accept(seq, drafts, padded=padded)
                if not padded:
                    seq.draft_rounds += 1
                    seq.draft_tokens += drafts
                    seq.accepted_tokens += accepted
                new += accepted
                rejected = drafts - accepted
                if rejected and not stale:
                    seq.computed_tokens -= rejected
                    seq.placeholders -= min(seq.placeholders, rejected)
            left = seq.prompt_tokens + seq.output_limit - seq.known_tokens
            if new > left:
                new = left
            seq.known_tokens += new
            delivered.append((seq, new))
            if late and not stale:
                seq.placeholders -= new
                settled = seq.computed_tokens - seq.placeholders
                if naming and settled // size > len(seq.handles):
                    self.kv.name(seq, settled)
            if new == left:
                finishing.append(seq)
                self._finish(seq)
            elif proposes:
                seq.drafts = drafting.proposal(seq, seq.drafting)
        plan.finishing = finishing
        return delivered

    def _finish(self, seq: Sequence) -> None:
        """Give a finished sequence's slot and blocks back."""
        seq.stale = False
        if seq.status == PREEMPTED:
            self.waiting.remove(seq)
            self.kv.swap_in(seq, 0)
        else:
            self.kv.release(seq)
            del self.running[seq.serial]
        seq.status = FINISHED


def _serial(seq: Sequence) -> int:
    return seq.serial
