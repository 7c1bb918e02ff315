"""KV groups and blocks: vLLM's own, and laws that hold for any model."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servecast.costmodels.catalogue import load_model, model_names
from servecast.costmodels.kv_format import BFLOAT16, RESEARCH_FORMATS, VLLM_FORMATS, named_format
from servecast.costmodels.kv_layout import kv_bytes_per_token, kv_layout
from servecast.costmodels.specs import LinearMixer, ModelSpec
from servecast.costmodels.versions import Version

#: Groups, bytes a block, concurrency and one request's bytes as vLLM 0.32's `kv_cache_utils`
#: gives them for layers of two kinds: made by calling it on specs drawn at random.
GOLDEN = json.loads((Path(__file__).parent / "golden/kv_groups.json").read_text())


def model_of(case: dict[str, Any]) -> ModelSpec:
    """A model with the layers of a case."""
    linear = None
    if case["kind"] == "state":
        linear = LinearMixer(case["other"], 1, 1, case["state"] // 2, conv_dim=1, conv_kernel=1)
    windowed = case["kind"] in ("sliding", "chunked")
    return ModelSpec(
        name="made up",
        hidden_size=case["heads"] * case["dim"],
        num_layers=case["full"] + case["other"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["heads"],
        head_dim=case["dim"],
        intermediate_size=1024,
        vocab_size=1000,
        max_position_embeddings=case["max_model_len"],
        attention_layers=case["full"] + (case["other"] if windowed else 0),
        dense_layers=case["full"] + case["other"],
        sliding_window=case["window"] if windowed else 0,
        sliding_layers=case["other"] if windowed else 0,
        chunked_attention=case["kind"] == "chunked",
        linear=linear,
    )


@pytest.mark.parametrize("case", GOLDEN)
def test_groups_are_those_of_vllm(case: dict[str, Any]) -> None:
    layout = kv_layout(
        model_of(case),
        BFLOAT16,
        block_size=case["block_size"],
        enable_prefix_caching=case["prefix"],
        max_num_batched_tokens=case["mnbt"],
        async_scheduling=case["steps"] == 2,
    )
    assert layout.block_size == case["size"]
    assert len(layout.groups) == len(case["groups"])
    assert layout.block_bytes == case["bytes_per_block"]
    longest = case["max_model_len"]
    assert layout.concurrency(10_000, longest) == pytest.approx(case["concurrency"])
    assert layout.request_blocks(longest) * layout.block_bytes == case["request_bytes"]


def test_a_logged_hybrid_start_comes_out() -> None:
    """vLLM ~0.24, Qwen3.6-27B, TP2, fp8 KV and three drafts: 5.33 GiB, 1.15x, 300,220 tokens.

    Its drafter's layer of full attention makes 17 (vllm club-3090 issue 594).
    """
    model = load_model("Qwen3.6-27B")
    model = ModelSpec(**{**vars(model), "attention_layers": 17, "num_layers": 65})
    layout = kv_layout(
        model,
        VLLM_FORMATS["fp8"],
        tensor=2,
        max_num_batched_tokens=8192,
        num_speculative_tokens=3,
        version=Version(0, 24),
    )
    assert layout.padding_layers == 3  # as the log says
    blocks = int(5.33 * 2**30 // layout.block_bytes)
    assert layout.logged_tokens(blocks, 262_144, Version(0, 24)) == pytest.approx(300_220, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "blocks", "tokens", "concurrency"),
    [
        # vLLM 0.19 on H100, max_model_len 8,192 (llm-d-planner, Apache-2.0).
        ("gemma-3-12b-it", 48_867, 130_304, 15.88),
        ("gemma-3-4b-it", 204_817, 468_144, 57.05),
        ("gemma-2-2b-it", 83_770, 670_160, 81.73),
        ("gpt-oss-20b", 323_972, 2_591_776, 316.07),
    ],
)
def test_printed_tokens_of_hybrid_models(
    name: str, blocks: int, tokens: int, concurrency: float
) -> None:
    layout = kv_layout(
        load_model(name), BFLOAT16, max_num_batched_tokens=8192, version=Version(0, 19)
    )
    assert layout.logged_tokens(blocks, 8192, Version(0, 19)) == tokens
    assert layout.concurrency(blocks, 8192) == pytest.approx(concurrency, abs=0.006)


layouts = st.builds(
    kv_layout,
    st.sampled_from(model_names()).map(load_model),
    st.sampled_from([BFLOAT16, VLLM_FORMATS["fp8"], named_format("int4_g64")]),
    block_size=st.sampled_from([16, 32, 128]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    enable_prefix_caching=st.booleans(),
    max_num_batched_tokens=st.sampled_from([512, 8192]),
    version=st.sampled_from([Version(0, 8), Version(0, 12), Version(0, 19), Version(0, 32)]),
)


@given(layouts, st.integers(1, 100_000), st.integers(1, 100_000))
def test_longer_requests_never_take_fewer_blocks(layout: Any, a: int, b: int) -> None:
    short, long = sorted((a, b))
    assert 0 < layout.request_blocks(short) <= layout.request_blocks(long)


@given(layouts, st.integers(0, 100_000), st.integers(1, 200_000))
def test_the_longest_request_fits_and_one_token_more_does_not(
    layout: Any, blocks: int, at_most: int
) -> None:
    longest = layout.longest(blocks, at_most)
    if longest:
        assert layout.request_blocks(longest) <= blocks
    if longest < at_most:
        assert layout.request_blocks(longest + 1) > blocks


@given(layouts, st.integers(0, 100_000), st.integers(1, 2048))
def test_the_scheduler_never_gets_more_than_the_pool(layout: Any, blocks: int, seqs: int) -> None:
    assert 0 <= layout.schedulable_blocks(blocks, seqs) <= blocks


# --- formats


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("bfloat16", 256.0),
        ("fp8", 128.0),
        ("int8_per_token_head", 132.0),  # 128 numbers and a 32-bit scale
        ("int4_per_token_head", 68.0),
        ("nvfp4", 72.0),  # and an 8-bit scale for 16
        ("int4_g64", 72.0),  # and a 16-bit scale and zero point for 64
        ("int2_g32", 48.0),
        ("kivi2", 48.0),
    ],
)
def test_bytes_of_a_head_of_128(name: str, size: float) -> None:
    assert named_format(name).vector_bytes(128) == size


@given(st.sampled_from([*VLLM_FORMATS.values(), *RESEARCH_FORMATS.values()]), st.integers(1, 512))
def test_no_format_is_smaller_than_its_bits(fmt: Any, width: int) -> None:
    assert fmt.vector_bytes(width) >= width * fmt.bits / 8


def test_scales_cost_what_they_cost() -> None:
    model = load_model("Llama-3.1-8B")
    per_token = {
        name: kv_bytes_per_token(model, named_format(name)) for name in ("fp8", "int8_g32")
    }
    assert per_token["fp8"] == 65_536
    assert per_token["int8_g32"] == 65_536 * (1 + 4 / 32)
