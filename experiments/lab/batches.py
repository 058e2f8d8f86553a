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
class Batch:
    """Some texts of one length, or all of them. A weight is 1, or 0 for a text that only stands in."""

    tokens: Tensor  # (texts, length)
    labels: Tensor  # (texts,)
    weights: Tensor  # (texts,)

    @classmethod
    def of(cls, tokens: Tensor, labels: Tensor) -> Batch:
        """Texts that all count."""
        return cls(tokens, labels, torch.ones(len(labels)))

    def rows(self, rows: Tensor) -> Batch:
        """Some of the texts."""
        return Batch(self.tokens[rows], self.labels[rows], self.weights[rows])

    def part(self, index: int, parts: int) -> Batch:
        """Every ``parts``-th text from ``index`` on; where there is none left, the first one stands in."""
        if index < len(self.labels):
            return Batch(self.tokens[index::parts], self.labels[index::parts], self.weights[index::parts])
        return Batch(self.tokens[:1], self.labels[:1], torch.zeros(1))  # every process takes part in every step


def by_length(texts: Sequence[Sequence[int]], labels: Sequence[int]) -> tuple[Batch, ...]:
    """Groups of equal length, shortest first."""
    members = defaultdict(list)
    for number, text in enumerate(texts):
        members[len(text)].append(number)
    return tuple(
        Batch.of(
            torch.tensor([list(texts[k]) for k in members[length]]), torch.tensor([labels[k] for k in members[length]])
        )
        for length in sorted(members)
    )


class EqualLengthBatches:
    """The batches of a set of texts in an order that depends on the seed and the epoch alone."""

    def __init__(self, groups: Sequence[Batch], size: int, seed: int | None = None) -> None:
        self.groups, self.size, self.seed = tuple(groups), size, seed
        self.texts = sum(len(group.labels) for group in self.groups)

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
            yield group.rows(rows)
