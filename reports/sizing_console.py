"""The answer of a sizing on a terminal: one screen of 80 columns, with or without colour."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from servecast.reports import sizing_words as words
from servecast.reports import units
from servecast.reports.sizing_words import Choice, Result

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

#: Columns that a line of the command may take.
COMMAND_WIDTH = 80


def render_sizing(result: Result) -> "RenderableType":
    """What `console.print` of rich shows at a glance, the command first."""
    from rich.console import Group
    from rich.text import Text

    command = "\n".join(words.command_lines(result["vllm_command"], COMMAND_WIDTH))
    style = {True: "green", False: "bold red", None: ""}[result["best"]["met"]]
    return Group(
        Text(command, style="bold", overflow="fold"),
        "",
        Text(words.answer(result), style=style),
        "",
        _choices(result),
        "",
        _facts(result),
    )


def _choices(result: Result) -> "Table":
    """Best, runner-up and defaults beside each other."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", style="bold", no_wrap=True)
    for name in ("requests/s in SLA", "change", "SLA", "$ per M"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what differs")
    best, runner_up, default = result["best"], result["runner_up"], result["default"]
    table.add_row("best", *_row(best, best))
    if runner_up is not None:
        table.add_row("runner-up", *_row(runner_up, best))
    if default is None:
        table.add_row("defaults", "do not start")
    else:
        table.add_row("defaults", *_row(default, best))
    return table


def _row(choice: Choice, best: Choice) -> "tuple[str | Text, ...]":
    from rich.text import Text

    goodput, spread = choice["goodput_per_s"], words.interval(choice)
    told = f"{units.significant(goodput)}{f' ({spread})' if spread else ''}"
    style = {True: "green", False: "red", None: ""}[choice["met"]]
    return (
        told,
        "" if choice is best else words.relative(goodput, best["goodput_per_s"]),
        Text(words.met_words(choice["met"]), style),
        units.dollars(choice["cost_per_million_output_tokens"]),
        Text(words.settings(words.differing(choice, best))),
    )


def _facts(result: Result) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for number, line in enumerate(_clauses(result)):
        table.add_row("" if number else "sla", line)
    for name, told in (
        ("runner-up", words.distance(result)),
        ("binding", result["binding"]),
        ("headroom", words.headroom(result)),
        ("cliff", words.cliff(result)),
        ("block size", result["block_size"]),
        ("measure next", words.lever(result)),
        ("step times", result["calibration"]),
        ("search", words.effort(result)),
    ):
        doubtful = name == "step times" and not words.calibrated(result)
        table.add_row(name, Text(told, "yellow" if doubtful else ""))
    for note in result.get("notes", ()):
        table.add_row(Text("note", "bold yellow"), Text(note))
    return table


def _clauses(result: Result) -> "Iterator[Text]":
    """Each clause of the best choice: met or not, and in how many runs."""
    from rich.text import Text

    for clause in result["sla"]:
        mark, style = ("✓", "green") if words.clause_met(clause) else ("✗", "bold red")
        name = clause["clause"]
        value, limit = (units.clause_number(name, clause[key]) for key in ("value", "limit"))
        yield Text.assemble(
            (f"{mark} {name.removesuffix('_s')}", style),
            f" {value}, limit {limit}; P(met) {words.probability(clause)}",
        )
