"""vLLM's start-up log: what it says about memory, whatever the release and whoever prefixed it.

Lines are searched, not matched: they come with process names, colours, container prefixes and
broken ends, and not all from one start. Of figures that every rank prints the engine goes by
the one that leaves least room, and so do we. "GB" in these lines is 2^30 bytes.

The wordings are those of vLLM 0.6.0 to 0.32.0 (docs/memory.md).
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path

from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_layout import CONCURRENCY_TOKENS_SINCE, KvLayout
from servecast.costmodels.memory import GIB, EngineMemory
from servecast.costmodels.reading import read_lenient
from servecast.costmodels.versions import LATEST, OLDEST, Version, parse_version

MAX_BYTES = 200_000_000

#: Colours, and what is left of them where the escape character was lost.
COLOUR = re.compile(r"\x1b\[[0-9;]*m|(?<![\w.])#?\[[01];\d\dm|\[0;0m|#033\[[0-9;]*m")

SIZE = r"(-?\d[\d,]*(?:\.\d+)?)"

WEIGHTS_TOOK = rf"odel (?:loading|weights) took {SIZE} Gi?B\b"
GRAPHS_TOOK = rf"(?<!Encoder )[gG]raph capturing finished in [^\n]{{1,40}}, took {SIZE} GiB"

#: Fields that state memory, or that it was too little.
FIGURES = (
    *("weights_gib", "activation_gib", "graph_gib", "graph_estimate_gib", "other_gib", "kv_gib"),
    *("free_gib", "total_gib", "blocks", "tokens", "max_concurrency", "failure"),
)

#: A start begins; what came before belongs to another.
BEGINS = re.compile(r"Initializing an? (?:V[01] )?LLM engine \(v")

#: It is done; errors from here on are those of serving.
DONE = re.compile(r"Application startup complete|init engine \(profile")


@dataclass(frozen=True)
class BootLog:
    """What one start logged; None where it did not say.

    Attributes
    ----------
    weights_gib, activation_gib, graph_gib, other_gib, kv_gib : as vLLM counts them; other is
        its non-torch memory
    graph_estimate_gib : what was, or would be, taken off the KV pool
    free_gib, total_gib : of the device, before vLLM loaded anything
    blocks : num_gpu_blocks
    tokens, max_concurrency : of the KV pool as printed
    failure : the line that says why it did not start
    """

    version: Version | None = None
    v0: bool = False
    model: str | None = None
    weights_gib: float | None = None
    activation_gib: float | None = None
    graph_gib: float | None = None
    graph_estimate_gib: float | None = None
    other_gib: float | None = None
    kv_gib: float | None = None
    free_gib: float | None = None
    total_gib: float | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    dtype: str | None = None
    blocks: int | None = None
    tokens: int | None = None
    max_concurrency: float | None = None
    failure: str | None = None

    @property
    def says_something(self) -> bool:
        """Any figure about memory, or a failure."""
        return any(
            getattr(self, field.name) is not None for field in fields(self) if field.name in FIGURES
        )

    def pool_blocks(self, engine: EngineMemory, layout: KvLayout) -> int:
        """vLLM's num_gpu_blocks: as logged, or from the tokens or the GiB that were.

        Raises InputError where the log does not say, or says that the engine did not start.
        """
        if self.failure is not None:
            raise InputError(f"the engine of the log did not start: {self.failure}")
        if self.blocks is not None:
            return self.blocks
        version = self.version or engine.version
        if self.tokens is not None and version < CONCURRENCY_TOKENS_SINCE:
            return self.tokens * len(layout.groups) // layout.block_size
        if self.max_concurrency is not None and self.tokens is not None:
            length = self.max_model_len or engine.max_model_len or 0
            if length:
                return round(self.tokens / length * layout.request_blocks(length))
        if self.kv_gib is not None:
            return max(0, int(self.kv_gib * GIB // layout.block_bytes))
        raise InputError("the log states no KV blocks, tokens or memory")


def read_boot_log(path: Path) -> BootLog:
    """Read the last start of a log file.

    Raises InputError for a file that cannot be read, is too large, or says nothing about memory.
    """
    log = parse_boot_log(read_lenient(path, MAX_BYTES))
    if not log.says_something:
        raise InputError(f"{path}: no line of a vLLM start-up that states memory")
    return log


def parse_boot_log(text: str) -> BootLog:
    """The figures of the last start in a text; never raises."""
    text = COLOUR.sub("", text.replace("\r", ""))
    begins = [found.start() for found in BEGINS.finditer(text)]
    # Arguments are printed before the engine begins.
    head = text[: begins[-1]] if begins else text
    body = text[begins[-1] :] if begins else text
    v0 = bool(re.search(r"Initializing an? (?:V0 )?LLM engine", body)) and "V1 LLM" not in body
    v0 = v0 or bool(re.search(r"worker\.py:\d+\] model weights take", body))
    facts: dict[str, object] = {"version": _version(head, body), "v0": v0}
    facts["model"] = (
        _text(head, body, r"\bmodel=['\"]([^'\"\s]{1,300})['\"]")
        or _text(head, body, r"'model(?:_tag)?': '([^'\s]{1,300})'")
        or _text(head, body, r"\bmodel {2,8}(\S{1,300})")
    )
    facts["weights_gib"] = _most(body, WEIGHTS_TOOK)
    facts |= _profile(body)
    for pattern in (
        rf"reserved {SIZE} ?GiB memory for KV Cache as specified",
        rf"Available KV cache memory: {SIZE} GiB",
        rf"[sS]et \({SIZE}/[\d.]+\) GiB for KV cache",
        rf"available KV cache memory \({SIZE} Gi?B\)",
    ):
        available = _least(body, pattern)
        if available is not None:
            facts["kv_gib"] = available
            break
    facts["graph_gib"] = _most(body, GRAPHS_TOOK)
    pool = _most(body, rf"CUDA graph pool memory: {SIZE} GiB \(actual\)")
    facts["graph_gib"] = pool if pool is not None else facts["graph_gib"]
    facts["graph_estimate_gib"] = _most(body, rf"Estimated CUDA graph memory: {SIZE} GiB")
    facts["blocks"] = _blocks(body)
    facts["tokens"] = _whole(_least(body, rf"KV cache size: {SIZE} tokens"))
    concurrency = rf"Maximum concurrency for [\d,]+ tokens per request: {SIZE}x"
    facts["max_concurrency"] = _least(body, concurrency)
    facts |= _flags(head, body)
    done = DONE.search(body)
    facts["failure"] = _failure(body[: done.start()] if done else body)
    return BootLog(**{key: value for key, value in facts.items() if value is not None})  # type: ignore[arg-type]


def _version(head: str, body: str) -> Version | None:
    for text in (body, head):
        for pattern in (
            r"LLM engine \(v([^)\s]{1,60})\)",
            r"vLLM API server version (\S{1,60})",
            r"vLLM server version ([^\s,]{1,60})",
            r"version (\d+\.\d+\.\d+\S{0,40})",
        ):
            for found in re.finditer(pattern, text):
                try:
                    version = parse_version(found[1])
                except InputError:
                    continue
                if OLDEST <= version <= Version(LATEST.major, LATEST.minor + 50):
                    return version
    return None


def _profile(body: str) -> dict[str, object]:
    """The profile run, in the words of V0 and of V1's two kinds of debug lines."""
    facts: dict[str, object] = {}
    if re.search(r"model weights take", body):
        facts["weights_gib"] = _most(body, rf"model weights take\s+{SIZE}GiB")
        facts["other_gib"] = _most(body, rf"non_torch_memory(?: takes)?\s+{SIZE}GiB")
        facts["activation_gib"] = _most(body, rf"activation peak memory(?: takes)?\s+{SIZE}GiB")
        facts["kv_gib"] = _least(body, rf"reserved for KV Cache is\s+{SIZE}GiB")
        facts["total_gib"] = _least(body, rf"total_gpu_memory \({SIZE}GiB\)")
        facts["gpu_memory_utilization"] = _least(body, rf"gpu_memory_utilization \({SIZE}\)")
    elif re.search(r"Memory profiling results:", body):
        facts["other_gib"] = _most(body, rf"non_torch_memory[=\s]+{SIZE}GiB")
        facts["total_gib"] = _least(body, rf"total_gpu_memory[=\s]+{SIZE}GiB")
        facts["kv_gib"] = _least(
            body, rf"(?:kv_cache_size|available_kv_cache_memory)[=\s]+{SIZE}GiB"
        )
        facts["gpu_memory_utilization"] = _least(body, rf"gpu_memory_utilization[=\s]+{SIZE}")
        peak = _most(body, rf"peak_torch_memory[=\s]+{SIZE}GiB")
        weights = _most(body, rf"odel weights took {SIZE} Gi?B\b")
        if peak is not None and weights is not None:
            # The peak includes the weights in these releases.
            facts["activation_gib"] = round(peak - weights, 4)
    facts |= _profile_v1(body)
    return {key: value for key, value in facts.items() if value is not None}


def _profile_v1(body: str) -> dict[str, object]:
    facts: dict[str, object] = {
        "activation_gib": _most(body, rf"torch peak memory increase: {SIZE} ?GiB"),
        "other_gib": _most(body, rf"non-torch forward increase memory: {SIZE} ?GiB"),
        "weights_gib": _most(body, rf"weights memory: {SIZE} ?GiB"),
        "free_gib": _least(body, rf"Initial free memory:? {SIZE} GiB[;,]"),
    }
    used = re.search(
        rf"Free memory on device (?:\S+ )?\({SIZE}/{SIZE} GiB\) on startup\. "
        rf"Desired GPU memory utilization is \({SIZE}, {SIZE} GiB\)\.",
        body,
    )
    if used is not None:
        facts["free_gib"], facts["total_gib"] = _size(used[1]), _size(used[2])
        facts["gpu_memory_utilization"] = _size(used[3])
    elif (
        short := re.search(rf"Free memory on device [^(\n]*\({SIZE}/{SIZE} GiB\)", body)
    ) is not None:
        facts["free_gib"], facts["total_gib"] = _size(short[1]), _size(short[2])
    parts = re.search(
        rf"Actual usage is {SIZE} GiB for weight, {SIZE} GiB for peak activation, "
        rf"{SIZE} GiB for non-torch memory",
        body,
    )
    if parts is not None:
        facts["weights_gib"] = _size(parts[1])
        facts["activation_gib"] = facts["activation_gib"] or _size(parts[2])
        facts["other_gib"] = facts["other_gib"] or _size(parts[3])
    facts |= _together(body, facts)
    return {key: value for key, value in facts.items() if value is not None}


def _together(body: str, facts: dict[str, object]) -> dict[str, object]:
    """0.27 and on count weights and non-torch memory as one, and the estimate of the graphs in
    what they call the activation's peak."""
    found: dict[str, object] = {}
    weights = facts["weights_gib"] or _most(body, WEIGHTS_TOOK)
    parts = re.search(
        rf"Actual usage is {SIZE} GiB for consumed memory \(weights \+ non-torch\), "
        rf"{SIZE} GiB for peak activation",
        body,
    )
    consumed = _most(body, rf"total consumed \(from mem_get_info\): {SIZE} ?GiB")
    if parts is not None:
        consumed = consumed if consumed is not None else _size(parts[1])
        estimate = _most(body, rf"Estimated CUDA graph memory: {SIZE} GiB")
        peak = _size(parts[2])
        if facts["activation_gib"] is None and peak is not None and estimate is not None:
            found["activation_gib"] = round(peak - estimate, 4)
    if consumed is not None and isinstance(weights, float):
        found["other_gib"] = round(consumed - weights, 4)
    return found


def _blocks(body: str) -> int | None:
    """num_gpu_blocks; the small pool that graphs are profiled in is not it."""
    for pattern in (
        rf"num_gpu_blocks is: {SIZE}(?!\d)",
        # What follows the comma is swap space in host memory.
        rf"(?<!, )# [A-Za-z/]{{2,10}} blocks: {SIZE}",
    ):
        found = _least(body, pattern)
        if found is not None:
            return _whole(found)
    override = re.search(
        r"Overriding num_gpu_blocks=([1-9]\d*) with num_gpu_blocks_override=(\d+)", body
    )
    return int(override[2]) if override else None


def _flags(head: str, body: str) -> dict[str, object]:
    both = head + body
    facts: dict[str, object] = {
        "max_num_batched_tokens": _whole(
            _last(both, rf"max_num_batched_tokens(?:=| to |': ){SIZE}")
        ),
        "max_num_seqs": _whole(_last(both, rf"max_num_seqs(?:=| to |': ){SIZE}")),
        "block_size": _whole(_last(both, rf"attention block size to {SIZE} tokens")),
        "tensor_parallel_size": _whole(_last(both, rf"tensor_parallel_size(?:=|': ){SIZE}")),
        "pipeline_parallel_size": _whole(_last(both, rf"pipeline_parallel_size(?:=|': ){SIZE}")),
    }
    for flag in ("enforce_eager", "enable_prefix_caching"):
        switch = re.findall(rf"\b{flag}(?:=|': )(True|False)", both)
        facts[flag] = switch[-1] == "True" if switch else None
    for flag in ("kv_cache_dtype", "quantization", "dtype"):
        # As the engine's config has it, where the model's own choice shows too.
        words = re.findall(rf"\b{flag}(?:=|': )['\"]?(?:torch\.)?([\w-]{{2,40}})\b", both)
        facts[flag] = words[-1] if words and words[-1] not in ("None", "auto") else None
    for pattern in (
        rf"Maximum concurrency for {SIZE} tokens per request",
        rf"Auto-fit max_model_len: reduced from [\d,]+ to {SIZE}",
        rf"max_seq_len={SIZE}",
        rf"Using max model len {SIZE}",
        rf"'max_model_len': {SIZE}",
    ):
        length = _whole(_last(both, pattern))
        if length:
            facts["max_model_len"] = length
            break
    for pattern in (
        rf"current --gpu-memory-utilization={SIZE}",
        rf"--gpu-memory-utilization from {SIZE} to",
        rf"Requested memory: {SIZE} \(util\)",
        rf"'gpu_memory_utilization': {SIZE}",
        rf"gpu_memory_utilization={SIZE}",
    ):
        share = _last(both, pattern)
        if share is not None and 0 < share <= 1:
            facts["gpu_memory_utilization"] = share
            break
    return {key: value for key, value in facts.items() if value is not None}


#: How a start ends badly, the telling part first.
FAILURES = (
    r"To serve at least one request with the models?'?s max seq len[^\n]{0,300}",
    r"The model's max seq len \([^\n]{0,200}",
    r"No available memory for the cache blocks",
    r"Free memory on device [^\n]{0,120} is less than desired GPU memory utilization",
    r"CUDA out of memory occurred when warming up sampler[^\n]{0,120}",
    r"CUDA out of memory\.[^\n]{0,120}",
    r"User-specified max_model_len \(\d+\) is greater than[^\n]{0,80}",
    r"Failed to load model - not enough GPU memory",
    r"Cannot auto-fit max_model_len[^\n]{0,80}",
)


def _failure(body: str) -> str | None:
    for pattern in FAILURES:
        found = re.search(pattern, body)
        if found is not None:
            return " ".join(found[0].split())[:300]
    return None


def _values(text: str, pattern: str) -> list[float]:
    found = (_size(match) for match in re.findall(pattern, text))
    return [value for value in found if value is not None]


def _size(text: str) -> float | None:
    """A number with its thousands separators; None for digits that are no figure."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < 1e15 else None


def _most(text: str, pattern: str) -> float | None:
    return max(_values(text, pattern), default=None)


def _least(text: str, pattern: str) -> float | None:
    return min(_values(text, pattern), default=None)


def _last(text: str, pattern: str) -> float | None:
    values = _values(text, pattern)
    return values[-1] if values else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _text(head: str, body: str, pattern: str) -> str | None:
    found = re.search(pattern, body) or re.search(pattern, head)
    return found[1] if found else None
