"""What the numbers say, and what the names in the tables mean, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

from experiments.lab.report.summary import LABELS, TITLES, Entry, Summary, base

PLURALS = {"low_rank": "low-rank tables", "tensor_train": "tensor trains", "tensor_ring": "tensor rings"}


def findings(summary: Summary) -> list[str]:
    """What the numbers say of the claim that compressed rows reach the full model's accuracy."""
    said = []
    for dataset, entries in summary.tables.items():
        full = summary.entry(dataset, "full")
        smaller = [entry for entry in entries if entry.format != "full"]
        if full is not None and smaller:
            title = TITLES[dataset]
            said += [f"{title}: {ranges(smaller, full)} {chance([*smaller, full])}"]
            said += [f"{title}: {best}" for best in best_of_each_format(smaller, full)]
    return said


def ranges(smaller: Sequence[Entry], full: Entry) -> str:
    """How small the tables are, and how accurate."""
    sizes = span((entry.ratio for entry in smaller), "{:,.0f}".format)
    accuracies = span((entry.mean for entry in smaller), "{:.3f}".format)
    return f"tables {sizes} times smaller have a test accuracy of {accuracies}, the full table has {full.mean:.3f}."


def chance(entries: Iterable[Entry]) -> str:
    """How much of a difference may come from the seeds."""
    deviations = [100 * entry.deviation for entry in entries if entry.deviation is not None]
    if not deviations:
        return "Every row was trained once."
    return f"From seed to seed the accuracy of a row deviates by {span(deviations, '{:.1f}'.format)} points."


def best_of_each_format(smaller: Sequence[Entry], full: Entry) -> list[str]:
    """The row of each format that validation prefers, beside the full table."""
    said = []
    for format in ("tensor_train", "tensor_ring", "low_rank"):
        rows = [entry for entry in smaller if entry.format == format]
        if rows:
            best = max(rows, key=lambda entry: fmean(entry.validation))
            said.append(
                f"of the {PLURALS[format]} {best.row}, {best.ratio:,.0f} times smaller, is best on validation; its "
                f"test accuracy is {best.mean:.3f}, {points(best.mean - full.mean)} the full table's "
                f"({counted(len(best.test), 'seed')}, full {len(full.test)})."
            )
    return said


def findings_beside(summary: Summary, dataset: str) -> list[str]:
    """What the rows beside a table say, each against the row it is a variant of."""
    said = []
    for entry in summary.beside[dataset]:
        fair = summary.entry(dataset, base(entry.row))
        if fair is not None:
            said.append(
                f"{entry.row}, {entry.apart}, has {entry.mean:.3f} "
                f"({counted(len(entry.test), 'seed')}), {points(entry.mean - fair.mean)} {fair.row}."
            )
    return said


def pace(format: str, entries: Sequence[Entry]) -> str:
    """After how many epochs the rows of a format are best, beside the full table."""
    full = epochs_to_best(entries, "full")
    beside = "" if full is None else f", the full table after {full}"
    return f"the {PLURALS[format]} are at their best after {epochs_to_best(entries, format)}{beside}."


def epochs_to_best(entries: Iterable[Entry], format: str) -> str | None:
    """``4 epochs``, the median over rows and seeds; none where the format is not there."""
    epochs = [epoch for entry in entries if entry.format == format for epoch in entry.best_epochs]
    return f"{median(epochs):g} {'epoch' if median(epochs) == 1 else 'epochs'}" if epochs else None


def how_to_read(entries: Sequence[Entry]) -> str:
    """What stands for what in the pictures of a dataset."""
    said = [
        "In the first picture further right is smaller and higher is better; what is hollow or dotted is the paper's."
    ]
    if any(entry.deviation is not None for entry in entries):
        said.append("Bars, and the band around the full table, are deviations over seeds.")
    if any(len(entry.seeds) > 1 for entry in entries):
        said.append("In the others each line is the mean over all seeds, and ends where the last of them stopped.")
    if any(entry.early_stops for entry in entries):
        said.append("A dot is where a seed stopped before the others; its last value stays in the mean.")
    return " ".join(said)


def row_names(summary: Summary) -> list[tuple[str, str]]:
    """What the names of the rows stand for, format by format."""
    rows = {entry.row: entry for entries in summary.tables.values() for entry in entries}
    explained = []
    for format in LABELS:
        mine = [entry for entry in rows.values() if entry.format == format]
        if mine:
            explained.append((", ".join(entry.row for entry in mine), meaning(format, mine)))
    return explained


def meaning(format: str, entries: Sequence[Entry]) -> str:
    """A format in words, with the sizes of its rows in their order."""
    ranks = listed(dict.fromkeys(entry.rank for entry in entries))
    cores = listed(str(entry.cores) for entry in entries)
    return {
        "full": "the table itself, a row of its own for every word.",
        "low_rank": f"low rank, the table as the product of two thin matrices: rank {ranks}. Not in the paper.",
        "tensor_train": f"tensor trains, the table as a chain of small cores: {cores} of them, rank {ranks}.",
        "tensor_ring": f"tensor rings, chains whose ends are joined: {cores} cores, rank {ranks}.",
    }[format]


def searched(summary: Summary) -> list[str]:
    """Which point of the grid is best, for which formats."""
    said = []
    for dataset in dict.fromkeys(dataset for dataset, _ in summary.grids):
        formats: dict[tuple[float, float | None], list[str]] = {}
        for (name, format), scores in summary.grids.items():
            if name == dataset:
                formats.setdefault(max(scores, key=scores.__getitem__), []).append(LABELS[format])
        best = [
            f"lr {rate:g} with std {written_std(std)} for {listed(labels)}" for (rate, std), labels in formats.items()
        ]
        said.append(f"{TITLES[dataset]}: best is {'; '.join(best)}.")
    return said


def overheads(summary: Summary) -> str:
    """What the laboratory itself costs."""
    shares = [entry.overhead for entries in summary.tables.values() for entry in entries]
    return (
        "Everything but forward, backward and the optimiser's step took "
        f"{100 * median(shares):.1f} % of the training time (median over rows; {100 * max(shares):.1f} % in the worst)."
    )


def points(difference: float) -> str:
    """``1.2 points above``."""
    return f"{abs(100 * difference):.1f} points {'above' if difference >= 0 else 'below'}"


def counted(number: int, what: str) -> str:
    """``1 seed``, ``5 seeds``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def written_std(std: float | None) -> str:
    """Of the drawn table; ``Glorot`` unless it was given."""
    return "Glorot" if std is None else f"{std:g}"


def span(numbers: Iterable[float], written: Callable[[float], str]) -> str:
    """``78 to 800``, or one number where both ends are written alike."""
    known = list(numbers)
    return " to ".join(dict.fromkeys((written(min(known)), written(max(known)))))


def listed(words: Iterable[str]) -> str:
    """``3, 4 and 6``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
