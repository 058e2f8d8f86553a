"""What a batch of indices asks for: its unique rows, their unique prefixes, and the order to compute them in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Level:
    """The prefixes that end at one core: which slice each takes, and whose left product it extends.

    Shape:
        - digit: ``(n,)``, which slice of the core
        - parent: ``(n,)``, position among the left products of the level before; empty at the first level
        - ends: ``(I_k,)`` int32, where each digit's run ends when sorted by digit; ``None`` when not sorted
    """

    digit: Tensor
    parent: Tensor
    ends: Tensor | None

    def parts(self, height: int) -> Iterator[tuple[slice, Level]]:
        """Runs of at most ``height`` prefixes, so that what is gathered for a product stays small."""
        n = self.digit.shape[0]
        for start in range(0, n, height):
            part = slice(start, min(start + height, n))
            ends = None if self.ends is None else (self.ends - start).clamp(0, part.stop - start)
            yield part, Level(self.digit[part], self.parent[part], ends)


@dataclass(frozen=True)
class Plan:
    """Levels from the first core to the last, and where each index finds its row among the last level's.

    Shape:
        - position: ``(n,)``
    """

    levels: tuple[Level, ...]
    position: Tensor

    @property
    def unique_rows(self) -> int:
        return self.levels[-1].digit.shape[0]


@dataclass(frozen=True)
class Prefixes:
    """Unique prefixes of a batch in ascending order, before any order of computing is chosen.

    Shape:
        - rows: ``(u,)``, the unique row numbers
        - digits, parents: a tensor ``(n_k,)`` a level
        - inverse: ``(n,)``, which unique row an index is
    """

    rows: Tensor
    digits: tuple[Tensor, ...]
    parents: tuple[Tensor, ...]
    inverse: Tensor

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of unique prefixes at each level."""
        return tuple(d.shape[0] for d in self.digits)


def find_prefixes(index: Tensor, row_factors: Sequence[int]) -> Prefixes:
    """Unique rows, then the unique prefixes of the unique prefixes, down to the first digit."""
    rows, inverse = torch.unique(index, sorted=True, return_inverse=True)
    values = rows
    digits: list[Tensor] = []
    parents: list[Tensor] = []
    for factor in reversed(row_factors[1:]):
        above = values // factor
        digits.append(values - above * factor)
        # Sorted rows have sorted prefixes: equal ones stand side by side and need no second sort.
        values, parent = torch.unique_consecutive(above, return_inverse=True)
        parents.append(parent)
    digits.append(values)
    parents.append(values.new_empty(0))
    return Prefixes(rows, tuple(reversed(digits)), tuple(reversed(parents)), inverse)


def make_plan(prefixes: Prefixes, row_factors: Sequence[int], *, by_digit: bool) -> Plan:
    """Fix the order of computing: by digit, so that a core slice meets all its prefixes at once, or as they are."""
    first = Level(prefixes.digits[0], prefixes.parents[0], None)
    if not by_digit:
        rest = [Level(d, p, None) for d, p in zip(prefixes.digits[1:], prefixes.parents[1:], strict=True)]
        return Plan((first, *rest), prefixes.inverse)
    levels = [first]
    position: Tensor | None = None  # where the previous level put each of its prefixes
    for factor, digit, parent in zip(row_factors[1:], prefixes.digits[1:], prefixes.parents[1:], strict=True):
        ordered, order = torch.sort(digit, stable=True)
        parent = parent.index_select(0, order)
        if position is not None:
            parent = position.index_select(0, parent)
        every = torch.arange(factor, device=digit.device)
        ends = torch.searchsorted(ordered, every, right=True, out_int32=True)
        levels.append(Level(ordered, parent, ends))
        position = torch.empty_like(order)
        position[order] = torch.arange(order.shape[0], device=order.device)
    assert position is not None
    return Plan(tuple(levels), position.index_select(0, prefixes.inverse))
