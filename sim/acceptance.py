"""How many drafts of a round are accepted: processes, and the draws of a run.

A round verifies some drafts, keeps the longest prefix that the target agrees with and emits one
token more. Everything is drawn before a request runs, as if every round drafted as many tokens as
any may: a round with fewer drafts keeps the shorter of the two. Request i has random numbers of
its own, round by round and position by position, so that runs that differ in k, policy or load
meet the same luck, and a larger k never accepts less of the same round.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from servecast.sim.request import RequestTable
from servecast.sim.rng import stream

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Steps of probability at which a distribution of qualities is kept, as it is fitted.
PROBABILITIES = np.linspace(0.01, 0.99, 50)

#: A round in which nothing is drafted: no n-gram matched.
NO_DRAFT = -1

#: Rows of uniform numbers before those of the positions: whether the round before is repeated,
#: the request's quality (in its first round), and whether an n-gram matched for nothing.
REPEAT, QUALITY, MATCH, FIRST = range(4)

#: Requests, and rounds of them, that are drawn together at most.
CHUNK, CHUNK_ROUNDS = 256, 100_000

#: Positions that luck is drawn for: the first of these that is enough. Fixed, so that no k among
#: them changes the luck of another.
WIDTHS = (8, 16, 64, 256)

#: Rates are kept away from 0 and 1 by so much where they go through a logit.
EDGE = 1e-9


class Process(Protocol):
    """Accepted drafts of each round of many requests."""

    @property
    def by_position(self) -> bool:
        """Whether entry p of a request is for the round that follows output token p + 1, and not
        for its p-th round."""
        ...

    def accepted(self, uniforms: FloatArray, starts: IntArray, requests: IntArray) -> IntArray:
        """Drafts accepted in each round, or NO_DRAFT.

        Parameters
        ----------
        uniforms : (FIRST + most, rounds): of all requests, one after another
        starts : first round of each request
        requests : their numbers
        """
        ...

    def warmed(self, factor: float) -> "Process":
        """With every conditional rate of acceptance multiplied by `factor`, and at most 1."""
        ...


@dataclass(frozen=True)
class Hierarchical:
    """Rates by position around a quality of each request; without qualities all are alike.

    Position j is accepted, given that those before it were, with probability

        logit p_j(request) = logit r_j + quality(request) x (1 for the first position, else depth)

    Attributes
    ----------
    rates : r_j; beyond the last, the last holds
    quality : quantiles of a request's logit offset, at equal steps of probability from the first
        of `PROBABILITIES` to the last; empty for none
    persistence : probability that a round's first draft fares as that of the round before
    depth : how much of a request's quality its later positions have
    match : probability that a round whose first draft would be rejected drafts at all
    factor : see `warmed`
    """

    rates: tuple[float, ...]
    quality: tuple[float, ...] = ()
    persistence: float = 0.0
    depth: float = 1.0
    match: float = 1.0
    factor: float = 1.0

    by_position = False

    def chances(self, most: int, quality: FloatArray) -> FloatArray:
        """(most, requests): conditional rates of requests with these uniform numbers."""
        rates = np.array([*self.rates, *[self.rates[-1]] * most][:most])
        if not self.quality:
            chances = np.repeat(rates[:, None], len(quality), axis=1)
        else:
            steps = np.linspace(PROBABILITIES[0], PROBABILITIES[-1], len(self.quality))
            offset = np.interp(quality, steps, self.quality)
            weight = np.where(np.arange(most) > 0, self.depth, 1.0)
            chances = logistic(logit(rates)[:, None] + weight[:, None] * offset)
        return np.minimum(self.factor * chances, 1.0)

    def accepted(self, uniforms: FloatArray, starts: IntArray, requests: IntArray) -> IntArray:
        most, rounds = len(uniforms) - FIRST, uniforms.shape[1]
        lengths = np.diff(starts, append=rounds)
        chances = self.chances(most, uniforms[QUALITY, starts])
        kept = uniforms[FIRST:] < np.repeat(chances, lengths, axis=1)
        first = kept[0]
        if self.persistence:
            # The first position of a round that repeats is that of the last which did not.
            drawn = np.where(uniforms[REPEAT] < self.persistence, 0, np.arange(rounds))
            drawn[starts] = starts
            first = first[np.maximum.accumulate(drawn)]
        further = np.logical_and.accumulate(kept[1:], axis=0).sum(axis=0)
        found = np.where(first, 1 + further, 0).astype(np.int64)
        if self.match < 1.0:
            found[~first & (uniforms[MATCH] >= self.match)] = NO_DRAFT
        return found

    def warmed(self, factor: float) -> "Hierarchical":
        return replace(self, factor=self.factor * factor)


def iid(alpha: float) -> Hierarchical:
    """Every draft of every request accepted alike."""
    return Hierarchical((alpha,))


def tokens_a_round(alpha: float, k: int) -> float:
    """(1 - alpha^(k+1)) / (1 - alpha), of iid (Leviathan et al., arXiv 2211.17192, eq. 1)."""
    return float(k + 1) if alpha >= 1.0 else (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


@dataclass(frozen=True)
class Mean:
    """Every round accepts the mean, as nearly as whole tokens can: no luck at all."""

    accepted_tokens: float

    by_position = False

    def accepted(self, uniforms: FloatArray, starts: IntArray, requests: IntArray) -> IntArray:
        rounds = uniforms.shape[1]
        number = np.arange(rounds) - np.repeat(starts, np.diff(starts, append=rounds))
        owed = np.floor((number + 1) * self.accepted_tokens + 1e-9)
        due = owed - np.floor(number * self.accepted_tokens + 1e-9)
        found: IntArray = np.minimum(due, len(uniforms) - FIRST).astype(np.int64)
        return found

    def warmed(self, factor: float) -> "Mean":
        return Mean(self.accepted_tokens * factor)


@dataclass(frozen=True)
class RecordedLengths:
    """Lengths recorded at every output position; request i has row i of them, around and around.

    Attributes
    ----------
    rows : tokens that a round would emit, the bonus token included, by position
    match : as in `Hierarchical`: what was recorded does not tell a rejected draft from none
    factor : probability that an accepted draft stays accepted
    """

    rows: tuple[IntArray, ...]
    match: float = 1.0
    factor: float = 1.0

    by_position = True

    def accepted(self, uniforms: FloatArray, starts: IntArray, requests: IntArray) -> IntArray:
        most, rounds = len(uniforms) - FIRST, uniforms.shape[1]
        lengths = np.diff(starts, append=rounds)
        parts = [
            np.resize(self.rows[request % len(self.rows)], length)
            for request, length in zip(requests.tolist(), lengths.tolist(), strict=True)
        ]
        found = np.minimum(np.concatenate(parts).astype(np.int64) - 1, most)
        if self.factor < 1.0:
            stays = np.logical_and.accumulate(uniforms[FIRST:] < self.factor, axis=0)
            found = np.minimum(found, stays.sum(axis=0))
        if self.match < 1.0:
            found[(found == 0) & (uniforms[MATCH] >= self.match)] = NO_DRAFT
        return found

    def warmed(self, factor: float) -> "RecordedLengths":
        return replace(self, factor=min(1.0, self.factor * factor))


@dataclass(frozen=True)
class Acceptance:
    """Of which process a request is: one of its class's, at random by weight.

    Attributes
    ----------
    domains : of each class, (weight, process)
    """

    domains: tuple[tuple[tuple[float, Process], ...], ...]


class Draws:
    """What each request of a load will accept, drawn a chunk of requests at a time.

    Parameters
    ----------
    table : the load
    most : drafts of one round at most
    max_model_len : outputs end there
    """

    def __init__(
        self,
        acceptance: Acceptance,
        table: RequestTable,
        most: int,
        seed: int,
        max_model_len: int = 1 << 62,
    ) -> None:
        self._domains = acceptance.domains
        self._klass = table.klass
        left = np.maximum(max_model_len - table.prompt_tokens, 1)
        self._tokens = np.minimum(table.output_tokens, left)
        rounds = np.cumsum(self._tokens) // CHUNK_ROUNDS
        number = np.arange(len(table)) // CHUNK
        new = (np.diff(rounds, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0)
        #: where each chunk of requests begins
        self._starts = np.append(np.flatnonzero(new), len(table))
        self._most = most
        self._width = FIRST + next(width for width in WIDTHS if width >= most)
        root = stream(seed, "acceptance")
        key = int(root.integers(2**63))
        self._domain = root.random(len(table))
        self._bits = np.random.Philox(key=key)
        self._state = self._bits.state
        self._generator = np.random.Generator(self._bits)
        self._rows: dict[int, tuple[bytes, bool]] = {}

    def take(self, request: int) -> tuple[bytes, bool]:
        """A request's accepted drafts, each with one added (0 is NO_DRAFT), and whether they are
        by output position. They are handed out once."""
        if request not in self._rows:
            chunk = int(np.searchsorted(self._starts, request, side="right"))
            self._draw(np.arange(self._starts[chunk - 1], self._starts[chunk]))
        return self._rows.pop(request)

    def _draw(self, requests: IntArray) -> None:
        for klass in np.unique(self._klass[requests]).tolist():
            mine = requests[self._klass[requests] == klass]
            weights = np.array([weight for weight, _ in self._domains[klass]])
            edges = np.cumsum(weights)[:-1] / weights.sum()
            domain = np.searchsorted(edges, self._domain[mine], side="right")
            for number, (_, process) in enumerate(self._domains[klass]):
                self._draw_alike(process, mine[domain == number])

    def _draw_alike(self, process: Process, requests: IntArray) -> None:
        if not len(requests):
            return
        lengths = self._tokens[requests]
        starts = np.cumsum(lengths) - lengths
        rows = np.empty((int(lengths.sum()), self._width))
        for request, start, length in zip(
            requests.tolist(), starts.tolist(), lengths.tolist(), strict=True
        ):
            self._fill(request, rows[start : start + length])
        uniforms = np.ascontiguousarray(rows[:, : FIRST + self._most].T)
        found = (process.accepted(uniforms, starts, requests) + 1).astype(np.uint8).tobytes()
        for request, start, length in zip(
            requests.tolist(), starts.tolist(), lengths.tolist(), strict=True
        ):
            self._rows[request] = found[start : start + length], process.by_position

    def _fill(self, request: int, rows: FloatArray) -> None:
        """Round after round: a longer output or a larger `most` adds to them and changes none."""
        state = self._state
        state["state"]["counter"][:] = 0, 0, request, 0
        state["buffer_pos"] = 4
        self._bits.state = state
        self._generator.random(out=rows)


def logit(p: FloatArray) -> FloatArray:
    """Of rates, which may be 0 or 1."""
    kept = np.clip(p, EDGE, 1 - EDGE)
    odds: FloatArray = np.log(kept / (1 - kept))
    return odds


def logistic(x: FloatArray) -> FloatArray:
    p: FloatArray = 1.0 / (1.0 + np.exp(-x))
    return p
