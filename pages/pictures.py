"""Figures of matplotlib as parts of a page, in the colours of the text around them."""

from __future__ import annotations

import io
import re

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

# Legible on white and on black, the first ones furthest from each other.
COLOURS = ("#64748b", "#e0793a", "#2f7fd8", "#1f9d76", "#b5479a", "#a3841c", "#d1495b", "#6a5acd", "#2a93a8", "#8a6d5b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
SIZE = (4.6, 3.6)  # inches; as wide as a phone shows at full size, so that the text is legible there
PLAIN = StrMethodFormatter("{x:,.0f}")  # 10,000, not a power of ten
# Matplotlib has no word for "the colour of the text around"; this one is exchanged for it.
INK = "#010203"
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
}


def svg(figure: Figure, name: str) -> str:
    """The figure as an element for a page: ids with its name, the page's ink, no addresses."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", drawn).replace("xlink:href", "href").replace(INK, "currentColor")
    for mark in ('id="', "url(#", 'href="#'):
        drawn = drawn.replace(mark, f"{mark}{name}-")
    return drawn
