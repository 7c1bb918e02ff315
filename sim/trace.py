"""What a run leaves behind: facts, one row a request and one row an interval of equal steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

COMPLETED, REFUSED, TIMED_OUT = 0, 1, 2

REQUEST_COLUMNS = (
    "request",
    "arrival_ns",
    "admitted_ns",
    "first_token_ns",
    "finish_ns",
    "prompt_tokens",
    "output_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "klass",
    "priority",
    "draft_rounds",
    "draft_tokens",
    "accepted_tokens",
    "promoted",
    "replica",
    "status",
)

STEP_COLUMNS = (
    "start_ns",
    "end_ns",
    "steps",
    "running",
    "waiting",
    "prefill_tokens",
    "decodes",
    "decode_tokens",
    "decoded_tokens",
    "context_tokens",
    "tail_tokens",
    "kv_blocks",
    "preemptions",
    "replica",
)


@dataclass(frozen=True)
class Trace:
    """The record of a run.

    Attributes
    ----------
    requests : column name (`REQUEST_COLUMNS`) to int64 array, in order of request number;
        times that never came are -1
    steps : column name (`STEP_COLUMNS`) to int64 array, and `<part>_s` (`PARTS` of
        `servecast.costmodels.shape`) to float64 array: seconds of the interval by part.
        `decodes` sequences bring `decode_tokens` to each step (more than `decodes` where drafts are
        verified) and get `decoded_tokens` over all of them; in the first step they read
        `context_tokens` of KV, `tail_tokens` (`servecast.costmodels.shape`) of them more slowly.
        A row covers `steps` steps; `running`, `waiting` and `kv_blocks` are taken at its end,
        before its output is processed (with asynchronous scheduling after the next plan)
    gap_ns, gap_count : gaps between tokens of one sequence, as value and multiplicity
    flops, bytes : work done over the run, on one device of each replica
    kv_blocks : usable blocks of one replica's pool
    end_ns : when the last step ended
    class_names : names of the request classes that `klass` numbers
    replicas : engines, whose rows of `steps` follow one another
    accepted : (drafts, accepted, rounds): how often so many drafts had so many accepted
    control : (replica, time in ns, P95 of the window in ns or -1, token budget from then on)
    """

    requests: dict[str, npt.NDArray[np.int64]]
    steps: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]]
    gap_ns: npt.NDArray[np.int64]
    gap_count: npt.NDArray[np.int64]
    flops: float
    bytes: float
    kv_blocks: int
    end_ns: int
    class_names: tuple[str, ...]
    replicas: int = 1
    control: tuple[tuple[int, int, int, int], ...] = ()
    accepted: tuple[tuple[int, int, int], ...] = ()

    def of_replica(self, number: int) -> "Trace":
        """The steps of one replica, beside the requests of all."""
        rows = self.steps["replica"] == number
        steps = {name: column[rows] for name, column in self.steps.items()}
        return replace(self, steps=steps, replicas=1)


def merge(traces: Sequence[Trace]) -> Trace:
    """The traces of a fleet's replicas as one."""
    if len(traces) == 1:
        return traces[0]
    first = traces[0]
    order = np.argsort(np.concatenate([t.requests["request"] for t in traces]), kind="stable")
    return Trace(
        requests={
            name: np.concatenate([t.requests[name] for t in traces])[order]
            for name in first.requests
        },
        steps={name: np.concatenate([t.steps[name] for t in traces]) for name in first.steps},
        gap_ns=np.concatenate([t.gap_ns for t in traces]),
        gap_count=np.concatenate([t.gap_count for t in traces]),
        flops=sum(t.flops for t in traces),
        bytes=sum(t.bytes for t in traces),
        kv_blocks=first.kv_blocks,
        end_ns=max(t.end_ns for t in traces),
        class_names=first.class_names,
        replicas=len(traces),
    )
