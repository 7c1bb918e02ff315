"""Words of an operator's report, as servecast's names: devices, models, flags, metrics, loads.

People write `1x H100 80GB (GKE)`, `Qwen3-8B bf16`, `-tp 2`, `ttft_p50_ms` and `random 2048/512`.
Each function here takes such a text and gives what the scenario schema or the summary calls it;
what it does not recognise it returns as None or leaves out, it never guesses in silence.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from servecast.costmodels.catalogue import model_names, published_parameters
from servecast.scenarios.schema import Engine

#: The first pattern that is found names the device. A800 is an A100 with slower NVLink.
DEVICES = (
    (r"rtx ?pro ?6000", "rtx-pro-6000"),
    (r"5090", "rtx-5090"),
    (r"4090", "rtx-4090"),
    (r"3090", "rtx-3090"),
    (r"a100.*\b40 ?gb|a100-40", "a100-sxm-40gb"),
    (r"a100.*pcie", "a100-pcie-80gb"),
    (r"\ba[18]00", "a100-sxm-80gb"),
    (r"h100.*pcie", "h100-pcie"),
    (r"\bh100", "h100-sxm"),
    (r"\bh200", "h200-sxm"),
    *((rf"\b{name}\b", name) for name in ("gb200", "gb300", "b200", "b300", "l40s", "l4")),
    *((rf"\b{name}\b", name) for name in ("a10g", "a10", "t4", "mi250", "mi300x", "mi325x")),
    *((rf"\b{name}\b", name) for name in ("mi355x", "gaudi2", "gaudi3")),
)

#: What a report calls a way to store weights: `quantization`, or why it is not simulated.
QUANTIZATIONS = (
    (r"(gptq|w8a16).*int ?8|w8a16", "no name under quantization: for 8-bit weight-only"),
    (r"bitsandbytes|bnb", "bitsandbytes"),
    (r"awq", "awq"),
    (r"gptq|w4a16", "gptq"),
    (r"w8a8|int8", "compressed-tensors"),
    (r"nvfp4", "nvfp4"),
    (r"mxfp4", "mxfp4"),
    (r"fp8", "fp8"),
)

#: Words for features of later work, and for engines that are not simulated.
NOT_MODELLED = (
    (r"speculat|spec[-_]|eagle|mtp|n-?gram|draft|medusa", "speculative decoding"),
    (r"sglang|launch_server|--tp-size|--mem-fraction", "SGLang, whose flags are others"),
    (r"trt-?llm|tensorrt|trtllm", "TensorRT-LLM"),
    (r"llama\.cpp|lmdeploy|\btgi\b|mindie", "an engine that is not vLLM"),
    (r"VLLM_USE_V1=0", "vLLM V0, whose scheduler is another"),
    (r"offload|lmcache|kv[-_]transfer", "KV or weights outside the device"),
    (r"disagg|\bpd\b|multi-?node", "several pools or nodes"),
    (r"data-parallel|\b-?dp[ =-]|expert-parallel|\bTEP", "data or expert parallelism"),
)

#: vLLM's short flags.
SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}

SWITCHES = {key for key, f in Engine.model_fields.items() if "bool" in str(f.annotation)}

#: Flags whose values are words, though some of them may look like numbers.
WORDS = {"quantization", "kv_cache_dtype", "dtype", "scheduling_policy"}

#: Word of a column: statistic of a latency, or None for its mean.
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2e", "e2el": "e2e"}
RATES = {
    "tot_tok_s": "total_tokens_per_s",
    "total_tok_s": "total_tokens_per_s",
    "out_tok_s": "output_tokens_per_s",
    "completed_rps": "requests_per_s",
    "req_s": "requests_per_s",
    "decode_tok_s": "decode_tokens_per_s",
    "kv_cache_tokens": "kv_tokens",
    "kv_tokens": "kv_tokens",
    "preemptions": "preemptions",
    "running": "running",
    "tok_s": "output_tokens_per_s",
}

#: Nothing else in the catalogue is near enough in size.
SIZE_TOLERANCE = 1.35


@dataclass(frozen=True)
class Flags:
    """Flags that were found in a text.

    Attributes
    ----------
    engine : keys of the scenario's `engine:` with their values
    choices : keys that a text gives several values, such as `--kv-cache-dtype auto vs fp8`
    others : flags that the schema does not have
    """

    engine: dict[str, Any]
    choices: dict[str, tuple[Any, ...]]
    others: tuple[str, ...]


def device_of(text: str) -> str | None:
    """Catalogue name of the device in `8x H200 (HGX)`."""
    lower = text.lower()
    return next((name for pattern, name in DEVICES if re.search(pattern, lower)), None)


def quantization_of(text: str) -> str | None:
    """Value for `quantization`, or a reason with a blank in it; None for 16-bit weights."""
    weights = re.sub(r"kv[ -_]?(cache)?[ -_]*fp8", "", text.lower())
    return next((name for pattern, name in QUANTIZATIONS if re.search(pattern, weights)), None)


def not_modelled(text: str) -> str | None:
    """Why a text cannot be simulated, or None."""
    found = (why for pattern, why in NOT_MODELLED if re.search(pattern, text, re.IGNORECASE))
    return next(found, None)


def squeezed(text: str) -> str:
    """Letters and digits alone, lower case: `Llama-3.1-8B` is `llama318b`."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def model_of(text: str) -> tuple[str, bool] | None:
    """(catalogue name, whether it is a stand-in) of the model a text names.

    A stand-in is the catalogue's nearest in size, a mixture of experts for one with `3B active`,
    of the same family where there is one. None for a text without a known name and a size.
    """
    words = squeezed(text)
    inside = [name for name in model_names() if squeezed(name.rpartition("/")[2]) in words]
    if inside:
        return max(inside, key=lambda name: len(name.rpartition("/")[2])), False
    size = re.search(r"(\d+(?:\.\d+)?)B\b", text)
    if size is None:
        return None
    billions = float(size.group(1))
    mixture = bool(re.search(r"A\d+B|active|moe", text, re.IGNORECASE))
    near = {
        name: abs(parameters / 1e9 / billions - 1)
        for name, parameters in published_parameters().items()
        if 1 / SIZE_TOLERANCE < parameters / 1e9 / billions < SIZE_TOLERANCE
        and bool(re.search(r"A\d+B|Mixtral|oss|DeepSeek|Scout", name)) >= mixture
    }
    if not near:
        return None

    def distance(name: str) -> tuple[int, float]:
        return -len(_common_start(squeezed(name.rpartition("/")[2]), words)), near[name]

    return min(near, key=distance), True


def _common_start(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return one[:length]


def flags_of(text: str) -> Flags:
    """Flags in a command line or in prose such as `--max-num-seqs 16|32, prefix caching off`."""
    engine: dict[str, Any] = {}
    choices: dict[str, tuple[Any, ...]] = {}
    others = []
    for name, values in _flag_words(text):
        key = SHORT.get(name, name.replace("-", "_"))
        off = key.startswith("no_") and key[3:] in Engine.model_fields
        key = key[3:] if off else key
        if key not in Engine.model_fields:
            others.append(key)
        elif not values and key not in SWITCHES:
            continue
        elif len(values) > 1:
            choices[key] = tuple(_value(key, value) for value in values)
        else:
            engine[key] = False if off else _value(key, values[0] if values else "true")
    engine |= _prose_flags(text)
    return Flags(engine, choices, tuple(others))


def _flag_words(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, values) of `--name=value`, `-tp 2`, `--no-name`, `--name a vs b`, `name: a -> b`."""
    value = r"(?!(?:vs|and|on|off|at|with|in|to)\b)[\w.]+"
    several = rf"(?P<values>{value}(?:\s*(?:\||/|->|\bvs\.?)\s*{value})*)"
    pattern = rf"(?<![\w-])--?(?P<name>[a-z][\w-]*)(?:[= ]{several})?"
    yield from _found(pattern, text)
    known = "|".join(Engine.model_fields)
    yield from _found(rf"(?<![\w-])(?P<name>{known})(?:[=: ]+{several})?", text)


def _found(pattern: str, text: str) -> Iterator[tuple[str, list[str]]]:
    for match in re.finditer(pattern, text):
        values = re.split(r"\s*(?:\||/|->|\bvs\.?)\s*", match["values"]) if match["values"] else []
        yield match["name"], values


def _prose_flags(text: str) -> dict[str, Any]:
    engine: dict[str, Any] = {}
    for word, key in (
        ("prefix caching", "enable_prefix_caching"),
        ("chunked prefill", "enable_chunked_prefill"),
    ):
        if (found := re.search(rf"{word} (on|off)\b", text)) is not None:
            engine[key] = found[1] == "on"
    if (found := re.search(r"\bTP(\d)\b", text)) is not None:
        engine["tensor_parallel_size"] = int(found[1])
    if (found := re.search(r"KV .*?= ([\d,]+) tokens", text)) is not None:
        engine["num_gpu_blocks_override"] = int(found[1].replace(",", "")) // 16
    return engine


def _value(key: str, text: str) -> Any:
    """The text as the schema's field has it."""
    if key in SWITCHES:
        return text.lower() not in ("false", "off", "0")
    number_ = re.fullmatch(r"\d+(\.\d+)?", text)
    if number_ is None or key in WORDS:
        return text
    return float(text) if number_[1] else int(text)


def metric_of(column: str) -> tuple[str, float, str] | None:
    """(metric, factor to its unit, variant) of a column; None if it is not a metric.

    The variant is what is left of the name: `ttft_p50_off_ms` is (ttft_p50_s, 0.001, off).
    """
    words = column.split("_")
    latency = next((word for word in words if word in LATENCIES), None)
    unit = words[-1]
    if latency is not None and unit in ("ms", "s"):
        statistic = next((word for word in words if word in STATISTICS), "mean")
        left = [w for w in words[:-1] if w not in (latency, statistic)]
        factor = 1e-3 if unit == "ms" else 1.0
        return f"{LATENCIES[latency]}_{statistic}_s", factor, "_".join(left)
    for ending, metric in RATES.items():
        wanted = ending.split("_")
        inner = [w for w in words if w not in wanted]
        if [w for w in words if w in wanted] == wanted:
            return metric, 1.0, "_".join(inner)
    if len(words) > 2 and words[-2:] == ["p99", "s"]:
        return "e2e_p99_s", 1.0, "_".join(words[:-2])
    return None


def number(text: str) -> int:
    """`8K`, `1,000` and `1000` as tokens."""
    plain = text.replace(",", "")
    return round(float(plain[:-1]) * 1024) if plain[-1] in "Kk" else int(float(plain))
