"""One task over formats at equal stored bytes: a sweep over formats and budgets, and who is best at each."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from experiments.lab import formats
from experiments.lab.errors import ExperimentError
from experiments.lab.records import append
from experiments.lab.report.document import document, items, pictures, table
from experiments.lab.report.plots import looks, size_picture
from experiments.lab.report.summary import Point, counted
from experiments.lab.rows import Bench, configured, datasets
from experiments.lab.settings import Settings
from experiments.lab.sweep import Cell, Sweep
from experiments.lab.task import Task

Key = tuple[str, float]  # format and budget
WHOLE = (formats.FULL, 1.0)
NOTE = (
    "Every cell is the same run but for the format of its tables and their size, how many times smaller they are than "
    "the full ones, counted in bytes. A cell without a run names the largest ratio that the format can have."
)
_MOST = 2.0**40  # times smaller than anything is


@dataclass(frozen=True)
class Standings:
    """The lines of a league by format, budget and seed; of a run done twice the later one counts."""

    bench: Bench

    @cached_property
    def lines(self) -> Mapping[Key, Mapping[int, Mapping[str, Any]]]:
        runs: defaultdict[Key, dict[int, Mapping[str, Any]]] = defaultdict(dict)
        for settings, record in self.bench.recorded("league"):
            runs[settings.format, settings.ratio or 1.0][settings.seed] = record
        return runs

    @cached_property
    def points(self) -> dict[Key, Point]:
        """Cells that were run to their end."""
        name, found = f"{(*self.bench.task.tests, 'val')[0]}_{self.bench.metric.name}", {}
        for cell, seeds in self.lines.items():
            if all(name in record and "diverged" not in record for record in seeds.values()):
                ratio, *_ = (record["ratio"] for record in seeds.values())
                found[cell] = Point(ratio=ratio, test=tuple(record[name] for record in seeds.values()))
        return found

    @property
    def budgets(self) -> list[float]:
        return sorted({budget for _, budget in self.lines if budget > 1})

    @property
    def names(self) -> list[str]:
        place = list(formats.known())
        names = {name for name, _ in self.lines if name != formats.FULL}
        return sorted(names, key=lambda name: (place.index(name.split("(")[0]), name))

    def first_seeds(self, budget: float) -> list[str]:
        """Formats at a budget, the best on validation first, by the first seed of each."""
        name = f"val_{self.bench.metric.name}"
        values = {of: self.lines[of, size][0][name] for of, size in self.points if size == budget}
        return sorted(values, key=lambda of: values[of], reverse=self.bench.metric.higher)

    def told(self, cell: Key) -> str:
        """``59.1 ± 0.3 (3 seeds)``."""
        point = self.points[cell]
        return f"{point.written(self.bench.metric)} ({counted(len(point.test), 'seed')})"

    def cell(self, cell: Key) -> str:
        if cell in self.points:
            return self.points[cell].written(self.bench.metric)
        record = next(iter(self.lines.get(cell, {0: {}}).values()))
        return f"at most {record['largest_ratio']:.4g}" if "largest_ratio" in record else "diverged" if record else ""

    def seen(self) -> list[str]:
        """The full table, and which formats are best at each budget; those that had more seeds come before others."""
        metric, full, said = self.bench.metric, self.points.get(WHOLE), []
        if full is not None:
            said.append(f"The full table has a {self.bench.split} {metric.name} of {self.told(WHOLE)}.")
        for budget in self.budgets:
            cells = [cell for cell in self.points if cell[1] == budget]
            cells.sort(key=lambda cell: self.points[cell].mean, reverse=metric.higher)
            cells.sort(key=lambda cell: len(self.lines[cell]), reverse=True)
            if cells:
                best, *others = cells
                beside = f", {metric.told(self.points[best].mean, full.mean)} the full table's" if full else ""
                second = f"; then {formats.label(others[0][0])}, {self.told(others[0])}" if others else ""
                name = formats.label(best[0])
                said.append(
                    f"{budget:g} times smaller: {name} is best of {len(cells)}, {self.told(best)}{beside}{second}."
                )
        return said

    def rows(self) -> list[tuple[str, ...]]:
        """Headings and lines of the table: a format a line, a budget a column."""
        lines = [(formats.label(name), *(self.cell((name, budget)) for budget in self.budgets)) for name in self.names]
        return [("format", *(f"{budget:g} times" for budget in self.budgets)), *lines]

    def report(self) -> tuple[str, str]:
        """As a text and as a page."""
        metric, split = self.bench.metric, self.bench.split
        full, *series = [
            replace(series, points=[point for (of, _), point in self.points.items() if of == name])
            for name, series in looks([formats.FULL, *self.names]).items()
        ]
        picture = size_picture("league", metric, split, full, [one for one in series if one.points])
        seen = f"further right is smaller and {'higher' if metric.higher else 'lower'} is better."
        drawn = pictures([(f"{split.capitalize()} {metric.name} against size", seen, picture)])
        parts = [items(self.seen()), table(self.rows(), [one.colour for one in series]), drawn]
        return document(f"{self.bench.task.texts['title']}: a league of formats", NOTE, {"": parts})


@dataclass(frozen=True)
class League:
    """Formats against budgets, how many times smaller tables are to be, as variants of one row with full tables."""

    bench: Bench
    config: str
    formats: tuple[str, ...]
    budgets: tuple[float, ...]
    seeds: int = 1  # of the full table, and of the best at each budget; of all others one
    best: int = 2  # how many those are

    def cells(self) -> list[Cell]:
        """The full table, then budget by budget every format."""
        return self.cells_of((name, size) for size in self.budgets for name in self.formats)

    def finals(self) -> list[Cell]:
        """More seeds: who is among the best is told by the first ones on validation, whatever these will say."""
        standings = Standings(self.bench)
        best = [(name, size) for size in self.budgets for name in standings.first_seeds(size)[: self.best]]
        return [cell for seed in range(1, self.seeds) for cell in self.cells_of(best, seed)]

    def cells_of(self, sized: Iterable[Key], seed: int = 0) -> list[Cell]:
        shared = {**self.bench.plan.league.get("options", {}), "seed": seed}
        options: list[dict[str, Any]] = [{}, *({"format": name, "ratio": size} for name, size in sized)]
        return [Cell(self.config, {**one, **shared}, "league") for one in options]

    def run(self, sweep: Sweep) -> list[str]:
        """Every cell that has no line, then the finals; the names of those that failed."""
        failed = sweep.do(self.possible(sweep, self.cells()))
        return failed + sweep.do(self.possible(sweep, self.finals()))

    def possible(self, sweep: Sweep, cells: list[Cell]) -> list[Cell]:
        """Of cells without a line those that can be; one that cannot gets its line at once."""
        todo = []
        for cell in sweep.missing(cells):
            settings = sweep.settings(cell)
            most = largest_ratio(self.bench.task, settings, settings.ratio or 1.0)
            if most < (settings.ratio or 1.0):
                append(self.bench.file("league"), {**settings.as_line(self.bench.task.name), "largest_ratio": most})
            else:
                todo.append(cell)
        sweep.console.print(f"{len(cells)} cells of the league, {len(todo)} of them to be run")
        return todo


def league_of(bench: Bench, names: str | None, budgets: str | None, seeds: int | None) -> League:
    """From what is typed, or else from the task's plan, or else of all formats that can be trained."""
    told = bench.plan.league
    config = told.get("config", f"{datasets(bench.task)[0]}-{formats.FULL}")
    competing = dict.fromkeys(competitors(bench.task, configured(bench.task, config, {}), names))
    try:
        sizes = [float(text) for text in (budgets.split(",") if budgets else told["budgets"])]
    except (ValueError, KeyError):
        raise ExperimentError(f"--budgets {budgets}: numbers are needed, with commas, such as 8,40.") from None
    if wrong := [size for size in sizes if not 1 < size < _MOST]:
        raise ExperimentError(f"--budgets {wrong[0]:g}: how many times smaller tables are to be, above 1.")
    known = {"seeds": seeds or told.get("seeds", 1), "best": told.get("best", 2)}
    return League(bench, config, tuple(competing), tuple(sorted(set(sizes))), **known)


def competitors(task: Task, full: Settings, names: str | None) -> Iterator[str]:
    """The formats that are named, or every one of the registry, that have a ratio and tables of which can be drawn."""
    for name in map(formats.canonical, split(names)) if names else formats.known():
        if name == formats.FULL:
            continue
        if not formats.has(name, "ratio"):
            if names:
                raise ExperimentError(f'format "{name}" has no ratio: it cannot be made to fit a budget.')
            continue
        drawn = (replace(full, format=name, ratio=ratio) for ratio in (1.001, 2.0, 8.0, 32.0))
        if any(fits(task, settings) for settings in drawn):
            yield name
        elif names:
            task.check_tables(replace(full, format=name, ratio=2.0))  # says why


def largest_ratio(task: Task, settings: Settings, enough: float = _MOST) -> float:
    """How many times smaller the task's tables can be at most in a format; or ``enough``, if they can be that small."""
    low, high = 1.0, enough
    if fits(task, settings if settings.ratio in (None, enough) else replace(settings, ratio=enough)):
        return enough
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(task, replace(settings, ratio=middle)) else (low, middle)
    return low


def fits(task: Task, settings: Settings) -> bool:
    """Whether tables of the format can be that small, and drawn at all."""
    with suppress(ExperimentError):
        task.check_tables(settings)
        return True
    return False


def split(text: str) -> list[str]:
    """At commas that stand in no brackets."""
    try:
        parts = ast.parse(f"[{text.strip(', ')}]", mode="eval").body
    except SyntaxError:
        return [text]  # which no format is
    return [ast.unparse(part) for part in getattr(parts, "elts", [parts])]
