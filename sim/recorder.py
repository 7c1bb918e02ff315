"""Collects the facts of a run in flat arrays, so that a million requests stay small."""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from servecast.costmodels.shape import NS_PER_S, PARTS, DecodeCost, StepCost
from servecast.sim.sequence import Sequence
from servecast.sim.trace import REQUEST_COLUMNS, STEP_COLUMNS, Trace

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

#: What is written down of an interval; the replica is the recorder's own.
RECORDED = STEP_COLUMNS[:-1]

#: Contexts at which the parts of a decode step are priced, between which they are interpolated.
PRICED_CONTEXTS = 9


class Recorder:
    """What a replica writes down while it runs."""

    def __init__(self, replica: int = 0) -> None:
        self._replica = replica
        self._requests = array("q")
        self._steps = array("q")
        #: cost of the intervals that are not pure decoding, and their row numbers
        self._costs = array("d")
        self._cost_rows = array("q")
        self._gap_ns = array("q")
        self._gap_steps = array("q")
        self._gap_count = array("q")
        self.finished = 0

    def interval(
        self,
        facts: tuple[int, ...],
        durations_ns: "Seq[int] | IntArray",
        decodes: int,
        cost: StepCost | None,
    ) -> None:
        """Write down a run of equal steps.

        Parameters
        ----------
        facts : values of `RECORDED`
        durations_ns : how long each step took
        decodes : sequences whose tokens of these steps follow their tokens of the step before
        cost : of the step, or None for pure decoding, which is priced when all is over
        """
        if cost is not None:
            self._cost_rows.append(len(self._steps) // len(RECORDED))
            self._costs.extend(cost)
        self._steps.extend(facts)
        if decodes:
            if isinstance(durations_ns, np.ndarray):
                self._gap_ns.frombytes(durations_ns.tobytes())
            else:
                self._gap_ns.extend(durations_ns)
            self._gap_steps.append(facts[2])
            self._gap_count.append(decodes)

    def gaps(self, gap_ns: int, count: int = 1) -> None:
        """Write down gaps between tokens that were not one step long."""
        if count:
            self._gap_ns.append(gap_ns)
            self._gap_steps.append(1)
            self._gap_count.append(count)

    def request(self, seq: Sequence, finish_ns: int, output_tokens: int, status: int) -> None:
        """Write down a request that has left the engine."""
        self._requests.extend(
            (
                seq.index,
                seq.arrival_ns,
                seq.admitted_ns,
                seq.first_token_ns,
                finish_ns,
                seq.prompt_tokens,
                output_tokens,
                seq.prefix_hit_tokens,
                seq.preemptions,
                seq.klass,
                seq.priority,
                seq.draft_rounds,
                seq.draft_tokens,
                seq.accepted_tokens,
                seq.promoted,
                self._replica,
                status,
            )
        )
        self.finished += 1

    def trace(
        self,
        decode_cost: Callable[[int], DecodeCost],
        kv_blocks: int,
        class_names: tuple[str, ...],
    ) -> Trace:
        """Everything written down so far; `decode_cost` prices the parts of pure decoding."""
        requests = _table(self._requests, len(REQUEST_COLUMNS))
        requests = requests[np.argsort(requests[:, 0], kind="stable")]
        steps = _table(self._steps, len(RECORDED))
        facts = {name: steps[:, i].copy() for i, name in enumerate(RECORDED)}
        costs = self._interval_costs(facts, decode_cost)
        counts = np.repeat(_ints(self._gap_count), _ints(self._gap_steps))
        return Trace(
            requests={name: requests[:, i].copy() for i, name in enumerate(REQUEST_COLUMNS)},
            steps={
                **facts,
                "replica": np.full(len(steps), self._replica),
                **{f"{part}_s": costs[:, i] for i, part in enumerate(PARTS)},
            },
            gap_ns=_ints(self._gap_ns).copy(),
            gap_count=counts,
            flops=float(costs[:, len(PARTS)].sum()),
            bytes=float(costs[:, len(PARTS) + 1].sum()),
            kv_blocks=kv_blocks,
            end_ns=int(facts["end_ns"][-1]) if len(steps) else 0,
            class_names=class_names,
        )

    def _interval_costs(
        self, facts: dict[str, IntArray], decode_cost: Callable[[int], DecodeCost]
    ) -> FloatArray:
        """Seconds by part, FLOPs and bytes of every interval."""
        width = len(StepCost._fields)
        costs = np.zeros((len(facts["steps"]), width))
        rows = _ints(self._cost_rows)
        costs[rows] = np.frombuffer(self._costs, np.float64).reshape(-1, width)
        decodes = facts["decodes"].copy()
        decodes[rows] = 0
        middle = facts["context_tokens"] + decodes * (facts["steps"] - 1) / 2
        order = np.argsort(decodes, kind="stable")
        starts = np.flatnonzero(np.diff(decodes[order], prepend=0))
        for group in np.split(order, starts)[1:]:
            cost = decode_cost(int(decodes[group[0]]))
            priced = _priced(cost, middle[group], facts["tail_tokens"][group])
            costs[group] = priced * facts["steps"][group, None]
        # The parts of an interval add up to the time that it took, to the nanosecond.
        taken = (facts["end_ns"] - facts["start_ns"]) / NS_PER_S
        seconds = costs[:, : len(PARTS)]
        seconds *= (taken / seconds.sum(axis=1))[:, None]
        return costs


def _priced(cost: DecodeCost, contexts: FloatArray, tails: IntArray) -> FloatArray:
    """Between the cost without a tail and that with the longest one."""
    low, high = int(contexts.min()), int(np.ceil(contexts.max()))
    grid = np.unique(np.linspace(low, high, PRICED_CONTEXTS).astype(np.int64))

    def at(tail_tokens: int) -> FloatArray:
        priced = np.array([cost.cost(int(context), tail_tokens) for context in grid])
        return np.column_stack([np.interp(contexts, grid, column) for column in priced.T])

    most, even = int(tails.max()), at(0)
    return even + (tails / most)[:, None] * (at(most) - even) if most else even


def _ints(values: "array[int]") -> IntArray:
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)


def _table(values: "array[int]", width: int) -> IntArray:
    return _ints(values).reshape(-1, width)
