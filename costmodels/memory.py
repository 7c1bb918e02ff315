"""vLLM's start-up memory: what is left for KV, in blocks, or why it does not start.

vLLM loads the weights, runs one step of the largest size with a sampler for `max_num_seqs`
sequences, notes the peak, estimates its CUDA graphs, and gives what is left of
`gpu_memory_utilization` x physical memory to the KV pool (vllm/v1/worker/gpu_worker.py,
`determine_available_memory`, 0.32). Each term below is named after that log.

The constants were chosen on public start-up logs of vLLM 0.17 to 0.19 on H100
(llm-d-incubation/llm-d-planner accuracy results, Apache-2.0), so agreement with those rows is
no test of them; other devices and versions are.
"""

from dataclasses import dataclass
from math import ceil

from servecast.costmodels.graphs import capture_sizes
from servecast.costmodels.specs import HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.weights import (
    check_parallel,
    kv_bytes_per_token,
    layer_kv_bytes_per_token,
    weight_bytes,
)

GIB = 2**30

#: A logit of the sampler's dummy run: in the model's 16 bits, in fp32, as a probability, and as
#: exponential noise (vllm/v1/sample/sampler.py, ops/topk_topp_sampler.py). That all four are
#: alive at the peak is inferred from the logs' "about 15 bytes", the buffer below included.
SAMPLER_BYTES_PER_LOGIT = 2 + 4 + 4 + 4

#: The top-k/top-p kernel keeps one fp32 row of the vocabulary for each program in flight.
SAMPLER_BUFFER_BYTES_PER_LOGIT = 4

#: Input ids, positions, block tables and their kin.
INPUT_BUFFER_BYTES = round(0.05 * GIB)

#: Hidden states that are alive beside the MLP's own: input, residual, normed, output.
LIVE_HIDDEN_STATES = 4

#: NCCL and custom all-reduce buffers come with tensor parallelism.
NON_TORCH_BYTES = round(0.25 * GIB)
NON_TORCH_PIPELINE_BYTES = round(0.07 * GIB)
NON_TORCH_TENSOR_BYTES = round(2.1 * GIB)

#: Taken before vLLM starts counting, so not part of the budget: only `free at start` shows it.
CONTEXT_BYTES = round(0.51 * GIB)

#: Of one captured graph, per layer of the model.
GRAPH_BYTES_PER_LAYER = 224 * 1024


@dataclass(frozen=True)
class EngineMemory:
    """vLLM's flags that decide memory, with the defaults of 0.32 for a GPU below 70 GiB.

    Attributes
    ----------
    max_model_len : None for the model's own
    kv_dtype_bytes : bytes of one number in the KV cache
    estimate_cudagraphs : take the graphs out of the KV budget: the default since 0.21
        (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS); before, they sat on top of it
    """

    gpu_memory_utilization: float = 0.92
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    kv_dtype_bytes: float = 2.0
    tensor: int = 1
    pipeline: int = 1
    enforce_eager: bool = False
    num_gpu_blocks_override: int | None = None
    estimate_cudagraphs: bool = True

    @property
    def parallel(self) -> Parallelism:
        return Parallelism(self.tensor, self.pipeline)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest device, and the pool that they leave.

    Attributes
    ----------
    total_bytes : physical memory; `budget_bytes` of it is vLLM's to use
    other_bytes : what the driver and NCCL take outside torch
    kv_bytes_per_token : on this device, all its layers
    blocks : vLLM's num_gpu_blocks. One of them is the null block, which no request ever gets:
        `usable_blocks` is one less. A block holds `block_size` tokens of every layer; vLLM
        counts those of models with several kinds of layers in smaller pages, same tokens
    tokens : blocks * block_size, as logged
    fits : the engine starts: the budget is free, and one request of `max_model_len` fits
    shortfall_bytes : what is missing for that; 0 if it fits
    """

    weights_bytes: int
    activation_bytes: int
    graph_bytes: int
    other_bytes: int
    kv_bytes: int
    total_bytes: int
    budget_bytes: int
    kv_bytes_per_token: float
    block_size: int
    blocks: int
    shortfall_bytes: int
    max_model_len: int

    @property
    def fits(self) -> bool:
        return self.shortfall_bytes == 0

    @property
    def block_bytes(self) -> float:
        """One block of KV on this device, all its layers."""
        return self.kv_bytes_per_token * self.block_size

    @property
    def usable_blocks(self) -> int:
        return max(0, self.blocks - 1)

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    def explain(self) -> str:
        """One line: the terms, and the pool or what is missing."""
        terms = (
            f"weights {_gib(self.weights_bytes)} + activations {_gib(self.activation_bytes)} + "
            f"CUDA graphs {_gib(self.graph_bytes)} + other {_gib(self.other_bytes)}"
        )
        if self.fits:
            return (
                f"starts: {terms} + KV {_gib(self.kv_bytes)} of {_gib(self.total_bytes)} GiB: "
                f"{self.blocks:,} blocks of {self.block_size} ({self.tokens:,} tokens)"
            )
        missing = f"{_gib(self.shortfall_bytes)} GiB short for one request of that length"
        if self.kv_bytes > 0:
            return (
                f"does not start: max_model_len {self.max_model_len:,} needs more than the KV pool "
                f"of {_gib(self.kv_bytes)} GiB ({self.tokens:,} tokens): {missing}"
            )
        taken = self.weights_bytes + self.activation_bytes + self.graph_bytes + self.other_bytes
        over = max(0, taken - self.budget_bytes)
        return (
            f"does not start: {terms} GiB > {_gib(self.budget_bytes)} GiB: {_gib(over)} GiB short, "
            f"{_gib(self.shortfall_bytes)} with KV for one request of {self.max_model_len:,} tokens"
        )


def plan_memory(model: ModelSpec, hardware: HardwareSpec, engine: EngineMemory) -> MemoryPlan:
    """Account for a start-up; one that fails is a plan with a shortfall, not an exception.

    Raises InputError for a split or a block size that vLLM refuses.
    """
    check_parallel(model, engine.parallel)
    hardware.check_block_size(engine.block_size)
    weights = weight_bytes(model, engine.parallel) + rope_cache_bytes(model)
    activation = activation_bytes(model, hardware, engine)
    graphs = graph_bytes(model, hardware, engine)
    other = non_torch_bytes(hardware, engine.parallel)
    deducted = graphs if engine.estimate_cudagraphs else 0
    budget = round(engine.gpu_memory_utilization * hardware.memory_bytes)
    per_token = kv_bytes_per_token(model, engine.kv_dtype_bytes, engine.parallel)
    block_bytes = per_token * engine.block_size

    left = budget - weights - activation - other - deducted
    blocks = max(0, int(left // block_bytes))
    needed = one_request_bytes(model, engine) + block_bytes
    shortfall = max(0, ceil(needed - left), budget - free_at_start_bytes(hardware))
    if engine.num_gpu_blocks_override is not None:
        blocks = engine.num_gpu_blocks_override
        over = weights + other + blocks * block_bytes - hardware.memory_bytes
        shortfall = max(0, ceil(needed - blocks * block_bytes), ceil(over))
    return MemoryPlan(
        weights_bytes=weights,
        activation_bytes=activation,
        graph_bytes=graphs,
        other_bytes=other,
        kv_bytes=int(blocks * block_bytes),
        total_bytes=hardware.memory_bytes,
        budget_bytes=budget,
        kv_bytes_per_token=per_token,
        block_size=engine.block_size,
        blocks=blocks,
        shortfall_bytes=shortfall,
        max_model_len=max_model_len(model, engine),
    )


def max_model_len(model: ModelSpec, engine: EngineMemory) -> int:
    """Longest request in tokens, prompt and output."""
    return engine.max_model_len or model.max_position_embeddings


def rope_cache_bytes(model: ModelSpec) -> int:
    """The cos and sin table, which vLLM logs with the weights."""
    if model.learned_positions:
        return 0
    rotary_dim = model.mla.qk_rope_head_dim if model.mla else model.head_dim
    return model.max_position_embeddings * rotary_dim * model.dtype_bytes


def activation_bytes(model: ModelSpec, hardware: HardwareSpec, engine: EngineMemory) -> int:
    """Peak of the profile run: the widest layer, or the sampler while the hidden states live.

    The sampler sees the gathered vocabulary, so tensor parallelism does not shrink its part.
    """
    tokens = engine.max_num_batched_tokens
    hidden = tokens * model.hidden_size * model.dtype_bytes
    rows = engine.max_num_seqs * SAMPLER_BYTES_PER_LOGIT
    programs = min(engine.max_num_seqs, hardware.multiprocessors)
    sampler = model.vocab_size * (rows + programs * SAMPLER_BUFFER_BYTES_PER_LOGIT) + hidden
    # The gate and up halves and their product are alive together.
    width = ceil(model.intermediate_size / engine.tensor) * (3 if model.gated_mlp else 2)
    layer = tokens * width * model.dtype_bytes + LIVE_HIDDEN_STATES * hidden
    embeddings = hidden if model.vision_parameters else 0
    workspace = moe_workspace_bytes(model, engine)
    return max(sampler, layer) + workspace + embeddings + INPUT_BUFFER_BYTES


def moe_workspace_bytes(model: ModelSpec, engine: EngineMemory) -> int:
    """Two buffers of the fused MoE kernels, kept once made (vLLM 0.32,
    fused_moe/experts/triton_moe.py, `workspace_shapes`).

    tokens x top-k rows of the wider of gate-and-up and hidden, and of the wider of the product
    and hidden. The mxfp4 kernels of gpt-oss bring none.
    """
    moe = model.moe
    if moe is None or (model.quantization and model.quantization.method == "mxfp4"):
        return 0
    width = ceil(moe.intermediate_size / engine.tensor)
    first = max((2 if model.gated_mlp else 1) * width, model.hidden_size)
    second = max(width, model.hidden_size)
    rows = engine.max_num_batched_tokens * moe.experts_per_token
    return rows * (first + second) * model.dtype_bytes


def graph_bytes(model: ModelSpec, hardware: HardwareSpec, engine: EngineMemory) -> int:
    """CUDA graphs: one for mixed steps at each capture size, one more for pure decode."""
    if engine.enforce_eager or hardware.kind != "gpu":
        return 0
    sizes = capture_sizes(
        engine.max_num_seqs, engine.max_num_batched_tokens, hardware.max_cudagraph_capture_size
    )
    graphs = len(sizes) + sum(size <= engine.max_num_seqs for size in sizes)
    return graphs * ceil(model.num_layers / engine.pipeline) * GRAPH_BYTES_PER_LAYER


def non_torch_bytes(hardware: HardwareSpec, parallel: Parallelism) -> int:
    """Loaded kernels, and communication buffers where there is any."""
    if hardware.kind != "gpu":
        return 0
    if parallel.tensor > 1:
        return NON_TORCH_TENSOR_BYTES
    return NON_TORCH_PIPELINE_BYTES if parallel.pipeline > 1 else NON_TORCH_BYTES


def free_at_start_bytes(hardware: HardwareSpec) -> int:
    """What the driver shows as free to an engine that starts alone on the device."""
    return hardware.memory_bytes - (CONTEXT_BYTES if hardware.kind == "gpu" else 0)


def one_request_bytes(model: ModelSpec, engine: EngineMemory) -> float:
    """KV of one request of `max_model_len`, in whole blocks.

    A sliding layer holds its window and one step's new tokens, and a block more because the
    window may begin inside one (vllm/v1/kv_cache_interface.py, `SlidingWindowSpec`).
    """
    longest = max_model_len(model, engine)
    stage = 1 / engine.pipeline
    per_layer = layer_kv_bytes_per_token(model, engine.kv_dtype_bytes, engine.tensor)

    def layer_bytes(tokens: int, more_blocks: int = 0) -> float:
        blocks = ceil(tokens / engine.block_size) + more_blocks
        return blocks * engine.block_size * per_layer

    full = ceil((model.attention_layers - model.sliding_layers) * stage)
    window = min(longest, model.sliding_window - 1 + engine.max_num_batched_tokens)
    sliding = ceil(model.sliding_layers * stage)
    return full * layer_bytes(longest) + (sliding * layer_bytes(window, 1) if sliding else 0.0)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
