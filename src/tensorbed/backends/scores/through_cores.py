r"""Scores of a chain's rows by passing vectors through its cores: no row is ever made.

With neighbouring cores merged into few large ones, a vector meets them one after the other from one end of the chain:

.. math:: s[i_1 \dots i_N] = \sum_{j_N, r_{N-1}} G^{(N)}[i_N] \cdots \sum_{j_1} G^{(1)}[i_1, j_1]\, x[j_1 \dots j_N].

Each step is one matrix, the core, times every vector and prefix at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain
from tensorbed.backends.scores.scoring import Block, Cost, Scorable, Scores, Scoring, Vectors
from tensorbed.dispatch import recording

_FEW = 16  # columns up to which products are better with the roles of their factors exchanged


@dataclass(frozen=True)
class Route:
    """Cores merged into groups of these sizes, passed from the first or, reversed, from the last."""

    groups: tuple[int, ...]
    reverse: bool

    @property
    def name(self) -> str:
        """``"cores 1-2, 3"``: in the order in which they are met."""
        ends = [sum(self.groups[:k]) for k in range(len(self.groups) + 1)]
        names = [f"{a + 1}-{b}" if b > a + 1 else f"{b}" for a, b in pairwise(ends)]
        return f"cores {', '.join(reversed(names) if self.reverse else names)}"


def scorings(structure: Scorable, chain: Chain) -> list[Scoring]:
    """Every route through the cores, which are the structure's tensors."""
    return [Scoring(route.name, cost, partial(ThroughCores, chain, route, structure)) for route, cost in _costs(chain)]


@lru_cache(maxsize=256)
def _costs(chain: Chain) -> tuple[tuple[Route, Cost], ...]:
    """The routes whose merged cores stay well below the table."""
    costs = ((route, _cost(chain, route)) for route in _routes(chain.order))
    return tuple((route, cost) for route, cost in costs if cost is not None)


def _routes(order: int) -> Iterator[Route]:
    """Every merging into two or three groups, and none: more than that would be exponentially many."""
    cuts = [*combinations(range(1, order), 1), *combinations(range(1, order), 2), tuple(range(1, order))]
    for ends in dict.fromkeys(cuts):
        groups = tuple(b - a for a, b in pairwise([0, *ends, order]))
        yield from (Route(groups, False), Route(groups, True))


def _cost(chain: Chain, route: Route) -> Cost | None:
    sizes = _merged_chain(chain, route)
    merged = sum(prod(sizes.core_shape(k)) for k in range(sizes.order))
    own = sum(prod(chain.core_shape(k)) for k in range(chain.order))
    if merged > max(2 * own, chain.rows * chain.cols // 4):
        return None
    steps = [_step(sizes, k) for k in range(sizes.order)]
    in_order = not route.reverse or _is_one_digit(chain)
    counts = [s.parts * s.height * s.depth * s.width for s in steps]
    return Cost(
        multiply_adds=sum(counts),
        merging=_merging(chain, route),
        merged=merged,
        kept=sum(s.parts * s.height * s.width for s in steps[:-1]) + (0 if in_order else prod(chain.row_factors)),
        spared=sum(counts[:-1]),
        step=_rows_of_a_digit(sizes, route),
    )


def _rows_of_a_digit(sizes: Chain, route: Route) -> int:
    """Rows that come together; passed from the last digit all do, in another order."""
    return sizes.rows if route.reverse else prod(sizes.row_factors[1:])


@dataclass(frozen=True)
class _Step:
    """One core's product for one vector: ``parts`` times ``(height, depth) @ (depth, width)``."""

    parts: int
    height: int
    depth: int
    width: int


def _step(chain: Chain, k: int) -> _Step:
    """The k-th step; a ring's joint goes along as more columns, and is summed over at the last."""
    i, left, j, right = chain.core_shape(k)
    before, after = prod(chain.row_factors[:k]), prod(chain.col_factors[k + 1 :])
    if k == 0:
        return _Step(1, i * right * left, j, after)
    if k == chain.order - 1:
        return _Step(before, i, left * j * right, 1)
    return _Step(before, i * right, left * j, after * chain.joint)


def _merged_chain(chain: Chain, route: Route) -> Chain:
    """The sizes of the chain as it is passed."""
    ends = [sum(route.groups[:k]) for k in range(len(route.groups) + 1)]
    rows = tuple(prod(chain.row_factors[a:b]) for a, b in pairwise(ends))
    cols = tuple(prod(chain.col_factors[a:b]) for a, b in pairwise(ends))
    ranks = tuple(chain.ranks[a] for a in ends)
    if route.reverse:
        rows, cols, ranks = rows[::-1], cols[::-1], ranks[::-1]
    return Chain(chain.rows, rows, cols, ranks)


def _merging(chain: Chain, route: Route) -> int:
    total, at = 0, 0
    for size in route.groups:
        i, left, j, _ = chain.core_shape(at)
        for k in range(at + 1, at + size):
            i2, inner, j2, right2 = chain.core_shape(k)
            total += i * left * j * inner * i2 * j2 * right2
            i, j = i * i2, j * j2
        at += size
    return total


def _merge(cores: Sequence[Tensor], route: Route) -> list[Tensor]:
    """Merged cores ``(I, R, J, R')``, in the order in which they are passed; differentiable."""
    merged, at = [], 0
    for size in route.groups:
        core = cores[at]
        for other in cores[at + 1 : at + size]:
            i, left, j, _ = core.shape
            i2, _, j2, right = other.shape
            core = torch.einsum("iajb,kblc->ikajlc", core, other).reshape(i * i2, left, j * j2, right)
        merged.append(core)
        at += size
    return [core.transpose(1, 3) for core in reversed(merged)] if route.reverse else merged


def _matrices(merged: Sequence[Tensor]) -> list[Tensor]:
    """Each core as the matrix of its step, the first one split by its digit: ``(I, R' * R, J)``."""
    found = []
    for k, core in enumerate(merged):
        i, left, j, right = core.shape
        if k == len(merged) - 1:
            found.append(core.reshape(i, left * j * right))
        elif k == 0:
            found.append(core.permute(0, 3, 1, 2).reshape(i, right * left, j))
        else:
            found.append(core.permute(0, 3, 1, 2).reshape(i * right, left * j))
    return [matrix.contiguous() for matrix in found]


class ThroughCores(Scores):
    """A chain's scores by a route; its tensors are the cores."""

    def __init__(self, chain: Chain, route: Route, *given: Any) -> None:
        super().__init__(*given)
        self.chain, self.route, self.sizes = chain, route, _merged_chain(chain, route)
        self.step = _rows_of_a_digit(self.sizes, route)
        with recording(bool(self.trained)):
            self.graph = _matrices(_merge(list(self.tensors.values()), route))
        self.matrices = [matrix.detach() for matrix in self.graph]
        self.matrix_grads = [torch.zeros_like(matrix) for matrix in self.matrices] if self.trained else []
        # What went into each core after the first, for backward; by block where all is kept.
        self._tapes: dict[int, list[Tensor]] = {}
        self._on_tape: dict[int, tuple[int, Vectors]] = {}

    def turned(self, x: Tensor) -> Tensor:  # (n, cols) -> (cols, n)
        """For a reversed route the last column factor comes first."""
        factors = self.sizes.col_factors[::-1] if self.route.reverse else self.sizes.col_factors
        digits = x.reshape(x.shape[0], *factors)
        order = range(len(factors), 0, -1) if self.route.reverse else range(1, len(factors) + 1)
        return digits.permute(*order, 0).reshape(self.structure.cols, x.shape[0]).contiguous()

    def block(self, start: int, stop: int) -> Block:
        return _ReversedRows(self, stop) if self.route.reverse else _Prefixes(self, start, stop)

    def tape(self, start: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Room that is written over by the next block, or by the same one's next vectors. The first are the largest."""
        key = start if self.keeps else 0
        if key not in self._tapes:
            self._tapes[key] = [self.matrices[0].new_empty(prod(shape)) for shape in shapes]
        pairs = zip(self._tapes[key], shapes, strict=True)
        return [room[: prod(shape)].view(shape) for room, shape in pairs]

    def writes_tape(self, start: int, vectors: Vectors) -> bool:
        """Whether that of these vectors has to be written; from now on it is there."""
        key, entry = start if self.keeps else 0, (start, vectors)
        is_there = self._on_tape.get(key) == entry
        self._on_tape[key] = entry
        return not is_there

    def gradients(self) -> list[Tensor | None]:
        if self.trained:
            # A core that is frozen may be alone in its matrix.
            pairs = [(m, grad) for m, grad in zip(self.graph, self.matrix_grads, strict=True) if m.requires_grad]
            leaves = [self.tensors[name] for name in self.trained]
            self.add(self.trained, torch.autograd.grad([m for m, _ in pairs], leaves, [grad for _, grad in pairs]))
        return super().gradients()


class _Prefixes(Block):
    """Rows from one value of the first digit to another, cut at the end of the table."""

    def __init__(self, owner: ThroughCores, start: int, stop: int) -> None:
        self.owner, self.start, self.rows = owner, start, stop - start
        each = prod(owner.sizes.row_factors[1:])
        self.first = slice(start // each, -(-stop // each))
        self.digits = self.first.stop - self.first.start
        self.padded = self.digits * each

    def _shape(self, k: int, n: int) -> tuple[int, int, int]:
        """Of what goes into step ``k`` from 1: ``(prefixes, depth, width)``."""
        step = _step(self.owner.sizes, k)
        return step.parts // self.owner.sizes.row_factors[0] * self.digits, step.depth, step.width * n

    def _tape(self, vectors: Vectors) -> list[Tensor]:
        """What goes into the steps after the first, computed unless it is there."""
        owner, n = self.owner, vectors.data.shape[1]
        tape = owner.tape(self.start, [self._shape(k, n) for k in range(1, owner.sizes.order)])
        if owner.writes_tape(self.start, vectors):
            first = owner.matrices[0][self.first].flatten(0, 1)
            _start(first, vectors.data.view(first.shape[1], -1), tape[0], owner.sizes.joint, n)
            for k, matrix in enumerate(owner.matrices[1:-1]):
                _times(matrix, tape[k], tape[k + 1].view(tape[k].shape[0], matrix.shape[0], -1))
        return tape

    def scores(self, vectors: Vectors, out: Tensor) -> None:
        last, matrix, n = self._tape(vectors)[-1], self.owner.matrices[-1], out.shape[1]
        if self.padded == self.rows:
            _times(matrix, last, out.view(last.shape[0], matrix.shape[0], n))
        else:
            whole = out.new_empty(last.shape[0], matrix.shape[0], n)
            _times(matrix, last, whole)
            out.copy_(whole.view(-1, n)[: self.rows])

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        owner, n, tape = self.owner, grad.shape[1], self._tape(vectors)
        if self.padded != self.rows:
            grad = torch.cat([grad, grad.new_zeros(self.padded - self.rows, n)])
        for k in reversed(range(1, owner.sizes.order)):
            matrix, into = owner.matrices[k], tape[k - 1]
            grad = grad.reshape(into.shape[0], matrix.shape[0], -1)
            if owner.trained:
                _add_outer(owner.matrix_grads[k], grad, into)
            grad = _transposed_times(matrix, grad)
        first, data = owner.matrices[0][self.first], vectors.data.view(owner.matrices[0].shape[2], -1)
        grad = _undo_start(grad, first.shape[0] * first.shape[1], owner.sizes.joint, n)
        if vectors.grad is not None:
            vectors.grad.view(data.shape).addmm_(first.flatten(0, 1).T, grad)
        if owner.trained:
            owner.matrix_grads[0][self.first].view(-1, first.shape[2]).addmm_(grad, data.T)


class _ReversedRows(_Prefixes):
    """All rows at once: passed from the last digit they come out in another order, padded ones between them."""

    def __init__(self, owner: ThroughCores, rows: int) -> None:
        super().__init__(owner, 0, prod(owner.sizes.row_factors))
        self.real, self.in_order = rows, _is_one_digit(owner.chain)

    def scores(self, vectors: Vectors, out: Tensor) -> None:
        if self.in_order and self.real == self.rows:
            super().scores(vectors, out)
            return
        reversed_rows = out.new_empty(self.rows, out.shape[1])
        super().scores(vectors, reversed_rows)
        out.copy_(_reversed_digits(reversed_rows, self.owner.sizes.row_factors)[: self.real])

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        if self.real != self.rows:
            grad = torch.cat([grad, grad.new_zeros(self.rows - self.real, grad.shape[1])])
        if not self.in_order:
            grad = _reversed_digits(grad, self.owner.sizes.row_factors[::-1])
        super().backward(vectors, grad)


def _reversed_digits(tensor: Tensor, factors: Sequence[int]) -> Tensor:  # (prod(factors), n) -> (prod(factors), n)
    """The digits of the first axis in reverse."""
    n, order = tensor.shape[1], len(factors)
    return tensor.reshape(*factors, n).permute(*reversed(range(order)), order).reshape(-1, n)


def _is_one_digit(chain: Chain) -> bool:
    """Whether reversing the digits of a row changes nothing."""
    return sum(factor > 1 for factor in chain.row_factors) <= 1


def _start(first: Tensor, data: Tensor, out: Tensor, joint: int, n: int) -> None:
    """The first step, ``(i * R' * R, J) @ (J, columns * n)``; a ring's joint then moves behind the columns."""
    if joint == 1:
        torch.mm(first, data, out=out.view(first.shape[0], -1))
        return
    made = (first @ data).view(-1, joint, data.shape[1] // n, n)
    out.view(-1, data.shape[1] // n, joint, n).copy_(made.transpose(1, 2))


def _undo_start(grad: Tensor, height: int, joint: int, n: int) -> Tensor:  # -> (height, columns * n)
    """The inverse of that move, for gradients."""
    if joint > 1:
        grad = grad.reshape(height // joint, -1, joint, n).transpose(1, 2)
    return grad.reshape(height, -1)


def _times(matrix: Tensor, x: Tensor, out: Tensor) -> None:  # (h, d), (p, d, w) -> (p, h, w)
    """One matrix times many."""
    p, d, w = x.shape
    if p == 1:
        torch.mm(matrix, x[0], out=out[0])
    elif w == 1:
        torch.mm(x.view(p, d), matrix.T, out=out.view(p, -1))
    elif w <= _FEW:
        out.copy_((x.transpose(1, 2).reshape(p * w, d) @ matrix.T).view(p, w, -1).transpose(1, 2))
    else:
        torch.bmm(matrix.expand(p, -1, -1), x, out=out)


def _transposed_times(matrix: Tensor, grad: Tensor) -> Tensor:  # (h, d), (p, h, w) -> (p, d, w)
    p, h, w = grad.shape
    if p > 1 and w <= _FEW:
        return (grad.transpose(1, 2).reshape(p * w, h) @ matrix).view(p, w, -1).transpose(1, 2)
    return torch.bmm(matrix.T.expand(p, -1, -1), grad)


def _add_outer(total: Tensor, grad: Tensor, x: Tensor) -> None:  # (h, d), (p, h, w), (p, d, w)
    """``total += sum_p grad[p] @ x[p].T``, by whichever of two ways copies less."""
    p, h, w = grad.shape
    d = x.shape[1]
    if p == 1:
        total.addmm_(grad[0], x[0].T)
    elif w * (h + d) < h * d:
        total.addmm_(grad.transpose(0, 1).reshape(h, p * w), x.transpose(1, 2).reshape(p * w, d))
    else:
        total += torch.bmm(grad, x.transpose(1, 2)).sum(0)
