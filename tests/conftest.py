"""Doubles and data that several test files share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from servecast.costmodels.shape import NS_PER_S, StepCost, StepShape
from servecast.sim.request import RequestTable, Segments

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data measured by others; a stranger's clone does not have it."""
    if not SHARED.is_dir():
        pytest.skip("the measured data (../shared) is not beside this clone")
    return SHARED


class LinearCost:
    """Seconds that grow with tokens and context, and the longest contexts: the simplest cost that
    a schedule can feel."""

    def __init__(
        self, base_s: float, token_s: float, context_s: float, tail_sequences: int = 0
    ) -> None:
        self.base_s, self.token_s, self.context_s = base_s, token_s, context_s
        self.tail_sequences = tail_sequences

    def step(self, shape: StepShape) -> StepCost:
        tokens = sum(new for new, _ in shape.prefills) + shape.decode_tokens
        context = sum(new + old for new, old in shape.prefills) + shape.decode_context_tokens
        context += shape.decode_tail_tokens
        return StepCost(
            gemm_s=self.base_s + self.token_s * tokens, attention_decode_s=self.context_s * context
        )

    def decode(self, decodes: int) -> "LinearDecode":
        return LinearDecode(self, decodes)


class LinearDecode:
    def __init__(self, model: LinearCost, decodes: int) -> None:
        self.model, self.decodes = model, decodes
        self.fixed_s = model.base_s + model.token_s * decodes

    def steps_ns(
        self, context_tokens: int, steps: int, tail_tokens: int = 0
    ) -> list[int] | npt.NDArray[np.int64]:
        fixed, slope, growth = self.fixed_s, self.model.context_s, self.decodes
        context_tokens += tail_tokens
        if steps <= 4:
            return [
                round((fixed + slope * (context_tokens + j * growth)) * NS_PER_S)
                for j in range(steps)
            ]
        contexts = context_tokens + growth * np.arange(steps)
        return np.rint((fixed + slope * contexts) * NS_PER_S).astype(np.int64)

    def cost(self, context_tokens: int, tail_tokens: int = 0) -> StepCost:
        context_s = self.model.context_s * (context_tokens + tail_tokens)
        return StepCost(gemm_s=self.fixed_s, attention_decode_s=context_s)


@pytest.fixture(scope="session")
def linear_cost() -> LinearCost:
    """About an 8B model on a fast GPU; powers of two, so that sums are exact in any order."""
    return LinearCost(2**-8, 2**-16, 2**-25, 3)


def make_table(
    arrival_s: "npt.ArrayLike",
    prompt_tokens: "npt.ArrayLike",
    output_tokens: "npt.ArrayLike",
    shared: list[Segments] | None = None,
    **columns: Any,
) -> RequestTable:
    """A request table from what matters; the rest is as plain as can be."""
    arrival_ns = np.rint(np.asarray(arrival_s, dtype=float) * NS_PER_S).astype(np.int64)
    n = len(arrival_ns)
    defaults: dict[str, Any] = {
        "priority": np.zeros(n, np.int64),
        "klass": np.zeros(n, np.int64),
        "segment_id": np.arange(n, dtype=np.int64) + 1_000_000,
    }
    return RequestTable(
        arrival_ns,
        np.broadcast_to(np.asarray(prompt_tokens, np.int64), (n,)).copy(),
        np.broadcast_to(np.asarray(output_tokens, np.int64), (n,)).copy(),
        shared=shared,
        **{**defaults, **columns},
    )


@pytest.fixture(scope="session")
def table() -> Callable[..., RequestTable]:
    return make_table
