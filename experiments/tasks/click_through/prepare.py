"""From raw rows to a folder of numbers, whole or not at all."""

from __future__ import annotations

import gzip
import re
import shutil
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.lab.errors import ExperimentError
from experiments.lab.files import alone, writable_folder
from experiments.tasks.click_through import expressions
from experiments.tasks.click_through.criteo import FEATURES, is_good, problem
from experiments.tasks.click_through.engines import ENGINES, Engine, Shares, numbered_name
from experiments.tasks.click_through.prepared import SPLITS, Prepared, map_files, parquet_file, write_about
from experiments.tasks.click_through.rows import LABEL

BAD_ROWS = "bad_rows.txt"
_TOLD = 10  # bad rows, on the terminal


@dataclass(frozen=True)
class Preparation:
    """What is asked for."""

    raw: str  # a file or a glob
    out: Path
    bins: str = "squared-log"
    least: int = 2  # sightings in training of a value with a row of its own
    modulo: int | None = None
    shares: Shares = (0.1, 0.1)  # the last rows
    skips_bad_rows: bool = False
    memory: str = "3GB"
    engine: str = "duckdb"
    time: bool = False  # rows end with one, by which they are split
    row_group: int = 65_536
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def check(self) -> None:
        if not (min(self.shares) > 0 and sum(self.shares) < 1):  # nan is refused, too
            told = f"--validation {self.shares[0]} and --test {self.shares[1]}"
            raise ExperimentError(f"{told}: shares above 0, and below 1 in all, are needed.")
        refuse_address(str(self.out))
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ExperimentError(f"{self.out} is there already; give another folder, or remove it first.")

    def run(self) -> Prepared:
        """The whole folder or none; what an interrupted one has left is cleared away."""
        self.check()
        files = raw_files(self.raw)
        writable_folder(self.out.absolute().parent, "OUT")
        work = self.out.absolute().with_name(f".{self.out.name}.new")
        work.mkdir(exist_ok=True)
        with alone(work):
            clear(work)
            try:
                self.write(files, work)
                for leftover in (work / "work", work / ".lock"):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                if self.out.exists():
                    self.out.rmdir()
                work.rename(self.out)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
        return Prepared.open(self.out)

    def write(self, files: Sequence[Path], folder: Path) -> None:
        (folder / "work").mkdir()
        engine: Engine = ENGINES[self.engine](folder / "work", self.memory)
        try:
            with shown_steps(engine, self.console, steps=1 + 2 * len(FEATURES) + len(SPLITS)) as step:
                step("reading rows")
                rows = self.parsed_rows(engine, files, folder)
                splits = (engine.splits_by_time if self.time else engine.splits)(rows, self.shares)
                maps = {}
                for feature in FEATURES:
                    step(f"numbering {feature}")
                    numbers = expressions.numbered(splits["train"], feature, self.least, self.modulo)
                    maps[feature] = engine.table(f"map_{feature}", numbers)
                for feature, numbers in maps.items():
                    step(f"writing the map of {feature}")
                    write_map(engine, numbers, folder, feature)
                for split, part in splits.items():
                    step(f"writing {split}")
                    ordered = expressions.coded(part, maps, (LABEL, "place")).order_by("place").drop("place")
                    engine.write(ordered, parquet_file(folder, split), self.row_group)
            sizes = {feature: int(numbers.code.max().execute() or 0) + 1 for feature, numbers in maps.items()}
            counts = {split: int(part.count().execute()) for split, part in splits.items()}
            options = {"bins": self.bins, "least": self.least, "modulo": self.modulo, "time": self.time}
            write_about(folder, sizes, counts, options)
        except engine.errors as error:
            if (file := engine.unread(error)) is not None and file.exists():
                deque(text_lines(file), maxlen=0)  # which says what is wrong with it
            raise ExperimentError(f"{self.raw}: {reason(error)}.") from None
        finally:
            engine.close()

    def parsed_rows(self, engine: Engine, files: Sequence[Path], folder: Path) -> Any:
        """A table of all good rows in the order of their lines."""
        for file in files:
            first = first_line(file)
            if not self.skips_bad_rows and (wrong := problem(first, self.time)):
                raise ExperimentError(f"{file}, line 1: {wrong} {_ADVICE}")
        lines = engine.lines(files)
        rows = engine.table("rows", expressions.parsed(lines, self.bins, engine.kept, self.time))
        good = int(rows.count().execute())
        if int(lines.count().execute()) != good:
            self.tell_bad_rows(lines, folder)
        if not good:
            wrong = problem(first_line(files[0]), self.time)
            raise ExperimentError(f"{self.raw}: no row is good. {files[0]}, line 1: {wrong}")
        return rows

    def tell_bad_rows(self, lines: Any, folder: Path) -> None:
        """Refuse them, or count and name them; only files that have some are read again."""
        bad = lines.filter(~expressions.is_good(lines, self.time)).select("filename").distinct()
        count = 0
        with (folder / BAD_ROWS).open("w") as report:
            names = (name.removeprefix("file://") for name in bad.filename.execute())
            for file in sorted(names, key=numbered_name):
                for number, line in enumerate(text_lines(Path(file)), 1):
                    if is_good(line, self.time):
                        continue
                    told = f"{file}, line {number}: {problem(line, self.time)}"
                    if not self.skips_bad_rows:
                        raise ExperimentError(f"{told} {_ADVICE}")
                    report.write(told + "\n")
                    count += 1
                    if count <= _TOLD:
                        self.console.print(told, highlight=False, markup=False, soft_wrap=True)
        self.console.print(f"{count:,} bad rows were skipped; they are listed in {self.out / BAD_ROWS}.")


_ADVICE = "--on-bad-row skip leaves such rows out."


def raw_files(pattern: str) -> list[Path]:
    """Those of a glob, in the order of their names and of the numbers in them."""
    refuse_address(pattern)
    files = [Path(name) for name in sorted(glob(pattern), key=numbered_name) if Path(name).is_file()]
    if not files:
        raise ExperimentError(f"{pattern}: there is no such file; a file or a glob in quotes is needed.")
    return files


def refuse_address(given: str) -> None:
    """Of a storage such as s3:// or hdfs://, which a path would take for a folder of that name."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", given):
        told = "prepare reads and writes files of folders, with Spark those that all its machines see at the same path"
        raise ExperimentError(f"{given} is an address, not a path: {told}. Mount the storage and give its path.")


def text_lines(path: Path) -> Iterator[str]:
    """As engines read them, whatever their bytes are."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for line in file:
                yield line.rstrip(b"\r\n").decode("latin-1")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ExperimentError(f"{path} is damaged or cut short: {error}. Copy it anew.") from None


def first_line(path: Path) -> str:
    """There has to be one."""
    for line in text_lines(path):
        return line
    raise ExperimentError(f"{path} is empty; copy it anew, or leave it out.")


def reason(error: Exception) -> str:
    """Of an engine's message what is wrong and in which file, without the row that it quotes."""
    first, _, details = str(error).partition("\n\n")
    told = [line for line in first.split("\n") if not line.startswith("Original Line:")][:2]
    told += [line for line in details.split("\n") if line.startswith("  file = ")]
    return "; ".join(line.strip().rstrip(".") for line in told)


def clear(folder: Path) -> None:
    """Remove all but the lock, which is held."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def write_map(engine: Engine, numbers: Any, folder: Path, feature: str) -> None:
    """Values in order, and their numbers beside them, block by block by way of a Parquet file."""
    between = folder / "work" / f"{feature}.parquet"
    engine.write(numbers.order_by("value"), between, 1_000_000)
    width = max(int(numbers.value.length().max().execute() or 0), 1)
    file = pq.ParquetFile(between)
    kinds = (np.dtype(f"S{width}"), np.dtype(np.int32))
    rows = max(file.metadata.num_rows, 1)  # where no value has a number, a missing one is unseen
    arrays = [
        np.lib.format.open_memmap(path, "w+", kind, (rows,))
        for path, kind in zip(map_files(folder, feature), kinds, strict=True)
    ]
    start = 0
    for block in file.iter_batches(1_000_000):
        for array, name in zip(arrays, ("value", "code"), strict=True):
            array[start : start + len(block)] = block[name].to_numpy(zero_copy_only=False).astype(array.dtype)
        start += len(block)
    for array in arrays:
        array.flush()


class _Share(ProgressColumn):
    """Of the step that runs now."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def render(self, task: Task) -> Text:
        share = self.engine.share()
        return Text(f"{share:3.0f} %" if share >= 0 else "")


@contextmanager
def shown_steps(engine: Engine, console: Console, steps: int) -> Iterator[Any]:
    """A function that tells the name of the step that begins."""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), _Share(engine))
    with Progress(*columns, TimeElapsedColumn(), console=console) as shown:
        bar = shown.add_task("", total=steps)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            shown.update(bar, description=name, completed=begun)
            begun += 1

        yield step
        shown.update(bar, description="done", completed=steps)
