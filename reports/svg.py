"""Small SVG panels from Matplotlib: one axes each, the width of a phone, text as text.

Colours become CSS variables with a fallback, so that a page can restyle them for a dark theme.
Equal input gives equal bytes.
"""

import io
import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: CSS variable, and its colour in a light theme: greys, and three of Okabe and Ito's colours,
#: which stay apart under the common colour blindnesses.
COLOURS = {
    "ink": "#1f2328",
    "muted": "#59636e",
    "grid": "#d8dee4",
    "blue": "#0072b2",
    "vermillion": "#d55e00",
    "green": "#009e73",
}

#: Points, which become CSS pixels of the viewBox.
WIDTH, HEIGHT = 360, 205
LEFT, RIGHT, BOTTOM, TOP = 50, 16, 28, 12
FONT_POINTS = 12

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": FONT_POINTS,
    "text.color": COLOURS["ink"],
    "text.parse_math": False,
    "axes.edgecolor": COLOURS["grid"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["grid"],
    "ytick.color": COLOURS["grid"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.handlelength": 1.2,
    "path.simplify": True,
}


def panel(
    draw: Callable[["Axes"], None],
    label: str,
    height: int = HEIGHT,
    left: int = LEFT,
    bottom: int = BOTTOM,
) -> str:
    """An SVG element with what `draw` puts on its axes; `label` is for screen readers."""
    import matplotlib
    from matplotlib.figure import Figure

    # A user's own matplotlibrc must not leak into a report.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        # Ids are hashes: salted by label, those of two panels of one page differ.
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": label})
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        inside = WIDTH - left - RIGHT, height - bottom - TOP
        box = (left / WIDTH, bottom / height, inside[0] / WIDTH, inside[1] / height)
        draw(figure.add_axes(box))
        return element(markup(render(figure)), label, height)


def message(text: str, label: str) -> str:
    """A panel that says why there is nothing to see."""
    height = HEIGHT // 2
    body = (
        f'<text x="{WIDTH // 2}" y="{height // 2}" text-anchor="middle" '
        f'style="font-size: 13px; fill: {_variable("muted")}">{escape(text)}</text>'
    )
    return element(body, label, height)


def element(body: str, label: str, height: int) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{body}</svg>'


def render(figure: "Figure") -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return buffer.getvalue()


def markup(svg: str) -> str:
    """What is inside the svg element, without what a page does not need."""
    svg = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    used = set(re.findall(r"#(\w+)", svg))
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"| font-family: [^;"]*;?', "", svg)
    svg = re.sub(r'(?<= d=")[^"]+|(?<= [xy]=")[^"]+', _rounded, svg)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><").strip()
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, _variable(name))
    return svg


def _rounded(numbers: "re.Match[str]") -> str:
    """Coordinates to a tenth of a pixel."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}", numbers[0])


def _variable(name: str) -> str:
    return f"var(--{name}, {COLOURS[name]})"
