"""From raw rows to a folder of numbers: DuckDB inside of the process, which streams and spills."""

from __future__ import annotations

import gzip
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import duckdb
import ibis
import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.lab.errors import ExperimentError
from experiments.lab.files import alone, writable_folder
from experiments.tasks.click_through import expressions
from experiments.tasks.click_through.criteo import FEATURES, is_good, problem
from experiments.tasks.click_through.prepared import SPLITS, Prepared, map_files, parquet_file, write_about
from experiments.tasks.click_through.rows import LABEL

BAD_ROWS = "bad_rows.txt"
_NO_DELIMITER = "\x01\x02\x03\x04"  # a line is one column
_TOLD = 10  # bad rows, on the terminal


@dataclass(frozen=True)
class Preparation:
    """What is asked for."""

    raw: str  # a file or a glob
    out: Path
    bins: str = "squared-log"
    least: int = 2  # sightings in training of a value with a row of its own
    modulo: int | None = None
    shares: tuple[float, float] = (0.1, 0.1)  # of validation and test: the last rows
    skips_bad_rows: bool = False
    memory: str = "3GB"
    row_group: int = 65_536
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def check(self) -> None:
        if min(self.shares) < 0 or sum(self.shares) >= 1:
            raise ExperimentError(f"--validation and --test are {self.shares}: shares, below 1 in all, are needed.")
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
        options = {"memory_limit": self.memory, "temp_directory": str(folder / "work" / "spilled")}
        connection = ibis.duckdb.connect(folder / "work" / "rows.duckdb", **options)
        try:
            with shown_steps(connection, self.console, steps=1 + 2 * len(FEATURES) + len(SPLITS)) as step:
                step("reading rows")
                rows = self.parsed_rows(connection, files, folder)
                counts = self.split_sizes(int(rows.count().execute()))
                maps = {}
                for feature in FEATURES:
                    step(f"numbering {feature}")
                    training = rows.filter(rows.rowid() < counts["train"])
                    numbers = expressions.numbered(training, feature, self.least, self.modulo)
                    maps[feature] = connection.create_table(f"map_{feature}", numbers)
                for feature, numbers in maps.items():
                    step(f"writing the map of {feature}")
                    write_map(connection, numbers, folder, feature)
                start = 0
                for split, count in counts.items():
                    step(f"writing {split}")
                    self.write_split(connection, rows, maps, (start, start + count), parquet_file(folder, split))
                    start += count
            sizes = {feature: int(numbers.code.max().execute() or 0) + 1 for feature, numbers in maps.items()}
            told = {"bins": self.bins, "least": self.least, "modulo": self.modulo, "kind": "criteo"}
            write_about(folder, sizes, counts, told)
        except duckdb.Error as error:
            raise ExperimentError(f"{self.raw}: {str(error).splitlines()[0].rstrip('.')}.") from None
        finally:
            connection.disconnect()

    def parsed_rows(self, connection: Any, files: Sequence[Path], folder: Path) -> Any:
        """A table of all good rows in the order of their lines."""
        for file in files:
            first = first_line(file)
            if not self.skips_bad_rows and (wrong := problem(first)):
                raise ExperimentError(f"{file}, line 1: {wrong} {_ADVICE}")
        lines = read_lines(connection, files)
        rows = connection.create_table("rows", expressions.parsed(lines, self.bins))
        good = int(rows.count().execute())
        if int(lines.count().execute()) != good:
            self.tell_bad_rows(lines, folder)
        if not good:
            raise ExperimentError(f"{self.raw}: no row is good. {files[0]}, line 1: {problem(first_line(files[0]))}")
        return rows

    def tell_bad_rows(self, lines: Any, folder: Path) -> None:
        """Refuse them, or count and name them; only files that have some are read again."""
        bad = lines.filter(~expressions.is_good(lines)).select("filename").distinct()
        count = 0
        with (folder / BAD_ROWS).open("w") as report:
            for file in sorted(bad.filename.execute()):
                for number, line in enumerate(text_lines(Path(file)), 1):
                    if is_good(line):
                        continue
                    told = f"{file}, line {number}: {problem(line)}"
                    if not self.skips_bad_rows:
                        raise ExperimentError(f"{told} {_ADVICE}")
                    report.write(told + "\n")
                    count += 1
                    if count <= _TOLD:
                        self.console.print(told, highlight=False, markup=False, soft_wrap=True)
        self.console.print(f"{count:,} bad rows were skipped; they are listed in {self.out / BAD_ROWS}.")

    def split_sizes(self, rows: int) -> dict[str, int]:
        validation, test = (round(share * rows) for share in self.shares)
        return dict(zip(SPLITS, (rows - validation - test, validation, test), strict=True))

    def write_split(self, connection: Any, rows: Any, maps: Any, bounds: tuple[int, int], path: Path) -> None:
        place = rows.rowid()
        part = rows.mutate(place=place).filter(place >= bounds[0], place < bounds[1])
        ordered = expressions.coded(part, maps, (LABEL, "place")).order_by("place").drop("place")
        connection.to_parquet(ordered, path, ROW_GROUP_SIZE=self.row_group)


_ADVICE = "--on-bad-row skip leaves such rows out."


def raw_files(pattern: str) -> list[Path]:
    """Those of a glob, by name."""
    files = [Path(name) for name in sorted(glob(pattern)) if Path(name).is_file()]
    if not files:
        raise ExperimentError(f"{pattern}: there is no such file; a file or a glob in quotes is needed.")
    return files


def read_lines(connection: Any, files: Sequence[Path]) -> Any:
    """Every line as one text, whatever its bytes are, in order."""
    return connection.read_csv(
        [str(file) for file in files],
        table_name="lines",
        columns={"line": "VARCHAR"},
        auto_detect=False,
        header=False,
        delim=_NO_DELIMITER,
        quote="",
        escape="",
        comment="",
        encoding="latin-1",  # no byte is refused here
        strict_mode=False,
        filename=True,
    )


def text_lines(path: Path) -> Iterator[str]:
    """As ``read_lines`` reads them."""
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


def clear(folder: Path) -> None:
    """Remove all but the lock, which is held."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def write_map(connection: Any, numbers: Any, folder: Path, feature: str) -> None:
    """Values in order, and their numbers beside them, block by block by way of a Parquet file."""
    between = folder / "work" / "map.parquet"
    connection.to_parquet(numbers.order_by("value"), between)
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
    """Of the query that runs now."""

    def __init__(self, connection: Any) -> None:
        super().__init__()
        self.connection = connection

    def render(self, task: Task) -> Text:
        share = self.connection.con.query_progress()
        return Text(f"{share:3.0f} %" if share >= 0 else "")


@contextmanager
def shown_steps(connection: Any, console: Console, steps: int) -> Iterator[Any]:
    """A function that tells the name of the step that begins."""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), _Share(connection))
    with Progress(*columns, TimeElapsedColumn(), console=console) as shown:
        bar = shown.add_task("", total=steps)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            shown.update(bar, description=name, completed=begun)
            begun += 1

        yield step
        shown.update(bar, description="done", completed=steps)
