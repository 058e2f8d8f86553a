"""One task over formats at equal stored bytes: a sweep over formats and budgets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from experiments.lab import formats
from experiments.lab.errors import ExperimentError
from experiments.lab.rows import configured, datasets
from experiments.lab.search import Bench
from experiments.lab.settings import Settings
from experiments.lab.sweep import Cell, Sweep
from experiments.lab.task import Task

_MOST = 2.0**40  # times smaller than anything is


@dataclass(frozen=True)
class League:
    """Formats against budgets, how many times smaller tables are to be, on a task's league row."""

    bench: Bench
    formats: tuple[str, ...]
    budgets: tuple[float, ...]
    seeds: int = 1

    @classmethod
    def of(cls, bench: Bench, names: str | None, budgets: str | None, seeds: int | None) -> League:
        """From what is typed, or else from the task's plan: formats that can be trained, the full table beside them."""
        told = bench.plan.league
        chosen = [formats.canonical(name) for name in split(names)] if names else trainable(bench.task, base(bench))
        try:
            sizes = [float(text) for text in split(budgets)] if budgets else list(told.get("budgets", (8, 40)))
        except ValueError:
            raise ExperimentError(f"--budgets {budgets}: numbers are needed, with commas, such as 8,40.") from None
        if wrong := [size for size in sizes if not 1 < size < _MOST]:
            raise ExperimentError(f"--budgets {wrong[0]:g}: how many times smaller tables are to be, above 1.")
        without = [name for name in chosen if name != formats.FULL and not formats.has(name, "ratio")]
        if without:
            raise ExperimentError(f'format "{without[0]}" has no ratio: it cannot be made to fit a budget.')
        rest = [name for name in dict.fromkeys(chosen) if name != formats.FULL]
        return cls(bench, (formats.FULL, *rest), tuple(sorted(set(sizes))), seeds or told.get("seeds", 1))

    def cells(self) -> list[Cell]:
        """The full table, then budget by budget every format that can be that small; seed by seed."""
        options, config = dict(self.bench.plan.league.get("options", {})), config_of(self.bench)
        sizes: list[dict[str, Any]] = [
            {"format": name, "ratio": budget}
            for budget in self.budgets
            for name in self.formats[1:]
            if largest_ratio(self.bench, name, budget) >= budget
        ]
        seeds = range(self.seeds)
        return [Cell(config, {**size, **options, "seed": seed}, "league") for seed in seeds for size in [{}, *sizes]]

    def run(self, sweep: Sweep) -> list[str]:
        """Every cell that has no result; the names of those that failed."""
        todo = sweep.missing(self.cells())
        sweep.console.print(f"{len(self.cells())} runs in the league, {len(todo)} of them to do")
        with sweep.ready() as pool:
            return sweep.do(todo, pool)


def config_of(bench: Bench) -> str:
    """The row that all cells are variants of: the full table."""
    row: str = bench.plan.league.get("config", f"{datasets(bench.task)[0]}-{formats.FULL}")
    return row


def base(bench: Bench) -> Settings:
    """The settings of that row."""
    return configured(bench.task, config_of(bench), bench.plan.league.get("options", {}))


def trainable(task: Task, settings: Settings) -> list[str]:
    """Every format of the registry that has a ratio, and tables of which can be drawn."""
    return [name for name in formats.known() if formats.has(name, "ratio") and _fits(task, settings, name, 1.001)]


def largest_ratio(bench: Bench, name: str, budget: float = _MOST) -> float:
    """How many times smaller the task's tables can be at most in a format, or ``budget`` if they can be that small."""
    settings = base(bench)
    if _fits(bench.task, settings, name, budget):
        return budget
    low, high = 1.0, budget
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _fits(bench.task, settings, name, middle) else (low, middle)
    return low


def _fits(task: Task, settings: Settings, name: str, ratio: float) -> bool:
    """Whether tables of a format can be that small, and drawn at all."""
    try:
        task.check_tables(replace(settings, format=name, rank=None, shape=None, ratio=ratio))
    except ExperimentError:
        return False
    return True


def split(text: str) -> list[str]:
    """At commas that stand in no brackets."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]
