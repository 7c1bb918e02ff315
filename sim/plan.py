"""What bounds a step, and what a step was decided to be."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from types import MappingProxyType

from servecast.sim.sequence import Sequence


@dataclass(frozen=True)
class SchedulerLimits:
    """vLLM's scheduler settings under vLLM's names; `num_gpu_blocks` counts the null block.

    `swap_blocks` is the room in host memory for preempted sequences; without room they are
    recomputed, as vLLM V1 does.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_gpu_blocks: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False
    spec_method: str | None = None
    num_speculative_tokens: int = 0
    swap_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: {getattr(self, name)}")
        if self.num_gpu_blocks < 2:
            raise ValueError(f"num_gpu_blocks must be at least 2: {self.num_gpu_blocks}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(
                f"scheduling_policy must be fcfs or priority: {self.scheduling_policy}"
            )

    @property
    def lookahead_tokens(self) -> int:
        """Slots kept beyond the scheduled tokens for a drafter that writes KV of its own."""
        return self.num_speculative_tokens if self.spec_method in ("draft_model", "eagle") else 0

    @property
    def draft_slots(self) -> int:
        """Input positions that a scheduled request costs beside its own tokens."""
        return 1 if self.spec_method == "draft_model" else 0


_NOTHING: Mapping[Sequence, int] = MappingProxyType({})


class StepPlan:
    """One step, or a run of `steps` steps that differ in nothing but context.

    Attributes
    ----------
    decodes, context_tokens : sequences of the decode aggregate, and the KV tokens they read in
        the first of the steps, the new ones included
    longest : of those KV tokens, those of the longest, as many as uneven contexts make wait
    chunks : (sequence, new tokens, computed before) for every other scheduled sequence
    scheduled : sequence to tokens in scheduling order, where every sequence is walked or a
        trace is kept; else None
    spec : drafts to verify, by sequence
    padded : of those sequences, the ones whose drafts are padding
    draft_passes : sequences that draft a token in each pass of the drafter after the step
    draft_context_tokens : KV tokens of those sequences, once the step is done
    emitting : where every sequence is walked, those that emit, with the drafts they verify
    verifying : of those that decode, where that was added up: how many, their tokens, and the KV
        tokens that they read; `longest` is of them
    stale : some of its sequences have lost their place since
    completing : sequences outside the aggregate that emit a token in this step
    finishing : sequences whose last token is in this step
    admitted, resumed : sequences that enter, with the tokens they found cached
    preempted : sequences that lost their place, in order
    swapped : blocks that go over the host link before the step, either way
    interrupted : sequences that had been emitting and now pause
    unsettled : interrupted sequences whose token of this very step is still in flight
    """

    __slots__ = (
        "admitted",
        "chunks",
        "completing",
        "context_tokens",
        "decodes",
        "draft_context_tokens",
        "draft_passes",
        "emitting",
        "finishing",
        "interrupted",
        "longest",
        "number",
        "padded",
        "preempted",
        "resumed",
        "scheduled",
        "spec",
        "stale",
        "steps",
        "swapped",
        "unsettled",
        "verifying",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 1
        self.decodes = 0
        self.context_tokens = 0
        self.swapped = 0
        self.chunks: list[tuple[Sequence, int, int]] = []
        self.scheduled: dict[Sequence, int] | None = None
        self.longest: list[int] = []
        # Most steps have none of these: they share an empty tuple until somebody needs a list.
        self.spec: Mapping[Sequence, int] = _NOTHING
        self.padded: SequenceABC[Sequence] = ()
        self.draft_passes: tuple[int, ...] = ()
        self.draft_context_tokens = 0
        self.emitting: Mapping[Sequence, int] = _NOTHING
        self.verifying: tuple[int, int, int] | None = None
        self.stale = False
        self.completing: SequenceABC[Sequence] = ()
        self.finishing: SequenceABC[Sequence] = ()
        self.admitted: SequenceABC[tuple[Sequence, int]] = ()
        self.resumed: SequenceABC[tuple[Sequence, int]] = ()
        self.preempted: SequenceABC[Sequence] = ()
        self.interrupted: SequenceABC[Sequence] = ()
        self.unsettled: SequenceABC[Sequence] = ()

    @property
    def empty(self) -> bool:
        """Nothing is computed in this step."""
        return not (self.decodes or self.chunks)

    @property
    def uniform(self) -> bool:
        """Nothing but decodes, none of them its last: the next step may be just the same."""
        return not (self.chunks or self.finishing or self.preempted) and self.decodes > 0

    def entries(self) -> Iterator[tuple[Sequence, int]]:
        """(sequence, tokens) in scheduling order; needs `scheduled`."""
        if self.scheduled is None:
            raise RuntimeError("this plan keeps no list of its sequences")
        return iter(self.scheduled.items())
