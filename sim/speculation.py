"""Speculative decoding as a replica runs it: how many drafts, whose, and what becomes of them.

The scheduler asks how many tokens a sequence may draft after a step, and how many of its drafts
were accepted; the policies stand here. A round's luck was drawn before (`acceptance.py`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from servecast.costmodels.shape import CostModel, StepShape
from servecast.sim.acceptance import Acceptance, Draws
from servecast.sim.plan import StepPlan
from servecast.sim.sequence import Sequence


class Drafting(Protocol):
    """What the scheduler asks of speculation."""

    @property
    def depth(self) -> int:
        """Passes of the drafter at most."""
        ...

    def begin(self, running: int, context_tokens: Callable[[], int]) -> int | None:
        """Drafts that every sequence of the step makes, or None where sequences differ.

        Parameters
        ----------
        running : sequences in the batch
        context_tokens : gives their computed tokens together
        """
        ...

    def tokens(self, seq: Sequence) -> int:
        """Drafts that this one makes."""
        ...

    def proposal(self, seq: Sequence, tokens: int) -> int:
        """Drafts there are in the end, up to `tokens`, known when the step's output is."""
        ...

    def accept(self, seq: Sequence, drafts: int, *, padded: bool) -> int:
        """How many of a sequence's drafts are accepted; `padded` ones stand for nothing."""
        ...


class FullDrafts:
    """Every sequence always drafts as many tokens, none of which are accepted."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.depth = tokens

    def begin(self, running: int, context_tokens: Callable[[], int]) -> int | None:
        return self._tokens

    def tokens(self, seq: Sequence) -> int:
        return self._tokens

    def proposal(self, seq: Sequence, tokens: int) -> int:
        return tokens

    def accept(self, seq: Sequence, drafts: int, *, padded: bool) -> int:
        return 0


@dataclass(frozen=True)
class AdaptiveTokens:
    """A request's k follows its own acceptance: after each `window` rounds, one more token where
    more than `raise_above` of the drafts were accepted, one less below `lower_below`. A round is
    under way by then, and keeps the number it has."""

    window: int = 10
    raise_above: float = 0.8
    lower_below: float = 0.5
    least: int = 4
    most: int = 8

    def first(self, tokens: int) -> int:
        """A request's k until a window is over."""
        return min(max(tokens, self.least), self.most)


@dataclass(frozen=True)
class Speculation:
    """How a deployment speculates.

    Attributes
    ----------
    tokens : drafts of a round (`num_speculative_tokens`; the nodes of a tree)
    depth : drafts that can be accepted at most: `tokens`, or the depth of a tree
    eligible : of each class of requests; empty for all
    lookup : a round may have no draft
    ahead : drafts are made ahead, on a device of their own
    disable_by_batch_size : no drafts in batches above it
    schedule : (first, last, tokens) by sequences in the batch; else `tokens`
    min_tokens, min_running : no drafts for a sequence up to so long, or in a smaller batch
    longest : no drafts for a sequence that they would take beyond so many tokens
    adaptive, goodput : k by a request's acceptance, or each step by predicted tokens a second
    """

    acceptance: Acceptance
    seed: int
    tokens: int
    depth: int
    eligible: tuple[bool, ...] = ()
    lookup: bool = False
    ahead: bool = False
    disable_by_batch_size: int | None = None
    schedule: tuple[tuple[int, int, int], ...] = ()
    min_tokens: int = 0
    min_running: int = 0
    longest: int | None = None
    adaptive: AdaptiveTokens | None = None
    goodput: bool = False

    @property
    def most_tokens(self) -> int:
        """Drafts of any round."""
        listed = [tokens for _, _, tokens in self.schedule]
        adaptive = [self.adaptive.most] if self.adaptive else []
        return max([self.tokens, *listed, *adaptive])

    @property
    def most_depth(self) -> int:
        """Drafts that can be accepted in any round."""
        return self.depth if self.depth < self.tokens else self.most_tokens

    @property
    def most_accepted(self) -> int:
        """What a round's luck is drawn for: where drafts are made ahead, one token more."""
        return self.most_depth + self.ahead

    @property
    def by_sequence(self) -> bool:
        """Whether sequences of a batch may differ in k."""
        unlike = self.min_tokens or self.adaptive or self.longest is not None
        return bool(unlike) or not all(self.eligible)


class Speculator:
    """The speculation of one replica.

    Parameters
    ----------
    draws : luck of the requests
    cost : prices a step, for a k by goodput
    """

    def __init__(self, settings: Speculation, draws: Draws, cost: CostModel) -> None:
        self._settings = settings
        self._draws = draws
        self.depth = settings.most_depth
        #: how often so many drafts had so many accepted
        self.tally: Counter[tuple[int, int]] = Counter()
        self._goodput = Goodput(settings.tokens, cost) if settings.goodput else None
        self._step_tokens = settings.tokens

    def enrol(self, seq: Sequence) -> None:
        """Give a sequence the luck of its request."""
        seq.luck, seq.luck_by_position = self._draws.take(seq.index)

    # ---------------------------------------------------------------- how many

    def begin(self, running: int, context_tokens: Callable[[], int]) -> int | None:
        s = self._settings
        tokens = s.tokens
        if (
            s.disable_by_batch_size is not None and running > s.disable_by_batch_size
        ) or running < s.min_running:
            tokens = 0
        elif self._goodput is not None:
            tokens = self._goodput.tokens(running, context_tokens())
        elif s.schedule:
            found = [k for first, last, k in s.schedule if first <= running <= last]
            tokens = found[0] if found else tokens
        self._step_tokens = tokens
        return None if tokens and s.by_sequence else tokens

    def tokens(self, seq: Sequence) -> int:
        s = self._settings
        if s.eligible and not s.eligible[seq.klass]:
            return 0
        if seq.known_tokens <= s.min_tokens:
            return 0
        if s.longest is not None and seq.known_tokens + s.most_tokens >= s.longest:
            return 0
        if s.adaptive is not None:
            return seq.adapted or s.adaptive.first(s.tokens)
        return self._step_tokens

    def proposal(self, seq: Sequence, tokens: int) -> int:
        if tokens and self._settings.lookup and self._luck(seq) < 0:
            seq.rounds += 1
            return 0
        return tokens

    # ---------------------------------------------------------------- what becomes of them

    def accept(self, seq: Sequence, drafts: int, *, padded: bool) -> int:
        if padded:
            return 0
        s = self._settings
        accepted = self._luck(seq)
        seq.rounds += 1
        reach = self._reach(drafts)
        if accepted > reach:
            accepted = reach
        elif accepted < 0:
            accepted = 0
        self.tally[reach, accepted] += 1
        if s.adaptive is not None:
            self._adapt(s.adaptive, seq, drafts, accepted)
        if self._goodput is not None:
            self._goodput.see(drafts, accepted)
        return accepted

    def void(self, plan: StepPlan) -> int:
        """Sequences whose drafts made ahead of a verification will be void: a draft is rejected, or
        the token that the target adds is another than the drafter's; or there were none."""
        if not self._settings.ahead:
            return 0
        kept = [
            seq
            for seq, drafts in plan.spec.items()
            if seq in plan.emitting and seq not in plan.padded
            if self._luck(seq) > self._reach(drafts)
        ]
        return len(plan.emitting) - len(kept)

    def _reach(self, drafts: int) -> int:
        """Drafts that can be accepted; of a tree that was cut short, as much less of its depth."""
        s = self._settings
        return drafts if s.depth == s.tokens else s.depth * drafts // s.tokens

    def _luck(self, seq: Sequence) -> int:
        at = seq.output_tokens - 1 if seq.luck_by_position else seq.rounds
        return seq.luck[at] - 1

    def _adapt(self, rule: AdaptiveTokens, seq: Sequence, drafts: int, accepted: int) -> None:
        seq.window_rounds += 1
        seq.window_drafts += drafts
        seq.window_accepted += accepted
        if seq.window_rounds < rule.window:
            return
        share = seq.window_accepted / seq.window_drafts
        now = seq.adapted or rule.first(self._settings.tokens)
        if share > rule.raise_above:
            now = min(now + 1, rule.most)
        elif share < rule.lower_below:
            now = max(now - 1, rule.least)
        seq.adapted = now
        seq.window_rounds = seq.window_drafts = seq.window_accepted = 0


class Goodput:
    """The k with the most expected tokens a second (SmartSpec, arXiv 2406.14066).

    Expected tokens come from the conditional rates seen so far, position by position; each rate
    starts as if `PRIOR` drafts had been seen, and all but one of them accepted. Time comes from
    the cost model, for the batch at hand.
    """

    PRIOR = 10

    #: Contexts within this factor are priced alike.
    STEP = 1.1

    def __init__(self, most: int, cost: CostModel) -> None:
        self._most = most
        self._cost = cost
        self._tried = [self.PRIOR] * most
        self._accepted = [self.PRIOR - 1] * most
        self._seconds: dict[tuple[int, int], list[float]] = {}

    def see(self, drafts: int, accepted: int) -> None:
        """Learn from a round."""
        for j in range(min(accepted + 1, drafts)):
            self._tried[j] += 1
            self._accepted[j] += j < accepted

    def tokens(self, running: int, context_tokens: int) -> int:
        """The best number of drafts for a batch of so many sequences."""
        if not running:
            return self._most
        bucket = 0
        while self.STEP**bucket < context_tokens:
            bucket += 1
        seconds = self._seconds.get((running, bucket))
        if seconds is None:
            seconds = self._priced(running, round(self.STEP**bucket))
            self._seconds[running, bucket] = seconds
        best, best_rate = 0, 1.0 / seconds[0]
        expected = reached = 1.0
        for k in range(1, self._most + 1):
            reached *= self._accepted[k - 1] / self._tried[k - 1]
            expected += reached
            if expected / seconds[k] > best_rate:
                best, best_rate = k, expected / seconds[k]
        return best

    def _priced(self, running: int, context: int) -> list[float]:
        """Seconds of a round by k."""
        return [
            self._cost.step(
                StepShape(
                    decodes=running,
                    decode_tokens=running * (1 + k),
                    decode_context_tokens=context + running * (1 + k),
                    sampled=running * (1 + k),
                    draft_passes=(running,) * k,
                    draft_context_tokens=context,
                )
            ).total_s
            for k in range(self._most + 1)
        ]
