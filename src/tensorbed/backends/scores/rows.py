"""Scores by rows that are made, multiplied and dropped, block by block: what any structure can do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.scores.scoring import Block, Params, Scorable, Scores, Vectors
from tensorbed.dispatch import recording

_BLOCK = 2**22  # numbers of the table made at once


class RowScores(Scores):
    """``structure.block`` times ``structure.turned``."""

    any_layout = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._written: set[int] = set()

    def block(self, start: int, stop: int) -> Block:
        return _RowBlock(self, start, stop)

    def add_to_rows(self, name: str, start: int, stop: int, grad: Tensor, x: Tensor) -> None:  # (rows, n), (n, k)
        """``+= grad @ x`` for the gradient of some rows of a tensor, which are not written before the first time."""
        if name not in self._grads:
            self._grads[name] = torch.empty_like(self.tensors[name], dtype=self.dtype, requires_grad=False)
        total = self._grads[name][start:stop]
        if start in self._written:
            total.addmm_(grad, x)
        else:
            torch.mm(grad, x, out=total)
            self._written.add(start)


class _RowBlock(Block):
    def __init__(self, owner: RowScores, start: int, stop: int) -> None:
        self.owner, self.at, of_rows = owner, (start, stop), owner.structure.row_tensor
        self.made_of = [name for name in owner.trained if name != of_rows]
        self.slice_of = of_rows if of_rows in owner.trained else None
        with recording(bool(self.made_of)):
            self.rows = owner.structure.block(owner.tensors, start, stop, "auto").to(owner.dtype)
        self.grad: Tensor | None = None

    def scores(self, vectors: Vectors, out: Tensor) -> None:
        torch.mm(self.rows.detach(), vectors.data, out=out)

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        x = vectors.data.T
        if vectors.grad is not None:
            vectors.grad.addmm_(self.rows.detach().T, grad)
        if self.slice_of is not None:
            self.owner.add_to_rows(self.slice_of, *self.at, grad, x)
        elif self.rows.requires_grad:
            self.grad = grad @ x if self.grad is None else self.grad.addmm_(grad, x)

    def close(self) -> None:
        if self.grad is not None:
            leaves = [self.owner.tensors[name] for name in self.made_of]
            self.owner.add(self.made_of, torch.autograd.grad(self.rows, leaves, self.grad, allow_unused=True))
            self.grad = None


def scores_of_rows(
    structure: Scorable, p: Params, x: Tensor, start: int, stop: int, impl: str
) -> Tensor:  # (*, cols) -> (*, stop - start)
    """``x @ table[start:stop].T`` in plain differentiable PyTorch, a block of rows at a time."""
    height = max(1, _BLOCK // structure.cols)
    ends = [(a, min(a + height, stop)) for a in range(start, stop, height)] or [(start, stop)]
    turned = structure.turned(p, x)
    blocks = [turned @ structure.block(p, a, b, impl).to(x.dtype).T for a, b in ends]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
