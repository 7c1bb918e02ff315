"""The report of a sizing: the answer and its command on top, then what it rests on.

One HTML file without scripts or anything from elsewhere, as the report of a run.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from servecast.reports import sizing_sections as sections
from servecast.reports import sizing_words as words
from servecast.reports import units
from servecast.reports.page import bar, card, page, section, table
from servecast.reports.sizing_words import Result

#: One flag a line, for every flag is wider than this.
ONE_FLAG = 1

STYLE = """
.command pre {
  margin: 8px 0 0; padding: 12px 14px; border-radius: 8px; background: var(--page);
  border: 1px solid var(--grid); white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.55;
  -webkit-user-select: all; user-select: all;
}
.answer { border-left: 6px solid; font-size: 1.15rem; line-height: 1.45; }
.answer p { margin: 0; }
.answer.good { border-left-color: var(--good); }
.answer.bad { border-left-color: var(--bad); }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 4px 0 14px; font-size: .88rem; }
.key span { white-space: nowrap; }
.key i {
  display: inline-block; width: 1.6em; height: 1.1em; border-radius: 2px; margin-right: 6px;
  vertical-align: -.2em;
}
.ramp { background: linear-gradient(90deg, color-mix(in srgb, var(--blue) 8%, transparent),
  color-mix(in srgb, var(--blue) 62%, transparent)); }
.missed { background: repeating-linear-gradient(135deg, var(--vermillion) 0 1px,
  color-mix(in srgb, var(--vermillion) 30%, transparent) 1px 5px); }
.blank { border: 1px solid var(--grid); }
.edge { border-left: 3px solid var(--ink); width: 6px !important; }
dl { margin: 0; }
dt { font-weight: 600; margin-top: 10px; }
dt:first-child { margin-top: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: 10px 0; font-weight: 600; color: var(--blue); }
.choices { table-layout: fixed; }
.choices td { white-space: normal; overflow-wrap: anywhere; }
.choices th:first-child { width: 40%; }
.points { font-size: .85rem; }
.points th { white-space: normal; vertical-align: bottom; }
.points td:last-child { max-width: 36em; overflow: hidden; text-overflow: ellipsis; }
.reasons :is(th, td):last-child { text-align: left; width: 60%; }
@media (max-width: 760px) {
  .answer { font-size: 1.05rem; }
  .sla :is(th, td):nth-child(5) { display: none; }
  .sla td:last-child, .choices th { white-space: normal; }
  .choices th:first-child { width: 34%; }
}
"""


def render_sizing_report(result: Result) -> str:
    """The whole page; equal input gives equal bytes."""
    parts = (
        _header(result),
        _answer(result),
        _command(result),
        _cards(result),
        _sla(result),
        _reasons(result),
        sections.choices(result),
        sections.heat(result),
        sections.over_load(result),
        sections.trade_off(result),
        sections.points(result),
        _provenance(result),
    )
    return page(f"{result['scenario']}: sizing", parts, STYLE)


# ---------------------------------------------------------------- the answer


def _header(result: Result) -> str:
    kind, word = ("good", "Calibrated") if words.calibrated(result) else ("warn", "Uncalibrated")
    notes = "".join(f'<p class="note warn">{escape(note)}</p>' for note in result.get("notes", ()))
    return (
        f"<header>\n<h1>{escape(result['scenario'])}: which flags to serve with</h1>\n"
        f'<p class="note {kind}"><b>{word} step times:</b> {escape(result["calibration"])}.</p>\n'
        f"{notes}</header>"
    )


def _answer(result: Result) -> str:
    kind = "bad" if result["best"]["met"] is False else "good"
    return f'<section class="answer {kind}"><p>{_told(words.answer(result))}</p></section>'


def _told(text: str) -> str:
    """Text with its numbers and units kept on one line, its first word strong."""
    first, colon, rest = escape(text).partition(": ")
    return f"<b>{first}{colon}</b>{rest}" if first in ("Yes", "No") else escape(text)


def _command(result: Result) -> str:
    title = "Serve with" if result["best"]["met"] is not False else "The closest setting"
    lines = "\n".join(
        escape(line) for line in words.command_lines(result["vllm_command"], ONE_FLAG)
    )
    return f'<section class="command"><h2>{title}</h2><pre><code>{lines}</code></pre></section>'


def _cards(result: Result) -> str:
    best, default = result["best"], result["default"]
    sent = words.sent_per_s(result)
    spread = words.interval(best)
    of = f"of {units.significant(sent)} sent" if sent else ""
    if words.serves_all(result):
        of = "all that are sent"
    load, breaks = result["headroom"]["load"], result["headroom"]["breaks"]
    cliff = result["cliff"]["load"]
    most = words.largest_load(result)
    cards = [
        card(
            "Requests per second in the SLA",
            units.significant(best["goodput_per_s"]),
            ", ".join(filter(None, (of, spread))),
        ),
        card(
            f"Against {words.DEFAULT}",
            words.relative(best["goodput_per_s"], default and default["goodput_per_s"]),
            f"which serve {units.significant(default['goodput_per_s'])}, "
            f"SLA {words.met_words(default['met'])}"
            if default
            else "they do not start",
        ),
        card(
            "Largest load within the SLA",
            words.factor(load) if load is not None else units.NONE,
            f"then {escape(words.clause_words(breaks))} breaks"
            if breaks
            else "no limit breaks up to there",
        ),
        card(
            "Preemption begins at load",
            words.factor(cliff) if cliff else f"&gt; {words.factor(most)}" if most else units.NONE,
            f"{result['cliff']['preemptions']:,} preemptions there" if cliff else "none seen",
        ),
        card(
            "Output tokens per second",
            units.significant(best["output_tokens_per_s"]),
            f"on {result['devices']:,} device{'s' if result['devices'] > 1 else ''}",
        ),
        card(
            "Tokens per second of a user",
            words.number(best["tokens_per_s_per_user"]),
            f"P99 gap {units.seconds(best['itl_p99_s'])}",
        ),
        card(
            "KV cache at its peak",
            units.percent(best["kv_peak_use"]),
            f"{units.count(best['preemptions'])} preemptions",
        ),
    ]
    if best["cost_per_million_output_tokens"] is not None:
        per_hour = units.dollars(result["price_per_hour"])
        per_million = units.dollars(best["cost_per_million_output_tokens"])
        cards.append(card("Per million output tokens", per_million, f"{per_hour} an hour"))
    return f'<section class="cards">{"".join(cards)}</section>'


def _sla(result: Result) -> str:
    clauses = result["sla"]
    if not clauses:
        return ""
    met = result["best"]["met"] is not False
    kind, title = ("good", "SLA met") if met else ("bad", "SLA missed")
    missed = sum(not words.clause_met(clause) for clause in clauses)
    told = (
        f"{missed} of {len(clauses)} clauses missed."
        if missed
        else "Every clause holds in the mean of the runs."
    )
    note = f"{told} Probability: share of runs in which it holds, with its 90 % interval."
    head = ("", "Clause", "Simulated", "Limit", "Of limit", "Probability")
    rows = table(head, [_clause_row(clause) for clause in clauses], "sla")
    return f'<section class="verdict {kind}"><h2>{title}</h2><p>{note}</p>{rows}</section>'


def _clause_row(clause: Mapping[str, Any]) -> tuple[str, ...]:
    kind, mark = ("good", "✓") if words.clause_met(clause) else ("bad", "✗")
    name, value, limit = clause["clause"], clause["value"], clause["limit"]
    return (
        f'<b class="mark {kind}">{mark}</b>',
        escape(words.clause_title(name)),
        units.clause_number(name, value),
        units.clause_number(name, limit),
        units.NONE if value is None or not limit else bar(value / limit, kind),
        escape(words.probability(clause)),
    )


def _reasons(result: Result) -> str:
    facts = (
        ("What binds", result["binding"]),
        ("Headroom", words.headroom(result)),
        ("Cliff", words.cliff(result)),
        ("Block size", result["block_size"]),
        ("What to measure next", words.lever(result)),
    )
    told = "".join(
        f"<dt>{name}</dt><dd>{escape(words.sentence(fact))}.</dd>" for name, fact in facts
    )
    return section("Why, and how far it carries", "", f"<dl>{told}</dl>")


def _provenance(result: Result) -> str:
    return (
        f"<footer><p>servecast {escape(str(result['version']))}, scenario "
        f"{escape(result['scenario'])}, objective {escape(result['objective'])}. "
        f"{escape(words.sentence(words.effort(result)))}. "
        f"Step times: {escape(result['calibration'])}.</p></footer>"
    )
