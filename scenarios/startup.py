"""`servecast kv`: will it start, and how many KV blocks will there be; if not, what would help."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.memory import GIB, Z90, MemoryPlan
from servecast.costmodels.quantization import USUAL
from servecast.scenarios.bootlog import BootLog
from servecast.scenarios.build import Setup

#: Splits that a fix tries, smallest first: inside a node, and over two where nothing else helps.
TENSOR_SIZES = (2, 4, 8)
TWO_NODES = (16,)

#: Room below this after the start is told: capture and warm-up ask for more than they keep.
TIGHT_BYTES = 2 * GIB

#: Changes in pairs are tried where none alone is enough, and as many are given.
MOST_PAIRS = 3

#: Compute capability from which a device has kernels: fp8 KV and weights (weights unpacked
#: before Ada), AWQ.
FP8_SINCE = 8.0
AWQ_SINCE = 7.5

#: Methods that no engine applies by itself.
CHECKPOINT_METHODS = ("awq",)

PARTS = {
    "weights": "weights",
    "activation": "activation peak",
    "graph": "CUDA graphs",
    "other": "non-torch memory",
    "total": "the device's memory",
}


@dataclass(frozen=True)
class Change:
    """Flags that were set otherwise, the set-up that this makes, and its start."""

    flags: Mapping[str, Any]
    setup: Setup
    plan: MemoryPlan


def start_up(
    setup: Setup,
    log: BootLog | None = None,
    told: Sequence[str] = (),
    *,
    shortens: bool = False,
) -> dict[str, Any]:
    """The predicted start as plain values, sizes in GiB of one device.

    Keys `starts`, `weights_gib`, `activation_gib`, `graph_gib`, `other_gib`, `kv_gib`,
    `kv_blocks` (vLLM's num_gpu_blocks), `kv_tokens`, `request_gib` (one request of
    max_model_len), `max_concurrency`, `interval` (90 %), `least_sure`, `fixes` and `notes`, of
    which `told` are some; with a log also `logged` and what differs. `shortens` : max_model_len
    is cut to what fits, so no interval can make it too long.
    """
    plan = setup.plan
    low, high = plan.tokens_interval
    block_bytes = plan.layout.block_bytes
    answer: dict[str, Any] = {
        "model": setup.model.name,
        "hardware": setup.hardware.name,
        "devices": setup.devices,
        "vllm_version": str(setup.memory.version),
        "starts": plan.fits,
        "total_gib": _gib(plan.total_bytes),
        "budget_gib": _gib(plan.budget_bytes),
        "weights_gib": _gib(plan.weights_bytes),
        "activation_gib": _gib(plan.activation_bytes),
        "graph_gib": _gib(plan.graph_bytes),
        "graph_deducted": setup.memory.deducts_graphs,
        "other_gib": _gib(plan.other_bytes),
        "kv_gib": _gib(plan.kv_bytes),
        "kv_blocks": plan.num_gpu_blocks,
        "block_size": plan.block_size,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_tokens": plan.tokens,
        "max_model_len": plan.max_model_len,
        "request_gib": _gib(plan.layout.request_blocks(plan.max_model_len) * block_bytes),
        "max_concurrency": round(plan.max_concurrency, 2),
        "interval": {
            "kv_tokens": [low, high],
            "kv_gib": [_gib(size) for size in plan.kv_interval],
            **{
                f"{name}_gib": _around(plan, name)
                for name in ("weights", "activation", "graph", "other")
            },
        },
        "least_sure": PARTS[plan.doubt.least_sure],
        "reason": None if plan.fits else plan.explain(),
        "estimated_max_model_len": plan.longest_tokens,
        "fixes": [] if plan.fits else fixes(setup),
        "notes": [*_notes(setup, plan, shortens), *told],
    }
    if log is not None:
        answer["logged"] = logged(log)
        answer["notes"] += _differences(setup, log)
    return answer


def _around(plan: MemoryPlan, name: str) -> list[float]:
    size: int = getattr(plan, f"{name}_bytes")
    doubt: float = getattr(plan.doubt, f"{name}_bytes")
    return [_gib(max(0.0, size - Z90 * doubt)), _gib(size + Z90 * doubt)]


def _gib(size: float) -> float:
    return round(size / GIB, 3)


def fixes(setup: Setup) -> list[dict[str, Any]]:
    """The smallest changes that would make it start, each with its result.

    One flag at a time; where none is enough, pairs.
    """
    found = list(_single(setup))
    if not found:
        for change in _large(setup):
            for second in _single(change.setup):
                pair = {**change.flags, **second.flags}
                if len(pair) == 2 and all(pair != other.flags for other in found):
                    found.append(Change(pair, second.setup, second.plan))
                    break
            if len(found) == MOST_PAIRS:
                break
    if not found:
        found = list(_first(_split(setup, TWO_NODES)))
    return [_result(change) for change in found]


def _result(change: Change) -> dict[str, Any]:
    plan = change.plan
    return {
        "change": dict(change.flags),
        "kv_gib": _gib(plan.kv_bytes),
        "kv_tokens": plan.tokens,
        "max_model_len": plan.max_model_len,
        "max_concurrency": round(plan.max_concurrency, 2),
        "needs": (
            f"a checkpoint quantised with {change.flags['quantization']}"
            if change.flags.get("quantization") in CHECKPOINT_METHODS
            else None
        ),
    }


def _single(setup: Setup) -> Iterator[Change]:
    """Changes of one flag that make it start, the smallest of each kind."""
    memory, plan = setup.memory, setup.plan
    share = memory.gpu_memory_utilization
    most = int(100 * plan.free_bytes / plan.total_bytes)
    shares = range(round(100 * share) + 1, most + 1)
    if plan.refused_bytes > 0:
        shares = range(most, most - 5, -1)
    yield from _first(_changes(setup, "gpu_memory_utilization", (s / 100 for s in shares)))
    if memory.kv_cache_memory_bytes is not None:
        needed = plan.layout.request_blocks(plan.max_model_len) * plan.layout.block_bytes
        smaller = max(0, memory.kv_cache_memory_bytes - plan.shortfall_bytes)
        enough = -(-int(needed) // GIB) * GIB
        sizes = [enough, enough + GIB, smaller // GIB * GIB]
        yield from _first(_changes(setup, "kv_cache_memory_bytes", sizes))
    if memory.num_gpu_blocks_override is not None:
        yield from _first(_changes(setup, "num_gpu_blocks_override", [None]))
    if 0 < plan.longest_tokens < plan.max_model_len:
        yield from _first(_changes(setup, "max_model_len", [plan.longest_tokens]))
    seqs, tokens = memory.max_num_seqs, memory.max_num_batched_tokens
    yield from _first(_changes(setup, "max_num_seqs", _halves(seqs, 1)))
    yield from _first(_changes(setup, "max_num_batched_tokens", _halves(tokens, max(256, seqs))))
    if not memory.enforce_eager:
        yield from _first(_changes(setup, "enforce_eager", [True]))
    if memory.kv.bits >= 16 and setup.hardware.compute_capability >= FP8_SINCE:
        yield from _first(_changes(setup, "kv_cache_dtype", ["fp8"]))
    yield from _first(_split(setup))
    yield from _first(_quantised(setup))


def _first(changes: Iterator[Change]) -> Iterator[Change]:
    """The first that starts, if any does."""
    for change in changes:
        if change.plan.fits:
            yield change
            return


def _changes(setup: Setup, flag: str, values: Iterable[Any]) -> Iterator[Change]:
    """A flag set to each value that vLLM would take."""
    for value in values:
        try:
            changed = setup.changed(**{flag: value})
            change = Change({flag: value}, changed, changed.plan)
        except InputError:
            continue
        yield change


def _halves(size: int, least: int) -> Iterator[int]:
    """Powers of two below a size, largest first."""
    half = 1 << max(0, (size - 1).bit_length() - 1)
    while half >= least:
        yield half
        half //= 2


def _split(setup: Setup, sizes: tuple[int, ...] = TENSOR_SIZES) -> Iterator[Change]:
    """Over more devices, where the model's heads allow it."""
    more = (ranks for ranks in sizes if ranks > setup.memory.tensor)
    return _changes(setup, "tensor_parallel_size", more)


def _quantised(setup: Setup) -> Iterator[Change]:
    """As a checkpoint of fewer bits, or quantised while it is loaded, which is fp8 alone."""
    if setup.model.quantization is not None:
        return
    methods = {"fp8": FP8_SINCE, "awq": AWQ_SINCE}
    able = [name for name, since in methods.items() if setup.hardware.compute_capability >= since]
    yield from _changes(setup, "quantization", able)


def _large(setup: Setup) -> Iterator[Change]:
    """Changes that help much, from which a second may go on."""
    plan = setup.plan
    if plan.refused_bytes > 0:
        most = int(100 * plan.free_bytes / plan.total_bytes) / 100
        yield from _changes(setup, "gpu_memory_utilization", [most])
    yield from _quantised(setup)
    yield from _split(setup)


def _notes(setup: Setup, plan: MemoryPlan, shortens: bool) -> Iterator[str]:
    model, memory = setup.model, setup.memory
    if plan.fits and plan.tokens_interval[0] < plan.max_model_len and not shortens:
        yield "the interval reaches below one request of max_model_len: it may not start"
    if plan.fits and setup.placement is None and plan.after_start_bytes < TIGHT_BYTES:
        yield (
            f"{max(0.0, plan.after_start_bytes / GIB):.1f} GiB is left when the largest batch is "
            "sampled: graph capture and warm-up have failed with less than 2"
        )
    if model.vision_parameters and memory.vision:
        size = model.vision_parameters * model.dtype_bytes / GIB
        yield f"the vision tower's {size:.2f} GiB are counted; images are not simulated"
    assumed = model.quantization
    if assumed is not None and any(assumed is usual for usual in USUAL.values()):
        yield (
            f"which layers are {assumed.method} is taken from the usual checkpoint of that kind: "
            "its own config.json would say"
        )
    if not memory.kv.in_vllm:
        yield f"kv_cache_dtype {memory.kv.name}: vLLM has no such format"
    if plan.layout.padding_layers:
        yield f"vLLM adds {plan.layout.padding_layers} padding layers to make its KV groups even"
    if plan.block_size != memory.block_size:
        yield (
            f"vLLM sets the attention block size to {plan.block_size} tokens, so that a block "
            "holds a recurrent state"
        )
    if setup.engine["kv"] == "contiguous":
        yield "kv: contiguous is not vLLM's: the pool is as large, and is given out in whole pieces"
    if setup.engine["data_parallel_size"] > 1 and model.moe is not None:
        yield f"experts are spread over {setup.engine['data_parallel_size']} engines"
    if memory.v0:
        yield "this release runs the V0 engine: memory is counted as it did"


def logged(log: BootLog) -> dict[str, Any]:
    """What the log says, under the answer's names."""
    return {
        "vllm_version": str(log.version) if log.version else None,
        "starts": log.failure is None,
        "failure": log.failure,
        "total_gib": log.total_gib,
        "weights_gib": log.weights_gib,
        "activation_gib": log.activation_gib,
        "graph_gib": log.graph_gib,
        "graph_estimate_gib": log.graph_estimate_gib,
        "other_gib": log.other_gib,
        "kv_gib": log.kv_gib,
        "kv_blocks": log.blocks,
        "kv_tokens": log.tokens,
        "max_concurrency": log.max_concurrency,
    }


def _differences(setup: Setup, log: BootLog) -> list[str]:
    """Flags that the log shows otherwise."""
    memory = setup.memory
    pairs = {
        "max_model_len": (log.max_model_len, memory.max_model_len),
        "gpu_memory_utilization": (log.gpu_memory_utilization, memory.gpu_memory_utilization),
        "max_num_batched_tokens": (log.max_num_batched_tokens, memory.max_num_batched_tokens),
        "max_num_seqs": (log.max_num_seqs, memory.max_num_seqs),
        "tensor_parallel_size": (log.tensor_parallel_size, memory.tensor),
        "pipeline_parallel_size": (log.pipeline_parallel_size, memory.pipeline),
    }
    words = {
        "kv_cache_dtype": (log.kv_cache_dtype, memory.kv.name),
        "quantization": (_method_of(log.quantization), _method_of(_method(setup))),
        "dtype": (log.dtype, setup.model.dtype),
        "enforce_eager": (log.enforce_eager, memory.enforce_eager),
        "enable_prefix_caching": (log.enable_prefix_caching, memory.enable_prefix_caching),
    }
    found = [
        f"the log was made with {name} {theirs}, the prediction is for {ours}"
        for name, (theirs, ours) in words.items()
        if theirs is not None and theirs != ours
    ]
    found += [
        f"the log was made with {name} {theirs:g}, the prediction is for {ours:g}"
        for name, (theirs, ours) in pairs.items()
        if theirs is not None and ours is not None and abs(theirs - ours) > 1e-6
    ]
    if log.model is not None and _last(log.model) != _last(setup.checkpoint.name):
        found.append(f"the log is of {log.model}")
    total = setup.hardware.memory_bytes / GIB
    if log.total_gib is not None and abs(log.total_gib - total) > 0.02:
        found.append(f"the log's device has {log.total_gib:g} GiB, {total:.2f} are assumed")
    return found


def _last(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()


def _method_of(name: str | None) -> str | None:
    """fp8 as compressed-tensors stores it is fp8."""
    return "fp8" if name == "compressed-tensors" else name


def _method(setup: Setup) -> str | None:
    scheme = setup.model.quantization
    return None if scheme is None else scheme.method
