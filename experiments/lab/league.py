"""One task over formats at equal stored bytes: a sweep over formats and budgets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from experiments.lab import formats
from experiments.lab.errors import ExperimentError
from experiments.lab.records import append
from experiments.lab.rows import configured, datasets
from experiments.lab.search import Bench
from experiments.lab.settings import Settings
from experiments.lab.sweep import Cell, Sweep
from experiments.lab.task import Task
from experiments.lab.training import named

T = TypeVar("T")
_MOST = 2.0**40  # times smaller than anything is


@dataclass(frozen=True)
class League:
    """Formats against budgets, how many times smaller tables are to be, as variants of one row with full tables."""

    bench: Bench
    config: str
    formats: tuple[str, ...]
    budgets: tuple[float, ...]
    seeds: int = 1

    def cells(self) -> list[Cell]:
        """The full table, then budget by budget every format; seed by seed."""
        shared = dict(self.bench.plan.league.get("options", {}))
        sizes = [{"format": name, "ratio": budget} for budget in self.budgets for name in self.formats]
        of_seed = [{}, *sizes]
        return [
            Cell(self.config, {**size, **shared, "seed": seed}, "league")
            for seed in range(self.seeds)
            for size in of_seed
        ]

    def run(self, sweep: Sweep) -> list[str]:
        """Every cell that has no line; one that cannot be gets its line at once. The names of those that failed."""
        todo = []
        for cell in sweep.missing(self.cells()):
            settings = sweep.settings(cell)
            most = largest_ratio(self.bench.task, settings, settings.ratio or 1.0)
            if most < (settings.ratio or 1.0):
                append(self.bench.file("league"), {**named(self.bench.task, settings), "largest_ratio": most})
            else:
                todo.append(cell)
        sweep.console.print(f"{len(self.cells())} cells in the league, {len(todo)} of them to be run")
        with sweep.ready() as pool:
            return sweep.do(todo, pool)


def league_of(bench: Bench, names: str | None, budgets: str | None, seeds: int | None) -> League:
    """From what is typed, or else from the task's plan, or else of all formats that can be trained."""
    told = bench.plan.league
    config = told.get("config", f"{datasets(bench.task)[0]}-{formats.FULL}")
    chosen = split(names) if names else trainable(bench.task, configured(bench.task, config, {}))
    canonical = [name for name in map(formats.canonical, chosen) if name != formats.FULL]
    if without := [name for name in canonical if not formats.has(name, "ratio")]:
        raise ExperimentError(f'format "{without[0]}" has no ratio: it cannot be made to fit a budget.')
    try:
        sizes = [float(text) for text in split(budgets)] if budgets else [float(size) for size in told["budgets"]]
    except (ValueError, KeyError):
        raise ExperimentError(f"--budgets {budgets}: numbers are needed, with commas, such as 8,40.") from None
    if wrong := [size for size in sizes if not 1 < size < _MOST]:
        raise ExperimentError(f"--budgets {wrong[0]:g}: how many times smaller tables are to be, above 1.")
    return League(bench, config, unique(canonical), unique(sorted(sizes)), seeds or told.get("seeds", 1))


def trainable(task: Task, settings: Settings) -> list[str]:
    """Every format of the registry that has a ratio, and tables of which can be drawn."""
    having = [name for name in formats.known() if formats.has(name, "ratio")]
    return [name for name in having if fits(task, replace(settings, format=name, ratio=1.001))]


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
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        parts = [*parts, ""] if sign == "," and not depth else [*parts[:-1], parts[-1] + sign]
    return [part.strip() for part in parts if part.strip()]


def unique(values: Iterable[T]) -> tuple[T, ...]:
    """Each once, in their order."""
    return tuple(dict.fromkeys(values))
