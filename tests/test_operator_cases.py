"""Orderings that operators measured and the simulation gives, and how their words are read."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def tools() -> Any:
    """`benchmarks/operator_cases.py`, whose neighbours are imported by their bare names."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("operator_cases")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def words(tools: Any) -> Any:
    """`benchmarks/case_words.py`."""
    return sys.modules["case_words"]


@pytest.fixture(scope="module")
def verdicts(tools: Any, shared: Path) -> Any:
    """A case's points by a part of their labels, simulated, and compared."""

    def of(case: str, *labels: str) -> dict[tuple[str, str, str], Any]:
        path = shared / "validation" / "operator_cases" / f"{case}.json"
        points = tools.read_case(json.loads(path.read_text()))
        chosen = [p for p in points if not labels or any(label in p.label for label in labels)]
        outcomes = [tools.run_point(point) for point in chosen]
        return {(c.label, c.base, c.metric): c for c in tools.compare(outcomes)}

    return of


def the_only(found: dict[tuple[str, str, str], Any], metric: str) -> Any:
    (comparison,) = [c for (_, _, name), c in found.items() if name == metric]
    return comparison


@pytest.mark.parametrize("case", ["op_1", "op_2"])
def test_saturation_by_slots_and_by_prefix_caching(verdicts: Any, case: str) -> None:
    """max-num-seqs 128 -> 192; prefix caching on: throughput, TPOT and TTFT past the knee."""
    found = verdicts(case, "saturated")
    for metric in ("output_tokens_per_s", "tpot_mean_s", "ttft_mean_s"):
        assert the_only(found, metric).verdict in ("ratio", "order"), metric
    assert the_only(found, "output_tokens_per_s").verdict == "ratio"


def test_more_tensor_parallel_serves_more_and_pipeline_less_than_tensor(verdicts: Any) -> None:
    found = verdicts("op_6", "--async-scheduling")
    steps = [c for c in found.values() if c.metric == "total_tokens_per_s"]
    by_first = {c.label.split()[0]: c for c in steps if c.base.startswith("gpt-oss")}
    assert by_first["TP2"].simulated > 2  # the pool of one device starves it
    assert by_first["TP4"].simulated > by_first["TP2"].simulated > by_first["PP2"].simulated > 1


def test_the_token_budget_does_not_matter_to_short_prompts_and_async_does(verdicts: Any) -> None:
    found = verdicts("op_8")
    assert {c.verdict for c in found.values() if c.metric == "total_tokens_per_s"} == {"ratio"}


def test_a_watermark_removes_preemptions_and_adds_little_throughput(verdicts: Any) -> None:
    found = verdicts("op_24")
    off = [c for c in found.values() if c.base == "off"]
    rates = [c for c in off if c.metric == "output_tokens_per_s"]
    assert rates
    assert all(c.simulated == pytest.approx(c.measured, rel=0.05) for c in rates)
    assert all(c.verdict in ("ratio", "order") for c in off if c.metric == "preemptions")


def test_fewer_bits_lose_where_many_tokens_are_unpacked_for(verdicts: Any) -> None:
    """fp8 and 4-bit weights on an A100, 256 running: slower than bf16, as measured."""
    found = verdicts("op_9", "vLLM")
    rates = [c for c in found.values() if c.metric == "total_tokens_per_s"]
    assert len(rates) == 2
    assert all(c.simulated < 1 and c.verdict == "ratio" for c in rates)


def test_more_clients_on_a_full_pool_never_explode(verdicts: Any) -> None:
    assert the_only(verdicts("op_27"), "output_tokens_per_s").simulated == pytest.approx(1, abs=0.1)


def test_fp8_kv_doubles_the_pool(verdicts: Any) -> None:
    found = verdicts("op_28", "1k")
    kv = [c for (label, _, metric), c in found.items() if metric == "kv_tokens" and "1k" in label]
    assert kv[0].simulated == pytest.approx(2, rel=1e-3)


def test_concurrency_beyond_the_number_of_requests_changes_nothing(verdicts: Any) -> None:
    plateau = [
        c
        for c in verdicts("op_60", "00 llama405", "750 llama405").values()
        if c.metric == "output_tokens_per_s"
    ]
    assert plateau
    assert all(c.simulated == 1 for c in plateau)


def test_weights_in_four_bits_help_where_the_pool_is_short(verdicts: Any) -> None:
    found = verdicts("op_22", "4090 BF16", "4090 AWQ Marlin")
    assert the_only(found, "total_tokens_per_s").verdict == "order"


def test_a_cached_prefix_cuts_the_time_to_first_token(verdicts: Any) -> None:
    assert the_only(verdicts("op_65"), "ttft_p50_s").simulated == pytest.approx(0.229, rel=0.15)


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("1x H100 80GB (GKE)", "h100-sxm"),
        ("8x MI325X 256GB", "mi325x"),
        ("4x GB200", "gb200"),
        ("2x4090", "rtx-4090"),
        ("1x A10G 24GB (g5.xlarge)", "a10g"),
        ("not in excerpt", None),
    ],
)
def test_devices_are_read(words: Any, text: str, name: str | None) -> None:
    assert words.device_of(text) == name


def test_models_are_read_and_stand_ins_said(words: Any) -> None:
    assert words.model_of("Qwen/Qwen3-14B-FP8") == ("Qwen/Qwen3-14B", False)
    assert words.model_of("Qwen3-VL-235B bf16") == ("Qwen/Qwen3-VL-235B-A22B-Instruct", True)
    assert words.model_of("Nemotron Nano 30B (3B active) FP8") == (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        True,
    )
    assert words.model_of("zai-org/GLM-5.2") is None


def test_flags_are_read_from_a_command_and_from_prose(words: Any) -> None:
    command = words.flags_of("--max-num-seqs=128 -tp 2 --no-enable-prefix-caching --port 8000")
    assert command.engine == {
        "max_num_seqs": 128,
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
    }
    assert command.others == ("port",)
    prose = words.flags_of("enforce_eager; --kv-cache-dtype auto vs fp8; prefix caching off")
    assert prose.engine == {"enforce_eager": True, "enable_prefix_caching": False}
    assert prose.choices == {"kv_cache_dtype": ("auto", "fp8")}


@pytest.mark.parametrize(
    ("column", "read"),
    [
        ("ttft_p50_off_ms", ("ttft_p50_s", 1e-3, "off")),
        ("tpot_mean_s", ("tpot_mean_s", 1.0, "")),
        ("qwen3vl_tok_s", ("output_tokens_per_s", 1.0, "qwen3vl")),
        ("kv_cache_tokens", ("kv_tokens", 1.0, "")),
        ("max_num_seqs", None),
    ],
)
def test_columns_are_read(words: Any, column: str, read: Any) -> None:
    assert words.metric_of(column) == read


def test_a_cut_lognormal_keeps_its_mean(tools: Any) -> None:
    import numpy as np

    uncut = sys.modules["case_scenario"].uncut_mean(201.0, 1.0, 1024)
    draws = np.random.default_rng(1).lognormal(np.log(uncut) - 0.5, 1.0, 400_000)
    assert np.minimum(draws, 1024).mean() == pytest.approx(201.0, rel=0.01)


def test_what_is_not_modelled_is_named(tools: Any) -> None:
    case = {"kind": "c:EAGLE", "engine": "vLLM V1", "model": "m", "flags": "--num_spec_tokens 2"}
    assert tools.why_not(case) == "speculative decoding"
