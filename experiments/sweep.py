"""All rows of a table, each in a process of its own, leaving out those that have results already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from experiments.errors import Stopped
from experiments.records import ROOT, read
from experiments.sentiment import task


@dataclass(frozen=True)
class Sweep:
    """Where a sweep reads and writes, and how many runs go side by side."""

    data: Path | None
    out: Path
    results: Path
    jobs: int = 1
    smoke: bool = False
    console: Console = field(default_factory=Console)
    children: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def run(self, seeds: int | None = None) -> list[str]:
        """Search, then every run that is missing; the names of those that failed."""
        todo = [(d, row, seed) for d, row, seed in task.runs() if not self.done(d, row, seed)]
        if seeds is not None:
            todo = [entry for entry in todo if entry[2] < seeds]
        self.console.print(f"{len(todo)} runs to do, {len(list(task.runs()))} in the tables")
        failed: list[str] = []
        with self.stoppable(), ThreadPoolExecutor(self.jobs) as pool:
            for dataset, rows in stages(todo):
                missing = self.search(dataset, pool)
                failed += missing
                if missing:  # rows with rates that were not searched would not be comparable
                    continue
                failed += [name for name in pool.map(lambda entry: self.one(*entry), rows) if name]
        return failed

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Ctrl-C reaches the runs by itself, SIGTERM is passed on; they save, and what has not begun does not begin."""

        def pass_on(kind: int, frame: FrameType | None) -> None:
            for child in list(self.children):
                child.terminate()
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            yield
        except KeyboardInterrupt:
            raise Stopped("stopped; the same command goes on where it was.") from None
        finally:
            signal.signal(signal.SIGTERM, before)

    def search(self, dataset: str, pool: ThreadPoolExecutor) -> list[str]:
        """What is missing of the grid of each format."""
        wanted = [
            (dataset, row, point)
            for format, row in task.SEARCHED_ROWS[dataset].items()
            for point in task.GRID
            if not self.smoke and point not in task.points(self.results, dataset, format)
        ]
        return [name for name in pool.map(lambda entry: self.try_point(*entry), wanted) if name]

    def done(self, dataset: str, row: str, seed: int) -> bool:
        """Has this run a result?"""
        return any(
            (record["dataset"], record["row"], record["seed"]) == (dataset, row, seed)
            for record in read(self.results / task.RESULTS_FILE)
        )

    def try_point(self, dataset: str, row: str, point: tuple[float, float | None]) -> str | None:
        """One point of the grid."""
        rate, std = point
        options = ["--lr", repr(rate), *(["--std", repr(std)] if std is not None else []), "--search"]
        return self.process(f"search-{dataset}-{row}-{rate:g}-{std or 'glorot'}", [f"{dataset}-{row}", *options], 0)

    def one(self, dataset: str, row: str, seed: int) -> str | None:
        """One run of the tables."""
        return self.process(f"{dataset}-{row}-{seed}", [f"{dataset}-{row}"], seed)

    def process(self, name: str, arguments: Sequence[str], seed: int) -> str | None:
        """Run it as a user would; what it says goes to a file. Its name, if it failed."""
        folder = self.out / "search" if "--search" in arguments else self.out
        log = self.out / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "experiments", "sentiment", "--config", *arguments, "--seed", str(seed)]
        command += ["--out", str(folder), "--results", str(self.results), "--resume-if-possible"]
        command += ["--data", str(self.data)] if self.data is not None else []
        command += ["--smoke"] if self.smoke else []
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        begun = time.monotonic()
        with log.open("a", encoding="utf-8") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            child = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment)
            self.children.add(child)
            code = child.wait()
            self.children.discard(child)
        seconds = time.monotonic() - begun
        end = "done" if code == 0 else f"failed with exit code {code}, see {log}"
        self.console.print(f"{time.strftime('%H:%M:%S')}  {name}  {end}  {seconds:.0f} s", highlight=False)
        return None if code == 0 else name


def stages(runs: Sequence[tuple[str, str, int]]) -> list[tuple[str, list[tuple[str, str, int]]]]:
    """Neighbouring runs of one dataset together, so that its search comes just before them."""
    found: list[tuple[str, list[tuple[str, str, int]]]] = []
    for entry in runs:
        if not found or found[-1][0] != entry[0]:
            found.append((entry[0], []))
        found[-1][1].append(entry)
    return found
