"""Scores of every row of a table for many vectors, a block of rows at a time, with gradients.

Scores are kept transposed, ``(rows, n)`` for ``n`` vectors: the index law orders them, and a softmax over the rows is a
reduction over the slow axis, which every processor does many columns at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorbed.dispatch import recording

Tape = list[Tensor]


@dataclass(frozen=True)
class Way:
    """How scores are computed, and what that costs: what a choice is made from before anything is computed.

    Attributes:
        name: for people.
        multiply_adds: of one vector with every row.
        making: multiply-adds before the first vector: rows made from the cores, or cores merged.
        making_numbers: numbers made so, for all rows.
        by_block: whether they are made block by block, anew at each walk, instead of once.
        kept: numbers that one vector leaves for backward besides its scores, all rows counted.
        spared: multiply-adds of one vector that backward does again when those were not kept.
        step: blocks begin at multiples of it.
        open: the projection for tensors in the structure's order, and the dtype to compute in.
        trains: whether it has gradients; without, it is for scores alone.
    """

    name: str
    multiply_adds: int
    making: int
    making_numbers: int
    by_block: bool
    kept: int
    spared: int
    step: int
    open: Callable[[Sequence[Tensor], torch.dtype], Projection]
    trains: bool = True


@dataclass
class Vectors:
    """Vectors as a projection wants them, and the sum of their gradients, the same way; ``None`` where none is asked.

    Shape:
        - data, grad: ``(cols, n)``
    """

    data: Tensor
    grad: Tensor | None

    @property
    def count(self) -> int:
        return self.data.shape[1]


class Projection(ABC):
    """One table's scores by one :class:`Way`; gradients of its tensors add up here, those of vectors with them."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted  # whether gradients of the tensors are

    def vectors(self, x: Tensor, *, grad: bool) -> Vectors:  # (n, cols)
        """Vectors ready to be multiplied."""
        data = x.T.contiguous()
        return Vectors(data, torch.zeros_like(data) if grad else None)

    def done(self, vectors: Vectors) -> None:  # noqa: B027
        """Called when all parts have added the gradients of these vectors, before :meth:`gradient_of`."""

    def gradient_of(self, vectors: Vectors) -> Tensor:  # -> (n, cols)
        """What has been added up for these vectors."""
        assert vectors.grad is not None
        return vectors.grad.T

    @abstractmethod
    def part(self, start: int, stop: int) -> Part:
        """A block of rows, ready to be multiplied."""

    @abstractmethod
    def gradients(self) -> list[Tensor | None]:
        """Gradients of the tensors that ask for one, in their order, after the last part was closed."""


class Part(ABC):
    """A block of rows."""

    @abstractmethod
    def scores(self, vectors: Vectors, out: Tensor, tape: Tape) -> None:  # out: (rows of the part, n)
        """Write the scores, and what backward wants of them into the tape."""

    @abstractmethod
    def backward(self, vectors: Vectors, grad: Tensor, tape: Tape) -> None:  # grad: (rows of the part, n)
        """Add the gradients for those of the scores."""

    def tape(self, n: int, room: Tape | None = None) -> Tape:
        """Room for what ``n`` vectors leave, in that of a part and vectors no smaller if there is one."""
        return []

    def refill(self, vectors: Vectors, tape: Tape) -> None:  # noqa: B027
        """Write the tape again, without the scores."""

    def close(self) -> None:  # noqa: B027
        """Hand the part's own gradients on; it is not used afterwards."""


class RowBlocks(Projection):
    """Rows are made, multiplied and dropped: what any structure can do.

    Args:
        rows: ``(start, stop) -> (stop - start, cols)``.
        backward: takes ``(start, stop)``, the rows and their gradient, and adds to those of the tensors; ``None`` where
            none is asked for.
        gradients: those added up.
    """

    def __init__(
        self,
        rows: Callable[[int, int], Tensor],
        backward: Callable[[int, int, Tensor, Tensor], None] | None,
        gradients: Callable[[], list[Tensor | None]],
    ) -> None:
        super().__init__(backward is not None)
        self.rows, self.backward, self._gradients = rows, backward, gradients

    def part(self, start: int, stop: int) -> Part:
        return _RowBlock(self, start, stop)

    def gradients(self) -> list[Tensor | None]:
        return self._gradients()


class _RowBlock(Part):
    def __init__(self, owner: RowBlocks, start: int, stop: int) -> None:
        self.owner, self.at = owner, (start, stop)
        self.rows = owner.rows(start, stop)
        self.grad: Tensor | None = None

    def scores(self, vectors: Vectors, out: Tensor, tape: Tape) -> None:
        torch.mm(self.rows.detach(), vectors.data, out=out)

    def backward(self, vectors: Vectors, grad: Tensor, tape: Tape) -> None:
        if vectors.grad is not None:
            vectors.grad.addmm_(self.rows.detach().T, grad)
        if self.owner.wanted:
            if self.grad is None:
                self.grad = grad @ vectors.data.T
            else:
                self.grad.addmm_(grad, vectors.data.T)

    def close(self) -> None:
        if self.grad is not None:
            assert self.owner.backward is not None
            self.owner.backward(*self.at, self.rows, self.grad)
            self.grad = None


def rows_by_autograd(
    tensors: Sequence[Tensor], dtype: torch.dtype, rows: Callable[[Sequence[Tensor], int, int], Tensor]
) -> RowBlocks:
    """Blocks of rows that are differentiable in ``tensors``, each block's graph used at once and dropped."""
    leaves = leaves_of(tensors, dtype)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    sums = [torch.zeros_like(leaf) for leaf in trained]

    def make(start: int, stop: int) -> Tensor:
        with recording(bool(trained)):
            return rows(leaves, start, stop).to(dtype)

    def backward(start: int, stop: int, made: Tensor, grad: Tensor) -> None:
        for total, one in zip(sums, torch.autograd.grad(made, trained, grad), strict=True):
            total += one

    return RowBlocks(make, backward if trained else None, lambda: each_of(leaves, sums))


def rows_of_table(table: Tensor, dtype: torch.dtype, read: Callable[[Tensor], Tensor] | None = None) -> RowBlocks:
    """Rows are slices of a table, or what is read of them, and the gradients of both are the table's own slices."""
    total = torch.zeros(table.shape, dtype=dtype, device=table.device) if table.requires_grad else None

    def rows(start: int, stop: int) -> Tensor:
        part = table.detach()[start:stop]
        return (part if read is None else read(part)).to(dtype)

    def backward(start: int, stop: int, made: Tensor, grad: Tensor) -> None:
        assert total is not None
        total[start:stop] += grad

    return RowBlocks(rows, None if total is None else backward, lambda: [total])


def leaves_of(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors apart from their graph, floating-point numbers in this dtype."""
    return [t.detach().to(dtype if t.is_floating_point() else t.dtype).requires_grad_(t.requires_grad) for t in tensors]


def each_of(leaves: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor | None]:
    """A gradient for each that asks for one, in order, and ``None`` for the others."""
    rest = iter(made)
    return [next(rest) if leaf.requires_grad else None for leaf in leaves]
