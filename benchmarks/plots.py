"""Pictures of a run: times, efficiency, memory, and how cost grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks import heads, peers
from benchmarks.floors import EFFICIENCY_BOTH, EFFICIENCY_FORWARD
from benchmarks.results import Curve, HeadResult, Report, Result
from benchmarks.tables import short

# One colour and marker an implementation in every picture: ours blue and green, others warm, dense tables grey.
COLOURS = {
    peers.AUTO: "#12508f",
    peers.NATIVE: "#2f8fe0",
    peers.TORCH: "#1f9d76",
    peers.WHOLE: "#b59ad6",
    peers.GATHER: "#e3b341",
    peers.TENSORLY: "#e0793a",
    peers.TORCHTT: "#c2413b",
    peers.DENSE: "#525c69",
    peers.SPARSE: "#a1aab5",
}
HEAD_COLOURS = {
    heads.PLAIN: "#a1aab5",
    heads.FUSED: "#525c69",
    heads.DENSE: "#e3b341",
    heads.LOW_16: "#6cc2a4",
    heads.LOW_96: "#1f9d76",
    heads.TT_16: "#2f8fe0",
    heads.TT_96: "#12508f",
}
MARKERS = {peers.AUTO: "o", peers.NATIVE: "s", peers.TORCH: "^", peers.TENSORLY: "D", peers.DENSE: "v"}
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "legend.frameon": False,
}
_ACROSS = 3


def draw(report: Report, folder: Path) -> dict[str, Path]:
    """Write every picture there is something to show in; by title, in the order to look at them."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds: tuple[tuple[str, str, Callable[[], Figure], bool], ...] = (
        ("Forward and backward", "times.png", lambda: _bars(report.results, _both), bool(report.results)),
        ("Whole training step with Adam", "steps.png", lambda: _bars(report.results, _step), bool(report.results)),
        ("Efficiency", "efficiency.png", lambda: _efficiency(report.results), bool(report.results)),
        ("How cost grows", "scaling.png", lambda: _curves(report.curves), bool(report.curves)),
    )
    found = {}
    with matplotlib.rc_context(STYLE):
        for title, name, make, wanted in kinds:
            if wanted:
                found[title] = folder / name
                make().savefig(found[title], dpi=130)
    return found


def draw_heads(found: HeadResult, folder: Path) -> Path:
    """Write the picture of the heads."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        _heads(found).savefig(folder / "heads.png", dpi=130)
    return folder / "heads.png"


def _both(result: Result, name: str) -> float | None:
    return result.times[name].both.median if name in result.times else None


def _step(result: Result, name: str) -> float | None:
    return result.times[name].step.median if name in result.times else None


def _bars(results: Sequence[Result], value: Callable[[Result, str], float | None]) -> Figure:
    """A panel for each workload, a bar for each implementation, milliseconds on a log scale."""
    down = ceil(len(results) / _ACROSS)
    names = [peer.name for peer in peers.PEERS]
    figure = Figure(figsize=(14, 0.5 + 2.9 * down), layout="constrained")
    panels = figure.subplots(down, _ACROSS, squeeze=False, sharey=True).flatten()
    for panel in panels[len(results) :]:
        panel.set_visible(False)
    for panel, result in zip(panels, results, strict=False):
        _panel(panel, result.workload.name, {name: value(result, name) for name in names}, COLOURS, "milliseconds")
    return figure


def _heads(found: HeadResult) -> Figure:
    """A training step, and the memory of a loss, a bar for each head."""
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    steps = {name: found.times[name].step.median / 1e3 if name in found.times else None for name in HEAD_COLOURS}
    memory = {name: found.memory[name].bytes / 1e6 if name in found.memory else None for name in HEAD_COLOURS}
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, "training step: loss, gradients, Adam", steps, HEAD_COLOURS, "seconds", log=False)
    _panel(right, "peak memory of loss and gradients, beyond the parameters", memory, HEAD_COLOURS, "MB", log=False)
    return figure


def _panel(
    axes: Any,
    title: str,
    values: Mapping[str, float | None],
    colours: Mapping[str, str],
    unit: str,
    *,
    log: bool = True,
) -> None:
    """A bar for each name, on a log scale where values differ by orders of magnitude."""
    known = [value for value in values.values() if value]
    least = min(known, default=1.0) / 2 if log else 0.0
    axes.set_xscale("log" if log else "linear")
    axes.set_xlim(least, max(known, default=1.0) * (5 if log else 1.15))  # room for the numbers
    for place, (name, value) in enumerate(values.items()):
        if value:
            axes.barh(place, value - least, left=least, color=colours[name], height=0.75)
        shown = short(value) if value else "not run"
        colour = "#333" if value else "#999"
        axes.annotate(
            shown, (value or least, place), (4, 0), textcoords="offset points", va="center", fontsize=8, color=colour
        )
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _efficiency(results: Sequence[Result]) -> Figure:
    """Limit over measured for the chosen implementation and the grouped one, with what is asked."""
    figure = Figure(figsize=(14, 1.4 + 0.42 * len(results)), layout="constrained")
    shown = [name for name in (peers.AUTO, peers.TORCH, peers.TENSORLY) if any(name in r.times for r in results)]
    height = 0.8 / max(1, len(shown))
    kinds = (("forward", EFFICIENCY_FORWARD), ("forward and backward", EFFICIENCY_BOTH))
    for k, (axes, (title, asked)) in enumerate(zip(figure.subplots(1, 2, sharey=True), kinds, strict=True)):
        for place, result in enumerate(results):
            for j, name in enumerate(shown):
                found = result.efficiency(name)
                at = place + (j - (len(shown) - 1) / 2) * height
                if found:
                    axes.barh(at, found[k], height * 0.95, color=COLOURS[name])
                    axes.text(found[k] + 0.008, at, f"{found[k]:.2f}", va="center", fontsize=7, color="#333")
        axes.axvline(asked, color="#c2413b", linestyle="--", linewidth=1, label=f"asked: {asked}")
        axes.axvline(0.6, color="#888", linestyle=":", linewidth=1, label="goal: 0.6")
        axes.set_yticks(range(len(results)), [result.workload.name for result in results])
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.set_xlim(0, max(1.0, axes.get_xlim()[1]))
        axes.grid(visible=False, axis="y")
        axes.set_title(f"limit / measured, {title}")
        for name in shown:
            axes.barh(0, 0, color=COLOURS[name], label=name)
        axes.legend(loc="lower right", framealpha=0.9, frameon=True, edgecolor="none")
    return figure


def _curves(curves: Sequence[Curve]) -> Figure:
    """A panel for each quantity, both scales logarithmic but for the order."""
    down = ceil(len(curves) / 2)
    figure = Figure(figsize=(12, 4.3 * down + 0.5), layout="constrained")
    panels = figure.subplots(down, 2, squeeze=False).flatten()
    for panel in panels[len(curves) :]:
        panel.set_visible(False)
    handles: dict[str, Any] = {}
    for axes, curve in zip(panels, curves, strict=False):
        handles.update(_curve(axes, curve))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles) or 1)
    return figure


def _curve(axes: Any, curve: Curve) -> dict[str, Any]:
    found = {}
    for name, colour in COLOURS.items():
        line = [(point.at, point.times[name]) for point in curve.points if name in point.times]
        if line:
            found[name] = axes.plot(*zip(*line, strict=True), color=colour, marker=MARKERS.get(name, "."), ms=5)[0]
    axes.set_yscale("log")
    if curve.name != "order":
        axes.set_xscale("log")
    amount_axis(axes, [point.at for point in curve.points])
    # Curves that stay within a decade need more than one number at their side.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.set_title(f"by {curve.name}: dim 64, {curve.about}")
    axes.set_xlabel(curve.name)
    axes.set_ylabel("forward and backward, ms")
    return found


def amount_axis(axes: Any, places: Sequence[float]) -> None:
    """A mark at each of these places, its number in short."""
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _amount(x)))


def _amount(value: float) -> str:
    """10k, 1M, 1G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:,.0f}"
