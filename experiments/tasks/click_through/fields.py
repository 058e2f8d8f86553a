"""Fields of raw lines, all at once: where each of them is, and two words that are equal where fields are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.tasks.click_through.criteo import FEATURES, FIELDS

Array = np.ndarray[Any, Any]

_WORD = np.dtype("<u8")
_LONGEST = 11  # bytes of a good field; two words hold twelve
_PADDING = bytes(2 * _WORD.itemsize)  # both words of the last field can be read
_TAB, _NEWLINE, _ONE = b"\t\n1"
# What of eight bytes belongs to a field of so many, and what of the four after them, which stand in the upper half.
_HEAD = np.array([2 ** (8 * min(length, 8)) - 1 for length in range(_LONGEST + 1)], dtype=_WORD)
_TAIL = np.array([2 ** (8 * max(length - 8, 0)) - 1 << 32 for length in range(_LONGEST + 1)], dtype=_WORD)
_FEATURE = np.arange(1, 1 + len(FEATURES), dtype=_WORD) << _WORD.type(8)  # above the length; no tail is 0


class Fields(NamedTuple):
    """The features of each line, one after another, ``(rows * features,)``.

    Attributes:
        head: their first eight bytes.
        tail: the bytes after them, the feature and the length: where both words are equal and one field is good, the
            other is the same field.
    """

    text: bytes
    start: Array
    length: Array
    head: Array
    tail: Array

    def some(self, places: Array) -> list[str]:
        """Those at some places."""
        ends = self.start[places] + self.length[places]
        between = zip(self.start[places].tolist(), ends.tolist(), strict=True)
        return [self.text[start:end].decode("latin-1") for start, end in between]


def fields_of(lines: Sequence[bytes], labelled: bool) -> Fields | None:
    """Of lines that have as many fields as are needed, none of them too long, and a label if they should.

    ``None`` if a line is bad by that; nothing else is asked of the fields.
    """
    needed = FIELDS if labelled else FIELDS - 1
    text = b"\n".join(lines)
    if b"\r" in text:
        text = b"\n".join(line.rstrip(b"\r") for line in lines)
    text += b"\n" + _PADDING
    signs = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(signs[: -len(_PADDING)] <= _NEWLINE)  # in a good line no other signs are below
    if len(ends) != needed * len(lines):
        return None
    by_row = ends.reshape(-1, needed)
    found = signs[by_row]
    if (found[:, :-1] != _TAB).any() or (found[:, -1] != _NEWLINE).any():
        return None
    lengths = (np.diff(ends, prepend=-1) - 1).reshape(-1, needed)
    if labelled and ((lengths[:, 0] != 1).any() or (signs[by_row[:, 0] - 1] | 1 != _ONE).any()):
        return None
    length = lengths[:, -len(FEATURES) :].ravel()
    if length.max(initial=0) > _LONGEST:
        return None
    start = by_row[:, -len(FEATURES) :].ravel() - length
    return Fields(text, start, length, *_words(text, start, length))


def _words(text: bytes, start: Array, length: Array) -> tuple[Array, Array]:
    """Heads and tails of fields."""
    at = np.ndarray(len(text) - _WORD.itemsize + 1, _WORD, text, strides=(1,))  # the word that begins at each byte
    head = at.take(start)
    head &= _HEAD.take(length)
    tail = at.take(start + _WORD.itemsize)
    tail <<= _WORD.type(32)
    tail &= _TAIL.take(length)
    tail |= length.astype(_WORD)
    by_row = tail.reshape(-1, len(FEATURES))
    by_row |= _FEATURE
    return head, tail
