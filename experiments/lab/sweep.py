"""All rows of a table, each in a process of its own, leaving out those that have results already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from experiments.lab.errors import Stopped
from experiments.lab.files import writable_folder
from experiments.lab.records import read
from experiments.lab.settings import Settings, recorded
from experiments.tasks.sentiment import task
from experiments.tasks.sentiment.data import check_folder
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
class Sweep:
    """Where a sweep reads and writes, and how many runs go side by side."""

    data: Path | None
    out: Path
    results: Path
    jobs: int = 1
    smoke: bool = False
    console: Console = field(default_factory=Console)
    children: Children = field(default_factory=Children)

    def run(self, seeds: int | None = None) -> list[str]:
        """Search, then every run that is missing; the names of those that failed."""
        check_folder(self.data)
        writable_folder(self.out, "--out")
        writable_folder(self.results, "--results")
        wanted = [entry for entry in task.runs() if seeds is None or entry[2] < seeds]
        self.console.print(f"{len(wanted)} runs in the tables, {len(self.without_result(wanted))} of them to do")
        failed: list[str] = []
        with self.stoppable(), ThreadPoolExecutor(self.jobs) as pool:
            for dataset, rows in stages(wanted):
                missing = self.search(dataset, pool) if self.without_result(rows) else []
                failed += missing
                if missing:  # rows with rates that were not searched would not be comparable
                    continue
                # Only now is it known which rates they have, and so whether their results are there.
                todo = self.without_result(rows)
                failed += failures(pool, self.one, todo)
        return failed

    def without_result(self, entries: Sequence[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
        """Those that have no result of the settings they would have now."""
        have = {recorded(record) for record in read(self.results / task.RESULTS_FILE)}
        return [entry for entry in entries if self.settings(*entry) not in have]

    def settings(self, dataset: str, row: str, seed: int) -> Settings:
        """What the run would be told now: a result of anything else is not its result."""
        return task.settle(f"{dataset}-{row}", {"seed": seed}, self.results, smoke=self.smoke, search=False)

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

    def search(self, dataset: str, pool: ThreadPoolExecutor) -> list[str]:
        """What is missing of the grid of each format."""
        if self.smoke:
            return []
        rows = task.SEARCHED_ROWS[dataset]
        have = {row: task.trials(self.results, dataset, format) for format, row in rows.items()}
        wanted = [
            (dataset, row, point, seed)
            for row in rows.values()
            for point in task.GRIDS[dataset]
            for seed in range(task.SEARCH_SEEDS[dataset])
            if (point, seed) not in have[row]
        ]
        return failures(pool, self.try_point, wanted)

    def try_point(self, dataset: str, row: str, point: task.Point, seed: int) -> str | None:
        """One point of the grid, with one seed."""
        rate, std = point
        options = ["--lr", repr(rate), *(["--std", repr(std)] if std is not None else []), "--search"]
        name = f"search-{dataset}-{row}-{rate:g}-{std or 'glorot'}-{seed}"
        return self.process(name, [f"{dataset}-{row}", *options], seed)

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
            code = self.children.run(command, cwd=ROOT, stdout=file, stderr=file, env=environment)
        if code is None:
            return name
        seconds = time.monotonic() - begun
        failed = "stopped" if self.children.stopping else f"failed with exit code {code}, see {log}"
        end = "done" if code == 0 else failed
        self.console.print(f"{time.strftime('%H:%M:%S')}  {name}  {end}  {seconds:.0f} s", highlight=False)
        return None if code == 0 else name


def failures(pool: ThreadPoolExecutor, run: Callable[..., str | None], entries: Iterable[tuple[Any, ...]]) -> list[str]:
    """Run all entries and return the names of those that failed."""
    futures = [pool.submit(run, *entry) for entry in entries]
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


def stages(runs: Sequence[tuple[str, str, int]]) -> list[tuple[str, list[tuple[str, str, int]]]]:
    """Neighbouring runs of one dataset together, so that its search comes just before them."""
    found: list[tuple[str, list[tuple[str, str, int]]]] = []
    for entry in runs:
        if not found or found[-1][0] != entry[0]:
            found.append((entry[0], []))
        found[-1][1].append(entry)
    return found
