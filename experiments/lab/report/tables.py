"""The reports of a task, and that of its rows: their tables, pictures, and what is seen in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.lab.errors import ExperimentError
from experiments.lab.files import write_whole
from experiments.lab.formats import FULL, label
from experiments.lab.league import Standings
from experiments.lab.metrics import Metric
from experiments.lab.records import read
from experiments.lab.report.document import Part, document, items, names, pictures, table
from experiments.lab.report.plots import LINES, Series, curve_picture, looks, size_picture
from experiments.lab.report.summary import Entry, Point, Summary, base, counted, summarise
from experiments.lab.rows import Bench

_ABOUT = 1.25  # times more or less: ratios of a format come in steps


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
        rows, words = entry_table(summary, entries), summary.samples.get(dataset)
        parts = [items(words), rows] if words else [rows, drawn(summary, dataset, entries)]
        sections[summary.title(dataset)] = parts
    for dataset, entries in summary.beside.items():
        said = items(findings_beside(summary, dataset))
        sections[f"{summary.title(dataset)}, beside the table"] = [entry_table(summary, entries), said]
    if "published" in texts:
        sections["Beside published figures"] = [items([texts["published"]["about"]]), table(published_rows(summary))]
    sections["How"] = [items([*texts.get("notes", []), overheads(summary)])]
    if summary.grids:
        sections["Search on validation"] = [items(searched_sentences(summary)), table(search_rows(summary))]
    return document(texts["title"], texts["lead"], sections, heading=texts.get("heading"), about=described(summary))


def entry_table(summary: Summary, entries: Sequence[Entry]) -> Part:
    """A dataset's rows, each with its format's colour and name; of the full table, its name says it."""
    look = looks(summary.formats)
    lines = [cells(summary, entry) for entry in entries]
    papers = any(entry.paper is not None for of in summary.tables.values() for entry in of)
    kept = [name for name in lines[0] if papers or name != "paper"]
    rows = [kept, *([line.get(name, "") for name in kept] for line in lines)]
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
        **{f"{split} {other.name}": other.written(fmean(values)) for (split, other), values in entry.more.items()},
        "validation": metric.written(fmean(entry.validation)),
        "seeds": str(len(entry.test)),
        "parameters": f"{entry.total_parameters / 1e6:.2f}M",
        **({} if entry.table_bytes is None else {"tables, kB": f"{entry.table_bytes / 1e3:,.0f}"}),
        "rank": entry.rank,
        **{name: value_text(entry.settings[name]) for name in summary.searched},
        "shape": entry.shape,
    }


def drawn(summary: Summary, dataset: str, entries: Sequence[Entry]) -> Part:
    """A dataset's pictures: each metric against size, and the curves of each format beside the full table's."""
    metric, stage = summary.metric, summary.bench.task.stage
    figures = [against_size(summary, dataset, entries, one) for one in summary.bench.task.metrics]
    when = "after each epoch" if stage == "epoch" else "while training"
    of_format = looks(summary.formats)
    everything = curves(entries, of_format)
    for format in dict.fromkeys(entry.format for entry in entries if entry.format != FULL):
        shown = curves([entry for entry in entries if entry.format in (FULL, format)], of_format)
        curve = curve_picture(f"{dataset}-{format}-curves", metric, stage, shown, everything)
        title = f"Validation {metric.name} {when}: {label(format)}"
        figures.append((title, pace(summary, format, entries), curve))
    return pictures(figures, how_to_read(summary, entries))


def against_size(summary: Summary, dataset: str, entries: Sequence[Entry], metric: Metric) -> tuple[str, str, str]:
    """Title, what is seen, and the picture of one metric; of the one that selects, ids without its name."""
    split, full = summary.bench.split, summary.entry(dataset, FULL)
    points = {entry.row: summary.point(entry, metric) for entry in entries}
    of_format = {
        format: replace(series, points=[points[entry.row] for entry in entries if entry.format == format])
        for format, series in looks(summary.formats).items()
    }
    ours = [of_format[format] for format in summary.formats if format != FULL and of_format[format].points]
    name = f"{dataset}-ratio" if metric == summary.metric else f"{dataset}-{metric.name}-ratio"
    picture = size_picture(name, metric, split, of_format[FULL], ours)
    smaller = [points[entry.row] for entry in entries if entry.format != FULL]
    seen = ranges(split, metric, smaller, points[full.row]) if smaller and full else ""
    return f"{split.capitalize()} {metric.name} against size", seen, picture


def curves(entries: Sequence[Entry], of_format: dict[str, Series]) -> list[Series]:
    """What is drawn of rows while they train: a format's colour, a line of its own for each row."""
    drawn, first = [], entries[0].format == FULL
    for place, entry in enumerate(entries):
        own = LINES[(place - first) % len(LINES)]
        line = own if entry.format != FULL else "-" if entry.row == FULL else ":"
        look = replace(of_format[entry.format], label=entry.row, line=line)
        drawn.append(replace(look, stages=entry.stages, values=entry.mean_curve, stops=entry.early_stops))
    return drawn


def search_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Headings and lines of what the searches saw: a rate a column, whatever else was searched a line."""
    rates = sorted({point[0] for points in summary.grids.values() for point in points})
    rows: list[tuple[str, ...]] = [("set", "format", *summary.searched[1:], *(f"lr {rate:g}" for rate in rates))]
    for (dataset, format), points in summary.grids.items():
        metric = summary.bench.search_metric(dataset)
        for rest in dict.fromkeys(point[1:] for point in points):
            scores = [points.get((rate, *rest)) for rate in rates]
            told = ["" if score is None else metric.written(score) for score in scores]
            rows.append((summary.title(dataset), label(format), *map(value_text, rest), *told))
    return rows


def described(summary: Summary) -> str:
    """With what it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in (summary.last.get("versions") or {}).items())
    machine = summary.last.get("machine") or {}
    threads = counted(machine.get("threads") or 0, "thread")
    place = f"{machine.get('processor')}, {machine.get('cores')} cores, {threads} a run"
    return f"{versions}; {place}; commit {', '.join(summary.commits)}."


def findings(summary: Summary) -> list[str]:
    """What the numbers say of the claim that compressed rows reach the full model's level."""
    said = []
    for dataset, entries in summary.compared.items():
        full = summary.entry(dataset, FULL)
        smaller = [entry for entry in entries if entry.format != FULL]
        if full is not None and smaller:
            title = summary.title(dataset)
            seen = ranges(summary.bench.split, summary.metric, smaller, full)
            said += [f"{title}: {seen} {chance(summary, [*smaller, full])}"]
            said += [f"{title}: {best}" for best in best_of_each_format(summary, smaller, full)]
            said += [f"{title}: {order}" for order in order_at_each_size(summary, smaller)]
    return said


def ranges(split: str, metric: Metric, smaller: Sequence[Point], full: Point) -> str:
    """How small the tables are, and how good."""
    sizes = span((entry.ratio for entry in smaller), "{:,.0f}".format)
    values = span((entry.mean for entry in smaller), metric.written)
    return (
        f"tables {sizes} times smaller have a {split} {metric.name} of {values}, the full table has "
        f"{metric.written(full.mean)}."
    )


def chance(summary: Summary, entries: Iterable[Entry]) -> str:
    """How much of a difference may come from the seeds."""
    metric = summary.metric
    deviations = [
        metric.beside(entry.mean + entry.deviation, entry.mean) for entry in entries if entry.deviation is not None
    ]
    if not deviations:
        return "Every row was trained once."
    moved = span(deviations, "{:.1f}".format)
    return f"From seed to seed the {metric.name} of a row deviates by {moved} {metric.unit}."


def best_of_each_format(summary: Summary, smaller: Sequence[Entry], full: Entry) -> list[str]:
    """The row of each format that validation prefers, beside the full table."""
    said, metric = [], summary.metric
    for format in summary.texts.get("findings", summary.formats):
        rows = [entry for entry in smaller if entry.format == format]
        if rows:
            best = metric.best(rows, lambda entry: fmean(entry.validation))
            said.append(
                f"of the {summary.plural(format)} {best.row}, {best.ratio:,.0f} times smaller, is best on validation; "
                f"its {summary.bench.split} {metric.name} is {metric.written(best.mean)}, "
                f"{metric.told(best.mean, full.mean)} the full table's "
                f"({counted(len(best.test), 'seed')}, full {len(full.test)})."
            )
    return said


def order_at_each_size(summary: Summary, smaller: Sequence[Entry]) -> list[str]:
    """Rows of about one of the sizes that a task asks for, the best first, each beside it."""
    said, metric = [], summary.metric
    for size in summary.texts.get("sizes", ()):
        rows = [entry for entry in smaller if is_about(entry, size)]
        if len(rows) > 1:
            first, *others = sorted(rows, key=lambda entry: entry.mean, reverse=metric.higher)
            seeds = {entry.row: counted(len(entry.test), "seed") for entry in rows}
            behind = listed(f"{e.row} ({metric.told(e.mean, first.mean)} it, {seeds[e.row]})" for e in others)
            said.append(
                f"about {size:,} times smaller, {first.row} has the best {summary.bench.split} {metric.name}, "
                f"{metric.written(first.mean)} ({seeds[first.row]}), before {behind}."
            )
    return said


def is_about(entry: Point, size: float) -> bool:
    """Whether it is about so many times smaller."""
    return size / _ABOUT <= entry.ratio <= size * _ABOUT


def published_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Headings and lines of published figures on other data beside ours, by format and size.

    Each is told as its distance to the full table of the same data, whose own figure comes first.
    """
    metric = summary.metric
    columns: dict[str, dict[tuple[str, int], float]] = {}  # by heading, and by format and size
    for dataset, entries in summary.compared.items():
        of_size = {(e.format, size): e.mean for size in summary.texts["sizes"] for e in entries if is_about(e, size)}
        if full := summary.entry(dataset, FULL):
            columns[f"{summary.title(dataset)}, ours"] = {(FULL, 1): full.mean, **of_size}
    for dataset, formats in summary.texts["published"]["rows"].items():
        told = summary.papers[dataset]
        of_row = {(format, int(size)): told[row] for format, rows in formats.items() for size, row in rows.items()}
        columns[summary.title(dataset)] = {(FULL, 1): told[FULL], **of_row}

    def cell(figures: Mapping[tuple[str, int], float], key: tuple[str, int]) -> str:
        if key not in figures:
            return ""
        base = figures[FULL, 1]
        return metric.written(base) if key[0] == FULL else f"{metric.beside(figures[key], base):+.1f}"

    keys = {key for figures in columns.values() for key in figures}
    ordered = sorted(keys, key=lambda key: (summary.formats.index(key[0]), key[1]))
    lines = [(label(k[0]), str(k[1]), *(cell(figures, k) for figures in columns.values())) for k in ordered]
    return [("format", "times smaller, about", *columns), *lines]


def findings_beside(summary: Summary, dataset: str) -> list[str]:
    """What the rows beside a table say, each against the row it is a variant of."""
    said, metric = [], summary.metric
    for entry in summary.beside[dataset]:
        fair = summary.entry(dataset, base(entry.row))
        if fair is not None:
            said.append(
                f"{entry.row}, {entry.apart}, has {metric.written(entry.mean)} "
                f"({counted(len(entry.test), 'seed')}), {metric.told(entry.mean, fair.mean)} {fair.row}."
            )
    return said


def pace(summary: Summary, format: str, entries: Sequence[Entry]) -> str:
    """After how many epochs or steps the rows of a format are best, beside the full table."""

    def best(format: str) -> str | None:
        stages = [stage for entry in entries if entry.format == format for stage in entry.best_stages(summary.metric)]
        return counted(median(stages), summary.bench.task.stage) if stages else None

    beside = "" if best(FULL) is None else f", the full table after {best(FULL)}"
    return f"the {summary.plural(format)} are at their best after {best(format)}{beside}."


def how_to_read(summary: Summary, entries: Sequence[Entry]) -> str:
    """What stands for what in the pictures of a dataset."""
    metrics = summary.bench.task.metrics
    papers = any(entry.paper is not None for entry in entries)
    hollow = "; what is hollow or dotted is the paper's" if papers else ""
    better = ["higher" if metric.higher else "lower" for metric in metrics]
    told = listed(f"{side} {metric.name}" for side, metric in zip(better, metrics, strict=True))
    first = f"picture further right is smaller and {better[0]} is better"
    if len(metrics) > 1:
        first = f"pictures, one for each metric, further right is smaller, and {told} are better"
    said = [f"In the first {first}{hollow}."]
    if any(entry.deviation is not None for entry in entries):
        said.append("Bars, and the band around the full table, are deviations over seeds.")
    if any(len(entry.test) > 1 for entry in entries):
        said.append("In the others each line is the mean over all seeds, and ends where the last of them stopped.")
    if any(entry.early_stops for entry in entries):
        said.append("A dot is where a seed stopped before the others; its last value stays in the mean.")
    return " ".join(said)


def row_names(summary: Summary) -> list[tuple[str, str]]:
    """What the names of the rows stand for, format by format, with the sizes of the rows in their order."""
    rows = {entry.row: entry for entries in summary.tables.values() for entry in entries}
    explained = []
    for format in summary.formats:
        mine = [entry for entry in rows.values() if entry.format == format]
        if mine:
            ranks = listed(dict.fromkeys(entry.rank for entry in mine))
            cores = listed(dict.fromkeys(str(entry.cores) for entry in mine))
            told = summary.texts.get("meanings", {}).get(format, f"{label(format)}, rank {{ranks}}.")
            explained.append((", ".join(entry.row for entry in mine), told.format(ranks=ranks, cores=cores)))
    return explained


def searched_sentences(summary: Summary) -> list[str]:
    """Which point of the grid is best, for which formats; of a search that has not ended it is not known."""
    said = []
    for dataset in dict.fromkeys(dataset for dataset, _ in summary.grids):
        names, metric = summary.bench.plan.search(dataset).names, summary.bench.search_metric(dataset)
        formats: dict[tuple[Any, ...], list[str]] = {}
        unknown: list[str] = []
        for (name, format), scores in summary.grids.items():
            if name != dataset:
                continue
            if summary.bench.untried(dataset, format):
                unknown.append(label(format))
            else:
                formats.setdefault(metric.best(scores, scores.__getitem__), []).append(label(format))
        best = [
            f"{' with '.join(f'{name} {value_text(value)}' for name, value in zip(names, point, strict=True))} for "
            f"{listed(labels)}"
            for point, labels in formats.items()
        ]
        by = "" if metric == summary.metric else f" by {metric.name}"
        told = [f"best{by} is {'; '.join(best)}"] if best else []
        told += [f"the search has not ended for {listed(unknown)}"] if unknown else []
        said.append(f"{summary.title(dataset)}: {'; '.join(told)}.")
    return said


def overheads(summary: Summary) -> str:
    """What the laboratory itself costs."""
    measured = summary.compared or summary.tables
    shares = [entry.overhead for entries in measured.values() for entry in entries]
    return (
        "Everything but forward, backward and the optimiser's step took "
        f"{100 * median(shares):.1f} % of the training time (median over rows; {100 * max(shares):.1f} % in the worst)."
    )


def value_text(value: Any) -> str:
    """Of a setting that is searched; a deviation that was not given is ``Glorot``'s."""
    return "Glorot" if value is None else f"{value:g}"


def span(numbers: Iterable[float], written: Callable[[float], str]) -> str:
    """``78 to 800``, or one number where both ends are written alike."""
    known = list(numbers)
    return " to ".join(dict.fromkeys((written(min(known)), written(max(known)))))


def listed(words: Iterable[str]) -> str:
    """``3, 4 and 6``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
