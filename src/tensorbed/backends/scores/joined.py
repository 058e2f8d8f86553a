"""Scores of a table whose rows are those of several others, each scored its own way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorbed.backends.scores.scoring import Block, Scores


class JoinedScores(Scores):
    """All rows of the first table, then all of the second, and so on.

    Args:
        tables: the scores of each.
        order: ``(rows,)``, which row each of those is here.
        constants: how many tensors come before those of the tables; they have no gradients.
    """

    def __init__(self, tables: Sequence[Scores], order: Tensor, constants: int) -> None:
        self.tables, self.order, self.constants = tables, order, constants
        self.any_layout = all(table.any_layout for table in tables)
        self.firsts = [sum(table.rows for table in tables[:k]) for k in range(len(tables))]

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    def vectors(self, x: Tensor, *, grad: bool) -> list[object]:
        return [table.vectors(x, grad=grad) for table in self.tables]

    def finish(self, vectors: list[object]) -> Tensor | None:
        grads = [table.finish(own) for table, own in zip(self.tables, vectors, strict=True)]
        asked_for = [grad for grad in grads if grad is not None]
        return torch.stack(asked_for).sum(0) if asked_for else None

    def blocks(self, height: int) -> list[tuple[int, int]]:
        pairs = zip(self.firsts, self.tables, strict=True)
        return [(first + a, first + b) for first, table in pairs for a, b in table.blocks(height)]

    def block(self, start: int, stop: int) -> Block:
        k = max(k for k, first in enumerate(self.firsts) if first <= start)
        return _BlockOf(k, self.tables[k].block(start - self.firsts[k], stop - self.firsts[k]))

    def gradients(self) -> list[Tensor | None]:
        return [None] * self.constants + [grad for table in self.tables for grad in table.gradients()]


class _BlockOf(Block):
    """A block of the k-th table."""

    def __init__(self, k: int, block: Block) -> None:
        self.k, self.block = k, block

    def scores(self, vectors: list[object], out: Tensor) -> None:
        self.block.scores(vectors[self.k], out)

    def backward(self, vectors: list[object], grad: Tensor) -> None:
        self.block.backward(vectors[self.k], grad)

    def close(self) -> None:
        self.block.close()
