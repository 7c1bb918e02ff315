"""What may stand in a scenario. With `fields.py` and `drafts.py` all that knows pydantic.

Every field says what it means and in which unit; the scenario reference and the JSON schema
are made from these descriptions. A choice is a `kind:` here and one entry in the module that
acts on it. `None` under `engine:` means vLLM's default for the hardware, resolved elsewhere.
"""

from collections import Counter
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import AUTO, named_format
from servecast.costmodels.versions import parse_version
from servecast.scenarios.drafts import Acceptance, SpeculativeConfig
from servecast.scenarios.fields import (
    MAX_TOKENS,
    Count,
    Flag,
    Model,
    Name,
    Pause,
    Rate,
    Real,
    Seconds,
    Tokens,
    fault,
)
from servecast.scenarios.slas import CLAUSE_NAMES, describe, parse_clause


def _known_format(name: str) -> str:
    """A KV format that has a meaning; its error is a ValueError for pydantic to place."""
    if name != AUTO:
        try:
            named_format(name)
        except InputError as error:
            raise ValueError(str(error)) from None
    return name


def _known_version(text: str) -> str:
    try:
        return str(parse_version(text))
    except InputError as error:
        raise ValueError(str(error).removeprefix("vllm_version: ")) from None


KvDtype = Annotated[Name, AfterValidator(_known_format)]
VllmVersion = Annotated[Name, AfterValidator(_known_version)]


class Adaptive(Model):
    """Adaptive control of max_num_batched_tokens: lower when a P95 passes its limit, raised again
    when it is calm."""

    metric: Literal["itl", "ttft"] = Field(
        description="Whose P95 over a window is watched: gaps between tokens, or time to first."
    )
    limit_s: Seconds = Field(description="What the P95 should stay under, seconds.")
    window_s: Seconds = Field(default=10.0, description="Length of a window, seconds.")
    step: Annotated[float, Field(strict=True, gt=0, lt=1)] = Field(
        default=0.25, description="Share by which the budget is changed."
    )
    min_tokens: Tokens = Field(
        default=256, description="The budget goes no lower (nor below max_num_seqs)."
    )


class Engine(Model):
    """vLLM's flags under their own names; a key left out or null takes vLLM's default."""

    max_num_seqs: Count | None = Field(default=None, description="Sequences running at most.")
    max_num_batched_tokens: Tokens | None = Field(
        default=None, description="Tokens of one step at most."
    )
    block_size: Tokens | None = Field(default=None, description="Tokens of one KV cache block.")
    gpu_memory_utilization: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        default=None, description="Share of device memory that vLLM may use, 0 to 1."
    )
    max_model_len: Tokens | None = Field(
        default=None, description="Tokens of prompt and output of one request at most."
    )
    num_gpu_blocks_override: Count | None = Field(
        default=None, description="KV cache blocks of the pool, in place of the memory prediction."
    )
    enable_prefix_caching: Flag | None = Field(
        default=None,
        description="Keep finished blocks and reuse them for prompts that begin alike.",
    )
    enable_chunked_prefill: Flag | None = Field(
        default=None, description="Let a prompt be computed over several steps."
    )
    long_prefill_token_threshold: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        default=None,
        description="Prompt tokens of one request in one step at most; 0 for no limit.",
    )
    scheduling_policy: Literal["fcfs", "priority"] | None = Field(
        default=None,
        description="Order of the waiting queue: first come first served, or priority.",
    )
    kv_cache_dtype: KvDtype | None = Field(
        default=None,
        description="Number format of the KV cache: vLLM's names, or int8, int4, int3 or int2 with "
        "the numbers that share a scale (int4_g64), kivi2, kivi4, kvquant3, kvquant4, for which "
        "vLLM has no kernel.",
    )
    kv_cache_memory_bytes: Annotated[int, Field(strict=True, ge=1, le=2**60)] | None = Field(
        default=None,
        description="KV memory of one device in bytes, in place of what the profile would leave.",
    )
    kv: Literal["paged", "contiguous"] | None = Field(
        default=None,
        description="paged: blocks as they fill; contiguous: a piece of memory for each sequence "
        "when it is admitted, as before paging.",
    )
    kv_reserve: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        default=None,
        description="Share of max_model_len that a contiguous piece holds; 1 when left out.",
    )
    boot_log: Name | None = Field(
        default=None,
        description="Start-up log of the real engine, beside the scenario: its KV pool is taken "
        "for the prediction.",
    )
    cpu_offload_gb: Annotated[float, Field(strict=True, ge=0, le=1e6)] | None = Field(
        default=None, description="Weights kept in host memory, GiB a device (memory only)."
    )
    cudagraph_capture_sizes: tuple[Tokens, ...] | None = Field(
        default=None, description="Batch sizes that get a CUDA graph, ascending."
    )
    language_model_only: Flag | None = Field(
        default=None, description="Leave a multimodal model's vision tower unloaded."
    )
    estimate_cudagraphs: Flag | None = Field(
        default=None,
        description="Take the estimate of CUDA graphs off the KV pool "
        "(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS); the release's default when left out.",
    )
    data_parallel_size: Count | None = Field(
        default=None,
        description="Engines over which a model's experts are spread: memory only; `replicas` "
        "says how many are simulated.",
    )
    vllm_use_v1: Flag | None = Field(
        default=None,
        description="VLLM_USE_V1, for releases before 0.11: count memory as V1 or V0 does.",
    )
    generation_config: Literal["auto", "vllm"] | None = Field(
        default=None,
        description="auto: sampling is that of the model's generation_config.json where requests "
        "do not say; vllm: a temperature of 1. The release's default when left out.",
    )
    hf_overrides: dict[Name, Any] | None = Field(
        default=None, description="Keys of the model's config.json, in place of its own."
    )
    vllm_version: VllmVersion | None = Field(
        default=None,
        description="Release whose start-up memory and default batch sizes hold, such as 0.19.0; "
        "scheduling is that of 0.32.",
    )
    quantization: Name | None = Field(
        default=None, description="Weight quantisation method, such as fp8, awq, gptq or mxfp4."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = Field(
        default=None, description="Number format of weights and activations."
    )
    tensor_parallel_size: Count | None = Field(
        default=None, description="Devices each layer is split over."
    )
    pipeline_parallel_size: Count | None = Field(
        default=None, description="Groups of devices the layers are split over."
    )
    enforce_eager: Flag | None = Field(default=None, description="Run without CUDA graphs.")
    async_scheduling: Flag | None = Field(
        default=None, description="Plan the next step while the device computes this one."
    )
    batching: Literal["continuous", "continuous_unchunked", "static"] | None = Field(
        default=None,
        description="continuous: vLLM's; continuous_unchunked: prompts whole, without a token "
        "budget (Orca); static: fill a batch, run it to its end, return all together.",
    )
    batch_wait_s: Pause | None = Field(
        default=None,
        description="How long a static batch waits to be full, seconds; 0.05 when left out.",
    )
    preemption_mode: Literal["recompute", "swap"] | None = Field(
        default=None,
        description="What becomes of a preempted request's KV: computed again, or kept in host "
        "memory and fetched over the host link.",
    )
    swap_space: Real | None = Field(
        default=None, description="Host memory for swapped KV, GiB a device; 4 when left out."
    )
    speculative_config: SpeculativeConfig | None = Field(
        default=None, description="Speculative decoding; none when left out."
    )
    adaptive: Adaptive | None = Field(
        default=None, description="Adapt max_num_batched_tokens to the latency that is seen."
    )
    watermark: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = Field(
        default=None, description="Share of KV blocks kept free when a request is admitted, 0 to 1."
    )
    scheduler_reserve_full_isl: Flag | None = Field(
        default=None, description="Admit a prompt only if blocks for all of it are free."
    )

    @model_validator(mode="after")
    def _budget_holds_the_batch(self) -> Self:
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and seqs is not None and budget < seqs:
            raise fault(
                "max_num_batched_tokens", f"must be at least max_num_seqs ({seqs}), got {budget}"
            )
        return self


class Stage(Model):
    """A stretch of time with one rate."""

    rate_per_s: Rate = Field(description="Mean arrivals per second.")
    duration_s: Seconds = Field(description="Length of the stage, seconds.")


class _Bounded(Model):
    """An open loop that ends after so many requests or so much time."""

    requests: Count | None = Field(default=None, description="Arrivals in all; or give duration_s.")
    duration_s: Seconds | None = Field(
        default=None, description="Arrivals stop after this time, seconds; or give requests."
    )

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if getattr(self, "stages", None) is None and (
            (self.requests is None) == (self.duration_s is None)
        ):
            raise fault("requests", "give exactly one of requests and duration_s")
        return self


class _Renewal(_Bounded):
    """Independent gaps around one rate, or around a rate that changes by stages."""

    rate_per_s: Rate | None = Field(default=None, description="Mean arrivals per second.")
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=100_000)] | None = Field(
        default=None, description="Rates one after another, in place of rate_per_s and an end."
    )

    @model_validator(mode="after")
    def _rate_or_stages(self) -> Self:
        if self.stages is None and self.rate_per_s is None:
            raise fault("rate_per_s", "required key is missing (or give stages)")
        if self.stages is not None:
            for key in ("rate_per_s", "requests", "duration_s"):
                if getattr(self, key) is not None:
                    raise fault(key, "not together with stages, which set rate and duration")
        return self


class Poisson(_Renewal):
    """Independent users: exponential gaps."""

    kind: Literal["poisson"] = Field(description="Exponential gaps.")


class Gamma(_Renewal):
    """Burstier (cv > 1) or smoother (cv < 1) than Poisson."""

    kind: Literal["gamma"] = Field(description="Gamma-distributed gaps.")
    cv: Annotated[float, Field(strict=True, ge=0.01, le=100)] = Field(
        description="Coefficient of variation of the gaps; 1 is Poisson."
    )


class Constant(_Renewal):
    """Evenly spaced, the first at time 0."""

    kind: Literal["constant"] = Field(description="Equal gaps.")


class OnOff(_Bounded):
    """Poisson arrivals whose rate alternates between two values."""

    kind: Literal["on_off"] = Field(description="A busy and a quiet phase in turn.")
    rate_per_s: Rate = Field(description="Mean arrivals per second while on.")
    off_rate_per_s: Annotated[float, Field(strict=True, ge=0, le=1e6)] = Field(
        default=0.0, description="Mean arrivals per second while off."
    )
    on_s: Seconds = Field(description="Length of the busy phase, which comes first, seconds.")
    off_s: Seconds = Field(description="Length of the quiet phase, seconds.")


class Diurnal(_Bounded):
    """Poisson arrivals whose rate follows a sine over the day."""

    kind: Literal["diurnal"] = Field(description="A rate that swings with the time of day.")
    rate_per_s: Rate = Field(description="Mean arrivals per second over a whole period.")
    amplitude: Annotated[float, Field(strict=True, ge=0, le=1)] = Field(
        default=0.5, description="Swing as a share of the mean rate: peak = rate * (1 + amplitude)."
    )
    period_s: Seconds = Field(default=86_400.0, description="Time from peak to peak, seconds.")
    peak_s: Pause | None = Field(
        default=None, description="When the peak comes, seconds; half a period when left out."
    )


class ClosedLoop(Model):
    """Clients that each wait for their answer before they send again."""

    kind: Literal["closed_loop"] = Field(description="A fixed number of clients.")
    concurrency: Count = Field(description="Clients, each with one request in flight.")
    requests: Count = Field(description="Requests of all clients together.")
    think_time_s: Pause = Field(
        default=0.0,
        description="Time between an answer's end and the client's next request, seconds.",
    )


class Burst(Model):
    """Many requests at one instant."""

    kind: Literal["burst"] = Field(description="Requests that arrive together.")
    requests: Count = Field(description="Requests in all.")
    size: Count | None = Field(
        default=None, description="Requests of one burst; all when left out."
    )
    interval_s: Seconds | None = Field(
        default=None, description="Time from burst to burst, seconds; needed with size."
    )

    @model_validator(mode="after")
    def _size_and_interval(self) -> Self:
        if (self.size is None) != (self.interval_s is None):
            missing = "size" if self.size is None else "interval_s"
            raise fault(missing, "give size and interval_s together")
        return self


TraceFormat = Literal["auto", "azure", "mooncake", "burstgpt", "sharegpt", "requests", "plain"]


class TraceArrivals(Model):
    """A recorded load, with its own lengths and shared prefixes."""

    kind: Literal["trace"] = Field(description="Arrivals read from a file.")
    path: Name = Field(description="CSV or JSONL file, relative to the scenario's folder.")
    format: TraceFormat = Field(
        default="auto", description="Layout of the file; auto: by its content."
    )
    limit: Count | None = Field(default=None, description="Use the first so many requests.")
    rate_scale: Real = Field(default=1.0, description="Speed of replay: 2 halves every gap.")


Arrivals = Annotated[
    Poisson | Gamma | Constant | OnOff | Diurnal | ClosedLoop | Burst | TraceArrivals,
    Field(discriminator="kind"),
]


class FixedLengths(Model):
    """All requests alike."""

    kind: Literal["fixed"] = Field(description="The same lengths for every request.")
    input_tokens: Tokens = Field(description="Prompt tokens, after a shared prefix.")
    output_tokens: Tokens = Field(description="Generated tokens.")


class TokenRange(Model):
    """Whole numbers from min to max, all equally likely."""

    min: Tokens = Field(description="Fewest tokens.")
    max: Tokens = Field(description="Most tokens.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise fault("max", f"must be at least min ({self.min}), got {self.max}")
        return self


class UniformLengths(Model):
    """Prompt and output drawn evenly from ranges, independently."""

    kind: Literal["uniform"] = Field(description="Evenly from a range.")
    input_tokens: TokenRange = Field(description="Prompt tokens, after a shared prefix.")
    output_tokens: TokenRange = Field(description="Generated tokens.")


class Lognormal(Model):
    """A long-tailed length: give median or mean, and sigma or p95; draws are cut to [min, max]."""

    median: Real | None = Field(default=None, description="Half the draws are below, tokens.")
    mean: Real | None = Field(default=None, description="Mean before the cut, tokens.")
    sigma: Annotated[float, Field(strict=True, ge=0, le=10)] | None = Field(
        default=None, description="Standard deviation of the logarithm."
    )
    p95: Real | None = Field(default=None, description="95 % of the draws are below, tokens.")
    min: Tokens = Field(default=1, description="Shorter draws become this long, tokens.")
    max: Tokens = Field(default=MAX_TOKENS, description="Longer draws become this long, tokens.")

    @model_validator(mode="after")
    def _determined(self) -> Self:
        for one, other in (("median", "mean"), ("sigma", "p95")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise fault(one, f"give exactly one of {one} and {other}")
        if self.max < self.min:
            raise fault("max", f"must be at least min ({self.min}), got {self.max}")
        if self.p95 is not None:
            middle = "median" if self.median is not None else "mean"
            value = self.median or self.mean or 0.0
            # exp(1.645^2 / 2) is the largest p95 / mean of any lognormal.
            if self.p95 < value or (middle == "mean" and self.p95 > 3.868 * value):
                limit = "" if self.p95 < value else " and at most 3.868 times it"
                raise fault("p95", f"must be at least {middle} ({value:g}){limit}")
        return self


class LognormalLengths(Model):
    """Prompt and output lognormal, independently."""

    kind: Literal["lognormal"] = Field(description="Many short, a few very long.")
    input_tokens: Lognormal = Field(description="Prompt tokens, after a shared prefix.")
    output_tokens: Lognormal = Field(description="Generated tokens.")


def _check_quantiles(table: dict[str, int]) -> dict[str, int]:
    if not {"p0", "p100"} <= table.keys():
        raise ValueError("a quantile table needs p0 (shortest) and p100 (longest)")
    points = sorted((float(key[1:]), value) for key, value in table.items())
    if len({q for q, _ in points}) < len(points) or points[-1][0] > 100:
        raise ValueError("quantiles must differ and lie between p0 and p100")
    for (low, shorter), (high, longer) in pairwise(points):
        if longer < shorter:
            raise ValueError(f"p{high:g} ({longer}) must not be below p{low:g} ({shorter})")
    return table


QuantileKey = Annotated[str, Field(pattern=r"^p[0-9]{1,3}(\.[0-9]{1,6})?$")]
Quantiles = Annotated[dict[QuantileKey, Tokens], AfterValidator(_check_quantiles)]


class EmpiricalLengths(Model):
    """Prompt and output from tables of quantiles, independently; straight lines in log tokens."""

    kind: Literal["empirical"] = Field(description="From measured quantiles.")
    input_tokens: Quantiles = Field(
        description="Prompt tokens by percentile: {p0: 2, p50: 1020, p99: 4142, p100: 14050}."
    )
    output_tokens: Quantiles = Field(description="Generated tokens by percentile.")


class TraceLengths(Model):
    """Pairs of prompt and output drawn again and again from a recorded load."""

    kind: Literal["trace"] = Field(description="Resampled from a file.")
    path: Name = Field(description="CSV or JSONL file, relative to the scenario's folder.")
    format: TraceFormat = Field(
        default="auto", description="Layout of the file; auto: by its content."
    )


Lengths = Annotated[
    FixedLengths | UniformLengths | LognormalLengths | EmpiricalLengths | TraceLengths,
    Field(discriminator="kind"),
]


class Prefixes(Model):
    """Prompts that begin alike: groups of them share their first tokens."""

    groups: Count = Field(description="Different prefixes (system prompts, documents).")
    prefix_tokens: Tokens = Field(description="Length of each prefix; input_tokens follow it.")
    prompts_per_group: Count | None = Field(
        default=None,
        description="Fixed prompts of a group, drawn again and again; "
        "when left out every request asks something new after the prefix.",
    )


class Sessions(Model):
    """Conversations: each turn's prompt is all that was said before, and its own input."""

    turns: Count = Field(description="Turns of a session (their mean, if geometric).")
    turns_distribution: Literal["fixed", "geometric"] = Field(
        default="fixed", description="How the number of turns varies from session to session."
    )
    think_time_s: Pause = Field(
        default=0.0, description="Time from an answer's end to the next turn, seconds (mean)."
    )
    think_time_distribution: Literal["fixed", "exponential"] = Field(
        default="fixed", description="How the think time varies from turn to turn."
    )


def _check_clause_name(name: str) -> str:
    if name not in CLAUSE_NAMES:
        parse_clause(name, 1.0)
    return name


def _check_sla(sla: dict[str, float]) -> dict[str, float]:
    for name, limit in sla.items():
        try:
            parse_clause(name, limit)
        except ValueError as error:
            raise fault(name, str(error)) from None
    return sla


ClauseName = Annotated[str, AfterValidator(_check_clause_name)]
Limit = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_SLA_SCHEMA: dict[str, Any] = {
    "additionalProperties": False,
    "properties": {
        name: {"type": "number", "minimum": 0, "description": describe(name)}
        for name in CLAUSE_NAMES
    },
}


class RequestClass(Model):
    """One of several kinds of request in the same stream."""

    name: Name = Field(description="Label in the results.")
    weight: Real = Field(description="Share of the requests, relative to the other classes.")
    priority: Annotated[int, Field(strict=True, ge=-1_000_000, le=1_000_000)] = Field(
        default=0, description="vLLM's priority, lower first (scheduling_policy: priority)."
    )
    lengths: Lengths | None = Field(
        default=None, description="Own lengths, in place of the workload's."
    )
    max_wait_s: Seconds | None = Field(
        default=None, description="Longest wait for the first admission, seconds."
    )
    acceptance: Acceptance | None = Field(
        default=None,
        description="How drafts for this class are accepted, in place of speculative_config's.",
    )
    speculates: Flag = Field(
        default=True, description="Whether drafts are made for this class, where there are any."
    )
    sla: Annotated[dict[ClauseName, Limit], AfterValidator(_check_sla)] | None = Field(
        default=None,
        description="Limits of this class, in place of the scenario's.",
        json_schema_extra=_SLA_SCHEMA,
    )
    on_timeout: Literal["promote", "reject"] = Field(
        default="promote",
        description="After max_wait_s: go ahead of the queue, alone or with others that waited "
        "as long; or be given up and counted as timed out.",
    )


class SamplingParams(Model):
    """How requests ask for their tokens to be chosen; left out: as the model's
    generation_config.json says, or at a temperature of 1."""

    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = Field(
        default=None, description="0 is greedy."
    )
    top_k: Annotated[int, Field(strict=True, ge=-1, le=10**6)] | None = Field(
        default=None, description="Only the largest logits; 0 and -1: all."
    )
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        default=None, description="Only the likeliest tokens that together are so likely; 1: all."
    )


class Workload(Model):
    """What arrives, when, how long, and what it shares."""

    arrivals: Arrivals = Field(description="When requests (or sessions) arrive.")
    lengths: Lengths | None = Field(
        default=None, description="Prompt and output lengths; a trace of arrivals brings its own."
    )
    input_scale: Real = Field(
        default=1.0, description="Multiplies every prompt length, shared parts included."
    )
    output_scale: Real = Field(default=1.0, description="Multiplies every output length.")
    prefixes: Prefixes | None = Field(
        default=None, description="Prompts that share their beginning."
    )
    sessions: Sessions | None = Field(
        default=None,
        description="Conversations; each arrival then opens one, and requests counts them.",
    )
    sampling: SamplingParams | None = Field(
        default=None,
        description="How tokens are chosen, of every request. Filters cost time at large batches.",
    )
    classes: Annotated[tuple[RequestClass, ...], Field(min_length=1, max_length=100)] | None = (
        Field(default=None, description="Kinds of request mixed at random by weight.")
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        replay = self.arrivals.kind == "trace"
        for key in ("prefixes", "sessions") if replay else ():
            if getattr(self, key) is not None:
                raise fault(key, "not together with a trace of arrivals, which brings its own")
        classes = self.classes or ()
        everywhere = bool(classes) and all(c.lengths is not None for c in classes)
        if self.lengths is None and not replay and not everywhere:
            raise fault("lengths", "required key is missing (or give lengths to every class)")
        twice = [name for name, n in Counter(c.name for c in classes).items() if n > 1]
        if twice:
            raise fault("classes", f"two classes are named {twice[0]!r}")
        return self


class Failure(Model):
    """Some replicas stop; the requests they had are sent again to the others."""

    at_s: Pause = Field(description="When, seconds after the start.")
    replicas: Count = Field(description="How many; at least one must be left.")


class Scenario(Model):
    """One deployment and its load: the question put to the simulator."""

    name: Name = Field(description="Short label, printed with every result.")
    description: str | None = Field(default=None, description="What this load is, in a line.")
    model: Name = Field(description="Catalogue name, or path of a Hugging Face config.json.")
    hardware: Name = Field(description="Catalogue name, or path of a YAML file with the facts.")
    wafers: Count | Literal["auto"] | None = Field(
        default=None,
        description="Of SRAM hardware: wafers (or chips) that the model is placed on; auto, or "
        "left out: as few as hold it.",
    )
    profile: Name | None = Field(
        default=None,
        description="Measured kernel times: a bundled profile (`servecast models` lists them), a "
        "file beside the scenario, or `generic` for datasheet peaks and generic efficiencies. Left "
        "out: the device's own profile, or its nearest relative's scaled by datasheet.",
    )
    engine: Engine = Field(default_factory=Engine, description="vLLM's flags.")
    workload: Workload = Field(description="The load.")
    sla: Annotated[dict[ClauseName, Limit], AfterValidator(_check_sla)] = Field(
        default_factory=dict,
        description="Upper limits; all must hold.",
        json_schema_extra=_SLA_SCHEMA,
    )
    replicas: Annotated[int, Field(strict=True, ge=1, le=10_000)] = Field(
        default=1, description="Equal engines behind a router."
    )
    router: Literal["round_robin", "least_loaded"] = Field(
        default="round_robin",
        description="Who gets a request: in turn, or whoever has fewest unfinished.",
    )
    failure: Failure | None = Field(
        default=None, description="Replicas that stop for good at some time."
    )
    price_per_hour: Real | None = Field(
        default=None, description="Price of one device for one hour, in any currency."
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)] = Field(
        default=0, description="Start of all random numbers; equal seeds give equal results."
    )

    @model_validator(mode="after")
    def _one_is_left(self) -> Self:
        if self.failure is not None and self.failure.replicas >= self.replicas:
            raise fault(
                "failure",
                f"replicas: {self.failure.replicas} of {self.replicas} would leave none",
            )
        return self
