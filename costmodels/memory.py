"""vLLM's start-up memory: what is left for KV, in blocks, or why it does not start.

vLLM loads the weights, runs one step of the largest size with a sampler for `max_num_seqs`
sequences, notes the peak, estimates its CUDA graphs, and gives what is left of
`gpu_memory_utilization` x physical memory to the KV pool (vllm/v1/worker/gpu_worker.py,
`determine_available_memory`, 0.32). Each term below is named after that log; where a release
counted otherwise, the constant beside it or `versions.py` names the release.

The constants were chosen on public start-up logs (docs/memory.md names them and how far off
they are), physical terms first.
"""

from dataclasses import dataclass, replace
from math import ceil, sqrt

from servecast.costmodels.drafting import Drafter, drafter_bytes, drafter_kv_bytes_per_token
from servecast.costmodels.graphs import capture_sizes, graph_count, v0_capture_sizes
from servecast.costmodels.kv_format import BFLOAT16, KvFormat
from servecast.costmodels.kv_layout import (
    KvLayout,
    full_layer_kv_bytes_per_token,
    kv_bytes_per_token,
    kv_layout,
)
from servecast.costmodels.loading import HOPPER, loaded_bytes
from servecast.costmodels.specs import HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.versions import GRAPHS_DEDUCTED_SINCE, LATEST, Version
from servecast.costmodels.weights import check_parallel

GIB = 2**30

#: A logit of the sampler's dummy run, beside the model's own number: in fp32, as a probability,
#: and as exponential noise (vllm/v1/sample/sampler.py, ops/topk_topp_sampler.py). That all are
#: alive at the peak is inferred from the logs' "about 15 bytes", the buffer below included.
SAMPLER_BYTES_PER_LOGIT = 4 + 4 + 4

#: The same where top-k and top-p sort the vocabulary: sorted values and 64-bit indices, their
#: softmax and cumulative sum, and masks come on top. Nine logs of V1 0.10.2 to 0.16 on four
#: devices lie between 38.2 and 38.6.
SORTING_BYTES_PER_LOGIT = 38.4

#: The Triton kernel that filters without sorting came with this release.
NO_SORT_SINCE = Version(0, 17)

#: FlashInfer's sampler, where it was installed, was on by default in these and sorts nothing.
#: Which of the two ran depends on the installation: four logs of 0.10.1.1 show the small peak,
#: those of 0.9.2, 0.10.0, 0.10.1 and 0.10.2 the large one.
FLASHINFER_BY_DEFAULT = (Version(0, 8), Version(0, 11))
FLASHINFER_SEEN = (Version(0, 10, 1, 1), Version(0, 10, 2))

#: The top-k/top-p kernel keeps one fp32 row of the vocabulary for each program in flight.
SAMPLER_BUFFER_BYTES_PER_LOGIT = 4

#: Input ids, positions, block tables and their kin, in releases that filter without sorting;
#: before, logs leave no room for them.
INPUT_BUFFER_BYTES = round(0.05 * GIB)

#: Hidden states that are alive beside the MLP's own: input, residual, normed, output.
LIVE_HIDDEN_STATES = 4

#: Of one captured graph, per layer of the model; of a layer of experts as much again. Estimates
#: logged by 0.19 on H100 lie between 0.7 and 1.9 times this, docs/memory.md.
GRAPH_BYTES_PER_LAYER = 224 * 1024

#: One block of the pool is no request's from this release; the check at start leaves it out.
NULL_BLOCK_SINCE = Version(0, 30)

#: Taken before vLLM starts counting, so not part of the budget: only `free at start` shows it.
CONTEXT_BYTES = round(0.51 * GIB)

#: Logs round to 0.01 GiB; half of that is sure to be wrong.
ROUNDING_BYTES = round(0.005 * GIB)

#: Standard deviation of the graphs' estimate.
GRAPH_DOUBT = 0.3

#: A 90 % interval of a normal error.
Z90 = 1.645


@dataclass(frozen=True)
class EngineMemory:
    """vLLM's flags that decide memory, with the defaults of 0.32 for a GPU below 70 GiB.

    Attributes
    ----------
    max_model_len : None for the model's own
    kv_cache_memory_bytes : a pool of that size, whatever is left (skips the profile)
    cpu_offload_gb : weights kept in host memory, GiB a device
    estimate_cudagraphs : take the graphs out of the KV budget
        (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS); None for the release's default
    cudagraph_capture_sizes : None for the release's own
    expert_engines : data-parallel engines over which experts are spread
    quantised_online : 16-bit weights are all loaded before they are quantised
    vision : load the vision tower, where the model has one
    v0 : the engine before V1
    drafter : of speculative decoding, on the same devices
    num_speculative_tokens : drafts that a sequence verifies in one step at most
    """

    gpu_memory_utilization: float = 0.92
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    kv: KvFormat = BFLOAT16
    tensor: int = 1
    pipeline: int = 1
    enforce_eager: bool = False
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    cpu_offload_gb: float = 0.0
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    estimate_cudagraphs: bool | None = None
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    expert_engines: int = 1
    quantised_online: bool = False
    vision: bool = True
    version: Version = LATEST
    v0: bool = False
    drafter: Drafter | None = None
    num_speculative_tokens: int = 0

    @property
    def parallel(self) -> Parallelism:
        return Parallelism(self.tensor, self.pipeline)

    @property
    def deducts_graphs(self) -> bool:
        """The estimate of the graphs comes off the KV pool."""
        if self.estimate_cudagraphs is not None:
            return self.estimate_cudagraphs
        return self.version >= GRAPHS_DEDUCTED_SINCE

    def capture_sizes(self, hardware: HardwareSpec) -> tuple[int, ...]:
        """Batch sizes that get a CUDA graph, as given or as V1 chooses them."""
        if self.cudagraph_capture_sizes is not None:
            return self.cudagraph_capture_sizes
        return capture_sizes(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            hardware.max_cudagraph_capture_size,
            self.version,
            decode_tokens=1 + self.num_speculative_tokens,
        )


@dataclass(frozen=True)
class Doubt:
    """Standard deviations of the terms, bytes; `total` is what of the device's memory is ours."""

    weights_bytes: float
    activation_bytes: float
    graph_bytes: float
    other_bytes: float
    total_bytes: float
    graphs_deducted: bool

    @property
    def _of_the_pool(self) -> dict[str, float]:
        terms = {
            "weights": self.weights_bytes,
            "activation": self.activation_bytes,
            "other": self.other_bytes,
            "total": self.total_bytes,
        }
        return terms | ({"graph": self.graph_bytes} if self.graphs_deducted else {})

    @property
    def kv_bytes(self) -> float:
        """Of what is left of the budget: the terms are taken as independent."""
        return sqrt(sum(term**2 for term in self._of_the_pool.values()))

    @property
    def least_sure(self) -> str:
        """The term that the pool's width owes most to."""
        terms = self._of_the_pool
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest device, and the pool that they leave.

    Attributes
    ----------
    weights_bytes : `draft_bytes` of them the drafter's
    total_bytes : physical memory; `budget_bytes` of it is vLLM's to use
    other_bytes : what the driver and NCCL take outside torch
    kv_bytes : vLLM's `Available KV cache memory`; negative where nothing is left
    kv_bytes_per_token : on this device, all its layers and the drafter's
    num_gpu_blocks : block ids of vLLM's pool. With V1 one of them is the null block, which no
        request ever gets
    blocks : blocks of `block_size` tokens of every layer, as the scheduler here counts them:
        the same number but for models with several groups of layers
    tokens : vLLM's `GPU KV cache size`
    max_concurrency : vLLM's `Maximum concurrency for max_model_len tokens per request`
    shortfall_bytes : what is missing to start; 0 if it fits
    refused_bytes : by how much the budget is above what is free, where vLLM checks that
    free_bytes : what the driver shows as free before anything is loaded
    loading_bytes : held before weights are quantised, where that is more than after
    after_start_bytes : free when the engine serves and samples its largest batch
    kv_interval, tokens_interval : 90 % of the time they lie in these
    longest_tokens : the longest request that fits: vLLM's `estimated maximum model length`
    """

    weights_bytes: int
    draft_bytes: int
    activation_bytes: int
    graph_bytes: int
    other_bytes: int
    kv_bytes: int
    total_bytes: int
    budget_bytes: int
    kv_bytes_per_token: float
    layout: KvLayout
    num_gpu_blocks: int
    blocks: int
    tokens: int
    max_concurrency: float
    shortfall_bytes: int
    refused_bytes: int
    loading_bytes: int
    after_start_bytes: int
    free_bytes: int
    max_model_len: int
    longest_tokens: int
    doubt: Doubt
    kv_interval: tuple[float, float]
    tokens_interval: tuple[int, int]

    @property
    def fits(self) -> bool:
        return self.shortfall_bytes == 0

    @property
    def block_size(self) -> int:
        """Tokens of a block, as vLLM has it in the end."""
        return self.layout.block_size

    @property
    def block_bytes(self) -> float:
        """One block of `block_size` tokens of every layer."""
        return self.kv_bytes_per_token * self.block_size

    @property
    def usable_blocks(self) -> int:
        return max(0, self.blocks - 1)

    def explain(self) -> str:
        """One line: the terms, and the pool or what is missing."""
        draft = f" (draft {_gib(self.draft_bytes)})" if self.draft_bytes else ""
        terms = (
            f"weights {_gib(self.weights_bytes)}{draft} + "
            f"activations {_gib(self.activation_bytes)} + "
            f"CUDA graphs {_gib(self.graph_bytes)} + other {_gib(self.other_bytes)}"
        )
        if self.fits:
            return (
                f"starts: {terms} + KV {_gib(self.kv_bytes)} of {_gib(self.total_bytes)} GiB: "
                f"{self.num_gpu_blocks:,} blocks of {self.block_size} ({self.tokens:,} tokens)"
            )
        if self.refused_bytes > 0:
            return (
                f"does not start: free memory on device ({_gib(self.free_bytes)} of "
                f"{_gib(self.total_bytes)} GiB) is less than desired: {_gib(self.budget_bytes)} GiB"
            )
        if self.loading_bytes > self.free_bytes:
            return (
                f"does not start: {_gib(self.loading_bytes)} GiB of weights are loaded before "
                f"they are quantised, {_gib(self.free_bytes)} GiB are free"
            )
        missing = f"{_gib(self.shortfall_bytes)} GiB short for one request of that length"
        if self.longest_tokens >= self.max_model_len:
            return (
                f"does not start: {terms} + KV {_gib(self.kv_bytes)} GiB are "
                f"{_gib(self.shortfall_bytes)} GiB more than the {_gib(self.free_bytes)} GiB "
                "that are free"
            )
        if self.num_gpu_blocks > 0:
            return (
                f"does not start: max_model_len {self.max_model_len:,} needs more than the KV pool "
                f"of {_gib(self.kv_bytes)} GiB ({self.tokens:,} tokens): {missing}"
            )
        over = max(0, -self.kv_bytes)
        return (
            f"does not start: {terms} GiB > {_gib(self.budget_bytes)} GiB: {_gib(over)} GiB short, "
            f"{_gib(self.shortfall_bytes)} with KV for one request of {self.max_model_len:,} tokens"
        )


#: Weights that are quantised while they are loaded come in one layer after another from this
#: release (`_loaded_numel`, layers/quantization/fp8.py of 0.13.0); before, all of them lay on the
#: device in 16 bits first.
STREAMED_SINCE = Version(0, 13)

#: V1 refuses a budget above what is free before it loads anything, from this release
#: (v1/worker/gpu_worker.py of 0.9.1).
FREE_CHECKED_SINCE = Version(0, 9, 1)


def plan_memory(model: ModelSpec, hardware: HardwareSpec, engine: EngineMemory) -> MemoryPlan:
    """Account for a start-up; one that fails is a plan with a shortfall, not an exception.

    Raises InputError for a split or a block size that vLLM refuses.
    """
    check_parallel(model, engine.parallel)
    hardware.check_block_size(engine.block_size)
    offloaded = round(engine.cpu_offload_gb * GIB)
    loaded = loaded_bytes(
        model,
        hardware,
        engine.parallel,
        vision=engine.vision,
        expert_engines=engine.expert_engines,
        version=engine.version,
    )
    draft = draft_weight_bytes(model, hardware, engine)
    weights = max(0, loaded - offloaded) + draft
    activation = activation_bytes(model, hardware, engine)
    graphs = graph_bytes(model, hardware, engine)
    other = non_torch_bytes(hardware, engine)
    deducted = graphs if engine.deducts_graphs else 0
    budget = round(engine.gpu_memory_utilization * hardware.memory_bytes)
    layout = layout_of(model, engine)
    longest = max_model_len(model, engine)

    left = budget - weights - activation - other - deducted
    if engine.kv_cache_memory_bytes is not None:
        left = engine.kv_cache_memory_bytes
    ids = max(0, left // layout.block_bytes)
    if engine.num_gpu_blocks_override is not None:
        ids = engine.num_gpu_blocks_override
        left = ids * layout.block_bytes
    null_block = 1 if engine.version >= NULL_BLOCK_SINCE else 0
    needed = (layout.request_blocks(longest) + null_block) * layout.block_bytes
    free = free_at_start_bytes(hardware)
    after_start = free - weights - other - max(0, left) - graphs - activation
    profiled = engine.kv_cache_memory_bytes is None and engine.num_gpu_blocks_override is None
    # A pool that was not profiled for may leave too little to run in.
    over = weights + other + max(0, left) - free
    whole = 0
    if engine.quantised_online:
        plain = replace(model, quantization=None)
        whole = loaded_bytes(plain, hardware, engine.parallel, version=engine.version)
        over = max(over, whole - free)
    refused = budget - free if engine.version >= FREE_CHECKED_SINCE and not engine.v0 else 0
    if not engine.deducts_graphs and not engine.enforce_eager:
        over = max(over, -after_start - activation)

    doubt = doubt_of(model, hardware, engine, weights, activation, graphs)
    slack = 0.0 if not profiled else Z90 * doubt.kv_bytes
    low, high = left - slack, left + slack
    return MemoryPlan(
        weights_bytes=weights,
        draft_bytes=draft,
        activation_bytes=activation,
        graph_bytes=graphs,
        other_bytes=other,
        kv_bytes=left,
        total_bytes=hardware.memory_bytes,
        budget_bytes=budget,
        kv_bytes_per_token=kv_bytes_per_token(model, engine.kv, engine.tensor, engine.pipeline)
        + draft_kv_bytes_per_token(engine),
        layout=layout,
        num_gpu_blocks=ids,
        blocks=layout.schedulable_blocks(ids, engine.max_num_seqs),
        tokens=layout.logged_tokens(ids, longest, engine.version),
        max_concurrency=layout.concurrency(ids, longest),
        shortfall_bytes=max(0, needed - left, over, refused),
        refused_bytes=max(0, refused),
        loading_bytes=whole,
        after_start_bytes=after_start,
        free_bytes=free,
        max_model_len=longest,
        longest_tokens=layout.longest(max(0, ids - null_block), longest),
        doubt=doubt,
        kv_interval=(low, high),
        tokens_interval=(
            _tokens_of(low, layout, longest, engine.version),
            _tokens_of(high, layout, longest, engine.version),
        ),
    )


def _tokens_of(left: float, layout: KvLayout, longest: int, version: Version) -> int:
    ids = max(0, int(left // layout.block_bytes))
    return layout.logged_tokens(ids, longest, version)


def layout_of(model: ModelSpec, engine: EngineMemory) -> KvLayout:
    """The model's KV groups under these flags; a drafter's layers lie beside the target's.

    vLLM makes a group of a draft whose heads are of another size, with larger blocks; its bytes are
    the same, the number of blocks it logs is not.
    """
    drafted = 0
    if engine.drafter is not None and engine.drafter.model is not None:
        drafted = _layers_alike(engine.drafter, model, engine)
    layout = kv_layout(
        replace(model, attention_layers=model.attention_layers + drafted),
        engine.kv,
        block_size=engine.block_size,
        tensor=engine.tensor,
        pipeline=engine.pipeline,
        enable_prefix_caching=engine.enable_prefix_caching,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        async_scheduling=engine.async_scheduling,
        num_speculative_tokens=engine.num_speculative_tokens,
        version=engine.version,
    )
    draft = 0.0 if drafted else draft_kv_bytes_per_token(engine) * layout.block_size
    attention = sum(group.kind != "state" for group in layout.groups)
    return replace(layout, block_bytes=layout.block_bytes + ceil(draft / max(1, attention)))


def _layers_alike(drafter: Drafter, model: ModelSpec, engine: EngineMemory) -> int:
    """Layers of the drafter that hold as much of a token as the target's full-attention layers: one
    more of their kind to vLLM; 0 where they hold another amount."""
    draft = drafter.model
    if draft is None or drafter.shares:
        return 0
    own = full_layer_kv_bytes_per_token(draft, engine.kv, drafter.parallel.tensor)
    same = own == full_layer_kv_bytes_per_token(model, engine.kv, engine.tensor)
    return draft.attention_layers if same else 0


def draft_weight_bytes(model: ModelSpec, hardware: HardwareSpec, engine: EngineMemory) -> int:
    """Weights that a drafter on the same devices adds."""
    if engine.drafter is None:
        return 0
    return drafter_bytes(engine.drafter, model, hardware, engine.version)


def draft_kv_bytes_per_token(engine: EngineMemory) -> float:
    """KV that a drafter on the same devices adds for a token."""
    return drafter_kv_bytes_per_token(engine.drafter, engine.kv) if engine.drafter else 0.0


def max_model_len(model: ModelSpec, engine: EngineMemory) -> int:
    """Longest request in tokens, prompt and output."""
    return engine.max_model_len or model.max_position_embeddings


def activation_bytes(model: ModelSpec, hardware: HardwareSpec, engine: EngineMemory) -> int:
    """Peak of the profile run: the widest layer, or the sampler while the hidden states live.

    The sampler sees the gathered vocabulary, so tensor parallelism does not shrink its part.
    """
    tokens = engine.max_num_batched_tokens
    hidden = tokens * model.hidden_size * model.dtype_bytes
    sampler = model.vocab_size * sampler_row_bytes(model, hardware, engine) + hidden
    # The gate and up halves and their product are alive together.
    width = ceil(model.intermediate_size / engine.tensor) * (3 if model.gated_mlp else 2)
    layer = tokens * width * model.dtype_bytes + LIVE_HIDDEN_STATES * hidden
    workspace = moe_workspace_bytes(model, engine)
    buffers = INPUT_BUFFER_BYTES if engine.version >= NO_SORT_SINCE else 0
    text = max(sampler, layer) + workspace + buffers
    if not model.vision_parameters or not engine.vision:
        return text
    # The tower's output waits for the text model; the tower itself has run before.
    items = max(tokens, model.vision_item_tokens) * model.hidden_size * model.dtype_bytes
    return max(text, model.vision_profile_numbers * model.dtype_bytes) + items


def sampler_row_bytes(model: ModelSpec, hardware: HardwareSpec, engine: EngineMemory) -> int:
    """Bytes of the sampler's dummy run for one token of the vocabulary, all sequences."""
    seqs = engine.max_num_seqs
    if sorts_the_vocabulary(engine):
        return round(seqs * SORTING_BYTES_PER_LOGIT)
    programs = min(seqs, hardware.multiprocessors) if engine.version >= NO_SORT_SINCE else 0
    row = seqs * (model.dtype_bytes + SAMPLER_BYTES_PER_LOGIT)
    return row + programs * SAMPLER_BUFFER_BYTES_PER_LOGIT


def sorts_the_vocabulary(engine: EngineMemory) -> bool:
    """Top-k and top-p sort every logit, in 38 bytes of each, and not in 14."""
    if engine.v0:
        return True
    first, past = FLASHINFER_SEEN
    return engine.version < NO_SORT_SINCE and not first <= engine.version < past


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
    sizes = engine.capture_sizes(hardware)
    if engine.v0 and engine.cudagraph_capture_sizes is None:
        sizes = v0_capture_sizes(engine.max_num_seqs)
    graphs = graph_count(sizes, engine.max_num_seqs, engine.version)
    layers = model.num_layers + (model.moe.layers if model.moe else 0)
    if engine.drafter is not None and engine.drafter.model is not None:
        layers += engine.drafter.model.num_layers
    return graphs * ceil(layers / engine.pipeline) * GRAPH_BYTES_PER_LAYER


def non_torch_bytes(hardware: HardwareSpec, engine: EngineMemory) -> int:
    """Loaded kernels, and communication buffers where there is any."""
    return round(_non_torch_gib(hardware, engine)[0] * GIB)


def _non_torch_gib(hardware: HardwareSpec, engine: EngineMemory) -> tuple[float, float]:
    """(GiB, standard deviation) by engine, release, kind of device and split."""
    if hardware.kind != "gpu":
        return 0.0, 0.0
    era = "v0" if engine.v0 else _era(engine.version)
    if engine.tensor > 1:
        nvlink = hardware.link_bytes_per_s >= NVLINK_BYTES_PER_S
        if era == "v1" and engine.version >= Version(0, 11):
            era = "v1-0.11"
        return NON_TORCH_TENSOR_GIB[era, nvlink]
    if engine.pipeline > 1:
        return NON_TORCH_PIPELINE_GIB
    return NON_TORCH_GIB[era, hardware.compute_capability >= HOPPER]


#: Slower links than NVLink's have no symmetric memory and no multicast buffers.
NVLINK_BYTES_PER_S = 1e11

#: What vLLM logs as non-torch memory, GiB: (typical, standard deviation), by era and by Hopper
#: or later. Logs behind each: v0, A100 0.26, RTX 3090 0.20 and 0.35, V100 0.09, T4 0.05, H100
#: 0.11; v1, H100 0.13 four times, B200 0.07, a 48 GB card 0.03; 0.19 on H100, 0.24 to 0.27 in
#: 17; 0.19 on an A100 0.42; 0.22 on an L40S 0.80. Where one log stands behind a figure, or
#: none (Hopper from 0.21), the deviation is wide.
NON_TORCH_GIB = {
    ("v0", False): (0.2, 0.12),
    ("v0", True): (0.2, 0.12),
    ("v1", False): (0.1, 0.05),
    ("v1", True): (0.13, 0.05),
    ("v1-0.19", False): (0.5, 0.15),
    ("v1-0.19", True): (0.25, 0.03),
    ("v1-0.21", False): (0.75, 0.2),
    ("v1-0.21", True): (0.4, 0.2),
}

#: The same under tensor parallelism, by era and by NVLink: V0 0.5 to 3.6 in four logs; 0.10 and
#: before 0.1 and 0.2; 0.11 0.54 and 0.55; 0.19 on H100 2.06 to 2.13 in six. Without NVLink from
#: 0.19 on: no log that states it.
NON_TORCH_TENSOR_GIB = {
    ("v0", False): (0.6, 0.4),
    ("v0", True): (2.0, 1.0),
    ("v1", False): (0.2, 0.1),
    ("v1", True): (0.15, 0.1),
    ("v1-0.11", False): (0.5, 0.2),
    ("v1-0.11", True): (0.55, 0.1),
    ("v1-0.19", False): (0.8, 0.4),
    ("v1-0.19", True): (2.09, 0.04),
    ("v1-0.21", False): (1.0, 0.5),
    ("v1-0.21", True): (2.1, 0.4),
}

#: Pipeline stages without tensor parallelism: 0.07 in two logs of 0.19 on H100.
NON_TORCH_PIPELINE_GIB = (0.07, 0.05)


def _era(version: Version) -> str:
    if version >= Version(0, 21):
        return "v1-0.21"
    return "v1-0.19" if version >= Version(0, 19) else "v1"


def free_at_start_bytes(hardware: HardwareSpec) -> int:
    """What the driver shows as free to an engine that starts alone on the device."""
    return hardware.memory_bytes - (CONTEXT_BYTES if hardware.kind == "gpu" else 0)


def doubt_of(
    model: ModelSpec,
    hardware: HardwareSpec,
    engine: EngineMemory,
    weights: int,
    activation: int,
    graphs: int,
) -> Doubt:
    """How far each term may be off, one standard deviation.

    From the spread of the logs around the terms (docs/memory.md): weights 0.3 %, 1 % where
    they are quantised (padding and scales vary by kernel); activations 5 %, and half of the
    two samplers' difference where either may have run; the graphs' estimate 30 %; a vision
    tower's own profile run is not modelled. Other devices than those in the logs may show
    memory that is 0.3 % off.
    """
    activation_doubt = [0.05 * activation, ROUNDING_BYTES]
    first, past = FLASHINFER_BY_DEFAULT
    if not engine.v0 and first <= engine.version < past:
        per_logit = SORTING_BYTES_PER_LOGIT - SAMPLER_BYTES_PER_LOGIT - model.dtype_bytes
        activation_doubt.append(0.5 * per_logit * engine.max_num_seqs * model.vocab_size)
    if model.vision_parameters and engine.vision:
        tower = 0.4 * model.vision_profile_numbers * model.dtype_bytes
        activation_doubt.append(max(0.2 * GIB, tower))
    return Doubt(
        weights_bytes=(0.01 if model.quantization else 0.003) * weights,
        activation_bytes=sqrt(sum(part**2 for part in activation_doubt)),
        graph_bytes=GRAPH_DOUBT * graphs,
        other_bytes=_non_torch_gib(hardware, engine)[1] * GIB,
        total_bytes=0.001 * engine.gpu_memory_utilization * hardware.memory_bytes,
        graphs_deducted=engine.deducts_graphs,
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
