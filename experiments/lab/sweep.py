"""All rows of a task's tables, each in a process of its own, leaving out those that have results already."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.allocator import jemalloc
from experiments.lab.errors import Stopped
from experiments.lab.files import check_folder, writable_folder
from experiments.lab.processes import Interrupts
from experiments.lab.rows import Bench
from experiments.lab.settings import Places, Settings, option
from experiments.lab.task import Task
from provenance import ROOT


@dataclass(frozen=True)
class Cell:
    """One run that a sweep starts: a row's file with options, of a kind."""

    config: str
    options: Mapping[str, Any]  # the seed among them
    kind: str = ""

    @property
    def name(self) -> str:
        """For people and for the log: the seed last, and what is left to Glorot by that name."""
        *values, seed = [value for name, value in sorted(self.options.items(), key=lambda one: one[0] == "seed")]
        told = ["glorot" if value is None else f"{value:g}" if type(value) is float else str(value) for value in values]
        return "-".join([*([self.kind] if self.kind else []), self.config, *told, str(seed)])

    def arguments(self) -> list[str]:
        typed = ["--config", self.config, *(["--kind", self.kind] if self.kind else [])]
        for name, value in self.options.items():
            if value is not None and value is not False:
                typed += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return typed


@dataclass(frozen=True)
class Sweep(Places):
    """Runs of a task, each in a process of its own, and how many go side by side."""

    task: Task
    jobs: int = option(1, "runs side by side, the cores divided among them", least=1)
    console: Console = field(default_factory=Console)

    @cached_property
    def bench(self) -> Bench:
        return Bench.of(self.task, self)

    def run(self, seeds: int | None = None) -> list[str]:
        """Search, then every run that is missing; the names of those that failed."""
        wanted = [run for run in self.bench.plan.runs if seeds is None or run[2] < seeds]
        cells = {run: Cell(f"{run[0]}-{run[1]}", {"seed": run[2]}) for run in wanted}
        self.console.print(f"{len(wanted)} runs in the tables, {len(self.missing(list(cells.values())))} of them to do")
        failed: list[str] = []
        # Neighbouring runs of one dataset together, so that its search comes just before them.
        for dataset, runs in groupby(wanted, key=lambda run: run[0]):
            todo = [cells[run] for run in runs]
            unfound = self.search(dataset) if self.missing(todo) else []
            # Rows with rates that were not searched would not be comparable. And only now is it known which rates
            # they have, and so whether their results are there.
            failed += unfound or self.do(self.missing(todo))
        return failed

    def missing(self, wanted: Sequence[Cell]) -> list[Cell]:
        """Those that have no result of the settings they would have now."""
        kinds = {cell.kind for cell in wanted}
        have = {kind: {settings for settings, _ in self.bench.recorded(kind)} for kind in kinds}
        return [cell for cell in wanted if self.settings(cell) not in have[cell.kind]]

    def settings(self, cell: Cell) -> Settings:
        """What the run would be told now: a result of anything else is not its result."""
        return self.bench.settle(cell.config, cell.options, tiny=self.smoke, search=cell.kind == "search")

    def search(self, dataset: str) -> list[str]:
        """Try what is missing of the grid of each format, and where that leads; the names of those that failed."""
        failed: list[str] = []
        before: list[Cell] = []
        trials = self.untried(dataset)
        while not failed and trials != before:  # those that left no line are not tried again
            failed, before, trials = self.do(trials), trials, self.untried(dataset)
        return failed

    def untried(self, dataset: str) -> list[Cell]:
        """What is missing of the grid of each format."""
        search = self.bench.plan.search(dataset)
        rows = {row: format for format, row in search.rows.items()}  # formats may share one
        points = [(row, at) for row, format in rows.items() for at in self.bench.untried(dataset, format)]
        trials = [
            Cell(f"{dataset}-{row}", {**search.options_of(at), "seed": seed}, "search")
            for (row, at), seed in product(points, range(search.seeds))
        ]
        return [] if self.smoke else self.missing(trials)

    def do(self, wanted: Sequence[Cell]) -> list[str]:
        """Run all of them; the names of those that failed. Ctrl-C and SIGTERM are passed on to the runs, which save."""
        check_folder(self.data)
        writable_folder(self.out, "--out")
        writable_folder(self.bench.results, "--results")
        waiting, failed, begun = list(wanted), [], time.monotonic()
        running: dict[subprocess.Popen[bytes], tuple[Cell, float]] = {}
        try:
            with Interrupts() as interrupts:
                while waiting or running:
                    while waiting and len(running) < self.jobs:
                        cell = waiting.pop(0)
                        running[self.start(cell)] = cell, time.monotonic()
                    with suppress(subprocess.TimeoutExpired):
                        next(iter(running)).wait(0.2)
                    if interrupts.asked:
                        raise KeyboardInterrupt
                    for child in [child for child in running if child.poll() is not None]:
                        cell, since = running.pop(child)
                        failed += [cell.name] if child.returncode else []
                        done, now = len(wanted) - len(waiting) - len(running), time.monotonic()
                        minutes = (now - begun) / done * (len(wanted) - done) / 60
                        others = f"{done} of {len(wanted)}, {minutes:.0f} min left"
                        self.tell(cell, child.returncode, now - since, others)
        except KeyboardInterrupt:
            raise Stopped("stopped; the same command goes on where it was.") from None
        finally:
            end_all(list(running))
        return failed

    def tell(self, cell: Cell, code: int, seconds: float, others: str) -> None:
        """A line on a run that has ended, and how long the others will take."""
        end = f"failed with exit code {code}, see {self.log(cell)}" if code else "done"
        told = f"{time.strftime('%H:%M:%S')}  {cell.name}  {end}  {seconds:.0f} s  {others}"
        self.console.print(told, highlight=False, soft_wrap=True)

    def log(self, cell: Cell) -> Path:
        return self.out.resolve() / "logs" / f"{self.task.name}-{cell.name}.log"

    def start(self, cell: Cell) -> subprocess.Popen[bytes]:
        """Run it as a user would; what it says goes to a file."""
        self.log(cell).parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "experiments", self.task.name, *cell.arguments(), "--resume-if-possible"]
        command += ["--out", str(self.out.resolve() / cell.kind), "--results", str(self.bench.results.resolve())]
        command += ["--data", str(self.data.resolve())] if self.data is not None else []
        command += ["--smoke"] if self.smoke else []
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        with self.log(cell).open("a", encoding="utf-8") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **jemalloc()}
            # A group of its own: Ctrl-C reaches it through us, once, and not from the terminal as well.
            return subprocess.Popen(command, process_group=0, cwd=ROOT, stdout=file, stderr=file, env=environment)


def end_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Tell all that run to save and end, and wait for them; told a second time they end at once."""
    for child in children:
        child.terminate()
    try:
        for child in children:
            child.wait()
    except KeyboardInterrupt:
        for child in children:
            child.terminate()
