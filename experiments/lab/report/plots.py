"""A metric against size, and learning curves, as pictures inside a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from experiments.lab.formats import label
from experiments.lab.metrics import Metric
from experiments.lab.report.summary import Point
from pages import COLOURS, MARKERS, PLAIN, SIZE, STYLE, svg

LINES = ("-", "--", ":", "-.")
TICKS = ((1, 3), (1, 2, 3, 5), (1, 1.5, 2, 2.5, 3, 4, 5, 7))  # in a decade, the sparser ones where sizes span many
# Names of points stand away from their marks, each series' to a side of its own: those of about one size do not meet.
SIDES = ((5, 5, "left"), (5, -13, "left"), (-5, -13, "right"), (-5, 5, "right"))
NAMED = 6  # of more series names lie on each other; the legend and the table tell them


@dataclass(frozen=True)
class Series:
    """Points of one format, or the values of one row while it trains, and how they look."""

    label: str
    colour: str
    marker: str
    side: tuple[int, int, str]  # where the names of its points stand
    line: str
    points: Sequence[Point] = ()
    stages: Sequence[int] = ()
    values: Sequence[float] = ()
    stops: Sequence[int] = ()  # validations, from 1, after which a seed stopped


def looks(names: Iterable[str]) -> dict[str, Series]:
    """A series for each name, empty yet, by its place; where colours come again, with other marks and lines."""
    of_all = {}
    for k, name in enumerate(names):
        again, place = divmod(k, len(COLOURS))
        marker, line = MARKERS[(place + again) % len(MARKERS)], LINES[again % len(LINES)]
        of_all[name] = Series(label(name), COLOURS[place], marker, SIDES[k % len(SIDES)], line)
    return of_all


def size_picture(name: str, metric: Metric, split: str, full: Series, series: Sequence[Series]) -> str:
    """The metric against size: filled ours, with deviations; hollow the paper's; the full table as a line."""
    with matplotlib.rc_context(STYLE):
        # Below, in two columns; names so long that two do not stand side by side have one.
        columns = 2 if all(len(one.label) <= 26 for one in series) else 1
        legend = 0.7 + 0.1 * max(0, len(series) - 6) if columns == 2 else 0.22 * (len(series) + 1)
        figure = Figure(figsize=(SIZE[0], SIZE[1] + legend), layout="constrained")
        axes = figure.add_subplot()
        axes.margins(x=0.25, y=0.1)  # names of points stay inside
        if full.points:
            draw_full(axes, full)
        for one in series:
            draw_points(axes, one, named=len(series) <= NAMED)
        if any(point.paper is not None for one in series for point in one.points):
            hollow: dict[str, Any] = {"markerfacecolor": "none", "color": matplotlib.rcParams["text.color"]}
            axes.plot([], [], "o", **hollow, label="the paper's rows")
        axes.set(xscale="log", xlabel="times smaller than the full table", ylabel=f"{split} {metric.name}")
        axes.xaxis.set_major_locator(FixedLocator(ticks(*axes.get_xlim())))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(PLAIN)
        if metric.log:
            log_axis(axes)
        figure.legend(loc="outside lower center", ncols=columns)
        return svg(figure, name)


def ticks(smallest: float, largest: float) -> list[float]:
    """Of a scale of sizes: three of them at least, unless the sizes are almost equal."""
    within: list[float] = []
    for of_decade in TICKS:
        places = [part * 10**decade for decade in range(5) for part in of_decade]
        within = [place for place in places if smallest <= place <= largest]
        if len(within) >= 3:
            break
    return within


def draw_full(axes: Any, full: Series) -> None:
    """The full table has no size to compare: a line across, with its deviation around it, and the paper's dotted."""
    point, look = full.points[0], {"color": full.colour}
    axes.axhline(point.mean, linewidth=1.6, label="full table", **look)
    if point.deviation is not None:
        axes.axhspan(point.mean - point.deviation, point.mean + point.deviation, alpha=0.12, lw=0, **look)
    if point.paper is not None:
        axes.axhline(point.paper, linewidth=1.6, linestyle=":", label="the paper's full table", **look)


def draw_points(axes: Any, series: Series, *, named: bool) -> None:
    """From the largest table to the smallest, each with its name where that can be read."""
    points = sorted(series.points, key=lambda point: point.ratio)
    look: dict[str, Any] = {"color": series.colour, "marker": series.marker, "markersize": 6}
    ratios, means = [point.ratio for point in points], [point.mean for point in points]
    bars = [point.deviation or 0 for point in points]
    axes.errorbar(ratios, means, bars, label=series.label, capsize=3, linestyle=series.line, **look)
    right, up, side = series.side
    text = {"textcoords": "offset points", "ha": side, "color": series.colour, "fontsize": 9.5}
    for point in points if named else ():
        if point.row:
            axes.annotate(point.row, (point.ratio, point.mean), (right, up), **text)
    paper = [(point.ratio, point.paper) for point in points if point.paper is not None]
    if paper:
        axes.plot(*zip(*paper, strict=True), linestyle="none", markerfacecolor="none", **look)


def curve_picture(name: str, metric: Metric, stage: str, series: Sequence[Series], others: Sequence[Series]) -> str:
    """The metric on validation; with the scales of ``others`` as well, so that pictures side by side compare."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for one in series:
            draw_curve(axes, one)
        values = [value for one in others for value in one.values]
        room = 0.05 * (max(values) - min(values)) or 0.01
        axes.set(xlabel=stage, ylabel=f"validation {metric.name}", ylim=(min(values) - room, max(values) + room))
        last = max(one.stages[-1] for one in others)
        axes.set_xlim(*((0.8, last + 0.2) if stage == "epoch" else (0, 1.03 * last)))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if metric.log:
            axes.set_ylim(0.9 * min(values), 1.1 * max(values))
            log_axis(axes)
        axes.legend(loc="lower right" if metric.higher else "best")
        return svg(figure, name)


def draw_curve(axes: Any, series: Series) -> None:
    """A row's mean over its seeds; a dot is where a seed stopped before the others."""
    look = {"color": series.colour}
    axes.plot(series.stages, series.values, series.line, label=series.label, linewidth=1.8, **look)
    stops = [series.stages[stop - 1] for stop in series.stops]
    axes.plot(stops, [series.values[stop - 1] for stop in series.stops], "o", markersize=4, **look)


def log_axis(axes: Any) -> None:
    """With numbers as people write them."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 6, 8)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN)
