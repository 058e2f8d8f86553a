"""Scores of all rows of a table for many vectors, a block of rows at a time: what a way costs, and what it computes.

Tiles of scores are ``(rows, n)`` for ``n`` vectors: the index law orders them, and a softmax over the rows is a
reduction over the slow axis, which every processor does many columns at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorbed.dispatch import recording

Params = Mapping[str, Tensor]
_BLOCK = 2**22  # numbers of the table made at once
_FEW = 8  # ways of several tables together, all of which are weighed
_STORE = 24  # multiply-adds in the time that writing a number takes


class Scorable(Protocol):
    """What is asked of a structure here; it says there what each is."""

    @property
    def rows(self) -> int: ...
    @property
    def impls(self) -> tuple[str, ...]: ...
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
        turned: numbers that one vector becomes before it meets rows, and as many for its gradient, where that is many.
        step: blocks begin at multiples of it.
    """

    multiply_adds: int
    making: int = 0
    made: int = 0
    merging: int = 0
    merged: int = 0
    kept: int = 0
    spared: int = 0
    turned: int = 0
    step: int = 1

    def of_vectors(self, n: int) -> int:
        """About what so many vectors at a time take, in multiply-adds."""
        once = self.making + self.merging + _STORE * (self.made + self.merged)
        return once + n * (self.multiply_adds + _STORE * self.kept)

    def __add__(self, other: Cost) -> Cost:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Cost(**{**sums, "step": max(self.step, other.step)})


@dataclass(frozen=True)
class Scoring:
    """A way to score: its name for people, its cost, and how it begins.

    Attributes:
        open: takes tensors in the structure's order, the dtype to multiply in, whether to keep what backward wants, and
            the backend asked for.
        trains: whether it has gradients; without, it is for scores alone.
        halves: whether it multiplies in half precision too, with sums in single.
    """

    name: str
    cost: Cost
    open: Callable[[Sequence[Tensor], torch.dtype, bool, str], Scores]
    trains: bool = True
    halves: bool = False


class Vectors:
    """A group of vectors as blocks take them, and the sum of their gradients the same way.

    Shape:
        - given: ``(n, cols)``
        - data, grad: ``(k, n)``
    """

    def __init__(self, given: Tensor, graph: Tensor, dtype: torch.dtype) -> None:
        self.given, self.graph, self.data = given, graph, graph.detach().to(dtype)
        self.grad = torch.zeros_like(graph, requires_grad=False) if graph.requires_grad else None


class Scores(ABC):
    """The scores of one call by one way, with gradients off; those of tensors and vectors add up here.

    Rows come in blocks: one is opened, serves any vectors, and is closed before the next.

    Attributes:
        order: ``(rows,)`` int64, which row of the table each scored row is; ``None`` where that is the table's order.
        any_layout: whether a tile may also be the transpose of a contiguous one.
        dtype: of tiles and of what is multiplied; ``sum_dtype`` is that of gradients, at least single precision.
        impl: ``"auto"``, or the backend asked for.
        start, stop: the rows of the block that is open.
    """

    order: Tensor | None = None
    any_layout = False
    step = 1
    start = stop = 0

    def __init__(
        self,
        structure: Scorable,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        keeps: bool = False,
        impl: str = "auto",
    ) -> None:
        self.structure, self.rows, self.dtype, self.keeps, self.impl = structure, structure.rows, dtype, keeps, impl
        self.sum_dtype = torch.promote_types(dtype, torch.float32)
        leaves = []
        for tensor in tensors:
            stays = structure.takes_half or not tensor.is_floating_point()
            leaves.append(
                tensor.detach().to(tensor.dtype if stays else self.sum_dtype).requires_grad_(tensor.requires_grad)
            )
        self.tensors = structure.named(leaves)
        self.trained = [name for name, leaf in self.tensors.items() if leaf.requires_grad]
        self._grads: dict[str, Tensor] = {}

    def vectors(self, x: Tensor, *, grad: bool) -> Any:  # (n, cols)
        """Vectors ready to be scored, with room for their gradient where one is asked for."""
        given = x.detach().requires_grad_(grad)
        with recording(grad or bool(self.trained)):
            return Vectors(given, self.turned(given), self.dtype)

    def turned(self, x: Tensor) -> Tensor:  # (n, cols) -> (k, n)
        """What blocks multiply, differentiable in the vectors and the tensors."""
        return self.structure.turned(self.tensors, x).T

    def blocks(self, height: int) -> list[tuple[int, int]]:
        """The scored rows in blocks of about this height, the first one the largest."""
        height = max(self.step, height // self.step * self.step)
        return [(start, min(start + height, self.rows)) for start in range(0, self.rows, height)]

    def open(self, start: int, stop: int) -> None:
        """Begin with a block."""
        self.start, self.stop = start, stop

    @abstractmethod
    def write(self, vectors: Any, out: Tensor) -> None:  # out: (rows of the block, n)
        """The scores of the open block."""

    @abstractmethod
    def backward(self, vectors: Any, grad: Tensor) -> None:  # grad: (rows of the block, n)
        """Add the gradients for those of the open block's scores."""

    def close(self) -> None:  # noqa: B027
        """Hand the open block's own gradients on."""

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

    def add(self, names: Sequence[str], grads: Iterable[Tensor | None]) -> None:
        """Add gradients to those of these tensors."""
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                self.sum_of(name).add_(grad)

    def sum_of(self, name: str) -> Tensor:
        """The sum of a tensor's gradients so far."""
        if name not in self._grads:
            self._grads[name] = torch.zeros_like(self.tensors[name], dtype=self.sum_dtype, requires_grad=False)
        return self._grads[name]

    def gradients(self) -> list[Tensor | None]:
        """Gradients of the tensors that ask for one, in their order, after the last block was closed."""
        return [self.sum_of(name) if name in self.trained else None for name in self.tensors]


class RowScores(Scores):
    """``structure.block`` times ``structure.turned``: rows that are made, multiplied and dropped.

    One that is a whole tensor in another precision is kept: every group of vectors would read it anew.
    """

    any_layout = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        of_rows = self.structure.row_tensor
        self.slice_of = of_rows if of_rows in self.trained else None
        self.made_of = [name for name in self.trained if name != of_rows]
        self._written: set[int] = set()
        known = self.impl != "auto" and self.impl in self.structure.impls
        self.rows_impl = self.impl if known else "auto"
        self.recorded = bool(self.made_of) and self.slice_of is None
        self.whole = False  # whether the block is all rows of a tensor, and can be opened once more as it is

    def open(self, start: int, stop: int) -> None:
        super().open(start, stop)
        self.block_grad: Tensor | None = None
        if self.whole:
            return
        with recording(bool(self.made_of)):
            self.made = self.structure.block(self.tensors, start, stop, self.rows_impl)
        self.block = self.made.detach().to(self.dtype)
        self.whole = self.structure.row_tensor is not None and not self.recorded and stop - start == self.rows

    def write(self, vectors: Vectors, out: Tensor) -> None:
        torch.mm(self.block, vectors.data, out=out)

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        x = vectors.data.T
        if vectors.grad is not None:
            add_product(vectors.grad, self.block.T, grad)
        if self.slice_of is not None:
            self._add_to_slice(self.slice_of, grad, x)
        elif self.made.requires_grad:
            self.block_grad = (
                (grad @ x).to(self.sum_dtype) if self.block_grad is None else add_product(self.block_grad, grad, x)
            )

    def _add_to_slice(self, name: str, grad: Tensor, x: Tensor) -> None:  # (rows, n), (n, k)
        """``+= grad @ x`` for the gradient of the block's rows of a tensor, not written before the first time."""
        if name not in self._grads:
            self._grads[name] = torch.empty_like(self.tensors[name], dtype=self.sum_dtype, requires_grad=False)
        total = self._grads[name][self.start : self.stop]
        if self.start in self._written:
            add_product(total, grad, x)
        elif total.dtype == x.dtype:
            torch.mm(grad, x, out=total)
        else:
            total.copy_(grad @ x)
        self._written.add(self.start)

    def close(self) -> None:
        if self.block_grad is not None:
            leaves = [self.tensors[name] for name in self.made_of]
            self.add(self.made_of, torch.autograd.grad(self.made, leaves, self.block_grad, allow_unused=True))
        self.block_grad = None
        if not self.whole:
            del self.made, self.block


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:  # (h, w), (h, d), (d, w)
    """``total += a @ b``, where those may be of half precision and the total is not."""
    return total.addmm_(a, b) if a.dtype == total.dtype else total.add_(a @ b)


def scores_of_rows(
    structure: Scorable, p: Params, x: Tensor, start: int, stop: int, impl: str
) -> Tensor:  # (*, cols) -> (*, stop - start)
    """``x @ table[start:stop].T`` in plain differentiable PyTorch, a block of rows at a time."""
    height = max(1, _BLOCK // structure.cols)
    ends = [(a, min(a + height, stop)) for a in range(start, stop, height)] or [(start, stop)]
    turned = structure.turned(p, x)
    blocks = [turned @ structure.block(p, a, b, impl).to(x.dtype).T for a, b in ends]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)


def joined_scorings(tables: Sequence[Sequence[Scoring]]) -> list[tuple[Scoring, ...]]:
    """Ways to score several tables together, each its own way: all of them, or those that are worth weighing.

    The tables do not depend on each other: what is cheapest for a number of vectors is what is cheapest for each of
    them. Those that train are weighed among themselves too, and the ways that hold the fewest numbers.
    """
    if prod(map(len, tables)) <= _FEW:
        return list(product(*tables))
    found: dict[tuple[int, ...], tuple[Scoring, ...]] = {}
    for training in (True, False):
        able = [[way for way in ways if way.trains or not training] for ways in tables]
        if not all(able):
            continue
        measures = [partial(Cost.of_vectors, n=2**k) for k in range(16)] + [lambda cost: cost.kept + cost.merged]
        chosen = [tuple(min(ways, key=lambda way: measure(way.cost)) for ways in able) for measure in measures]
        found |= {tuple(map(id, ways)): ways for ways in chosen}
    return list(found.values())


class JoinedScores(Scores):
    """Scores of a table whose rows are all of a first table, then all of a second, and so on, each scored its own way.

    Args:
        tables: the scores of each.
        order: ``(rows,)``, which row of this table each row of those is; ``None`` where they are in its order.
        constants: how many tensors come before those of the tables; they have no gradients.
    """

    def __init__(self, tables: Sequence[Scores], order: Tensor | None, constants: int) -> None:
        self.tables, self.constants = tables, constants
        self.rows, self.any_layout = sum(t.rows for t in tables), all(table.any_layout for table in tables)
        self.dtype = tables[0].dtype
        self.firsts = [sum(table.rows for table in tables[:k]) for k in range(len(tables))]
        self.order = _joined_order(tables, self.firsts, order)
        self.at = 0  # which table's block is open

    def vectors(self, x: Tensor, *, grad: bool) -> list[object]:
        return [table.vectors(x, grad=grad) for table in self.tables]

    def blocks(self, height: int) -> list[tuple[int, int]]:
        pairs = zip(self.firsts, self.tables, strict=True)
        return [(first + a, first + b) for first, table in pairs for a, b in table.blocks(height)]

    def open(self, start: int, stop: int) -> None:
        super().open(start, stop)
        self.at = max(k for k, first in enumerate(self.firsts) if first <= start)
        self.tables[self.at].open(start - self.firsts[self.at], stop - self.firsts[self.at])

    def write(self, vectors: list[object], out: Tensor) -> None:
        self.tables[self.at].write(vectors[self.at], out)

    def backward(self, vectors: list[object], grad: Tensor) -> None:
        self.tables[self.at].backward(vectors[self.at], grad)

    def close(self) -> None:
        self.tables[self.at].close()

    def finish(self, vectors: list[object]) -> Tensor | None:
        total: Tensor | None = None
        for table, own in zip(self.tables, vectors, strict=True):
            grad = table.finish(own)
            if grad is not None:
                total = grad if total is None else total.add_(grad)
        return total

    def gradients(self) -> list[Tensor | None]:
        return [None] * self.constants + [grad for table in self.tables for grad in table.gradients()]


def _joined_order(tables: Sequence[Scores], firsts: Sequence[int], order: Tensor | None) -> Tensor | None:  # -> (rows,)
    """Which row each scored row is, of tables that may have an order of their own, where it is not the same."""
    device = next((table.order.device for table in tables if table.order is not None), None)
    if device is None:
        return order
    own = [torch.arange(t.rows, device=device) if t.order is None else t.order for t in tables]
    inner = torch.cat([first + rows for first, rows in zip(firsts, own, strict=True)])
    return inner if order is None else order.index_select(0, inner)
