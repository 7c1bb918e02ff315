"""What a run leaves behind: facts, one row a request and one row an interval of equal steps."""

from dataclasses import dataclass

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
    "draft_tokens",
    "accepted_tokens",
    "promoted",
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
    "context_tokens",
    "kv_blocks",
    "preemptions",
)


@dataclass(frozen=True)
class Trace:
    """The record of one replica's run.

    Attributes
    ----------
    requests : column name (`REQUEST_COLUMNS`) to int64 array, in order of request number;
        times that never came are -1
    steps : column name (`STEP_COLUMNS`) to int64 array, and `<part>_s` (`PARTS` of
        `servecast.costmodels.shape`) to float64 array: seconds of the interval by part.
        A row covers `steps` steps; `running`, `waiting`, `kv_blocks` hold at its end
    gap_ns, gap_count : gaps between tokens of one sequence, as value and multiplicity
    flops, bytes : work done on one device over the run
    kv_blocks : usable blocks of the pool
    end_ns : when the last step ended
    class_names : names of the request classes that `klass` numbers
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
