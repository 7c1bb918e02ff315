"""Numbers as people read them: three digits and the unit that fits."""

from collections.abc import Mapping
from typing import Any

#: Latencies in words, in the order of the tables.
LATENCY_NAMES = {
    "ttft": "Time to first token",
    "itl": "Gap between tokens",
    "tpot": "Mean gap of a request",
    "e2e": "End to end",
    "queue": "Wait for admission",
}

RATE_NAMES = {"timeout_rate": "Timed-out requests", "failure_rate": "Refused or failed requests"}

PART_NAMES = {
    "gemm": "Dense layers (GEMM)",
    "attention_prefill": "Attention, prefill",
    "attention_decode": "Attention, decode",
    "moe": "Experts (MoE)",
    "collective": "Communication",
    "sampling": "Sampling",
    "draft": "Drafting",
    "host": "Host overhead",
    "swap": "KV to and from the host",
}

MEMORY_NAMES = {
    "weights": "Weights",
    "activation": "Activations",
    "graph": "CUDA graphs",
    "other": "Driver, NCCL",
    "kv": "KV cache",
}

#: What speculative decoding is held against, in words.
SPEEDUP_NAMES = {
    "tpot": "mean gap of a request",
    "e2e": "end to end",
    "e2e_p95": "end to end P95",
    "ttft": "time to first token",
    "output_tokens_per_s": "output tokens/s",
}

#: What a calibration may leave open, in words.
SPAN_NAMES = {
    "ttft_mean_s": "mean time to first token",
    "tpot_mean_s": "mean gap of a request",
    "e2e_mean_s": "end to end, mean",
    "e2e_p95_s": "end to end, P95",
    "output_tokens_per_s": "output tokens/s",
}

#: Unit, its size in seconds, and the shortest duration told in it.
UNITS = (("h", 3600.0, 7200.0), ("min", 60.0, 600.0), ("s", 1.0, 1.0), ("ms", 1e-3, 1e-3))

#: What a table shows where there is no value.
NONE = "-"


def significant(value: float, digits: int = 3) -> str:
    """`value` with so many significant digits, thousands separated, no exponent.

    Whole digits are never rounded away: 12345.6 is 12,346.
    """
    if value == 0:
        return "0"
    exponent = int(f"{abs(value):e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def seconds(value: float | None) -> str:
    """0.0123 is 12.3 ms; from ten minutes on minutes, from two hours on hours."""
    if value is None:
        return NONE
    if value == 0:
        return "0 s"
    unit, size = clock_unit(value)
    return f"{significant(value / size)} {unit}"


def tick_seconds(value: float) -> str:
    """A power of ten of seconds, as on a logarithmic axis: 0.01 is 10 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        # A power of ten may lie a rounding error below.
        if value > size * 0.999:
            return f"{value / size:,.6g} {unit}"
    return f"{value * 1e6:.3g} µs"


def clock_unit(value: float) -> tuple[str, float]:
    """The unit that a duration in seconds is told in, and its size in seconds."""
    for unit, size, least in UNITS:
        if abs(value) >= least:
            return unit, size
    return "µs", 1e-6


def compact(value: float) -> str:
    """An axis label of a count: 12,000 is 12k."""
    for suffix, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def count(value: float | None) -> str:
    """Thousands separated."""
    return NONE if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """0.1234 is 12.3 %; shares below 0.1 % keep two significant digits."""
    if share is None:
        return NONE
    return f"{share * 100:.1f} %" if share >= 0.001 else f"{share * 100:.2g} %"


def times(factor: float | None) -> str:
    """How many times as fast: 1.5 is x1.50."""
    return NONE if factor is None else f"x{factor:.2f}"


def stages(block: Mapping[str, Any]) -> str:
    """33 stages on 1 device; a device is a wafer, or a chip of a rack."""
    devices = block["wafers"]
    return f"{block['stages']:,} stages on {devices:,} {'device' if devices == 1 else 'devices'}"


def pipeline(block: Mapping[str, Any]) -> str:
    """Stages of SRAM devices, and how full they are."""
    return (
        f"{stages(block)}, "
        f"{percent(block['fill'])} of {block['slots']:.1f} slots filled; a token takes "
        f"{seconds(block['token_latency_s'])}"
    )


def spans(block: Mapping[str, Any]) -> str:
    """What a calibration leaves open, metric by metric."""
    told = (
        f"{SPAN_NAMES[name]} {headline(name, low)} to {headline(name, high)}"
        for name, (low, high) in block.items()
        if low is not None
    )
    return f"by the calibration: {', '.join(told)}"


def gibibytes(value: float) -> str:
    """Bytes in GiB."""
    return f"{value / 2**30:,.1f} GiB"


def dollars(value: float | None) -> str:
    """Dollars, with cents at least."""
    if value is None:
        return NONE
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${significant(value, 2)}"


def clause_name(clause: str) -> tuple[str, str]:
    """What a clause such as `ttft_p95_s` bounds, and by which statistic: in words."""
    if clause in RATE_NAMES:
        return RATE_NAMES[clause], "share"
    metric, _, stat = clause.removesuffix("_s").partition("_")
    return LATENCY_NAMES[metric], stat_name(stat)


def stat_name(stat: str) -> str:
    """p95 is P95; mean and max stay as they are."""
    return stat.upper() if stat.startswith("p") else stat


def clause_number(clause: str, value: float | None) -> str:
    """A clause's value or limit in its unit."""
    return percent(value) if clause in RATE_NAMES else seconds(value)


def limits_of(metric: str, sla: Mapping[str, float]) -> dict[str, float]:
    """Statistic to limit in seconds, of the clauses on one latency."""
    prefix = f"{metric}_"
    return {
        clause.removeprefix(prefix).removesuffix("_s"): limit
        for clause, limit in sla.items()
        if clause.startswith(prefix)
    }


def headline(name: str, value: float | None) -> str:
    """A headline metric of `merge_replications`: seconds, a share, or a plain number."""
    if value is None:
        return NONE
    if name.endswith("_per_s"):
        return significant(value)
    if name.endswith("_s"):
        return seconds(value)
    if name.endswith("_speedup"):
        return times(value)
    return percent(value) if name in ("sla_met", "acceptance_rate") else significant(value)


def flag(value: Any) -> str:
    """An engine flag's value."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flag(item)}" for key, item in value.items()) + "}"
    return "none" if value is None else str(value)


def headline_name(name: str) -> str:
    """A headline metric in words."""
    named = {
        "output_tokens_per_s": "Output tokens per second",
        "requests_per_s": "Requests per second",
        "preemptions": "Preemptions",
        "sla_met": "Replications that meet the SLA",
        "acceptance_rate": "Drafts accepted",
        "mean_acceptance_length": "Tokens a round",
        "tpot_speedup": "Mean gap, as fast as without speculation",
        "throughput_speedup": "Output tokens/s, of those without speculation",
    }
    return named.get(name) or ", ".join(clause_name(name))
