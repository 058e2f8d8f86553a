"""The results as one self-contained page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from demo.training import Run, Settings
from pages import COLOURS, MARKERS, PLAIN, SIZE, STYLE, page, svg

CONTENT = Path(__file__).with_name("page.html")
CHANCE = 0.03  # of a perplexity: what another seed moves it by


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
        seen=escape(seen(results.rows)),
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


def seen(rows: Sequence[Row]) -> str:
    """What came of it: every compressed pair of tables beside the full one, which is the first row."""
    full, *smaller = rows
    said = [f"{row.name} {row.run.perplexity:.1f} ({_beside(row, full)})" for row in smaller]
    return (
        f"With full tables the perplexity at the end is {full.run.perplexity:.1f}; lower is better. With compressed "
        f"ones it is: {'; '.join(said)}."
    )


def _beside(row: Row, full: Row) -> str:
    """``tables 51.5 times smaller, 8% lower``."""
    change = row.run.perplexity / full.run.perplexity - 1
    level = f"{abs(change):.1%} {'higher' if change > 0 else 'lower'}"
    chance = ", which may be chance" if abs(change) < CHANCE else ""
    return f"tables {row.ratio:,.1f} times smaller, {level}{chance}"


def _row(row: Row, colour: str) -> str:
    # What is compared comes first, as far as a phone shows it.
    return (
        f'<tr><th><i style="background:{colour}"></i>{escape(row.name)}</th><td>{row.ratio:,.1f}</td>'
        f"<td>{row.run.perplexity:.1f}</td><td>{row.parameters:,}</td><td>{row.model_parameters:,}</td>"
        f'<td>{row.run.seconds:.1f}</td><td class="word"><code>{escape(row.format)}</code></td></tr>'
    )


def draw_curves(results: Results) -> Any:
    figure = Figure(figsize=(SIZE[0], SIZE[1] + 0.8), layout="constrained")  # with room for a legend below
    axes = figure.subplots()
    for row, colour, marker in zip(results.rows, COLOURS, MARKERS, strict=True):
        steps, values = zip(*row.run.curve, strict=True)
        axes.plot(steps, values, color=colour, marker=marker, markersize=4, label=f"{row.name}, {row.parameters:,}")
    axes.set(xlabel="steps", ylabel="validation perplexity", yscale="log", xlim=(0, None))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 6, 8)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN)
    figure.legend(title="both tables, parameters", loc="outside lower center", ncols=2)
    return figure


def draw_sizes(results: Results) -> Any:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    # The trains are nearest to each other, the larger mostly lower: its name stands below, so that they do not meet.
    for row, colour, marker, rise in zip(results.rows, COLOURS, MARKERS, (10, 10, -18, 10), strict=True):
        place = (row.parameters, row.run.perplexity)
        axes.plot(*place, color=colour, marker=marker, markersize=9)
        axes.annotate(row.name, place, (0, rise), textcoords="offset points", ha="center")
    axes.set(xlabel="parameters of both tables", ylabel="validation perplexity at the end", xscale="log")
    axes.xaxis.set_major_formatter(PLAIN)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(0.2)
    return figure
