"""Numbers of a feature's values, from the sorted arrays of preparation, which stay in their files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.errors import ExperimentError
from experiments.tasks.click_through.criteo import GOOD_FIELDS, NUMBERS, number_in_bins
from experiments.tasks.click_through.fields import Fields
from experiments.tasks.click_through.prepared import UNSEEN, map_files

Array = np.ndarray[Any, Any]

_WORD = np.dtype("<u8")
_RUN = 8  # values between two that the index has: a line of the processor's cache
_IN_RUN = np.arange(_RUN)
_BYTES = np.arange(_WORD.itemsize, dtype=np.uint8)
_HEXADECIMAL = np.isin(np.arange(256), np.frombuffer(b"0123456789abcdef", np.uint8))


class Codes:
    """Numbers of a feature's fields: that of unseen values where the arrays have none."""

    def __init__(self, data: Path, name: str, bins: str) -> None:
        self.known, self.numbers = map(mapped, map_files(data, name))
        self.bins = bins if name in NUMBERS else None  # None for a category
        self.good = GOOD_FIELDS[name]
        self.by_words = self.bins is None and self.known.dtype.itemsize == _WORD.itemsize

    def __call__(self, fields: Fields, places: Array) -> Array | None:  # (n,) -> (n,)
        """Of the fields at some places; ``None`` if one is bad."""
        if self.by_words and len(places) > 1:
            return self._of_words(fields.head[places], fields.length[places])
        texts = fields.some(places)
        if not all(map(self.good.fullmatch, texts)):
            return None
        values = texts if self.bins is None else [text and number_in_bins(text, self.bins) for text in texts]
        if len(values) == 1:
            return np.array([found_code(self.known, self.numbers, values[0])])
        return found_codes(self.known, self.numbers, values)

    def _of_words(self, words: Array, lengths: Array) -> Array | None:
        """The same of categories, whose eight bytes at most are one number: nothing is made of each of them."""
        signs = _HEXADECIMAL[words.view(np.uint8)].reshape(-1, _WORD.itemsize)
        if lengths.max() > _WORD.itemsize or not (signs | (lengths[:, None] <= _BYTES)).all():
            return None
        runs = self.index.searchsorted(words.byteswap(), "right") - 1
        # A run before the first or beyond the last value: any place will do, what stands there is another value.
        places = (runs[:, None] * _RUN + _IN_RUN).clip(0, len(self.known) - 1)
        same = self.known.view(_WORD)[places] == words[:, None]
        place = places[np.arange(len(words)), same.argmax(1)]
        return np.where(same.any(1), self.numbers[place], np.int32(UNSEEN))

    @cached_property
    def index(self) -> Array:
        """Every eighth value as a number that is greater where the value comes later."""
        every: Array = np.ascontiguousarray(self.known[::_RUN]).view(_WORD).byteswap()
        return every


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
