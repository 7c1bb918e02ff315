"""A pasted `vllm serve` line becomes a scenario."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servecast.costmodels.errors import InputError
from servecast.scenarios.build import build
from servecast.scenarios.init import parse_line, scenario_text
from servecast.scenarios.load import load_scenario

ASKED: dict[str, Any] = {
    "hardware": "h100-sxm",
    "rate_per_s": 4,
    "input_tokens": 500,
    "output_tokens": 100,
    "requests": 50,
}


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        ("vllm serve M --max-num-seqs 64", {"max_num_seqs": 64}),
        ("vllm serve M --max-num-seqs=64 -tp 2", {"max_num_seqs": 64, "tensor_parallel_size": 2}),
        ("serve --enforce-eager M", {"enforce_eager": True}),
        ("M --no-enable-prefix-caching", {"enable_prefix_caching": False}),
        (
            "M --max-model-len 16k --kv-cache-dtype fp8",
            {"max_model_len": 16000, "kv_cache_dtype": "fp8"},
        ),
        ("M --max-model-len 16K", {"max_model_len": 16384}),
        ("CUDA_VISIBLE_DEVICES=0 python3 -m vllm.entrypoints.openai.api_server --model M", {}),
        ("vllm serve M \\ --gpu-memory-utilization 0.9", {"gpu_memory_utilization": 0.9}),
    ],
)
def test_lines(words: str, engine: dict[str, Any]) -> None:
    line = parse_line(words.split())
    assert line.model == "M"
    assert line.engine == engine


def test_what_is_not_modelled_is_told_and_what_does_no_harm_is_not() -> None:
    words = 'M --port 8000 --speculative-config \'{"method": "ngram"}\' --enable-lora'
    line = parse_line(shlex.split(words))
    assert line.harmless == ["--port 8000"]
    assert line.unknown == ['--speculative-config {"method": "ngram"}', "--enable-lora"]


def test_the_scenario_loads_and_starts(tmp_path: Path) -> None:
    line = parse_line(["vllm", "serve", "meta-llama/Llama-3.1-8B", "--max-model-len", "8192"])
    path = tmp_path / "s.yaml"
    path.write_text(scenario_text(line, **ASKED))
    loaded = load_scenario(path)
    assert build(loaded).engine["max_model_len"] == 8192


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ("vllm serve", {}, "no model"),
        ("vllm serve meta-llama/Llama-3.1-8B --max-num-seqs", {}, "--max-num-seqs needs a value"),
        ("vllm serve a b", {}, "'b' is neither a flag nor the value of one"),
        ("vllm serve nobody/none", {}, "'nobody/none' is not known"),
        ("meta-llama/Llama-3.1-8B", {"hardware": "h101"}, "'h101' is not known"),
        ("meta-llama/Llama-3.1-8B --max-model-len 512", {}, "do not fit max_model_len 512"),
    ],
)
def test_bad_lines(words: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario_text(parse_line(words.split()), **{**ASKED, **options})


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_words_parse_or_are_refused_in_one_line(words: list[str]) -> None:
    try:
        parse_line(words)
    except InputError as error:
        assert str(error).startswith("vllm serve")
