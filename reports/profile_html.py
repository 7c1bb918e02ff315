"""A profile of measured kernels as one HTML file, without scripts or anything from elsewhere."""

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from servecast.reports import units
from servecast.reports.page import grid, page, section, table
from servecast.reports.profile_figures import kind, styled
from servecast.reports.svg import element, markup, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
figcaption { font-weight: 400; }
.source :is(th, td):last-child { text-align: left; white-space: normal; }
"""

#: What a figure shows, and what to look for in it, by the first word of its name.
CAPTIONS = {
    "roofline": (
        "Matrices under the roof",
        "The closer the dots are to the lines of the datasheet, the better the kernels; dots "
        "above the slope read from the cache.",
    ),
    "gemm": (
        "Matrices",
        "The line should run through the dots, most of all at the m of your batches.",
    ),
    "decode": (
        "Decode attention",
        "Long contexts and large batches should come close to 100 % (above it they read from the "
        "cache), and lines should follow their dots.",
    ),
    "prefill": (
        "Prefill attention",
        "The share should rise with the prompt and then stay level, and lines should follow "
        "their dots.",
    ),
    "packed": (
        "Attention of whole batches",
        "All queries of a step meet all its keys: the share should rise with both and then stay "
        "level, and lines should follow their dots.",
    ),
    "residuals": (
        "Errors by family",
        "Narrow and centred on 0 is good: bars are measured rows against the profile, the outline "
        "is shapes that the fit did not see, and the ends hold whatever lies beyond.",
    ),
    "outlines": (
        "Errors by family",
        "Narrow and centred on 0 is good: these are shapes that the fit did not see, and the ends "
        "hold whatever lies beyond.",
    ),
}


def profile_page(facts: Mapping[str, Any], figures: Mapping[str, "Figure"]) -> str:
    """The whole page; equal input gives equal bytes.

    Parameters
    ----------
    facts : as `servecast calibrate --show --json` prints
    figures : as `profile_figures` draws them
    """
    parts = (
        _header(facts),
        _source(facts),
        _families(facts),
        _figures(facts, figures),
    )
    return page(f"{facts['name']}: kernel profile", parts, STYLE)


def _header(facts: Mapping[str, Any]) -> str:
    rows = sum(family["rows"] for family in facts["families"].values())
    return (
        f"<header>\n<h1>{escape(facts['name'])}: kernel profile</h1>\n"
        f'<p class="lead">Measured on <b>{escape(facts["device"])}</b>, as corrections of the '
        f"datasheet of <b>{escape(facts['hardware'])}</b></p>\n"
        f"<p>{len(facts['families']):,} kernel families from {rows:,} measured rows.</p>\n"
        "</header>"
    )


def _source(facts: Mapping[str, Any]) -> str:
    rows = [(escape(key), escape(str(value))) for key, value in facts["source"].items()]
    ranks = ", ".join(map(str, facts["all_reduce_ranks"])) or "none"
    rows.append(("all-reduce measured for", f"{ranks} ranks"))
    rows.append(("a small kernel", units.seconds(facts["small_kernel_s"])))
    if facts.get("tail"):
        fed = f"memory feeds {facts['tail']['streams']:.0f} KV heads at once"
        rows.append(("uneven contexts", fed))
    return section("Source", "", table(("", ""), rows, "source"))


def _families(facts: Mapping[str, Any]) -> str:
    families = facts["families"]
    if not families:
        return section("Families", "", "<p>None was measured.</p>")
    noisy = any(family.get("noise") is not None for family in families.values())
    head = ["Family", "Rows", "Grid", "Median error", "P95", *(["Noise"] if noisy else [])]
    rows = []
    for name, family in families.items():
        row = [
            escape(name),
            f"{family['rows']:,}",
            " &times; ".join(map(str, family["grid"])),
            units.percent(family["median"]),
            units.percent(family["p95"]),
        ]
        rows.append([*row, units.percent(family.get("noise"))] if noisy else row)
    note = "Errors are on whole coordinates left out of the fit."
    if noisy:
        note += " Noise is the median relative standard error of a row."
    return section("Families", note, table(head, rows))


def _figures(facts: Mapping[str, Any], figures: Mapping[str, "Figure"]) -> str:
    without = [name for name in facts["families"] if name not in figures]
    told = ""
    if without:
        which = "" if len(without) == len(facts["families"]) else f" of {', '.join(without)}"
        told = (
            f'<p class="note warn">Raw rows{escape(which)} are not kept with this profile: their '
            "figures are left out, and only the errors on shapes left out of the fit are known.</p>"
        )
    rows = set(figures) - {"residuals"}
    drawn = [
        (_caption(name if rows else "outlines"), inline(figure, name))
        for name, figure in figures.items()
    ]
    note = "Dots are measured, lines are the profile." if rows else ""
    return section("Measured and fitted", note, told + grid(drawn))


def _caption(name: str) -> str:
    title, told = CAPTIONS[kind(name)]
    of = name.partition(" ")[2]
    return f"<b>{title}{f', {escape(_words(kind(name), of))}' if of else ''}.</b> {told}"


def _words(family: str, of: str) -> str:
    """What a family is by: a matrix its number format, attention the bits of a KV number."""
    return of if family == "gemm" else f"{of}-bit KV"


def inline(figure: "Figure", label: str) -> str:
    """A figure as an SVG element; `label` is for screen readers."""
    with styled(label):
        return element(markup(render(figure)), label, round(72 * figure.get_figheight()))
