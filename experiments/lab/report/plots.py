"""Accuracy against size, and learning curves, as pictures inside the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from experiments.lab.report.summary import LABELS, Entry
from pages import COLOURS, MARKERS, PLAIN, SIZE, STYLE, svg

COLOUR = dict(zip(LABELS, COLOURS, strict=True))
MARKER = dict(zip(LABELS, MARKERS, strict=True))
LINES = ("-", "--", ":", "-.")
TICKS = (10, 30, 100, 300, 1000)
# Names of rows stand away from their marks, each format's to a side of its own: rows of about one size do not meet.
NAMES = {"low_rank": (5, -13, "left"), "tensor_train": (-5, -13, "right"), "tensor_ring": (5, 5, "left")}


def ratio_picture(entries: Sequence[Entry]) -> str:
    """Test accuracy against size for each format: filled ours, with deviations; hollow the paper's; full as a line."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], SIZE[1] + 0.7), layout="constrained")  # with room for a legend below
        axes = figure.add_subplot()
        axes.margins(x=0.12)
        for entry in entries:
            if entry.format == "full":
                draw_full(axes, entry)
        for format, label in LABELS.items():
            rows = sorted((entry for entry in entries if entry.format == format), key=lambda entry: entry.ratio)
            if rows and format != "full":
                draw_format(axes, format, label, rows)
        hollow: dict[str, Any] = {"markerfacecolor": "none", "color": matplotlib.rcParams["text.color"]}
        axes.plot([], [], "o", **hollow, label="the paper's rows")
        axes.set(xscale="log", xlabel="times smaller than the full table", ylabel="test accuracy")
        axes.xaxis.set_major_locator(FixedLocator(TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(PLAIN)
        figure.legend(loc="outside lower center", ncols=2)
        return svg(figure, f"{entries[0].dataset}-ratio")


def draw_full(axes: Any, full: Entry) -> None:
    """The full table has no size to compare: a line across, with its deviation around it, and the paper's dotted."""
    axes.axhline(full.mean, color=COLOUR["full"], linewidth=1.6, label="full table")
    if full.deviation is not None:
        axes.axhspan(full.mean - full.deviation, full.mean + full.deviation, color=COLOUR["full"], alpha=0.12, lw=0)
    if full.paper is not None:
        axes.axhline(full.paper, color=COLOUR["full"], linewidth=1.6, linestyle=":", label="the paper's full table")


def draw_format(axes: Any, format: str, label: str, rows: Sequence[Entry]) -> None:
    """A format's rows from the largest table to the smallest, each with its name."""
    look: dict[str, Any] = {"color": COLOUR[format], "marker": MARKER[format], "markersize": 6}
    ratios, means = [entry.ratio for entry in rows], [entry.mean for entry in rows]
    axes.errorbar(ratios, means, [entry.deviation or 0 for entry in rows], label=label, capsize=3, **look)
    right, up, side = NAMES[format]
    for entry in rows:
        place = (entry.ratio, entry.mean)
        axes.annotate(
            entry.row, place, (right, up), textcoords="offset points", ha=side, color=COLOUR[format], fontsize=9.5
        )
    paper = [(entry.ratio, entry.paper) for entry in rows if entry.paper is not None]
    if paper:
        axes.plot(*zip(*paper, strict=True), linestyle="none", markerfacecolor="none", **look)


def curve_picture(format: str, entries: Sequence[Entry]) -> str:
    """Validation accuracy after each epoch of a format's rows and the full table, over all seeds."""
    shown = [entry for entry in entries if entry.format in ("full", format)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for place, entry in enumerate(shown):
            draw_curve(axes, entry, LINES[(place - (shown[0].format == "full")) % len(LINES)])
        # The same scales for every format, so that pictures side by side compare.
        means = [mean for entry in entries for mean in entry.mean_curve]
        room = 0.05 * (max(means) - min(means)) or 0.01
        axes.set(xlabel="epoch", ylabel="validation accuracy", ylim=(min(means) - room, max(means) + room))
        axes.set_xlim(0.8, max(len(entry.mean_curve) for entry in entries) + 0.2)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower right")
        return svg(figure, f"{entries[0].dataset}-{format}-curves")


def draw_curve(axes: Any, entry: Entry, line: str) -> None:
    """A row's mean over its seeds; a dot is where a seed stopped before the others."""
    means, look = entry.mean_curve, {"color": COLOUR[entry.format]}
    style = "-" if entry.format == "full" else line
    axes.plot(range(1, len(means) + 1), means, style, label=entry.row, linewidth=1.8, **look)
    axes.plot(entry.early_stops, [means[epoch - 1] for epoch in entry.early_stops], "o", markersize=4, **look)
