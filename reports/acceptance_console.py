"""Fitted acceptance on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def render_acceptance(methods: Mapping[str, Any]) -> RenderableType:
    """Acceptance lengths (tokens a round) of requests, observed and as the models have them."""
    return Group(*(_method(name, found) for name, found in methods.items()))


def _method(name: str, found: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(name)
    statistics = list(found["observed"])
    for title in statistics:
        table.add_column(title, justify="right")
    table.add_row("observed", *(f"{found['observed'][key]:.3f}" for key in statistics))
    if "interval" not in found:
        model = found["hierarchical"]
        rates = ", ".join(f"{rate:.3f}" for rate in model["rates"])
        by_position = Text(f"acceptance by position, given those before: {rates}")
        if not model["quality"]:
            return Group(table, by_position, Text(f"iid: alpha {found['iid']['alpha']:.3f}", "dim"))
        return Group(
            table,
            by_position,
            Text(
                f"quality of a request (logit): {model['quality'][0]:+.2f} to "
                f"{model['quality'][-1]:+.2f}; from round to round {model['persistence']:.2f}; "
                f"later positions share {model['depth']:.2f} of it"
            ),
            Text(f"iid: alpha {found['iid']['alpha']:.3f}", "dim"),
        )
    spans = (found["interval"][key] for key in statistics)
    table.add_row("its 90 % interval", *(f"{low:.2f} to {high:.2f}" for low, high in spans))
    for model in ("hierarchical", "iid"):
        errors = (found[model][key] / found["observed"][key] - 1 for key in statistics)
        shown = (
            f"{found[model][key]:.3f} ({error:+.1%})"
            for key, error in zip(statistics, errors, strict=True)
        )
        table.add_row(model, *shown)
    return table
