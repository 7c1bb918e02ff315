"""How tokens are chosen: whose word counts, and what it costs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servecast.costmodels.catalogue import load_hardware
from servecast.costmodels.errors import InputError
from servecast.costmodels.sampling import (
    FLASHINFER,
    GREEDY,
    SORT,
    TRITON,
    Sampling,
    filter_s,
    published_sampling,
)
from servecast.costmodels.shape import StepShape
from servecast.costmodels.versions import LATEST, Version
from servecast.scenarios.build import build, set_up
from servecast.scenarios.load import load_scenario
from servecast.scenarios.points import Point, _file_hash

H100 = load_hardware("h100-sxm")
H200 = load_hardware("h200-sxm")
A100 = load_hardware("a100-sxm-80gb")
LIBRARY = Path(__file__).parents[1] / "scenarios" / "library"
BOTH = "top_k and top_p"

SCENARIO = """
name: sampled
model: Qwen/Qwen3-8B
hardware: h100-sxm
engine: {max_model_len: 8192}
workload:
  arrivals: {kind: poisson, rate_per_s: 2, requests: 40}
  lengths: {kind: fixed, input_tokens: 200, output_tokens: 50}
"""


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        (Sampling(), None),
        (Sampling(0.0, 20, 0.9), None),
        (Sampling(1e-6, 20, 0.9), None),
        (Sampling(0.7, -1, 1.0), None),
        (Sampling(0.7, 20, 1.0), "top_k"),
        (Sampling(0.7, 0, 0.9), "top_p"),
        (Sampling(0.7, 20, 0.9), BOTH),
    ],
)
def test_what_keeps_tokens_from_being_chosen(sampling: Sampling, kind: str | None) -> None:
    assert sampling.filter == kind


@pytest.mark.parametrize(
    ("model", "sampling"),
    [
        ("Qwen/Qwen3-32B", Sampling(0.6, 20, 0.95)),
        ("Qwen/Qwen3-32B-FP8", Sampling(0.6, 20, 0.95)),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", Sampling(0.7, 20, 0.8)),
        ("Qwen/Qwen2.5-7B-Instruct", Sampling(0.7, 20, 0.8)),
        ("Qwen/Qwen2.5-7B", Sampling()),
        ("Qwen/Qwen2.5-VL-7B-Instruct", GREEDY),
        ("meta-llama/Llama-3.3-70B-Instruct", Sampling(0.6, 0, 0.9)),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", Sampling(0.6, 0, 0.9)),
        ("mistralai/Mistral-7B-v0.3", Sampling()),
    ],
)
def test_what_publishers_ask_for(model: str, sampling: Sampling) -> None:
    assert published_sampling(model) == sampling


def test_a_file_beside_the_config(tmp_path: Path) -> None:
    config, beside = tmp_path / "config.json", tmp_path / "generation_config.json"
    assert published_sampling(str(config)) == Sampling()
    beside.write_text(json.dumps({"do_sample": True, "top_k": 40, "top_p": 0.5}))
    assert published_sampling(str(config)) == Sampling(1.0, 40, 0.5)
    beside.write_text(json.dumps({"temperature": 5.0}))
    assert published_sampling(str(config)) == Sampling(5.0)
    for bad in (
        '{"top_p": 2}',
        '{"temperature": -1}',
        '{"temperature": "hot"}',
        "[1]",
        "{",
        '{"top_k": NaN}',
    ):
        beside.write_text(bad)
        with pytest.raises(InputError, match=r"generation_config\.json: "):
            published_sampling(str(config))


def test_a_measured_sort() -> None:
    """128 rows of 151,936 logits on an H200, PyTorch 2.9: 2.95 ms with the choice itself
    (ModelTC/LightLLM, pull request 1573)."""
    assert 0.85 < filter_s(BOTH, 128, 151_936, H200, Version(0, 12)) / 2.95e-3 < 1.0


@pytest.mark.parametrize(
    ("version", "rows", "kernels"),
    [
        (Version(0, 8, 5), 64, SORT),
        (Version(0, 9), 64, FLASHINFER),
        (Version(0, 11), 64, FLASHINFER),
        (Version(0, 11, 1), 64, SORT),
        (Version(0, 16), 64, SORT),
        (Version(0, 17), 64, TRITON),
        (Version(0, 17), 7, SORT),
        (Version(0, 20), 64, TRITON),
        (Version(0, 21), 64, FLASHINFER),
        (LATEST, 1, FLASHINFER),
    ],
)
def test_the_kernels_of_a_release(version: Version, rows: int, kernels: object) -> None:
    expected = kernels[BOTH].at(rows * 100_000)  # type: ignore[index]
    assert filter_s(BOTH, rows, 100_000, H100, version) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("device", "kernels"),
    [
        ("cpu", SORT),
        ("v100-sxm-32gb", TRITON),
        ("mi300x", TRITON),
        ("t4", FLASHINFER),
        ("rtx-5090", FLASHINFER),
    ],
)
def test_who_has_which_kernels(device: str, kernels: object) -> None:
    """FlashInfer is for CUDA from 7.5 on, Triton for GPUs."""
    hardware = replace(load_hardware(device), memory_bandwidth_bytes_per_s=3.35e12)
    expected = kernels[BOTH].at(64 * 100_000)  # type: ignore[index]
    assert filter_s(BOTH, 64, 100_000, hardware, LATEST) == pytest.approx(expected)


@given(st.integers(1, 1024), st.sampled_from([Version(0, 12), Version(0, 18), LATEST]))
def test_a_slower_memory_sorts_no_faster(rows: int, version: Version) -> None:
    assert filter_s("top_p", rows, 32_000, A100, version) >= filter_s(
        "top_p", rows, 32_000, H100, version
    )


def sampling_s(tmp_path: Path, *changes: str) -> float:
    """Of a step of 64 sequences."""
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    cost = build(load_scenario(path, list(changes))).cost
    return cost.step(StepShape((), 64, 64, 64_000, 64)).sampling_s


def test_a_request_is_asked_before_its_model(tmp_path: Path) -> None:
    own = sampling_s(tmp_path)
    asked = sampling_s(tmp_path, "workload.sampling={temperature: 0.6, top_k: 20, top_p: 0.95}")
    some = sampling_s(tmp_path, "workload.sampling={temperature: 0.9}")
    assert own == asked == some
    plain = sampling_s(tmp_path, "engine.generation_config=vllm")
    free = sampling_s(tmp_path, "workload.sampling={top_k: 0, top_p: 1.0}")
    greedy = sampling_s(tmp_path, "workload.sampling={temperature: 0}")
    # Choosing among all takes more passes than FlashInfer's choice among a few.
    assert own > greedy > 0
    assert plain == free > greedy
    sorted_s = sampling_s(tmp_path, "engine.vllm_version=0.12.0")
    assert sorted_s > 4 * own
    assert sampling_s(tmp_path, "engine.vllm_version=0.7.3") == plain


def test_results_are_named_by_the_publishers_file(tmp_path: Path) -> None:
    path, folder = tmp_path / "scenario.yaml", tmp_path / "model"
    folder.mkdir()
    path.write_text(SCENARIO.replace("Qwen/Qwen3-8B", "model/config.json"))
    (folder / "config.json").write_text((LIBRARY / "tiny-llama.json").read_text())
    scenario, keys = load_scenario(path).scenario, set()
    for model in ("model/config.json", "model"):
        own = scenario.model_copy(update={"model": model})
        beside = folder / "generation_config.json"
        beside.unlink(missing_ok=True)
        keys.add(Point(own, path, 0).key)
        for temperature in (0, 0.5):
            beside.write_text(json.dumps({"temperature": temperature}))
            _file_hash.cache_clear()
            keys.add(Point(own, path, 0).key)
    assert len(keys) == 6


def test_other_flags_leave_the_sampling(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    setup = set_up(load_scenario(path))
    assert setup.changed(max_num_seqs=8).sampling == setup.sampling == Sampling(0.6, 20, 0.95)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("workload.sampling={temperature: -1}", "temperature"),
        ("workload.sampling={top_p: 0}", "top_p"),
        ("workload.sampling={top_k: 2.5}", "top_k"),
        ("workload.sampling={min_p: 0.1}", "min_p"),
        ("engine.generation_config=mine", "generation_config"),
    ],
)
def test_what_is_no_sampling(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    with pytest.raises(InputError, match=message):
        load_scenario(path, [change])
