"""Result lines brought together: one entry a row, mean and deviation over seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, stdev
from typing import Any

from experiments.lab.errors import ExperimentError
from experiments.lab.formats import FULL, label
from experiments.lab.metrics import Metric
from experiments.lab.rows import Bench
from experiments.lab.settings import read_toml
from experiments.lab.task import Task


@dataclass(frozen=True, kw_only=True)
class Point:
    """What came of tables of one size, in a picture or in words."""

    ratio: float
    test: tuple[float, ...]  # a seed each; or validation, where a task has no test set
    paper: float | None = None
    row: str = ""

    @property
    def mean(self) -> float:
        return fmean(self.test)

    @property
    def deviation(self) -> float | None:
        return stdev(self.test) if len(self.test) > 1 else None

    def written(self, metric: Metric) -> str:
        """``59.1 ± 0.3``."""
        return metric.written(self.mean) + ("" if self.deviation is None else f" ± {metric.written(self.deviation)}")


@dataclass(frozen=True, kw_only=True)
class Entry(Point):
    """One row of a table."""

    dataset: str
    format: str
    shape: str
    cores: int  # how many a chain has; one factor of the rows each
    rank: str
    total_parameters: int
    table_bytes: int | None  # of all tables together, where a task tells it
    validation: tuple[float, ...]
    more: Mapping[tuple[str, Metric], tuple[float, ...]]  # other metrics and test sets, a seed each
    curves: tuple[tuple[float, ...], ...]  # the metric at each validation, a seed each
    stages: tuple[int, ...]  # epochs or steps of these validations
    overhead: float
    settings: Mapping[str, Any]
    apart: str | None  # in what a row beside the tables differs from theirs

    @property
    def mean_curve(self) -> tuple[float, ...]:
        """The metric at each validation, over all seeds.

        A seed that has stopped keeps its last value: a mean of those that are left would jump where one leaves it.
        """
        longest = max(map(len, self.curves))
        carried = [curve + curve[-1:] * (longest - len(curve)) for curve in self.curves]
        return tuple(map(fmean, zip(*carried, strict=True)))

    @property
    def early_stops(self) -> tuple[int, ...]:
        """Validations, from 1, after which a seed stopped and others went on."""
        lengths = {len(curve) for curve in self.curves}
        return tuple(sorted(lengths - {max(lengths)}))

    def best_stages(self, metric: Metric) -> list[int]:
        """The epoch or step that is best on validation, of each seed."""
        return [self.stages[curve.index(metric.best(curve, float))] for curve in self.curves]


@dataclass(frozen=True)
class Summary:
    """All tables, and with what they were measured."""

    bench: Bench
    tables: Mapping[str, Sequence[Entry]]
    beside: Mapping[str, Sequence[Entry]]  # rows of the tables with one thing changed
    last: Mapping[str, Any]  # of the lines
    commits: Sequence[str]
    papers: Mapping[str, Mapping[str, float]]  # published figures by dataset and row

    @property
    def metric(self) -> Metric:
        return self.bench.metric

    @property
    def texts(self) -> Mapping[str, Any]:
        return self.bench.task.texts

    @property
    def samples(self) -> Mapping[str, Sequence[str]]:
        """Words on datasets that are too small to conclude anything from."""
        words: Mapping[str, Sequence[str]] = self.texts.get("samples", {})
        return words

    @property
    def compared(self) -> Mapping[str, Sequence[Entry]]:
        """The tables of all other datasets."""
        return {dataset: entries for dataset, entries in self.tables.items() if dataset not in self.samples}

    @cached_property
    def grids(self) -> Mapping[tuple[str, str], Mapping[tuple[Any, ...], float]]:
        return self.bench.grids()

    @property
    def searched(self) -> list[str]:
        """Settings that searches choose, the learning rate first."""
        return list(dict.fromkeys(["lr", *(n for search in self.bench.plan.searches.values() for n in search.names)]))

    @property
    def formats(self) -> list[str]:
        """In the order the task tells, others as they come."""
        used = [entry.format for entries in self.tables.values() for entry in entries]
        return list(dict.fromkeys([*self.texts.get("formats", [FULL]), *used]))

    def title(self, dataset: str) -> str:
        return str(self.texts.get("datasets", {}).get(dataset, dataset))

    def plural(self, format: str) -> str:
        return str(self.texts.get("plurals", {}).get(format, f"{label(format)} tables"))

    def point(self, entry: Entry, metric: Metric) -> Point:
        """An entry by any metric of the task, on the split that is told first; the paper has its own of one."""
        values = entry.more.get(((*self.bench.task.tests, "val")[0], metric))
        return entry if values is None else Point(ratio=entry.ratio, test=values, row=entry.row)

    def entry(self, dataset: str, row: str) -> Entry | None:
        return next((entry for entry in self.tables.get(dataset, ()) if entry.row == row), None)


def summarise(bench: Bench, records: Sequence[Mapping[str, Any]]) -> Summary:
    """Rows in the task's order; of a run done twice the later line counts."""
    paper, texts = bench.task.folder / "paper.toml", bench.task.texts
    figures = read_toml(paper) if paper.exists() else {}
    groups: defaultdict[tuple[str, str], dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for number, record in enumerate(records, 1):
        check_line(bench, record, number)
        groups[record["dataset"], record["row"]][record["seed"]] = record
    datasets = list(dict.fromkeys([*texts.get("datasets", {}), *(dataset for dataset, _ in groups)]))
    order = texts.get("order", list(dict.fromkeys(row for _, row, _ in bench.plan.runs)))

    def place(key: tuple[str, str]) -> tuple[int, str, int]:
        """Each kind of variant after the rows, in the same order."""
        row = base(key[1])
        return datasets.index(key[0]), key[1].removeprefix(row), order.index(row) if row in order else len(order)

    tables: defaultdict[str, list[Entry]] = defaultdict(list)
    beside: defaultdict[str, list[Entry]] = defaultdict(list)
    for dataset, row in sorted(groups, key=place):
        entry = entry_of(bench, groups[dataset, row], figures.get(dataset, {}).get(base(row)))
        (tables if entry.apart is None else beside)[dataset].append(entry)
    commits = [commit for record in records for commit in record.get("commits") or [record.get("commit")]]
    known = list(dict.fromkeys(str(commit or "unknown") for commit in commits))
    return Summary(bench, tables, beside, records[-1], known, figures)


def check_line(bench: Bench, record: Mapping[str, Any], number: int) -> None:
    """A line is of the settings it tells, and its figures are numbers; otherwise nothing can be said of it."""
    settings, task = record["settings"], bench.task
    wrong = [name for name in ("dataset", "row", "seed", "format") if record.get(name) != settings[name]]
    measured = [f"{split}_{metric.name}" for split in splits_of(task, record) for metric in task.metrics]
    numbers = ("ratio", "total_parameters", *measured, "overhead")
    wrong += [name for name in numbers if not is_number(record.get(name))]
    epochs = record.get("epochs")
    told = isinstance(epochs, list) and epochs and all(isinstance(epoch, dict) for epoch in epochs)
    if not told or not all(is_number(epoch.get(f"val_{bench.metric.name}")) for epoch in record["epochs"]):
        wrong.append("epochs")
    if wrong:
        raise ExperimentError(
            f"run {number} of the tables ({settings['dataset']} {settings['row']} seed {settings['seed']}): "
            f"{', '.join(wrong)} missing or wrong; mend or remove its line."
        )


def splits_of(task: Task, record: Mapping[str, Any]) -> list[str]:
    """What a run was measured on: the first test set, those of the others that its dataset has, and validation."""

    def has(split: str) -> bool:
        return any(record.get(f"{split}_{metric.name}") is not None for metric in task.metrics)

    return [*task.tests[:1], *filter(has, task.tests[1:]), "val"]


def is_number(value: Any) -> bool:
    """Finite, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def entry_of(bench: Bench, runs: Mapping[int, Mapping[str, Any]], paper: float | None) -> Entry:
    """The runs of one row, a seed each."""
    task, of = bench.task, [runs[seed] for seed in sorted(runs)]
    first, settings, metric = of[0], of[0]["settings"], bench.metric.name
    rows, cols = settings["shape"] or first.get("shape") or ((), ())
    split, *splits = splits_of(task, first)
    others = [(s, m) for s in (split, *splits[:-1]) for m in task.metrics if (s, m.name) != (split, metric)]
    longest = max(of, key=lambda run: len(run["epochs"]))["epochs"]
    suffix = first["row"].removeprefix(base(first["row"])).removeprefix("-")
    apart = task.texts.get("variants", {}).get(suffix, suffix).format(**settings) if suffix else None
    return Entry(
        dataset=first["dataset"],
        row=first["row"],
        format=first["format"],
        shape=f"{factors(rows)} x {factors(cols)}",
        cores=len(rows),
        rank=str(settings["rank"] or (max(first.get("ranks") or [0]) if settings.get("ratio") else 0) or "-"),
        ratio=first["ratio"],
        total_parameters=first["total_parameters"],
        table_bytes=first.get("table_bytes"),
        validation=tuple(run[f"val_{metric}"] for run in of),
        test=tuple(run[f"{split}_{metric}"] for run in of),
        more={(s, m): tuple(run[f"{s}_{m.name}"] for run in of) for s, m in others},
        paper=paper,
        curves=tuple(tuple(epoch[f"val_{metric}"] for epoch in run["epochs"]) for run in of),
        stages=tuple(epoch.get(task.stage, number) for number, epoch in enumerate(longest, 1)),
        overhead=median(run["overhead"] for run in of),
        settings=settings,
        apart=apart,
    )


def base(row: str) -> str:
    """The row of the tables it is, or is a variant of: ``full`` for ``full-other``."""
    return row.split("-")[0]


def factors(numbers: Iterable[int]) -> str:
    """``(5, 6)``, or one number by itself."""
    given = list(numbers)
    return str(given[0]) if len(given) == 1 else f"({','.join(map(str, given))})"


def counted(number: float, what: str) -> str:
    """``1 seed``, ``5 seeds``."""
    return f"{number:g} {what}{'' if number == 1 else 's'}"
