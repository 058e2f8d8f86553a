"""What a batch of indices asks for: its unique rows, their unique prefixes, and which of these share a slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bucket:
    """Slices of a core that about as many prefixes take, padded to one number of them.

    Attributes:
        at: where their left products are among those of the level, a slice of the core after the other.

    Shape:
        - digit: ``(g,)``, which slices
        - source: ``(g * height,)``, where the left products are that they extend; padding extends what comes before it
    """

    at: slice
    digit: Tensor
    source: Tensor


@dataclass(frozen=True)
class Level:
    """The prefixes that end at one core, by the slice that they take.

    Attributes:
        size: their left products, padding included.

    Shape:
        - place: ``(n,)``, where the left product of each prefix is
    """

    size: int
    place: Tensor
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Prefixes:
    """Unique rows of a batch and their unique prefixes, in ascending order at each level.

    Shape:
        - rows: ``(u,)``, the unique row numbers
        - digits, parents: a tensor ``(n_k,)`` a level, which slice a prefix takes and which prefix it extends
        - inverse: ``(n,)``, which unique row an index is
    """

    rows: Tensor
    digits: tuple[Tensor, ...]
    parents: tuple[Tensor, ...]
    inverse: Tensor

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of unique prefixes at each level."""
        return tuple(digit.shape[0] for digit in self.digits)

    def levels(self) -> tuple[Level, ...]:
        """All levels after the first, whose left products are slices of the first core in the order of the prefixes."""
        levels: list[Level] = []
        for digit, parent in zip(self.digits[1:], self.parents[1:], strict=True):
            source = levels[-1].place.index_select(0, parent) if levels else parent
            levels.append(_level(digit, source))
        return tuple(levels)


def _level(digit: Tensor, source: Tensor) -> Level:  # (n,) twice
    """Prefixes by slice, slices by how many of them there are: up to 1, 2, 4, 8, ... in a bucket.

    Padding at most doubles the prefixes. The host waits once, to learn how many there are of each slice.
    """
    order = torch.argsort(digit, stable=True)
    digits, counts = torch.unique_consecutive(digit.index_select(0, order), return_counts=True)
    ends, place, start = counts.cumsum(0), torch.empty_like(order), 0
    sizes = counts.to("cpu", torch.float64).log2_().ceil_()
    buckets = []
    for size in sizes.unique().tolist():
        picked = (sizes == size).nonzero()[:, 0].to(order.device)
        last, count = ends.index_select(0, picked) - 1, counts.index_select(0, picked)
        height = int(count.max())
        step = torch.arange(height, device=order.device)
        prefix = order[torch.minimum(last[:, None], (last - count + 1)[:, None] + step)].reshape(-1)
        stop = start + prefix.shape[0]
        # From the end, so that of a prefix that padding repeats the first place is kept.
        place[prefix.flip(0)] = torch.arange(start, stop, device=order.device).flip(0)
        buckets.append(Bucket(slice(start, stop), digits.index_select(0, picked), source.index_select(0, prefix)))
        start = stop
    return Level(start, place, tuple(buckets))


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
