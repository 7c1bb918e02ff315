"""What is served, on what, split how: facts only, no arithmetic beyond a lookup.

Counting parameters and bytes from a `ModelSpec` is `weights.py`; reading one from a Hugging
Face config.json is `hf_config.py`; the bundled ones are in `catalogue.py`.
"""

from dataclasses import dataclass

from servecast.costmodels.errors import InputError

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Kind of hardware whose only memory is SRAM.
SRAM = "sram"


@dataclass(frozen=True)
class Moe:
    """A mixture of experts.

    Attributes
    ----------
    intermediate_size : of one routed expert
    shared_intermediate_size : of all shared experts of a layer together; 0 without them
    layers : layers whose MLP is a mixture
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    layers: int
    shared_intermediate_size: int = 0


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    The KV of a token is one latent of `kv_lora_rank + qk_rope_head_dim` numbers a layer, not
    split over tensor-parallel ranks. `q_lora_rank` 0: queries are projected directly.
    `index_*` describe the sparse indexer of DeepSeek-V3.2, 0 without one.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    index_heads: int = 0
    index_head_dim: int = 0

    @property
    def latent_dim(self) -> int:
        """Numbers of KV cache a token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class LinearMixer:
    """Layers with a recurrent state in place of KV (gated delta net, Mamba-2).

    Attributes
    ----------
    layers : how many
    projection_dim : outputs of the layer's input projections together
    value_dim : inputs of its output projection
    recurrent_elements : numbers of the recurrent state that one sequence holds in one layer
    conv_dim, conv_kernel : channels of the short convolution before it, and its width: a
        sequence holds the last `conv_kernel - 1` inputs
    state_dtype : of the recurrent state; "auto" is the model's own
    """

    layers: int
    projection_dim: int
    value_dim: int
    recurrent_elements: int
    conv_dim: int
    conv_kernel: int = 4
    state_dtype: str = "auto"

    @property
    def state_elements(self) -> int:
        """Numbers that one sequence holds in one layer, whatever its length."""
        return self.recurrent_elements + self.conv_dim * (self.conv_kernel - 1)


@dataclass(frozen=True)
class Quantization:
    """How the weights of linear layers are stored. Embeddings and lm_head stay 16-bit.

    Attributes
    ----------
    method : vLLM's name ("fp8", "awq", "gptq", "compressed-tensors", "mxfp4", "modelopt", ...)
    weight_bits : stored bits a weight, scales and zero points included
    compute : "fp8", "int8" or "fp4" where activations are quantised too, "16bit" where weights
        are unpacked first
    keeps : groups of layers that stay 16-bit, out of `LAYER_GROUPS`
    """

    method: str
    weight_bits: float
    compute: str
    keeps: frozenset[str] = frozenset()


LAYER_GROUPS = ("attention", "mlp", "experts", "shared_expert", "linear_mixer")


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, or a hybrid of attention and linear mixers.

    Attributes
    ----------
    attention_layers : layers that hold KV; `sliding_layers` of them see `sliding_window` tokens
    chunked_attention : the window is a chunk that begins anew (Llama 4)
    full_head_dim, full_key_value_heads : of the full-attention layers where they differ from the
        sliding ones' (Gemma 4); 0 where they do not
    values_are_keys : full-attention layers have no value projection (Gemma 4); values are cached
    dense_layers : layers with a plain MLP of `intermediate_size`
    gated_mlp : three matrices (SwiGLU and kin) or two
    gated_attention : the query projection is doubled by an output gate (Qwen3.5)
    learned_positions : rows of a position table beside the embeddings (OPT)
    rope_table_numbers : of the cos and sin tables, made when the model is loaded
    vision_parameters : weights of the vision tower and its projector
    vision_item_tokens, vision_profile_numbers : of the largest item that it takes: text tokens,
        and numbers alive while the tower runs on it; 0 where the item is small
    kv_cache_dtype : what "auto" means for this checkpoint, "auto" being the model's own dtype
    mtp_layers : layers that predict further tokens, which are not part of `num_layers`
    draft_vocab_size : tokens that the head of a draft knows, where it knows fewer (EAGLE-3); else 0
    fusion_inputs : hidden states that a projection before the first layer makes one of (the heads
        of EAGLE and MTP); 0 without one
    attention_inputs : hidden states that query, key and value projections read side by side
        (EAGLE-3: 2)
    """

    name: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    attention_layers: int
    dense_layers: int
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    gated_mlp: bool = True
    gated_attention: bool = False
    sliding_window: int = 0
    sliding_layers: int = 0
    chunked_attention: bool = False
    full_head_dim: int = 0
    full_key_value_heads: int = 0
    values_are_keys: bool = False
    learned_positions: int = 0
    rope_table_numbers: int = 0
    vision_parameters: int = 0
    vision_item_tokens: int = 0
    vision_profile_numbers: int = 0
    moe: Moe | None = None
    mla: Mla | None = None
    linear: LinearMixer | None = None
    quantization: Quantization | None = None
    kv_cache_dtype: str = "auto"
    mtp_layers: int = 0
    draft_vocab_size: int = 0
    fusion_inputs: int = 0
    attention_inputs: int = 1

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an unquantised weight or activation."""
        return BYTES_OF_DTYPE[self.dtype]

    @property
    def compute(self) -> str:
        """Numbers that its matrices are multiplied in, as `HardwareSpec.peak_flops_per_s` has
        them."""
        return self.quantization.compute if self.quantization else "16bit"


@dataclass(frozen=True)
class HardwareSpec:
    """One device: datasheet peaks, dense (no sparsity), and memory as the driver shows it.

    Attributes
    ----------
    memory_bytes : physical, as `torch.cuda.mem_get_info` gives it ("80 GB" is 79.19 GiB)
    *_flops_per_s : matrix peak with 32-bit accumulation; None where there is no such unit
    link_bytes_per_s : to the other devices of the node, one direction
    host_link_bytes_per_s : to host memory, one direction
    multiprocessors : SMs or compute units; 0 where the term has no meaning
    compute_capability : NVIDIA's number of the architecture, such as 8.9; 0 elsewhere
    block_size_multiple : KV blocks that the attention backend takes: every multiple of this
    max_cudagraph_capture_size : vLLM's default ceiling, in tokens
    cores, hop_s, word_s : of an SRAM device: places on its fabric, from one to the next, and to
        move a 16-bit number over one link; 0 elsewhere
    source : where the facts are from
    """

    name: str
    vendor: str
    kind: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    link_bytes_per_s: float
    host_link_bytes_per_s: float
    source: str
    bf16_flops_per_s: float | None = None
    fp16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    int8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    power_w: float | None = None
    price_per_hour: float | None = None
    multiprocessors: int = 0
    compute_capability: float = 0.0
    block_size_multiple: int = 16
    default_block_size: int = 16
    max_cudagraph_capture_size: int = 512
    cores: int = 0
    hop_s: float = 0.0
    word_s: float = 0.0

    def peak_flops_per_s(self, compute: str = "16bit") -> float:
        """Peak for "16bit", "fp8", "int8" or "fp4".

        A device without the asked unit unpacks to 16 bit, as vLLM's Marlin kernels do; one
        without bf16 (T4) computes in fp16.
        """
        peak = self._units().get(compute) or self.bf16_flops_per_s or self.fp16_flops_per_s
        if peak is None:
            raise InputError(f"hardware {self.name}: no 16-bit peak: give bf16_tflops")
        return peak

    def has_units(self, compute: str) -> bool:
        """It computes in a format, and does not take it for storage alone."""
        return self._units().get(compute, 1.0) is not None

    def _units(self) -> dict[str, float | None]:
        return {
            "fp8": self.fp8_flops_per_s,
            "int8": self.int8_flops_per_s,
            "fp4": self.fp4_flops_per_s,
        }

    def check_block_size(self, block_size: int) -> None:
        """Raise InputError if the attention backend does not take this block size."""
        if block_size < 1 or block_size % self.block_size_multiple:
            raise InputError(
                f"block_size: {block_size} is not supported on {self.name}: "
                f"its attention backend takes multiples of {self.block_size_multiple}"
            )


@dataclass(frozen=True)
class Parallelism:
    """Devices of one replica: `tensor` ranks in each of `pipeline` stages."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline


ONE_DEVICE = Parallelism()
