"""The report: one HTML file without scripts or anything from elsewhere, readable on a phone.

A percentile never stands without its count, and figures from a fallback say so at the top.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from servecast.reports import sections, units
from servecast.reports.metrics import RunFacts
from servecast.reports.page import bar, card, page, table
from servecast.sim.trace import Trace

#: Latencies of the cards.
HEADLINES = (("ttft", "p95"), ("itl", "p99"), ("e2e", "p95"))


def render_report(summary: Mapping[str, Any], facts: RunFacts, trace: Trace) -> str:
    """The whole page; equal input gives equal bytes."""
    parts = (
        _header(summary, facts),
        _warnings(facts),
        _cards(summary),
        _verdict(summary),
        sections.latency(summary, facts, trace),
        sections.over_time(facts, trace),
        sections.device(summary),
        sections.speculation(summary),
        sections.memory(summary),
        sections.classes(summary),
        sections.replications(summary),
        sections.flags(facts),
        _provenance(summary),
    )
    return page(facts.name, parts)


def _header(summary: Mapping[str, Any], facts: RunFacts) -> str:
    kind, word = ("good", "Calibrated") if facts.calibrated else ("warn", "Uncalibrated")
    return (
        f"<header>\n<h1>{escape(facts.name)}</h1>\n"
        f'<p class="lead"><b>{escape(facts.model)}</b> on '
        f"<b>{facts.devices} &times; {escape(facts.hardware)}</b></p>\n"
        f"<p>{_reading(summary)}</p>\n"
        f'<p class="note {kind}"><b>{word} step times:</b> {escape(facts.calibration)}.'
        f"{_span(summary)}</p>\n</header>"
    )


def _span(summary: Mapping[str, Any]) -> str:
    """What the calibration leaves open, where it says so."""
    block = summary.get("calibration_interval")
    return "" if block is None else f" Left open {escape(units.spans(block))}."


def _reading(summary: Mapping[str, Any]) -> str:
    """The run in two sentences."""
    requests = summary["requests"]
    seeds = summary.get("replications", {}).get("n", 1)
    text = "" if seeds == 1 else f"First of {seeds} replications: "
    text += (
        f"{requests['completed']:,} of {requests['sent']:,} simulated requests completed in "
        f"{_kept(summary['duration_s'])}."
    )
    if requests["completed"]:
        ttft, e2e = (
            [_kept(summary[name][stat]) for stat in ("p50", "p95")] for name in ("ttft_s", "e2e_s")
        )
        text += (
            f" Half of them saw their first token within {ttft[0]} and 95&nbsp;% within {ttft[1]};"
            f" half were complete after {e2e[0]} and 95&nbsp;% after {e2e[1]}."
        )
    return text


def _kept(value: float) -> str:
    """A duration that is not broken across lines."""
    return units.seconds(value).replace(" ", "&nbsp;")


def _warnings(facts: RunFacts) -> str:
    if not facts.warnings:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in facts.warnings)
    return f'<section class="note warn"><h2>Warnings</h2><ul>{items}</ul></section>'


def _cards(summary: Mapping[str, Any]) -> str:
    """Headline numbers; with replications their mean, and its interval."""
    requests, use, kv = summary["requests"], summary["utilisation"], summary["kv"]
    cards = [
        *(_latency_card(summary, *which) for which in HEADLINES),
        card(
            "Output tokens per second",
            *_headline(
                summary,
                "output_tokens_per_s",
                f"{units.significant(summary['total_tokens_per_s'])} with prompts",
            ),
        ),
        card(
            "Requests per second",
            *_headline(
                summary,
                "requests_per_s",
                f"{requests['failed']:,} failed, {requests['timed_out']:,} timed out",
            ),
        ),
        card(
            "Device busy",
            units.percent(use["device_busy"]),
            f"MFU {units.percent(use['mfu'])}, bandwidth {units.percent(use['bandwidth'])}"
            if "pipeline" not in summary
            else f"{units.percent(summary['pipeline']['fill'])} of "
            f"{summary['pipeline']['slots']:.1f} slots filled",
        ),
        card(
            "KV cache at its peak",
            units.percent(kv["peak_use"]),
            f"{summary['preemptions']:,} preemptions",
        ),
    ]
    if "cost" in summary:
        cost = summary["cost"]
        per_hour = f"{units.dollars(cost['price_per_hour'])} an hour"
        per_million = units.dollars(cost["per_million_output_tokens"])
        cards.append(card("Per million output tokens", per_million, per_hour))
    return f'<section class="cards">{"".join(cards)}</section>'


def _latency_card(summary: Mapping[str, Any], name: str, stat: str) -> str:
    block = summary[f"{name}_s"]
    title = f"{units.LATENCY_NAMES[name]}, {units.stat_name(stat)}"
    told = units.seconds(block[stat]), f"n = {block['n']:,}"
    return card(title, *_headline(summary, f"{name}_{stat}_s", told[1], told[0]))


def _headline(
    summary: Mapping[str, Any], name: str, below: str, value: str | None = None
) -> tuple[str, str]:
    """A number and the line below it: of one run as given, of several mean and interval."""
    interval = summary.get("replications", {}).get(name)
    if interval is None or interval["lo"] is None:
        return units.headline(name, summary[name]) if value is None else value, below
    mean, lo, hi = (units.headline(name, interval[key]) for key in ("mean", "lo", "hi"))
    return mean, f"{lo} to {hi} over {summary['replications']['n']} seeds"


def _verdict(summary: Mapping[str, Any]) -> str:
    sla = summary["sla"]
    if not sla["clauses"]:
        return ""
    missed = sum(not clause["met"] for clause in sla["clauses"])
    kind, title = ("good", "SLA met") if sla["met"] else ("bad", "SLA missed")
    told = f"{missed} of {len(sla['clauses'])} clauses missed." if missed else "Every clause holds."
    if "replications" in summary:
        seeds = summary["replications"]
        told += f" {round(seeds['sla_met']['mean'] * seeds['n'])} of {seeds['n']} replications"
        told += " meet it; the clauses below are of the first."
    head = ("", "Clause", "Measured", "Limit", "Of limit")
    rows = table(head, [_clause_row(clause) for clause in sla["clauses"]], "sla")
    return f'<section class="verdict {kind}"><h2>{title}</h2><p>{told}</p>{rows}</section>'


def _clause_row(clause: Mapping[str, Any]) -> tuple[str, ...]:
    name, stat = units.clause_name(clause["clause"])
    kind, mark = ("good", "✓") if clause["met"] else ("bad", "✗")
    value, limit = clause["value"], clause["limit"]
    return (
        f'<b class="mark {kind}">{mark}</b>',
        f"{name}, {stat}",
        units.clause_number(clause["clause"], value),
        units.clause_number(clause["clause"], limit),
        units.NONE if value is None or not limit else bar(value / limit, kind),
    )


def _provenance(summary: Mapping[str, Any]) -> str:
    origin = summary["provenance"]
    return (
        f"<footer><p>servecast {escape(str(origin['version']))}, seed {origin['seed']}, "
        f"scenario <code>sha256 {escape(str(origin['scenario_sha256']))}</code>, "
        f"step times: {escape(str(origin['calibration']))}.</p></footer>"
    )
