"""Step times as straight lines in tokens and KV: constants that somebody has fitted to an engine.

    step = fixed + token x tokens in the batch + KV token x KV tokens read, and an overhead

They know no kernel, and so no other device, model or release than the one they were fitted to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from servecast.costmodels.shape import NS_PER_S, StepCost, StepShape


@dataclass(frozen=True)
class DraftConstants:
    """Of drafting after a step: a line like the step's, or a share of the verification."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    kv_token_s: float = 0.0
    share: float = 0.0


@dataclass(frozen=True)
class StepConstants:
    """What was fitted, and to what.

    Attributes
    ----------
    hardware, model : catalogue names
    overhead_s : of every step, on the host
    drafts : by method
    """

    name: str
    hardware: str
    model: str
    source: str
    fixed_s: float
    token_s: float
    kv_token_s: float
    overhead_s: float
    drafts: Mapping[str, DraftConstants] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What a report says of these step times."""
        return f"constants of {self.name}: {self.source}"


class Affine:
    """Prices steps from constants: a `CostModel`. FLOPs and bytes are not known, and 0."""

    #: Lines know the sum of contexts alone.
    tail_sequences = 0

    def __init__(self, constants: StepConstants) -> None:
        self._constants = constants

    def step(self, shape: StepShape) -> StepCost:
        c = self._constants
        tokens = shape.decode_tokens + sum(new for new, _ in shape.prefills)
        context = shape.decode_context_tokens + sum(before for _, before in shape.prefills)
        return StepCost(
            gemm_s=c.fixed_s + c.token_s * tokens,
            attention_decode_s=c.kv_token_s * context,
            host_s=c.overhead_s,
        )

    def decode(self, decodes: int) -> "AffineDecode":
        return AffineDecode(self, decodes)


class AffineDecode:
    """Steps of so many decodes: a `DecodeCost`."""

    def __init__(self, affine: Affine, decodes: int) -> None:
        self._affine = affine
        self._decodes = decodes
        empty = affine.step(StepShape((), decodes, decodes, 0, decodes))
        one = affine.step(StepShape((), decodes, decodes, 1, decodes))
        self._fixed_ns = empty.total_s * NS_PER_S
        self._rate_ns = one.attention_decode_s * NS_PER_S

    def steps_ns(
        self, context_tokens: int, steps: int, tail_tokens: int = 0
    ) -> npt.NDArray[np.int64]:
        context = context_tokens + self._decodes * np.arange(steps)
        ns: npt.NDArray[np.int64] = np.rint(self._fixed_ns + self._rate_ns * context).astype(
            np.int64
        )
        return ns

    def cost(self, context_tokens: int, tail_tokens: int = 0) -> StepCost:
        decodes = self._decodes
        return self._affine.step(StepShape((), decodes, decodes, context_tokens, decodes))


class AffineDraft:
    """Drafting from constants: a `DraftWork`. All passes of a draft are in one figure."""

    def __init__(self, constants: DraftConstants) -> None:
        self._constants = constants

    def draft(self, shape: StepShape, verify_s: float) -> tuple[float, float, float]:
        if not shape.draft_passes:
            return 0.0, 0.0, 0.0
        c = self._constants
        seconds = c.fixed_s + c.token_s * shape.decode_tokens + c.share * verify_s
        return seconds + c.kv_token_s * shape.draft_context_tokens, 0.0, 0.0
