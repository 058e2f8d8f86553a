"""The curve: time and memory of training by the rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.click_through.contestants import FULL, HASHED, LONGER, SPARSE, TORCHREC, TRAIN
from benchmarks.click_through.steps import Case, Point
from benchmarks.plots import STYLE, amount_axis

COLOURS = {
    TRAIN: "#12508f",
    LONGER: "#7a3fa0",
    HASHED: "#1f9d76",
    FULL: "#525c69",
    SPARSE: "#a1aab5",
    TORCHREC: "#e0793a",
}


def draw(points: Mapping[Case, Point | str], path: Path) -> None:
    """Write the picture."""
    panels = (
        ("training step of the tables, ms", "log", lambda point: point.tables_ms),
        ("training of the whole model, rows a second", "linear", lambda point: point.rows_per_second),
        ("peak memory of the tables, MB", "log", lambda point: point.tables_bytes / 1e6),
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4), layout="constrained")
        for axes, (title, scale, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            handles = {name: line for name in COLOURS if (line := curve(axes, name, points, value))}
            axes.set_title(title)
            axes.set_yscale(scale)
            axes.set_ylim(bottom=0 if scale == "linear" else None)
            axes.set_xscale("log")
            axes.set_xlabel("rows of each of 26 tables")
            amount_axis(axes, sorted({case.rows for case in points}))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles) or 1)
        figure.savefig(path, dpi=130)


def curve(axes: Any, name: str, points: Mapping[Case, Point | str], value: Any) -> Any:
    """A line from point to point, or none."""
    found = sorted(
        (case.rows, value(point))
        for case, point in points.items()
        if case.implementation == name and not isinstance(point, str)
    )
    return axes.plot(*zip(*found, strict=True), color=COLOURS[name], marker="o", ms=5)[0] if found else None
