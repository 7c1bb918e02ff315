"""Quantised checkpoints: what a `quantization_config` says of bits, compute and exceptions."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.reading import block, items, whole, word
from servecast.costmodels.specs import ModelSpec, Quantization

#: What `quantization:` means for a model whose own config names none: the usual published
#: checkpoint of that kind (AutoAWQ and AutoGPTQ write 4 bits in groups of 128).
USUAL: dict[str, Quantization] = {
    "fp8": Quantization("fp8", 8.0, "fp8"),
    "awq": Quantization("awq", 4 + (16 + 4) / 128, "16bit"),
    "gptq": Quantization("gptq", 4 + (16 + 4) / 128, "16bit"),
    "gptq-int8": Quantization("gptq", 8 + 16 / 128, "16bit"),
    "bitsandbytes": Quantization("bitsandbytes", 4.127, "16bit"),
    "compressed-tensors": Quantization("compressed-tensors", 8.0, "int8"),
    "mxfp4": Quantization("mxfp4", 4 + 8 / 32, "16bit", frozenset({"attention"})),
    "nvfp4": Quantization("nvfp4", 4 + 8 / 16, "fp4"),
}

#: Names that vLLM takes for the same thing.
SAME = {"awq_marlin": "awq", "gptq_marlin": "gptq", "fbgemm_fp8": "fp8", "modelopt_fp4": "nvfp4"}

#: modelopt's quant_algo: stored bits (NVFP4 has an 8-bit scale for 16 weights), compute.
MODELOPT_ALGORITHMS = {
    "FP8": (8.0, "fp8"),
    "FP8_PB_WO": (8.0, "fp8"),
    "NVFP4": (4 + 8 / 16, "fp4"),
    "W4A16_AWQ": (4 + 16 / 128, "16bit"),
    "W4A8_AWQ": (4 + 16 / 128, "fp8"),
}


def is_known(method: str) -> bool:
    """A name that `quantization` takes."""
    return SAME.get(method, method) in USUAL


def with_quantization(model: ModelSpec, method: str) -> ModelSpec:
    """The model as `--quantization method` serves it; a checkpoint's own scheme is kept."""
    method = SAME.get(method, method)
    if model.quantization is not None:
        return model
    if method not in USUAL:
        raise InputError(f"quantization: {method!r} is not known; one of {', '.join(USUAL)}")
    return replace(model, quantization=USUAL[method])


def parse_quantization(config: Mapping[str, Any], layers: int) -> Quantization | None:
    """Read a `quantization_config`, or the `quantization` block of a hf_quant_config.json.

    Raises InputError for a method that is not known. `layers` tells a rule for the whole model
    from an exception for a few layers.
    """
    method = word(config, "quant_method") or ("modelopt" if "quant_algo" in config else "")
    method = SAME.get(method, method)
    keeps = kept_groups(ignored_modules(config), layers)
    if config.get("config_groups"):
        bits, compute = _config_groups(block(config, "config_groups"))
        return Quantization(method or "compressed-tensors", bits, compute, keeps)
    if method == "modelopt":
        algorithm = word(config, "quant_algo")
        if not algorithm:
            return None
        if algorithm not in MODELOPT_ALGORITHMS:
            raise InputError(f"quantization_config.quant_algo: {algorithm!r} is not known")
        return Quantization(method, *MODELOPT_ALGORITHMS[algorithm], keeps)
    if method in ("awq", "gptq", "auto-round"):
        return Quantization(method, _grouped_bits(config), "16bit", keeps)
    if method == "bitsandbytes":
        return _bitsandbytes(config, keeps)
    if method in ("fp8", "mxfp4"):
        return replace(USUAL[method], keeps=keeps)
    raise InputError(f"quantization_config.quant_method: {config.get('quant_method')!r} unknown")


def _grouped_bits(config: Mapping[str, Any]) -> float:
    """Weight bits, and a 16-bit scale and a zero point for each group; -1 is one a channel."""
    bits, group = config.get("bits"), whole(config, "group_size", default=-1, low=-1)
    if not isinstance(bits, int) or bits not in (2, 3, 4, 8):
        raise InputError(f"quantization_config.bits: expected 2, 3, 4 or 8, got {bits!r}")
    return bits + ((16 + bits) / group if group > 0 else 0.0)


def _bitsandbytes(config: Mapping[str, Any], keeps: frozenset[str]) -> Quantization:
    """nf4 has an absmax for 64 weights: 32 bits, or 8 and a share of 32 when quantised again."""
    if config.get("load_in_8bit"):
        return Quantization("bitsandbytes", 8.0, "int8", keeps)
    twice = config.get("bnb_4bit_use_double_quant")
    return Quantization("bitsandbytes", 4.127 if twice else 4.5, "16bit", keeps)


def _config_groups(groups: Mapping[str, Any]) -> tuple[float, str]:
    """compressed-tensors: the first group stands for the model."""
    first = str(next(iter(groups)))
    group = block({first: groups[next(iter(groups))]}, first)
    weights, inputs = block(group, "weights"), block(group, "input_activations")
    bits = weights.get("num_bits")
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 16:
        raise InputError(f"quantization_config.config_groups: weights.num_bits is {bits!r}")
    size = whole(weights, "group_size", default=0, low=-1)
    scale_bits = 8 if weights.get("type") == "float" and bits == 4 else 16
    stored = bits + (scale_bits / size if size > 0 else 0.0)
    input_bits = whole(inputs, "num_bits", default=16)
    if input_bits > 8:
        return stored, "16bit"
    if input_bits == 4:
        return stored, "fp4"
    return stored, "fp8" if inputs.get("type") == "float" else "int8"


def ignored_modules(config: Mapping[str, Any]) -> list[str]:
    """Module names or patterns that stay unquantised, whatever the key is called."""
    keys = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
    given = next((key for key in keys if config.get(key)), keys[0])
    return [str(name) for name in items(config, given)]


def kept_groups(modules: Iterable[str], layers: int) -> frozenset[str]:
    """Groups of `specs.LAYER_GROUPS` that the patterns keep unquantised.

    A pattern without a layer number holds for all layers; numbered ones must name more than
    half of the layers to count.
    """
    numbered: dict[str, set[int]] = {}
    kept: set[str] = set()
    for module in modules:
        group = _group_of(module)
        if group is None:
            continue
        number = re.search(r"layers\.(\d+)\.", module)
        if number is None:
            kept.add(group)
        else:
            numbered.setdefault(group, set()).add(int(number.group(1)))
    return frozenset(kept | {g for g, seen in numbered.items() if 2 * len(seen) > layers})


def _group_of(module: str) -> str | None:
    """The group a module name belongs to; None for heads, routers and vision towers."""
    if re.search(r"vision|visual|router|\bgate\$?$|lm_head|embed", module):
        return None
    for pattern, group in (
        (r"linear_attn|mamba|mixer", "linear_mixer"),
        (r"attn|attention", "attention"),
        (r"shared_expert", "shared_expert"),
        (r"experts", "experts"),
        (r"mlp|feed_forward", "mlp"),
    ):
        if re.search(pattern, module):
            return group
    return None
