"""What computes the expressions of preparation: DuckDB in the process, or Spark where data is beyond one machine."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import ibis
import pyarrow.parquet as pq

from experiments.lab.errors import ExperimentError
from experiments.tasks.click_through import expressions
from experiments.tasks.click_through.criteo import TIME
from experiments.tasks.click_through.prepared import SPLITS

_NO_DELIMITER = "\x01\x02\x03\x04"  # a line is one column
Shares = tuple[float, float]  # of validation and test


def split_sizes(count: int, shares: Shares, told: str, advice: str) -> dict[str, int]:
    """Of rows, or of files, in order; none may be empty."""
    validation, test = (round(share * count) for share in shares)
    sizes = dict(zip(SPLITS, (count - validation - test, validation, test), strict=True))
    refuse_empty(sizes, shares, told, advice)
    return sizes


def refuse_empty(sizes: Mapping[str, int], shares: Shares, told: str, advice: str) -> None:
    """With what was asked for, and for which splits there is nothing."""
    if empty := [split for split, size in sizes.items() if not size]:
        wanted = f"--validation {shares[0]} and --test {shares[1]}: none are left for {' and '.join(empty)}"
        raise ExperimentError(f"{told} are too few for {wanted}; give {advice}.")


def numbered_name(name: str) -> tuple[list[str | int], str]:
    """What names are sorted by: digits are numbers, so that day_2 comes before day_10."""
    parts = re.split("([0-9]+)", name)  # texts and digits in turn
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


class Engine(ABC):
    """Tables and files of an engine; what is computed is not told here."""

    kept: ClassVar[tuple[str, ...]] = ()  # columns of lines that rows have, too
    errors: tuple[type[Exception], ...]
    connection: Any

    @abstractmethod
    def lines(self, files: Sequence[Path]) -> Any:
        """Every line as one text, ``line``, and its ``filename``."""

    @abstractmethod
    def table(self, name: str, expression: Any) -> Any:
        """Computed once and kept."""

    @abstractmethod
    def splits(self, rows: Any, shares: Shares) -> dict[str, Any]:
        """The rows of each split, with a ``place`` to be ordered by."""

    @abstractmethod
    def in_time(self, rows: Any) -> Any:
        """Rows with a ``place`` by their time."""

    def splits_by_time(self, rows: Any, shares: Shares) -> dict[str, Any]:
        """Rows of one time stay together, in the earlier split, so that engines agree in whatever order they read."""
        count = int(rows.count().execute())
        sizes = split_sizes(count, shares, f"{count} rows", "more of them, or other shares")
        of_time = self.table("moments", expressions.moments(rows))
        times = int(of_time.count().execute())

        def first_after(size: int) -> int | None:
            later = of_time.filter(of_time.before >= size)
            return int(later[TIME].min().execute()) if int(later.count().execute()) else None

        validation, test = first_after(sizes["train"]), first_after(sizes["train"] + sizes["validation"])
        if validation is None or test is None or validation == test:
            kept = {"validation": validation not in (None, test), "test": test is not None}
            refuse_empty(kept, shares, f"{times} different times", "rows of more times, or other shares")
        placed = self.in_time(rows)
        time = placed[TIME]
        return {
            "train": placed.filter(time < validation),
            "validation": placed.filter(time >= validation, time < test),
            "test": placed.filter(time >= test),
        }

    @abstractmethod
    def write(self, expression: Any, path: Path, row_group: int) -> None:
        """A Parquet file."""

    def share(self) -> float:
        """Of what is computed now, in percent; negative where it is not known."""
        return -1.0

    def unread(self, error: Exception) -> Path | None:
        """The file that could not be read, where an error names it and says no more."""
        return None

    def close(self) -> None:
        self.connection.disconnect()


class DuckDB(Engine):
    """Keeps the order of lines, streams, and spills beyond its memory."""

    def __init__(self, folder: Path, memory: str) -> None:
        import duckdb

        self.errors = (duckdb.Error,)
        options = {"memory_limit": memory, "temp_directory": str(folder / "spilled")}
        try:
            self.connection = ibis.duckdb.connect(folder / "rows.duckdb", **options)
        except duckdb.ParserException:  # of the options, that of memory alone is parsed
            told = f"--memory {memory}: a number and a unit of KB, MB, GB, TB, KiB, MiB, GiB or TiB are needed"
            raise ExperimentError(f"{told}, such as 3GB.") from None

    def lines(self, files: Sequence[Path]) -> Any:
        return self.connection.read_csv(
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

    def table(self, name: str, expression: Any) -> Any:
        return self.connection.create_table(name, expression)

    def splits(self, rows: Any, shares: Shares) -> dict[str, Any]:
        """In the order of lines, which is that of time."""
        placed, start, parts = rows.mutate(place=rows.rowid()), 0, {}
        count = int(rows.count().execute())
        for split, size in split_sizes(count, shares, f"{count} rows", "more of them, or other shares").items():
            parts[split] = placed.filter(placed.place >= start, placed.place < start + size)
            start += size
        return parts

    def in_time(self, rows: Any) -> Any:
        return rows.mutate(place=ibis.struct({TIME: rows[TIME], "line": rows.rowid()}))

    def write(self, expression: Any, path: Path, row_group: int) -> None:
        self.connection.to_parquet(expression, path, ROW_GROUP_SIZE=row_group)

    def share(self) -> float:
        return float(self.connection.con.query_progress())


class Spark(Engine):
    """Keeps no order of lines: files are split in the order of their names, such as one a day (``numbered_name``)."""

    kept = ("filename",)

    def __init__(self, folder: Path, memory: str) -> None:
        try:
            from py4j.protocol import Py4JError
            from pyspark import SparkConf
            from pyspark.errors import PySparkException
            from pyspark.sql import SparkSession
        except ImportError:
            raise ExperimentError("--engine spark needs pip install '.[spark]', and a Java runtime.") from None
        self.folder, self.errors = folder, (PySparkException, Py4JError)  # the latter of what Java cannot read
        settings = SparkConf().setIfMissing("spark.master", "local[*]").setIfMissing("spark.ui.enabled", "false")
        settings.setIfMissing("spark.driver.memory", memory.lower().removesuffix("b"))
        try:
            self.session = SparkSession.builder.config(conf=settings).getOrCreate()
        except Exception as error:  # of whatever Java is there
            raise ExperimentError(f"Spark does not start: {error}. It needs a Java runtime.") from None
        self.connection = ibis.pyspark.connect(self.session)

    def lines(self, files: Sequence[Path]) -> Any:
        from pyspark.sql import functions

        lines = self.session.read.text([str(file.absolute()) for file in files])
        named = lines.select(functions.col("value").alias("line"), functions.input_file_name().alias("filename"))
        named.createOrReplaceTempView("lines")
        return self.connection.table("lines")

    def table(self, name: str, expression: Any) -> Any:
        folder = self.folder / f"{name}.folder"
        self.connection.to_parquet(expression, str(folder))
        return self.connection.read_parquet(str(folder), table_name=name)

    def splits(self, rows: Any, shares: Shares) -> dict[str, Any]:
        files = sorted(rows.filename.name("file").as_table().distinct().file.execute(), key=numbered_name)
        advice = (
            "more of them, such as one a day, or rows with a time, --time, or --engine duckdb, which splits by lines"
        )
        sizes = split_sizes(len(files), shares, f"Spark splits by files, and {len(files)}", advice)
        placed, start, parts = rows.mutate(place=rows.filename), 0, {}
        for split, count in sizes.items():
            parts[split] = placed.filter(placed.place.isin(files[start : start + count]))
            start += count
        return parts

    def in_time(self, rows: Any) -> Any:
        return rows.mutate(place=rows[TIME])

    def write(self, expression: Any, path: Path, row_group: int) -> None:
        """Spark writes a folder of files; its rows become one file, a block at a time."""
        folder = self.folder / f"{path.name}.folder"
        self.connection.to_parquet(expression, str(folder))
        parts = [pq.ParquetFile(part) for part in sorted(folder.glob("*.parquet"))]
        with pq.ParquetWriter(path, parts[0].schema_arrow) as writer:
            for part in parts:
                for block in part.iter_batches(row_group):
                    writer.write_batch(block, row_group)

    def unread(self, error: Exception) -> Path | None:
        named = re.search(r"error while reading file (?:file://)?(/\S+)\.\s", str(error))
        return Path(unquote(named[1])) if named else None

    def close(self) -> None:
        self.session.catalog.clearCache()  # whoever started Spark ends it


ENGINES = {"duckdb": DuckDB, "spark": Spark}
