"""Scores of all rows of a table for many vectors, a block of rows at a time: what a way costs, and what it computes.

Tiles of scores are ``(rows, n)`` for ``n`` vectors: the index law orders them, and a softmax over the rows is a
reduction over the slow axis, which every processor does many columns at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorbed.dispatch import recording

Params = Mapping[str, Tensor]


class Scorable(Protocol):
    """What is asked of a structure here; it says there what each is."""

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def takes_half(self) -> bool: ...
    @property
    def row_tensor(self) -> str | None: ...
    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]: ...
    def turned(self, p: Params, x: Tensor) -> Tensor: ...
    def block(self, p: Params, start: int, stop: int, impl: str) -> Tensor: ...


@dataclass(frozen=True)
class Cost:
    """What scores take, counted before anything is computed. Those of two tables add up.

    Attributes:
        multiply_adds: of one vector with every row.
        making: multiply-adds that make all rows, block by block and anew in each pass ...
        made: ... and how many numbers are written so.
        merging: multiply-adds that merge cores, once for all vectors ...
        merged: ... and how many numbers are written so.
        kept: numbers that one vector leaves for backward besides its scores, all rows counted.
        spared: multiply-adds of one vector that backward does again when those were not kept.
        step: blocks begin at multiples of it.
    """

    multiply_adds: int
    making: int = 0
    made: int = 0
    merging: int = 0
    merged: int = 0
    kept: int = 0
    spared: int = 0
    step: int = 1

    def __add__(self, other: Cost) -> Cost:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Cost(**{**sums, "step": max(self.step, other.step)})


@dataclass(frozen=True)
class Scoring:
    """A way to score: its name for people, its cost, and how it begins.

    Attributes:
        open: takes tensors in the structure's order, the dtype to compute in, and whether to keep what backward wants.
        trains: whether it has gradients; without, it is for scores alone.
    """

    name: str
    cost: Cost
    open: Callable[[Sequence[Tensor], torch.dtype, bool], Scores]
    trains: bool = True


class Scores(ABC):
    """The scores of one call by one way, with gradients off; those of tensors and vectors add up here.

    Attributes:
        order: ``(rows,)`` int64, which row of the table each scored row is; ``None`` where that is the table's order.
        any_layout: whether a tile may also be the transpose of a contiguous one.
    """

    order: Tensor | None = None
    any_layout = False
    step = 1

    def __init__(self, structure: Scorable, tensors: Sequence[Tensor], dtype: torch.dtype, keeps: bool = False) -> None:
        self.structure, self.dtype, self.keeps = structure, dtype, keeps
        leaves = [_leaf(t, t.dtype if structure.takes_half else dtype) for t in tensors]
        self.tensors = structure.named(leaves)
        self.trained = [name for name, leaf in self.tensors.items() if leaf.requires_grad]
        self._grads: dict[str, Tensor] = {}

    @property
    def rows(self) -> int:
        return self.structure.rows

    def vectors(self, x: Tensor, *, grad: bool) -> Any:  # (n, cols)
        """Vectors ready to be scored, with room for their gradient where one is asked for."""
        given = x.detach().requires_grad_(grad)
        with recording(grad or bool(self.trained)):
            return Vectors(given, self.turned(given))

    def turned(self, x: Tensor) -> Tensor:  # (n, cols) -> (k, n)
        """What blocks multiply, differentiable in the vectors and the tensors."""
        return self.structure.turned(self.tensors, x).T

    def finish(self, vectors: Any) -> Tensor | None:  # -> (n, cols)
        """The gradient of vectors, once all blocks have added to it; ``None`` where none was asked for."""
        if vectors.grad is None:
            return None
        inputs = [vectors.given, *(self.tensors[name] for name in self.trained)]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        grads = iter(torch.autograd.grad(vectors.graph, wanted, vectors.grad, allow_unused=True))
        of_vectors = next(grads) if vectors.given.requires_grad else None
        self.add(self.trained, grads)
        return of_vectors

    def add(self, names: Sequence[str], grads: Any) -> None:
        """Add gradients to those of these tensors."""
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                self.sum_of(name).add_(grad)

    def sum_of(self, name: str) -> Tensor:
        """The sum of a tensor's gradients so far."""
        if name not in self._grads:
            self._grads[name] = torch.zeros_like(self.tensors[name], dtype=self.dtype, requires_grad=False)
        return self._grads[name]

    def blocks(self, height: int) -> list[tuple[int, int]]:
        """The scored rows in blocks of about this height, the first one the largest."""
        height = max(self.step, height // self.step * self.step)
        return [(start, min(start + height, self.rows)) for start in range(0, self.rows, height)]

    @abstractmethod
    def block(self, start: int, stop: int) -> Block:
        """A block of scored rows, ready to be multiplied."""

    def gradients(self) -> list[Tensor | None]:
        """Gradients of the tensors that ask for one, in their order, after the last block was closed."""
        return [self.sum_of(name) if name in self.trained else None for name in self.tensors]


class Vectors:
    """A group of vectors as blocks take them, and the sum of their gradients the same way.

    Shape:
        - given: ``(n, cols)``
        - data, grad: ``(k, n)``
    """

    def __init__(self, given: Tensor, graph: Tensor) -> None:
        self.given, self.graph, self.data = given, graph, graph.detach()
        self.grad = torch.zeros_like(self.data) if graph.requires_grad else None


class Block(ABC):
    """A block of rows."""

    @abstractmethod
    def scores(self, vectors: Any, out: Tensor) -> None:  # out: (rows of the block, n)
        """Write the scores."""

    @abstractmethod
    def backward(self, vectors: Any, grad: Tensor) -> None:  # grad: (rows of the block, n)
        """Add the gradients for those of the scores."""

    def close(self) -> None:  # noqa: B027
        """Hand the block's own gradients on; it is not used afterwards."""


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Apart from its graph; floating-point numbers in this dtype."""
    return (
        tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).requires_grad_(tensor.requires_grad)
    )
