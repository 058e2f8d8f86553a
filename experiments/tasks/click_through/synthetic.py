"""Rows of Criteo's shape from random numbers, any number of them: 39 features, Zipf's law, a planted model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import CRITEO
from experiments.lab.batches import Batch, evenly
from experiments.tasks.click_through.criteo import CATEGORIES, FEATURES, NUMBERS
from experiments.tasks.click_through.model import ClickThroughSettings
from experiments.tasks.click_through.prepared import SPLITS
from experiments.tasks.click_through.rows import batch_of

BLOCK = 65_536  # rows of a raw file that are made at a time
ROWS = 1_000_000  # of an epoch, where nothing is said
MOST_VALUES = 2**32 // len(FEATURES)  # of a category in a raw file: above it two of them have one text
_EXPONENT = 1.1  # of Zipf's law
_NUMBER_VALUES = 100
_SHARE_MISSING = {name: 0.1 if name in NUMBERS else 0.03 for name in FEATURES}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Synthetic:
    """Ids that are numbers already, the most frequent value first; every split has random numbers of its own."""

    tables: Mapping[str, int]
    maps: int = 0

    @classmethod
    def of_size(cls, values: int | None = None) -> Synthetic:
        """As many values as Criteo's 26 categories have, or so many for each of them."""
        sizes = CRITEO if values is None else [values] * len(CATEGORIES)
        return cls({**dict.fromkeys(NUMBERS, _NUMBER_VALUES), **dict(zip(CATEGORIES, sizes, strict=True))})

    def sizes(self) -> dict[str, Any]:
        return {"tables": list(self.tables.values())}

    def training(self, settings: ClickThroughSettings) -> Drawn:
        return Drawn(self, settings, "train")

    def in_order(self, settings: ClickThroughSettings, split: str) -> Iterator[Batch]:
        source = Drawn(self, settings, split)
        return islice(source.batches(0), max(1, len(source) // 10))

    def told(self) -> dict[str, Any]:
        """For the line of results."""
        return {}

    def rows(self, count: int, *key: int) -> tuple[Array, Array]:  # -> (count,), (count, features)
        """Labels and ids; the same for the same key."""
        draw = np.random.default_rng(key)
        ids = np.stack([zipf(draw.random(count), size) for size in self.tables.values()], axis=1)
        effects = uniform_hash(ids * len(FEATURES) + np.arange(len(FEATURES)))
        chance = 1 / (1 + np.exp(1.5 - 3 * effects.sum(1) / np.sqrt(len(FEATURES))))
        return (draw.random(count) < chance).astype(np.float32), ids


class Drawn:
    """Batches of a split: what is in one follows from its step."""

    def __init__(self, data: Synthetic, settings: ClickThroughSettings, split: str) -> None:
        self.data, self.settings, self.split = data, settings, split
        self.ends = evenly(settings.epochs * len(self), settings.epochs * settings.validations)

    def __len__(self) -> int:
        return max(1, (self.settings.rows or ROWS) // self.settings.batch)

    def batches(self, start: int) -> Iterator[Batch]:
        for step in range(start, self.settings.epochs * len(self)):
            labels, ids = self.data.rows(self.settings.batch, self.settings.seed, SPLITS.index(self.split), step)
            yield batch_of(torch.from_numpy(labels), torch.from_numpy(ids))


def zipf(uniform: Array, size: int) -> Array:
    """Ids below the size by Zipf's law, from numbers that are uniform in [0, 1): the inverse of its integral."""
    power = 1 - _EXPONENT
    drawn = (1 + uniform * (float(size + 1) ** power - 1)) ** (1 / power)
    ids: Array = np.minimum(drawn.astype(np.int64) - 1, size - 1)
    return ids


def uniform_hash(numbers: Array) -> Array:
    """Numbers in [-1, 1) that look random and are always the same (the finaliser of SplitMix64)."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(40)).astype(np.float64) / 2**23 - 1


def write_raw(path: Path, rows: int, seed: int, data: Synthetic) -> None:
    """Rows in Criteo's raw format, a block at a time; whole or not at all."""
    from pyarrow import csv

    temporary = path.with_name(f".{path.name}.new")
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    try:
        writer = None
        for block, start in enumerate(range(0, rows, BLOCK)):
            table = raw_block(data, min(BLOCK, rows - start), seed, block)
            writer = writer or csv.CSVWriter(temporary, table.schema, write_options=options)
            writer.write(table)
        if writer is not None:
            writer.close()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def raw_block(data: Synthetic, count: int, seed: int, block: int) -> Any:
    """A table of texts and numbers, some of them missing."""
    import pyarrow as pa

    labels, ids = data.rows(count, seed, block)
    draw = np.random.default_rng((seed, block, 1))
    columns = {"label": pa.array(labels.astype(np.int8))}
    for place, name in enumerate(FEATURES):
        missing = draw.random(count) < _SHARE_MISSING[name]
        column = ids[:, place] if name in NUMBERS else hexadecimal(ids[:, place] * len(FEATURES) + place)
        columns[name] = pa.array(column, mask=missing)
    return pa.table(columns)


def hexadecimal(numbers: Array) -> Array:
    """Eight digits each, different ones for different numbers below 2**32."""
    scattered = (numbers.astype(np.uint32) * np.uint32(2654435761)).astype(">u4")
    return _DIGITS[scattered.view(np.uint8)].view("S8").astype("U8")


_DIGITS = np.array([f"{byte:02x}".encode() for byte in range(256)])
