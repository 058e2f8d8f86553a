"""Batches of rows, and the two kinds of sources they come from: epochs over a set, and windows along a stream.

A source tells after which steps of a run validations are due (``ends``), and gives the batches from any step on, in an
order that depends on the seed alone. One whose place is more than the number of steps may have ``state_dict`` and
``load_state_dict`` as well: what they tell is kept in checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from experiments.lab.errors import ExperimentError


@dataclass(frozen=True)
class Batch:
    """Tensors whose first dimension is that of the batch. Its weight is 1, or 0 where it only stands in."""

    tensors: Mapping[str, Tensor]  # (rows, ...)
    weight: float = 1.0

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def rows(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def numbers(self) -> int:
        """Of the first tensor: tokens, mostly."""
        return next(iter(self.tensors.values())).numel()

    def take(self, rows: Tensor | slice) -> Batch:
        return Batch({name: tensor[rows] for name, tensor in self.tensors.items()}, self.weight)

    def part(self, index: int, parts: int) -> Batch:
        """Every ``parts``-th row from ``index`` on; where there is none left, the first one stands in."""
        if index < self.rows:
            return self.take(slice(index, None, parts))
        return Batch(self.take(slice(1)).tensors, 0.0)  # every process takes part in every step

    def to(self, device: torch.device) -> Batch:
        return Batch({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.weight)


class Source(Protocol):
    """Where the batches of a run come from."""

    @property
    def ends(self) -> Sequence[int]:
        """Steps, counted from the beginning, after which to validate; the last one is the end."""

    def batches(self, start: int) -> Iterator[Batch]:
        """Those of the steps from ``start`` on, to the end."""


def by_length(texts: Sequence[Sequence[int]], labels: Sequence[int]) -> tuple[Batch, ...]:
    """Labelled texts in groups of exactly equal length, shortest first: nothing is padded, nothing is packed."""
    members = defaultdict(list)
    for number, text in enumerate(texts):
        members[len(text)].append(number)
    return tuple(
        Batch({"tokens": torch.tensor([list(texts[k]) for k in of]), "labels": torch.tensor([labels[k] for k in of])})
        for _, of in sorted(members.items())
    )


class Epochs:
    """Groups of rows, of which each is shuffled and cut into batches; the batches are shuffled.

    The last batch of a group may be smaller. Without a seed all stays in the order it lies in. Validations are due so
    many times an epoch.
    """

    def __init__(
        self, groups: Sequence[Batch], size: int, seed: int | None = None, epochs: int = 1, validations: int = 1
    ) -> None:
        self.groups, self.size, self.seed, self.epochs = tuple(groups), size, seed, epochs
        self.ends = evenly(epochs * len(self), epochs * validations)

    def __len__(self) -> int:
        return sum(-(-group.rows // self.size) for group in self.groups)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        for epoch in range(start // len(self), self.epochs):
            yield from self.epoch(epoch, max(0, start - epoch * len(self)))

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        plan = []
        draw = epoch_generator(self.seed or 0, epoch)
        for group in self.groups:
            order = torch.arange(group.rows)
            if self.seed is not None:
                order = order[torch.randperm(len(order), generator=draw)]
            plan += [(group, rows) for rows in order.split(self.size)]
        turns = range(len(plan)) if self.seed is None else torch.randperm(len(plan), generator=draw).tolist()
        for turn in list(turns)[start:]:
            group, rows = plan[turn]
            yield group.take(rows)


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers of one epoch alone, so that a run can go on from any of them."""
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)


class Windows:
    """Lanes of a stream side by side, window after window, from the start again when the lanes end."""

    def __init__(self, lanes: Tensor, window: int, ends: Sequence[int]) -> None:  # (lanes, length)
        self.lanes, self.ends = lanes, tuple(ends)
        self.window = min(window, lanes.shape[1] - 1)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Words and the words that follow them."""
        fitting = (self.lanes.shape[1] - 1) // self.window
        for step in range(start, self.ends[-1]):
            at = step % fitting * self.window
            yield Batch(
                {
                    "words": self.lanes[:, at : at + self.window],
                    "following": self.lanes[:, at + 1 : at + self.window + 1],
                }
            )


def lanes_of(stream: Tensor, count: int, use: str) -> Tensor:  # (tokens,) -> (count, tokens // count)
    """Parts of equal length, which are read side by side."""
    length = len(stream) // count
    if length < 2:
        raise ExperimentError(
            f"the corpus has {len(stream)} tokens for {use}, too few to read in {count} places at once: "
            "give a larger one" + (f" or a --batch of at most {len(stream) // 2}." if use == "training" else ".")
        )
    return stream[: length * count].view(count, length)


def evenly(steps: int, validations: int) -> tuple[int, ...]:
    """So many validations spread over the steps, the last one at the end."""
    return tuple(sorted({round(steps * k / validations) for k in range(1, validations + 1)} - {0}))
