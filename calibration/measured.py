"""Recorded serving runs: per-request latencies, and the error of a prediction against them."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from servecast.costmodels.errors import InputError
from servecast.costmodels.reading import read_bytes

FloatArray = npt.NDArray[np.float64]

#: A recorded request: when it was sent (wall clock), queued, answered and done (one other clock).
KEYS = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "output_toks")

MAX_BYTES = 500_000_000

#: What the way from a client through HTTP and the tokenizer adds to a request, seconds: the gap of
#: one stage of inference-sim/training (Llama-2-7B codegen at 5/s: 25.0 ms to the first token for
#: 19.9 with the h100-sxm profile), used on all others.
CLIENT_PATH_S = 5.2e-3

#: That, and the least and the most it may be elsewhere: the authors of those runs put it at 10 to
#: 20 ms (`validation/vllm-h100`), an operator case at 22.
CLIENT_PATH = (CLIENT_PATH_S, 1e-3, 25e-3)

METRICS = ("ttft_s", "tpot_s", "e2e_s")

#: Statistics, and the percentiles that they are.
STATS = {"mean": None, "p50": 50.0, "p95": 95.0, "p99": 99.0}

#: Columns of a time line, and what they are called in its file.
TIMELINE = {"t_s": "t", "running": "running", "waiting": "waiting", "kv_share": "kv_cache_pct"}

#: Of recorded requests these are compared.
OF_REQUESTS = ("mean", "p50", "p99")


@dataclass(frozen=True)
class Latencies:
    """Seconds of each request: to the first token, a further token on average, to the last."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    e2e_s: FloatArray

    @classmethod
    def from_times(
        cls, sent: FloatArray, first: FloatArray, last: FloatArray, outputs: FloatArray
    ) -> "Latencies":
        """From seconds on one clock; a request of one token has no further token."""
        several = outputs > 1
        return cls(first - sent, ((last - first)[several]) / (outputs[several] - 1), last - sent)

    def stat(self, metric: str, stat: str) -> float:
        """A statistic of `STATS`; raises InputError where no request has such a time."""
        values: FloatArray = getattr(self, metric)
        if not len(values):
            raise InputError(f"{metric}: no request has a second token")
        percentile = STATS[stat]
        return float(values.mean() if percentile is None else np.percentile(values, percentile))


def read_requests(path: Path) -> Latencies:
    """Latencies from a `requests.jsonl` of vLLM's own time stamps.

    Raises InputError naming file, line and key for anything that is not one.
    """
    rows: list[list[float]] = []
    try:
        lines = read_bytes(path, MAX_BYTES).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            rows.append([float(record[key]) for key in KEYS])
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}:{number}: not a recorded request: {error!r}") from None
    if not rows:
        raise InputError(f"{path}: no requests")
    columns = dict(zip(KEYS, np.array(rows).T, strict=True))
    return Latencies.from_times(
        columns["queued_ts"],
        columns["first_token_ts"],
        columns["last_token_ts"],
        columns["output_toks"],
    )


def read_timeline(path: Path) -> dict[str, FloatArray]:
    """Columns `t_s`, `running`, `waiting` and, where it was recorded, `kv_share` of a CSV.

    Its columns: `t` in seconds, `running`, `waiting` requests, `kv_cache_pct`. Raises InputError
    naming the file for anything else.
    """
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8")
        rows = list(csv.DictReader(text.splitlines()))
        found = {
            ours: np.array([float(row[theirs]) for row in rows])
            for ours, theirs in TIMELINE.items()
            if theirs != "kv_cache_pct" or (rows and theirs in rows[0])
        }
    except (UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a time line: {error!r}") from None
    if not rows or not all(np.isfinite(column).all() for column in found.values()):
        raise InputError(f"{path}: not a time line: no rows, or no numbers")
    share = found.pop("kv_share", np.zeros(1)) / 100.0
    # Engines that do not record it say 0 throughout.
    return found | ({"kv_share": share} if share.any() else {})


def errors(measured: Latencies, predicted: Latencies) -> dict[str, Mapping[str, float]]:
    """Relative error (predicted / measured - 1) of each metric's mean, p50 and p99."""
    return {
        metric: {
            stat: predicted.stat(metric, stat) / measured.stat(metric, stat) - 1
            for stat in OF_REQUESTS
        }
        for metric in METRICS
    }
