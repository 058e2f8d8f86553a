"""Scores of vectors over a vocabulary, tile by tile: the structure's, a bias, a constant padding row, a soft cap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.triton import serving
from tensorbed.dispatch import working_dtype
from tensorbed.structures import Structure
from tensorbed.vocabulary.tiling import Task, choose


@dataclass(frozen=True)
class Vocabulary:
    """What scores are made from.

    Shape:
        - tensors: the structure's, in its order
        - bias: ``(rows,)`` or ``None``
        - padding_row: ``(cols,)``, constant, in place of row ``padding_idx``; ``None`` where there is none

    ``impl`` is the backend asked for.
    """

    structure: Structure
    tensors: tuple[Tensor, ...]
    bias: Tensor | None = None
    padding_idx: int | None = None
    padding_row: Tensor | None = None
    impl: str = "auto"

    @property
    def floats(self) -> tuple[Tensor, ...]:
        """All that is multiplied with or added to the vectors."""
        return (*self.tensors, *(() if self.bias is None else (self.bias,)))

    @property
    def trains(self) -> bool:
        """Whether anything in it asks for a gradient."""
        return any(t.requires_grad for t in self.floats)

    def dtype(self, x: Tensor) -> torch.dtype:
        """What scores of these vectors are computed in: sums of half precision numbers are single."""
        return working_dtype(x, *self.tensors)

    def product_dtype(self, x: Tensor) -> torch.dtype:
        """What vectors are multiplied in: bfloat16 where autocast has made them that, as ``F.linear`` does."""
        is_single = self.dtype(x) == torch.float32 and any(t.dtype == torch.float32 for t in self.tensors)
        return x.dtype if is_single and x.dtype == torch.bfloat16 else self.dtype(x)

    def detached(self) -> Vocabulary:
        """The same, asking for no gradient."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, tensors=tuple(t.detach() for t in self.tensors), bias=bias)


@dataclass(frozen=True)
class Group:
    """Some vectors, and as the way to score takes them."""

    at: slice
    x: Tensor
    vectors: Any
    count: int


class Scorer:
    """The scores of one call by the cheapest way for a :class:`Task`; gradients are off, those asked for add up here.

    Rows are scored in an order of the structure's choice: each row of the table has a ``position`` in it.
    """

    def __init__(
        self, vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, softcap: float | None = None, **asked: bool
    ) -> None:
        self.softcap, dtype = softcap, vocabulary.dtype(x)
        asked["on_device"] = dtype == torch.float32 and serving.serves(vocabulary.impl, x)
        task = Task.of(vocabulary.structure, x.shape[0], dtype.itemsize, memory_budget, **asked)
        self.tiling = tiling = choose(task)
        self.x = x.detach().to(dtype)  # (n, cols)
        self.x_grad = torch.zeros_like(self.x) if x.requires_grad else None
        product_dtype = vocabulary.product_dtype(x) if tiling.scoring.halves else dtype
        self.scores = tiling.scoring.open(vocabulary.tensors, product_dtype, tiling.keeps, vocabulary.impl)
        self.blocks = self.scores.blocks(tiling.height)
        self._positions: Tensor | None = None
        bias, padding = vocabulary.bias, vocabulary.padding_row
        self.bias = None if bias is None else self.in_order(bias.detach().to(dtype))
        learns = bias is not None and bias.requires_grad
        self._bias_grad = torch.zeros_like(self.bias) if learns and self.bias is not None else None
        self.padding: Tensor | None = None
        self.padding_at = -1
        if padding is not None and vocabulary.padding_idx is not None:
            self.padding = padding.detach().to(dtype=dtype, device=x.device)
            self.padding_at = vocabulary.padding_idx
            if self.scores.order is not None:
                self.padding_at = int(self.position(torch.tensor(vocabulary.padding_idx, device=x.device)))

    def in_order(self, by_row: Tensor) -> Tensor:  # (rows,) -> (rows,)
        """Numbers of the table's rows, in the order in which those are scored."""
        return by_row if self.scores.order is None else by_row.index_select(0, self.scores.order)

    def row(self, position: Tensor) -> Tensor:
        """Which row of the table is scored at this position."""
        return position if self.scores.order is None else self.scores.order[position]

    def position(self, row: Tensor) -> Tensor:
        """The inverse."""
        if self.scores.order is None:
            return row
        if self._positions is None:
            every = torch.arange(self.scores.rows, device=row.device)
            self._positions = torch.empty_like(every).index_copy_(0, self.scores.order, every)
        return self._positions[row]

    def groups(self) -> Iterator[Group]:
        """The vectors in groups, the first one the largest."""
        for at in self.tiling.groups():
            x = self.x[at]
            yield Group(at, x, self.scores.vectors(x, grad=self.x_grad is not None), x.shape[0])

    def each_block(self) -> Iterator[tuple[int, int]]:
        """The blocks in their order, each open until the next is asked for."""
        for start, stop in self.blocks:
            self.scores.open(start, stop)
            yield start, stop
            self.scores.close()

    def tiles(self, group: Group, buffer: Tensor, *, by_vector: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Where each block begins and its scores ``(rows, n)``, in the buffer in place of those before.

        ``by_vector`` asks for those of one vector side by side in memory, where that is as good for the structure.
        """
        for start, _ in self.each_block():
            tile = self.tile(group, buffer, sideways=by_vector and self.scores.any_layout)
            self.write(group, tile)
            yield start, tile

    def tile(self, group: Group, buffer: Tensor, *, sideways: bool = False) -> Tensor:  # -> (rows, n)
        """Room in a buffer for the scores of the open block."""
        rows = self.scores.stop - self.scores.start
        room = buffer[: rows * group.count]
        return room.view(group.count, rows).T if sideways else room.view(rows, group.count)

    def buffer(self) -> Tensor:
        """Room for the largest tile."""
        return self.room(max((stop - start for start, stop in self.blocks), default=0))

    def room(self, rows: int) -> Tensor:
        """Room for the scores of so many rows and the largest group."""
        return self.x.new_empty(rows * self.tiling.group, dtype=self.scores.dtype)

    def write(self, group: Group, tile: Tensor) -> None:
        """Scores of the open block, before the soft cap: ``tile`` is ``(rows of the block, n)``."""
        self.scores.write(group.vectors, tile)
        if self.padding is not None and self._has_padding:
            tile[self.padding_at - self.scores.start] = group.x @ self.padding
        if self.bias is not None:
            tile += self.bias[self.scores.start : self.scores.stop, None].to(tile.dtype)

    def cap_(self, tile: Tensor) -> Tensor:
        """Scores with the soft cap, in place."""
        return tile if self.softcap is None else tile.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope(self, tile: Tensor) -> Tensor | None:  # (rows, n)
        """``d capped / d score`` from scores before the cap: near it, those after have lost the digits that count."""
        return None if self.softcap is None else (tile / self.softcap).cosh_().pow_(-2)

    def backward(self, group: Group, grad: Tensor) -> None:
        """Add what the gradient of the open block's scores, before the soft cap, gives; ``grad`` is used up."""
        start = self.scores.start
        if self._bias_grad is not None:
            self._bias_grad[start : self.scores.stop] += grad.sum(1, dtype=self.x.dtype)
        if self.padding is not None and self._has_padding:
            if self.x_grad is not None:
                self.x_grad[group.at].addr_(grad[self.padding_at - start].to(self.x.dtype), self.padding)
            grad[self.padding_at - start] = 0
        self.scores.backward(group.vectors, grad)

    def finish(self, group: Group) -> None:
        """All blocks have had these vectors' gradients."""
        grad = self.scores.finish(group.vectors)
        if self.x_grad is not None and grad is not None:
            self.x_grad[group.at] += grad

    @property
    def _has_padding(self) -> bool:
        return self.scores.start <= self.padding_at < self.scores.stop

    def gradients(self) -> list[Tensor | None]:
        """Of the vectors, the bias and the tensors; ``None`` where none was asked for."""
        bias_grad = self._bias_grad
        if bias_grad is not None and self.scores.order is not None:
            bias_grad = torch.empty_like(bias_grad).index_copy_(0, self.scores.order, bias_grad)
        return [self.x_grad, bias_grad, *self.scores.gradients()]
