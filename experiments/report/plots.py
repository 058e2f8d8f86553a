"""Accuracy against ratio, and learning curves, as pictures inside the page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

from experiments.report.summary import Entry

COLOURS = {"full": "#64748b", "low_rank": "#e0793a", "tensor_train": "#2f7fd8", "tensor_ring": "#1f9d76"}
MARKERS = {"full": "o", "low_rank": "s", "tensor_train": "^", "tensor_ring": "D"}
LABELS = {"full": "full", "low_rank": "low rank", "tensor_train": "tensor train", "tensor_ring": "tensor ring"}
LINES = ("-", "--", ":", "-.")
# Matplotlib has no word for "the colour of the text around"; this one is exchanged for it.
INK = "#010203"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tensorbed",
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


def ratio_picture(entries: Sequence[Entry]) -> str:
    """Test accuracy against ratio for each format: filled ours, with deviations; hollow the paper's."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.9), layout="constrained")
        axes = figure.add_subplot()
        for format, label in LABELS.items():
            rows = sorted((entry for entry in entries if entry.format == format), key=lambda entry: entry.ratio)
            if not rows:
                continue
            look: dict[str, Any] = {"color": COLOURS[format], "marker": MARKERS[format], "markersize": 6}
            ratios, means = [entry.ratio for entry in rows], [entry.mean for entry in rows]
            axes.errorbar(ratios, means, [entry.deviation or 0 for entry in rows], label=label, capsize=3, **look)
            paper = [(entry.ratio, entry.paper) for entry in rows if entry.paper is not None]
            if paper:
                axes.plot(*zip(*paper, strict=True), linestyle="none", markerfacecolor="none", **look)
        full = next((entry for entry in entries if entry.format == "full"), None)
        if full is not None:
            axes.axhline(full.mean, color=COLOURS["full"], linewidth=1, linestyle=":")
        axes.set(xscale="log", xlabel="ratio", ylabel="test accuracy")
        axes.xaxis.set_major_locator(FixedLocator([1, 3, 10, 30, 100, 300, 1000]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.plot([], [], "o", color=INK, markerfacecolor="none", label="the paper's")
        axes.legend(fontsize=9)
        return picture(figure)


def curve_picture(entries: Sequence[Entry]) -> str:
    """Validation accuracy after each epoch, mean over the seeds that got so far."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.9), layout="constrained")
        axes = figure.add_subplot()
        for format in LABELS:
            for place, entry in enumerate(entry for entry in entries if entry.format == format):
                means = [fmean(x for x in scores if x is not None) for scores in zip_longest(*entry.curves)]
                line = LINES[place % len(LINES)]
                axes.plot(range(1, len(means) + 1), means, line, color=COLOURS[format], label=entry.row, linewidth=1.6)
        axes.set(xlabel="epoch", ylabel="validation accuracy")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=9, ncols=2)
        return picture(figure)


def picture(figure: Figure) -> str:
    """The figure as SVG in the colours of the page around it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue()
    return re.sub(INK, "currentColor", drawn[drawn.index("<svg") :])
