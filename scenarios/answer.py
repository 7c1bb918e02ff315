"""An answer of `size` in words and in flags."""

import json
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any, Protocol

import numpy as np

from servecast.reports.stats import mean_interval
from servecast.scenarios.schema import Scenario

#: Keys of `engine:` that are not flags of `vllm serve`.
NOT_FLAGS = ("batching", "batch_wait_s", "preemption_mode", "swap_space", "adaptive")

#: Keys of speculative_config that no vLLM takes.
NOT_VLLM = (
    *("acceptance", "adaptive", "disable_by_batch_size", "draft_device", "draft_layers"),
    *("draft_tree", "goodput", "min_sequence_tokens", "min_running_requests"),
)

#: A share of time that is worth a word.
NOTICED = 0.05


class Tried(Protocol):
    """A candidate with results."""

    changes: dict[str, Any]
    stage: str

    @property
    def goodputs(self) -> list[float]: ...


def choice(changes: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One choice of flags and what it gives, means over the seeds, goodput with an interval."""
    summaries = [result["summary"] for result in results]
    goodputs = [summary["goodput_per_s"] for summary in summaries]
    low, high = mean_interval(goodputs)

    def mean(*path: str) -> float | None:
        values = []
        for summary in summaries:
            value: Any = summary
            for key in path:
                value = value.get(key) if value is not None else None
            if value is not None:
                values.append(value)
        return float(np.mean(values)) if values else None

    tokens = mean("output_tokens_per_s") or 0.0
    gap = mean("tpot_s", "mean")
    flags = {key.removeprefix("engine."): None for key in changes if key.startswith("engine.")}
    return {
        "engine": {key: _inside(results[0]["engine"], key) for key in flags},
        "changes": dict(changes),
        "goodput_per_s": float(np.mean(goodputs)),
        "lo": low,
        "hi": high,
        "met": sla_holds(summaries),
        "ttft_p95_s": mean("ttft_s", "p95"),
        "itl_p99_s": mean("itl_s", "p99"),
        "e2e_p95_s": mean("e2e_s", "p95"),
        "output_tokens_per_s": tokens,
        "tokens_per_s_per_device": mean("output_tokens_per_s_per_device"),
        "tokens_per_s_per_user": 1 / gap if gap else None,
        "preemptions": mean("preemptions"),
        "kv_peak_use": mean("kv", "peak_use"),
        "cost_per_million_output_tokens": mean("cost", "per_million_output_tokens"),
    }


def sla_holds(summaries: Sequence[Mapping[str, Any]]) -> bool:
    """Every clause holds in most of the runs, and in their mean, which is what is told."""
    if 2 * sum(summary["sla"]["met"] is not False for summary in summaries) <= len(summaries):
        return False
    for runs in zip(*(summary["sla"]["clauses"] for summary in summaries), strict=True):
        values = [run["value"] for run in runs if run["value"] is not None]
        if values and float(np.mean(values)) > runs[0]["limit"]:
            return False
    return True


def _inside(engine: Mapping[str, Any], key: str) -> Any:
    """The value of a flag, or of a key in its block."""
    value: Any = engine
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def vllm_command(scenario: Scenario) -> str:
    """The `vllm serve` line of a scenario: what it sets, and nothing that it leaves to vLLM."""
    words = ["vllm serve", scenario.model]
    for key, value in scenario.engine.model_dump(exclude_none=True).items():
        flag = key.replace("_", "-")
        if key in NOT_FLAGS:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            own = {k: v for k, v in value.items() if k not in NOT_VLLM and v is not False}
            words.append(f"--{flag} {quote(json.dumps(own))}")
        else:
            words.append(f"--{flag} {value}")
    return " ".join(words)


def binding_words(result: Mapping[str, Any]) -> str:
    """What holds the engine back at a load, in one sentence."""
    where = f"at {result['load']:g} x the load"
    if result["error"] is not None:
        return str(result["error"])
    held, summary = result["pressure"], result["summary"]
    named = {
        "kv": "KV memory: the pool was full",
        "slots": f"sequence slots: all {result['engine']['max_num_seqs']} were taken",
        "budget": "the token budget: all "
        f"{result['engine']['max_num_batched_tokens']} tokens of a step were",
    }
    most = max(named, key=lambda name: float(held[name]))
    if held[most] >= NOTICED:
        return (
            f"{named[most]} for {held[most] * 100:.0f} % of the time while requests waited, {where}"
        )
    return f"{_device_words(summary)}, {where}"


def _device_words(summary: Mapping[str, Any]) -> str:
    share, use = summary["step_time_share"], summary["utilisation"]
    if share["host"] >= 0.3:
        host = f"{share['host'] * 100:.0f} %"
        return f"the host: {host} of step time is scheduling and input preparation"
    if "pipeline" in summary:
        pipeline = summary["pipeline"]
        return f"the pipeline: {pipeline['fill'] * 100:.0f} % of its slots are filled"
    if use["bandwidth"] >= use["mfu"]:
        return f"memory bandwidth: {use['bandwidth'] * 100:.0f} % of the datasheet's is used"
    return f"compute: {use['mfu'] * 100:.0f} % of the datasheet's peak is used"


def block_size_words(knobs: Mapping[str, Sequence[Any]], tried: Sequence[Tried]) -> str:
    """What block_size did, from candidates that differ in nothing else."""
    key = "engine.block_size"
    if len(knobs.get(key, ())) < 2:
        return "block_size was not varied"
    spreads = []
    groups: dict[tuple[Any, ...], list[float]] = {}
    for candidate in tried:
        # Runs of different length are not comparable.
        rest = (candidate.stage, *(v for name, v in candidate.changes.items() if name != key))
        groups.setdefault(rest, []).append(candidate.goodputs[0])
    for goodputs in groups.values():
        if len(goodputs) > 1 and max(goodputs) > 0:
            spreads.append(1 - min(goodputs) / max(goodputs))
    if not spreads:
        return "block_size was not compared with all else equal"
    spread = max(spreads)
    if spread < 0.02:
        return (
            f"block_size changes goodput by {spread * 100:.1f} % at most here: neither the waste "
            "at the end of sequences nor prefix hits decide (attention is priced alike for every "
            "size until it is calibrated)"
        )
    return (
        f"block_size changes goodput by up to {spread * 100:.0f} %: larger blocks waste the end of "
        "every sequence and find shorter prefixes (attention is priced alike for every size)"
    )
