"""Raw rows scored by a trained model: values are found in the sorted arrays of preparation, mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.lab.checkpoints import trained
from experiments.lab.errors import ExperimentError
from experiments.tasks.click_through.criteo import FEATURES, FIELDS, NUMBERS, number_in_bins, problem
from experiments.tasks.click_through.model import ClickModel, ClickThroughSettings
from experiments.tasks.click_through.prepared import UNSEEN, Prepared, map_files

_BLOCK = 1 << 20  # bytes that are read at a time, or as many as there are
Array = np.ndarray[Any, Any]


class Scorer:
    """A model and the maps of the data it was trained with."""

    def __init__(self, checkpoint: Path, data: Path) -> None:
        settings, tensors = trained(checkpoint, "click_through", ClickThroughSettings)
        if settings.dataset != "criteo":
            raise ExperimentError(f"{checkpoint} was trained on {settings.dataset}; raw rows of criteo are scored.")
        if not tensors:
            raise ExperimentError(f"{checkpoint} has no model yet: a run selects one by its first validation.")
        prepared = Prepared.open(data)
        if int(tensors["maps"]) != prepared.maps:
            told = f"{data} has the maps of another data set than {checkpoint} was trained with"
            raise ExperimentError(f"{told}; give the --data of its run.")
        self.bins = str(prepared.options["bins"])
        self.maps = [[mapped(path) for path in map_files(data, feature)] for feature in prepared.tables]
        self.model = ClickModel(settings, prepared.tables)
        self.model.load_state_dict(tensors)
        self.model.eval()

    @torch.inference_mode()
    def scores(self, rows: Sequence[str]) -> list[float]:
        """The probability of a click for each of some good rows, with their label or without."""
        probabilities: list[float] = self.model(torch.from_numpy(self.ids(rows))).sigmoid().tolist()
        return probabilities

    def ids(self, rows: Sequence[str]) -> Array:  # -> (rows, features)
        """Numbers of the values, that of unseen ones where the maps have none."""
        columns = zip(*(row.split("\t")[-len(FEATURES) :] for row in rows), strict=True)
        codes = []
        for name, column, (known, numbers) in zip(FEATURES, columns, self.maps, strict=True):
            values = [in_bins(field, self.bins) for field in column] if name in NUMBERS else column
            codes.append(found_codes(known, numbers, values))
        return np.stack(codes, axis=1)


def mapped(path: Path) -> Array:
    """An array that stays in its file; as a plain one, since the class of such arrays makes each look at it slow."""
    return np.asarray(np.load(path, mmap_mode="r"))


in_bins = lru_cache(100_000)(lambda field, bins: number_in_bins(field, bins) if field else field)


def found_codes(known: Array, codes: Array, values: Sequence[str]) -> Array:
    """The number beside each value in the sorted array; a value too long for the array is in none."""
    given = np.array(values, dtype=np.bytes_)
    sought = given.astype(known.dtype)  # or else the whole array would be made as wide as the values
    places = known.searchsorted(sought)
    places[places == len(known)] = 0  # any place will do: what stands there is another value
    return np.where(known[places] == given, codes[places], np.int32(UNSEEN))


def checked_row(line: bytes, number: int) -> str:
    """A raw row, its label or none before it."""
    row = line.rstrip(b"\r").decode("latin-1")
    labelled = row if row.count("\t") != FIELDS - 2 else f"0\t{row}"
    if wrong := problem(labelled):
        raise ExperimentError(f"standard input, line {number}: {wrong}")
    return row


def blocks_of_lines(descriptor: int) -> Iterator[list[bytes]]:
    """Whole lines as they come: a single one at once, many together."""
    rest = b""
    while block := os.read(descriptor, _BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]
