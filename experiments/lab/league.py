"""One task over formats at equal stored bytes: a sweep over formats and budgets."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace

from experiments.lab import formats
from experiments.lab.errors import ExperimentError
from experiments.lab.records import append
from experiments.lab.report.league import Standings
from experiments.lab.rows import configured, datasets
from experiments.lab.search import Bench
from experiments.lab.settings import Settings
from experiments.lab.sweep import Cell, Sweep
from experiments.lab.task import Task
from experiments.lab.training import named

_MOST = 2.0**40  # times smaller than anything is


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
        return self.cells_of([(formats.FULL, None), *((name, size) for size in self.budgets for name in self.formats)])

    def finals(self) -> list[Cell]:
        """More seeds: who is among the best is told by the first ones on validation, whatever these will say."""
        standings = Standings(self.bench)
        best = [(name, size) for size in self.budgets for name in standings.first_seeds(size)[: self.best]]
        return [cell for k in range(1, self.seeds) for cell in self.cells_of([(formats.FULL, None), *best], k)]

    def cells_of(self, sized: Iterable[tuple[str, float | None]], seed: int = 0) -> list[Cell]:
        shared = self.bench.plan.league.get("options", {})
        options = [{"format": name, "ratio": size} if size else {} for name, size in sized]
        return [Cell(self.config, {**one, **shared, "seed": seed}, "league") for one in options]

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
                append(self.bench.file("league"), {**named(self.bench.task, settings), "largest_ratio": most})
            else:
                todo.append(cell)
        sweep.console.print(f"{len(cells)} cells of the league, {len(todo)} of them to be run")
        return todo


def league_of(bench: Bench, names: str | None, budgets: str | None, seeds: int | None) -> League:
    """From what is typed, or else from the task's plan, or else of all formats that can be trained."""
    told = bench.plan.league
    config = told.get("config", f"{datasets(bench.task)[0]}-{formats.FULL}")
    full = configured(bench.task, config, {})
    chosen = map(formats.canonical, split(names)) if names else trainable(bench.task, full)
    competing = dict.fromkeys(name for name in chosen if name != formats.FULL)
    for name in competing:
        if not formats.has(name, "ratio"):
            raise ExperimentError(f'format "{name}" has no ratio: it cannot be made to fit a budget.')
        if not drawn(bench.task, replace(full, format=name, ratio=2.0)):
            bench.task.check_tables(replace(full, format=name, ratio=2.0))  # says why
    try:
        sizes = [float(text) for text in budgets.split(",")] if budgets else [float(size) for size in told["budgets"]]
    except (ValueError, KeyError):
        raise ExperimentError(f"--budgets {budgets}: numbers are needed, with commas, such as 8,40.") from None
    if wrong := [size for size in sizes if not 1 < size < _MOST]:
        raise ExperimentError(f"--budgets {wrong[0]:g}: how many times smaller tables are to be, above 1.")
    known = {"seeds": seeds or told.get("seeds", 1), "best": told.get("best", 2)}
    return League(bench, config, tuple(competing), tuple(sorted(set(sizes))), **known)


def trainable(task: Task, settings: Settings) -> list[str]:
    """Every format of the registry that has a ratio, and tables of which can be drawn."""
    having = [name for name in formats.known() if formats.has(name, "ratio")]
    return [name for name in having if drawn(task, replace(settings, format=name, ratio=2.0))]


def drawn(task: Task, settings: Settings) -> bool:
    """Whether tables of the format can be drawn in some size or other."""
    return any(fits(task, replace(settings, ratio=ratio)) for ratio in (1.001, 2.0, 8.0, 32.0))


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
    try:
        task.check_tables(settings)
    except ExperimentError:
        return False
    return True


def split(text: str) -> list[str]:
    """At commas that stand in no brackets."""
    try:
        parts = ast.parse(f"[{text.strip(', ')}]", mode="eval").body
    except SyntaxError:
        return [text]  # which no format is
    return [ast.unparse(part) for part in getattr(parts, "elts", [parts])]
