r"""Scores of a chain's rows by passing vectors through its cores: no row is ever made.

With neighbouring cores merged into few large ones, a vector meets them one after the other from one end of the chain:

.. math:: s[i_1 \dots i_N] = \sum_{j_N, r_{N-1}} G^{(N)}[i_N] \cdots \sum_{j_1} G^{(1)}[i_1, j_1]\, x[j_1 \dots j_N].

Each step is one matrix, the core, times every vector and prefix at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, combinations, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain
from tensorbed.backends.scores.scoring import Cost, Scorable, Scores, Scoring, Vectors, add_product
from tensorbed.backends.triton import serving
from tensorbed.dispatch import recording

_FEW = 16  # columns up to which products are better with the roles of their factors exchanged


class _Step(NamedTuple):
    """One core's product for one vector: ``parts`` times ``(height, depth) @ (depth, width)``."""

    parts: int
    height: int
    depth: int
    width: int


@dataclass(frozen=True)
class Route:
    """Cores merged into groups of these sizes, passed from the first or, reversed, from the last."""

    chain: Chain
    groups: tuple[int, ...]
    reverse: bool

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The first core of each group, and the one after its last."""
        return list(pairwise(accumulate(self.groups, initial=0)))

    @property
    def name(self) -> str:
        """``"cores 1-2, 3"``: in the order in which they are met."""
        names = [f"{a + 1}-{b}" if b > a + 1 else f"{b}" for a, b in self.spans]
        return f"cores {', '.join(reversed(names) if self.reverse else names)}"

    @cached_property
    def sizes(self) -> Chain:
        """The sizes of the chain as it is passed."""
        chain, turn = self.chain, slice(None, None, -1 if self.reverse else 1)
        rows = tuple(prod(chain.row_factors[a:b]) for a, b in self.spans)
        cols = tuple(prod(chain.col_factors[a:b]) for a, b in self.spans)
        ranks = (*(chain.ranks[a] for a, _ in self.spans), chain.ranks[-1])
        return Chain(chain.rows, rows[turn], cols[turn], ranks[turn])

    @cached_property
    def steps(self) -> list[_Step]:
        """A ring's joint goes along as more columns, and is summed over at the last."""
        sizes, steps = self.sizes, []
        for k in range(sizes.order):
            i, left, j, right = sizes.core_shape(k)
            before, after = prod(sizes.row_factors[:k]), prod(sizes.col_factors[k + 1 :])
            if k == 0:
                steps.append(_Step(1, i * right * left, j, after))
            elif k == sizes.order - 1:
                steps.append(_Step(before, i, left * j * right, 1))
            else:
                steps.append(_Step(before, i * right, left * j, after * sizes.joint))
        return steps

    @property
    def in_order(self) -> bool:
        """Whether rows come out in the table's order: not reversed, or with one digit to reverse."""
        return not self.reverse or sum(factor > 1 for factor in self.chain.row_factors) <= 1

    @property
    def rows_of_a_digit(self) -> int:
        """Rows that come together; passed from the last digit all do, in another order."""
        return self.sizes.rows if self.reverse else prod(self.sizes.row_factors[1:])

    @property
    def cost(self) -> Cost:
        chain, ranks = self.chain, self.chain.ranks
        merging = 0
        for a, b in self.spans:
            for k in range(a + 1, b):
                numbers = prod(chain.row_factors[a : k + 1]) * prod(chain.col_factors[a : k + 1])
                merging += numbers * ranks[a] * ranks[k] * ranks[k + 1]
        counts = [prod(step) for step in self.steps]
        kept = sum(step.parts * step.height * step.width for step in self.steps[:-1])
        return Cost(
            multiply_adds=sum(counts),
            merging=merging,
            merged=self.sizes.numel,
            kept=kept + (0 if self.in_order else prod(chain.row_factors)),
            spared=sum(counts[:-1]),
            step=self.rows_of_a_digit,
        )

    def matrices(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Merged cores as they are passed, each the matrix of its step, the first split by its digit; differentiable.

        Shape:
            - cores: ``(I, R, J, R')`` each
            - output: ``(I, R' * R, J)``, then ``(I * R', R * J)`` each, at last ``(I, R * J * R')``
        """
        merged = []
        for a, b in self.spans:
            core = cores[a]
            for other in cores[a + 1 : b]:
                core = torch.einsum("iajb,kblc->ikajlc", core, other).flatten(3, 4).flatten(0, 1)
            merged.append(core)
        if self.reverse:
            merged = [core.transpose(1, 3) for core in reversed(merged)]
        *others, last = merged
        turned = [core.permute(0, 3, 1, 2) for core in others]
        matrices = [core.flatten(1, 2) if k == 0 else core.flatten(2, 3).flatten(0, 1) for k, core in enumerate(turned)]
        return [matrix.contiguous() for matrix in (*matrices, last.flatten(1))]


def scorings(structure: Scorable, chain: Chain) -> list[Scoring]:
    """Every route through the cores, which are the structure's tensors."""
    return [
        Scoring(route.name, cost, partial(ThroughCores, route, structure), halves=True)
        for route, cost in _routes(chain)
    ]


@lru_cache(maxsize=256)
def _routes(chain: Chain) -> list[tuple[Route, Cost]]:
    """Mergings into two or three groups, and none, whose cores stay well below the table; all would be too many."""
    order, most = chain.order, max(2 * chain.numel, chain.rows * chain.cols // 4)
    cuts = [*combinations(range(1, order), 1), *combinations(range(1, order), 2), tuple(range(1, order))]
    groups = [tuple(b - a for a, b in pairwise([0, *ends, order])) for ends in dict.fromkeys(cuts)]
    routes = [Route(chain, sizes, reverse) for sizes in groups for reverse in (False, True)]
    return [(route, route.cost) for route in routes if route.sizes.numel <= most]


class ThroughCores(Scores):
    """A chain's scores by a route; its tensors are the cores.

    A block is the rows from one value of the first digit to another, cut at the end of the table. On a reversed route
    it is all of them: they come out in another order, padded ones between them.
    """

    def __init__(self, route: Route, *given: Any) -> None:
        super().__init__(*given)
        self.route, self.sizes, self.step = route, route.sizes, route.rows_of_a_digit
        with recording(bool(self.trained)):
            self.graph = route.matrices(list(self.tensors.values()))
        self.matrices = [matrix.detach().to(self.dtype) for matrix in self.graph]
        self.matrix_grads = [torch.zeros_like(matrix, dtype=self.sum_dtype) for matrix in self.matrices if self.trained]
        # What went into each core after the first, for backward; by block where all is kept.
        self._tapes: dict[int, list[Tensor]] = {}
        self._on_tape: dict[int, tuple[int, Vectors]] = {}

    def turned(self, x: Tensor) -> Tensor:  # (n, cols) -> (cols, n)
        """For a reversed route the last column factor comes first."""
        if not self.route.reverse:
            return x.T.contiguous()
        return _reversed_digits(x.T, self.sizes.col_factors[::-1]).contiguous()

    def open(self, start: int, stop: int) -> None:
        super().open(start, stop)
        digits, each = self.sizes.row_factors[0], prod(self.sizes.row_factors[1:])
        self.digits = slice(0, digits) if self.route.reverse else slice(start // each, -(-stop // each))
        self.padded = (self.digits.stop - self.digits.start) * each

    def _tape(self, vectors: Vectors) -> list[Tensor]:
        """What goes into the steps after the first, ``(prefixes, depth, width)`` each, computed unless it is there."""
        key, entry, n = self.start if self.keeps else 0, (self.start, vectors), vectors.data.shape[1]
        digits, of = self.digits.stop - self.digits.start, self.sizes.row_factors[0]
        shapes = [(step.parts // of * digits, step.depth, step.width * n) for step in self.route.steps[1:]]
        if key not in self._tapes:  # the first block and the first vectors are the largest; others write over them
            self._tapes[key] = [vectors.data.new_empty(prod(shape)) for shape in shapes]
        tape = [room[: prod(shape)].view(shape) for room, shape in zip(self._tapes[key], shapes, strict=True)]
        if self._on_tape.get(key) != entry:
            self._on_tape[key] = entry
            first, joint = self.matrices[0][self.digits].flatten(0, 1), self.sizes.joint
            data = vectors.data.view(first.shape[1], -1)
            if joint == 1:
                torch.mm(first, data, out=tape[0].view(first.shape[0], -1))
            else:  # a ring's joint moves behind the columns
                made = (first @ data).view(-1, joint, data.shape[1] // n, n).transpose(1, 2)
                tape[0].view(made.shape).copy_(made)
            for k, matrix in enumerate(self.matrices[1:-1]):
                self._times(matrix, tape[k], tape[k + 1].view(tape[k].shape[0], matrix.shape[0], -1))
        return tape

    def write(self, vectors: Vectors, out: Tensor) -> None:
        last, matrix, (count, n) = self._tape(vectors)[-1], self.matrices[-1], out.shape
        as_asked = self.route.in_order and self.padded == count
        rows = out if as_asked else out.new_empty(self.padded, n)
        self._times(matrix, last, rows.view(last.shape[0], matrix.shape[0], n))
        if not as_asked:
            rows = rows if self.route.in_order else _reversed_digits(rows, self.sizes.row_factors)
            out.copy_(rows[:count])

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        tape, (count, n) = self._tape(vectors), grad.shape
        if self.padded != count:
            grad = torch.cat([grad, grad.new_zeros(self.padded - count, n)])
        if not self.route.in_order:
            grad = _reversed_digits(grad, self.sizes.row_factors[::-1])
        for k in reversed(range(1, self.sizes.order)):
            matrix, into = self.matrices[k], tape[k - 1]
            grad = grad.reshape(into.shape[0], matrix.shape[0], -1)
            if self.trained:
                self._add_outer(self.matrix_grads[k], grad, into)
            grad = self._transposed_times(matrix, grad)
        first, data = self.matrices[0][self.digits], vectors.data.view(self.matrices[0].shape[2], -1)
        height, joint = first.shape[0] * first.shape[1], self.sizes.joint
        if joint > 1:  # behind the columns, where the first step moved it
            grad = grad.reshape(height // joint, -1, joint, n).transpose(1, 2)
        grad = grad.reshape(height, -1)
        if vectors.grad is not None:
            add_product(vectors.grad.view(data.shape), first.flatten(0, 1).T, grad)
        if self.trained:
            add_product(self.matrix_grads[0][self.digits].view(-1, first.shape[2]), grad, data.T)

    def _times(self, matrix: Tensor, x: Tensor, out: Tensor) -> None:  # (h, d), (p, d, w) -> (p, h, w)
        if x.shape[0] > 1 and serving.serves(self.impl, x):
            serving.products().times(matrix, x, out)
        else:
            _times(matrix, x, out)

    def _transposed_times(self, matrix: Tensor, grad: Tensor) -> Tensor:  # (h, d), (p, h, w) -> (p, d, w)
        if grad.shape[0] == 1 or not serving.serves(self.impl, grad):
            return _transposed_times(matrix, grad)
        made = grad.new_empty(grad.shape[0], matrix.shape[1], grad.shape[2])
        serving.products().times(matrix.T, grad, made)
        return made

    def _add_outer(self, total: Tensor, grad: Tensor, x: Tensor) -> None:  # (h, d), (p, h, w), (p, d, w)
        if serving.serves(self.impl, grad):
            serving.products().add_outer(total, grad, x)
        else:
            _add_outer(total, grad, x)

    def gradients(self) -> list[Tensor | None]:
        if self.trained:
            # A core that is frozen may be alone in its matrix.
            pairs = [(m, grad) for m, grad in zip(self.graph, self.matrix_grads, strict=True) if m.requires_grad]
            leaves = [self.tensors[name] for name in self.trained]
            self.add(self.trained, torch.autograd.grad([m for m, _ in pairs], leaves, [grad for _, grad in pairs]))
        return super().gradients()


def _reversed_digits(tensor: Tensor, factors: Sequence[int]) -> Tensor:  # (prod(factors), n) -> (prod(factors), n)
    """The digits of the first axis in reverse."""
    n, order = tensor.shape[1], len(factors)
    return tensor.reshape(*factors, n).permute(*reversed(range(order)), order).reshape(-1, n)


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
        add_product(total, grad[0], x[0].T)
    elif w * (h + d) < h * d:
        add_product(total, grad.transpose(0, 1).reshape(h, p * w), x.transpose(1, 2).reshape(p * w, d))
    else:
        total += torch.bmm(grad, x.transpose(1, 2)).sum(0)
