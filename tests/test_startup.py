"""`servecast kv`: what would start, what would not and what would help, beside real logs."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from servecast.costmodels.errors import InputError
from servecast.reports.startup_console import render_startup
from servecast.scenarios.asked import asked_setup, own_options
from servecast.scenarios.build import build
from servecast.scenarios.cli import app
from servecast.scenarios.load import load_scenario
from servecast.scenarios.startup import start_up

SCENARIO = """
name: small
model: meta-llama/Llama-3.1-8B
hardware: h100-sxm
engine: {max_model_len: 8192, vllm_version: 0.19.0, gpu_memory_utilization: 0.95}
workload:
  arrivals: {kind: poisson, rate_per_s: 2, requests: 40}
  lengths: {kind: fixed, input_tokens: 200, output_tokens: 50}
"""

LOG = """
(EngineCore pid=1) INFO Initializing a V1 LLM engine (v0.19.0) with config: \
model='meta-llama/Llama-3.1-8B', max_seq_len=8192
(EngineCore pid=1) INFO Model loading took 14.99 GiB memory and 14.4 seconds
(EngineCore pid=1) INFO Available KV cache memory: 58.11 GiB
(EngineCore pid=1) INFO GPU KV cache size: 476,016 tokens
(EngineCore pid=1) INFO Maximum concurrency for 8,192 tokens per request: 58.11x
"""


def answer_to(words: str, **options: Any) -> dict[str, Any]:
    asked = asked_setup(words.split(), {}, **options)
    return start_up(asked.setup, asked.log, asked.notes, shortens=asked.shortens)


#: What a release makes of flags, as its sources have it.
RELEASES = [
    ("Qwen/Qwen3-8B --max-num-seqs 1 --max-model-len 1024", "0.10.2", "h100", 8192, False, 16),
    ("Qwen/Qwen3-8B --max-num-seqs 1 --max-model-len 1024", "0.32.0", "h100", 1024, False, 16),
    ("Qwen/Qwen3-8B --no-enable-chunked-prefill", "0.9.1", "h100", 8192, False, 16),
    ("Qwen/Qwen3-8B --no-enable-chunked-prefill", "0.32.0", "h100", 40_960, False, 16),
    ("Qwen/Qwen3-8B --kv-cache-dtype fp8", "0.8.5", "a100-sxm-80gb", 2048, True, 16),
    ("Qwen/Qwen3-8B --kv-cache-dtype fp8", "0.8.5", "h100", 8192, False, 16),
    ("Qwen/Qwen3-8B --dtype float32", "0.9.1", "h100", 2048, True, 16),
    ("Qwen/Qwen3-8B --dtype float32", "0.9.2", "h100", 8192, False, 16),
    ("Qwen/Qwen3-8B", "0.9.2", "t4", 2048, True, 16),
    ("meta-llama/Llama-3.1-8B --max-model-len 8192", "0.6.3", "h100", 8192, True, 16),
    (
        "meta-llama/Llama-3.1-8B --enable-chunked-prefill --max-model-len 8192",
        *("0.6.3", "h100", 512, True, 16),
    ),
    ("Qwen/Qwen2.5-VL-7B-Instruct --max-model-len 4096", "0.7.3", "h100", 5120, True, 16),
    ("Qwen/Qwen2.5-VL-7B-Instruct --max-model-len 65536", "0.7.3", "h100", 65_536, True, 16),
    ("deepseek-ai/DeepSeek-V2-Lite", "0.8.4", "h100", 8192, False, 16),
    ("deepseek-ai/DeepSeek-V2-Lite", "0.17.1", "h100", 8192, False, 64),
    ("deepseek-ai/DeepSeek-V2-Lite", "0.19.0", "h100", 8192, False, 16),
    ("deepseek-ai/DeepSeek-V2-Lite", "0.10.2", "b200", 8192, False, 128),
    ("deepseek-ai/DeepSeek-V2-Lite", "0.17.1", "b200", 8192, False, 64),
    ("deepseek-ai/DeepSeek-V2-Lite", "0.32.0", "b200", 16_384, False, 32),
]


@pytest.mark.parametrize(("words", "version", "hardware", "tokens", "v0", "block_size"), RELEASES)
def test_what_a_release_makes_of_flags(
    words: str, version: str, hardware: str, tokens: int, v0: bool, block_size: int
) -> None:
    options = {"hardware": hardware, "vllm_version": version}
    setup = asked_setup(["vllm", "serve", *words.split()], options).setup
    assert setup.memory.max_num_batched_tokens == tokens
    assert setup.memory.v0 == v0
    assert setup.memory.block_size == block_size


def test_the_checkpoint_s_kv_format_is_followed_from_0_14() -> None:
    words = "vllm serve nvidia/Llama-3.1-70B-Instruct-FP8 -tp 2 --hardware h100 --vllm-version "
    assert answer_to(words + "0.13.0")["kv_bytes_per_token"] == 163_840
    assert answer_to(words + "0.14.1")["kv_bytes_per_token"] == 81_920


def test_weights_that_are_quantised_on_the_device_were_loaded_whole_before_0_13() -> None:
    words = "vllm serve Qwen/Qwen3-32B --quantization fp8 --hardware l40s --max-model-len 4096"
    old = answer_to(words + " --vllm-version 0.12.0")
    assert not old["starts"] and "before they are quantised" in old["reason"]
    assert answer_to(words + " --vllm-version 0.13.0")["starts"]


def test_an_automatic_length_is_the_longest_that_fits() -> None:
    words = "vllm serve Qwen/Qwen3-8B --hardware l4 --max-model-len "
    answer = answer_to(words + "auto")
    assert answer["starts"] and not answer["fixes"]
    assert answer["max_model_len"] == answer_to(words + "40960")["estimated_max_model_len"]
    assert any("vLLM shortens it to" in note for note in answer["notes"])
    assert not any("may not start" in note for note in answer["notes"])


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = answer_to(f"vllm serve {tmp_path} --hardware h100")
    assert answer["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2


def test_a_longer_context_than_the_model_has_may_be_forced() -> None:
    words = "vllm serve Qwen/Qwen3-8B --max-model-len 131072 --hardware h100"
    with pytest.raises(InputError, match="above the 40960 positions"):
        answer_to(words)
    assert answer_to(f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {words}")["starts"]


def test_the_answer_of_a_start_is_vllm_s_arithmetic() -> None:
    answer = answer_to("vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192 --hardware h100")
    assert answer["starts"] and answer["fixes"] == []
    taken = sum(answer[f"{part}_gib"] for part in ("weights", "activation", "graph", "other"))
    assert taken + answer["kv_gib"] == pytest.approx(answer["budget_gib"], abs=0.01)
    assert answer["kv_tokens"] == answer["kv_blocks"] * 16
    assert answer["max_concurrency"] == pytest.approx(answer["kv_tokens"] / 8192, abs=0.01)
    low, high = answer["interval"]["kv_tokens"]
    assert low < answer["kv_tokens"] < high
    assert answer["least_sure"] in ("CUDA graphs", "non-torch memory")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        # The context is too long for what is left.
        (
            "vllm serve meta-llama/Llama-3.1-8B --hardware rtx-4090",
            {("max_model_len",), ("tensor_parallel_size",)},
        ),
        # The sampler takes what the pool would need.
        (
            "vllm serve Qwen/Qwen3-8B --hardware l4 --max-num-seqs 2048 --max-model-len 16384 "
            "--max-num-batched-tokens 4096",
            {("max_num_seqs",), ("quantization",)},
        ),
        # The weights alone are too large.
        (
            "vllm serve meta-llama/Llama-3.1-70B --max-model-len 8192 --hardware h100-sxm",
            {("tensor_parallel_size",), ("quantization",)},
        ),
        # No one change is enough.
        (
            "vllm serve meta-llama/Llama-3.1-405B --hardware h100-sxm",
            {("quantization", "tensor_parallel_size")},
        ),
        # More is asked for than the device has free.
        (
            "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --hardware h100 "
            "--gpu-memory-utilization 1.0",
            {("gpu_memory_utilization",)},
        ),
        (
            "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --hardware h100 "
            "--kv-cache-memory-bytes 80G",
            {("kv_cache_memory_bytes",)},
        ),
        (
            "vllm serve Qwen/Qwen3-8B --hardware h100 --kv-cache-memory-bytes 1G",
            {("kv_cache_memory_bytes",), ("max_model_len",)},
        ),
        # More than is free, and a length that no share leaves room for.
        (
            "vllm serve Qwen/Qwen3-8B --hardware l4 --gpu-memory-utilization 0.999",
            {("gpu_memory_utilization", "max_model_len")},
        ),
        # A card without fp8 kernels.
        (
            "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --hardware t4 --vllm-version 0.11.0",
            {("tensor_parallel_size",), ("quantization",)},
        ),
    ],
)
def test_fixes_are_named_and_start(words: str, flags: set[tuple[str, ...]]) -> None:
    answer = answer_to(words)
    assert not answer["starts"] and answer["reason"].startswith("does not start")
    changes = {tuple(sorted(fix["change"])) for fix in answer["fixes"]}
    assert flags <= changes
    if "t4" in words:
        assert "fp8" not in str(answer["fixes"])
    for fix in answer["fixes"]:
        again = words + "".join(
            f" --{key.replace('_', '-')}={value}" for key, value in fix["change"].items()
        )
        fixed = answer_to(again)
        assert fixed["starts"], fix
        assert fixed["kv_tokens"] == fix["kv_tokens"]


def test_the_suggested_length_is_the_longest() -> None:
    words = "vllm serve meta-llama/Llama-3.1-8B --hardware rtx-4090 --max-model-len "
    longest = answer_to(words + "100000")["estimated_max_model_len"]
    assert answer_to(words + str(longest))["starts"]
    assert not answer_to(words + str(longest + 16))["starts"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("google/gemma-3-12b-it --hardware h100 --max-model-len 8192", "vision tower"),
        ("google/gemma-3-4b-it --hardware h100 --max-model-len 8192", "1 padding layers"),
        ("Qwen/Qwen3.5-27B --hardware h200 --max-model-len 8192", "attention block size"),
        ("Qwen/Qwen3-8B --hardware h100 --kv-cache-dtype kivi2", "vLLM has no such format"),
        (
            "Qwen/Qwen3-8B --hardware h100 --max-model-len 8192 --gpu-memory-utilization 0.98",
            "graph capture",
        ),
        ("Qwen/Qwen3-8B --hardware h100 --enable-lora --max-model-len 8192", "--enable-lora: "),
        ("Qwen/Qwen3-8B --hardware h100 --frobnicate 3", "--frobnicate 3: no flag of vLLM"),
        ("Qwen/Qwen3-30B-A3B --hardware h100 -dp 4 --max-model-len 8192", "over 4 engines"),
    ],
)
def test_notes(words: str, part: str) -> None:
    assert part in " ".join(answer_to(f"vllm serve {words}")["notes"])


def test_the_log_that_a_scenario_names_stands_beside_too(tmp_path: Path) -> None:
    (tmp_path / "boot.log").write_text(LOG)
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO.replace("engine: {", "engine: {boot_log: boot.log, "))
    assert answer_to(str(path))["logged"]["kv_tokens"] == 476_016


def test_a_pool_given_too_small_may_be_left_to_vllm() -> None:
    words = "vllm serve Qwen/Qwen3-8B --hardware h100 --num-gpu-blocks-override 100"
    first = answer_to(words)["fixes"][0]
    assert first["change"] == {"num_gpu_blocks_override": None}
    assert first["kv_tokens"] == answer_to(words.rpartition(" --")[0])["kv_tokens"]


def test_weights_in_fewer_bits_may_need_a_checkpoint_of_their_own() -> None:
    fixes = answer_to(
        "vllm serve meta-llama/Llama-3.1-70B --max-model-len 4096 --vllm-version 0.9.1 "
        "--hardware h100"
    )["fixes"]
    needs = {fix["change"].get("quantization"): fix["needs"] for fix in fixes}
    assert needs["awq"] == "a checkpoint quantised with awq"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("Qwen/Qwen3-0.6B --dtype bfloat16 --hardware t4", "bfloat16 needs compute capability 8"),
        ("Qwen/Qwen3-8B --quantization fp8 --hardware v100-sxm-32gb", "fp8 needs compute"),
    ],
)
def test_what_a_device_has_no_kernels_for(words: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        answer_to(f"vllm serve {words}")


def test_a_log_of_another_model_is_told(tmp_path: Path) -> None:
    path = tmp_path / "boot.log"
    path.write_text(LOG)
    answer = answer_to("vllm serve Qwen/Qwen3-8B --hardware h100", boot_log=path)
    assert "the log is of meta-llama/Llama-3.1-8B" in answer["notes"]


def test_a_log_stands_beside_the_prediction(tmp_path: Path) -> None:
    path = tmp_path / "boot.log"
    path.write_text(LOG)
    answer = answer_to(
        "vllm serve meta-llama/Llama-3.1-8B --max-model-len 4096 --hardware h100",
        boot_log=path,
    )
    assert answer["vllm_version"] == "0.19.0"  # the log says so
    assert answer["logged"]["kv_tokens"] == 476_016
    assert any("max_model_len 8192" in note for note in answer["notes"])
    alone = answer_to(f"--boot-log {path} --hardware h100-sxm")
    assert alone["max_model_len"] == 8192
    assert alone["weights_gib"] == pytest.approx(14.99, abs=0.01)


def test_a_scenario_takes_the_pool_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "boot.log").write_text(LOG)
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO.replace("engine: {", "engine: {boot_log: boot.log, "))
    assert build(load_scenario(path)).memory.num_gpu_blocks == 476_016 // 16
    path.write_text(SCENARIO.replace("engine: {", "engine: {boot_log: none.log, "))
    with pytest.raises(InputError, match=r"none\.log: cannot be read"):
        build(load_scenario(path))


def test_own_options_stand_anywhere_among_vllm_s() -> None:
    words = ["vllm", "serve", "--hardware=l4", "m", "--json", "--vllm-version", "0.19"]
    rest, own = own_options(words)
    assert rest == ["vllm", "serve", "m"]
    assert own == {"hardware": "l4", "json": "", "vllm_version": "0.19"}
    with pytest.raises(InputError, match="--hardware needs a value"):
        own_options(["--hardware"])


@given(st.sampled_from(["h100-sxm", "rtx-4090", "l4"]), st.integers(1, 4096), st.integers(1, 15))
def test_every_answer_can_be_shown(hardware: str, seqs: int, length: int) -> None:
    from rich.console import Console

    answer = answer_to(
        f"vllm serve Qwen/Qwen3-8B --max-num-seqs {seqs} --max-model-len {2**length} "
        f"--max-num-batched-tokens 8192 --hardware {hardware}"
    )
    console = Console(record=True, width=100, file=None, quiet=True)
    console.print(render_startup(answer))
    assert json.dumps(answer)


# --- the command line


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), standalone_mode=False)


def test_kv_prints_vllm_s_words_or_json(tmp_path: Path) -> None:
    line = ["--", "vllm", "serve", "Qwen/Qwen3-8B", "--max-model-len", "8k", "--hardware", "h100"]
    shown = run("kv", *line).output
    assert "Model loading took" in shown and "GPU KV cache size" in shown
    found = json.loads(run("kv", "--json", *line).output)
    assert set(found) >= {
        *("starts", "weights_gib", "activation_gib", "graph_gib", "other_gib", "kv_gib"),
        *("kv_blocks", "kv_tokens", "max_concurrency", "interval", "fixes"),
    }
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    of_file = json.loads(run("kv", str(path), "--json").output)
    assert of_file["kv_tokens"] == pytest.approx(476_016, rel=0.001)
    smaller = json.loads(run("kv", str(path), "--json", "--set", "engine.block_size=32").output)
    assert smaller["block_size"] == 32


def test_what_kv_cannot_answer() -> None:
    for words, message in (
        (["kv"], "no model"),
        (["kv", "--", "vllm", "serve", "Qwen/Qwen3-8B"], "--hardware: name the device"),
        (["kv", "nowhere.yaml"], r"cannot be read"),
        (["init", "--", "vllm", "serve", "Qwen/Qwen3-8B"], "--hardware: name the device"),
        (["kv", "--hardware", "h100", "--", "m/m", "--vllm-version", "0.3"], "known from 0.6.0"),
    ):
        result = run(*words)
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)


def test_help_of_init_lists_the_flags() -> None:
    from servecast.scenarios.flags import understood

    text = understood()
    for flag in ("max-num-seqs", "speculative-config", "tool-call-parser", "kv-transfer-config"):
        assert flag in text
