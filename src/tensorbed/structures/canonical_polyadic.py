"""The canonical polyadic table: a sum of Kronecker products, word2ketXS of Panahi et al. (2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain
from tensorbed.backends.pairs import kernels_of_pairs, pair_products, unique_numbers
from tensorbed.backends.scores import through_factors
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.checks import require_positive
from tensorbed.decompose.canonical import canonical_polyadic
from tensorbed.indexing import digits, unravel
from tensorbed.shapes import check_shape
from tensorbed.structures.base import Params, Structure, TensorSpec, rounded, scale_to_std
from tensorbed.structures.chain import FactorsFormat, resized_first
from tensorbed.structures.explanation import Explanation
from tensorbed.structures.formats import Budget, Fit
from tensorbed.structures.registry import register


@register("canonical_polyadic")
@dataclass(frozen=True)
class CanonicalPolyadicMatrix(Structure):
    r"""A sum of ``rank`` Kronecker products of ``N`` small matrices: a tensor train whose cores are diagonal.

    .. math:: E[(i_1 \dots i_N), (j_1 \dots j_N)] = \sum_{r=1}^R \prod_{k=1}^N F^{(k)}[i_k, j_k, r]

    Whatever the order, a row is the product of two matrices: the first factors of each term multiplied, and the last.
    Those are made once for all rows of a batch that have them in common.

    Shape:
        - factor_k: ``(I_k, J_k, R)``
    """

    fits_exactly = False  # alternating least squares may end elsewhere

    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    rank: int
    specs: tuple[TensorSpec, ...] = field(init=False, repr=False, compare=False)
    cut: int = field(init=False, repr=False, compare=False)  # how many factors are in the first of the two matrices

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shape((self.row_factors, self.col_factors), self.rows, self.cols)
        require_positive(self.rank, "rank")
        sizes = zip(self.row_factors, self.col_factors, strict=True)
        specs = tuple(TensorSpec(f"factor_{k}", (i, j, self.rank)) for k, (i, j) in enumerate(sizes))
        cut = min(range(1, len(specs)), key=lambda cut: self.halves(cut).numel)
        self.hold(specs=specs, cut=cut)

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def halves(self, cut: int) -> Chain:
        """The chain of two cores that the factors before the cut, multiplied, and those after it are."""
        i, j = self.row_factors, self.col_factors
        two_rows, two_cols = ((math.prod(f[:cut]), math.prod(f[cut:])) for f in (i, j))
        return Chain(self.rows, two_rows, two_cols, (1, self.rank, 1))

    def _factors(self, p: Params) -> tuple[list[Tensor], list[Tensor]]:
        """Before the cut and after it."""
        factors = [p[spec.name] for spec in self.specs]
        return factors[: self.cut], factors[self.cut :]

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        first, last = self._factors(p)
        at_first, at_last = digits(index, self.halves(self.cut).row_factors)
        left, right = _multiplied(first, at_first), _multiplied(last, at_last)
        return torch.bmm(left, right.transpose(1, 2)).reshape(index.shape[0], self.cols)

    def eager_rows(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """As :meth:`take`, each half once for all rows that have it, and their products by the kernels."""
        if index.shape[0] == 0:
            return self.rows_of(p, index)
        first, last = self._factors(self.widened(p))
        count, below = self.halves(self.cut).row_factors
        number = torch.div(index, below, rounding_mode="floor")
        used_first, at_first = unique_numbers(number, count)
        used_last, at_last = unique_numbers(index - number * below, below)
        left, right = _multiplied(first, used_first), _multiplied(last, used_last)
        pair = at_first * used_last.shape[0] + at_last
        return rounded(pair_products(left, right.transpose(1, 2), pair).view(-1, self.cols), p)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        halves, device = self.halves(self.cut).row_factors, p["factor_0"].device
        pairs = zip(self._factors(p), halves, strict=True)
        left, right = (_multiplied(factors, torch.arange(count, device=device)) for factors, count in pairs)
        return torch.einsum("amr,bkr->abmk", left, right).reshape(-1, self.cols)[: self.rows]

    def block(self, p: Params, start: int, stop: int, impl: str) -> Tensor:  # -> (stop - start, cols)
        """Neighbours are one product: the last factor meets all that the others multiply to, and is not multiplied."""
        last = self.row_factors[-1]
        if stop - start < last:
            return super().block(p, start, stop, impl)
        *first, right = (self.widened(p)[spec.name] for spec in self.specs)
        numbers = torch.arange(start // last, -(-stop // last), device=right.device)
        rows = torch.einsum("amr,bkr->abmk", _multiplied(first, numbers), right).reshape(-1, self.cols)
        before = start % last
        return rounded(rows[before : before + stop - start], p)

    @property
    def row_multiply_adds(self) -> int:
        merging = sum(math.prod(self.col_factors[: k + 1]) for k in range(1, self.cut))
        merging += sum(math.prod(self.col_factors[self.cut : k + 1]) for k in range(self.cut + 1, len(self.specs)))
        return (merging + self.cols) * self.rank

    def explain(self, index: Tensor, impl: str) -> Explanation:  # (n,)
        told = super().explain(index, impl)
        if impl != "auto" or not index.shape[0]:
            return told
        kernels = kernels_of_pairs(index.device)
        multiply_adds = told.unique_rows * self.row_multiply_adds
        return replace(told, path=kernels.name, why=kernels.why(index.device), multiply_adds=multiply_adds)

    def scorings(self) -> list[Scoring]:
        cuts = [(cut, self.halves(cut)) for cut in range(1, len(self.specs))]
        return [self.by_rows(self.rows * self.cols * self.rank), *through_factors.scorings(self, cuts)]

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        first, tensors = resized_first("factor_0", self.row_factors, p, rows)
        return replace(self, rows=rows, row_factors=(first, *self.row_factors[1:])), tensors

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        """Standard normal factors give entries of variance ``R``; then scaled to the exact norm of the real rows."""
        factor_std = (std / self.rank**0.5) ** (1 / len(self.specs))
        for spec in self.specs:
            p[spec.name].normal_(std=factor_std, generator=generator)
        scale_to_std(p, self.sum_of_squares(p), self.rows * self.cols, std)

    def sum_of_squares(self, p: Params) -> Tensor:  # -> ()
        r"""Squared Frobenius norm of the real rows, :math:`\sum_{r,s} \prod_k (F^{(k)\top} F^{(k)})[r, s]` of all.

        From the last factor to the first two states are carried, ``whole`` for all rows of the suffix and ``part`` for
        those below the suffix of ``rows``. A digit below that of ``rows`` frees the rest.
        """
        bound = self.row_factors  # past the end, so that all digits lie below, where every padded row is real
        if self.rows < math.prod(bound):
            bound = unravel(self.rows, bound)
        whole = torch.ones((), dtype=torch.float64, device=p["factor_0"].device)
        part = torch.zeros_like(whole)
        for spec, digit in zip(reversed(self.specs), reversed(bound), strict=True):
            factor = p[spec.name].detach().double()
            below, at, above = (_gram(slices) for slices in factor.tensor_split((digit, digit + 1)))
            whole, part = (below + at + above) * whole, below * whole + at * part
        return part.sum()

    def describe(self) -> str:
        return f"shape={self.row_factors} x {self.col_factors}, rank={self.rank}"


def _multiplied(factors: Sequence[Tensor], number: Tensor) -> Tensor:  # (I_k, J_k, R) each, (n,) -> (n, prod J_k, R)
    """The slices that the digits of a number name, multiplied term by term."""
    digit = digits(number, [factor.shape[0] for factor in factors])
    made = factors[0].index_select(0, digit[0])
    for factor, at in zip(factors[1:], digit[1:], strict=True):
        made = (made[:, :, None] * factor.index_select(0, at)[:, None]).flatten(1, 2)
    return made


def _gram(slices: Tensor) -> Tensor:  # (i, J, R) -> (R, R)
    flat = slices.flatten(0, 1)
    return flat.T @ flat


@dataclass(frozen=True, kw_only=True, repr=False)
class CanonicalPolyadic(FactorsFormat[CanonicalPolyadicMatrix]):
    """A sum of Kronecker products, known as word2ketXS: a tensor train whose cores are diagonal.

    Its size grows with the rank and not with the square of the rank. Give ``rank`` or ``ratio``.

    Args:
        rank: how many terms there are; 16 when nothing is said.
        ratio: the largest rank at which the dense table takes at least this many times the stored bytes.
        rel_error: refused, because no fit of this format keeps an error.
        order: how many factors the rows and the columns have.
        shape: the factors themselves, ``((I_1, ..., I_N), (J_1, ..., J_N))``; by default ``tb.suggest_shape``.

    Example::

        >>> layer = tb.Embedding(25_000, 256, tb.CanonicalPolyadic(rank=64))
        >>> sum(parameter.numel() for parameter in layer.parameters())
        42240
    """

    sizes: ClassVar[tuple[str, ...]] = ("rank", "ratio")
    squares_numbers = True

    def with_rank(self, budget: Budget, rank: int, *, clip: bool) -> CanonicalPolyadicMatrix:
        row_factors, col_factors = self.factors(budget)
        if clip:  # no tensor needs more terms than all its sizes but the largest multiply to
            sizes = [i * j for i, j in zip(row_factors, col_factors, strict=True)]
            rank = min(rank, math.prod(sizes) // max(sizes))
        return CanonicalPolyadicMatrix(budget.rows, budget.cols, row_factors, col_factors, rank)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """By alternating least squares."""
        structure = self.target(budget)

        def stored(found: Sequence[Tensor]) -> Fit:
            pairs = zip(found, structure.specs, strict=True)
            return Fit(structure, structure.named([factor.reshape(spec.shape) for factor, spec in pairs]))

        return self.fit_filled(table, budget, partial(canonical_polyadic, rank=structure.rank), stored)
