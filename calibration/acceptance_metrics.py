"""Acceptance from what a running vLLM says: its Prometheus metrics, or its log.

Both count by position over all requests, so there are rates by position and no spread of requests.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.reading import read_bytes
from servecast.sim.acceptance import tokens_a_round

MAX_BYTES = 500_000_000

DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts(?:_total)?(?:\{[^}]*\})? ([0-9.eE+]+)", re.M)
ACCEPTED = re.compile(
    r"^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?"
    r"\{[^}]*position=\"(\d+)\"[^}]*\} ([0-9.eE+]+)",
    re.M,
)

#: A line of `SpecDecodingLogging` (v1/spec_decode/metrics.py).
LOGGED = re.compile(
    r"SpecDecoding metrics:.*?Drafted: (\d+) tokens.*?Per-position acceptance rate: ([0-9., ]+)"
)


def rates_of_metrics(path: Path) -> list[float] | None:
    """Share of the rounds that accepted each position, of all requests; None for another file.

    Raises InputError for a file that cannot be read, or whose counts contradict each other.
    """
    text = read_bytes(path, MAX_BYTES).decode("utf-8", errors="replace")
    try:
        return _rates(text, path)
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(f"{path}: not what vLLM counts: {error}") from None


def _rates(text: str, path: Path) -> list[float] | None:
    drafts = sum(float(count) for count in DRAFTS.findall(text))
    if drafts > 0:
        counts: dict[int, float] = {}
        for position, count in ACCEPTED.findall(text):
            counts[int(position)] = counts.get(int(position), 0.0) + float(count)
        return _checked([counts[at] / drafts for at in sorted(counts)], path)
    rounds, totals = 0.0, [0.0]
    for drafted, listed in LOGGED.findall(text):
        shares = [float(word) for word in listed.replace(",", " ").split()]
        weight = int(drafted) / len(shares)
        rounds += weight
        totals += [0.0] * (len(shares) - len(totals))
        for at, share in enumerate(shares):
            totals[at] += weight * share
    return _checked([total / rounds for total in totals], path) if rounds else None


def _checked(shares: list[float], path: Path) -> list[float]:
    falling = all(a >= b for a, b in pairwise(shares))
    if not shares or not falling or not 0 <= shares[-1] <= shares[0] <= 1:
        raise InputError(f"{path}: shares of accepted positions must fall from 1 to 0: {shares}")
    return shares


def fitted_to_metrics(shares: Sequence[float]) -> dict[str, Any]:
    """The same as `servecast.calibration.acceptance.fitted` gives, as far as it is known."""
    k = len(shares)
    reached = [1.0, *shares[:-1]]
    rates = [s / r if r > 0 else 0.0 for s, r in zip(shares, reached, strict=True)]
    accepted, tried = sum(shares), sum(reached)
    alpha = accepted / tried
    return {
        "requests": None,
        "observed": {"mean": 1.0 + accepted},
        "hierarchical": {
            "rates": [round(rate, 4) for rate in rates],
            "quality": [],
            "persistence": 0.0,
            "depth": 1.0,
        },
        "iid": {"alpha": round(alpha, 4), "tokens_a_round": round(tokens_a_round(alpha, k), 4)},
    }
