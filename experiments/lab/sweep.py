"""All rows of a task's tables, each in a process of its own, leaving out those that have results already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from experiments.lab.errors import Stopped
from experiments.lab.files import check_folder, writable_folder
from experiments.lab.rows import Run
from experiments.lab.search import Bench
from experiments.lab.settings import Settings
from provenance import ROOT


class Children:
    """Processes that are ended together, and after that none is started."""

    def __init__(self) -> None:
        self.stopping = False
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.RLock()

    def run(self, command: Sequence[str], **options: Any) -> int | None:
        """Run one to its end: its exit code, or nothing if it was not started."""
        with self._lock:
            if self.stopping:
                return None
            # A group of its own: Ctrl-C reaches it through us, once, and not from the terminal as well.
            child = subprocess.Popen(command, process_group=0, **options)
            self._running.add(child)
        code = child.wait()
        with self._lock:
            self._running.discard(child)
        return code

    def stop(self) -> None:
        """Tell all that run to save and end; told a second time they end at once."""
        with self._lock:
            self.stopping = True
            for child in self._running:
                child.terminate()


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
class Sweep:
    """Where a sweep reads and writes, and how many runs go side by side."""

    bench: Bench
    data: Path | None
    out: Path
    jobs: int = 1
    smoke: bool = False
    console: Console = field(default_factory=Console)
    children: Children = field(default_factory=Children)

    def run(self, seeds: int | None = None) -> list[str]:
        """Search, then every run that is missing; the names of those that failed."""
        wanted = [run for run in self.bench.plan.runs if seeds is None or run[2] < seeds]
        self.console.print(f"{len(wanted)} runs in the tables, {len(self.missing(cells(wanted)))} of them to do")
        failed: list[str] = []
        with self.ready() as pool:
            # Neighbouring runs of one dataset together, so that its search comes just before them.
            for dataset, runs in groupby(wanted, key=lambda run: run[0]):
                todo = cells(runs)
                unfound = self.do(self.untried(dataset), pool) if self.missing(todo) else []
                # Rows with rates that were not searched would not be comparable. And only now is it known which rates
                # they have, and so whether their results are there.
                failed += unfound or self.do(self.missing(todo), pool)
        return failed

    @contextmanager
    def ready(self) -> Iterator[ThreadPoolExecutor]:
        """Places that can be read and written, and workers that a signal stops."""
        check_folder(self.data)
        writable_folder(self.out, "--out")
        writable_folder(self.bench.results, "--results")
        with self.stoppable(), ThreadPoolExecutor(self.jobs) as pool:
            yield pool

    def missing(self, wanted: Sequence[Cell]) -> list[Cell]:
        """Those that have no result of the settings they would have now."""
        kinds = {cell.kind for cell in wanted}
        have = {kind: {settings for settings, _ in self.bench.recorded(kind)} for kind in kinds}
        return [cell for cell in wanted if self.settings(cell) not in have[cell.kind]]

    def settings(self, cell: Cell) -> Settings:
        """What the run would be told now: a result of anything else is not its result."""
        return self.bench.settle(cell.config, cell.options, tiny=self.smoke)

    def untried(self, dataset: str) -> list[Cell]:
        """What is missing of the grid of each format."""
        search = self.bench.plan.search(dataset)
        if self.smoke:
            return []
        have = {row: self.bench.trials(dataset, format) for format, row in search.rows.items()}
        return [
            Cell(f"{dataset}-{row}", {**search.options_of(point), "seed": seed}, "search")
            for row in search.rows.values()
            for point in search.points
            for seed in range(search.seeds)
            if (point, seed) not in have[row]
        ]

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM are passed on to the runs, which save; what has not begun does not begin."""

        def pass_on(kind: int, frame: FrameType | None) -> None:
            self.children.stop()
            raise KeyboardInterrupt

        before = {kind: signal.signal(kind, pass_on) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except KeyboardInterrupt:
            raise Stopped("stopped; the same command goes on where it was.") from None
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def do(self, entries: Sequence[Cell], pool: ThreadPoolExecutor) -> list[str]:
        """Run all of them; the names of those that failed."""
        futures = [pool.submit(self.start, cell) for cell in entries]
        running = set(futures)
        try:
            # A signal that comes just before a wait without an end does not wake it: its handler would wait as well.
            while running:
                ended, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()  # an error of ours ends the sweep at once
            return [name for future in futures if (name := future.result())]
        finally:
            for future in futures:
                future.cancel()

    def start(self, cell: Cell) -> str | None:
        """Run it as a user would; what it says goes to a file. Its name, if it failed."""
        folder = self.out / cell.kind
        log = self.out / "logs" / f"{self.bench.task.name}-{cell.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "experiments", self.bench.task.name, *cell.arguments()]
        command += ["--out", str(folder), "--results", str(self.bench.results), "--resume-if-possible"]
        command += ["--data", str(self.data)] if self.data is not None else []
        command += ["--smoke"] if self.smoke else []
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        begun = time.monotonic()
        with log.open("a", encoding="utf-8") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            code = self.children.run(command, cwd=ROOT, stdout=file, stderr=file, env=environment)
        if code is None:
            return cell.name
        seconds = time.monotonic() - begun
        failed = "stopped" if self.children.stopping else f"failed with exit code {code}, see {log}"
        end = "done" if code == 0 else failed
        self.console.print(f"{time.strftime('%H:%M:%S')}  {cell.name}  {end}  {seconds:.0f} s", highlight=False)
        return None if code == 0 else cell.name


def cells(runs: Iterable[Run]) -> list[Cell]:
    """Runs of the tables."""
    return [Cell(f"{dataset}-{row}", {"seed": seed}) for dataset, row, seed in runs]
