"""Our schedules against vLLM's own, recorded step by step (see docs/parity.md)."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from servecast.costmodels.errors import InputError
from servecast.costmodels.shape import ConstantCost
from servecast.sim.replay import limits_from, replay
from servecast.sim.world import simulate

GOLDEN = Path(__file__).parent / "golden"
MODES = ("plain", "tight", "prefix", "spec", "priority", "async")


def recorded(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(GOLDEN / name, "rt") as lines:
        for line in lines:
            yield json.loads(line)


def ordered(record: dict[str, Any]) -> dict[str, Any]:
    """With dictionaries as lists of pairs: the order counts."""
    return {k: list(v.items()) if isinstance(v, dict) else v for k, v in record.items()}


def assert_same_schedule(entry: dict[str, Any], *, aggregate: bool) -> None:
    steps = list(replay(entry["workload"], aggregate=aggregate, check=True))
    for ours, theirs in zip(steps, entry["trace"], strict=True):
        assert ordered(ours) == ordered(theirs), (entry["seed"], entry["workload"]["config"])


@pytest.mark.parametrize("aggregate", [True, False], ids=["counted", "walked"])
@pytest.mark.parametrize("mode", range(len(MODES)), ids=MODES)
def test_every_step_of_the_small_workloads(mode: int, aggregate: bool) -> None:
    entries = [e for e in recorded("small.jsonl.gz") if e["seed"] % len(MODES) == mode]
    assert len(entries) == 30
    for entry in entries:
        assert_same_schedule(entry, aggregate=aggregate)


@pytest.mark.parametrize("aggregate", [True, False], ids=["counted", "walked"])
def test_every_step_of_the_large_workloads(aggregate: bool) -> None:
    entries = list(recorded("large.jsonl.gz"))
    assert len(entries) == 48
    for entry in entries:
        assert_same_schedule(entry, aggregate=aggregate)


def run(config: dict[str, Any], *requests: dict[str, Any]) -> list[dict[str, Any]]:
    named = [{"id": f"r{i}", "arrival": 0, **request} for i, request in enumerate(requests)]
    return list(replay({"config": config, "requests": named}, check=True))


def test_a_recorded_number_of_proposals_is_replayed() -> None:
    """An n-gram drafter may propose fewer than k: `drafts` says how many, cyclically."""
    steps = run(
        {"spec": {"method": "ngram", "k": 3}},
        {"prompt_len": 10, "output_len": 9, "accept": [3], "drafts": [0, 2]},
    )
    assert [step["spec"].get("r0", 0) for step in steps] == [0, 0, 2, 0, 2, 0]
    assert [step["emitted"].get("r0", 0) for step in steps] == [1, 1, 3, 1, 3, 0]


def test_blocks_shared_through_generated_text() -> None:
    """A prompt that repeats what another request generated finds its blocks."""
    generated = list(range(900, 940))
    steps = run(
        {"max_num_seqs": 1, "block_size": 8, "max_num_batched_tokens": 256},
        {"prompt": list(range(16)), "output_len": 40, "output": generated},
        {"prompt": [*range(16), *generated], "output_len": 1},
    )
    admitted = next(step for step in steps if "r1" in step["new"])
    assert admitted["new"]["r1"] == 48


def test_an_admission_beside_another_admission_is_not_widened() -> None:
    """Found live: only running decodes make vLLM widen a one-token admission (rule 24)."""
    steps = run(
        {"spec": {"method": "draft_model", "k": 5}, "max_num_batched_tokens": 130, "block_size": 8},
        {"prompt_len": 1, "output_len": 1, "accept": [3]},
        {"prompt_len": 1, "output_len": 1, "accept": [4]},
    )
    assert steps[0]["scheduled"] == {"r0": 1, "r1": 1}
    assert steps[0]["spec"] == {}


@pytest.mark.parametrize(
    ("config", "request_", "words"),
    [
        ({"max_num_sqs": 1}, {"prompt_len": 1, "output_len": 1}, "unknown key max_num_sqs"),
        ({"block_size": 0}, {"prompt_len": 1, "output_len": 1}, "block_size"),
        ({"block_size": "x"}, {"prompt_len": 1, "output_len": 1}, "config"),
        ({}, {"prompt_len": 1}, "output_len"),
        ({}, {"prompt_len": 0, "output_len": 1}, "must not be empty"),
        ({}, {"prompt_len": 2000, "output_len": 1}, "max_model_len 1024"),
    ],
)
def test_a_bad_workload_is_refused_in_words(
    config: dict[str, Any], request_: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        run(config, request_)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), asynchronous=st.booleans(), data=st.data())
def test_run_and_schedule_are_one_scheduler(
    table: Any, seed: int, asynchronous: bool, data: st.DataObject
) -> None:
    """The same load through both entry points: with equal steps, time is a number of steps.

    With asynchronous scheduling a step is planned when the one before it starts, so only a load
    that is all there at once has its arrivals at the same place in both.
    """
    rng = np.random.default_rng(seed)
    n, step_s, longest = 25, 0.01, 128
    config = {
        "max_num_seqs": data.draw(st.sampled_from([2, 8])),
        "max_num_batched_tokens": data.draw(st.sampled_from([16, 60, 300])),
        "block_size": data.draw(st.sampled_from([4, 16])),
        "max_model_len": longest,
        "enable_prefix_caching": data.draw(st.booleans()),
        "policy": data.draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": data.draw(st.sampled_from([0, 20])),
        "async_scheduling": asynchronous,
    }
    tight = data.draw(st.booleans())
    config["num_blocks"] = longest // config["block_size"] + (8 if tight else 500)
    arrivals = np.zeros(n, int) if asynchronous else np.sort(rng.integers(0, 60, n))
    prompts, outputs = rng.integers(1, longest - 1, n), rng.integers(1, 40, n)
    heads, ends = rng.integers(0, 3, n), rng.integers(1, longest, n)
    ends = np.minimum(ends, prompts)
    priorities = rng.integers(0, 3, n)
    requests = [
        {
            "id": str(i),
            "arrival": int(arrivals[i]),
            "prompt": [
                *range(1000 * int(heads[i]), 1000 * int(heads[i]) + int(ends[i])),
                *range(100_000 * (i + 1), 100_000 * (i + 1) + int(prompts[i] - ends[i])),
            ],
            "output_len": int(outputs[i]),
            "priority": int(priorities[i]),
        }
        for i in range(n)
    ]
    steps = list(replay({"config": config, "requests": requests}))
    # A step that does nothing but preempt has a number, but takes no time: what arrives by number
    # and what arrives by time would be out of step from there on.
    assume(asynchronous or not any(s["preempted"] and not s["scheduled"] for s in steps))
    load = table(
        arrivals * step_s,
        prompts,
        outputs,
        shared=[((int(h) + 1, int(e)),) for h, e in zip(heads, ends, strict=True)],
        priority=priorities,
    )
    done = simulate(load, limits_from(config), ConstantCost(step_s)).trace.requests
    for i in range(n):
        admitted = next(step for step in steps if str(i) in step["new"])
        finished = next(step for step in steps if str(i) in step["finished"])
        assert done["prefix_hit_tokens"][i] == admitted["new"][str(i)]
        assert done["preemptions"][i] == sum(str(i) in step["preempted"] for step in steps)
        # An empty step of the pipeline has a number, but takes no time.
        passed = (
            sum(bool(step["scheduled"]) for step in steps[: steps.index(finished) + 1])
            if asynchronous
            else finished["step"] + 1
        )
        assert round(done["finish_ns"][i] / 1e9 / step_s) == passed
