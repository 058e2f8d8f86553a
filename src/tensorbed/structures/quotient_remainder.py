"""Two small tables, by quotient and by remainder of the row number: no two rows have both in common."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.gathered import gathering
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.checks import require_number, require_positive
from tensorbed.dispatch import working_dtype
from tensorbed.progress import track
from tensorbed.structures.base import Params, Structure, TensorSpec, scale_to_std, with_rows
from tensorbed.structures.formats import Budget, Fit, Format, OutOfReachError, largest, written
from tensorbed.structures.registry import register

MULTIPLY, ADD, CONCAT = "multiply", "add", "concat"
_WAYS = (MULTIPLY, ADD, CONCAT)
_SWEEPS = 20  # of alternating least squares
_BLOCK = 2**22  # numbers of the table that a fit copies at once


@register("quotient_remainder")
@dataclass(frozen=True)
class QuotientRemainderMatrix(Structure):
    r"""Each row a row of one small table, by quotient, with a row of another, by remainder.

    .. math:: E[i] = Q[\lfloor i / b \rfloor] \circ R[i \bmod b]

    where :math:`b` is the number of ``buckets`` and :math:`\circ` multiplies the two entry by entry, adds them, or puts
    the second after the first. From `Compositional embeddings using complementary partitions
    <https://arxiv.org/abs/1909.02107>`_ (Shi et al., 2019).

    Shape:
        - quotient: ``(ceil(rows / buckets), cols)``, of concatenated rows the first half of the columns
        - remainder: ``(buckets, cols)``, the second half
    """

    buckets: int
    combine: str = MULTIPLY
    quotients: int = field(init=False, repr=False, compare=False)
    width: int = field(init=False, repr=False, compare=False)  # of the first table

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self.buckets, "buckets")
        _check_combine(self.combine)
        if self.buckets > self.rows:
            raise OutOfReachError(
                f"buckets={self.buckets} for a table of {self.rows} rows: there are at most {self.rows} remainders; "
                f"about {isqrt(self.rows - 1) + 1} take the fewest numbers."
            )
        concat = self.combine == CONCAT
        if concat and self.cols < 2:
            raise ValueError('combine="concat" for embedding_dim=1: a half of each needs 2 columns; use "multiply".')
        self.hold(quotients=-(-self.rows // self.buckets), width=-(-self.cols // 2) if concat else self.cols)

    def over_remainders(self, numbers: Tensor) -> Tensor:  # (buckets, k) -> (quotients, k)
        """The sum over the remainders of each quotient, of which the last may not have all."""
        last = self.rows - (self.quotients - 1) * self.buckets
        whole = numbers.sum(0, keepdim=True).expand(self.quotients - 1, -1)
        return torch.cat([whole, numbers[:last].sum(0, keepdim=True)])

    def over_quotients(self, numbers: Tensor) -> Tensor:  # (quotients, k) -> (buckets, k)
        """The sum over the quotients of each remainder."""
        last = self.rows - (self.quotients - 1) * self.buckets
        whole = numbers[:-1].sum(0, keepdim=True)
        return torch.cat([(whole + numbers[-1]).expand(last, -1), whole.expand(self.buckets - last, -1)])

    def tensors(self) -> tuple[TensorSpec, ...]:
        rest = self.cols - self.width if self.combine == CONCAT else self.cols
        return TensorSpec("quotient", (self.quotients, self.width)), TensorSpec("remainder", (self.buckets, rest))

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        place = torch.div(index, self.buckets, rounding_mode="floor")
        # Not index_select, whose gradient is slow to add rows that are a half of others.
        return self._combined(F.embedding(place, p["quotient"]), F.embedding(index % self.buckets, p["remainder"]))

    def _combined(self, quotient: Tensor, remainder: Tensor) -> Tensor:  # (..., width), (..., rest) -> (..., cols)
        if self.combine == CONCAT:
            return torch.cat([quotient, remainder], -1)
        return quotient * remainder if self.combine == MULTIPLY else quotient + remainder

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        size = (self.quotients, self.buckets, -1)
        pair = p["quotient"][:, None].expand(size), p["remainder"][None].expand(size)
        return self._combined(*pair).reshape(-1, self.cols)[: self.rows]

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        """New quotients have the mean of the others."""
        made, quotient = replace(self, rows=rows), p["quotient"]
        mean = quotient.double().mean(0, keepdim=True)
        return made, {"quotient": with_rows(quotient, made.quotients, mean), "remainder": p["remainder"]}

    @property
    def row_multiply_adds(self) -> int:
        return self.cols

    def scorings(self) -> list[Scoring]:
        """Products of two tables have no scores of their entries; sums and halves do."""
        if self.combine == MULTIPLY:
            return super().scorings()
        return [*super().scorings(), gathering(self, self.quotients + self.buckets, 2)]

    def entry_scores(self, p: Params, x: Tensor) -> Tensor:  # (n, cols) -> (quotients + buckets, n)
        """What each row of the two tables scores."""
        concat = self.combine == CONCAT
        first, second = (x[:, : self.width], x[:, self.width :]) if concat else (x, x)
        return torch.cat([p["quotient"] @ first.T, p["remainder"] @ second.T])

    def entries_of(self, p: Params, start: int, stop: int) -> tuple[Tensor, None]:
        """Whose scores a block of rows sums."""
        index = torch.arange(start, stop, device=p["quotient"].device)
        place = torch.div(index, self.buckets, rounding_mode="floor")
        return torch.stack([place, self.quotients + index % self.buckets], 1), None

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        for tensor in p.values():
            tensor.normal_(generator=generator)
        squares, entries = self._sum_of_squares(p), self.rows * self.cols
        for shared in [p] if self.combine == MULTIPLY else [{name: p[name]} for name in p]:
            scale_to_std(shared, squares, entries, std)

    def _sum_of_squares(self, p: Params) -> Tensor:  # -> ()
        """Of all entries of the table."""
        quotient, remainder = p["quotient"].double(), p["remainder"].double()
        if self.combine == MULTIPLY:
            return (quotient.square() * self.over_remainders(remainder.square())).sum()
        counts, present = (
            self.over_remainders(torch.ones_like(remainder[:, :1])),
            self.over_quotients(torch.ones_like(quotient[:, :1])),
        )
        squares = (quotient.square() * counts).sum() + (remainder.square() * present).sum()
        return squares if self.combine == CONCAT else squares + 2 * (quotient * self.over_remainders(remainder)).sum()

    def describe(self) -> str:
        return f"{self.quotients} quotients {self.combine} {self.buckets} remainders"


def _check_combine(combine: object) -> None:
    if combine not in _WAYS:
        raise ValueError(f"combine={combine!r}: choose one of {', '.join(map(repr, _WAYS))}.")


@dataclass(frozen=True, kw_only=True, repr=False)
class QuotientRemainder(Format):
    """Two small tables, one for ``i // buckets`` and one for ``i % buckets``, so that no two rows are the same.

    Args:
        buckets: how many remainders there are; by default about the root of the number of rows, which takes the fewest
            numbers.
        ratio: instead of that, the most buckets at which the dense table takes at least this many times the stored
            bytes.
        combine: ``"multiply"`` the two rows entry by entry, ``"add"`` them, or ``"concat"`` half the columns of each.

    Example::

        >>> tb.Embedding(25_000, 256, tb.QuotientRemainder()).structure.describe()
        '158 quotients multiply 159 remainders'
    """

    buckets: int | None = None
    ratio: float | None = None
    combine: str = MULTIPLY

    __repr__ = written

    def __post_init__(self) -> None:
        if self.buckets is not None and self.ratio is not None:
            raise ValueError("QuotientRemainder: buckets and ratio both set the size; give one.")
        if self.buckets is not None:
            require_positive(self.buckets, "buckets")
        if self.ratio is not None:
            require_number(self.ratio, "ratio", low=0)
        _check_combine(self.combine)

    @property
    def squares_numbers(self) -> bool:  # type: ignore[override]
        return self.combine == MULTIPLY

    def bind(self, budget: Budget) -> QuotientRemainderMatrix:
        def bound(buckets: int) -> QuotientRemainderMatrix:
            return QuotientRemainderMatrix(budget.rows, budget.cols, buckets, self.combine)

        fewest = isqrt(budget.rows - 1) + 1  # from the root on, one more bucket never takes fewer numbers
        if self.ratio is not None:
            sizes = range(fewest, budget.rows + 1)
            return largest(self, sizes, bound, budget, self.ratio, "with as many remainders as quotients")
        return bound(self.buckets or fewest)

    def sample(self, table: Tensor, structure: Structure) -> tuple[Tensor, QuotientRemainder]:
        """All of it: how many rows share a quotient tells the error."""
        return table, self

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """Least squares: halves are means; sums and products by sweeps in which one table is fitted to the other."""
        structure = self.bind(budget)
        if self.combine == MULTIPLY:
            return Fit(structure, structure.named(_factors(structure, table)))
        by_quotient, by_remainder = _sums(structure, table)
        counts = structure.over_remainders(torch.ones_like(by_remainder[:, :1]))
        present = structure.over_quotients(torch.ones_like(by_quotient[:, :1]))
        if self.combine == CONCAT:
            halves = by_quotient[:, : structure.width] / counts, by_remainder[:, structure.width :] / present
            return Fit(structure, structure.named(halves))
        remainder = torch.zeros_like(by_remainder)
        for _ in range(_SWEEPS):  # the first is exact but for a last quotient that has not all remainders
            quotient = (by_quotient - structure.over_remainders(remainder)) / counts
            remainder = (by_remainder - structure.over_quotients(quotient)) / present
        return Fit(structure, structure.named((quotient, remainder)))


def _sums(structure: QuotientRemainderMatrix, table: Tensor) -> tuple[Tensor, Tensor]:  # float64
    """Of the rows of each quotient, ``(quotients, cols)``, and of each remainder, ``(buckets, cols)``."""
    whole = (structure.quotients - 1) * structure.buckets
    grid, last = table[:whole].view(-1, structure.buckets, structure.cols), table[whole:].double()
    by_remainder = grid.sum(0, dtype=torch.float64)
    by_remainder[: last.shape[0]] += last
    return torch.cat([grid.sum(1, dtype=torch.float64), last.sum(0, keepdim=True)]), by_remainder


def _factors(structure: QuotientRemainderMatrix, table: Tensor) -> tuple[Tensor, Tensor]:
    """Of each column, as a matrix of quotients and remainders, the nearest of rank one; its scale in equal shares."""
    wide = max(1, _BLOCK // (structure.quotients * structure.buckets))
    found = [_factors_of(structure, part) for part in track(table.split(wide, dim=1), "fitting products")]
    quotients, remainders = zip(*found, strict=True)
    return torch.cat(quotients, 1), torch.cat(remainders, 1)


def _factors_of(structure: QuotientRemainderMatrix, part: Tensor) -> tuple[Tensor, Tensor]:  # (rows, k)
    sizes = (structure.quotients, structure.buckets)
    columns = F.pad(part.T.to(working_dtype(part)), (0, sizes[0] * sizes[1] - structure.rows)).view(-1, *sizes)
    loudest = columns.square().sum(2).argmax(1)  # the quotient to begin with, of each column
    remainder = columns[torch.arange(columns.shape[0], device=part.device), loudest].T
    for _ in range(_SWEEPS):
        quotient = _ratio(_times(columns, remainder), structure.over_remainders(remainder.square()))
        remainder = _ratio(_times(columns.mT, quotient), structure.over_quotients(quotient.square()))
    sizes_of = [torch.linalg.vector_norm(one, dim=0, dtype=torch.float64) for one in (quotient, remainder)]
    share = torch.where(sizes_of[0] > 0, (sizes_of[1] / sizes_of[0]).sqrt(), 1)
    return quotient * share, remainder / torch.where(share > 0, share, 1)


def _times(columns: Tensor, other: Tensor) -> Tensor:  # (k, a, b), (b, k) -> (a, k)
    return torch.bmm(columns, other.T[:, :, None])[:, :, 0].T


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Where there is nothing to divide by, zero."""
    return torch.where(below > 0, above / below, 0)
