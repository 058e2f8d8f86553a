"""What the numbers say, and what the names in the tables mean, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from experiments.lab.formats import FULL, label
from experiments.lab.report.summary import Entry, Summary, base


def findings(summary: Summary) -> list[str]:
    """What the numbers say of the claim that compressed rows reach the full model's level."""
    said = []
    for dataset, entries in summary.tables.items():
        full = summary.entry(dataset, FULL)
        smaller = [entry for entry in entries if entry.format != FULL]
        if full is not None and smaller:
            title = summary.title(dataset)
            said += [f"{title}: {ranges(summary, smaller, full)} {chance(summary, [*smaller, full])}"]
            said += [f"{title}: {best}" for best in best_of_each_format(summary, smaller, full)]
    return said


def ranges(summary: Summary, smaller: Sequence[Entry], full: Entry) -> str:
    """How small the tables are, and how good."""
    metric = summary.metric
    sizes = span((entry.ratio for entry in smaller), "{:,.0f}".format)
    values = span((entry.mean for entry in smaller), metric.written)
    return (
        f"tables {sizes} times smaller have a {summary.bench.split} {metric.name} of {values}, the full table has "
        f"{metric.written(full.mean)}."
    )


def chance(summary: Summary, entries: Iterable[Entry]) -> str:
    """How much of a difference may come from the seeds."""
    metric = summary.metric
    deviations = [metric.spread(entry.deviation, entry.mean) for entry in entries if entry.deviation is not None]
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
    better = "higher" if summary.metric.higher else "lower"
    papers = any(entry.paper is not None for entry in entries)
    hollow = "; what is hollow or dotted is the paper's" if papers else ""
    said = [f"In the first picture further right is smaller and {better} is better{hollow}."]
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
            cores = listed(str(entry.cores) for entry in mine)
            told = summary.texts.get("meanings", {}).get(format, f"{label(format)}, rank {{ranks}}.")
            explained.append((", ".join(entry.row for entry in mine), told.format(ranks=ranks, cores=cores)))
    return explained


def searched(summary: Summary) -> list[str]:
    """Which point of the grid is best, for which formats."""
    said = []
    for dataset in dict.fromkeys(dataset for dataset, _ in summary.grids):
        names = summary.bench.plan.search(dataset).names
        formats: dict[tuple[Any, ...], list[str]] = {}
        for (name, format), scores in summary.grids.items():
            if name == dataset:
                formats.setdefault(summary.metric.best(scores, scores.__getitem__), []).append(label(format))
        best = [
            f"{' with '.join(f'{name} {value_text(value)}' for name, value in zip(names, point, strict=True))} for "
            f"{listed(labels)}"
            for point, labels in formats.items()
        ]
        said.append(f"{summary.title(dataset)}: best is {'; '.join(best)}.")
    return said


def overheads(summary: Summary) -> str:
    """What the laboratory itself costs."""
    shares = [entry.overhead for entries in summary.tables.values() for entry in entries]
    return (
        "Everything but forward, backward and the optimiser's step took "
        f"{100 * median(shares):.1f} % of the training time (median over rows; {100 * max(shares):.1f} % in the worst)."
    )


def counted(number: float, what: str) -> str:
    """``1 seed``, ``5 seeds``."""
    return f"{number:g} {what}{'' if number == 1 else 's'}"


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
