"""The operators of a step, as coefficients: seconds for each FLOP and byte, ready to multiply.

Everything that depends on model, device and split alone is folded into floats here, once;
`roofline.py` then prices a shape with a few multiplications.
"""

from dataclasses import dataclass
from typing import NamedTuple

from servecast.costmodels.collectives import all_reduce_s, send_s
from servecast.costmodels.efficiency import Efficiency
from servecast.costmodels.kv_format import FP32_BITS, KvFormat
from servecast.costmodels.kv_layout import (
    full_layer_kv_bytes_per_token,
    layer_kv_bytes_per_token,
)
from servecast.costmodels.specs import HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.weights import (
    UNQUANTISED,
    Matrix,
    kv_heads,
    layer_matrices,
    weight_bits,
)

#: Stored bits of a 4-bit weight with its scales, at most.
INT4_BITS = 5.0

#: Norms, rotary embedding and activation: small kernels of a layer beside GEMMs and attention.
SMALL_KERNELS_PER_LAYER = 4

#: Rate of the vector units as a part of the matrix peak: 19.5 of 312 Tflop/s on an A100, 67 of
#: 989 on an H100 (datasheets). An assumption for other devices.
VECTOR_SHARE = 1 / 16

#: Bytes of a number of recurrent state (fp32 by default, `mamba_ssm_cache_dtype`).
STATE_BYTES = 4


class Gemm(NamedTuple):
    """One weight matrix: y (m, n) = x (m, k) @ W.T, in all its layers.

    Attributes
    ----------
    layers : times it runs in a step
    flop_s : for one row at the efficiency-scaled peak
    weight_s : to read one copy of the weights
    row_s : to read a row of x and write a row of y
    flops, weight_bytes : the work behind `flop_s` and `weight_s`
    experts, chosen : copies, and how many of them each token runs through; 1 and 1 if dense
    """

    layers: int
    flop_s: float
    weight_s: float
    row_s: float
    flops: float
    weight_bytes: float
    experts: int
    chosen: int

    def rows_and_copies(self, tokens: int) -> tuple[int, float]:
        """Rows of x, and copies of the weights that at least one of them meets.

        Under uniform routing an expert is missed by a token with probability 1 - k / E, so
        E (1 - (1 - k / E)^tokens) are met.
        """
        if self.experts == 1:
            return tokens, 1.0
        missed = (1 - self.chosen / self.experts) ** tokens
        return tokens * self.chosen, self.experts * (1 - missed)

    def seconds(self, tokens: int) -> float:
        """The longer of computing and moving, in every layer."""
        rows, copies = self.rows_and_copies(tokens)
        return self.layers * max(rows * self.flop_s, copies * self.weight_s + rows * self.row_s)

    def work(self, tokens: int) -> tuple[float, float]:
        """FLOPs and bytes of weights."""
        rows, copies = self.rows_and_copies(tokens)
        return self.layers * rows * self.flops, self.layers * copies * self.weight_bytes


def gemm(model: ModelSpec, matrix: Matrix, hardware: HardwareSpec, efficiency: Efficiency) -> Gemm:
    """A matrix priced on a device; experts have efficiencies of their own."""
    expert = matrix.group == "experts"
    flops_share = efficiency.moe_flops if expert else efficiency.gemm_flops
    bytes_share = efficiency.moe_bandwidth if expert else efficiency.gemm_bandwidth
    peak = hardware.peak_flops_per_s(compute_type(model, matrix.group)) * flops_share
    bandwidth = hardware.memory_bandwidth_bytes_per_s * bytes_share
    flops = 2.0 * matrix.n * matrix.k
    weight_bytes = matrix.n * matrix.k * weight_bits(model, matrix.group) / 8
    return Gemm(
        layers=matrix.layers,
        flop_s=flops / peak,
        weight_s=weight_bytes / bandwidth,
        row_s=(matrix.n + matrix.k) * model.dtype_bytes / bandwidth,
        flops=flops,
        weight_bytes=weight_bytes,
        experts=matrix.copies,
        chosen=model.moe.experts_per_token if expert and model.moe else 1,
    )


def compute_type(model: ModelSpec, group: str) -> str:
    """The units a matrix of this group runs on."""
    quantization = model.quantization
    if quantization is None or group in UNQUANTISED or group in quantization.keeps:
        return "16bit"
    return quantization.compute


def kernel_type(model: ModelSpec, group: str) -> str:
    """The family of measured matrices that one of this group belongs to."""
    compute, bits = compute_type(model, group), weight_bits(model, group)
    if compute == "16bit" and bits == FP32_BITS:
        return "32bit"
    return "int4" if compute == "16bit" and bits <= INT4_BITS else compute


def small_bytes(model: ModelSpec, tensor: int) -> float:
    """A token's traffic in the small kernels of one layer: two norms with residual, activation."""
    return model.dtype_bytes * (8.0 * model.hidden_size + 3.0 * model.intermediate_size / tensor)


@dataclass(frozen=True)
class Attention:
    """Attention over KV, per layer kind; seconds are for all layers of the kind together.

    A pair is one query token against one KV token.

    Attributes
    ----------
    full_layers, sliding_layers, window : how many of each, and the tokens the latter see. Where
        full layers have wider heads than sliding ones, they count for more
    pair_s, read_s : prefill: one pair computed, one KV token read, in one layer
    decode_pair_s, decode_read_s : decode: the same
    pair_flops, decode_pair_flops, token_bytes : the work behind them
    sequence_s, sequence_bytes : recurrent state read and written once a sequence and step
    token_flops, token_s : recurrent state updated, once a token
    """

    full_layers: float
    sliding_layers: int
    window: int
    pair_s: float
    read_s: float
    decode_pair_s: float
    decode_read_s: float
    pair_flops: float
    decode_pair_flops: float
    token_bytes: float
    sequence_s: float
    sequence_bytes: float
    token_flops: float
    token_s: float


def attention(
    model: ModelSpec,
    hardware: HardwareSpec,
    parallel: Parallelism,
    kv: KvFormat,
    efficiency: Efficiency,
) -> Attention:
    """Attention priced on one of the ranks. Scores and values are computed in 16 bit.

    A quantised cache is read in its own bytes, and every number is turned into 16 bits by the
    vector units while the next are read: the longer of the two counts.
    """
    peak, bandwidth = hardware.peak_flops_per_s(), hardware.memory_bandwidth_bytes_per_s
    pair_flops, decode_pair_flops = pair_flops_of(model, parallel.tensor)
    token_bytes = layer_kv_bytes_per_token(model, kv, parallel.tensor)
    decode_bandwidth = bandwidth * efficiency.attention_decode_bandwidth
    unpack_s = kv_numbers(model, parallel.tensor) * kv.unpack / (peak * VECTOR_SHARE)
    full = model.attention_layers - model.sliding_layers
    wider = full_layer_kv_bytes_per_token(model, kv, parallel.tensor) / token_bytes
    linear = model.linear
    state = linear.layers * linear.state_elements / parallel.tensor if linear else 0.0
    # A read and a write of the state a sequence; a multiply-add to update and one to query it.
    sequence_bytes, token_flops = 2 * STATE_BYTES * state, 4 * state
    return Attention(
        full_layers=full * wider,
        sliding_layers=model.sliding_layers,
        window=model.sliding_window,
        pair_s=pair_flops / (peak * efficiency.attention_prefill_flops),
        read_s=max(token_bytes / (bandwidth * efficiency.attention_prefill_bandwidth), unpack_s),
        decode_pair_s=decode_pair_flops / (peak * efficiency.attention_decode_flops),
        decode_read_s=max(token_bytes / decode_bandwidth, unpack_s),
        pair_flops=pair_flops,
        decode_pair_flops=decode_pair_flops,
        token_bytes=token_bytes,
        sequence_s=sequence_bytes / decode_bandwidth,
        sequence_bytes=sequence_bytes,
        token_flops=token_flops,
        token_s=token_flops / (peak * efficiency.attention_prefill_flops),
    )


def kv_numbers(model: ModelSpec, tensor: int) -> int:
    """Numbers of KV that a token has in one layer on one rank."""
    if model.mla is not None:
        return model.mla.latent_dim
    return 2 * kv_heads(model, tensor) * model.head_dim


def pair_flops_of(model: ModelSpec, tensor: int) -> tuple[float, float]:
    """FLOPs of one pair in one layer, in prefill and in decode.

    2 x heads x (query-key + value width). MLA decodes in the latent space, where both are wider
    (DeepSeek-V2, arXiv 2405.04434, appendix C).
    """
    heads = model.num_attention_heads // tensor
    if model.mla is None:
        flops = 4.0 * heads * model.head_dim
        return flops, flops
    mla = model.mla
    prefill = 2.0 * heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    return prefill, 2.0 * heads * (mla.latent_dim + mla.kv_lora_rank)


def window_pairs(new: int, context: int, window: int) -> int:
    """Pairs of a chunk whose token i sees min(context + i, window) KV tokens, i from 1.

    >>> window_pairs(4, 2, 4)  # 3 + 4 + 4 + 4
    15
    """
    growing = min(max(window - context, 0), new)
    return growing * context + growing * (growing + 1) // 2 + (new - growing) * window


def elementwise_s(
    model: ModelSpec, hardware: HardwareSpec, tensor: int, efficiency: Efficiency
) -> float:
    """Seconds a token for norms with residuals (read and write two vectors) and activations."""
    chosen = model.moe.experts_per_token if model.moe else 1
    moved = 4.0 * model.hidden_size * sublayers(model)
    for matrix in layer_matrices(model, tensor):
        if matrix.name.endswith("_up"):
            rows = chosen if matrix.group == "experts" else 1
            moved += 1.5 * matrix.n * matrix.layers * rows
    bandwidth = hardware.memory_bandwidth_bytes_per_s * efficiency.gemm_bandwidth
    return moved * model.dtype_bytes / bandwidth


def sublayers(model: ModelSpec) -> int:
    """Mixers and MLPs: each ends in an all-reduce under tensor parallelism."""
    mixers = model.attention_layers + (model.linear.layers if model.linear else 0)
    return mixers + model.dense_layers + (model.moe.layers if model.moe else 0)


def kernels(model: ModelSpec) -> int:
    """Kernels that one step launches."""
    matrices = sum(matrix.layers for matrix in layer_matrices(model))
    return matrices + model.num_layers * (1 + SMALL_KERNELS_PER_LAYER)


def communication_s(
    model: ModelSpec,
    hardware: HardwareSpec,
    parallel: Parallelism,
    efficiency: Efficiency,
    tokens: int,
) -> float:
    """All-reduces of the hidden states, and hand-overs between pipeline stages."""
    message = tokens * model.hidden_size * model.dtype_bytes
    link = hardware.link_bytes_per_s * efficiency.collective_bandwidth
    latency = efficiency.collective_latency_s
    reduce_s = all_reduce_s(message, parallel.tensor, link, latency)
    hops = parallel.pipeline - 1
    return sublayers(model) * reduce_s + hops * (send_s(message, link, latency) if hops else 0.0)
