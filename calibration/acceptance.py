"""Acceptance of drafts: each request has a quality of its own, fitted to recorded lengths.

What is recorded is how many tokens a round of k drafts emitted, the bonus token included. The
process that is fitted is `servecast.sim.acceptance.Hierarchical`, the one that is simulated: rates
by position that decay, a quality that each request has of its own, and a first draft that fares as
in the round before now and then, because texts that repeat go on repeating.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from servecast.costmodels.errors import InputError
from servecast.costmodels.reading import read_bytes
from servecast.sim.acceptance import (
    FIRST,
    PROBABILITIES,
    Hierarchical,
    iid,
    logistic,
    logit,
    tokens_a_round,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_BYTES = 500_000_000

PREFIX = "acc_len_"

#: Times that the requests of a sample are drawn to see what a model predicts.
DRAWS = 40

#: Depths that are tried: an n-gram that matches goes on alike in all requests, a model's draft
#: does not.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

#: Samples of a bootstrap.
RESAMPLES = 500

FIT_STEPS, WIDTH_STEPS, WIDTH_DRAWS = 40, 10, 6

#: Rates are kept away from 0 and 1 by so much.
EDGE = 1e-3

STATISTICS = ("mean", "p5", "p50", "p95")


@dataclass(frozen=True)
class Recorded:
    """Tokens emitted in each round of one request."""

    rounds: IntArray

    @property
    def tokens(self) -> int:
        return int(self.rounds.sum())

    @property
    def mean(self) -> float:
        """Its acceptance length: tokens a round."""
        return float(self.rounds.mean())


@dataclass(frozen=True)
class Decay:
    """Rates that fall from position to position: first, first x decay, first x decay^2, ...

    With a decay of 1 this is iid.
    """

    first: float
    decay: float

    def rates(self, k: int) -> FloatArray:
        """Of k positions, each given that those before it were accepted."""
        rates: FloatArray = np.clip(self.first * self.decay ** np.arange(k), 0.0, 1.0)
        return rates

    def tokens_a_round(self, k: int) -> float:
        """One, and one for every position that is reached."""
        return 1.0 + float(np.cumprod(self.rates(k)).sum())


def fit_decay(lengths: Mapping[int, float]) -> Decay:
    """The curve of mean acceptance lengths by k, least squares of relative errors.

    Raises InputError for fewer than two points, and for lengths that no k can have.
    """
    from scipy.optimize import least_squares

    if len(lengths) < 2 or any(not 1 <= lengths[k] <= k + 1 for k in lengths):
        raise InputError("acceptance: expected two lengths or more, from 1 to k + 1")

    def errors(point: FloatArray) -> list[float]:
        model = Decay(*point)
        return [float(np.log(model.tokens_a_round(k) / lengths[k])) for k in lengths]

    found = least_squares(errors, [0.7, 0.9], bounds=([EDGE, EDGE], [1.0, 1.5]))
    return Decay(float(found.x[0]), float(found.x[1]))


def read_lengths(path: Path) -> dict[str, list[IntArray]]:
    """Method to each request's `acc_len_<method>`: what a round would emit at every position.

    Raises InputError naming file and line for anything else.
    """
    found: dict[str, list[IntArray]] = {}
    try:
        lines = read_bytes(path, MAX_BYTES).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            for key, lengths in record.items():
                if key.startswith(PREFIX) and lengths:
                    row = np.array(lengths, dtype=np.int64)
                    if row.ndim != 1 or row.min() < 1 or list(row) != lengths:
                        raise ValueError(f"{key}: expected whole numbers, 1 or more")
                    found.setdefault(key.removeprefix(PREFIX), []).append(row)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise InputError(f"{path}:{number}: not recorded acceptance: {error}") from None
    if not found:
        raise InputError(f"{path}: no request with {PREFIX}<method>")
    return found


def replay(lengths: IntArray, k: int) -> Recorded:
    """The rounds that drafts of k tokens would have taken over recorded lengths."""
    rounds = []
    at = 0
    while at < len(lengths):
        emitted = min(int(lengths[at]), k + 1)
        rounds.append(emitted)
        at += emitted
    return Recorded(np.array(rounds, np.int64))


def rounds_of(
    process: Hierarchical, k: int, tokens: int, draws: int, generator: np.random.Generator
) -> list[IntArray]:
    """Tokens of each round of a request of so many tokens, drawn several times."""
    uniforms = generator.random((FIRST + k, draws * tokens))
    starts = np.arange(draws) * tokens
    accepted = process.accepted(uniforms, starts, np.arange(draws))
    emitted = np.maximum(accepted, 0).reshape(draws, tokens) + 1
    lasts = (emitted.cumsum(axis=1) < tokens).sum(axis=1)
    return [row[: last + 1] for row, last in zip(emitted, lasts.tolist(), strict=True)]


def fit_iid(requests: Sequence[Recorded], k: int) -> Hierarchical:
    """One rate for all: accepted drafts over those that were tried."""
    accepted = sum(int((request.rounds - 1).sum()) for request in requests)
    tried = sum(int(np.minimum(request.rounds, k).sum()) for request in requests)
    return iid(accepted / tried)


def fit_hierarchical(requests: Sequence[Recorded], k: int) -> Hierarchical:
    """Rates by position, the distribution of qualities, and persistence.

    The shape of the distribution is that of the requests' own most likely qualities; its width is
    set so that the requests' acceptance lengths come out as wide as they are. Raises InputError for
    fewer than two requests.
    """
    if len(requests) < 2:
        raise InputError("acceptance: two requests at least are needed for their distribution")
    # Trials and successes of each request at each position.
    passed = np.array([[float((r.rounds > j).sum()) for j in range(1, k + 1)] for r in requests])
    tried = np.array([[float((r.rounds >= j).sum()) for j in range(1, k + 1)] for r in requests])
    persistence = _persistence(requests)
    # A round that repeats the one before says nothing new.
    worth = (1.0 - persistence) / (1.0 + persistence)
    fits = [_map_fit(worth * passed, worth * tried, depth) for depth in DEPTHS]
    _, rates, offsets, depth = max(fits, key=lambda fit: fit[0])
    shape = np.quantile(offsets - offsets.mean(), PROBABILITIES)
    width = _width([request.mean for request in requests])
    middle = float(np.mean([request.mean for request in requests]))
    base = logit(rates) + offsets.mean() * np.where(np.arange(k) > 0, depth, 1.0)

    def model(scale: float, shift: float) -> Hierarchical:
        rates, quality = logistic(base + shift).tolist(), (scale * shape).tolist()
        return Hierarchical(tuple(rates), tuple(quality), persistence, depth)

    # Width and mean in turn, on the same random numbers.
    scale, shift = 1.0, 0.0
    for _ in range(WIDTH_STEPS):
        means = _drawn(model(scale, shift), requests, k, WIDTH_DRAWS, seed=0)
        scale *= float(np.clip(width / max(_width(means), 1e-9), 0.5, 2.0))
        shift += float(np.clip(3.0 * (middle - np.mean(means)) / middle, -0.5, 0.5))
    return model(scale, shift)


def _width(means: Sequence[float]) -> float:
    """Between p5 and p95: a few requests that repeat themselves must not set it."""
    low, high = np.percentile(means, [5.0, 95.0])
    return float(high - low)


def _map_fit(
    passed: FloatArray, tried: FloatArray, depth: float
) -> tuple[float, FloatArray, FloatArray, float]:
    """(log likelihood, rates, qualities, depth) with a normal prior of fitted width."""
    weight = np.where(np.arange(passed.shape[1]) > 0, depth, 1.0)
    share = np.clip(passed.sum(0) / np.maximum(tried.sum(0), EDGE), EDGE, 1 - EDGE)
    base, spread = logit(share), 0.5
    offsets, variances = np.zeros(len(passed)), np.ones(len(passed))
    for _ in range(FIT_STEPS):
        offsets, variances = _offsets(passed, tried, base, weight, spread)
        spread = max(EDGE, float(np.sqrt(np.mean(offsets**2 + variances))))
        expected = (tried * logistic(base + offsets[:, None] * weight)).sum(0)
        seen = np.clip(expected / np.maximum(tried.sum(0), EDGE), EDGE, 1 - EDGE)
        base = base + np.clip(logit(share) - logit(seen), -1.0, 1.0)
    chances = np.clip(logistic(base + offsets[:, None] * weight), 1e-9, 1 - 1e-9)
    fit = (passed * np.log(chances) + (tried - passed) * np.log(1 - chances)).sum()
    # Laplace's approximation of the integral over qualities.
    fit += float((0.5 * np.log(variances / spread**2) - offsets**2 / (2 * spread**2)).sum())
    return float(fit), logistic(base), offsets, depth


def _offsets(
    passed: FloatArray, tried: FloatArray, base: FloatArray, weight: FloatArray, spread: float
) -> tuple[FloatArray, FloatArray]:
    """Each request's most likely quality and its variance, with a normal prior; Newton's method."""
    offsets = np.zeros(len(passed))
    curvature = np.ones(len(passed))
    for _ in range(50):
        chances = logistic(base + offsets[:, None] * weight)
        slope = ((passed - tried * chances) * weight).sum(1) - offsets / spread**2
        curvature = (tried * chances * (1 - chances) * weight**2).sum(1) + 1 / spread**2
        step = np.clip(slope / curvature, -1.0, 1.0)
        offsets = offsets + step
        if np.abs(step).max() < 1e-9:
            break
    return offsets, 1.0 / curvature


def _persistence(requests: Sequence[Recorded]) -> float:
    """Correlation of acceptance from one round to the next, within requests."""
    above = below = 0.0
    for request in requests:
        first = (request.rounds > 1).astype(float)
        if len(first) > 2:
            centred = first - first.mean()
            above += float((centred[1:] * centred[:-1]).sum()) + float(first.var())
            below += float((centred[1:] ** 2).sum())
    return float(np.clip(above / below, 0.0, 0.95)) if below else 0.0


def summary(means: Sequence[float]) -> dict[str, float]:
    """Mean, p5, p50 and p95 of per-request acceptance lengths."""
    values = np.asarray(means, float)
    return {
        "mean": float(values.mean()),
        **{name: float(np.percentile(values, float(name[1:]))) for name in STATISTICS[1:]},
    }


def bootstrap(means: Sequence[float], seed: int) -> dict[str, list[float]]:
    """90 % intervals of `summary`, over resampled requests."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 1]))
    values = np.asarray(means, float)
    drawn = [summary(generator.choice(values, len(values)).tolist()) for _ in range(RESAMPLES)]
    return {
        name: np.percentile([row[name] for row in drawn], [5.0, 95.0]).tolist()
        for name in STATISTICS
    }


def fitted(lengths: Mapping[str, Sequence[IntArray]], k: int) -> dict[str, Any]:
    """Fits of all requests, by method, as plain numbers."""
    found: dict[str, Any] = {}
    for method, rows in lengths.items():
        requests = [replay(row, k) for row in rows]
        model, alpha = fit_hierarchical(requests, k), fit_iid(requests, k).rates[0]
        found[method] = {
            "requests": len(requests),
            "observed": summary([request.mean for request in requests]),
            "hierarchical": {
                "rates": np.round(model.rates, 4).tolist(),
                "quality": np.round(model.quality, 4).tolist(),
                "persistence": round(model.persistence, 4),
                "depth": model.depth,
            },
            "iid": {"alpha": round(alpha, 4), "tokens_a_round": round(tokens_a_round(alpha, k), 4)},
        }
    return found


def predicted(
    model: Hierarchical, requests: Sequence[Recorded], k: int, seed: int
) -> dict[str, float]:
    """What a model says of requests of such lengths."""
    return summary(_drawn(model, requests, k, DRAWS, seed))


def _drawn(
    model: Hierarchical, requests: Sequence[Recorded], k: int, draws: int, seed: int
) -> list[float]:
    """Acceptance lengths of requests as long as these, each drawn several times."""
    means: list[float] = []
    for at, request in enumerate(requests):
        generator = np.random.Generator(np.random.Philox(key=[seed, at]))
        drawn = rounds_of(model, k, request.tokens, draws, generator)
        means += [float(rounds.mean()) for rounds in drawn]
    return means


def hold_out(
    lengths: Mapping[str, Sequence[IntArray]], k: int, share: float, seed: int
) -> dict[str, Any]:
    """Fit on some requests of each method, predict the others.

    Returns `{method: {"observed", "hierarchical", "iid"}}`, each `{mean, p5, p50, p95}`, and
    `interval`, the 90 % bootstrap interval of each that was observed. Raises InputError where a
    part is left without requests.
    """
    if not 0.0 < share < 1.0:
        raise InputError(f"--holdout {share:g}: expected a share between 0 and 1")
    found: dict[str, Any] = {}
    for method, rows in lengths.items():
        requests = [replay(row, k) for row in rows]
        order = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(requests))
        out = round(share * len(requests))
        if not 1 <= out <= len(requests) - 2:
            raise InputError(f"--holdout {share:g}: leaves too few of {len(requests)} requests")
        left_out = [requests[at] for at in order[:out]]
        kept = [requests[at] for at in order[out:]]
        found[method] = {
            "observed": summary([request.mean for request in left_out]),
            "interval": bootstrap([request.mean for request in left_out], seed),
            "hierarchical": predicted(fit_hierarchical(kept, k), left_out, k, seed),
            "iid": predicted(fit_iid(kept, k), left_out, k, seed),
        }
    return found
