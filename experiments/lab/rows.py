"""From the name of a row and options to the settings of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from experiments.lab import formats
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.settings import Settings, checked, made, read_toml, types_of
from experiments.lab.task import Task

Run = tuple[str, str, int]  # dataset, row and seed
Point = tuple[Any, ...]  # of a grid, a value for each of its names
GLOROT = "glorot"  # in a grid, a deviation that is left to the library's Glorot


@dataclass(frozen=True)
class Search:
    """The grid of a dataset: the same for every format, each of which is searched with one row."""

    names: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()
    seeds: int = 1
    rows: Mapping[str, str] = field(default_factory=dict)  # by format
    options: Mapping[str, Any] = field(default_factory=dict)  # shorter runs, fewer examples

    def tried(self, settings: Settings) -> Settings:
        """A point of the grid under its own name."""
        values = [(name, getattr(settings, name)) for name in self.names]
        told = [f"{name}{GLOROT if value is None else value}" for name, value in values]
        return replace(settings, row="-".join([settings.row, *told]))

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
        _check_keys(f", [search.{dataset}]", search, ("grid", "rows", "seeds", "options"), 2)
        _check_keys(f", [search.{dataset}]", search["grid"], list(types_of(task.settings)))
    _check_keys(", [league]", league, ("config", "budgets", "seeds", "best", "options"))
    runs = [(b["dataset"], row, seed) for b in blocks for seed in range(b.get("seeds", 1)) for row in b["rows"]]
    searches = {}
    for dataset, search in searched.items():
        grid = {name: [None if one == GLOROT else one for one in values] for name, values in search["grid"].items()}
        # The first name changes fastest.
        points = tuple(tuple(reversed(point)) for point in product(*reversed(grid.values())))
        others = {name: value for name, value in search.items() if name != "grid"}
        searches[dataset] = Search(tuple(grid), points, **others)
    return Plan(tuple(runs), searches, league)


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


def smoke(task: Task, settings: Settings) -> Settings:
    """The same row in seconds, as ``defaults.toml`` says, under a name of its own."""
    return replace(settings, row=f"{settings.row}-smoke", **defaults(task).get("smoke", {}))


def changed(row: Settings, settings: Settings, given: Mapping[str, Any]) -> str:
    """The row's name with what was changed of it: no sweep may take such a run for a row of the tables."""
    names = [name for name in given if name != "seed" and getattr(row, name) != getattr(settings, name)]
    first = settings.row
    if "format" in names or "dataset" in names:
        first = settings.format + ("" if settings.rank is None else f"-rank{settings.rank}")
        names = [name for name in names if name not in ("format", "rank")]
    told = "-".join([first, *(f"{name}={given[name]}" for name in names)])
    return re.sub(r"[^\w=+.-]+", "_", told.replace(")", ""))
