"""A pasted `vllm serve` line, whoever launched it, becomes a scenario; every flag has a place."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servecast.costmodels.errors import InputError
from servecast.scenarios import flags
from servecast.scenarios.build import build
from servecast.scenarios.init import scenario_text
from servecast.scenarios.load import load_scenario
from servecast.scenarios.serve import flags_of_config, parse_line

ASKED: dict[str, Any] = {
    "hardware": "h100-sxm",
    "rate_per_s": 4,
    "input_tokens": 500,
    "output_tokens": 100,
    "requests": 50,
}

#: Every flag of vLLM 0.32's engine arguments, and whether it is a switch or takes values.
VLLM_FLAGS = json.loads((Path(__file__).parent / "golden/vllm_flags.json").read_text())


@pytest.mark.parametrize(("flag", "arity"), VLLM_FLAGS.items())
def test_every_flag_of_vllm_has_a_place_and_its_arity(flag: str, arity: str) -> None:
    name = flags.canonical(flag)
    places = [
        name in place for place in (flags.MAPPED, flags.READ, flags.WHY_HARMLESS, flags.WHY_MATTERS)
    ]
    assert sum(places) == 1
    assert flags.is_switch(name) == (arity == "switch")
    assert (name in flags.MANY) == (arity == "many")


SEQS_8 = {"max_num_seqs": 8}


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        ("vllm serve M --max-num-seqs 64", {"max_num_seqs": 64}),
        ("vllm serve M --max-num-seqs=64 -tp 2", {"max_num_seqs": 64, "tensor_parallel_size": 2}),
        ("vllm serve M --max_num_seqs 64", {"max_num_seqs": 64}),
        ("serve --enforce-eager M", {"enforce_eager": True}),
        ("M --no-enable-prefix-caching", {"enable_prefix_caching": False}),
        (
            "M --max-model-len 16k --kv-cache-dtype fp8",
            {"max_model_len": 16000, "kv_cache_dtype": "fp8"},
        ),
        ("M --max-model-len 16K", {"max_model_len": 16384}),
        ("CUDA_VISIBLE_DEVICES=0 python3 -m vllm.entrypoints.openai.api_server --model M", {}),
        ("vllm serve M '\\' --gpu-memory-utilization 0.9", {"gpu_memory_utilization": 0.9}),
        ("nohup /opt/bin/vllm serve M --gpu-memory-utilization 1", {"gpu_memory_utilization": 1.0}),
        ("M --trust-remote-code --swap-space 8", {"swap_space": 8.0}),
        ("M -O0", {"enforce_eager": True}),
        ("M --cudagraph-capture-sizes 1 2 4", {"cudagraph_capture_sizes": [1, 2, 4]}),
        ("M --max-cudagraph-capture-size 8", {"cudagraph_capture_sizes": [1, 2, 4, 8]}),
        (
            """M --compilation-config '{"cudagraph_capture_sizes": [4, 1]}'""",
            {"cudagraph_capture_sizes": [1, 4]},
        ),
        ("M --compilation-config.cudagraph_mode NONE", {"enforce_eager": True}),
        ("M -cc.cudagraph_mode=NONE", {"enforce_eager": True}),
        ("""M --limit-mm-per-prompt '{"image": 0}'""", {"language_model_only": True}),
        (
            """M --hf-overrides '{"rope_scaling": {"factor": 4.0}}'""",
            {"hf_overrides": {"rope_scaling": {"factor": 4.0}}},
        ),
        (
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 vllm serve M",
            {"estimate_cudagraphs": False},
        ),
        (
            "docker run --gpus all -v a:b -e HF_TOKEN=x -p 1:1 vllm/vllm-openai:v0.11.0 --model M",
            {"vllm_version": "0.11.0"},
        ),
        ("vllm serve M --served-model-name a b c --port 8000", {}),
        ("uv run vllm serve M -tp 2", {"tensor_parallel_size": 2}),
        ("$ cd /opt && export A=1; vllm serve M --max-num-seqs 8 2>&1 | tee log", SEQS_8),
        ("bash -c 'cd x && vllm serve M --max-num-seqs 8'", SEQS_8),
        ("'vllm serve M --max-num-seqs 8'", SEQS_8),
        ("docker run --rm vllm-openai:v0.11.0 --model M", {"vllm_version": "0.11.0"}),
        ("docker run --entrypoint vllm a/vllm:v0.9.1 serve M", {"vllm_version": "0.9.1"}),
        ("python3 /src/vllm/entrypoints/openai/api_server.py --model M", {}),
        ("vllm serve M --max-seq-len-to-capture 32768 --max-num-seq 8", SEQS_8),
        ("vllm serve M --kv-cache-memory 2g", {"kv_cache_memory_bytes": 2_000_000_000}),
        ("vllm serve M --cuda-graph-sizes 8", {"cudagraph_capture_sizes": [1, 2, 4, 8]}),
        ("vllm serve M --cuda-graph-sizes 8 16", {"cudagraph_capture_sizes": [8, 16]}),
        ("vllm serve M -O.cudagraph_mode=NONE", {"enforce_eager": True}),
        ("""vllm serve M -O'{"cudagraph_mode": null, "level": 3}'""", {}),
        ("vllm serve M --dtype half", {"dtype": "float16"}),
        (
            """vllm serve M --rope-scaling '{"rope_type": "yarn", "factor": 4.0}'""",
            {"hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
        ),
        ("vllm serve M --model other", {}),
        ("vllm serve M --max-model-len auto", {}),
        ("vllm serve M --quantization deepspeedfp", {}),
        ("VLLM_USE_V1=1 vllm serve M", {"vllm_use_v1": True}),
        ("export VLLM_USE_V1=1; vllm serve M", {"vllm_use_v1": True}),
        ("docker run -eVLLM_USE_V1=0 vllm/vllm-openai --model M", {"vllm_use_v1": False}),
        ("vllm serve M --swap-space 0", {}),
        ("vllm serve M --compilation-config 0", {"enforce_eager": True}),
        ("vllm serve M -O1", {}),
        ("vllm serve M --preemption-mode swap", {"preemption_mode": "swap"}),
    ],
)
def test_lines(words: str, engine: dict[str, Any]) -> None:
    line = parse_line(shlex.split(words))
    assert line.model == "M"
    assert line.engine == engine
    assert not line.unknown


def test_data_parallel_engines_are_replicas() -> None:
    line = parse_line(["vllm", "serve", "M", "-dp", "4"])
    assert line.replicas == 4
    assert line.engine == {"data_parallel_size": 4}


def test_what_is_not_modelled_is_told_with_why_and_what_does_no_harm_is_not() -> None:
    words = (
        'M --port 8000 --speculative-config \'{"method": "dflash"}\' --enable-lora --frobnicate 3 '
        '--kv-transfer-config \'{"kv_connector": "LMCacheConnectorV1"}\' --no-enable-eplb'
    )
    line = parse_line(shlex.split(words))
    assert [flag for flag, _ in line.harmless] == ["--port 8000"]
    assert [flag for flag, _ in line.unmodelled] == [
        '--speculative-config {"method": "dflash"}',
        "--enable-lora",
        '--kv-transfer-config {"kv_connector": "LMCacheConnectorV1"}',
    ]
    assert all(why for _, why in line.unmodelled)
    assert line.unknown == ["--frobnicate 3"]


def test_the_model_may_follow_a_flag_that_nobody_knows() -> None:
    line = parse_line(["vllm", "serve", "--frobnicate", "meta-llama/Llama-3.1-8B"])
    assert line.model == "meta-llama/Llama-3.1-8B"


def test_a_config_file_stands_under_the_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model: M\nmax-num-seqs: 8\nmax_model_len: 4k\nno-enable-prefix-caching: true\n"
        'compilation-config: \'{"cudagraph_mode": "NONE", "pass_config": {}}\'\n'
    )
    line = parse_line(["vllm", "serve", "--config", "c.yaml", "--max-num-seqs", "16"], tmp_path)
    assert line.model == "M"
    assert line.engine == {
        "max_num_seqs": 16,
        "max_model_len": 4000,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }


def test_the_scenario_loads_and_starts(tmp_path: Path) -> None:
    words = (
        "vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192 --enable-lora --frobnicate "
        "--cudagraph-capture-sizes 1 2 4 8 --kv-cache-dtype fp8"
    )
    path = tmp_path / "s.yaml"
    path.write_text(scenario_text(parse_line(words.split()), **ASKED))
    loaded = load_scenario(path)
    deployment = build(loaded)
    assert deployment.engine["max_model_len"] == 8192
    assert deployment.engine["cudagraph_capture_sizes"] == (1, 2, 4, 8)
    assert "# not modelled: --enable-lora" in path.read_text()


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ("vllm serve", {}, "no model"),
        ("vllm serve meta-llama/Llama-3.1-8B --max-num-seqs", {}, "--max-num-seqs needs a value"),
        ("vllm serve a b", {}, "'b' is neither a flag nor the value of one"),
        ("vllm serve nobody/none", {}, "'nobody/none' is not known"),
        ("meta-llama/Llama-3.1-8B", {"hardware": "h101"}, "'h101' is not known"),
        ("meta-llama/Llama-3.1-8B --max-model-len 512", {}, "do not fit max_model_len 512"),
        ("M --cudagraph-capture-sizes a 1", {}, "--cudagraph-capture-sizes a 1: "),
        ("M --max-cudagraph-capture-size 99999999", {}, "1 to 65536"),
        ('M -cc.cudagraph_capture_sizes=["a",1]', {}, "cudagraph_capture_sizes"),
        ("M -cc.cudagraph_capture_sizes=x", {}, "expected a list"),
        ("M --max-num-seqs many", {}, "--max-num-seqs many: expected a whole number"),
        ("M --kv-cache-dtype fp7", {}, "'fp7' is not known"),
        ("M --gpu-memory-utilization nan", {}, "gpu-memory-utilization"),
        ("M --hf-overrides {x", {}, "--hf-overrides: not JSON"),
        ("M --hf-overrides 3", {}, "expected a JSON object"),
        ("M --rope-theta abc", {}, "--rope-theta abc: expected a number"),
        ("M --rope-scaling 3", {}, "--rope-scaling 3: expected a JSON object"),
        ("M --config nowhere.yaml", {}, r"--config nowhere\.yaml: cannot be read"),
        ("M -dp 0", {}, "-dp 0: expected a whole number"),
    ],
)
def test_bad_lines(words: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario_text(parse_line(words.split()), **{**ASKED, **options})


pieces = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [*VLLM_FLAGS, "-tp", "-O3", "-cc.x=1", "--config", "--no-", "-", "--", "=", "--=", "docker"]
    ),
    st.sampled_from(["{", "{}", "[1]", '{"a": {"b": 1}}', "null", "true", "-1", "1e999", "16k"]),
    st.tuples(st.sampled_from(list(VLLM_FLAGS)), st.text(max_size=8)).map("=".join),
)


@given(st.lists(pieces, max_size=8))
def test_any_words_parse_or_are_refused_in_one_line(words: list[str]) -> None:
    try:
        line = parse_line(words, Path("/nowhere"))
        scenario_text(line, **ASKED)
    except InputError as error:
        assert str(error)


@given(st.one_of(st.text(), st.binary().map(lambda raw: raw.decode("utf-8", "replace"))))
def test_any_config_file_parses_or_is_refused(text: str) -> None:
    try:
        flags_of_config(text, "c.yaml")
    except InputError as error:
        assert str(error).startswith("c.yaml")
