"""Numbers of fields seen lately, kept at hand: sought and kept for many fields at once."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_BITS = 19
_SLOTS = 1 << _BITS
_ODD = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's digits, as in Fibonacci hashing


class AtHand:
    """A hash table from the two words of a field to its number, with open addresses and linear probing.

    A dictionary would ask for an object of every field, which takes ten times as long as to find it.
    """

    def __init__(self) -> None:
        self.head, self.tail = np.zeros((2, _SLOTS), np.uint64)  # the tail of an empty slot is 0, that of a field not
        self.numbers = np.zeros(_SLOTS, np.int64)
        self.kept = 0

    def find(self, head: Array, tail: Array) -> tuple[Array, Array]:  # (n,) -> (n,), (missing,)
        """The numbers of fields, and the places of those that are not here, whose numbers mean nothing."""
        slots = self._slots(head, tail)
        return self.numbers.take(slots), np.flatnonzero(self.tail.take(slots) == 0)

    def keep(self, head: Array, tail: Array, numbers: Array) -> None:  # (n,)
        """Fields that are not here; one that is given twice takes the room of two.

        At most half of the slots are taken, so that searches are short: where there is no room those kept before go,
        and more than there is room for are not kept.
        """
        if self.kept + len(numbers) > _SLOTS // 2:
            self.clear()
        if len(numbers) > _SLOTS // 2:
            return
        self.kept += len(numbers)
        while len(numbers):
            slots = self._slots(head, tail)
            self.head[slots], self.numbers[slots], self.tail[slots] = head, numbers, tail
            lost = self._has_other(slots, head, tail)  # of several fields that were given one slot the last one has it
            head, tail, numbers = head[lost], tail[lost], numbers[lost]

    def clear(self) -> None:
        self.tail[:] = 0
        self.kept = 0

    def _slots(self, head: Array, tail: Array) -> Array:
        """Where each field is, or else the empty slot where it would be."""
        mixed = tail * _ODD
        mixed ^= head
        mixed *= _ODD
        mixed >>= np.uint64(64 - _BITS)
        slots: Array = mixed.view(np.int64)
        going = np.flatnonzero(self._has_other(slots, head, tail))
        while len(going):
            slots[going] = (slots[going] + 1) % _SLOTS
            going = going[self._has_other(slots[going], head[going], tail[going])]
        return slots

    def _has_other(self, slots: Array, head: Array, tail: Array) -> Array:
        """Whether a slot has another field."""
        there = self.tail.take(slots)
        other: Array = there != tail
        other |= self.head.take(slots) != head
        other &= there != 0
        return other
