"""The tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments.lab.report.sentences import findings, findings_beside, overheads, row_names, searched, written_std
from experiments.lab.report.summary import LABELS, TITLES, Entry, Summary
from pages import unbroken

LEAD = (
    "The classifier of the paper Tensorized Embedding Layers (Hrinchuk, Khrulkov and others), a bidirectional LSTM on "
    "word embeddings, trained with the table in full and in compressed formats. Only the table differs from row to "
    "row, and the learning rate and initial scale found for its format. Rows have the paper's names."
)
# What is compared comes first: a phone shows five columns, and the rest is to be scrolled to.
HEADINGS = (
    "row", "times smaller", "ours", "to our full", "paper", "validation", "seeds", "parameters", "rank", "lr", "std",
    "shape",
)  # fmt: skip
WORDS = ("row", "shape", "set", "format", "std")  # columns of text, which stand left
NOTES = (
    "Paper and ours are test accuracies; ours is the mean over seeds with the deviation of the sample. To our full: "
    "the difference to our full row in points, hundredths of accuracy. Times smaller, the ratio, counts as the paper "
    "does, full table over stored numbers without the padding row. Parameters are of the whole model; lr is the "
    "learning rate, std the deviation of the drawn table.",
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
        f"{entry.ratio:,.0f}",
        f"{entry.mean:.3f}{deviation}",
        beside,
        "" if entry.paper is None else f"{entry.paper:.3f}",
        f"{fmean(entry.validation):.3f}",
        str(len(entry.seeds)),
        f"{entry.total_parameters / 1e6:.2f}M",
        entry.rank,
        f"{entry.lr:g}",
        written_std(entry.std),
        entry.shape,
    )


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, its headings first; what is text stands left."""
    rule = ["---" if name in WORDS else "---:" for name in rows[0]]
    lines = [[unbroken(cell) for cell in row] for row in rows[1:]]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *lines)]


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
            rows.append((TITLES[dataset], LABELS[format], written_std(std), *told))
    return rows


def notes(summary: Summary) -> list[str]:
    """How it was measured, and what that cost."""
    return [*NOTES, overheads(summary)]


def markdown(summary: Summary) -> str:
    """The report as a text."""
    lines = ["# Sentiment", "", LEAD, "", "Written by `python -m experiments report` from the lines beside it.", ""]
    lines += ["## What is seen", "", *(f"* {said}" for said in findings(summary)), ""]
    lines += ["## What the rows are", "", *(f"* **{names}**: {what}" for names, what in row_names(summary)), ""]
    for dataset, entries in summary.tables.items():
        lines += [f"## {TITLES[dataset]}", "", *table_lines(entry_rows(entries, summary.entry(dataset, "full"))), ""]
    for dataset, entries in summary.beside.items():
        lines += [f"## {TITLES[dataset]}, beside the table", ""]
        lines += [*table_lines(entry_rows(entries, summary.entry(dataset, "full"))), ""]
        lines += [*(f"* {said}" for said in findings_beside(summary, dataset)), ""]
    lines += ["## How", "", *(f"* {note}" for note in notes(summary)), ""]
    if summary.grids:
        lines += ["## Search on validation", "", *(f"* {said}" for said in searched(summary)), ""]
        lines += [*table_lines(search_rows(summary)), ""]
    return "\n".join(lines)
