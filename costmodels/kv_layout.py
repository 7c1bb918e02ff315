"""How vLLM cuts KV memory into blocks: groups of alike layers that share one pool of block ids.

A model whose layers are all alike has one group, and a block holds `block_size` tokens of every
layer. Where kinds of layers differ (full and sliding attention, attention and recurrent state),
vLLM makes groups of equally many layers, pads the last of a kind, and lets every group of a
sequence take block ids of its own out of the one pool
(vllm/v1/core/kv_cache_utils.py, `get_kv_cache_groups`, 0.32).
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil

from servecast.costmodels.kv_format import SPARSE_MLA_BYTES, KvFormat
from servecast.costmodels.specs import BYTES_OF_DTYPE, HardwareSpec, LinearMixer, ModelSpec
from servecast.costmodels.versions import LATEST, Version
from servecast.costmodels.weights import INDEX_SCALE_BYTES, kv_heads

#: Groups of unlike layers came with V1's hybrid manager; before, a sliding layer held its whole
#: context like any other.
HYBRID_SINCE = Version(0, 9, 1)

#: Chunked layers (Llama 4) are grouped like that by default from this release.
CHUNKED_SINCE = Version(0, 14)

#: With prefix caching two states of a sequence live at once ("align") from this release.
ALIGN_SINCE = Version(0, 15)

#: Since then the line `GPU KV cache size` is concurrency x max_model_len; before, blocks divided
#: by groups (kv_cache_utils.py of 0.20.0 and 0.20.2).
CONCURRENCY_TOKENS_SINCE = Version(0, 20, 2)

#: Under asynchronous scheduling two steps hold their tokens at once, and a sliding layer frees
#: none of them before (`VllmConfig.max_in_flight_tokens`, first in 0.26).
TWO_STEPS_SINCE = Version(0, 26)

#: Kinds with fewer than this many times the layers of the rarest are one group each, by release.
ONE_GROUP_BELOW = ((Version(0, 18), 1.5), (Version(0, 12), 1.25), (Version(0, 0), 1.0))

#: MLA kernels that set a block size of their own, and when the backend began to choose it.
FLASH_MLA_SINCE = Version(0, 8, 5)
BLACKWELL_MLA_SINCE = Version(0, 10)
FLASHINFER_MLA_SINCE = Version(0, 11)
MLA_CHOOSES_SINCE = Version(0, 18)

#: Smallest step of the attention block size: what FlashAttention takes.
KERNEL_BLOCK = 16


@dataclass(frozen=True)
class KvGroup:
    """Layers that share a block table.

    Attributes
    ----------
    kind : "full", "sliding", "chunked" or "state"
    layers : on the fullest pipeline stage, padding left out
    block_size : tokens of one of its blocks; a state has as many whatever its length
    window : tokens that a sliding or chunked layer sees, else 0
    """

    kind: str
    layers: int
    block_size: int
    window: int = 0


@dataclass(frozen=True)
class KvLayout:
    """The groups of a model under some flags.

    Attributes
    ----------
    block_bytes : one block id of the pool on this device: every layer of the largest group
    block_size : tokens of a block of attention. vLLM raises it above the flag where a recurrent
        state is larger than a block
    state_blocks : that one sequence holds in each group of states
    in_flight_tokens : scheduled and not yet freed behind a window
    padding_layers : layers that hold nothing, there to make groups even
    """

    groups: tuple[KvGroup, ...]
    block_bytes: int
    block_size: int
    state_blocks: int
    in_flight_tokens: int
    padding_layers: int

    def request_blocks(self, tokens: int) -> int:
        """Block ids of one sequence of `tokens`, over all groups, as vLLM bounds it."""
        return sum(self._group_blocks(group, tokens) for group in self.groups)

    def _group_blocks(self, group: KvGroup, tokens: int) -> int:
        if group.kind == "state":
            return self.state_blocks
        if group.kind == "sliding":
            # One more: the window may begin inside a block.
            held = min(group.window - 1 + self.in_flight_tokens, tokens)
            return ceil(held / group.block_size) + 1
        if group.kind == "chunked":
            tokens = min(group.window + self.in_flight_tokens, tokens)
        return ceil(tokens / group.block_size)

    def concurrency(self, blocks: int, max_model_len: int) -> float:
        """vLLM's `Maximum concurrency`: sequences of `max_model_len` that the pool holds."""
        return blocks / self.request_blocks(max_model_len)

    def logged_tokens(self, blocks: int, max_model_len: int, version: Version = LATEST) -> int:
        """vLLM's `GPU KV cache size` in tokens, as the release counts it."""
        if version >= CONCURRENCY_TOKENS_SINCE:
            return int(self.concurrency(blocks, max_model_len) * max_model_len)
        return blocks // len(self.groups) * self.block_size

    def longest(self, blocks: int, at_most: int) -> int:
        """Tokens of the longest single sequence that the pool holds; 0 if not even one."""
        return bisect_right(range(1, at_most + 1), blocks, key=self.request_blocks)

    def schedulable_blocks(self, blocks: int, max_num_seqs: int) -> int:
        """Blocks of `block_size` tokens of every layer, as the scheduler here counts them.

        Every attention group takes a block for the same tokens, so a pool of several groups
        holds that many times fewer; what windows free again is not counted. The states of the
        sequences that run are set aside.
        """
        states = sum(group.kind == "state" for group in self.groups) * self.state_blocks
        attention = len(self.groups) - sum(group.kind == "state" for group in self.groups)
        if attention == 0:
            return blocks
        running = min(max_num_seqs, blocks // (states + attention)) if states else 0
        return (blocks - running * states) // attention


@dataclass(frozen=True)
class _Kind:
    """Layers of one kind before they are grouped."""

    name: str
    layers: int
    token_bytes: float
    window: int = 0


def kv_layout(
    model: ModelSpec,
    fmt: KvFormat,
    *,
    block_size: int = 16,
    tensor: int = 1,
    pipeline: int = 1,
    enable_prefix_caching: bool = True,
    max_num_batched_tokens: int = 2048,
    async_scheduling: bool = True,
    num_speculative_tokens: int = 0,
    version: Version = LATEST,
) -> KvLayout:
    """Group a model's layers and size the blocks of its pool on one tensor-parallel rank."""
    kinds = _kinds(model, fmt, tensor, version)
    state_bytes = 0
    if model.linear is not None:
        state_bytes = state_page_bytes(model, model.linear, tensor, num_speculative_tokens)
        widest = max((kind.token_bytes for kind in kinds), default=0.0)
        if widest:
            step = max(KERNEL_BLOCK, block_size, 128 if model.mla else 0)
            block_size = max(block_size, step * ceil(state_bytes / (step * widest)))
    page = max((kind.token_bytes * block_size for kind in kinds), default=float(state_bytes))
    buckets = [
        (kind.name, kind.layers, _block(kind, page, block_size), kind.window) for kind in kinds
    ]
    if model.linear is not None:
        buckets.append(("state", model.linear.layers, block_size, 0))
    groups, size, padding = _even_groups(buckets, pipeline, version)
    steps = 2 if async_scheduling and version >= TWO_STEPS_SINCE else 1
    return KvLayout(
        groups=groups,
        block_bytes=ceil(ceil(size / pipeline) * page),
        block_size=block_size,
        # With prefix caching a state before and one after the step live at once ("align").
        state_blocks=(2 if enable_prefix_caching and version >= ALIGN_SINCE else 1)
        + num_speculative_tokens,
        in_flight_tokens=steps * max_num_batched_tokens,
        padding_layers=padding,
    )


def mla_block_size(model: ModelSpec, hardware: HardwareSpec, version: Version = LATEST) -> int:
    """Block size that an MLA backend sets for itself; 1 where it takes any.

    64 for sparse MLA. On Hopper 64 for FlashMLA from 0.8.5 to 0.17, then any (FlashAttention). On
    Blackwell 128 for CUTLASS in 0.10, 64 for FlashInfer to 0.17, then the least that it takes, 32
    (platforms/cuda.py, `check_and_update_config`; from 0.18 v1/attention/backend.py,
    `get_preferred_block_size`).
    """
    if model.mla is None or hardware.kind != "gpu":
        return 1
    capability = hardware.compute_capability
    forced = version < MLA_CHOOSES_SINCE
    if model.mla.index_heads:
        return 64
    if capability == 9.0:
        return 64 if version >= FLASH_MLA_SINCE and forced else 1
    if capability == 10.0 and version >= BLACKWELL_MLA_SINCE:
        return (128 if version < FLASHINFER_MLA_SINCE else 64) if forced else 32
    return 1


def _kinds(model: ModelSpec, fmt: KvFormat, tensor: int, version: Version) -> list[_Kind]:
    full = model.attention_layers - model.sliding_layers
    token_bytes = layer_kv_bytes_per_token(model, fmt, tensor)
    since = CHUNKED_SINCE if model.chunked_attention else HYBRID_SINCE
    if not model.sliding_layers or version < since:
        kinds = [_Kind("full", model.attention_layers, token_bytes)]
    else:
        name = "chunked" if model.chunked_attention else "sliding"
        kinds = [
            _Kind("full", full, full_layer_kv_bytes_per_token(model, fmt, tensor)),
            _Kind(name, model.sliding_layers, token_bytes, model.sliding_window),
        ]
    return [kind for kind in kinds if kind.layers]


def _block(kind: _Kind, page: float, block_size: int) -> int:
    """Tokens that a page of the largest kind holds of this one, if they divide it evenly."""
    own = kind.token_bytes * block_size
    return int(block_size * (page // own)) if page % own == 0 else block_size


def _even_groups(
    buckets: list[tuple[str, int, int, int]], pipeline: int, version: Version
) -> tuple[tuple[KvGroup, ...], int, int]:
    """Groups of as many layers each: (groups, layers of a group, padding layers)."""
    counts = [layers for _, layers, _, _ in buckets]
    fewest, most = min(counts), max(counts)
    below = next(ratio for since, ratio in ONE_GROUP_BELOW if version >= since)
    size = most if most < below * fewest else fewest
    groups, padding = [], 0
    for name, layers, block_size, window in buckets:
        number = ceil(layers / size)
        padding += number * size - layers
        groups += [KvGroup(name, ceil(size / pipeline), block_size, window)] * number
    return tuple(groups), size, padding


def layer_kv_bytes_per_token(model: ModelSpec, fmt: KvFormat, tensor: int = 1) -> float:
    """KV bytes that a token takes in one attention layer on one rank.

    A key and a value for each KV head, or one MLA latent (DeepSeek-V2, arXiv 2405.04434,
    table 1), and the keys of a sparse indexer beside it.
    """
    if model.mla is None:
        return 2 * kv_heads(model, tensor) * fmt.vector_bytes(model.head_dim)
    mla = model.mla
    if not mla.index_heads:
        return fmt.vector_bytes(mla.latent_dim)
    latent = SPARSE_MLA_BYTES if fmt.name.startswith("fp8") else fmt.vector_bytes(mla.latent_dim)
    return latent + mla.index_head_dim + INDEX_SCALE_BYTES


def full_layer_kv_bytes_per_token(model: ModelSpec, fmt: KvFormat, tensor: int = 1) -> float:
    """The same for a layer of full attention, whose heads may be others (Gemma 4)."""
    if not model.full_head_dim:
        return layer_kv_bytes_per_token(model, fmt, tensor)
    heads = max(1, (model.full_key_value_heads or model.num_key_value_heads) // tensor)
    return 2 * heads * fmt.vector_bytes(model.full_head_dim)


def kv_bytes_per_token(
    model: ModelSpec, fmt: KvFormat, tensor: int = 1, pipeline: int = 1
) -> float:
    """KV bytes of a token in all layers of the fullest stage, on one device.

    A sliding layer counts in full: its blocks are freed when the window has passed them.
    Recurrent states grow with no token.
    """
    full = model.attention_layers - model.sliding_layers
    sliding = model.sliding_layers * layer_kv_bytes_per_token(model, fmt, tensor)
    layers = full * full_layer_kv_bytes_per_token(model, fmt, tensor) + sliding
    stage = ceil(model.attention_layers / pipeline) / max(1, model.attention_layers)
    return layers * stage


def state_page_bytes(
    model: ModelSpec, linear: LinearMixer, tensor: int = 1, num_speculative_tokens: int = 0
) -> int:
    """Bytes of the recurrent state and the convolution's inputs of one sequence and layer.

    Both are split over ranks; drafts lengthen the convolution's part (vllm/model_executor/
    layers/mamba/mamba_utils.py, `gated_delta_net_state_shape`, `mamba2_state_shape`).
    """
    conv = linear.conv_dim * (linear.conv_kernel - 1 + num_speculative_tokens) // tensor
    dtype = model.dtype if linear.state_dtype == "auto" else linear.state_dtype
    state_bytes = BYTES_OF_DTYPE.get(dtype, model.dtype_bytes)
    return conv * model.dtype_bytes + linear.recurrent_elements // tensor * state_bytes
