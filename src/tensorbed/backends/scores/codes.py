"""Scores straight from codes: the compiled kernels make rows in a cache and multiply them there."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends import native
from tensorbed.backends.coded import by_kernel
from tensorbed.backends.scores.scoring import Block, Cost, Scorable, Scores, Scoring, Vectors

_ROWS = 2**20  # numbers of rows made at once where there are no kernels for them
_MAKE = 3  # multiply-adds that making a number from its code is worth, where it stays in a cache


def scorings(structure: Scorable) -> list[Scoring]:
    """The way by codes, where there are kernels. It has no gradients."""
    if not native.available:
        return []
    numbers = structure.rows * structure.cols
    cost = Cost(multiply_adds=numbers, making=_MAKE * numbers)
    return [Scoring("codes", cost, partial(CodedScores, structure), trains=False)]


class CodedScores(Scores):
    """``structure.coded_block`` times ``structure.turned``; without gradients."""

    structure: Any  # one with ``coded_block``

    def turned(self, x: Tensor) -> Tensor:  # (n, cols) -> (cols, n)
        return super().turned(x).contiguous()

    def block(self, start: int, stop: int) -> Block:
        return _CodedBlock(self, start, stop)


class _CodedBlock(Block):
    def __init__(self, owner: CodedScores, start: int, stop: int) -> None:
        self.owner, self.at = owner, (start, stop)

    def scores(self, vectors: Vectors, out: Tensor) -> None:
        structure, tensors = self.owner.structure, self.owner.tensors
        if by_kernel("scores", structure.coded_block(tensors, *self.at), vectors.data, out):
            return
        # Some rows at a time: this block is as high as one of which none is made.
        start, stop = self.at
        height = max(1, _ROWS // structure.cols)
        for a in range(start, stop, height):
            b = min(a + height, stop)
            rows = structure.block(tensors, a, b, "auto").to(out.dtype)
            torch.mm(rows, vectors.data, out=out[a - start : b - start])

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        raise NotImplementedError("a way without gradients is taken for scores alone.")
