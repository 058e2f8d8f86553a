"""From the name of a row and options to the settings of a run, with what a search has found for its format."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.lab import formats
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.metrics import LOSS, Metric
from experiments.lab.records import RESULTS, read
from experiments.lab.settings import Places, Settings, checked, made, read_toml, recorded, types_of
from experiments.lab.task import Task

Run = tuple[str, str, int]  # dataset, row and seed
Point = tuple[Any, ...]  # of a grid, a value for each of its names
Scores = dict[Point, float]
GLOROT = "glorot"  # in a grid, a deviation that is left to the library's Glorot


@dataclass(frozen=True)
class Search:
    """The grid of a dataset: the same for every format, each of which is searched with one row."""

    names: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()
    seeds: int = 1
    rows: Mapping[str, str] = field(default_factory=dict)  # by format; formats may share a row, and so what it finds
    options: Mapping[str, Any] = field(default_factory=dict)  # shorter runs, fewer examples
    climbs: bool = False  # from the two points in the middle on, to neighbours of the best
    by_loss: bool = False  # points are compared by, where so short a run leaves the metric to chance

    def tried(self, settings: Settings) -> Settings:
        """A point of the grid under its own name."""
        values = [(name, getattr(settings, name)) for name in self.names]
        told = [f"{name}{GLOROT if value is None else value}" for name, value in values]
        return replace(settings, row="-".join([settings.row, *told]))

    def untried(self, scores: Scores, metric: Metric) -> list[Point]:
        """What is to be tried next, after points with these scores; nothing, once the best is known.

        A search that climbs ends when the best has been compared with what lies on both sides of it.
        """
        near = self.points
        if self.climbs:
            middle = len(near) // 2
            near = near[middle - 1 : middle + 1]
            if set(near) <= set(scores):
                top = self.points.index(self.best(scores, metric))
                near = self.points[max(0, top - 1) : top + 2]
        return [point for point in near if point not in scores]

    def best(self, scores: Scores, metric: Metric) -> Point:
        """Of equals the earlier one."""
        return metric.best([point for point in self.points if point in scores], scores.__getitem__)

    def options_of(self, point: Point) -> dict[str, Any]:
        return dict(zip(self.names, point, strict=True))


@dataclass(frozen=True)
class Plan:
    """What a task's ``sweep.toml`` says is to be run: rows in their order, what is searched before them, a league."""

    runs: tuple[Run, ...]
    searches: Mapping[str, Search]
    league: Mapping[str, Any]

    def search(self, dataset: str) -> Search:
        """Of a dataset; an empty one where there is none."""
        return self.searches.get(dataset, Search())


def plan(task: Task) -> Plan:
    """From the file, or every row once where there is none."""
    path = task.configs / "sweep.toml"
    told = read_toml(path) if path.exists() else {}
    every = (configured(task, name, {}) for name in row_names(task))
    blocks = told.get("runs") or [{"dataset": row.dataset, "rows": [row.row]} for row in every]
    searched, league = told.get("search", {}), told.get("league", {})
    _check_keys("", told, ("runs", "search", "league"))
    for block in blocks:
        _check_keys(", [[runs]]", block, ("dataset", "rows", "seeds"), 2)
    for dataset, search in searched.items():
        _check_keys(f", [search.{dataset}]", search, ("grid", "rows", "seeds", "options", "climbs", "by_loss"), 2)
        _check_keys(f", [search.{dataset}]", search["grid"], list(types_of(task.settings)))
    _check_keys(", [league]", league, ("config", "budgets", "seeds", "best", "options"))
    runs = [(b["dataset"], row, seed) for b in blocks for seed in range(b.get("seeds", 1)) for row in b["rows"]]
    searches = {}
    for dataset, search in searched.items():
        grid = {name: [None if one == GLOROT else one for one in values] for name, values in search["grid"].items()}
        # The first name changes fastest.
        points = tuple(tuple(reversed(point)) for point in product(*reversed(grid.values())))
        others = {name: value for name, value in search.items() if name != "grid"}
        if search.get("climbs") and (len(grid) != 1 or len(points) < 2):
            raise ExperimentError(
                f"sweep.toml, [search.{dataset}]: climbs takes two values or more of one name, not {len(points)} "
                f"points of {', '.join(grid)}."
            )
        searches[dataset] = Search(tuple(grid), points, **others)
    return Plan(tuple(dict.fromkeys(runs)), searches, league)  # a later block may name more seeds of rows before it


def _check_keys(where: str, table: Mapping[str, Any], known: Sequence[str], needed: int = 0) -> None:
    for name in table:
        if name not in known:
            raise unknown("key", name, known, f"sweep.toml{where}: ")
    if missing := [name for name in known[:needed] if name not in table]:
        raise ExperimentError(f"sweep.toml{where}: {missing[0]} is missing.")


def defaults(task: Task) -> dict[str, dict[str, Any]]:
    """What rows have in common: ``all`` of them, those of each dataset, and ``smoke``, runs of seconds."""
    contents = read_toml(task.configs / "defaults.toml")
    for name, content in contents.items():
        checked(task.settings, content, f"defaults.toml, [{name}]: ")
    return contents


def datasets(task: Task) -> list[str]:
    """Those with defaults."""
    return [name for name in defaults(task) if name not in ("all", "smoke")]


def row_names(task: Task) -> list[str]:
    """Every row there is a file for."""
    return sorted(path.stem for path in task.configs.glob("*-*.toml"))


def configured(
    task: Task, config: str, options: Mapping[str, Any], beneath: Mapping[str, Any] | None = None
) -> Settings:
    """Settings of a row (``dataset-row``, or a path) over its dataset's defaults, with the options given on top.

    ``beneath`` goes before the defaults, and the row's own file before that.
    """
    path = Path(config)
    if path.suffix != ".toml":
        path = task.configs / f"{config.lower()}.toml"
        if not path.exists():
            raise unknown("row", config, row_names(task))
    row = read_toml(path)
    where = f"{path.name}: "
    checked(task.settings, row, where)
    on_top = {name: value for name, value in options.items() if value is not None}
    before = formats.canonical(row.get("format", formats.FULL), where)
    if formats.canonical(on_top.get("format", before)) != before:
        row = {name: value for name, value in row.items() if name not in formats.SIZES}  # they were the format's
    elif "rank" in on_top or "ratio" in on_top:  # one takes the other's place
        row = {name: value for name, value in row.items() if name not in ("rank", "ratio")}
    given = {**row, **on_top}
    if "dataset" not in given:
        raise ExperimentError(f"{where}dataset is missing.")
    if given["dataset"] not in datasets(task):
        raise unknown("dataset", given["dataset"], datasets(task), where)
    common = {**defaults(task).get("all", {}), **defaults(task)[given["dataset"]], **(beneath or {})}
    return made(task.settings, {**common, "row": path.stem, **given}, where)


def smoke(task: Task, settings: Settings, given: Mapping[str, Any]) -> Settings:
    """The same row in seconds, as ``defaults.toml`` says but for options given, under a name of its own."""
    tiny = {name: value for name, value in defaults(task).get("smoke", {}).items() if name not in given}
    return replace(settings, row=f"{settings.row}-smoke", **tiny)


def changed(row: Settings, settings: Settings, given: Mapping[str, Any]) -> str:
    """The row's name with what was changed of it: no sweep may take such a run for a row of the tables."""
    names = [name for name in given if name != "seed" and getattr(row, name) != getattr(settings, name)]
    first = settings.row
    if "format" in names or "dataset" in names:
        first = settings.format + ("" if settings.rank is None else f"-rank{settings.rank}")
        names = [name for name in names if name not in ("format", "rank")]
    told = "-".join([first, *(f"{name}={given[name]}" for name in names)])
    return re.sub(r"[^\w=+.-]+", "_", told.replace(")", ""))


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

    def search_metric(self, dataset: str) -> Metric:
        """The one that compares points of a grid, on validation."""
        return LOSS if self.plan.search(dataset).by_loss else self.metric

    def points(self, dataset: str, format: str) -> Scores:
        """The points of a format's grid that have been tried with every seed and the settings of today.

        Each has its ``search_metric``, the mean over its seeds.
        """
        search, score, means = self.plan.search(dataset), f"val_{self.search_metric(dataset).name}", {}
        if format not in search.rows:
            return {}
        seen = {settings: record.get(score) for settings, record in self.recorded("search")}
        searched = configured(self.task, f"{dataset}-{search.rows[format]}", search.options)
        for point in search.points:
            of_point = search.tried(replace(searched, **search.options_of(point)))
            scores = [seen[trial] for seed in range(search.seeds) if (trial := replace(of_point, seed=seed)) in seen]
            told = [value for value in scores if isinstance(value, float)]
            if len(told) < len(scores):
                raise ExperimentError(
                    f"{self.file('search').name}: {of_point.row} has no {score}, by which the search of {dataset} "
                    "compares; set by_loss in sweep.toml so that it fits what the task tells."
                )
            if len(told) == search.seeds:
                means[point] = fmean(told)
        return means

    def grids(self) -> dict[tuple[str, str], Scores]:
        keys = [(dataset, format) for dataset, search in self.plan.searches.items() for format in search.rows]
        return {key: scores for key in keys if (scores := self.points(*key))}

    def untried(self, dataset: str, format: str) -> list[Point]:
        """The points of a format's grid that its search lacks."""
        return self.plan.search(dataset).untried(self.points(dataset, format), self.search_metric(dataset))

    def best(self, dataset: str, format: str) -> dict[str, Any] | None:
        """The best point on validation as options, once the search has ended."""
        search = self.plan.search(dataset)
        if not search.points or self.untried(dataset, format):
            return None
        return search.options_of(search.best(self.points(dataset, format), self.search_metric(dataset)))

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
            others = {option: value for option, value in given.items() if option not in tried.names}
            row = changed(configured(self.task, name, tried.options), settings, others)
            settings = replace(settings, row=row)
            return tried.tried(smoke(self.task, settings, given) if tiny else settings)
        settings = self.with_best(name, given)
        settings = replace(settings, row=changed(self.with_best(name, {}), settings, given))
        return smoke(self.task, settings, given) if tiny else settings

    def in_tables(self, records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The lines that are runs of rows as they are configured today, those that no sweep runs among them.

        Seeds of a row have to agree in what is searched too: those count that have what the search has found, or,
        where it has not ended or no such run was made, those of the row's last line.
        """
        rows = [self.with_best(name, {}) for name in row_names(self.task)]
        known = {(row.dataset, row.row): row for row in rows}
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
