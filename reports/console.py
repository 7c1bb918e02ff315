"""The summary on a terminal: one screen of 80 columns, with or without colour."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from servecast.reports import units
from servecast.reports.latencies import LATENCIES
from servecast.reports.metrics import RunFacts

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

#: Flags that the header names; the report lists all of them.
HEADER_FLAGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "max_model_len",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)

COLUMNS = ("mean", "p50", "p95", "p99", "max")

#: Parts below this share of step time are not named.
LEAST_SHARE = 0.005


def render(summary: Mapping[str, Any], facts: RunFacts) -> "RenderableType":
    """What `console.print` of rich shows at a glance."""
    from rich.console import Group

    return Group(_header(facts), "", _latencies(summary), "", _facts(summary, facts))


def _header(facts: RunFacts) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    device = f"{facts.devices} x {facts.hardware}"
    flags = "  ".join(
        f"{flag} {units.flag(facts.engine[flag])}" for flag in HEADER_FLAGS if flag in facts.engine
    )
    return Group(
        Text(facts.name, style="bold"), Text(f"{facts.model} on {device}"), Text(flags, "dim")
    )


def _latencies(summary: Mapping[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("latency")
    for name in (*COLUMNS, "n"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in LATENCIES:
        block = summary[f"{name}_s"]
        table.add_row(
            name, *(units.seconds(block[column]) for column in COLUMNS), units.count(block["n"])
        )
    return table


def _facts(summary: Mapping[str, Any], facts: RunFacts) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, line in _lines(summary):
        table.add_row(name, Text(line))
    for name, text in _verdict(summary["sla"]):
        table.add_row(name, text)
    for name, line in _intervals(summary.get("replications")):
        table.add_row(name, Text(line))
    table.add_row("step times", Text(facts.calibration, "" if facts.calibrated else "yellow"))
    for warning in facts.warnings:
        table.add_row(Text("warning", "bold yellow"), Text(warning))
    return table


def _each(summary: Mapping[str, Any]) -> str:
    """Output tokens of a user and of a device."""
    user = summary["output_tokens_per_s_per_user"]
    told = "" if user is None else f"{units.significant(user)} output tokens/s a user, "
    return f"{told}{units.significant(summary['output_tokens_per_s_per_device'])} a device"


def _fill(kv: Mapping[str, Any]) -> str:
    """How full the taken blocks are, where it was seen."""
    return "" if kv["fill"] is None else f", taken blocks {units.percent(kv['fill'])} full"


def _lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    requests, kv, memory = summary["requests"], summary["kv"], summary["memory"]
    yield (
        "requests",
        f"{requests['completed']:,} of {requests['sent']:,} completed, "
        f"{requests['failed']:,} failed, {requests['timed_out']:,} timed out "
        f"in {units.seconds(summary['duration_s'])}",
    )
    yield (
        "throughput",
        f"{units.significant(summary['requests_per_s'])} requests/s, "
        f"{units.significant(summary['output_tokens_per_s'])} output tokens/s, "
        f"{units.significant(summary['total_tokens_per_s'])} tokens/s in all; "
        f"{_each(summary)}",
    )
    yield (
        "kv cache",
        f"{kv['blocks']:,} blocks of {kv['block_size']} = {kv['tokens']:,} tokens, "
        f"peak use {units.percent(kv['peak_use'])}{_fill(kv)}; {summary['preemptions']:,} "
        f"preemptions, "
        f"{summary['prefix_hit_tokens']:,} tokens from prefix cache",
    )
    parts = [
        f"{name.lower() if name[1:].islower() else name} {units.gibibytes(memory[f'{part}_bytes'])}"
        for part, name in units.MEMORY_NAMES.items()
    ]
    yield "memory", f"{', '.join(parts)}, of {units.gibibytes(memory['total_bytes'])}"
    use, pipeline = summary["utilisation"], summary.get("pipeline")
    yield (
        "device",
        f"busy {units.percent(use['device_busy'])}, {units.pipeline(pipeline)}"
        if pipeline is not None
        else f"busy {units.percent(use['device_busy'])}, MFU {units.percent(use['mfu'])}, "
        f"memory bandwidth {units.percent(use['bandwidth'])}",
    )
    share = summary["step_time_share"]
    parts = [
        f"{part} {units.percent(share[part])}"
        for part in sorted(share, key=lambda part: -share[part])
        if share[part] >= LEAST_SHARE
    ]
    yield "step time", ", ".join(parts) or units.NONE
    if "calibration_interval" in summary:
        yield "interval", units.spans(summary["calibration_interval"])
    yield from _speculation(summary.get("speculation"))
    for name, entry in summary.get("classes", {}).items():
        ttft, e2e = entry["ttft_s"], entry["e2e_s"]
        yield (
            "class",
            f"{name}: n {ttft['n']:,}, ttft p95 {units.seconds(ttft['p95'])}, "
            f"e2e p95 {units.seconds(e2e['p95'])}, "
            f"within sla {units.percent(entry['goodput_share'])}",
        )
    if "cost" in summary:
        cost = summary["cost"]
        yield (
            "cost",
            f"{units.dollars(cost['price_per_hour'])} an hour, "
            f"{units.dollars(cost['per_million_output_tokens'])} per million output tokens",
        )


def _speculation(block: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if block is None:
        return
    if not block["rounds"]:
        yield "speculation", "nothing was drafted"
        return
    requests = block["request_acceptance_length"]
    yield (
        "speculation",
        f"{units.percent(block['acceptance_rate'])} of {block['draft_tokens']:,} drafts accepted, "
        f"{block['mean_acceptance_length']:.2f} tokens a round (requests: p5 {requests['p5']:.2f}, "
        f"p95 {requests['p95']:.2f}, n {requests['n']:,}); {block['acceptance']}",
    )
    yield (
        "",
        f"drafting {units.percent(block['draft_time_share'])} of step time, "
        f"{units.percent(block['wasted_verification_share'])} of verified positions wasted",
    )
    if "speedup" in block:
        gained = block["speedup"]
        told = ", ".join(
            f"{name} {units.times(gained[key])}"
            for key, name in units.SPEEDUP_NAMES.items()
            if gained[key] is not None
        )
        yield "", f"as fast as without, same seed: {told}"


def _verdict(sla: Mapping[str, Any]) -> "Iterator[tuple[str, Text]]":
    from rich.text import Text

    for number, clause in enumerate(sla["clauses"]):
        mark, style = ("✓", "green") if clause["met"] else ("✗", "bold red")
        name = clause["clause"]
        value, limit = (units.clause_number(name, clause[key]) for key in ("value", "limit"))
        yield (
            "" if number else "sla",
            Text.assemble((f"{mark} {name.removesuffix('_s')}", style), f" {value}, limit {limit}"),
        )


def _intervals(replications: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if replications is None:
        return
    yield "seeds", f"{replications['n']} replications: mean and 95 % interval"
    for name, interval in replications.items():
        if name != "n":
            mean, lo, hi = (units.headline(name, interval[key]) for key in ("mean", "lo", "hi"))
            yield "", f"{units.headline_name(name)}: {mean} ({lo} to {hi})"
