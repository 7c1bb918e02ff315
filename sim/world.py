"""One run: a SimPy environment with a source of requests and an engine replica."""

from collections.abc import Callable
from dataclasses import dataclass

from servecast.costmodels.shape import CostModel
from servecast.sim.arrivals import Source
from servecast.sim.clock import Clock
from servecast.sim.plan import SchedulerLimits
from servecast.sim.recorder import Recorder
from servecast.sim.replica import Replica
from servecast.sim.request import RequestTable
from servecast.sim.scheduler import Scheduler
from servecast.sim.sequence import Sequence
from servecast.sim.static import StaticScheduler
from servecast.sim.trace import Trace

#: Told now and then how many requests have left.
Progress = Callable[[int], None]

PROGRESS_EVERY = 512


@dataclass(frozen=True)
class Run:
    """A finished run: its trace, and the requests that could not be served, in words."""

    trace: Trace
    refusals: tuple[str, ...]


def simulate(
    table: RequestTable,
    limits: SchedulerLimits,
    cost: CostModel,
    *,
    static_batching: bool = False,
    batch_wait_ns: int = 0,
    swap_block_s: float = 0.0,
    fast_forward: bool = True,
    aggregate: bool = True,
    private_runs: bool = True,
    progress: Progress | None = None,
) -> Run:
    """Serve every request of `table` and return what happened.

    `static_batching` fills batches, waiting at most `batch_wait_ns` for one to be full.
    `swap_block_s` is the time of one block over the host link (`SchedulerLimits.swap_blocks`).
    The other switches choose how the same result is reached. `fast_forward=False` makes every
    step an event, `aggregate=False` visits every sequence in every step, `private_runs=False`
    names every block: the slow references that the fast way is held against.
    """
    env = Clock()
    recorder = Recorder()
    scheduler: Scheduler
    if static_batching:
        scheduler = StaticScheduler(limits)
    else:
        scheduler = Scheduler(limits, aggregate=aggregate, private_runs=private_runs)
    done = env.event()
    total = len(table)

    def on_finish(seq: Sequence) -> None:
        source.finished(seq)
        finished = recorder.finished
        if progress is not None and finished % PROGRESS_EVERY == 0:
            progress(finished)
        if finished == total:
            done.succeed()

    replica = Replica(
        env,
        scheduler,
        cost,
        recorder,
        lambda: source.next_ns,
        on_finish,
        wait_limits=table.wait_limits,
        batch_wait_ns=batch_wait_ns if static_batching else None,
        swap_block_s=swap_block_s,
        fast_forward=fast_forward,
    )
    source = Source(env, table, limits.max_model_len, replica.submit)
    env.process(replica.run())
    env.run(until=done)
    trace = recorder.trace(replica.decode_cost, scheduler.pool.blocks, table.class_names)
    return Run(trace, tuple(replica.refusals))
