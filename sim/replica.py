"""One engine replica as a SimPy process: plan, wait, commit.

The process yields once for each step, or once for a whole run of equal decode steps when nothing
can happen in between. With asynchronous scheduling two steps are in flight: the next one is
planned while the device works on the last.
"""

import heapq
from collections import deque
from collections.abc import Callable, Generator

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from servecast.costmodels.shape import CostModel, DecodeCost, StepCost, StepShape, tail_tokens
from servecast.sim.clock import Alarm, Clock
from servecast.sim.control import BudgetControl, ControlSettings
from servecast.sim.plan import StepPlan
from servecast.sim.recorder import Recorder
from servecast.sim.request import WaitLimit
from servecast.sim.scheduler import Scheduler
from servecast.sim.sequence import FINISHED, WAITING, Sequence
from servecast.sim.speculation import Speculator
from servecast.sim.trace import COMPLETED, REFUSED, TIMED_OUT

Durations = list[int] | npt.NDArray[np.int64]


class _Flight:
    """A plan under way: how long each of its steps takes, and how many of them are over."""

    __slots__ = ("cost", "done", "durations_ns", "plan", "shape")

    def __init__(
        self,
        plan: StepPlan,
        durations_ns: Durations,
        cost: StepCost | None = None,
        shape: StepShape | None = None,
    ) -> None:
        self.plan = plan
        self.durations_ns = durations_ns
        self.cost = cost
        self.shape = shape
        self.done = 0


class Replica:
    """Runs a scheduler against a cost model.

    Parameters
    ----------
    next_arrival_ns : when the next request will arrive, at the earliest
    on_finish : told of every request that leaves
    wait_limits : of each class of requests
    batch_wait_ns : how long a scheduler that fills batches waits for one to be full
    swap_block_s : seconds that one block takes over the host link
    idle_host_s : host time before a step that follows no other, which no device time hides
    control : adapts the token budget to the latency that is seen
    speculator : what the scheduler asks about drafts, where there are any
    fast_forward : let equal decode steps pass in one event; False steps through each of them
    """

    def __init__(
        self,
        env: Clock,
        scheduler: Scheduler,
        cost: CostModel,
        recorder: Recorder,
        next_arrival_ns: Callable[[], int],
        on_finish: Callable[[Sequence], None],
        *,
        wait_limits: tuple[WaitLimit | None, ...] = (),
        batch_wait_ns: int | None = None,
        swap_block_s: float = 0.0,
        idle_host_s: float = 0.0,
        control: ControlSettings | None = None,
        speculator: Speculator | None = None,
        fast_forward: bool = True,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.cost = cost
        self.recorder = recorder
        self.refusals: list[str] = []
        self._next_arrival_ns = next_arrival_ns
        self._on_finish = on_finish
        self._wait_limits = wait_limits
        self._batch_wait_ns = batch_wait_ns
        self._swap_block_s = swap_block_s
        self._idle_host_s = idle_host_s
        self._deadlines: list[tuple[int, int, Sequence]] = []
        self._fast_forward = fast_forward
        self._decode_costs: dict[int, tuple[DecodeCost, int]] = {}
        self._idle: Event | None = None
        self._depth = 2 if scheduler.limits.async_scheduling else 1
        self._last_commit_ns = 0
        self.dead = False
        self.speculator = speculator
        self.control: BudgetControl | None = None
        if control is not None:
            self.control = BudgetControl(control, scheduler.limits.max_num_batched_tokens)

    @property
    def unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    def fail(self) -> list[Sequence]:
        """Stop for good; returns the requests that were here."""
        self.dead = True
        lost = [*self.scheduler.running.values(), *self.scheduler.waiting]
        for seq in lost:
            seq.status = FINISHED
        return lost

    def submit(self, seq: Sequence) -> None:
        """Take a request; one that can never run is refused as vLLM refuses it."""
        limits = self.scheduler.limits
        if seq.prompt_tokens >= limits.max_model_len:
            self._refuse(
                seq,
                f"request {seq.index}: prompt of {seq.prompt_tokens} tokens does not fit "
                f"max_model_len {limits.max_model_len}",
            )
            return
        if self.speculator is not None:
            self.speculator.enrol(seq)
        self.scheduler.add(seq)
        limit = self._wait_limits[seq.klass] if self._wait_limits else None
        if limit is not None:
            self._at(limit.wait_ns, seq, self._reject if limit.reject else self._promote)
        if self._batch_wait_ns is not None:
            self._at(self._batch_wait_ns, seq, self._hurry)
        self._wake()

    def _wake(self) -> None:
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle.succeed()

    def run(self) -> Generator[Event, None, None]:
        """The process."""
        env, scheduler, depth = self.env, self.scheduler, self._depth
        timeout = env.timeout
        in_flight: deque[_Flight] = deque()
        while True:
            if scheduler.unfinished:
                if self.control is not None:
                    scheduler.token_budget = self.control.pass_to(env.now)
                plan = scheduler.plan()
                if plan.admitted or plan.interrupted:
                    self._note(plan)
                if not plan.empty:
                    in_flight.append(self._price(plan, in_flight))
                    if len(in_flight) < depth:
                        continue
                elif not in_flight:
                    if scheduler.patient:
                        yield self._sleep()
                    elif not plan.preempted:
                        # A step that only preempts is followed by one that can admit.
                        self._refuse_head()
                    continue
            elif not in_flight:
                yield self._sleep()
                continue
            until = self._reach(in_flight)
            yield timeout(until - env.now)
            if self.dead:
                return
            self._pass(in_flight)

    def _sleep(self) -> Event:
        self._idle = self.env.event()
        return self._idle

    # ---------------------------------------------------------------- control

    def _watch(
        self, control: BudgetControl, plan: StepPlan, durations: Durations, end: int
    ) -> None:
        """Show the control the gaps of some steps, each in the window in which it ended."""
        at = end - _total(durations)
        for duration in durations:
            at += int(duration)
            control.pass_to(at - 1)
            if plan.decodes and control.settings.metric == "itl":
                control.see(int(duration), plan.decodes)

    # ---------------------------------------------------------------- waiting too long

    def _at(self, delay_ns: int, seq: Sequence, act: Callable[[Sequence], None]) -> None:
        """Act on a sequence that is still waiting after `delay_ns`."""
        heapq.heappush(self._deadlines, (self.env.now + delay_ns, seq.index, seq))

        def due(_: Event) -> None:
            if seq.status == WAITING:
                act(seq)

        alarm = Alarm(self.env, delay_ns)
        assert alarm.callbacks is not None
        alarm.callbacks.append(due)

    def _reject(self, seq: Sequence) -> None:
        self.scheduler.waiting.remove(seq)
        seq.status = FINISHED
        self.recorder.request(seq, -1, 0, TIMED_OUT)
        self._on_finish(seq)

    def _promote(self, seq: Sequence) -> None:
        self.scheduler.waiting.promote(seq)
        self._wake()

    def _hurry(self, seq: Sequence) -> None:
        """Let a batch that is not full go."""
        self.scheduler.hurry(seq)
        self._wake()

    def _horizon_ns(self) -> int:
        """Until when nothing can happen to the queue from outside."""
        deadlines = self._deadlines
        now = self.env.now
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2].status != WAITING):
            heapq.heappop(deadlines)
        soonest = self._next_arrival_ns()
        if self.control is not None:
            soonest = min(soonest, self.control.window_ends_ns)
        return min(soonest, deadlines[0][0]) if deadlines else soonest

    # ---------------------------------------------------------------- time

    def _price(self, plan: StepPlan, in_flight: deque[_Flight]) -> _Flight:
        """Time of a plan; of a uniform one also of the steps that may be planned alike."""
        if plan.chunks or plan.swapped:
            shape = self._shape(plan)
            cost = self.cost.step(shape)
            if plan.swapped:
                cost = cost._replace(swap_s=plan.swapped * self._swap_block_s)
            if not in_flight and self._idle_host_s > cost.host_s:
                cost = cost._replace(host_s=self._idle_host_s)
            return _Flight(plan, [cost.total_ns], cost, shape)
        decode, least_ns = self._decode_cost(plan.decodes)
        alike = 0
        if (
            self._fast_forward
            and len(in_flight) == self._depth - 1
            and not (in_flight and in_flight[0].plan.finishing)
        ):
            alike = self.scheduler.steps_alike(plan)
            if alike:
                # No step is shorter than one without context: no more than these can start.
                alike = min(alike, (self._horizon_ns() - self.env.now) // least_ns + 1)
        return _Flight(plan, decode.steps_ns(plan.context_tokens, alike + 1, self._tail(plan)))

    def _reach(self, in_flight: deque[_Flight]) -> int:
        """When to wake up; the newest plan is extended over the steps planned until then.

        A step is planned at the start of the one before it (of itself, without asynchronous
        scheduling), and only if no request has arrived by then.
        """
        newest = in_flight[-1]
        durations = newest.durations_ns
        if len(in_flight) > 1:
            oldest = in_flight[0]
            until = self.env.now + int(oldest.durations_ns[oldest.done])
            first = 0
        else:
            until = self.env.now + int(durations[newest.done])
            first = newest.done + 1
        last = len(durations) - (len(in_flight) > 1)
        if first >= last:
            return until
        horizon = self._horizon_ns()
        more = 0
        if isinstance(durations, list):
            for duration in durations[first:last]:
                if until >= horizon:
                    break
                until += duration
                more += 1
        elif until < horizon:
            ends = np.cumsum(durations[first:last])
            more = min(int(np.searchsorted(ends, horizon - until)) + 1, last - first)
            until += int(ends[more - 1])
        newest.durations_ns = durations[: more + 1]
        if more:
            self.scheduler.extend(newest.plan, more)
        return until

    # ---------------------------------------------------------------- outputs

    def _pass(self, in_flight: deque[_Flight]) -> None:
        """Take in the steps that are over by now: the oldest plan, and all but the last step of
        the newest."""
        end = self.env.now
        oldest = in_flight.popleft()
        if in_flight:
            newest = in_flight[0]
            newest.done = over = len(newest.durations_ns) - 1
            if over:
                end -= _total(newest.durations_ns[:over])
        plan = oldest.plan
        durations = oldest.durations_ns
        scheduler = self.scheduler
        shape = oldest.shape
        prompt_tokens = sum([new for new, _ in shape.prefills]) if shape is not None else 0
        decodes = tokens = plan.decodes
        context = plan.context_tokens
        if shape is None:
            tail = self._tail(plan)
        else:
            decodes, tokens, context = shape[1:4]
            tail = shape.decode_tail_tokens
        before = len(scheduler.running), len(scheduler.waiting)
        blocks = scheduler.pool.blocks - scheduler.pool.free
        control = self.control
        if control is not None:
            self._watch(control, plan, durations[oldest.done :], end)
        gaps: dict[int, int] = {}
        decoded = plan.decodes * plan.steps
        for seq, new in scheduler.commit(plan):
            if seq.first_token_ns < 0:
                seq.first_token_ns = end
                if control is not None and control.settings.metric == "ttft":
                    control.see(end - seq.arrival_ns)
            else:
                gap = end - seq.last_token_ns
                gaps[gap] = gaps.get(gap, 0) + 1
                decoded += new
            seq.last_token_ns = end
        self.recorder.interval(
            (
                end - _total(durations),
                end,
                plan.steps,
                *before,
                prompt_tokens,
                decodes,
                tokens,
                decoded,
                context,
                tail,
                blocks,
                len(plan.preempted),
            ),
            durations,
            plan.decodes if scheduler.streams else 0,
            oldest.cost,
        )
        for gap, count in gaps.items():
            self.recorder.gaps(gap, count)
        for seq in plan.unsettled:
            seq.last_token_ns = end
        for seq in plan.finishing:
            if not scheduler.streams:
                # All tokens come at once.
                seq.first_token_ns = end
                self.recorder.gaps(0, seq.output_tokens - 1)
            self.recorder.request(seq, end, seq.output_tokens, COMPLETED)
            self._on_finish(seq)
        if control is not None and in_flight and newest.done:
            # These steps are over too, though they are written down with the last one.
            passed = newest.durations_ns[: newest.done]
            self._watch(control, newest.plan, passed, self.env.now)
        self._last_commit_ns = self.env.now

    def _note(self, plan: StepPlan) -> None:
        now = self.env.now
        for seq, computed in plan.admitted:
            seq.admitted_ns = now
            seq.prefix_hit_tokens = computed
        if self._depth == 1:
            # Otherwise their last token is still in flight, and its commit will tell.
            for seq in plan.interrupted:
                seq.last_token_ns = self._last_commit_ns

    def _tail(self, plan: StepPlan) -> int:
        """Of the aggregate alone."""
        sequences = self.cost.tail_sequences
        return tail_tokens(plan.longest, plan.decodes, plan.context_tokens, sequences)

    def _shape(self, plan: StepPlan) -> StepShape:
        """What a plan asks of the device; drafts under verification count as decodes."""
        prefills: list[tuple[int, int]] = []
        decodes = tokens = plan.decodes
        context, longest = plan.context_tokens, plan.longest
        spec = plan.spec
        if plan.verifying is not None:
            decodes, tokens, context = plan.verifying
        else:
            others = []
            for seq, new, computed in plan.chunks:
                if new == 1 + spec.get(seq, 0) and computed >= seq.prompt_tokens:
                    decodes += 1
                    tokens += new
                    context += computed + new
                    others.append(computed + new)
                else:
                    prefills.append((new, computed))
            tail = self.cost.tail_sequences
            if others and tail:
                longest = sorted([*longest, *others])[-tail:]
        shape = StepShape(
            tuple(prefills),
            decodes,
            tokens,
            context,
            plan.decodes + len(plan.completing or plan.emitting),
            decode_tail_tokens=tail_tokens(longest, decodes, context, self.cost.tail_sequences),
        )
        speculator = self.speculator
        if speculator is None:
            return shape
        passes = plan.draft_passes
        return shape._replace(
            sampled=shape.sampled + sum(spec.values()),
            draft_passes=passes,
            draft_context_tokens=plan.draft_context_tokens,
            redrafted=min(speculator.void(plan), passes[0]) if passes else 0,
        )

    def decode_cost(self, decodes: int) -> DecodeCost:
        """Cost of decoding so many sequences."""
        return self._decode_cost(decodes)[0]

    def _decode_cost(self, decodes: int) -> tuple[DecodeCost, int]:
        """The same, with the nanoseconds of the shortest such step."""
        known = self._decode_costs.get(decodes)
        if known is None:
            cost = self.cost.decode(decodes)
            known = self._decode_costs[decodes] = cost, max(1, int(cost.steps_ns(0, 1)[0]))
        return known

    # ---------------------------------------------------------------- what cannot run

    def _refuse_head(self) -> None:
        """Nothing runs and the head of the queue does not fit: it never will."""
        seq = self.scheduler.waiting.popleft()
        limits = self.scheduler.limits
        self._refuse(
            seq,
            f"request {seq.index}: {seq.known_tokens} tokens do not fit the pool of "
            f"{limits.num_gpu_blocks - 1} blocks of {limits.block_size}",
        )

    def _refuse(self, seq: Sequence, reason: str) -> None:
        seq.status = FINISHED
        self.refusals.append(reason)
        self.recorder.request(seq, -1, 0, REFUSED)
        self._on_finish(seq)


def _total(durations_ns: Durations) -> int:
    if isinstance(durations_ns, list):
        return durations_ns[0] if len(durations_ns) == 1 else sum(durations_ns)
    return int(durations_ns.sum())
