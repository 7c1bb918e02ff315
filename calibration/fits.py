"""Fits of acceptance by name: bundled ones, and files that `servecast fit-acceptance` writes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from servecast.costmodels.errors import InputError
from servecast.costmodels.reading import read_bytes
from servecast.sim.acceptance import FIRST, Hierarchical, logistic, logit

BUNDLED = Path(__file__).parent / "acceptance_fits.yaml"

MAX_BYTES = 5_000_000

#: Requests and rounds with which a mean is worked out.
REQUESTS, ROUNDS = 2000, 50


@dataclass(frozen=True)
class Fit:
    """A process, and what it was fitted to.

    Attributes
    ----------
    source : data, model and method, in words
    """

    name: str
    process: Hierarchical
    source: str


@lru_cache(maxsize=1)
def bundled_fits() -> dict[str, Fit]:
    """By name."""
    rows = yaml.safe_load(BUNDLED.read_text(encoding="utf-8"))
    return {name: Fit(name, _process(row), row["source"]) for name, row in rows.items()}


def load_fit(name: str, folder: Path) -> Fit:
    """A bundled fit, or `FILE.json:METHOD` as `servecast fit-acceptance --json` writes it.

    Raises InputError for an unknown name and for a file that holds no such fit.
    """
    known = bundled_fits()
    if name in known:
        return known[name]
    path, colon, method = name.rpartition(":")
    if not colon or not path.endswith(".json"):
        raise InputError(
            f"acceptance.fit: {name!r} is not known; one of {', '.join(known)}, or FILE.json:METHOD"
        )
    file = folder / path
    try:
        methods = json.loads(read_bytes(file, MAX_BYTES))["methods"]
        row = methods[method]["hierarchical"]
        return Fit(name, _process(row), f"{path}, {method}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file}: no fit of {method!r} there: {type(error).__name__} {error}"
        ) from None


def _process(row: Mapping[str, Any]) -> Hierarchical:
    rates = tuple(float(rate) for rate in row["rates"])
    quality = tuple(float(value) for value in row.get("quality") or ())
    persistence, depth = float(row.get("persistence", 0.0)), float(row.get("depth", 1.0))
    shares = (*rates, persistence, depth)
    if not rates or not all(0.0 <= share <= 1.0 for share in shares):
        raise ValueError("rates, persistence and depth lie between 0 and 1")
    if not np.isfinite(quality).all():
        raise ValueError("quality must be numbers")
    return Hierarchical(rates, quality, persistence, depth)


def mean_length(process: Hierarchical, k: int) -> float:
    """Tokens a round over all rounds: each request weighs as its rounds do."""
    generator = np.random.Generator(np.random.Philox(key=0))
    uniforms = generator.random((FIRST + k, REQUESTS * ROUNDS))
    numbers = np.arange(REQUESTS)
    accepted = process.accepted(uniforms, numbers * ROUNDS, numbers)
    emitted = (np.maximum(accepted, 0) + 1).reshape(REQUESTS, ROUNDS)
    # A request of so many tokens has fewer rounds, the more of them it emits in each.
    return float(REQUESTS / (1.0 / emitted.mean(axis=1)).sum())


def shifted_to(process: Hierarchical, k: int, length: float) -> Hierarchical:
    """The process with its rates moved by one logit, so that rounds of k emit so many tokens."""
    base = logit(np.array(process.rates))
    low, high = -10.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        moved = replace(process, rates=tuple(logistic(base + middle).tolist()))
        if mean_length(moved, k) < length:
            low = middle
        else:
            high = middle
    return replace(process, rates=tuple(logistic(base + low).tolist()))
