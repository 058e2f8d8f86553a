"""The picture of the README: memory and what it costs side by side, from the committed lines of results."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from provenance import ROOT

RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True)
class Bar:
    """A table in one format."""

    label: str
    megabytes: float
    score: float
    spread: float | None = None  # standard deviation over seeds


@dataclass(frozen=True)
class Panel:
    """Tables of one model, the dense one first."""

    title: str
    score: str  # what the scores are
    bars: tuple[Bar, ...]


def trained_from_scratch(results: Path = RESULTS) -> Panel:
    """The classifier of SST-5, over all seeds of the settings that have the most of them."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in _lines(results / "sentiment.jsonl"):
        if line["dataset"] == "sst5":
            rows[line["row"]][line["settings"]["fingerprint"]].append(line)
    bars, seeds = [], set()
    for row in ("full", "TT1", "TT2", "TT3"):
        runs = max(rows[row].values(), key=len)
        scores, first = [run["test_accuracy"] for run in runs], runs[0]
        label = "torch.nn.Embedding" if row == "full" else f"tensor train, {first['ratio']:.0f} times smaller"
        seeds.add(len(runs))
        bars.append(Bar(label, first["table_parameters"] * 4 / 1e6, fmean(scores), stdev(scores)))
    told = f"test accuracy, {' or '.join(map(str, sorted(seeds)))} seeds"
    return Panel("Trained from scratch: a classifier of sentences (SST-5)", told, tuple(bars))


_FAMILIES = {
    ("int8 / int4", 2): "8 bits",
    ("hot rows", 7): "hot rows in 8 bits, others in 4",
    ("pq", 14): "product quantisation",
    ("TT", 8): "tensor train, not trained again",
}


def already_trained(results: Path = RESULTS) -> Panel:
    """The word table of a sentence encoder, compressed and not trained again; nothing calibrated."""
    lines = [line for line in _lines(results / "compression.jsonl") if line["model"] == "all-MiniLM-L6-v2"]
    found = {(line["family"], line["asked"]): line for line in lines if not line["calibrated"]}
    bars = [Bar("torch.nn.Embedding", lines[0]["table_bytes_before"] / 1e6, 1.0)]
    for key, label in _FAMILIES.items():
        line = found[key]
        told = f"{label}, {line['ratio']:.0f} times smaller"
        bars.append(Bar(told, line["table_bytes"] / 1e6, line["mean_cosine"]))
    return Panel("Already trained: a sentence encoder (all-MiniLM-L6-v2)", "mean cosine to the original", tuple(bars))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Ink, quiet ink, dense bars, others; backgrounds stay clear, so that a page's own shows.
_COLOURS = {
    "light": {"ink": "#1f2328", "quiet": "#59636e", "dense": "#8c959f", "small": "#0969da"},
    "dark": {"ink": "#f0f6fc", "quiet": "#9198a1", "dense": "#656c76", "small": "#4493f8"},
}


def draw(pyplot: Any, folder: Path, panels: Sequence[Panel]) -> list[Path]:
    """A file for pages with a light and one for those with a dark background."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for theme, colours in _COLOURS.items():
        style = {"svg.hashsalt": "tensorbed", "font.size": 9, "text.color": colours["ink"]}
        with pyplot.rc_context(style):
            heights = [len(panel.bars) for panel in panels]
            figure, axes = pyplot.subplots(
                len(panels), 2, figsize=(9, 4.6), layout="constrained", height_ratios=heights, width_ratios=(1, 1)
            )
            for (memory, score), panel in zip(axes, panels, strict=True):
                _draw_panel(memory, score, panel, colours)
            files.append(folder / f"overview-{theme}.svg")
            # The same numbers give the same file.
            figure.savefig(files[-1], transparent=True, metadata={"Date": None})
            pyplot.close(figure)
    return files


def _draw_panel(memory: Any, score: Any, panel: Panel, colours: dict[str, str]) -> None:
    places = range(len(panel.bars))
    fills = [colours["dense"], *[colours["small"]] * (len(panel.bars) - 1)]
    sizes, scores = [bar.megabytes for bar in panel.bars], [bar.score for bar in panel.bars]
    memory.barh(places, sizes, color=fills)
    score.barh(places, scores, color=fills)
    for place, bar in enumerate(panel.bars):
        memory.text(bar.megabytes, place, f" {bar.megabytes:.2g} MB", va="center")
        spread = "" if bar.spread is None else f" ± {bar.spread:.3f}"
        if bar.spread is not None:
            score.errorbar(bar.score, place, xerr=bar.spread, color=colours["ink"], linewidth=1, capsize=2)
        digits = 3 if bar.spread is not None else 4
        score.text(bar.score + (bar.spread or 0), place, f" {bar.score:.{digits}f}{spread}", va="center")
    memory.set_yticks(places, [bar.label for bar in panel.bars], color=colours["ink"])
    score.set_yticks([])
    memory.set_xlim(0, 1.25 * max(sizes))
    score.set_xlim(0, 1.35 * max(scores))
    memory.set_title(panel.title, loc="left", x=-0.75, fontsize=10, fontweight="bold", color=colours["ink"])
    memory.set_xlabel("memory of the table", color=colours["quiet"])
    score.set_xlabel(panel.score, color=colours["quiet"])
    for axes in (memory, score):
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
