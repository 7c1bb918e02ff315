"""What one engine step contains, and what it costs.

`StepShape` is all that a cost model may know of a step; `StepCost` is its answer by part, so
that a report can say where time goes. `DecodeCost` prices a run of pure decode steps, in which
only the context grows, without building a shape for each.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

NS_PER_S = 1_000_000_000

PARTS = (
    "gemm",
    "attention_prefill",
    "attention_decode",
    "moe",
    "collective",
    "sampling",
    "draft",
    "host",
    "swap",
)


class StepShape(NamedTuple):
    """One step of one replica.

    Attributes
    ----------
    prefills : (new_tokens, context_tokens) of each chunk; context is what is in KV before it
    decodes : sequences that decode
    decode_tokens : query tokens of those sequences together (more than `decodes` when drafts
        are verified)
    decode_context_tokens : KV tokens that the decodes read, their own new ones included
    sampled : rows of logits: of each sequence that samples a token at the end of the step, and of
        each draft that is verified
    draft_passes : sequences that draft a token in each pass of the drafter after the step
    draft_context_tokens : KV tokens of those sequences, before they draft
    redrafted : of those sequences, the ones whose drafts made ahead of the verification are void
    decode_tail_tokens : `tail_tokens` of the decodes
    """

    prefills: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    decode_tokens: int = 0
    decode_context_tokens: int = 0
    sampled: int = 0
    draft_passes: tuple[int, ...] = ()
    draft_context_tokens: int = 0
    redrafted: int = 0
    decode_tail_tokens: int = 0


def tail_tokens(longest: Sequence[int], decodes: int, context_tokens: int, sequences: int) -> int:
    """What decodes read more slowly than memory allows, because the longest contexts are left.

    As long as more than `sequences` are at it, memory is the bound; then each goes on at its own
    pace. With contexts c1 >= c2 >= ... that adds the sum of c1 - ck over the first so many. Fewer
    decodes than that are never bound by memory: what it adds to as many of the mean context is
    c1 less that mean, for each of `sequences`. As all contexts grow alike, it is the same in every
    step of a run of decodes.

    Parameters
    ----------
    longest : KV tokens of the longest `sequences` decodes, of all if there are fewer
    decodes, context_tokens : of all
    """
    if not decodes or not sequences:
        return 0
    most = max(longest)
    if decodes <= sequences:
        return sequences * (decodes * most - context_tokens) // decodes
    return sequences * most - sum(longest)


class StepCost(NamedTuple):
    """Seconds by part (`PARTS` gives the order), and the work that was done in them.

    `flops` and `bytes` are what the model needs on one device, without padding: they feed
    utilisation, not time.
    """

    gemm_s: float = 0.0
    attention_prefill_s: float = 0.0
    attention_decode_s: float = 0.0
    moe_s: float = 0.0
    collective_s: float = 0.0
    sampling_s: float = 0.0
    draft_s: float = 0.0
    host_s: float = 0.0
    swap_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def total_s(self) -> float:
        """Wall time of the step in seconds."""
        return sum(self[: len(PARTS)])

    @property
    def total_ns(self) -> int:
        """Wall time in whole nanoseconds: the one place where a mixed step is rounded."""
        return round(self.total_s * NS_PER_S)


class DecodeCost(Protocol):
    """Cost of steps in which a fixed number of sequences decode one token each.

    Law: `steps_ns(c, n, t)[j]` is `steps_ns(c + j * decodes, 1, t)[0]`, bit for bit.
    """

    def steps_ns(
        self, context_tokens: int, steps: int, tail_tokens: int = 0
    ) -> list[int] | npt.NDArray[np.int64]:
        """Nanoseconds of `steps` steps; the first reads `context_tokens` in all."""
        ...

    def cost(self, context_tokens: int, tail_tokens: int = 0) -> StepCost:
        """The same step by part. `round(total)` may differ from `steps_ns` by 1 ns."""
        ...


class CostModel(Protocol):
    """Seconds from a shape: pure, positive, never smaller for more work."""

    @property
    def tail_sequences(self) -> int:
        """Decodes that `tail_tokens` looks at; 0 where uneven contexts cost nothing more."""
        ...

    def step(self, shape: StepShape) -> StepCost:
        """Cost of any step."""
        ...

    def decode(self, decodes: int) -> DecodeCost:
        """Cost of steps in which `decodes` sequences decode and nothing else happens."""
        ...


class ConstantCost:
    """Every step takes the same time: the test double, and M/D/1 when one sequence runs."""

    def __init__(self, step_s: float) -> None:
        if not step_s > 0:
            raise ValueError(f"step_s must be positive: {step_s}")
        self.step_ns = round(step_s * NS_PER_S)
        self.tail_sequences = 0

    def step(self, shape: StepShape) -> StepCost:
        return StepCost(gemm_s=self.step_ns / NS_PER_S)

    def decode(self, decodes: int) -> "ConstantCost":
        return self

    def steps_ns(self, context_tokens: int, steps: int, tail_tokens: int = 0) -> list[int]:
        return [self.step_ns] * steps

    def cost(self, context_tokens: int, tail_tokens: int = 0) -> StepCost:
        return StepCost(gemm_s=self.step_ns / NS_PER_S)
