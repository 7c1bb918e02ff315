"""One run: a SimPy environment with a source of requests, a router and engine replicas."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from servecast.costmodels.shape import CostModel
from servecast.sim.acceptance import Draws
from servecast.sim.arrivals import NEVER, Source
from servecast.sim.clock import Alarm, Clock
from servecast.sim.control import ControlSettings
from servecast.sim.plan import SchedulerLimits
from servecast.sim.recorder import Recorder
from servecast.sim.replica import Replica
from servecast.sim.request import RequestTable
from servecast.sim.scheduler import Scheduler
from servecast.sim.sequence import Sequence
from servecast.sim.speculation import Speculation, Speculator
from servecast.sim.static import StaticScheduler
from servecast.sim.trace import Trace, merge

#: Told now and then how many requests have left.
Progress = Callable[[int], None]

PROGRESS_EVERY = 512


@dataclass(frozen=True)
class Run:
    """A finished run: its trace, and the requests that could not be served, in words."""

    trace: Trace
    refusals: tuple[str, ...]


@dataclass(frozen=True)
class Fleet:
    """Equal replicas behind a router.

    Attributes
    ----------
    router : "round_robin", or "least_loaded" by unfinished requests
    failing : replicas that stop for good at `fail_at_ns`; what they had is sent again to others
    """

    replicas: int = 1
    router: str = "round_robin"
    failing: int = 0
    fail_at_ns: int = NEVER

    def __post_init__(self) -> None:
        if self.router not in ("round_robin", "least_loaded"):
            raise ValueError(f"router must be round_robin or least_loaded: {self.router}")
        if not 0 <= self.failing < self.replicas:
            raise ValueError(f"{self.failing} of {self.replicas} replicas fail: one must be left")


ALONE = Fleet()


def simulate(
    table: RequestTable,
    limits: SchedulerLimits,
    cost: CostModel,
    *,
    fleet: Fleet = ALONE,
    static_batching: bool = False,
    batch_wait_ns: int = 0,
    swap_block_s: float = 0.0,
    idle_host_s: float = 0.0,
    control: ControlSettings | None = None,
    speculation: Speculation | None = None,
    fast_forward: bool = True,
    aggregate: bool = True,
    private_runs: bool = True,
    progress: Progress | None = None,
) -> Run:
    """Serve every request of `table` and return what happened.

    `static_batching` fills batches, waiting at most `batch_wait_ns` for one to be full.
    `idle_host_s` is host time before a step that follows no other.
    `control` adapts the token budget of each replica to the latency that it sees.
    `speculation` goes with limits that have a `spec_method`, and none goes with those that do not.
    `swap_block_s` is the time of one block over the host link (`SchedulerLimits.swap_blocks`).
    The other switches choose how the same result is reached. `fast_forward=False` makes every
    step an event, `aggregate=False` visits every sequence in every step, `private_runs=False`
    names every block: the slow references that the fast way is held against.
    """
    if (speculation is None) != (limits.spec_method is None):
        raise ValueError("a spec_method and speculation go together")
    draws = None
    if speculation is not None:
        draws = Draws(
            speculation.acceptance,
            table,
            speculation.most_accepted,
            speculation.seed,
            limits.max_model_len,
        )
    env = Clock()
    done = env.event()
    left = len(table)

    def on_finish(seq: Sequence) -> None:
        nonlocal left
        left -= 1
        source.finished(seq)
        finished = len(table) - left
        if progress is not None and finished % PROGRESS_EVERY == 0:
            progress(finished)
        if not left:
            done.succeed()

    # What one replica finishes may send something to another, unless all arrivals are known.
    feedback = fleet.replicas > 1 and (table.concurrency is not None or table.after is not None)

    def next_event_ns() -> int:
        coming = source.next_ns
        if fleet.failing and env.now < fleet.fail_at_ns:
            coming = min(coming, fleet.fail_at_ns)
        return min(coming, int(min(env.peek(), NEVER))) if feedback else coming

    replicas = []
    for number in range(fleet.replicas):
        scheduler: Scheduler
        speculator = None
        if speculation is not None and draws is not None:
            speculator = Speculator(speculation, draws, cost)
        if static_batching:
            scheduler = StaticScheduler(limits, cost.tail_sequences)
        else:
            scheduler = Scheduler(
                limits,
                aggregate=aggregate,
                private_runs=private_runs,
                drafting=speculator,
                tail_sequences=cost.tail_sequences,
            )
        replica = Replica(
            env,
            scheduler,
            cost,
            Recorder(number),
            next_event_ns,
            on_finish,
            wait_limits=table.wait_limits,
            batch_wait_ns=batch_wait_ns if static_batching else None,
            swap_block_s=swap_block_s,
            idle_host_s=idle_host_s,
            control=control,
            speculator=speculator,
            fast_forward=fast_forward,
        )
        replicas.append(replica)
    submit = replicas[0].submit if fleet.replicas == 1 else _router(fleet.router, replicas)
    source = Source(env, table, limits.max_model_len, submit)
    for replica in replicas:
        env.process(replica.run())
    if fleet.failing:
        _fail_later(env, fleet, replicas, submit)
    env.run(until=done)
    traces = [
        replica.recorder.trace(
            replica.decode_cost, replica.scheduler.pool.blocks, table.class_names
        )
        for replica in replicas
    ]
    history = [
        (number, *entry)
        for number, replica in enumerate(replicas)
        if replica.control is not None
        for entry in replica.control.history
    ]
    tally: Counter[tuple[int, int]] = Counter()
    for replica in replicas:
        tally.update(replica.speculator.tally if replica.speculator is not None else {})
    accepted = tuple((*outcome, rounds) for outcome, rounds in sorted(tally.items()))
    trace = replace(merge(traces), control=tuple(history), accepted=accepted)
    return Run(trace, tuple(r for replica in replicas for r in replica.refusals))


def _router(kind: str, replicas: list[Replica]) -> Callable[[Sequence], None]:
    """Send each sequence to one of the replicas that are alive."""
    turn = -1

    def submit(seq: Sequence) -> None:
        nonlocal turn
        alive = [replica for replica in replicas if not replica.dead]
        turn += 1
        if kind == "round_robin":
            alive[turn % len(alive)].submit(seq)
        else:
            min(alive, key=lambda replica: replica.unfinished).submit(seq)

    return submit


def _fail_later(
    env: Clock, fleet: Fleet, replicas: list[Replica], submit: Callable[[Sequence], None]
) -> None:
    def fail(_: object) -> None:
        lost = [seq for replica in replicas[-fleet.failing :] for seq in replica.fail()]
        for seq in sorted(lost, key=lambda seq: seq.order):
            submit(seq.anew())

    alarm = Alarm(env, fleet.fail_at_ns)
    assert alarm.callbacks is not None
    alarm.callbacks.append(fail)
