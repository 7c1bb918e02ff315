"""Steps that verify drafts and make the next ones: a cost model around the target's.

A round is one step of the target over 1 + k positions of each sequence, and after it the drafts of
the next: a first pass of the drafter over all that the target saw (its own prefill of a prompt
included), and one more for each further token of a draft (vLLM 0.32, v1/spec_decode/). Drafting
hides the host's time as any work of the device does.

On a device of its own the drafter works ahead: while the target verifies, it drafts on as if all
were accepted. Where that holds, only what takes longer than the verification is seen; a sequence
that had a draft rejected is drafted again, after the verdict has come over the link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from servecast.costmodels.drafting import Drafter, medusa_matrices
from servecast.costmodels.efficiency import Efficiency
from servecast.costmodels.operators import Gemm, gemm
from servecast.costmodels.shape import CostModel, DecodeCost, StepCost, StepShape
from servecast.costmodels.specs import HardwareSpec, ModelSpec

#: Time of an n-gram lookup as a share of the verification (vLLM 0.10.1 on an H100, published with
#: SpecDecode-Bench, arXiv 2601.11580). Suffix lookups are taken to cost the same.
LOOKUP_SHARE = 0.005875

#: Contexts of an octave between which drafting is interpolated: 3 % apart, and what depends on
#: context is a small part of drafting.
CELLS = 32

#: Bytes of a token number.
TOKEN_BYTES = 4


class DraftWork(Protocol):
    """What drafting after a step takes on the drafter's device."""

    def draft(self, shape: StepShape, verify_s: float) -> tuple[float, float, float]:
        """(seconds, FLOPs, bytes); `verify_s` is what the target took on its device."""
        ...


class Lookup:
    """Drafts found in text, by the host."""

    def draft(self, shape: StepShape, verify_s: float) -> tuple[float, float, float]:
        return (LOOKUP_SHARE * verify_s if shape.draft_passes else 0.0), 0.0, 0.0


class Heads:
    """Medusa: all positions at once, from the hidden state of the last token."""

    def __init__(
        self, drafter: Drafter, target: ModelSpec, hardware: HardwareSpec, efficiency: Efficiency
    ) -> None:
        matrices = medusa_matrices(drafter, target)
        self._gemms: list[Gemm] = [gemm(target, m, hardware, efficiency) for m in matrices]
        self._launch_s = sum(m.layers for m in matrices) * efficiency.launch_s

    def draft(self, shape: StepShape, verify_s: float) -> tuple[float, float, float]:
        if not shape.draft_passes:
            return 0.0, 0.0, 0.0
        rows = shape.draft_passes[0]
        work = [matrix.work(rows) for matrix in self._gemms]
        return (
            self._launch_s + sum(matrix.seconds(rows) for matrix in self._gemms),
            sum(flops for flops, _ in work),
            sum(moved for _, moved in work),
        )


class Layers:
    """A model or a head that runs once a depth.

    Parameters
    ----------
    cost : of its steps, without a host's time
    widths : candidates at each depth
    at_once : one pass proposes all depths
    """

    def __init__(self, cost: CostModel, widths: Sequence[int], *, at_once: bool = False) -> None:
        self._cost = cost
        self._widths = tuple(widths)
        self._at_once = at_once
        #: by sequences, tokens and passes, and by context
        self._known: dict[tuple[int, int, tuple[int, ...], int], tuple[float, float, float]] = {}

    def draft(self, shape: StepShape, verify_s: float) -> tuple[float, float, float]:
        """Exact for a step with prompts; between two of 32 contexts an octave where it only
        verifies, which a run does in nearly every step."""
        prefills, decodes, tokens, context, _, passes, drafted = shape[:7]
        if prefills or drafted != context or context < CELLS or not passes:
            return self._priced(shape)
        width = 1 << (context.bit_length() - CELLS.bit_length())
        low = context & -width
        ends = []
        for at in (low, low + width):
            key = decodes, tokens, passes, at
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = self._priced(
                    StepShape((), decodes, tokens, at, 0, passes, at)
                )
            ends.append(found)
        (s, f, m), (s_after, f_after, m_after) = ends
        share = (context - low) / width
        return s + share * (s_after - s), f + share * (f_after - f), m + share * (m_after - m)

    def _priced(self, shape: StepShape) -> tuple[float, float, float]:
        passes = shape.draft_passes
        first = passes[0] if passes else 0
        prefills, decodes, tokens, context = shape[:4]
        if not passes:
            # Speculation is off: what it misses of the decodes is not made up for.
            if not prefills:
                return 0.0, 0.0, 0.0
            decodes = tokens = context = 0
        elif self._at_once and decodes:
            # Each sequence brings a masked token for every further depth.
            tokens += first * (len(self._widths) - 1)
        done = self._cost.step(StepShape(prefills, decodes, tokens, context, first))
        seconds, flops, moved = done.total_s, done.flops, done.bytes
        if self._at_once or len(passes) < 2:
            return seconds, flops, moved
        # A pass reads one more token of each sequence than the one before: the middle stands for
        # those that are alike.
        depth = 1
        mean_context = shape.draft_context_tokens / first
        for (sequences, width), alike in groupby(zip(passes[1:], self._widths, strict=False)):
            times = len(list(alike))
            context = round(sequences * (mean_context + depth + (times - 1) / 2))
            tokens = sequences * width
            again = self._cost.step(StepShape((), sequences, tokens, context, tokens))
            seconds += times * again.total_s
            flops += times * again.flops
            moved += times * again.bytes
            depth += times
        return seconds, flops, moved


@dataclass(frozen=True)
class Link:
    """To the drafter's own device."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, tokens: int) -> float:
        """To hand over token numbers."""
        return self.latency_s + tokens * TOKEN_BYTES / self.bytes_per_s


class Speculative:
    """A target's cost model with drafting after each step: a `CostModel`.

    Parameters
    ----------
    hides_host : the host's time of a step is what the device does not cover
    link : to the drafter's own device; None where it shares the target's
    """

    def __init__(
        self, target: CostModel, work: DraftWork, *, hides_host: bool, link: Link | None = None
    ) -> None:
        self.target = target
        self._work = work
        self._hides_host = hides_host
        self._link = link

    @property
    def tail_sequences(self) -> int:
        """Of the target."""
        return self.target.tail_sequences

    def step(self, shape: StepShape) -> StepCost:
        """Cost of any step, drafting included."""
        cost = self.target.step(shape)
        device_s = cost.total_s - cost.host_s
        draft_s, flops, moved = self._work.draft(shape, device_s)
        if self._link is not None:
            draft_s = self._exposed_s(shape, device_s, draft_s, self._link)
            flops = moved = 0.0
        host_s = max(0.0, cost.host_s - draft_s) if self._hides_host else cost.host_s
        return cost._replace(
            draft_s=draft_s, host_s=host_s, flops=cost.flops + flops, bytes=cost.bytes + moved
        )

    def decode(self, decodes: int) -> DecodeCost:
        """Cost of steps in which nothing is verified and nothing drafted."""
        return self.target.decode(decodes)

    def _exposed_s(self, shape: StepShape, verify_s: float, ahead_s: float, link: Link) -> float:
        """What of the drafting on another device is waited for."""
        passes = shape.draft_passes
        if not passes:
            return max(0.0, ahead_s - verify_s)
        handed_s = link.seconds(sum(passes))
        if not shape.redrafted:
            return max(0.0, ahead_s - verify_s) + handed_s
        share = shape.redrafted / passes[0]
        again = shape._replace(
            prefills=(),
            decodes=shape.redrafted,
            decode_tokens=shape.redrafted,
            decode_context_tokens=round(share * shape.draft_context_tokens),
            draft_passes=tuple(min(shape.redrafted, n) for n in passes),
            draft_context_tokens=round(share * shape.draft_context_tokens),
        )
        again_s, _, _ = self._work.draft(again, verify_s)
        prompts_s = 0.0
        if shape.prefills:
            # Its own prefill of a prompt must be through before it can draft for it.
            alone = shape._replace(
                decodes=0, decode_tokens=0, decode_context_tokens=0, draft_passes=()
            )
            prompts_s = max(0.0, self._work.draft(alone, verify_s)[0] - verify_s)
        return prompts_s + link.seconds(shape.redrafted) + again_s + handed_s
