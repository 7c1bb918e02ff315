"""How long prompts and outputs are: a number in (0, 1) a request, read through quantiles.

The same number gives the same rank in every distribution, so a change of lengths moves
neither arrivals nor which request is the long one.
"""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from servecast.scenarios.schema import (
    EmpiricalLengths,
    FixedLengths,
    Lengths,
    Lognormal,
    LognormalLengths,
    TokenRange,
    UniformLengths,
)
from servecast.scenarios.traces import read_trace
from servecast.sim.request import IntArray

FloatArray = npt.NDArray[np.float64]
Warn = Callable[[str], None]

_Z95 = NormalDist().inv_cdf(0.95)


def draw_lengths(
    lengths: Lengths, rank_in: FloatArray, rank_out: FloatArray, base_dir: Path, warn: Warn
) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens, at least 1 each.

    Parameters
    ----------
    rank_in, rank_out : one number a request, 0 < rank < 1; a trace's pairs are drawn by
        `rank_in` alone
    base_dir : where a trace's relative path starts
    """
    if isinstance(lengths, FixedLengths):
        shape = rank_in.shape
        return np.full(shape, lengths.input_tokens), np.full(shape, lengths.output_tokens)
    if isinstance(lengths, UniformLengths):
        return _uniform(lengths.input_tokens, rank_in), _uniform(lengths.output_tokens, rank_out)
    if isinstance(lengths, LognormalLengths):
        return (
            _lognormal(lengths.input_tokens, rank_in),
            _lognormal(lengths.output_tokens, rank_out),
        )
    if isinstance(lengths, EmpiricalLengths):
        return (
            _empirical(lengths.input_tokens, rank_in),
            _empirical(lengths.output_tokens, rank_out),
        )
    rows = read_trace(base_dir / lengths.path, warn, lengths.format)
    chosen = (rank_in * len(rows)).astype(np.int64)
    return rows.prompt_tokens[chosen], rows.output_tokens[chosen]


def _uniform(span: TokenRange, rank: FloatArray) -> IntArray:
    return np.asarray(span.min + rank * (span.max - span.min + 1), dtype=np.int64)


def _lognormal(shape: Lognormal, rank: FloatArray) -> IntArray:
    mu, sigma = _log_moments(shape)
    normal = np.fromiter(map(NormalDist().inv_cdf, rank.tolist()), float, len(rank))
    # Beyond exp(50) every draw is cut anyway; without the cut here it could overflow.
    draws = np.exp(np.minimum(mu + sigma * normal, 50.0))
    return np.asarray(np.rint(np.clip(draws, shape.min, shape.max)), dtype=np.int64)


def _log_moments(shape: Lognormal) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm."""
    if shape.median is not None:
        mu = math.log(shape.median)
        sigma = shape.sigma
        if sigma is None:
            sigma = math.log((shape.p95 or shape.median) / shape.median) / _Z95
        return mu, sigma
    mean = shape.mean or 1.0
    sigma = shape.sigma
    if sigma is None:
        # ln p95 = ln mean - sigma^2 / 2 + z * sigma; the smaller root is the usual shape.
        spread = math.log((shape.p95 or mean) / mean)
        sigma = _Z95 - math.sqrt(max(0.0, _Z95**2 - 2 * spread))
    return math.log(mean) - sigma**2 / 2, sigma


def _empirical(table: dict[str, int], rank: FloatArray) -> IntArray:
    points = sorted((float(key[1:]) / 100, tokens) for key, tokens in table.items())
    ranks, tokens = np.array(points).T
    # Straight in the logarithm: nine quantiles of the Azure and Mooncake loads then give the
    # data's mean within 3 %, straight in tokens up to 7 % above it.
    logs: FloatArray = np.interp(rank, ranks, np.log(tokens))
    return np.rint(np.exp(logs)).astype(np.int64)
