"""Batches of texts of exactly equal length: nothing is padded, nothing is packed.

Texts are grouped by their number of tokens, each group is shuffled and cut into batches, and the batches are shuffled.
The last batch of a length may be smaller; a loss is the sum over its texts divided by the full batch size, so that
every text has the same weight in an epoch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """All texts of one length."""

    tokens: Tensor  # (texts, length)
    labels: Tensor  # (texts,)


@dataclass(frozen=True)
class Batch:
    """Some texts of one length."""

    tokens: Tensor  # (texts, length)
    labels: Tensor  # (texts,)

    def part(self, index: int, parts: int) -> tuple[Batch, Tensor]:
        """Every ``parts``-th text from ``index`` on, and weights: 1, or 0 for a stand-in where there is none left."""
        rows = torch.arange(index, len(self.labels), parts)
        weight = torch.ones(max(len(rows), 1))
        if not len(rows):  # every process has to take part in every step
            rows, weight = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        return Batch(self.tokens[rows], self.labels[rows]), weight


def by_length(texts: Sequence[Sequence[int]], labels: Sequence[int]) -> tuple[Group, ...]:
    """Groups of equal length, shortest first."""
    members = defaultdict(list)
    for number, text in enumerate(texts):
        members[len(text)].append(number)
    return tuple(
        Group(
            torch.tensor([list(texts[k]) for k in members[length]]), torch.tensor([labels[k] for k in members[length]])
        )
        for length in sorted(members)
    )


class EqualLengthBatches:
    """The batches of a set of texts in an order that depends on the seed and the epoch alone."""

    def __init__(self, groups: Sequence[Group], size: int, seed: int | None = None) -> None:
        self.groups, self.size, self.seed = tuple(groups), size, seed
        self.texts = sum(len(group.labels) for group in self.groups)
        self.tokens = sum(group.tokens.numel() for group in self.groups)

    def __len__(self) -> int:
        return sum(-(-len(group.labels) // self.size) for group in self.groups)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number ``start`` on; without a seed in the order they lie in."""
        plan = []
        draw = torch.Generator().manual_seed(0 if self.seed is None else 1_000_003 * self.seed + epoch)
        for group in self.groups:
            order = torch.arange(len(group.labels))
            if self.seed is not None:
                order = order[torch.randperm(len(order), generator=draw)]
            plan += [(group, rows) for rows in order.split(self.size)]
        turns = range(len(plan)) if self.seed is None else torch.randperm(len(plan), generator=draw).tolist()
        for turn in list(turns)[start:]:
            group, rows = plan[turn]
            yield Batch(group.tokens[rows], group.labels[rows])
