"""Which rate, and whatever else a grid has, is best for a format: tried on validation, and taken by its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.lab.errors import unknown
from experiments.lab.metrics import Metric
from experiments.lab.records import RESULTS, read
from experiments.lab.rows import Plan, Point, changed, configured, datasets, plan, smoke
from experiments.lab.settings import Places, Settings, recorded
from experiments.lab.task import Task

Scores = dict[Point, float]


@lru_cache(8)
def _recorded(path: Path, task: Task, state: object) -> list[tuple[Settings, Mapping[str, Any]]]:
    """Read once, as long as the file is in the same ``state``: every row of a sweep asks for it."""
    lines = ((recorded(task.settings, record), record) for record in read(path))
    return [(settings, record) for settings, record in lines if settings is not None]


@dataclass(frozen=True)
class Bench:
    """A task, and the folder with what is known of it."""

    task: Task
    results: Path

    @cached_property
    def plan(self) -> Plan:
        return plan(self.task)

    @property
    def metric(self) -> Metric:
        """The one that selects, and is reported first."""
        return self.task.metrics[0]

    @property
    def split(self) -> str:
        """What it is told on: the first test set, or validation."""
        return (*self.task.tests, "validation")[0]

    @classmethod
    def of(cls, task: Task, places: Places) -> Bench:
        """Results are with those of the project, where nothing is said; of tiny runs with what else they leave."""
        return cls(task, places.results or (places.out if places.smoke else RESULTS))

    def file(self, kind: str = "") -> Path:
        """The lines of runs, of a search or of a league."""
        return self.results / f"{self.task.name}{kind and f'_{kind}'}.jsonl"

    def recorded(self, kind: str = "") -> list[tuple[Settings, Mapping[str, Any]]]:
        """Lines that tell settings there still are, with them."""
        path = self.file(kind)
        state = path.stat() if path.exists() else None
        return _recorded(path, self.task, state and (state.st_mtime_ns, state.st_size))

    def points(self, dataset: str, format: str) -> Scores:
        """The points of a format's grid that have been tried with every seed and the settings of today.

        Each has the metric on validation, the mean over its seeds.
        """
        search, score, means = self.plan.search(dataset), f"val_{self.metric.name}", {}
        if format not in search.rows:
            return {}
        lines = self.recorded("search")
        seen = {settings: record[score] for settings, record in lines if isinstance(record.get(score), float)}
        searched = configured(self.task, f"{dataset}-{search.rows[format]}", search.options)
        for point in search.points:
            of_point = search.tried(replace(searched, **search.options_of(point)))
            scores = [seen[trial] for seed in range(search.seeds) if (trial := replace(of_point, seed=seed)) in seen]
            if len(scores) == search.seeds:
                means[point] = fmean(scores)
        return means

    def grids(self) -> dict[tuple[str, str], Scores]:
        keys = [(dataset, format) for dataset, search in self.plan.searches.items() for format in search.rows]
        return {key: scores for key in keys if (scores := self.points(*key))}

    def best(self, dataset: str, format: str) -> dict[str, Any] | None:
        """The best point on validation as options, once the whole grid has been tried; of equals the earlier one."""
        search, scores = self.plan.search(dataset), self.points(dataset, format)
        if not search.points or not set(search.points) <= set(scores):
            return None
        return search.options_of(self.metric.best(search.points, scores.__getitem__))

    def with_best(self, config: str, options: Mapping[str, Any]) -> Settings:
        """A row with what was found for its format, where neither its file nor the options tell it."""
        settings = configured(self.task, config, options)
        best = self.best(settings.dataset, settings.format)
        return settings if best is None else configured(self.task, config, options, best)

    def settle(
        self, config: str | None, options: Mapping[str, Any], *, tiny: bool = False, search: bool = False
    ) -> Settings:
        """The settings of a run: a row's file, or full tables on the first dataset, and the options on top."""
        given = {option: value for option, value in options.items() if value is not None}
        dataset = given.get("dataset", datasets(self.task)[0])
        if config is None and dataset not in datasets(self.task):
            raise unknown("dataset", dataset, datasets(self.task))
        name = f"{dataset}-full" if config is None else config
        if search:
            tried = self.plan.search(configured(self.task, name, {}).dataset)
            settings = configured(self.task, name, {**tried.options, **given})
            return tried.tried(smoke(self.task, settings) if tiny else settings)
        settings = self.with_best(name, given)
        settings = replace(settings, row=changed(self.with_best(name, {}), settings, given))
        return smoke(self.task, settings) if tiny else settings

    def in_tables(self, records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The lines that are runs of the plan's rows as they are configured today.

        Seeds of a row have to agree in what is searched too: those count that have what the search has found, or,
        where it has not ended or no such run was made, those of the row's last line.
        """
        rows = {run[:2] for run in self.plan.runs}
        known = {(dataset, row): self.with_best(f"{dataset}-{row}", {}) for dataset, row in rows}
        kept: defaultdict[tuple[str, str], list[tuple[Settings, Mapping[str, Any]]]] = defaultdict(list)
        for record in records:
            settings = recorded(self.task.settings, record)
            row = None if settings is None else known.get((settings.dataset, settings.row))
            if settings and row:
                names = ("seed", *self.plan.search(row.dataset).names)
                if replace(settings, **{name: getattr(row, name) for name in names}) == row:
                    kept[settings.dataset, settings.row].append((replace(settings, seed=row.seed), record))
        ended = {key for key, row in known.items() if self.best(row.dataset, row.format)}
        counted = {
            key: known[key] if key in ended and known[key] in dict(lines) else lines[-1][0]
            for key, lines in kept.items()
        }
        return [record for key, lines in kept.items() for settings, record in lines if settings == counted[key]]
