"""A `ModelSpec` from a Hugging Face config.json.

Configs leave out what their class has as a default, name one thing in several ways and nest
the text model in multimodal ones; the tables and small readers here undo that. Class defaults
are those of transformers 4.57 (`configuration_<model_type>.py`).
"""

from collections.abc import Mapping
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.quantization import parse_quantization
from servecast.costmodels.specs import BYTES_OF_DTYPE, LinearMixer, Mla, ModelSpec, Moe

Config = Mapping[str, Any]

#: Classes that tie embeddings unless the config says otherwise: those that leave
#: PretrainedConfig's True alone or set it themselves. Most decoders since Llama set False.
TIED_BY_DEFAULT = frozenset(
    {"opt", "gpt2", "gpt_bigcode", "bloom", "falcon", "mpt", "starcoder2", "cohere", "cohere2"}
    | {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text"}
)

#: Two matrices in the MLP, no gate.
UNGATED = frozenset(
    {"opt", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "bloom", "falcon", "mpt", "phi"}
    | {"starcoder2", "nemotron", "nemotron_h"}
)

CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 8192},
    "llama": {"max_position_embeddings": 2048},
    "llama4_text": {"attention_chunk_size": 8192},
    "opt": {"max_position_embeddings": 2048, "vocab_size": 50_272},
}

#: One full-attention layer in so many, where the config has no `layer_types`.
FULL_ATTENTION_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}

#: Sliding windows that hold in every layer.
ALL_LAYERS_SLIDE = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})

NESTED = ("text_config", "llm_config", "language_config")


def model_from_config(
    config: Config, name: str, hf_quant_config: Config | None = None
) -> ModelSpec:
    """Read a config.json (and the hf_quant_config.json that modelopt puts beside it).

    Raises InputError naming model, key and value for what is missing or cannot be.
    """
    try:
        return _model(config, _text_config(config), name, hf_quant_config)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _model(outer: Config, text: Config, name: str, hf_quant_config: Config | None) -> ModelSpec:
    kind = str(text.get("model_type", ""))
    layers = _int(text, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _int(text, "hidden_size", "n_embd", "d_model")
    heads = _int(text, "num_attention_heads", "n_head")
    attention, linear = _mixer_layers(text, layers)
    moe, dense = _moe(text, kind, layers)
    window, sliding = _sliding(text, kind, attention)
    quant, kv_dtype = _quantization(outer, text, hf_quant_config)
    max_positions = _max_positions(text)
    return ModelSpec(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_int(text, "num_key_value_heads", default=heads),
        head_dim=_int(text, "head_dim", default=hidden // heads),
        intermediate_size=_dense_width(text, hidden, moe),
        vocab_size=_int(text, "vocab_size"),
        max_position_embeddings=max_positions,
        attention_layers=attention,
        dense_layers=dense,
        tie_word_embeddings=_tied(outer, text, kind),
        dtype=_dtype(outer, text),
        gated_mlp=kind not in UNGATED,
        gated_attention=bool(text.get("attn_output_gate", kind == "qwen3_next")),
        sliding_window=window if window < max_positions else 0,
        sliding_layers=sliding if window < max_positions else 0,
        learned_positions=max_positions + 2 if kind == "opt" else 0,
        vision_parameters=_vision_parameters(outer.get("vision_config")),
        moe=moe,
        mla=_mla(text),
        linear=_linear(text, linear),
        quantization=parse_quantization(quant, layers) if quant else None,
        kv_cache_dtype=kv_dtype,
    )


def _text_config(config: Config) -> dict[str, Any]:
    """The language model's own keys, over its class defaults."""
    if not isinstance(config, Mapping):
        raise InputError(f"expected a mapping of keys, got {config!r}")
    text = next((config[key] for key in NESTED if isinstance(config.get(key), Mapping)), config)
    return {**CLASS_DEFAULTS.get(str(text.get("model_type", "")), {}), **text}


def _int(config: Config, *keys: str, default: int | None = None, low: int = 1) -> int:
    """The first of `keys` that is there and not null."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InputError(f"{key}: expected a whole number of at least {low}, got {value!r}")
        return value
    if default is None:
        raise InputError(f"{keys[0]}: missing")
    return default


def _max_positions(text: Config) -> int:
    """Longest context; yarn stretches the original one, as vLLM reads it."""
    given = _int(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    scaling = text.get("rope_scaling") or {}
    if "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return given
    original = _int(scaling, "original_max_position_embeddings", default=given)
    factor = scaling.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1:
        raise InputError(f"rope_scaling.factor: expected a number of at least 1, got {factor!r}")
    return round(original * factor)


def _dtype(outer: Config, text: Config) -> str:
    """The 16-bit type vLLM's `dtype: auto` picks; a float32 checkpoint is served in bfloat16."""
    for config in (text, outer):
        value = config.get("torch_dtype") or config.get("dtype")
        if value is not None:
            name = str(value).removeprefix("torch.")
            if name not in BYTES_OF_DTYPE:
                raise InputError(f"torch_dtype: expected {' or '.join(BYTES_OF_DTYPE)}: {value!r}")
            return "bfloat16" if name == "float32" else name
    return "bfloat16"


def _tied(outer: Config, text: Config, kind: str) -> bool:
    for config in (text, outer):
        if config.get("tie_word_embeddings") is not None:
            return bool(config["tie_word_embeddings"])
    return kind in TIED_BY_DEFAULT


def _mixer_layers(text: Config, layers: int) -> tuple[int, int]:
    """Layers with KV, and layers with a recurrent state."""
    pattern = text.get("hybrid_override_pattern")
    if pattern:
        return pattern.count("*"), pattern.count("M")
    types = text.get("layer_types") or text.get("layers_block_type")
    if types:
        if len(types) != layers:
            raise InputError(f"layer_types: {len(types)} entries for {layers} layers")
        linear = sum(kind in ("linear_attention", "mamba", "mamba2") for kind in types)
        return layers - linear, linear
    if "linear_num_value_heads" in text:
        attention = layers // _int(text, "full_attention_interval", default=4)
        return attention, layers - attention
    return layers, 0


def _sliding(text: Config, kind: str, attention: int) -> tuple[int, int]:
    """(window, layers that have it); (0, 0) for full attention everywhere."""
    chunk = text.get("attention_chunk_size")
    if kind == "llama4_text" and chunk:
        full = text.get("no_rope_layers") or [i % 4 != 3 for i in range(attention)]
        return _int(text, "attention_chunk_size"), sum(map(bool, full))
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return 0, 0
    window = _int(text, "sliding_window")
    types = text.get("layer_types")
    if types:
        return window, sum(t == "sliding_attention" for t in types)
    if kind in FULL_ATTENTION_EVERY:
        every = _int(text, "sliding_window_pattern", default=FULL_ATTENTION_EVERY[kind])
        return window, attention - attention // every
    if kind in ALL_LAYERS_SLIDE:
        return window, attention
    if "use_sliding_window" in text:
        return window, max(0, attention - _int(text, "max_window_layers", default=0, low=0))
    return 0, 0


def _dense_width(text: Config, hidden: int, moe: Moe | None) -> int:
    """Width of the plain MLP; a pure mixture may have none."""
    default = moe.intermediate_size if moe else None
    if "n_embd" in text and default is None:
        default = 4 * hidden
    keys = ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner")
    return _int(text, *keys, default=default)


def _moe(text: Config, kind: str, layers: int) -> tuple[Moe | None, int]:
    """The mixture, and how many layers have a plain MLP."""
    pattern = text.get("hybrid_override_pattern")
    keys = ("num_local_experts", "n_routed_experts", "num_experts")
    experts = _int(text, *keys, default=0, low=0)
    if not experts:
        return None, pattern.count("-") if pattern else layers
    width = _int(text, "moe_intermediate_size", "intermediate_size")
    moe_layers = pattern.count("E") if pattern else _moe_layers(text, layers)
    moe = Moe(
        num_experts=experts,
        experts_per_token=_int(text, "num_experts_per_tok", "experts_per_token"),
        intermediate_size=width,
        layers=moe_layers,
        shared_intermediate_size=_shared_width(text, kind, width),
    )
    return moe, pattern.count("-") if pattern else layers - moe_layers


def _moe_layers(text: Config, layers: int) -> int:
    """Layers left after the dense ones of the several ways to name them."""
    frequency = text.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        return sum(map(bool, frequency))
    step = max(
        _int(text, "decoder_sparse_step", default=1),
        _int(text, "interleave_moe_layer_step", default=1),
        frequency,
    )
    dense_first = _int(text, "first_k_dense_replace", default=0, low=0)
    dense_only = set(text.get("mlp_only_layers") or ())
    return sum(
        i >= dense_first and i not in dense_only and (i + 1) % step == 0 for i in range(layers)
    )


def _shared_width(text: Config, kind: str, width: int) -> int:
    """Width of a layer's shared experts together."""
    if kind == "llama4_text":
        return width
    one = ("moe_shared_expert_intermediate_size",)
    shared = _int(text, "n_shared_experts", default=0, low=0)
    if shared:
        return shared * _int(text, *one, default=width)
    keys = ("shared_expert_intermediate_size", "shared_intermediate_size")
    return _int(text, *keys, default=0, low=0)


def _mla(text: Config) -> Mla | None:
    if text.get("kv_lora_rank") is None:
        return None
    return Mla(
        kv_lora_rank=_int(text, "kv_lora_rank"),
        qk_rope_head_dim=_int(text, "qk_rope_head_dim"),
        qk_nope_head_dim=_int(text, "qk_nope_head_dim"),
        v_head_dim=_int(text, "v_head_dim"),
        q_lora_rank=_int(text, "q_lora_rank", default=0),
        index_heads=_int(text, "index_n_heads", default=0),
        index_head_dim=_int(text, "index_head_dim", default=0),
    )


def _linear(text: Config, layers: int) -> LinearMixer | None:
    """Gated delta net (Qwen3-Next, Qwen3.5) or Mamba-2 (Nemotron-H)."""
    if not layers:
        return None
    if "linear_num_value_heads" in text:
        key_dim = _int(text, "linear_key_head_dim")
        value_heads = _int(text, "linear_num_value_heads")
        values = value_heads * _int(text, "linear_value_head_dim")
        keys = key_dim * _int(text, "linear_num_key_heads")
        conv = (2 * keys + values) * (_int(text, "linear_conv_kernel_dim", default=4) - 1)
        projections = 2 * keys + 2 * values + 2 * value_heads
        return LinearMixer(layers, projections, values, values * key_dim + conv)
    heads = _int(text, "mamba_num_heads", "mamba_n_heads")
    inner = heads * _int(text, "mamba_head_dim", "mamba_d_head")
    state = _int(text, "ssm_state_size", "mamba_d_state")
    groups = 2 * _int(text, "n_groups", "mamba_n_groups", default=1) * state
    conv = (inner + groups) * (_int(text, "conv_kernel", "mamba_d_conv", default=4) - 1)
    return LinearMixer(layers, 2 * inner + groups + heads, inner, inner * state + conv)


def _vision_parameters(vision: Config | None) -> int:
    """A ViT's layers and its mergers into the text width; patch and position tables left out."""
    if not vision or not (vision.get("depth") or vision.get("num_hidden_layers")):
        return 0
    hidden = _int(vision, "hidden_size")
    layers = _int(vision, "depth", "num_hidden_layers")
    per_layer = 4 * hidden**2 + 2 * hidden * _int(vision, "intermediate_size", default=4 * hidden)
    merged = hidden * _int(vision, "spatial_merge_size", default=1) ** 2
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    out = _int(vision, "out_hidden_size", default=0)
    return layers * per_layer + (mergers * (merged**2 + merged * out) if out else 0)


def _quantization(
    outer: Config, text: Config, hf_quant_config: Config | None
) -> tuple[Config | None, str]:
    """The quantisation block, and the KV type it asks for ("auto" where it does not)."""
    quant = outer.get("quantization_config") or text.get("quantization_config")
    if hf_quant_config is not None:
        quant = hf_quant_config.get("quantization", hf_quant_config)
    if quant is None:
        return None, "auto"
    if not isinstance(quant, Mapping):
        raise InputError(f"quantization_config: expected a mapping, got {quant!r}")
    kv = quant.get("kv_cache_quant_algo") or quant.get("kv_cache_scheme")
    if isinstance(kv, Mapping):
        bits = kv.get("num_bits")
        kv = f"{'fp' if kv.get('type') == 'float' else 'int'}{bits}" if bits else None
    return quant, str(kv).lower() if kv else "auto"
