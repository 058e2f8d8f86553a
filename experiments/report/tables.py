"""The tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments.report.summary import LABELS, TITLES, Entry, Summary, findings

HEADINGS = (
    "row", "shape", "rank", "ratio", "parameters", "paper", "ours", "to our full", "validation", "seeds", "lr", "std",
)  # fmt: skip
NOTES = (
    "Paper and ours are test accuracies; ours is the mean over seeds with the deviation of the sample. Ratios count as "
    "the paper does, full table over stored numbers without the padding row. Parameters are of the whole model.",
    "Every row has the same words, batches, schedule and selection: words and their order from the training texts, "
    "cased; batches of exactly equal length, so that no padding is seen and nothing is packed; Adam with a rate that "
    "falls to zero in a straight line; the epoch chosen on validation; the test set used once. Learning rate and "
    "deviation of the drawn table come from one small grid, searched for each format on validation (on SST-5 by the "
    "mean of three seeds); where the best point lies at its edge, a wider grid may have a better one.",
    "Padded rows stand beside the tables: texts padded at their end to one length, with a trained row for the padding "
    "where the table is full, with zeros where it is compressed (as in the paper's code) or where the row says zero. "
    "So do long rows: 16 epochs at most and 4 without improvement, where the tables' rows have 8 and 2.",
    "By the size of the test sets (25,000 reviews, 2,210 sentences) an accuracy has a standard error of 0.2 points "
    "on IMDB and 1.0 on SST-5; rows of one seed that are closer than a point are not told apart.",
    "IMDB: the last 256 tokens of each review; 22,500 reviews for training, 2,500 for validation.",
)


def cells(entry: Entry, full: Entry | None) -> tuple[str, ...]:
    """A line of a table, as text."""
    deviation = "" if entry.deviation is None else f" ± {entry.deviation:.3f}"
    beside = "" if full is None or entry is full else f"{100 * (entry.mean - full.mean):+.1f}"
    return (
        entry.row,
        entry.shape,
        entry.rank,
        f"{entry.ratio:,.0f}",
        f"{entry.total_parameters / 1e6:.2f}M",
        "" if entry.paper is None else f"{entry.paper:.3f}",
        f"{entry.mean:.3f}{deviation}",
        beside,
        f"{fmean(entry.validation):.3f}",
        str(len(entry.seeds)),
        f"{entry.lr:g}",
        "Glorot" if entry.std is None else f"{entry.std:g}",
    )


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, its headings first; what is text stands left."""
    rule = ["---" if name in ("row", "shape", "set", "format", "std") else "---:" for name in rows[0]]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def entry_rows(entries: Sequence[Entry], full: Entry | None) -> list[tuple[str, ...]]:
    """Headings and lines of a table."""
    return [HEADINGS, *(cells(entry, full) for entry in entries)]


def search_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Headings and lines of what the search for learning rates saw."""
    rates = sorted({rate for points in summary.grids.values() for rate, _ in points})
    rows: list[tuple[str, ...]] = [("set", "format", "std", *(f"lr {rate:g}" for rate in rates))]
    for (dataset, format), points in summary.grids.items():
        for std in dict.fromkeys(std for _, std in points):
            scores = [points.get((rate, std)) for rate in rates]
            told = ["" if score is None else f"{score:.3f}" for score in scores]
            rows.append((TITLES[dataset], LABELS[format], "Glorot" if std is None else f"{std:g}", *told))
    return rows


def markdown(summary: Summary) -> str:
    """The report as a text."""
    lines = ["# Sentiment", "", "Written by `python -m experiments report` from the lines beside it.", ""]
    for dataset, entries in summary.tables.items():
        lines += [f"## {TITLES[dataset]}", "", *table_lines(entry_rows(entries, summary.entry(dataset, "full"))), ""]
    for dataset, entries in summary.beside.items():
        lines += [
            f"## {TITLES[dataset]}, beside the table",
            "",
            *table_lines(entry_rows(entries, summary.entry(dataset, "full"))),
            "",
        ]
    lines += ["## What is seen", "", *(f"* {said}" for said in findings(summary)), ""]
    lines += ["## How", "", *(f"* {note}" for note in NOTES), ""]
    if summary.grids:
        lines += ["## Search on validation", "", *table_lines(search_rows(summary)), ""]
    return "\n".join(lines)
