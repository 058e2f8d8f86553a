"""Raw rows scored by a trained model: values are found in the sorted arrays of preparation, mapped into memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.lab.checkpoints import rebuilt, trained
from experiments.lab.errors import ExperimentError
from experiments.tasks.click_through.at_hand import AtHand
from experiments.tasks.click_through.codes import Codes
from experiments.tasks.click_through.criteo import FEATURES, FIELDS, problem
from experiments.tasks.click_through.fields import Fields, fields_of
from experiments.tasks.click_through.model import ClickModel, ClickThroughSettings
from experiments.tasks.click_through.prepared import DATASETS, Prepared, checksum
from experiments.tasks.click_through.served import ServedModel

_BLOCK = 1 << 20  # bytes that are read at a time, or as many as there are
_LINES = 1024  # read together: their arrays stay in the processor's cache, and what was missing is at hand for the next
Array = np.ndarray[Any, Any]


class Scorer:
    """A model and the maps of the data it was trained with. Threads that share one take turns."""

    def __init__(self, checkpoint: Path, data: Path) -> None:
        settings, tensors = trained(checkpoint, "click_through", ClickThroughSettings)
        if settings.dataset not in DATASETS:
            raise ExperimentError(f"{checkpoint} was trained on {settings.dataset}; raw rows of criteo are scored.")
        prepared = Prepared.described(data)
        if int(tensors["maps"]) != prepared.maps:
            told = f"{data} has the maps of another data set than {checkpoint} was trained with"
            raise ExperimentError(f"{told}; give the --data of its run.")
        bins = str(prepared.options["bins"])
        self.codes = [Codes(data, name, bins) for name in prepared.tables]
        if checksum(data, prepared.tables) != prepared.maps:
            told = f"{data}: the maps (*.values.npy and *.codes.npy) are not those that were written"
            raise ExperimentError(f"{told}, as their checksum tells; copy the --data of the run anew.")
        self.model = rebuilt(partial(ClickModel, settings, prepared.tables), tensors, checkpoint).eval()
        self.served = ServedModel(self.model, settings.full_up_to)
        self.at_hand = AtHand()
        self.lock = threading.Lock()  # what is at hand, and the memory that layers write to, are of one call at a time

    def scores(self, lines: Sequence[bytes], number: int = 1, labelled: bool = True) -> list[float]:
        """The probability of a click for each of some raw lines, the first of which has this number.

        All of them have a label, which is not looked at further, or none has and ``labelled`` is false.
        """
        with self.lock:
            ids = torch.from_numpy(self._ids(lines, number, labelled))
            probabilities: list[float] = self.served(ids).sigmoid().tolist()
        return probabilities

    def ids(self, lines: Sequence[bytes], number: int = 1, labelled: bool = True) -> Array:  # -> (rows, features)
        """Numbers of the values, that of unseen ones where the maps have none; an error for a bad line."""
        with self.lock:
            return self._ids(lines, number, labelled)

    def _ids(self, lines: Sequence[bytes], number: int, labelled: bool) -> Array:
        numbers = np.empty((len(lines), len(FEATURES)), np.int64)
        for start in range(0, len(lines), _LINES):
            some = lines[start : start + _LINES]
            found = self._ids_of_some(some, labelled)
            if found is None:
                raise bad_line(some, number + start, labelled)
            numbers[start : start + _LINES] = found
        return numbers

    def _ids_of_some(self, lines: Sequence[bytes], labelled: bool) -> Array | None:
        """The same of lines that go together, or ``None`` if one is bad."""
        fields = fields_of(lines, labelled)
        if fields is None:
            return None
        numbers, missing = self.at_hand.find(fields.head, fields.tail)
        if len(missing):
            found = self._sought(fields, missing)
            if found is None:
                return None
            numbers[missing] = found
        return numbers.reshape(len(lines), len(FEATURES))

    def _sought(self, fields: Fields, missing: Array) -> Array | None:
        """Numbers of fields that are not at hand, and are from now on; ``None`` if one is bad.

        Fields at hand are good ones, and need not be looked at.
        """
        features, numbers = missing % len(FEATURES), np.empty(len(missing), np.int64)
        order = features.argsort(kind="stable")
        ends = np.bincount(features, minlength=len(FEATURES)).cumsum().tolist()
        for codes, (start, end) in zip(self.codes, pairwise([0, *ends]), strict=True):
            if start < end:
                own = order[start:end]
                found = codes(fields, missing[own])
                if found is None:
                    return None
                numbers[own] = found
        self.at_hand.keep(fields.head[missing], fields.tail[missing], numbers)
        return numbers


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


def bad_line(lines: Sequence[bytes], number: int, labelled: bool) -> ExperimentError:
    """What is wrong with the first line that is bad, of which there is one."""
    try:
        for place, line in enumerate(lines, number):
            checked_row(line, place, labelled)
    except ExperimentError as error:
        return error
    raise AssertionError(lines)


def blocks_of_lines(descriptor: int) -> Iterator[list[bytes]]:
    """Whole lines as they come: a single one at once, many together."""
    rest = b""
    while block := os.read(descriptor, _BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]
