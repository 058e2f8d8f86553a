"""The results as one self-contained page and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from demo.training import Run, Settings
from pages import COLOURS, MARKERS, PLAIN, STYLE, page, svg

CONTENT = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Row:
    """One format at both ends and what came of it."""

    name: str
    format: str
    structure: str  # of either table
    parameters: int  # of both tables
    ratio: float  # numbers of two full tables over those of both
    model_parameters: int  # tables, head's bias and body
    run: Run


@dataclass(frozen=True)
class Results:
    """Everything the page tells."""

    settings: Settings
    corpus: dict[str, Any]
    model: dict[str, Any]
    versions: dict[str, str]
    command: str  # what to type for the same numbers
    rows: tuple[Row, ...]

    def as_json(self) -> str:
        tables = [
            {key: value for key, value in asdict(row).items() if key != "run"}
            | {"perplexity": row.run.perplexity, "seconds": round(row.run.seconds, 2), "curve": row.run.curve}
            for row in self.rows
        ]
        rest = {"corpus": self.corpus, "model": self.model, "versions": self.versions, "command": self.command}
        return json.dumps({"settings": asdict(self.settings), **rest, "tables": tables}, indent=2) + "\n"


def write_results(results: Results, folder: Path) -> Path:
    """``demo.json`` and ``demo.html`` in a folder; the page's path."""
    (folder / "demo.json").write_text(results.as_json(), encoding="utf-8")
    path = folder / "demo.html"
    path.write_text(as_html(results), encoding="utf-8")
    return path


def as_html(results: Results) -> str:
    with matplotlib.rc_context(STYLE):
        curves, sizes = svg(draw_curves(results), "curves"), svg(draw_sizes(results), "sizes")
    corpus, model, settings, first = results.corpus, results.model, results.settings, results.rows[0]
    rest = first.model_parameters - first.parameters
    return page(
        "Both ends of a language model, full and compressed",
        CONTENT,
        rows="\n".join(_row(row, colour) for row, colour in zip(results.rows, COLOURS, strict=True)),
        curves=curves,
        sizes=sizes,
        command=escape(results.command),
        source=escape(corpus["source"]),
        versions=escape(", ".join(f"{name} {version}" for name, version in results.versions.items())),
        **{name: f"{corpus[name]:,}" for name in ("files", "words", "train_tokens", "valid_tokens", "scored_tokens")},
        unknown=f"{corpus['unknown_share']:.1%}",
        by_frequency=f"{corpus['perplexity_by_frequency']:.0f}",
        body=f"{rest - corpus['words']:,}",
        **{name: f"{value:,}" for name, value in asdict(settings).items()},
        **{name: str(model[name]) for name in ("window", "learning_rate", "embedding_std", "head_std", "hidden")},
    )


def _row(row: Row, colour: str) -> str:
    return (
        f'<tr><th><i style="background:{colour}"></i>{escape(row.name)}</th><td><code>{escape(row.format)}</code></td>'
        f"<td>{row.parameters:,}</td><td>{row.ratio:,.1f}</td><td>{row.model_parameters:,}</td>"
        f"<td>{row.run.perplexity:.1f}</td><td>{row.run.seconds:.1f}</td></tr>"
    )


def draw_curves(results: Results) -> Any:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for row, colour, marker in zip(results.rows, COLOURS, MARKERS, strict=True):
        steps, values = zip(*row.run.curve, strict=True)
        axes.plot(steps, values, color=colour, marker=marker, markersize=4, label=f"{row.name}, {row.parameters:,}")
    axes.set(xlabel="steps", ylabel="validation perplexity", yscale="log", xlim=(0, None))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 6, 8)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN)
    axes.legend(title="both tables, parameters")
    return figure


def draw_sizes(results: Results) -> Any:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    # Above and below by turns, so that the names of tables of almost the same size do not meet.
    for row, colour, marker, rise in zip(results.rows, COLOURS, MARKERS, (10, -18, 10, -18), strict=True):
        place = (row.parameters, row.run.perplexity)
        axes.plot(*place, color=colour, marker=marker, markersize=9)
        axes.annotate(row.name, place, (0, rise), textcoords="offset points", ha="center")
    axes.set(xlabel="parameters of both tables", ylabel="validation perplexity at the end", xscale="log")
    axes.xaxis.set_major_formatter(PLAIN)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(0.2)
    return figure
