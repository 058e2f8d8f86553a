"""The reports of a task, and that of its rows: their tables, pictures, and what is seen in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from experiments.lab.errors import ExperimentError
from experiments.lab.files import write_whole
from experiments.lab.formats import FULL, label
from experiments.lab.league import Standings
from experiments.lab.records import read
from experiments.lab.report.document import Part, document, items, names, pictures, table
from experiments.lab.report.plots import LINES, Look, Series, curve_picture, looks, size_picture
from experiments.lab.report.sentences import (
    counted,
    findings,
    findings_beside,
    how_to_read,
    overheads,
    pace,
    ranges,
    row_names,
    searched,
    value_text,
)
from experiments.lab.report.summary import Entry, Summary, summarise
from experiments.lab.search import Bench


def reports(bench: Bench) -> Iterator[str]:
    """Write what there is to tell of a task, its rows and its league; a sentence on each."""
    everything, standings = read(bench.file()), bench.recorded("league")
    lines = bench.in_tables(everything)
    left_out = len(everything) - len(lines)
    others = f"; {left_out} lines are no runs of the tables as they are configured now" if left_out else ""
    if not lines and not standings:
        makes = f"experiments sweep {bench.task.name} makes them"
        raise ExperimentError(f"{bench.file()} has no runs to report{others}; {makes}.")
    if lines:
        yield f"{written(bench.file(), *tables_report(summarise(bench, lines)))}, from {len(lines)} runs{others}"
    if standings:
        yield f"{written(bench.file('league'), *Standings(bench).report())}, from {len(standings)} runs"


def written(lines: Path, text: str, page: str) -> str:
    """The names of the two files beside the lines, which are written whole."""
    files = {lines.with_suffix(".md"): text, lines.with_suffix(".html"): page}
    for path, content in files.items():
        write_whole(path, content.encode())
    return " and ".join(map(str, files))


def tables_report(summary: Summary) -> tuple[str, str]:
    """As a text and as a page."""
    texts = summary.texts
    sections = {"What is seen": [items(findings(summary))], "What the rows are": [names(row_names(summary))]}
    for dataset, entries in summary.tables.items():
        sections[summary.title(dataset)] = [entry_table(summary, entries), drawn(summary, dataset, entries)]
    for dataset, entries in summary.beside.items():
        said = items(findings_beside(summary, dataset))
        sections[f"{summary.title(dataset)}, beside the table"] = [entry_table(summary, entries), said]
    sections["How"] = [items([*texts.get("notes", []), overheads(summary)])]
    if summary.grids:
        sections["Search on validation"] = [items(searched(summary)), table(search_rows(summary))]
    return document(texts["title"], texts["lead"], sections, heading=texts.get("heading"), about=described(summary))


def entry_table(summary: Summary, entries: Sequence[Entry]) -> Part:
    """A dataset's rows, each with its format's colour and name; of the full table, its name says it."""
    look = looks(summary.formats)
    lines = [cells(summary, entry) for entry in entries]
    papers = any(entry.paper is not None for of in summary.tables.values() for entry in of)
    kept = [name for name in lines[0] if papers or name != "paper"]
    rows = [kept, *([line[name] for name in kept] for line in lines)]
    below = ["" if entry.format == FULL else label(entry.format) for entry in entries]
    return table(rows, [look[entry.format].colour for entry in entries], below)


def cells(summary: Summary, entry: Entry) -> dict[str, str]:
    """A line of a table, as text under its headings. What is compared comes first: a phone shows five columns."""
    metric, full = summary.metric, summary.entry(entry.dataset, FULL)
    beside = "" if full is None or entry is full else f"{metric.beside(entry.mean, full.mean):+.1f}"
    return {
        "row": entry.row,
        "times smaller": f"{entry.ratio:,.0f}",
        "ours": entry.written(metric),
        "to our full": beside,
        "paper": "" if entry.paper is None else metric.written(entry.paper),
        **{name: f"{value:.4g}" for name, value in entry.more.items()},
        "validation": metric.written(fmean(entry.validation)),
        "seeds": str(len(entry.test)),
        "parameters": f"{entry.total_parameters / 1e6:.2f}M",
        "rank": entry.rank,
        **{name: value_text(entry.settings[name]) for name in summary.searched},
        "shape": entry.shape,
    }


def drawn(summary: Summary, dataset: str, entries: Sequence[Entry]) -> Part:
    """A dataset's pictures: the metric against size, and the curves of each format beside the full table's."""
    metric, stage = summary.metric, summary.bench.task.stage
    full = summary.entry(dataset, FULL)
    smaller = [entry for entry in entries if entry.format != FULL]
    of_format = {
        format: Series(label(format), look, [entry for entry in entries if entry.format == format])
        for format, look in looks(summary.formats).items()
    }
    ours = [of_format[format] for format in summary.formats if format != FULL and of_format[format].points]
    sizes = size_picture(f"{dataset}-ratio", metric, summary.bench.split, of_format[FULL], ours)
    seen = ranges(summary, smaller, full) if smaller and full else ""
    figures = [(f"{summary.bench.split.capitalize()} {metric.name} against size", seen, sizes)]
    when = "after each epoch" if stage == "epoch" else "while training"
    everything = curves(entries, of_format)
    for format in dict.fromkeys(entry.format for entry in smaller):
        shown = curves([entry for entry in entries if entry.format in (FULL, format)], of_format)
        curve = curve_picture(f"{dataset}-{format}-curves", metric, stage, shown, everything)
        title = f"Validation {metric.name} {when}: {label(format)}"
        figures.append((title, pace(summary, format, entries), curve))
    return pictures(figures, how_to_read(summary, entries))


def curves(entries: Sequence[Entry], of_format: dict[str, Series]) -> list[Series]:
    """What is drawn of rows while they train: a format's colour, a line of its own for each row."""

    def look(place: int, entry: Entry) -> Look:
        line = "-" if entry.format == FULL else LINES[(place - (entries[0].format == FULL)) % len(LINES)]
        return replace(of_format[entry.format].look, line=line)

    return [
        Series(entry.row, look(place, entry), (), entry.stages, entry.mean_curve, entry.early_stops)
        for place, entry in enumerate(entries)
    ]


def search_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Headings and lines of what the searches saw: a rate a column, whatever else was searched a line."""
    rates = sorted({point[0] for points in summary.grids.values() for point in points})
    rows: list[tuple[str, ...]] = [("set", "format", *summary.searched[1:], *(f"lr {rate:g}" for rate in rates))]
    for (dataset, format), points in summary.grids.items():
        for rest in dict.fromkeys(point[1:] for point in points):
            scores = [points.get((rate, *rest)) for rate in rates]
            told = ["" if score is None else summary.metric.written(score) for score in scores]
            rows.append((summary.title(dataset), label(format), *map(value_text, rest), *told))
    return rows


def described(summary: Summary) -> str:
    """With what it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in (summary.about["versions"] or {}).items())
    machine = summary.about["machine"] or {}
    threads = counted(machine.get("threads") or 0, "thread")
    place = f"{machine.get('processor')}, {machine.get('cores')} cores, {threads} a run"
    return f"{versions}; {place}; commit {', '.join(summary.about['commits'])}."
