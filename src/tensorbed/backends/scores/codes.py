"""Scores straight from codes: the compiled kernels make rows in a cache and multiply them there, or sum tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends import native, triton
from tensorbed.backends.coded import by_kernel
from tensorbed.backends.scores.gathered import GatheredScores
from tensorbed.backends.scores.scoring import Cost, Scorable, Scores, Scoring, Vectors

_ROWS = 2**20  # numbers of rows made at once where there are no kernels for them
_MAKE = 3  # multiply-adds that making a number from its code is worth, where it stays in a cache


def scorings(structure: Scorable) -> list[Scoring]:
    """The way by codes, where there are kernels. It has no gradients."""
    if not native.available and triton.absent():
        return []
    numbers = structure.rows * structure.cols
    cost = Cost(multiply_adds=numbers, making=_MAKE * numbers)
    return [Scoring("codes", cost, partial(CodedScores, structure), trains=False)]


class CodedScores(Scores):
    """``structure.coded_block`` times ``structure.turned``; without gradients."""

    structure: Any  # one with ``coded_block``

    def turned(self, x: Tensor) -> Tensor:  # (n, cols) -> (cols, n)
        return super().turned(x).contiguous()

    def write(self, vectors: Vectors, out: Tensor) -> None:
        block = self.structure.coded_block(self.tensors, self.start, self.stop)
        if by_kernel("scores", block, vectors.data, out, self.impl):
            return
        # Some rows at a time: this block is as high as one of which none is made.
        height = max(1, _ROWS // self.structure.cols)
        for a in range(self.start, self.stop, height):
            b = min(a + height, self.stop)
            rows = self.structure.block(self.tensors, a, b, "auto").to(out.dtype)
            torch.mm(rows, vectors.data, out=out[a - self.start : b - self.start])

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        raise NotImplementedError("a way without gradients is taken for scores alone.")


class LookupTables(GatheredScores):
    """Scores of rows that are sums of codebook entries: each codebook times the vectors once, then sums of the results.

    Vectors become tables ``(parts * words, n)`` of what every entry of every codebook scores.
    """

    def turned(self, x: Tensor) -> Tensor:  # (n, cols) -> (parts * words, n)
        books = self.tensors["codebooks"]
        turned = self.structure.turned(self.tensors, x).T.reshape(books.shape[0], -1, x.shape[0])
        return torch.bmm(books, turned).flatten(0, 1)

    def write(self, vectors: Vectors, out: Tensor) -> None:
        block = self.structure.coded_block(self.tensors, self.start, self.stop)
        if not by_kernel("sums", block, vectors.data, out, self.impl):
            super().write(vectors, out)
