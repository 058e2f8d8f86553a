"""Accuracy against ratio, and learning curves, as pictures inside the page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from experiments.report.summary import LABELS, Entry
from pages import COLOURS, MARKERS, PLAIN, STYLE, svg

COLOUR = dict(zip(LABELS, COLOURS, strict=True))
MARKER = dict(zip(LABELS, MARKERS, strict=True))
LINES = ("-", "--", ":", "-.")


def ratio_picture(entries: Sequence[Entry]) -> str:
    """Test accuracy against ratio for each format: filled ours, with deviations; hollow the paper's."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.9), layout="constrained")
        axes = figure.add_subplot()
        for format, label in LABELS.items():
            rows = sorted((entry for entry in entries if entry.format == format), key=lambda entry: entry.ratio)
            if not rows:
                continue
            look: dict[str, Any] = {"color": COLOUR[format], "marker": MARKER[format], "markersize": 6}
            ratios, means = [entry.ratio for entry in rows], [entry.mean for entry in rows]
            axes.errorbar(ratios, means, [entry.deviation or 0 for entry in rows], label=label, capsize=3, **look)
            paper = [(entry.ratio, entry.paper) for entry in rows if entry.paper is not None]
            if paper:
                axes.plot(*zip(*paper, strict=True), linestyle="none", markerfacecolor="none", **look)
        full = next((entry for entry in entries if entry.format == "full"), None)
        if full is not None:
            axes.axhline(full.mean, color=COLOUR["full"], linewidth=1, linestyle=":")
        axes.set(xscale="log", xlabel="ratio", ylabel="test accuracy")
        axes.xaxis.set_major_locator(FixedLocator([1, 3, 10, 30, 100, 300, 1000]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(PLAIN)
        axes.plot([], [], "o", color=matplotlib.rcParams["text.color"], markerfacecolor="none", label="the paper's")
        axes.legend(fontsize=9)
        return svg(figure, f"{entries[0].dataset}-ratio")


def curve_picture(entries: Sequence[Entry]) -> str:
    """Validation accuracy after each epoch, mean over the seeds that got so far."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.9), layout="constrained")
        axes = figure.add_subplot()
        for format in LABELS:
            for place, entry in enumerate(entry for entry in entries if entry.format == format):
                means = [fmean(x for x in scores if x is not None) for scores in zip_longest(*entry.curves)]
                line = LINES[place % len(LINES)]
                axes.plot(range(1, len(means) + 1), means, line, color=COLOUR[format], label=entry.row, linewidth=1.6)
        axes.set(xlabel="epoch", ylabel="validation accuracy")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=9, ncols=2)
        return svg(figure, f"{entries[0].dataset}-curves")
