"""Result lines brought together: one entry a row, mean and deviation over seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from experiments.lab.errors import ExperimentError
from experiments.lab.settings import read_toml

TITLES = {"sst5": "SST-5", "imdb": "IMDB"}
LABELS = {"full": "full", "low_rank": "low rank", "tensor_train": "tensor train", "tensor_ring": "tensor ring"}
ORDER = ("full", "LR3", "LR2", "LR1", "TT1", "TT2", "TT3", "TR1", "TR2", "TR3", "TR4", "TR5", "TR6")
Grids = Mapping[tuple[str, str], Mapping[tuple[float, float | None], float]]  # dataset and format: (lr, std): score
_NUMBERS = ("ratio", "total_parameters", "test_accuracy", "val_accuracy", "overhead")


@dataclass(frozen=True)
class Entry:
    """One row of a table."""

    dataset: str
    row: str
    format: str
    shape: str
    cores: int  # how many a chain has; one factor of the rows each
    rank: str
    ratio: float
    total_parameters: int
    seeds: tuple[int, ...]
    validation: tuple[float, ...]
    test: tuple[float, ...]
    paper: float | None
    curves: tuple[tuple[float, ...], ...]  # validation accuracy after each epoch, a seed each
    overhead: float
    lr: float
    std: float | None
    apart: str | None  # in what a row beside the tables differs from theirs

    @property
    def mean(self) -> float:
        """Test accuracy over the seeds."""
        return fmean(self.test)

    @property
    def deviation(self) -> float | None:
        """Of the sample; there is none with one seed."""
        return stdev(self.test) if len(self.test) > 1 else None

    @property
    def mean_curve(self) -> tuple[float, ...]:
        """Validation accuracy after each epoch, over all seeds.

        A seed that has stopped keeps its last value: a mean of those that are left would jump where one leaves it.
        """
        longest = max(map(len, self.curves))
        carried = [curve + curve[-1:] * (longest - len(curve)) for curve in self.curves]
        return tuple(map(fmean, zip(*carried, strict=True)))

    @property
    def early_stops(self) -> tuple[int, ...]:
        """Epochs, from 1, after which a seed stopped and others went on."""
        lengths = {len(curve) for curve in self.curves}
        return tuple(sorted(lengths - {max(lengths)}))

    @property
    def best_epochs(self) -> tuple[int, ...]:
        """The epoch, from 1, that is best on validation, of each seed."""
        return tuple(1 + curve.index(max(curve)) for curve in self.curves)


@dataclass(frozen=True)
class Summary:
    """All tables, and with what they were measured."""

    tables: dict[str, tuple[Entry, ...]]
    beside: dict[str, tuple[Entry, ...]]  # rows of the tables with one thing changed
    grids: Grids
    about: Mapping[str, Any]

    def entry(self, dataset: str, row: str) -> Entry | None:
        """A row, if it has been run."""
        return next((entry for entry in self.tables.get(dataset, ()) if entry.row == row), None)


def summarise(records: Iterable[Mapping[str, Any]], grids: Grids, paper: Path) -> Summary:
    """Rows of the paper's tables in their order; of a run done twice the later line counts."""
    figures = read_toml(paper)
    groups: defaultdict[tuple[str, str], dict[int, Mapping[str, Any]]] = defaultdict(dict)
    last: Mapping[str, Any] = {}
    commits: dict[str, None] = {}
    for number, record in enumerate(records, 1):
        check_line(record, number)
        groups[record["dataset"], record["row"]][record["seed"]] = record
        last = record
        commits.update(dict.fromkeys(str(one or "unknown") for one in record.get("commits") or [record.get("commit")]))
    if not groups:
        raise ExperimentError("there are no runs to report; python -m experiments sweep sentiment --table makes them.")
    entries = [
        entry_of(dataset, row, groups[dataset, row], figures.get(dataset, {}).get(base(row)))
        for dataset in TITLES
        for row in ordered({row for name, row in groups if name == dataset})
    ]
    return Summary(
        by_dataset(entry for entry in entries if entry.apart is None),
        by_dataset(entry for entry in entries if entry.apart is not None),
        grids,
        {"versions": last.get("versions"), "machine": last.get("machine"), "commits": list(commits)},
    )


def check_line(record: Mapping[str, Any], number: int) -> None:
    """A line is of the settings it tells, and its figures are numbers; otherwise nothing can be said of it."""
    settings = record["settings"]
    wrong = [name for name in ("dataset", "row", "seed", "format") if record.get(name) != settings[name]]
    wrong += [name for name in _NUMBERS if not is_number(record.get(name))]
    epochs = record.get("epochs")
    told = isinstance(epochs, list) and epochs and all(isinstance(epoch, dict) for epoch in epochs)
    if not told or not all(is_number(epoch.get("val_accuracy")) for epoch in record["epochs"]):
        wrong.append("epochs")
    if wrong:
        raise ExperimentError(
            f"run {number} of the tables ({settings['dataset']} {settings['row']} seed {settings['seed']}): "
            f"{', '.join(wrong)} missing or wrong; mend or remove its line."
        )


def is_number(value: Any) -> bool:
    """Finite, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def by_dataset(entries: Iterable[Entry]) -> dict[str, tuple[Entry, ...]]:
    """The entries of each dataset that has any."""
    found: defaultdict[str, tuple[Entry, ...]] = defaultdict(tuple)
    for entry in entries:
        found[entry.dataset] += (entry,)
    return dict(found)


def ordered(rows: Iterable[str]) -> list[str]:
    """As in the paper, and each kind of variant after it in the same order."""
    return sorted(rows, key=lambda row: (row.removeprefix(base(row)), ORDER.index(base(row))))


def entry_of(dataset: str, row: str, runs: Mapping[int, Mapping[str, Any]], paper: float | None) -> Entry:
    """The runs of one row, a seed each."""
    seeds = sorted(runs)
    first, of = runs[seeds[0]], [runs[seed] for seed in seeds]
    settings = first["settings"]
    rows, cols = settings["shape"] or ((settings["vocabulary"],), (settings["dim"],))
    return Entry(
        dataset=dataset,
        row=row,
        format=first["format"],
        shape=f"{factors(rows)} x {factors(cols)}",
        cores=len(rows),
        rank=str(settings["rank"] or "-"),
        ratio=first["ratio"],
        total_parameters=first["total_parameters"],
        seeds=tuple(seeds),
        validation=tuple(run["val_accuracy"] for run in of),
        test=tuple(run["test_accuracy"] for run in of),
        paper=paper,
        curves=tuple(tuple(epoch["val_accuracy"] for epoch in run["epochs"]) for run in of),
        overhead=median(run["overhead"] for run in of),
        lr=settings["lr"],
        std=settings["std"],
        apart=apart(row, settings),
    )


def base(row: str) -> str:
    """The row of the paper's tables it is, or is a variant of: ``full`` for ``full-padded``."""
    return row.split("-")[0]


def apart(row: str, settings: Mapping[str, Any]) -> str | None:
    """What the row of a variant has that the tables' have not; none for theirs."""
    if base(row) == row:
        return None
    if settings["pad_to"]:
        return f"texts padded to {settings['pad_to']} tokens"
    return f"at most {settings['epochs']} epochs, stopped when {settings['patience']} have not improved"


def factors(numbers: Iterable[int]) -> str:
    """``(5, 6)``, or one number by itself."""
    given = list(numbers)
    return str(given[0]) if len(given) == 1 else f"({','.join(map(str, given))})"
