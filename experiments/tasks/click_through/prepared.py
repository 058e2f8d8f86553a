"""A folder that ``prepare`` wrote: Parquet files of numbers, sorted arrays that map values to them, and their sizes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lab.batches import Batch
from experiments.lab.errors import ExperimentError
from experiments.lab.files import text_of, write_whole
from experiments.tasks.click_through.model import ClickThroughSettings
from experiments.tasks.click_through.rows import LABEL, Streamed

DATASETS = ("criteo", "criteo-sample")  # of raw rows
SPLITS = ("train", "validation", "test")
UNSEEN = 0  # the row of values that training has not, or too rarely
ABOUT = "prepared.json"
_ADVICE = "python -m experiments click-through prepare writes it anew."


def parquet_file(folder: Path, split: str) -> Path:
    """Rows of a split."""
    return folder / f"{split}.parquet"


def map_files(folder: Path, feature: str) -> tuple[Path, Path]:
    """Values of a feature in order, and their numbers."""
    return folder / f"{feature}.values.npy", folder / f"{feature}.codes.npy"


def write_about(folder: Path, sizes: Mapping[str, int], rows: Mapping[str, int], options: Mapping[str, Any]) -> None:
    """What the folder holds, last of all."""
    about = {"sizes": dict(sizes), "rows": dict(rows), "options": dict(options), "maps": checksum(folder, sizes)}
    write_whole(folder / ABOUT, (json.dumps(about, indent=1) + "\n").encode())


def checksum(folder: Path, features: Mapping[str, int]) -> int:
    """Of all maps: whether two folders number the same values alike."""
    total = 0
    for feature in features:
        for path in map_files(folder, feature):
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    total = zlib.crc32(block, total)
    return total


@dataclass(frozen=True)
class Prepared:
    """What was written, checked as far as a look at the files can."""

    folder: Path
    tables: Mapping[str, int]  # rows of each feature's table, that of unseen values among them
    rows: Mapping[str, int]  # of each split
    options: Mapping[str, Any]
    maps: int  # their checksum

    @classmethod
    def described(cls, folder: Path) -> Prepared:
        """By what the folder tells of itself: rows are not looked at, since maps are of use without them."""
        path = folder / ABOUT
        if not path.exists():
            raise ExperimentError(f"{folder} was not prepared: there is no {path}. {_ADVICE}")
        try:
            told = json.loads(text_of(path))
            rows = {split: int(told["rows"][split]) for split in SPLITS}
            return cls(folder, told["sizes"], rows, told["options"], told["maps"])
        except (ValueError, KeyError, TypeError) as error:
            raise ExperimentError(f"{path} is damaged: {error!r}. {_ADVICE}") from None

    @classmethod
    def open(cls, folder: Path) -> Prepared:
        """With all of its rows."""
        prepared = cls.described(folder)
        for split in SPLITS:
            in_file, written = prepared.file(split).metadata.num_rows, prepared.rows[split]
            if in_file != written:
                told = f"{parquet_file(folder, split)} has {in_file:,} rows, and {written:,} were written."
                raise ExperimentError(f"{told} {_ADVICE}")
        return prepared

    def sizes(self) -> dict[str, Any]:
        return {**self.rows, "maps": self.maps}

    def training(self, settings: ClickThroughSettings) -> Streamed:
        """Shuffled epochs of the first split."""
        options = {"seed": settings.seed, "epochs": settings.epochs, "validations": settings.validations}
        return self.streamed(settings, "train", window=settings.window, **options)

    def in_order(self, settings: ClickThroughSettings, split: str) -> Iterator[Batch]:
        return self.streamed(settings, split).batches()

    def streamed(self, settings: ClickThroughSettings, split: str, **options: Any) -> Streamed:
        path = parquet_file(self.folder, split)
        return Streamed(path, self.file(split), list(self.tables), settings.batch, most=settings.rows, **options)

    def told(self) -> dict[str, Any]:
        """For the line of results."""
        return {"prepared": dict(self.options), "rows": dict(self.rows)}

    def file(self, split: str) -> Any:
        """Of pyarrow, with the columns that belong there."""
        import pyarrow.parquet as pq
        from pyarrow.lib import ArrowException

        path = parquet_file(self.folder, split)
        try:
            file = pq.ParquetFile(path)
        except (ArrowException, OSError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ExperimentError(f"{path} is missing, damaged or cut short: {reason}. {_ADVICE}") from None
        if file.schema_arrow.names != [LABEL, *self.tables]:
            raise ExperimentError(f"{path} has other columns than {LABEL} and {', '.join(self.tables)}. {_ADVICE}")
        return file
