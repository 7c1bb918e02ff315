"""What changed from version to version of vLLM, where start-up memory depends on it.

A release is placed by its number; what a deployment does not say is taken as `LATEST`. Each
rule names the release at which vLLM's code changed and how we know.
"""

import re
from typing import NamedTuple

from servecast.costmodels.errors import InputError


class Version(NamedTuple):
    """A release of vLLM; some have a fourth number (0.10.1.1)."""

    major: int
    minor: int
    patch: int = 0
    fix: int = 0

    def __str__(self) -> str:
        release = f"{self.major}.{self.minor}.{self.patch}"
        return f"{release}.{self.fix}" if self.fix else release


LATEST = Version(0, 32)

#: The oldest release whose start-up is described.
OLDEST = Version(0, 6)


def parse_version(text: str) -> Version:
    """A version out of `0.19.0`, `v0.8.5.post1`, `0.20.1rc1.dev16` or `~0.22 nightly`.

    Raises InputError where there is none, or one before 0.6.
    """
    found = re.search(
        r"(?<![\d.])v?(\d{1,2})\.(\d{1,3})(?:\.(\d{1,3})(?:\.(\d{1,2})(?![\w.+]))?)?", text
    )
    if found is None:
        raise InputError(f"vllm_version: {text!r}: expected a release such as {LATEST}")
    version = Version(*(int(number or 0) for number in found.groups()))
    if version < OLDEST:
        raise InputError(f"vllm_version: {text!r}: known from {OLDEST} on")
    if version[:2] > LATEST[:2]:
        raise InputError(f"vllm_version: {text!r}: known up to {LATEST.major}.{LATEST.minor}")
    return version


#: gpu_memory_utilization went from 0.9 to 0.92, and the estimate of CUDA graphs came off the KV
#: pool by default, in this release (config/cache.py and envs.py of 0.19.0 and 0.20.0; the log
#: says "since v0.21.0").
GRAPHS_DEDUCTED_SINCE = Version(0, 20)

#: V1 is the default engine from 0.8, on GPUs of compute capability 8 and up; V0 is gone in 0.11.
V1_SINCE = Version(0, 8)
V1_ALONE_SINCE = Version(0, 11)
V1_COMPUTE_CAPABILITY = 8.0
V1_FP8_KV_CAPABILITY = 9.0
V1_ALL_DTYPES_SINCE = Version(0, 9, 2)

#: V1 bounds the default token budget by max_num_seqs x max_model_len from this release; V0 always.
BUDGET_BOUNDED_SINCE = Version(0, 11, 1)

#: Before this release V1 chunked prompts whatever was asked.
UNCHUNKED_V1_SINCE = Version(0, 10, 2)

#: Hybrid models (attention and recurrent state) cache prefixes by default from this release.
HYBRID_PREFIXES_SINCE = Version(0, 28)


#: top-k and top-p are sorted, but in these releases (from, before): by FlashInfer where it is
#: installed, as in the official image; by a Triton kernel; and by FlashInfer
#: (v1/sample/ops/topk_topp_sampler.py, envs.py and docker/Dockerfile of 0.8.5 to 0.32.0).
FLASHINFER_IN_IMAGE = Version(0, 9), Version(0, 11, 1)
TRITON_SAMPLER_SINCE = Version(0, 17)
FLASHINFER_SAMPLER_SINCE = Version(0, 21)

#: A model's generation_config.json says how tokens are sampled, where a request does not, from this
#: release (`generation_config` of engine/arg_utils.py, 0.7.3 and 0.8.0).
GENERATION_CONFIG_SINCE = Version(0, 8)

#: The next step is planned while the device computes this one, by default, from this release.
ASYNC_SINCE = Version(0, 14)


def default_gpu_memory_utilization(version: Version = LATEST) -> float:
    """vLLM's default."""
    return 0.92 if version >= GRAPHS_DEDUCTED_SINCE else 0.9


def runs_v0(
    version: Version,
    compute_capability: float,
    use_v1: bool | None = None,
    *,
    kv_cache_dtype: str = "auto",
    scheduling_policy: str = "fcfs",
    dtype: str = "auto",
) -> bool:
    """The engine before V1 runs: by release and GPU, as VLLM_USE_V1 asks, or because of a flag
    that V1 did not know yet (engine/arg_utils.py, `_is_v1_supported_oracle`, 0.8.1 to 0.10.2).

    `compute_capability` is 0 where there is no such number.
    """
    if version >= V1_ALONE_SINCE:
        return False
    if use_v1 is not None:
        return not use_v1
    if version >= V1_SINCE and compute_capability:
        # FlashAttention 3, Hopper's, was the first backend with fp8 KV.
        kv = kv_cache_dtype != "auto" and compute_capability < V1_FP8_KV_CAPABILITY
        early = version < V1_ALL_DTYPES_SINCE
        if kv or (early and (scheduling_policy != "fcfs" or dtype == "float32")):
            return True
    return version < V1_SINCE or 0 < compute_capability < V1_COMPUTE_CAPABILITY


def batch_defaults(
    version: Version,
    memory_bytes: int,
    device: str,
    max_model_len: int,
    v0: bool = False,
    *,
    chunked: bool | None = None,
    multimodal: bool = False,
) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of `vllm serve` on a GPU, chunked prefill on.

    From engine/arg_utils.py of the releases (0.6.0 to 0.32.0). `device` is the catalogue's
    name: some releases went by it. V0 computed prompts whole up to 32K, in one step of
    `max_model_len` tokens, unless asked to chunk them (`chunked`), and those of multimodal models
    always.
    """
    gib = memory_bytes / 2**30
    large = device.startswith(("h100", "h200"))
    if v0:
        if chunked is None:
            chunked = max_model_len > 32_768 and not multimodal
        if chunked:
            return (2048 if version >= Version(0, 6, 5) else 512), 256
        return max(max_model_len, 5120 if multimodal else 2048), 256
    if version < Version(0, 8, 4):
        return (8192 if large else 2048), 1024
    if version < Version(0, 8, 5):
        return (8192, 1024) if large else (2048, 256)
    if version < Version(0, 9):
        return (8192, 1024) if gib >= 70 else (2048, 256)
    if version >= Version(0, 28) and gib >= 160:
        return 16_384, 1024
    return (8192, 1024) if gib >= 70 and not device.startswith("a100") else (2048, 256)
