"""Counting: the matrices of a model, its parameters, its weight bytes.

Norms, biases and other vectors are left out: less than 0.1 % of any model in the catalogue.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from servecast.costmodels.errors import InputError
from servecast.costmodels.specs import (
    ONE_DEVICE,
    LinearMixer,
    Mla,
    ModelSpec,
    Moe,
    Parallelism,
)

#: Bytes a token and layer of the DeepSeek-V3.2 indexer cache: fp8 keys and one fp32 scale.
INDEX_SCALE_BYTES = 4

#: vLLM pads the vocabulary to a multiple of this (DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64


#: Groups of matrices that stay in 16 bits whatever the rest is.
UNQUANTISED = ("router", "lm_head", "fusion")


class Matrix(NamedTuple):
    """A weight of shape (n, k) on one device: y (m, n) = x (m, k) @ W.T.

    Attributes
    ----------
    layers : layers that have it
    group : which of `specs.LAYER_GROUPS` it belongs to, "router", "fusion" or "lm_head"
    copies : of the same shape in a layer; the number of experts, else 1
    """

    name: str
    n: int
    k: int
    layers: int
    group: str
    copies: int = 1

    @property
    def parameters(self) -> int:
        """In the whole model, on one tensor-parallel rank."""
        return self.n * self.k * self.layers * self.copies


def check_parallel(model: ModelSpec, parallel: Parallelism) -> None:
    """Raise InputError for a split that vLLM refuses."""
    if model.num_attention_heads % parallel.tensor:
        raise InputError(
            f"tensor_parallel_size: {parallel.tensor} does not divide the "
            f"{model.num_attention_heads} attention heads of {model.name}"
        )
    heads, ranks = model.num_key_value_heads, parallel.tensor
    if model.mla is None and heads % ranks and ranks % heads:
        raise InputError(
            f"tensor_parallel_size: {ranks} neither divides nor is a multiple of the "
            f"{heads} KV heads of {model.name}"
        )
    if parallel.pipeline > model.num_layers:
        raise InputError(
            f"pipeline_parallel_size: {parallel.pipeline} is more than the "
            f"{model.num_layers} layers of {model.name}"
        )


@lru_cache(maxsize=256)
def layer_matrices(model: ModelSpec, tensor: int = 1) -> tuple[Matrix, ...]:
    """Every weight matrix of the layers on one of `tensor` ranks, embeddings and head aside."""
    matrices = [
        *(_mla(model, model.mla, tensor) if model.mla else _attention(model, tensor)),
        *_linear(model, model.linear, tensor),
        *_mlp("mlp", model, model.intermediate_size, model.dense_layers, tensor),
        *_moe(model, model.moe, tensor),
        *_fusion(model),
    ]
    return tuple(matrix for matrix in matrices if matrix.layers)


def lm_head(model: ModelSpec, tensor: int = 1) -> Matrix:
    """The output projection, sharded over the vocabulary as vLLM pads it."""
    return Matrix("lm_head", padded_vocab(model, tensor), model.hidden_size, 1, "lm_head")


def padded_vocab(model: ModelSpec, tensor: int = 1) -> int:
    """Rows of the embedding on one rank."""
    padded = ceil(model.vocab_size / VOCAB_PADDING) * VOCAB_PADDING
    return ceil(padded / tensor)


def kv_heads(model: ModelSpec, tensor: int = 1) -> int:
    """KV heads on one rank: split as far as they go, then replicated."""
    return max(1, model.num_key_value_heads // tensor)


def _attention(model: ModelSpec, tensor: int) -> list[Matrix]:
    """Query, key and value in one matrix, and output, for layers of each geometry."""
    heads = model.num_attention_heads // tensor
    queries = heads * (2 if model.gated_attention else 1)
    inputs = model.attention_inputs * model.hidden_size

    def matrices(layers: int, head_dim: int, projected: int) -> list[Matrix]:
        outputs = (queries + projected) * head_dim
        return [
            Matrix("qkv_proj", outputs, inputs, layers, "attention"),
            Matrix("o_proj", model.hidden_size, heads * head_dim, layers, "attention"),
        ]

    alike = 2 * kv_heads(model, tensor)
    if not model.full_head_dim:
        return matrices(model.attention_layers, model.head_dim, alike)
    full = max(1, (model.full_key_value_heads or model.num_key_value_heads) // tensor)
    full_layers = model.attention_layers - model.sliding_layers
    projected = full * (1 if model.values_are_keys else 2)
    return [
        *matrices(model.sliding_layers, model.head_dim, alike),
        *matrices(full_layers, model.full_head_dim, projected),
    ]


def _mla(model: ModelSpec, mla: Mla, tensor: int) -> list[Matrix]:
    """Down-projections are replicated, up-projections are split by head."""
    layers, hidden = model.attention_layers, model.hidden_size
    heads = model.num_attention_heads // tensor
    q_dim = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    shapes = [
        ("kv_a_proj", mla.latent_dim, hidden),
        ("kv_b_proj", heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        ("o_proj", hidden, heads * mla.v_head_dim),
    ]
    if mla.q_lora_rank:
        shapes += [("q_a_proj", mla.q_lora_rank, hidden), ("q_b_proj", q_dim, mla.q_lora_rank)]
    else:
        shapes += [("q_proj", q_dim, hidden)]
    if mla.index_heads:
        index_dim = mla.index_heads * mla.index_head_dim
        shapes += [
            ("index_q_proj", index_dim, mla.q_lora_rank),
            ("index_k_proj", mla.index_head_dim + mla.index_heads, hidden),
        ]
    return [Matrix(name, n, k, layers, "attention") for name, n, k in shapes]


def _linear(model: ModelSpec, linear: LinearMixer | None, tensor: int) -> list[Matrix]:
    if linear is None:
        return []
    hidden, layers = model.hidden_size, linear.layers
    return [
        Matrix("mixer_in", linear.projection_dim // tensor, hidden, layers, "linear_mixer"),
        Matrix("mixer_out", hidden, linear.value_dim // tensor, layers, "linear_mixer"),
    ]


def _mlp(
    group: str, model: ModelSpec, width: int, layers: int, tensor: int, copies: int = 1
) -> list[Matrix]:
    """Gate and up in one matrix, and down; without a gate, up and down."""
    hidden, width = model.hidden_size, ceil(width / tensor)
    up = width * (2 if model.gated_mlp else 1)
    return [
        Matrix(f"{group}_up", up, hidden, layers, group, copies),
        Matrix(f"{group}_down", hidden, width, layers, group, copies),
    ]


def _moe(model: ModelSpec, moe: Moe | None, tensor: int) -> list[Matrix]:
    if moe is None:
        return []
    layers = moe.layers
    router = Matrix("router", moe.num_experts, model.hidden_size, layers, "router")
    experts = _mlp("experts", model, moe.intermediate_size, layers, tensor, moe.num_experts)
    if not moe.shared_intermediate_size:
        return [router, *experts]
    shared = _mlp("shared_expert", model, moe.shared_intermediate_size, layers, tensor)
    return [router, *experts, *shared]


def _fusion(model: ModelSpec) -> list[Matrix]:
    """Hidden states and embeddings to one input; not split over ranks."""
    hidden = model.hidden_size
    return [
        Matrix("fc", hidden, model.fusion_inputs * hidden, int(model.fusion_inputs > 0), "fusion")
    ]


def embedding_parameters(model: ModelSpec) -> int:
    """Token and position tables, and the head where it is not the token table itself."""
    tables = 1 if model.tie_word_embeddings else 2
    rows = model.vocab_size * tables + model.learned_positions
    return rows * model.hidden_size


def parameters(model: ModelSpec) -> int:
    """All weights, the vision tower's (an estimate) among them."""
    layers = sum(matrix.parameters for matrix in layer_matrices(model))
    return layers + embedding_parameters(model) + model.vision_parameters


def active_parameters(model: ModelSpec) -> int:
    """Weights that one text token meets: routed experts count `experts_per_token` times."""
    chosen = model.moe.experts_per_token if model.moe else 0
    layers = sum(
        matrix.parameters // matrix.copies * (chosen if matrix.group == "experts" else 1)
        for matrix in layer_matrices(model)
    )
    return layers + embedding_parameters(model)


def weight_bits(model: ModelSpec, group: str) -> float:
    """Stored bits a weight of a matrix of this group."""
    quantization = model.quantization
    if quantization is None or group in UNQUANTISED or group in quantization.keeps:
        return 8.0 * model.dtype_bytes
    return quantization.weight_bits


def weight_bytes(
    model: ModelSpec, parallel: Parallelism = ONE_DEVICE, *, vision: bool = True
) -> int:
    """Bytes of weights on the fullest device, the vision tower's among them if `vision`.

    Of a pipeline that is a stage with an embedding or a head, and one layer more than others
    where stages do not divide the layers.
    """
    check_parallel(model, parallel)
    stage = ceil(model.num_layers / parallel.pipeline) / model.num_layers
    layer_bits = sum(
        matrix.parameters * weight_bits(model, matrix.group)
        for matrix in layer_matrices(model, parallel.tensor)
    )
    tables = 1 if model.tie_word_embeddings or parallel.pipeline > 1 else 2
    rows = padded_vocab(model, parallel.tensor) * tables + model.learned_positions
    table_bytes = rows * model.hidden_size * model.dtype_bytes
    tower = model.vision_parameters * model.dtype_bytes / parallel.tensor if vision else 0.0
    return round(stage * layer_bits / 8 + table_bytes + tower)
