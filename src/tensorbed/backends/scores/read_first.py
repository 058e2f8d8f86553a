"""Scores of a table whose tensors are read from others: once for a call, then scored in a way of the table's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorbed.backends.scores.scoring import Cost, Scorable, Scores, Scoring
from tensorbed.dispatch import recording

_READ = 3  # multiply-adds that reading a number is worth


class Reads(Scorable, Protocol):
    """What is asked of the structure that has the tensors."""

    def read(self, p: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]: ...


def scorings(structure: Reads, ways: Sequence[Scoring], numbers: int) -> list[Scoring]:
    """The ways of the table that is read, whose tensors have so many numbers to read."""
    cost = Cost(multiply_adds=0, merging=_READ * numbers, merged=numbers)
    return [replace(way, cost=way.cost + cost, open=partial(ReadScores, way, structure)) for way in ways]


class ReadScores(Scores):
    """The scores of the table that was read; its gradients go back through the reading at the end."""

    structure: Any  # one with ``read``

    def __init__(self, way: Scoring, *given: Any) -> None:
        super().__init__(*given)
        with recording(bool(self.trained)):
            self.graph = list(self.structure.read(self.tensors, self.sum_dtype).values())
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.graph]
        self.own = way.open(leaves, self.dtype, self.keeps, self.impl)
        self.order, self.any_layout = self.own.order, self.own.any_layout

    def vectors(self, x: Tensor, *, grad: bool) -> Any:  # (n, cols)
        return self.own.vectors(x, grad=grad)

    def blocks(self, height: int) -> list[tuple[int, int]]:
        return self.own.blocks(height)

    def open(self, start: int, stop: int) -> None:
        super().open(start, stop)
        self.own.open(start, stop)

    def write(self, vectors: Any, out: Tensor) -> None:
        self.own.write(vectors, out)

    def backward(self, vectors: Any, grad: Tensor) -> None:
        self.own.backward(vectors, grad)

    def close(self) -> None:
        self.own.close()

    def finish(self, vectors: Any) -> Tensor | None:
        return self.own.finish(vectors)

    def gradients(self) -> list[Tensor | None]:
        pairs = [(read, grad) for read, grad in zip(self.graph, self.own.gradients(), strict=True) if grad is not None]
        if pairs:
            leaves = [self.tensors[name] for name in self.trained]
            made = torch.autograd.grad([read for read, _ in pairs], leaves, [grad for _, grad in pairs])
            self.add(self.trained, made)
        return super().gradients()
