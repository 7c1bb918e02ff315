"""Models and hardware: counted as published, read as written, refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from servecast.costmodels import catalogue
from servecast.costmodels.catalogue import (
    hardware_names,
    load_hardware,
    load_model,
    model_names,
    published_parameters,
)
from servecast.costmodels.errors import InputError
from servecast.costmodels.hf_config import model_from_config
from servecast.costmodels.kv_format import BFLOAT16, kv_format
from servecast.costmodels.kv_layout import kv_bytes_per_token
from servecast.costmodels.quantization import parse_quantization, with_quantization
from servecast.costmodels.roofline import Roofline
from servecast.costmodels.shape import StepShape
from servecast.costmodels.specs import ModelSpec, Parallelism
from servecast.costmodels.weights import (
    active_parameters,
    embedding_parameters,
    layer_matrices,
    parameters,
    weight_bytes,
)

CONFIGS = Path(__file__).parents[1].parent / "shared/validation/files/hf_configs"

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}

#: Published totals (model cards and safetensors indices), multi-token-prediction layers aside.
PUBLISHED = {
    "DeepSeek-V2-Lite": 15.706e9,
    "DeepSeek-V3": 671.0e9,
    "DeepSeek-V3.2": 671.9e9,
    "Llama-2-7b-hf": 6.738e9,
    "Llama-3.1-70B-Instruct-FP8": 70.554e9,
    "Llama-4-Scout-FP8-dynamic": 108.64e9,
    "MiniMax-M2.5": 228.7e9,
    "Mistral-Nemo-Instruct-2407": 12.248e9,
    "Mixtral-8x7B-v0.1": 46.703e9,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.58e9,
    "Qwen3-0.6B": 0.596e9,
    "Qwen3-32B-FP8": 32.76e9,
    "Qwen3-VL-30B-A3B-Instruct": 31.07e9,
    "Qwen3.5-35B-A3B": 35.1e9,
    "gpt-oss-20b": 20.91e9,
    "opt-125m": 125.2e6,
}

needs_configs = pytest.mark.skipif(not CONFIGS.exists(), reason="shared hf_configs not here")


def shared_model(name: str) -> ModelSpec:
    beside = CONFIGS / f"{name}.hf_quant_config.json"
    quant = json.loads(beside.read_text()) if beside.exists() else None
    return model_from_config(json.loads((CONFIGS / f"{name}.json").read_text()), name, quant)


@pytest.mark.parametrize(("name", "count"), published_parameters().items())
def test_bundled_models_count_as_published(name: str, count: float) -> None:
    assert parameters(load_model(name)) == pytest.approx(count, rel=0.01)


@needs_configs
@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_public_configs_count_as_published(name: str, count: float) -> None:
    assert parameters(shared_model(name)) == pytest.approx(count, rel=0.01)


@needs_configs
def test_every_public_config_is_read() -> None:
    for path in CONFIGS.glob("*.json"):
        if "quant" not in path.stem:
            assert weight_bytes(shared_model(path.stem)) > 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen3-30B-A3B", 3.35e9),
        ("Qwen3-235B-A22B", 22.2e9),
        ("DeepSeek-V3", 37.5e9),
        ("Mixtral-8x7B", 12.88e9),
        ("Llama-3.1-8B", 8.03e9),
    ],
)
def test_active_parameters(name: str, count: float) -> None:
    assert active_parameters(load_model(name)) == pytest.approx(count, rel=0.01)


def test_every_bundled_name_loads() -> None:
    for name in model_names():
        assert load_model(name).name == name
        assert load_model(name.lower().split("/")[1]).name == name
    for name in hardware_names():
        device = load_hardware(name.upper())
        assert device.peak_flops_per_s() > 0
        assert device.source
        assert not device.default_block_size % device.block_size_multiple


# --- KV


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Llama-3.1-8B", 131_072),  # 2 x 32 layers x 8 heads x 128 x 2 bytes
        ("Llama-2-7b-hf", 524_288),  # as many KV heads as heads
        ("Qwen3-8B", 147_456),  # head_dim beside hidden_size / heads
        ("DeepSeek-V3", 61 * 576 * 2),  # one latent a layer; its 128 KV heads mislead
        ("gemma-2-2b", 106_496),
    ],
)
def test_kv_bytes_per_token(name: str, size: int) -> None:
    assert kv_bytes_per_token(load_model(name), BFLOAT16) == size


@needs_configs
def test_linear_layers_hold_no_kv() -> None:
    qwen, nemotron = (
        shared_model(name) for name in ("Qwen3.5-27B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    )
    assert kv_bytes_per_token(qwen, BFLOAT16) == 16 * 2 * 4 * 256 * 2
    assert kv_bytes_per_token(nemotron, BFLOAT16) == 6 * 1024


@needs_configs
def test_kv_type_of_the_checkpoint_holds_for_auto() -> None:
    model = shared_model("Llama-3.1-70B-Instruct-FP8")
    assert model.quantization is not None and model.quantization.compute == "fp8"
    assert kv_format(model).name == "fp8"
    assert kv_format(model, "bfloat16").bits == 16
    with pytest.raises(InputError, match=r"kv_cache_dtype: 'fp7'"):
        kv_format(model, "fp7")


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["Llama-3.1-70B", "Qwen3-30B-A3B"]))
def test_kv_splits_over_ranks_until_heads_run_out(tensor: int, name: str) -> None:
    model = load_model(name)
    whole = kv_bytes_per_token(model, BFLOAT16)
    split = kv_bytes_per_token(model, BFLOAT16, tensor)
    heads = model.num_key_value_heads
    assert split == whole / min(tensor, heads)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        # Parameters that a token meets, as the model cards state them.
        ("Llama-3.1-8B", 8.03e9),
        ("Qwen3-30B-A3B", 3.34e9),
        ("DeepSeek-V3", 37.6e9),
        # Their card leaves the input table (201,088 x 2,880) out.
        ("gpt-oss-20b", 3.61e9 + 0.579e9),
        ("gpt-oss-120b", 5.13e9 + 0.579e9),
        ("Mixtral-8x7B-v0.1", 12.88e9),
    ],
)
def test_flops_of_a_token_are_twice_its_parameters(name: str, active: float) -> None:
    """2 FLOPs a weight, the input table's looked up and not multiplied."""
    model = load_model(name)
    assert active_parameters(model) == pytest.approx(active, rel=0.01)
    step = Roofline(model=model, hardware=load_hardware("h100-sxm")).step(
        StepShape(decodes=1, decode_tokens=1, decode_context_tokens=1, sampled=1)
    )
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    assert step.flops == pytest.approx(2 * (active_parameters(model) - looked_up), rel=0.01)


# --- splitting and storing weights


@given(
    st.sampled_from(["Llama-3.1-8B", "Mixtral-8x7B", "DeepSeek-V3", "gemma-3-27b", "phi-4"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_a_split_loses_no_weight(name: str, tensor: int, pipeline: int) -> None:
    """All devices together hold every weight, and one never holds more than all."""
    model = load_model(name)
    if model.num_key_value_heads % tensor:
        return
    whole = weight_bytes(model)
    share = weight_bytes(model, Parallelism(tensor, pipeline))
    assert share <= whole
    assert share * tensor * pipeline >= 0.999 * whole


def test_matrices_and_tables_are_the_parameters() -> None:
    model = load_model("Qwen3-30B-A3B")
    layers = sum(matrix.parameters for matrix in layer_matrices(model))
    assert layers + embedding_parameters(model) == parameters(model)


def test_unsplittable_models_are_refused() -> None:
    with pytest.raises(InputError, match=r"tensor_parallel_size: 3 .* 32 attention heads"):
        weight_bytes(load_model("Llama-3.1-8B"), Parallelism(tensor=3))
    with pytest.raises(InputError, match=r"tensor_parallel_size: 4 .* 10 KV heads"):
        weight_bytes(load_model("phi-4"), Parallelism(tensor=4))
    with pytest.raises(InputError, match=r"pipeline_parallel_size: 64 .* 32 layers"):
        weight_bytes(load_model("Llama-3.1-8B"), Parallelism(pipeline=64))


def test_embeddings_stay_16_bit() -> None:
    model = load_model("Llama-3.1-8B")
    tables = 2 * embedding_parameters(model)
    layers = weight_bytes(model) - tables
    assert weight_bytes(with_quantization(model, "fp8")) == tables + layers / 2
    assert weight_bytes(with_quantization(model, "awq")) == pytest.approx(
        tables + layers * (4 + 20 / 128) / 16
    )


def test_mxfp4_holds_for_experts_alone() -> None:
    model = load_model("gpt-oss-20b")
    experts = sum(m.parameters for m in layer_matrices(model) if m.group == "experts")
    others = parameters(model) - experts
    assert weight_bytes(model) == pytest.approx(experts * 4.25 / 8 + others * 2, rel=1e-3)


@needs_configs
def test_quantization_variants() -> None:
    variants = json.loads((CONFIGS / "quantization_config_variants.json").read_text())
    bits = {}
    for name, config in variants.items():
        quantization = parse_quantization(config, layers=32)
        assert quantization is not None and quantization.compute == "16bit"
        bits[name] = quantization.weight_bits
    assert bits["awq"] == bits["gptq"] == 4.15625
    assert bits["gptq_per_channel"] == 8
    assert 4 < bits["bitsandbytes"] < 4.2


def test_exceptions_for_a_few_layers_do_not_count() -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}
    quantization = parse_quantization(config, layers=32)
    assert quantization is not None and not quantization.keeps
    config["modules_to_not_convert"] = [f"model.layers.{i}.self_attn.q_proj" for i in range(32)]
    quantization = parse_quantization(config, layers=32)
    assert quantization is not None and quantization.keeps == {"attention"}


# --- configs


def test_missing_keys_take_class_defaults() -> None:
    assert not model_from_config(LLAMA_8B, "llama").tie_word_embeddings
    opt = load_model("opt-125m")
    assert opt.tie_word_embeddings and not opt.gated_mlp and opt.learned_positions == 2050
    gemma = load_model("gemma-3-4b")
    assert gemma.tie_word_embeddings and gemma.vocab_size == 262_208 and gemma.head_dim == 256
    mha = {key: value for key, value in LLAMA_8B.items() if key != "num_key_value_heads"}
    assert model_from_config(mha, "mha").num_key_value_heads == 32


@pytest.mark.parametrize(
    ("name", "window", "layers"),
    [
        ("gemma-2-2b", 4096, 13),
        ("gemma-3-27b", 1024, 52),
        ("gpt-oss-20b", 128, 12),
        ("Mistral-7B-v0.1", 4096, 32),
        ("Mistral-7B-Instruct-v0.2", 0, 0),
        ("Llama-4-Scout-17B-16E", 8192, 36),
    ],
)
def test_sliding_windows(name: str, window: int, layers: int) -> None:
    model = load_model(name)
    assert (model.sliding_window, model.sliding_layers) == (window, layers)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", None, "hidden_size: missing"),
        ("hidden_size", "4096", "hidden_size: .* got '4096'"),
        ("num_hidden_layers", 0, "num_hidden_layers: .* got 0"),
        ("vocab_size", True, "vocab_size: .* got True"),
        ("num_attention_heads", 3.5, r"num_attention_heads: .* got 3\.5"),
        ("torch_dtype", "int3", "torch_dtype: .*'int3'"),
        ("quantization_config", 4, "quantization_config: .* got 4"),
        ("quantization_config", {"quant_method": "x"}, "quant_method: 'x'"),
        ("quantization_config", {"quant_method": "awq", "bits": 5}, "bits: .* got 5"),
        ("layer_types", ["full_attention"], "layer_types: 1 entries for 32 layers"),
        ("rope_scaling", {"rope_type": "yarn", "factor": "a"}, r"rope_scaling\.factor"),
        ("num_local_experts", 8, "num_experts_per_tok: missing"),
    ],
)
def test_bad_configs_name_key_and_value(key: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=f"^m: .*{message}") as caught:
        model_from_config({**LLAMA_8B, key: value}, "m")
    assert "\n" not in str(caught.value)


def test_files_are_read_as_bundled_rows_are(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    own = load_model(str(config))
    assert replace(own, name="x") == replace(load_model("Llama-3.1-8B"), name="x")
    quant = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    assert load_model(str(config)).kv_cache_dtype == "fp8"


def test_own_hardware(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("memory_gib: 24\nmemory_bandwidth_gb_per_s: 1000\nbf16_tflops: 100\n")
    device = load_hardware(str(path))
    assert device.memory_bytes == 24 * 2**30
    assert device.peak_flops_per_s("fp8") == 100e12
    for text, message in (
        ("memory_gib: 24\n", "memory_bandwidth_gb_per_s: missing"),
        ("memory_gib: -1\n", "memory_gib: .* got -1"),
        ("memory_gb: 24\n", "key: 'memory_gb' is not known; did you mean memory_gib"),
        ("[1, 2]\n", "expected a mapping"),
        ("a: [\n", "not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            load_hardware(str(path))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("A100 80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_devices_go_by_the_names_that_drivers_print(written: str, name: str) -> None:
    assert load_hardware(written).name == name


@pytest.mark.parametrize(
    ("checkpoint", "base", "method"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic", "Llama-3.3-70B-Instruct", "fp8"),
        (
            "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
            "Llama-3.1-8B",
            "compressed-tensors",
        ),
        ("TheBloke/Mistral-7B-Instruct-v0.2-GPTQ", "Mistral-7B-Instruct-v0.2", "gptq"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen2.5-7B-Instruct", "awq"),
        ("nvidia/Qwen3-30B-A3B-NVFP4", "Qwen3-30B-A3B", "nvfp4"),
        ("/models/Qwen3-8B", "Qwen3-8B", None),
    ],
)
def test_checkpoints_of_bundled_models_are_found(
    checkpoint: str, base: str, method: str | None
) -> None:
    found, model = load_model(checkpoint), load_model(base)
    assert found.hidden_size == model.hidden_size
    assert (found.quantization.method if found.quantization else None) == method


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'llama3\.1-8' .*Llama-3\.1-8B"):
        load_model("llama3.1-8")
    with pytest.raises(InputError, match=r"'h1000' .* h100-sxm"):
        load_hardware("h1000")
    with pytest.raises(InputError, match=r"nowhere/config\.json: No such file"):
        load_model("nowhere/config.json")
    with pytest.raises(InputError, match="quantization: 'fp7'"):
        with_quantization(load_model("Llama-3.1-8B"), "fp7")


def test_block_sizes_follow_the_backend() -> None:
    load_hardware("h100-sxm").check_block_size(48)
    with pytest.raises(InputError, match=r"block_size: 16 .* cpu: .* multiples of 32"):
        load_hardware("cpu").check_block_size(16)


def test_devices_without_a_unit_unpack() -> None:
    assert load_hardware("t4").peak_flops_per_s() == 65e12
    a100 = load_hardware("a100-sxm-80gb")
    assert a100.peak_flops_per_s("fp8") == a100.peak_flops_per_s()
    assert a100.peak_flops_per_s("int8") == 624e12


# --- any config.json


def bundled_configs() -> list[dict[str, Any]]:
    rows = yaml.safe_load((Path(catalogue.__file__).parent / "models.yaml").read_text())
    return [row["config"] for row in rows.values()]


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-10, 10**7), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from(bundled_configs()), st.data())
def test_any_config_is_read_or_refused_in_one_line(config: dict[str, Any], data: Any) -> None:
    """One or two keys of a real config, anywhere, hold anything that JSON can."""
    changed = json.loads(json.dumps(config))
    for _ in range(data.draw(st.integers(1, 2))):
        block = changed
        inner = [key for key, value in block.items() if isinstance(value, dict)]
        if inner and data.draw(st.booleans()):
            block = block[data.draw(st.sampled_from(sorted(inner)))]
        known = [*block, "rope_scaling", "quantization_config", "layer_types", "sliding_window"]
        block[data.draw(st.sampled_from(sorted(set(known))))] = data.draw(json_values)
    try:
        model = model_from_config(changed, "m")
        assert parameters(model) > 0
        assert kv_bytes_per_token(model, BFLOAT16) >= 0
    except InputError as error:
        assert str(error).startswith("m: ")


@given(json_values)
def test_any_json_is_a_config_or_refused(value: Any) -> None:
    with pytest.raises(InputError):
        model_from_config(value, "m")
