"""The flags that a scenario leaves open, as `vllm serve` fills them in, and what it refuses."""

from collections.abc import Mapping
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_layout import mla_block_size
from servecast.costmodels.sampling import default_generation_config
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.costmodels.versions import (
    ASYNC_SINCE,
    BUDGET_BOUNDED_SINCE,
    HYBRID_PREFIXES_SINCE,
    LATEST,
    UNCHUNKED_V1_SINCE,
    Version,
    batch_defaults,
    default_gpu_memory_utilization,
    parse_version,
    runs_v0,
)
from servecast.scenarios.drafting import most_tokens, schedules_ahead
from servecast.scenarios.drafts import SpeculativeConfig
from servecast.scenarios.schema import Engine

#: (max_num_batched_tokens, max_num_seqs) of `vllm serve` 0.32 (EngineArgs.get_batch_defaults)
#: where there is no GPU; `versions.batch_defaults` has those.
CPU = (2048, 128)
OTHER = (2048, 256)
TPU = {"tpu-v5e": (512, 256), "tpu-v6e": (1024, 256)}


def drafts_of(flags: Engine) -> SpeculativeConfig | None:
    """The speculative decoding of some flags; None where nothing is drafted."""
    config = flags.speculative_config
    return config if config is not None and config.widths else None


def resolve(flags: Engine, model: ModelSpec, hardware: HardwareSpec) -> dict[str, Any]:
    """All engine flags, with the defaults of `vllm serve` on this hardware.

    Those of release `vllm_version`, where memory and batch sizes are concerned; scheduling is
    0.32's.
    """
    version = parse_version(flags.vllm_version) if flags.vllm_version else LATEST
    world = (flags.tensor_parallel_size or 1) * (flags.pipeline_parallel_size or 1)
    longest = flags.max_model_len or model.max_position_embeddings
    v0 = on_v0(version, hardware, flags)
    if hardware.kind == "gpu":
        tokens, seqs = batch_defaults(
            version,
            hardware.memory_bytes,
            hardware.name,
            longest,
            v0,
            chunked=flags.enable_chunked_prefill,
            multimodal=model.vision_parameters > 0,
        )
    else:
        tokens, seqs = _batch_defaults(hardware, world)
    config = drafts_of(flags)
    chosen = {key: value for key, value in flags.model_dump().items() if value is not None}
    chosen["speculative_config"] = None if config is None else config.model_dump(exclude_none=True)
    engine: dict[str, Any] = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "block_size": max(hardware.default_block_size, mla_block_size(model, hardware, version)),
        "vllm_version": str(version),
        "gpu_memory_utilization": default_gpu_memory_utilization(version),
        "max_model_len": model.max_position_embeddings,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": None,
        "boot_log": None,
        "cpu_offload_gb": 0.0,
        "cudagraph_capture_sizes": None,
        "language_model_only": False,
        "estimate_cudagraphs": None,
        "data_parallel_size": 1,
        "vllm_use_v1": None,
        "hf_overrides": None,
        "generation_config": default_generation_config(version),
        "kv": "paged",
        "kv_reserve": 1.0,
        "enable_prefix_caching": model.linear is None or version >= HYBRID_PREFIXES_SINCE,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "scheduling_policy": "fcfs",
        "kv_cache_dtype": "auto",
        "quantization": model.quantization.method if model.quantization else None,
        "dtype": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enforce_eager": hardware.kind != "gpu",
        "async_scheduling": (
            hardware.kind == "gpu"
            and (flags.pipeline_parallel_size or 1) == 1
            and version >= ASYNC_SINCE
            and (config is None or schedules_ahead(config))
        ),
        "batching": "continuous",
        "batch_wait_s": 0.05,
        "preemption_mode": "recompute",
        "swap_space": 4.0,
        "adaptive": None,
        "watermark": 0.0,
        "scheduler_reserve_full_isl": True,
    } | chosen
    if engine["batching"] == "static":
        # A static batch has no use for these; asked for, they are a contradiction.
        for key in ("enable_prefix_caching", "async_scheduling"):
            if getattr(flags, key):
                raise InputError(f"engine.{key}: true does not go with batching: static")
            engine[key] = False
    if engine["batching"] != "continuous":
        engine["enable_chunked_prefill"] = False
    if engine["kv"] == "contiguous":
        if flags.enable_prefix_caching:
            raise InputError("engine.enable_prefix_caching: true does not go with kv: contiguous")
        engine["enable_prefix_caching"] = False
    elif flags.kv_reserve is not None:
        raise InputError("engine.kv_reserve: has a meaning with kv: contiguous alone")
    v1 = hardware.kind == "gpu" and not v0
    if v1 and version < UNCHUNKED_V1_SINCE and engine["batching"] == "continuous":
        engine["enable_chunked_prefill"] = True
    if flags.max_num_batched_tokens is None:
        if not engine["enable_chunked_prefill"] and engine["batching"] == "continuous":
            tokens = max(engine["max_model_len"], tokens)
        if not v1 or version >= BUDGET_BOUNDED_SINCE:
            tokens = min(engine["max_num_seqs"] * engine["max_model_len"], tokens)
        engine["max_num_batched_tokens"] = tokens
    if flags.max_num_seqs is None:
        engine["max_num_seqs"] = min(seqs, engine["max_num_batched_tokens"])
    _check(engine, model)
    if config is not None:
        _check_drafts(config, engine)
    return engine


def on_v0(version: Version, hardware: HardwareSpec, flags: Engine) -> bool:
    """Whether that release serves with its old engine."""
    return runs_v0(
        version,
        hardware.compute_capability,
        flags.vllm_use_v1,
        kv_cache_dtype=flags.kv_cache_dtype or "auto",
        scheduling_policy=flags.scheduling_policy or "fcfs",
        dtype=flags.dtype or "auto",
    )


#: Compute capability that vLLM asks for (platforms/cuda.py, `check_if_supports_dtype`;
#: `get_min_capability` of the quantisation methods, 0.32).
LEAST_CAPABILITY = {"bfloat16": 8.0, "fp8": 7.5, "awq": 7.5}


def check_device(engine: Mapping[str, Any], hardware: HardwareSpec) -> None:
    """Raises InputError for number formats that vLLM refuses on a device."""
    for key in ("dtype", "quantization"):
        least = LEAST_CAPABILITY.get(str(engine[key]), 0.0)
        if 0 < hardware.compute_capability < least:
            raise InputError(
                f"engine.{key}: {engine[key]} needs compute capability {least:g}, "
                f"{hardware.name} has {hardware.compute_capability:g}"
            )


def _batch_defaults(hardware: HardwareSpec, world: int) -> tuple[int, int]:
    if hardware.kind == "cpu":
        return CPU[0] * world, CPU[1] * world
    return TPU.get(hardware.name, OTHER)


def _check(engine: dict[str, Any], model: ModelSpec) -> None:
    tokens, seqs = engine["max_num_batched_tokens"], engine["max_num_seqs"]
    if tokens < seqs:
        raise InputError(f"engine.max_num_batched_tokens: {tokens} is below max_num_seqs ({seqs})")
    chunked = engine["enable_chunked_prefill"] or engine["batching"] != "continuous"
    if not chunked and tokens < engine["max_model_len"]:
        raise InputError(
            f"engine.max_num_batched_tokens: {tokens} is below max_model_len "
            f"({engine['max_model_len']}) and enable_chunked_prefill is false"
        )
    longest = model.max_position_embeddings
    if engine["max_model_len"] > longest:
        raise InputError(
            f"engine.max_model_len: {engine['max_model_len']} is above the "
            f"{longest} positions of {model.name}"
        )


def _check_drafts(config: SpeculativeConfig, engine: Mapping[str, Any]) -> None:
    key = "engine.speculative_config"
    if engine["pipeline_parallel_size"] > 1:
        raise InputError(
            f"{key}: not with pipeline_parallel_size {engine['pipeline_parallel_size']}"
        )
    if engine["batching"] != "continuous":
        raise InputError(f"{key}: not with batching: {engine['batching']}")
    if engine["async_scheduling"] and not schedules_ahead(config):
        told = config.drafting_method if config.draft_device is None else "a draft_device"
        raise InputError(f"engine.async_scheduling: true does not go with {told}")
    # A draft model takes a slot beside a request's own tokens.
    if engine["max_num_batched_tokens"] <= most_tokens(config) + 1:
        raise InputError(
            f"{key}: {most_tokens(config)} drafts do not fit max_num_batched_tokens "
            f"({engine['max_num_batched_tokens']})"
        )
