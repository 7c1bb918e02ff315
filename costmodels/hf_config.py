"""A `ModelSpec` from a Hugging Face config.json.

Configs leave out what their class has as a default, name one thing in several ways and nest
the text model in multimodal ones; the tables and small readers here undo that. Class defaults
are those of transformers 4.57 (`configuration_<model_type>.py`).
"""

from collections.abc import Mapping
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.quantization import parse_quantization
from servecast.costmodels.reading import Config, block, items, real, shown, whole, word
from servecast.costmodels.specs import BYTES_OF_DTYPE, LinearMixer, Mla, ModelSpec, Moe
from servecast.costmodels.vision import vision_tower

#: Classes that tie embeddings unless the config says otherwise: those that leave
#: PretrainedConfig's True alone or set it themselves. Most decoders since Llama set False.
TIED_BY_DEFAULT = frozenset(
    {"opt", "gpt2", "gpt_bigcode", "bloom", "falcon", "mpt", "starcoder2", "cohere", "cohere2"}
    | {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text"}
)

#: Two matrices in the MLP, no gate.
UNGATED = frozenset(
    {"opt", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "bloom", "falcon", "mpt", "phi"}
    | {"RefinedWeb", "RefinedWebModel", "codegen"}
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
    # Published with one layer that predicts the token after the next.
    "qwen3_next": {"num_nextn_predict_layers": 1},
    "glm4_moe": {"num_nextn_predict_layers": 1},
    "glm4_moe_lite": {"num_nextn_predict_layers": 1},
    "opt": {"max_position_embeddings": 2048, "vocab_size": 50_272},
    # No positions of their own (rotary or ALiBi): vLLM takes these as it serves them.
    "falcon": {"max_position_embeddings": 2048},
    "bloom": {"max_position_embeddings": 2048},
}

#: Keys that some classes name otherwise, by what the rest call them.
OTHER_NAMES = {
    "num_key_value_heads": ("kv_n_heads", "multi_query_group_num", "num_kv_heads"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "head_dim": ("kv_channels",),
    "intermediate_size": ("ffn_hidden_size", "ffn_dim", "n_inner"),
    "num_experts_per_tok": (
        "experts_per_token",
        "num_experts_per_token",
        "top_k_experts",
        "moe_top_k",
    ),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "n_shared_experts": ("num_shared_experts",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "model_max_length"),
}

#: Blocks of keys that some classes nest in the text model.
NESTED_BLOCKS = ("attn_config", "ffn_config")

#: Learned positions, or ALiBi.
NO_ROPE = frozenset({"opt", "gpt2", "gpt_bigcode", "bloom", "mpt"})

#: What a key means that we do not count, and so refuse rather than count wrong.
NOT_COUNTED = {
    "compress_ratios": "KV compressed by layer (DeepSeek V4)",
    "hidden_size_per_layer_input": "embeddings by layer (Gemma 3n, Gemma 4 E)",
    "cross_attention_layers": "cross-attention to images (Llama 3.2 Vision)",
}

#: One full-attention layer in so many, where the config has no `layer_types`.
FULL_ATTENTION_EVERY = {
    **{"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4},
    **{"gemma4_text": 6, "gemma4_unified_text": 6},
}

#: Sliding windows that hold in every layer.
ALL_LAYERS_SLIDE = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})

#: How configs call the layers that predict further tokens.
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")

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
    kind = word(text, "model_type")
    layers = whole(text, "num_hidden_layers")
    hidden = whole(text, "hidden_size")
    heads = whole(text, "num_attention_heads")
    attention, linear = _mixer_layers(text, layers)
    moe, dense = _moe(text, kind, layers)
    window, sliding = _sliding(text, kind, attention)
    quant, kv_dtype = _quantization(outer, text, hf_quant_config)
    max_positions = _max_positions(text)
    tower = vision_tower(outer, hidden)
    mla, head_dim = _mla(text), whole(text, "head_dim", default=hidden // heads)
    return ModelSpec(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(text, heads),
        head_dim=head_dim,
        intermediate_size=_dense_width(text, hidden, moe),
        vocab_size=whole(text, "vocab_size"),
        max_position_embeddings=max_positions,
        attention_layers=attention,
        dense_layers=dense,
        tie_word_embeddings=_tied(outer, text, kind),
        dtype=_dtype(outer, text),
        gated_mlp=kind not in UNGATED,
        gated_attention=bool(text.get("attn_output_gate", kind == "qwen3_next")),
        sliding_window=window if window < max_positions else 0,
        sliding_layers=sliding if window < max_positions else 0,
        chunked_attention=kind == "llama4_text",
        full_head_dim=whole(text, "global_head_dim", default=0, low=0),
        full_key_value_heads=whole(text, "num_global_key_value_heads", default=0, low=0),
        values_are_keys=bool(text.get("attention_k_eq_v")),
        learned_positions=_learned_positions(kind, max_positions),
        vision_parameters=tower.parameters,
        vision_item_tokens=tower.item_tokens,
        vision_profile_numbers=tower.profile_numbers,
        rope_table_numbers=_rope_table(text, kind, mla, head_dim, max_positions),
        moe=moe,
        mla=mla,
        linear=_linear(text, linear),
        quantization=parse_quantization(quant, layers) if quant else None,
        kv_cache_dtype=kv_dtype,
        mtp_layers=whole(text, *MTP_LAYERS, default=0, low=0),
        draft_vocab_size=whole(text, "draft_vocab_size", default=0, low=0),
    )


def _text_config(config: Config) -> dict[str, Any]:
    """The language model's own keys, over its class defaults."""
    if not isinstance(config, Mapping):
        raise InputError(f"expected a mapping of keys, got {shown(config)}")
    text = next((config[key] for key in NESTED if isinstance(config.get(key), Mapping)), config)
    given = dict(text)
    for key in NESTED_BLOCKS:
        given = {**block(text, key), **given}
    for key, others in OTHER_NAMES.items():
        if given.get(key) is None:
            found = next((given[name] for name in others if given.get(name) is not None), None)
            if found is not None:
                given[key] = found
    for key, meaning in NOT_COUNTED.items():
        if given.get(key):
            raise InputError(f"{key}: {meaning} is not modelled")
    return {**CLASS_DEFAULTS.get(word(text, "model_type"), {}), **given}


def _max_positions(text: Config) -> int:
    """Longest context; yarn stretches the original one, as vLLM reads it."""
    given = whole(text, "max_position_embeddings")
    scaling = block(text, "rope_scaling", "rope_parameters")
    if "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return given
    original = whole(scaling, "original_max_position_embeddings", default=given)
    return round(original * _rope_factor(scaling))


def _rope_factor(scaling: Config) -> float:
    factor = scaling.get("factor", 1.0)
    usable = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not usable or not 1 <= factor <= 1e6:
        raise InputError(
            f"rope_scaling.factor: expected a number of at least 1, got {shown(factor)}"
        )
    return float(factor)


def _rope_table(text: Config, kind: str, mla: Mla | None, head_dim: int, positions: int) -> int:
    """Numbers of the cos and sin tables that vLLM makes beside the weights.

    Linear scaling lengthens the table by its factor; Gemma 3 has another for its sliding layers
    (vllm/model_executor/layers/rotary_embedding/linear_scaling_rope.py).
    """
    if kind in NO_ROPE or text.get("mla_use_nope"):
        return 0
    width = mla.qk_rope_head_dim if mla else head_dim
    scaling = block(text, "rope_scaling", "rope_parameters")
    share = real(text, "partial_rotary_factor", real(scaling, "partial_rotary_factor", 1.0))
    width = round(width * min(share, 1.0))
    linear = "linear" in (scaling.get("rope_type"), scaling.get("type"))
    tables = _rope_factor(scaling) if linear else 1.0
    if kind in ("gemma3_text", "gemma4_text", "gemma4_unified_text"):
        tables += 1
    return round(positions * tables) * width


def _learned_positions(kind: str, max_positions: int) -> int:
    """Rows of a table of positions, where the class has one; OPT's has two more."""
    if kind == "opt":
        return max_positions + 2
    return max_positions if kind in ("gpt2", "gpt_bigcode") else 0


def _kv_heads(text: Config, heads: int) -> int:
    """KV heads; Falcon's first decoder says `multi_query` beside a count that does not hold."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return whole(text, "num_key_value_heads", default=heads)


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
    pattern = word(text, "hybrid_override_pattern")
    if pattern:
        return pattern.count("*"), pattern.count("M")
    kda = len(items(block(text, "linear_attn_config"), "kda_layers"))
    if kda:
        if kda > layers:
            raise InputError(f"linear_attn_config.kda_layers: {kda} of {layers} layers")
        return layers - kda, kda
    types = items(text, "layer_types", "layers_block_type")
    if types:
        if len(types) != layers:
            raise InputError(f"layer_types: {len(types)} entries for {layers} layers")
        linear = sum(kind in ("linear_attention", "mamba", "mamba2") for kind in types)
        return layers - linear, linear
    if "linear_num_value_heads" in text:
        attention = layers // whole(text, "full_attention_interval", default=4)
        return attention, layers - attention
    return layers, 0


def _sliding(text: Config, kind: str, attention: int) -> tuple[int, int]:
    """(window, layers that have it); (0, 0) for full attention everywhere."""
    chunk = text.get("attention_chunk_size")
    if kind == "llama4_text" and chunk:
        local = items(text, "no_rope_layers") or [i % 4 != 3 for i in range(attention)]
        return whole(text, "attention_chunk_size"), min(attention, sum(map(bool, local)))
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return 0, 0
    window = whole(text, "sliding_window")
    types = items(text, "layer_types")
    if types:
        return window, sum(t == "sliding_attention" for t in types)
    if kind in FULL_ATTENTION_EVERY:
        every = whole(text, "sliding_window_pattern", default=FULL_ATTENTION_EVERY[kind])
        return window, attention - attention // every
    if kind in ALL_LAYERS_SLIDE:
        return window, attention
    if "use_sliding_window" in text:
        return window, max(0, attention - whole(text, "max_window_layers", default=0, low=0))
    return 0, 0


def _dense_width(text: Config, hidden: int, moe: Moe | None) -> int:
    """Width of the plain MLP; a pure mixture may have none."""
    default = moe.intermediate_size if moe else None
    if default is None and str(text.get("model_type")) in UNGATED:
        default = round(real(text, "expansion_ratio", 4.0) * hidden)
    return whole(text, "intermediate_size_mlp", "intermediate_size", default=default)


def _moe(text: Config, kind: str, layers: int) -> tuple[Moe | None, int]:
    """The mixture, and how many layers have a plain MLP."""
    pattern = word(text, "hybrid_override_pattern")
    experts = whole(text, "num_experts", default=0, low=0)
    if not experts or text.get("enable_moe_block") is False:
        return None, pattern.count("-") if pattern else layers
    width = whole(text, "moe_intermediate_size", "intermediate_size")
    moe_layers = pattern.count("E") if pattern else _moe_layers(text, layers)
    moe = Moe(
        num_experts=experts,
        experts_per_token=whole(text, "num_experts_per_tok"),
        intermediate_size=width,
        layers=moe_layers,
        shared_intermediate_size=_shared_width(text, kind, width),
    )
    if text.get("enable_moe_block"):
        # Gemma 4 has a plain MLP beside the mixture in every layer.
        return moe, layers
    return moe, pattern.count("-") if pattern else layers - moe_layers


def _moe_layers(text: Config, layers: int) -> int:
    """Layers left after the dense ones of the several ways to name them."""
    if isinstance(text.get("moe_layer_freq"), list):
        return min(layers, sum(map(bool, items(text, "moe_layer_freq"))))
    steps = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")
    step = max(whole(text, key, default=1) for key in steps)
    dense_first = whole(text, "first_k_dense_replace", default=0, low=0)
    dense_only = [i for i in items(text, "mlp_only_layers") if isinstance(i, int)]
    return sum(
        i >= dense_first and i not in dense_only and (i + 1) % step == 0 for i in range(layers)
    )


def _shared_width(text: Config, kind: str, width: int) -> int:
    """Width of a layer's shared experts together."""
    if kind == "llama4_text":
        return width
    one = ("moe_shared_expert_intermediate_size",)
    shared = whole(text, "n_shared_experts", default=0, low=0)
    if shared:
        return shared * whole(text, *one, default=width)
    keys = ("shared_expert_intermediate_size", "shared_intermediate_size")
    return whole(text, *keys, default=0, low=0)


def _mla(text: Config) -> Mla | None:
    if text.get("kv_lora_rank") is None:
        return None
    return Mla(
        kv_lora_rank=whole(text, "kv_lora_rank"),
        qk_rope_head_dim=whole(text, "qk_rope_head_dim"),
        qk_nope_head_dim=whole(text, "qk_nope_head_dim"),
        v_head_dim=whole(text, "v_head_dim"),
        q_lora_rank=whole(text, "q_lora_rank", default=0),
        index_heads=whole(text, "index_n_heads", default=0),
        index_head_dim=whole(text, "index_head_dim", default=0),
    )


def _linear(text: Config, layers: int) -> LinearMixer | None:
    """Gated delta net (Qwen3-Next, Qwen3.5) or Mamba-2 (Nemotron-H)."""
    if not layers:
        return None
    if block(text, "linear_attn_config"):
        return _kda(block(text, "linear_attn_config"), whole(text, "hidden_size"), layers)
    if "linear_num_value_heads" in text:
        key_dim = whole(text, "linear_key_head_dim")
        value_heads = whole(text, "linear_num_value_heads")
        values = value_heads * whole(text, "linear_value_head_dim")
        keys = key_dim * whole(text, "linear_num_key_heads")
        return LinearMixer(
            layers=layers,
            projection_dim=2 * keys + 2 * values + 2 * value_heads,
            value_dim=values,
            recurrent_elements=values * key_dim,
            conv_dim=2 * keys + values,
            conv_kernel=whole(text, "linear_conv_kernel_dim", default=4),
            state_dtype=word(text, "mamba_ssm_dtype") or "auto",
        )
    heads = whole(text, "mamba_num_heads", "mamba_n_heads")
    inner = heads * whole(text, "mamba_head_dim", "mamba_d_head")
    state = whole(text, "ssm_state_size", "mamba_d_state")
    groups = 2 * whole(text, "n_groups", "mamba_n_groups", default=1) * state
    return LinearMixer(
        layers=layers,
        projection_dim=2 * inner + groups + heads,
        value_dim=inner,
        recurrent_elements=inner * state,
        conv_dim=inner + groups,
        conv_kernel=whole(text, "conv_kernel", "mamba_d_conv", default=4),
        state_dtype=word(text, "mamba_ssm_cache_dtype") or "auto",
    )


def _kda(config: Config, hidden: int, layers: int) -> LinearMixer:
    """Kimi delta attention: queries, keys and values alike, two gates through a narrow middle."""
    heads, width = whole(config, "num_heads"), whole(config, "head_dim")
    inner = heads * width
    gates = 2 * width + round(2 * width * inner / hidden)
    return LinearMixer(
        layers=layers,
        projection_dim=3 * inner + heads + gates,
        value_dim=inner,
        recurrent_elements=inner * width,
        conv_dim=3 * inner,
        conv_kernel=whole(config, "short_conv_kernel_size", default=4),
        state_dtype="float32",
    )


def _quantization(
    outer: Config, text: Config, hf_quant_config: Config | None
) -> tuple[Config | None, str]:
    """The quantisation block, and the KV type it asks for ("auto" where it does not)."""
    quant = block(outer, "quantization_config") or block(text, "quantization_config")
    if hf_quant_config is not None:
        quant = block(hf_quant_config, "quantization") or hf_quant_config
    if not quant:
        return None, "auto"
    kv = quant.get("kv_cache_quant_algo") or quant.get("kv_cache_scheme")
    if isinstance(kv, Mapping):
        bits = kv.get("num_bits")
        kv = f"{'fp' if kv.get('type') == 'float' else 'int'}{bits}" if bits else None
    return quant, str(kv).lower() if kv else "auto"
