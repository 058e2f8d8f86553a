"""Raw rows scored by a trained model: values are found in the sorted arrays of preparation, mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.lab.checkpoints import fill, trained
from experiments.lab.errors import ExperimentError
from experiments.tasks.click_through.criteo import FEATURES, FIELDS, NUMBERS, number_in_bins, problem
from experiments.tasks.click_through.model import ClickModel, ClickThroughSettings
from experiments.tasks.click_through.prepared import DATASETS, UNSEEN, Prepared, checksum, map_files

_LATELY = 10_000  # fields of a feature that are kept at hand
_BLOCK = 1 << 20  # bytes that are read at a time, or as many as there are
Array = np.ndarray[Any, Any]


class Scorer:
    """A model and the maps of the data it was trained with."""

    def __init__(self, checkpoint: Path, data: Path) -> None:
        settings, tensors = trained(checkpoint, "click_through", ClickThroughSettings)
        if settings.dataset not in DATASETS:
            raise ExperimentError(f"{checkpoint} was trained on {settings.dataset}; raw rows of criteo are scored.")
        prepared = Prepared.described(data)
        if int(tensors["maps"]) != prepared.maps:
            told = f"{data} has the maps of another data set than {checkpoint} was trained with"
            raise ExperimentError(f"{told}; give the --data of its run.")
        bins = str(prepared.options["bins"])
        self.codes = [Codes(map_files(data, name), bins if name in NUMBERS else None) for name in prepared.tables]
        if checksum(data, prepared.tables) != prepared.maps:
            told = f"{data}: the maps (*.values.npy and *.codes.npy) are not those that were written"
            raise ExperimentError(f"{told}, as their checksum tells; copy the --data of the run anew.")
        self.model = ClickModel(settings, prepared.tables)
        fill(self.model, tensors, checkpoint)
        self.model.eval()

    @torch.inference_mode()
    def scores(self, rows: Sequence[str]) -> list[float]:
        """The probability of a click for each of some good rows, with their label or without."""
        probabilities: list[float] = self.model(torch.from_numpy(self.ids(rows))).sigmoid().tolist()
        return probabilities

    def ids(self, rows: Sequence[str]) -> Array:  # -> (rows, features)
        """Numbers of the values, that of unseen ones where the maps have none."""
        columns = zip(*(row.split("\t")[-len(FEATURES) :] for row in rows), strict=True)
        return np.array([of(column) for of, column in zip(self.codes, columns, strict=True)]).T


class Codes:
    """Numbers of a feature's fields: those of fields seen lately at hand, all others in the sorted arrays."""

    def __init__(self, files: tuple[Path, Path], bins: str | None) -> None:
        self.known, self.numbers = map(mapped, files)
        self.bins = bins  # of a number, None for a category
        self.lately: dict[str, int] = {}

    def __call__(self, fields: Sequence[str]) -> list[int]:
        if len(self.lately) > _LATELY:
            self.lately.clear()
        missing = list(set(fields).difference(self.lately))
        values = missing if self.bins is None else [f and number_in_bins(f, self.bins) for f in missing]
        if len(values) == 1:
            self.lately[missing[0]] = found_code(self.known, self.numbers, values[0])
        elif values:
            self.lately.update(zip(missing, found_codes(self.known, self.numbers, values).tolist(), strict=True))
        return list(map(self.lately.__getitem__, fields))


def mapped(path: Path) -> Array:
    """An array that stays in its file; as a plain one, since the class of such arrays makes each look at it slow."""
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError) as error:
        told = f"{path} is missing, damaged or cut short: {str(error).rstrip('.')}"
        raise ExperimentError(f"{told}; copy the --data of the run anew.") from None


def found_codes(known: Array, codes: Array, values: Sequence[str]) -> Array:
    """The number beside each value in the sorted array; a value too long for the array is in none."""
    given = np.array(values, dtype=np.bytes_)
    sought = given.astype(known.dtype)  # or else the whole array would be made as wide as the values
    places = known.searchsorted(sought)
    places[places == len(known)] = 0  # any place will do: what stands there is another value
    return np.where(known[places] == given, codes[places], np.int32(UNSEEN))


def found_code(known: Array, codes: Array, value: str) -> int:
    """The same of one value: arrays of one take four times as long to make as it takes to find it."""
    sought = value.encode()
    if len(sought) > known.itemsize:
        return UNSEEN
    place = int(known.searchsorted(sought))
    return int(codes[place]) if place < len(known) and known[place] == sought else UNSEEN


def has_label(first: bytes) -> bool:
    """Whether rows have one, which the first line decides: without it, it has one field less."""
    return first.count(b"\t") != FIELDS - 2


def checked_row(line: bytes, number: int, labelled: bool = True) -> str:
    """A raw row, with a label or without as the first line is."""
    row = line.rstrip(b"\r").decode("latin-1")
    fields, needed = row.count("\t") + 1, FIELDS if labelled else FIELDS - 1
    if number > 1 and fields != needed:
        told = f"{fields} fields; line 1 has {needed}, {'with' if labelled else 'without'} a label"
        raise ExperimentError(f"standard input, line {number}: {told}, and all lines must be alike.")
    if wrong := problem(row if labelled else f"0\t{row}"):
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
