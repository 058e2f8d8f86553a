r"""Scores of a chain's rows by passing vectors through its cores: no row is ever made.

With neighbouring cores merged into few large ones, a vector meets them one after the other from one end of the chain:

.. math:: s[i_1 \dots i_N] = \sum_{j_N, r_{N-1}} G^{(N)}[i_N] \cdots \sum_{j_1} G^{(1)}[i_1, j_1]\, x[j_1 \dots j_N].

Each step is one matrix, the core, times every vector and prefix at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations, pairwise
from math import prod

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain
from tensorbed.backends.scores.projection import Part, Projection, Tape, Vectors, Way, each_of, leaves_of
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


CoresOf = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@lru_cache(maxsize=256)
def ways(chain: Chain, cores_of: CoresOf = list) -> tuple[Way, ...]:
    """Every route through the cores whose merged cores stay well below the table.

    ``cores_of`` makes them from the structure's tensors, differentiably.
    """
    found = (_way(chain, route, cores_of) for route in _routes(chain.order))
    return tuple(way for way in found if way is not None)


def _routes(order: int) -> Iterator[Route]:
    """Every merging into two or three groups, and none: more than that would be exponentially many."""
    cuts = [*combinations(range(1, order), 1), *combinations(range(1, order), 2), tuple(range(1, order))]
    for ends in dict.fromkeys(cuts):
        groups = tuple(b - a for a, b in pairwise([0, *ends, order]))
        yield from (Route(groups, False), Route(groups, True))


def _way(chain: Chain, route: Route, cores_of: CoresOf) -> Way | None:
    sizes = _merged_chain(chain, route)
    merged = sum(prod(sizes.core_shape(k)) for k in range(sizes.order))
    own = sum(prod(chain.core_shape(k)) for k in range(chain.order))
    if merged > max(2 * own, chain.rows * chain.cols // 4):
        return None
    steps = [_step(sizes, k) for k in range(sizes.order)]
    in_order = not route.reverse or _is_one_digit(chain)
    counts = [s.parts * s.height * s.depth * s.width for s in steps]
    return Way(
        name=route.name,
        multiply_adds=sum(counts),
        making=_merging(chain, route),
        making_numbers=merged,
        by_block=False,
        kept=sum(s.parts * s.height * s.width for s in steps[:-1]) + (0 if in_order else prod(chain.row_factors)),
        spared=sum(counts[:-1]),
        step=chain.rows if route.reverse else prod(sizes.row_factors[1:]),
        open=partial(ThroughCores, chain, route, cores_of),
    )


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


class ThroughCores(Projection):
    """A chain's scores by a route."""

    def __init__(
        self, chain: Chain, route: Route, cores_of: CoresOf, tensors: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(any(tensor.requires_grad for tensor in tensors))
        self.chain, self.route, self.sizes = chain, route, _merged_chain(chain, route)
        self.leaves = leaves_of(tensors, dtype)
        with recording(self.wanted):
            self.graph = _matrices(_merge(cores_of(self.leaves), route))
        self.matrices = [matrix.detach() for matrix in self.graph]
        self.grads = [torch.zeros_like(matrix) for matrix in self.matrices] if self.wanted else []

    def vectors(self, x: Tensor, *, grad: bool) -> Vectors:  # (n, cols)
        """For a reversed route the last column factor comes first."""
        data = self._turned(x.T, self._cols) if self.route.reverse else x.T
        data = data.contiguous()
        return Vectors(data, torch.zeros_like(data) if grad else None)

    def gradient_of(self, vectors: Vectors) -> Tensor:  # -> (n, cols)
        assert vectors.grad is not None
        grad = self._turned(vectors.grad, self._cols[::-1]) if self.route.reverse else vectors.grad
        return grad.T

    @property
    def _cols(self) -> tuple[int, ...]:
        """Column factors in the chain's own order, merged."""
        return self.sizes.col_factors[::-1] if self.route.reverse else self.sizes.col_factors

    @staticmethod
    def _turned(tensor: Tensor, factors: tuple[int, ...]) -> Tensor:  # (prod(factors), n) -> (prod(factors), n)
        """The digits of the first axis in reverse."""
        n = tensor.shape[1]
        order = len(factors)
        return tensor.reshape(*factors, n).permute(*reversed(range(order)), order).reshape(-1, n)

    def part(self, start: int, stop: int) -> Part:
        return _ReversedPart(self) if self.route.reverse else _Prefixes(self, start, stop)

    def gradients(self) -> list[Tensor | None]:
        trained = [leaf for leaf in self.leaves if leaf.requires_grad]
        if not trained:
            return each_of(self.leaves, ())
        # A core that is frozen may be alone in its matrix.
        pairs = [(m, grad) for m, grad in zip(self.graph, self.grads, strict=True) if m.requires_grad]
        made = torch.autograd.grad([m for m, _ in pairs], trained, [grad for _, grad in pairs])
        return each_of(self.leaves, made)


class _Prefixes(Part):
    """Rows from one value of the first digit to another, cut at the end of the table."""

    def __init__(self, owner: ThroughCores, start: int, stop: int) -> None:
        self.owner, self.rows = owner, stop - start
        each = prod(owner.sizes.row_factors[1:])
        self.first = slice(start // each, -(-stop // each))
        self.digits = self.first.stop - self.first.start
        self.padded = self.digits * each

    def _shape(self, k: int, n: int) -> tuple[int, int, int]:
        """Of what goes into step ``k`` from 1: ``(prefixes, depth, width)``."""
        step = _step(self.owner.sizes, k)
        return step.parts // self.owner.sizes.row_factors[0] * self.digits, step.depth, step.width * n

    def tape(self, n: int, room: Tape | None = None) -> Tape:
        like, shapes = self.owner.matrices[0], [self._shape(k, n) for k in range(1, self.owner.sizes.order)]
        if room is None:
            return [like.new_empty(shape) for shape in shapes]
        return [one.view(-1)[: prod(shape)].view(shape) for one, shape in zip(room, shapes, strict=True)]

    def scores(self, vectors: Vectors, out: Tensor, tape: Tape) -> None:
        self.refill(vectors, tape)
        made, matrix, n = tape[-1], self.owner.matrices[-1], vectors.count
        if self.padded == self.rows:
            _times(matrix, made, out.view(made.shape[0], matrix.shape[0], n))
        else:
            whole = out.new_empty(made.shape[0], matrix.shape[0], n)
            _times(matrix, made, whole)
            out.copy_(whole.view(-1, n)[: self.rows])

    def refill(self, vectors: Vectors, tape: Tape) -> None:
        first, data = self.owner.matrices[0][self.first].flatten(0, 1), vectors.data
        _start(first, data.view(first.shape[1], -1), tape[0], self.owner.sizes.joint, vectors.count)
        for k, matrix in enumerate(self.owner.matrices[1:-1]):
            _times(matrix, tape[k], tape[k + 1].view(tape[k].shape[0], matrix.shape[0], -1))

    def backward(self, vectors: Vectors, grad: Tensor, tape: Tape) -> None:
        owner, n = self.owner, vectors.count
        if self.padded != self.rows:
            grad = torch.cat([grad, grad.new_zeros(self.padded - self.rows, n)])
        for k in reversed(range(1, owner.sizes.order)):
            matrix, into = owner.matrices[k], tape[k - 1]
            grad = grad.reshape(into.shape[0], matrix.shape[0], -1)
            if owner.wanted:
                _add_outer(owner.grads[k], grad, into)
            grad = _transposed_times(matrix, grad)
        first, data = owner.matrices[0][self.first], vectors.data.view(owner.matrices[0].shape[2], -1)
        grad = _undo_start(grad, first.shape[0] * first.shape[1], owner.sizes.joint, n)
        if vectors.grad is not None:
            vectors.grad.view(data.shape).addmm_(first.flatten(0, 1).T, grad)
        if owner.wanted:
            owner.grads[0][self.first].view(-1, first.shape[2]).addmm_(grad, data.T)


class _ReversedPart(_Prefixes):
    """All rows at once: passed from the last digit they come out in another order."""

    def __init__(self, owner: ThroughCores) -> None:
        super().__init__(owner, 0, prod(owner.sizes.row_factors))
        self.factors = owner.sizes.row_factors

    def scores(self, vectors: Vectors, out: Tensor, tape: Tape) -> None:
        if _is_one_digit(self.owner.chain) and out.shape[0] == self.rows:
            super().scores(vectors, out, tape)
            return
        turned = out.new_empty(self.rows, vectors.count)
        super().scores(vectors, turned, tape)
        out.copy_(ThroughCores._turned(turned, self.factors)[: out.shape[0]])

    def backward(self, vectors: Vectors, grad: Tensor, tape: Tape) -> None:
        if grad.shape[0] != self.rows:
            grad = torch.cat([grad, grad.new_zeros(self.rows - grad.shape[0], vectors.count)])
        if not _is_one_digit(self.owner.chain):
            grad = ThroughCores._turned(grad, self.factors[::-1])
        super().backward(vectors, grad, tape)


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
