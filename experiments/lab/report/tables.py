"""The tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments.lab.formats import FULL, label
from experiments.lab.report.sentences import findings, findings_beside, overheads, row_names, searched, value_text
from experiments.lab.report.summary import Entry, Summary
from pages import unbroken

WORDS = ("row", "shape", "set", "format", "std")  # columns of text, which stand left


def entry_rows(summary: Summary, entries: Sequence[Entry], full: Entry | None) -> list[tuple[str, ...]]:
    """Headings and lines of a table. What is compared comes first: a phone shows five columns."""
    lines = [cells(summary, entry, full) for entry in entries]
    papers = any(entry.paper is not None for of in summary.tables.values() for entry in of)
    kept = [name for name in lines[0] if papers or name != "paper"]
    return [tuple(kept), *(tuple(line[name] for name in kept) for line in lines)]


def cells(summary: Summary, entry: Entry, full: Entry | None) -> dict[str, str]:
    """A line of a table, as text under its headings."""
    metric = summary.metric
    deviation = "" if entry.deviation is None else f" ± {metric.written(entry.deviation)}"
    beside = "" if full is None or entry is full else f"{metric.beside(entry.mean, full.mean):+.1f}"
    return {
        "row": entry.row,
        "times smaller": f"{entry.ratio:,.0f}",
        "ours": f"{metric.written(entry.mean)}{deviation}",
        "to our full": beside,
        "paper": "" if entry.paper is None else metric.written(entry.paper),
        **{name: f"{value:.4g}" for name, value in entry.more.items()},
        "validation": metric.written(fmean(entry.validation)),
        "seeds": str(len(entry.seeds)),
        "parameters": f"{entry.total_parameters / 1e6:.2f}M",
        "rank": entry.rank,
        **{name: value_text(entry.settings[name]) for name in summary.searched},
        "shape": entry.shape,
    }


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, its headings first; what is text stands left."""
    rule = ["---" if name in WORDS else "---:" for name in rows[0]]
    lines = [[unbroken(cell) for cell in row] for row in rows[1:]]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *lines)]


def search_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Headings and lines of what the searches saw: a rate a column, whatever else was searched a line."""
    rates = sorted({point[0] for points in summary.grids.values() for point in points})
    others = summary.searched[1:]
    rows: list[tuple[str, ...]] = [("set", "format", *others, *(f"lr {rate:g}" for rate in rates))]
    for (dataset, format), points in summary.grids.items():
        for rest in dict.fromkeys(point[1:] for point in points):
            scores = [points.get((rate, *rest)) for rate in rates]
            told = ["" if score is None else summary.metric.written(score) for score in scores]
            rows.append((summary.title(dataset), label(format), *map(value_text, rest), *told))
    return rows


def notes(summary: Summary) -> list[str]:
    """How it was measured, and what that cost."""
    return [*summary.texts.get("notes", []), overheads(summary)]


def markdown(summary: Summary) -> str:
    """The report as a text."""
    lines = [f"# {summary.texts['title']}", "", summary.texts["lead"], ""]
    lines += ["Written by `python -m experiments report` from the lines beside it.", ""]
    lines += ["## What is seen", "", *(f"* {said}" for said in findings(summary)), ""]
    lines += ["## What the rows are", "", *(f"* **{names}**: {what}" for names, what in row_names(summary)), ""]
    for part, beside in ((summary.tables, ""), (summary.beside, ", beside the table")):
        for dataset, entries in part.items():
            lines += [f"## {summary.title(dataset)}{beside}", ""]
            lines += [*table_lines(entry_rows(summary, entries, summary.entry(dataset, FULL))), ""]
            if beside:
                lines += [*(f"* {said}" for said in findings_beside(summary, dataset)), ""]
    lines += ["## How", "", *(f"* {note}" for note in notes(summary)), ""]
    if summary.grids:
        lines += ["## Search on validation", "", *(f"* {said}" for said in searched(summary)), ""]
        lines += [*table_lines(search_rows(summary)), ""]
    return "\n".join(lines)
