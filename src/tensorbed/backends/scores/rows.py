"""Scores by rows that are made, multiplied and dropped, block by block: what any structure can do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.scores.scoring import Params, Scorable, Scores, Vectors
from tensorbed.dispatch import recording

_BLOCK = 2**22  # numbers of the table made at once


class RowScores(Scores):
    """``structure.block`` times ``structure.turned``."""

    any_layout = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        of_rows = self.structure.row_tensor
        self.slice_of = of_rows if of_rows in self.trained else None
        self.made_of = [name for name in self.trained if name != of_rows]
        self._written: set[int] = set()

    def open(self, start: int, stop: int) -> None:
        super().open(start, stop)
        with recording(bool(self.made_of)):
            self.block = self.structure.block(self.tensors, start, stop, "auto").to(self.dtype)
        self.block_grad: Tensor | None = None

    def write(self, vectors: Vectors, out: Tensor) -> None:
        torch.mm(self.block.detach(), vectors.data, out=out)

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        x = vectors.data.T
        if vectors.grad is not None:
            vectors.grad.addmm_(self.block.detach().T, grad)
        if self.slice_of is not None:
            self._add_to_slice(self.slice_of, grad, x)
        elif self.block.requires_grad:
            self.block_grad = grad @ x if self.block_grad is None else self.block_grad.addmm_(grad, x)

    def _add_to_slice(self, name: str, grad: Tensor, x: Tensor) -> None:  # (rows, n), (n, k)
        """``+= grad @ x`` for the gradient of the block's rows of a tensor, not written before the first time."""
        if name not in self._grads:
            self._grads[name] = torch.empty_like(self.tensors[name], dtype=self.dtype, requires_grad=False)
        total = self._grads[name][self.start : self.stop]
        if self.start in self._written:
            total.addmm_(grad, x)
        else:
            torch.mm(grad, x, out=total)
            self._written.add(self.start)

    def close(self) -> None:
        if self.block_grad is not None:
            leaves = [self.tensors[name] for name in self.made_of]
            self.add(self.made_of, torch.autograd.grad(self.block, leaves, self.block_grad, allow_unused=True))
        del self.block, self.block_grad


def scores_of_rows(
    structure: Scorable, p: Params, x: Tensor, start: int, stop: int, impl: str
) -> Tensor:  # (*, cols) -> (*, stop - start)
    """``x @ table[start:stop].T`` in plain differentiable PyTorch, a block of rows at a time."""
    height = max(1, _BLOCK // structure.cols)
    ends = [(a, min(a + height, stop)) for a in range(start, stop, height)] or [(start, stop)]
    turned = structure.turned(p, x)
    blocks = [turned @ structure.block(p, a, b, impl).to(x.dtype).T for a, b in ends]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
