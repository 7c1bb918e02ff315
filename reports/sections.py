"""The sections of the report below its verdict: figures and tables."""

from collections.abc import Mapping
from html import escape
from typing import Any

from servecast.reports import figures, units
from servecast.reports.latencies import LATENCIES
from servecast.reports.metrics import RunFacts
from servecast.reports.page import grid, section, table
from servecast.reports.timeline import arrival_groups
from servecast.sim.trace import Trace

LATENCY_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def latency(summary: Mapping[str, Any], facts: RunFacts, trace: Trace) -> str:
    """Every latency in numbers, and those that have a shape worth seeing as a curve."""
    counts = {name: f"{summary[f'{name}_s']['n']:,}" for name in LATENCIES}
    rows = [
        (
            units.LATENCY_NAMES[name],
            counts[name],
            *(units.seconds(summary[f"{name}_s"][stat]) for stat in LATENCY_COLUMNS),
        )
        for name in LATENCIES
    ]
    head = ("Latency", "n", *(units.stat_name(stat).capitalize() for stat in LATENCY_COLUMNS))
    curves = [
        (f"{units.LATENCY_NAMES[name]}, n = {counts[name]}", svg)
        for name, svg in figures.latency_cdfs(trace, facts.sla).items()
    ]
    return section(
        "Latency",
        "Of completed requests. The curves say which share of them stayed below a time.",
        table(head, rows, "latency") + grid(curves),
    )


def over_time(facts: RunFacts, trace: Trace) -> str:
    """How the run went, from the first arrival on."""
    groups = arrival_groups(trace)
    ttft = figures.ttft_over_time(groups, units.limits_of("ttft", facts.sla))
    drawn = [(f"Time to first token by arrival, n = {groups.size:,} a point", ttft)]
    panels = figures.timelines(trace)
    drawn += [(figures.PANELS[name][0], svg) for name, svg in panels.items()]
    return section(
        "Over time",
        "Since the first arrival. Means over equal bins; the shade over KV cache is its peak.",
        grid(drawn),
    )


def device(summary: Mapping[str, Any]) -> str:
    """What the device was busy with."""
    share = summary["step_time_share"]
    use = summary["utilisation"]
    rows = [("Device at work", units.percent(use["device_busy"]))]
    pipeline = summary.get("pipeline")
    if pipeline is None:
        rows += [
            ("Of peak FLOP/s (MFU)", units.percent(use["mfu"])),
            ("Of memory bandwidth", units.percent(use["bandwidth"])),
        ]
    else:
        rows += [
            ("Slots filled", units.percent(pipeline["fill"])),
            ("Slots (tokens in flight at most)", f"{pipeline['slots']:.1f}"),
            ("Pipeline", units.stages(pipeline)),
            ("A token", units.seconds(pipeline["token_latency_s"])),
            ("Slowest stage", units.seconds(pipeline["slowest_stage_s"])),
        ]
    utilisation = table(("Utilisation", "Share of the run"), rows)
    return section(
        "Where step time goes",
        "Over all steps; idle time is not in it.",
        grid([("Share of step time by part", figures.step_time(share)), ("", utilisation)]),
    )


def speculation(summary: Mapping[str, Any]) -> str:
    """What was drafted, accepted and gained; nothing without speculative decoding."""
    block = summary.get("speculation")
    if block is None:
        return ""
    requests, length = block["request_acceptance_length"], block["mean_acceptance_length"]
    rows = [
        ("Drafts accepted", units.percent(block["acceptance_rate"])),
        ("Drafts verified", f"{block['draft_tokens']:,} in {block['rounds']:,} rounds"),
        ("Tokens a round", units.NONE if length is None else f"{length:.2f}"),
        *(
            (f"Tokens a round of a request, {stat.upper()}", f"{requests[stat]:.2f}")
            for stat in ("p5", "p50", "p95")
            if requests[stat] is not None
        ),
        ("Verified positions wasted", units.percent(block["wasted_verification_share"])),
        ("Drafting, of step time", units.percent(block["draft_time_share"])),
    ]
    tables = [("", table(("Rounds", ""), rows))]
    positions = [
        (f"{number} or more", units.percent(share))
        for number, share in enumerate(block["acceptance_by_position"], 1)
    ]
    if positions:
        tables.append(("", table(("Accepted drafts", "Share of rounds"), positions)))
    gained = block.get("speedup")
    if gained is not None:
        rows = [
            (name[:1].upper() + name[1:], units.times(gained[key]))
            for key, name in units.SPEEDUP_NAMES.items()
        ]
        tables.append(("", table(("As fast as without", "Same seed"), rows)))
    return section(
        "Speculative decoding",
        "A round verifies its drafts in one step and emits what was accepted and one token more, "
        "all at one instant: gaps between deliveries grow while the mean gap of a request falls. "
        f"Acceptance: {escape(block['acceptance'])}.",
        grid(tables),
    )


def memory(summary: Mapping[str, Any]) -> str:
    """The memory of one device, and the pool that it leaves."""
    kv, total = summary["kv"], summary["memory"]["total_bytes"]
    sizes = {name: summary["memory"][f"{part}_bytes"] for part, name in units.MEMORY_NAMES.items()}
    sizes["Left free"] = max(0, total - sum(sizes.values()))
    rows = [
        (f'<i class="swatch m{i}"></i>{name}', units.gibibytes(size), units.percent(size / total))
        for i, (name, size) in enumerate(sizes.items())
    ]
    rows.append(("Device", units.gibibytes(total), ""))
    strip = "".join(
        f'<i class="m{i}" style="width:{100 * size / total:.2f}%"></i>'
        for i, size in enumerate(sizes.values())
    )
    pool = [
        ("Blocks", f"{kv['blocks']:,}"),
        ("Tokens a block", f"{kv['block_size']:,}"),
        ("Tokens in all", f"{kv['tokens']:,}"),
        ("Bytes a token", f"{kv['bytes_per_token']:,.0f}"),
        ("Peak use", units.percent(kv["peak_use"])),
        ("Mean use", units.percent(kv["mean_use"])),
        ("Fill of taken blocks", units.NONE if kv["fill"] is None else units.percent(kv["fill"])),
        ("Preemptions", f"{summary['preemptions']:,}"),
        ("Prompt tokens from prefix cache", f"{summary['prefix_hit_tokens']:,}"),
    ]
    tables = [
        ("", table(("One device", "", ""), rows)),
        ("", table(("KV cache", ""), pool)),
    ]
    return section("Memory", "", f'<div class="strip">{strip}</div>{grid(tables)}')


def classes(summary: Mapping[str, Any]) -> str:
    """One row a class; nothing if there is only one."""
    if "classes" not in summary:
        return ""
    head = ("Class", "Sent", "n", "TTFT P50", "TTFT P95", "TPOT P95", "E2E P95", "Within SLA")
    rows = []
    for name, entry in summary["classes"].items():
        ttft, tpot, e2e = entry["ttft_s"], entry["tpot_s"], entry["e2e_s"]
        values = (ttft["p50"], ttft["p95"], tpot["p95"], e2e["p95"])
        rows.append(
            (
                escape(name),
                f"{entry['requests']['sent']:,}",
                f"{ttft['n']:,}",
                *(units.seconds(value) for value in values),
                f"{units.percent(entry['goodput_share'])}, "
                f"{units.significant(entry['goodput_per_s'])}/s",
            )
        )
    return section(
        "By class",
        "Within SLA: requests that themselves stay within every limit on a percentile (goodput).",
        table(head, rows, "classes"),
    )


def replications(summary: Mapping[str, Any]) -> str:
    """Headline metrics over seeds; nothing for a single run."""
    if "replications" not in summary:
        return ""
    rows = [
        (
            units.headline_name(name),
            *(units.headline(name, interval[key]) for key in ("mean", "lo", "hi")),
        )
        for name, interval in summary["replications"].items()
        if name != "n"
    ]
    return section(
        f"{summary['replications']['n']} replications",
        "Mean over seeds and its 95 % interval, as in the cards; all else is of the first seed.",
        table(("Metric", "Mean", "From", "To"), rows),
    )


def flags(facts: RunFacts) -> str:
    """Every engine flag with its value."""
    rows = [
        (f"<code>{escape(name)}</code>", escape(units.flag(value)))
        for name, value in facts.engine.items()
    ]
    return section("Engine flags", "", table(("Flag", "Value"), rows)) if rows else ""
