"""The page that a report is set on: one column on a phone, two on a desk, light or dark."""

from collections.abc import Iterable, Sequence
from html import escape

STYLESHEET = """
:root {
  --page: #f6f8fa; --paper: #fff; --ink: #1f2328; --muted: #59636e; --grid: #d8dee4;
  --blue: #0072b2; --vermillion: #c44f00; --green: #00795a;
  --good: #00795a; --bad: #b42318; --warn: #9a6700;
  --good-paper: #e6f5ef; --bad-paper: #fdecea; --warn-paper: #fff5d6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --paper: #161b22; --ink: #e6edf3; --muted: #9aa5b1; --grid: #30363d;
    --blue: #56b4e9; --vermillion: #f08a4b; --green: #3fc79a;
    --good: #3fc79a; --bad: #ff8578; --warn: #e3b341;
    --good-paper: #10291f; --bad-paper: #3a1714; --warn-paper: #2e2508;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 48px; }
header, section { margin-bottom: 20px; }
section {
  background: var(--paper); border: 1px solid var(--grid); border-radius: 10px;
  padding: 16px 20px;
}
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 4px; }
h3 { font-size: .8rem; font-weight: 600; color: var(--muted); margin: 0; }
p { margin: 0 0 8px; overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 20px; overflow-wrap: anywhere; }
code { font: .85em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.lead { font-size: 1.1rem; }
.muted, footer { color: var(--muted); font-size: .9rem; }
.note { border: 0; border-left: 4px solid; border-radius: 6px; padding: 8px 14px; margin: 12px 0; }
.note.good { background: var(--good-paper); border-color: var(--good); }
.note.warn { background: var(--warn-paper); border-color: var(--warn); }
.cards {
  display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr));
  background: none; border: 0; padding: 0;
}
.card {
  background: var(--paper); border: 1px solid var(--grid); border-radius: 10px;
  padding: 12px 16px;
}
.card p { margin: 0; color: var(--muted); font-size: .85rem; }
.card .value { color: var(--ink); font-size: 1.7rem; font-weight: 650; line-height: 1.35; }
.verdict { border-left: 6px solid; }
.verdict.good { border-left-color: var(--good); }
.verdict.bad { border-left-color: var(--bad); }
.verdict.good h2, .mark.good { color: var(--good); }
.verdict.bad h2, .mark.bad { color: var(--bad); }
.bar {
  display: inline-block; width: 90px; height: 8px; margin-right: 8px; border-radius: 4px;
  background: var(--grid); overflow: hidden;
}
.bar i { display: block; height: 100%; background: var(--good); }
.bar.bad i { background: var(--bad); }
.share { display: inline-block; min-width: 3.6em; }
.scroll + .grid { margin-top: 20px; }
.grid { display: grid; gap: 20px 28px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
figure { margin: 4px 0 0; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: 4px; }
svg { display: block; width: 100%; max-width: 480px; height: auto; stroke-linejoin: round; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td {
  text-align: right; padding: 6px 0 6px 14px; border-bottom: 1px solid var(--grid);
  white-space: nowrap; font-variant-numeric: tabular-nums;
}
th { color: var(--muted); font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.sla :is(th, td):nth-child(2) { text-align: left; padding-left: 0; }
.sla :is(th, td):first-child { width: 1.6em; }
tbody tr:last-child td { border-bottom: 0; }
.strip { display: flex; height: 22px; border-radius: 6px; overflow: hidden; margin: 8px 0; }
.strip i { display: block; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.m0 { background: var(--blue); } .m1 { background: var(--vermillion); }
.m2 { background: #cc79a7; } .m3 { background: #e69f00; } .m4 { background: var(--green); }
.m5 { background: var(--grid); }
@media (max-width: 760px) {
  .grid { grid-template-columns: minmax(0, 1fr); }
  main { padding: 16px 10px 32px; }
  section { padding: 14px; }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; padding: 0; }
  .card { padding: 10px 12px; }
  .card .value { font-size: 1.35rem; }
  .bar { display: none; }
  .share { min-width: 0; }
  table { font-size: .84rem; }
  th, td { padding-left: 8px; }
  td:first-child, .sla td:nth-child(2) { white-space: normal; }
  .latency :is(th, td):is(:nth-child(3), :nth-child(5), :nth-child(8)) { display: none; }
}
@media print { body { background: none; } section, .card { break-inside: avoid; } }
"""


def page(title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole HTML file; `parts` are HTML, `title` is text, `style` more rules of CSS."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} - servecast</title>\n<style>{STYLESHEET}{style}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(filter(None, parts)) + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, note: str, body: str) -> str:
    """A box with a heading, a line on how to read it (or none), and HTML."""
    told = f'<p class="muted">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{told}{body}</section>"


def grid(cells: Iterable[tuple[str, str]]) -> str:
    """Captions (or none) and HTML, side by side where there is room."""
    figures = "".join(
        f"<figure>{f'<figcaption>{caption}</figcaption>' if caption else ''}{body}</figure>"
        for caption, body in cells
    )
    return f'<div class="grid">{figures}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "plain") -> str:
    """A table of HTML cells, scrolling by itself where it is too wide; `kind` is its class."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def card(title: str, value: str, below: str) -> str:
    """A headline number between what it is and what it comes with, all HTML."""
    return f'<div class="card"><h3>{title}</h3><p class="value">{value}</p><p>{below}</p></div>'


def bar(share: float, kind: str) -> str:
    """A share of a limit as a bar and a number; `kind` is good or bad."""
    told = f"{share * 100:,.0f} %" if share < 10 else f"{share:,.0f} &times;"
    fill = f'<i style="width:{min(share, 1) * 100:.0f}%"></i>'
    return f'<span class="bar {kind}">{fill}</span><span class="share">{told}</span>'
