"""Hashed tables: rows share the rows of a smaller table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.gathered import gathering
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.checks import require_bool, require_number, require_positive
from tensorbed.dispatch import working_dtype
from tensorbed.progress import track
from tensorbed.structures.base import Params, Structure, TensorSpec, mean_square, scale_to_std
from tensorbed.structures.formats import Budget, Fit, Format, OutOfReachError, largest, written
from tensorbed.structures.hashing import check_constants, constants_of, draw_constants, hashed
from tensorbed.structures.registry import register

_BLOCK = 2**22  # numbers of the table that a fit makes at once
_STEPS = 16  # of conjugate gradients, where rows are sums


@register("hashed")
@dataclass(frozen=True)
class HashedMatrix(Structure):
    r"""Each row the sum of ``hashes`` rows of a smaller table, which universal hashes of its number choose.

    .. math:: E[i] = \sum_{j=1}^{k} s_j(i)\, T[h_j(i)]

    where the signs :math:`s_j`, from hashes of their own, are 1 unless asked for. The hashing trick of `Feature hashing
    for large scale multitask learning <https://arxiv.org/abs/0902.2206>`_ (Weinberger et al., 2009).

    Shape:
        - table: ``(buckets, cols)``
        - constants: ``(hashes, 3)`` int64, or twice as many with signs
    """

    fits_exactly = False  # a fit has hashes of its own

    buckets: int
    hashes: int = 1
    signed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self.buckets, "buckets")
        require_positive(self.hashes, "hashes")
        if self.buckets > self.rows:
            raise OutOfReachError(
                f"buckets={self.buckets} for a table of {self.rows} rows: rows share buckets, so that there are at "
                f"most {self.rows}; use tb.Dense() for a row each."
            )

    def tensors(self) -> tuple[TensorSpec, ...]:
        constants = constants_of(self.hashes * (2 if self.signed else 1))
        return TensorSpec("table", (self.buckets, self.cols)), constants

    def check_values(self, p: Params) -> None:
        check_constants(p["constants"])

    def places(self, p: Params, index: Tensor) -> tuple[Tensor, Tensor | None]:  # (n,) -> (n, hashes) each
        """Which rows of the smaller table a row is the sum of, and their signs if there are any."""
        constants = p["constants"]
        places = hashed(constants[: self.hashes], index, self.rows, self.buckets)
        return places, 1 - 2 * hashed(constants[self.hashes :], index, self.rows, 2) if self.signed else None

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return _summed(p["table"], *self.places(p, index))

    def rows_of(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return _summed(*self._widened_rows(p, index)).to(p["table"].dtype)

    def eager_rows(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """By torch's bag kernel, which writes sums alone and has no second derivative."""
        table, places, signs = self._widened_rows(p, index)
        if places.shape[1] == 1 and signs is None:
            return table.index_select(0, places[:, 0]).to(p["table"].dtype)
        signs = None if signs is None else signs.to(table.dtype)
        return F.embedding_bag(places, table, mode="sum", per_sample_weights=signs).to(p["table"].dtype)

    def _widened_rows(self, p: Params, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of half precision only rows that are asked for, unless their gradients are to be added up."""
        table, (places, signs) = p["table"], self.places(p, index)
        if table.dtype.itemsize < 4 and not (table.requires_grad and torch.is_grad_enabled()):
            table = table.index_select(0, places.reshape(-1))
            places = torch.arange(table.shape[0], device=table.device).view(places.shape)
        return table.to(working_dtype(table)), places, signs

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return self.take(p, torch.arange(self.rows, device=p["table"].device))

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        """New rows are sums as all others are."""
        return replace(self, rows=rows), dict(p)

    @property
    def row_multiply_adds(self) -> int:
        return self.hashes * self.cols

    def scorings(self) -> list[Scoring]:
        return [*super().scorings(), gathering(self, self.buckets, self.hashes)]

    def entry_scores(self, p: Params, x: Tensor) -> Tensor:  # (n, cols) -> (buckets, n)
        """What each bucket scores."""
        return p["table"] @ x.T

    def entries_of(self, p: Params, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Whose scores a block of rows sums."""
        return self.places(p, torch.arange(start, stop, device=p["table"].device))

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        squares = torch.zeros(())
        while squares == 0:  # of few rows all may be sums that cancel
            draw_constants(p["constants"], generator)
            p["table"].normal_(generator=generator)
            squares = mean_square(self, p, generator)
        scale_to_std({"table": p["table"]}, squares, 1, std)

    def describe(self) -> str:
        sums = f", {'signed ' if self.signed else ''}sums of {self.hashes}" if self.hashes > 1 or self.signed else ""
        return f"buckets={self.buckets}{sums}"


def _summed(table: Tensor, places: Tensor, signs: Tensor | None) -> Tensor:  # (b, cols), (n, k), (n, k) -> (n, cols)
    """In plain differentiable PyTorch."""
    rows = [table.index_select(0, place) for place in places.unbind(1)]
    if signs is not None:
        rows = [row * sign[:, None].to(row.dtype) for row, sign in zip(rows, signs.unbind(1), strict=True)]
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


@dataclass(frozen=True, kw_only=True, repr=False)
class Hashed(Format):
    """The hashing trick: each row is a row of a smaller table, or a sum of several, chosen by a hash of its number.

    Give ``buckets`` or ``ratio``.

    Args:
        buckets: how many rows the smaller table has.
        ratio: the most buckets at which the dense table takes at least this many times the stored bytes.
        hashes: how many rows of the smaller table are summed; with two or more, few rows are equal.
        signed: whether they are summed with signs, so that what rows share cancels on average.

    Example::

        >>> layer = tb.Embedding(25_000, 256, tb.Hashed(buckets=1000))
        >>> round(layer.compression_ratio, 1)
        25.0
    """

    squares_numbers = True

    buckets: int | None = None
    ratio: float | None = None
    hashes: int = 1
    signed: bool = False

    __repr__ = written

    def __post_init__(self) -> None:
        if (self.buckets is None) == (self.ratio is None):
            raise ValueError("Hashed: give its size as buckets=, or as ratio=, and not as both.")
        if self.buckets is not None:
            require_positive(self.buckets, "buckets")
        if self.ratio is not None:
            require_number(self.ratio, "ratio", low=0)
        require_positive(self.hashes, "hashes")
        require_bool(self.signed, "signed")

    def bind(self, budget: Budget) -> HashedMatrix:
        def bound(buckets: int) -> HashedMatrix:
            return HashedMatrix(budget.rows, budget.cols, buckets, self.hashes, self.signed)

        if self.ratio is not None:
            return largest(self, range(1, budget.rows + 1), bound, budget, self.ratio, "with one bucket")
        assert self.buckets is not None
        return bound(self.buckets)

    def sample(self, table: Tensor, structure: Structure) -> tuple[Tensor, Hashed]:
        """All of it: how many rows share a bucket tells the error."""
        return table, self

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """Least squares: of one hash the mean of the rows that share a bucket, of more by conjugate gradients."""
        structure, generator = self.bind(budget), torch.Generator(table.device).manual_seed(0)
        wide = table.to(working_dtype(table))
        spec = structure.tensors()[1]
        constants = torch.empty(spec.shape, dtype=spec.dtype, device=table.device)
        problem = _LeastSquares(structure, draw_constants(constants, generator))
        steps = 1 if structure.hashes == 1 else _STEPS
        return Fit(structure, {"table": problem.solved(wide, steps), "constants": constants})

    def multiplied(self, params: Params) -> list[str]:
        return ["table"]


@dataclass(frozen=True)
class _LeastSquares:
    """The smaller table ``T`` of least ``||A T - W||_F``, where ``A`` sums rows of it; a block of rows at a time."""

    structure: HashedMatrix
    constants: Tensor

    def solved(self, table: Tensor, steps: int) -> Tensor:  # (rows, cols) -> (buckets, cols)
        """Conjugate gradients, preconditioned by the rows of each bucket: for one hash the first step is exact."""
        residual, counts = self._sums(table)
        found, ready = torch.zeros_like(residual), residual / counts
        direction, size = ready, _inner(residual, ready)
        for _ in track(range(steps), "fitting buckets"):
            if size <= 0:
                break
            image, _ = self._sums(direction, made=True)
            length = size / _inner(direction, image)
            found, residual = found + length * direction, residual - length * image
            ready = residual / counts
            before, size = size, _inner(residual, ready)
            direction = ready + size / before * direction
        return found

    def _sums(self, given: Tensor, *, made: bool = False) -> tuple[Tensor, Tensor]:  # -> (buckets, cols), (buckets, 1)
        """``A.T @ given``, or ``A.T @ A @ given`` where rows are made of it, and how many rows each bucket has."""
        structure, device = self.structure, given.device
        total = torch.zeros(structure.buckets, structure.cols, dtype=given.dtype, device=device)
        counts = torch.zeros(structure.buckets, 1, dtype=given.dtype, device=device)
        height = max(1, _BLOCK // structure.cols)
        for start in range(0, structure.rows, height):
            index = torch.arange(start, min(start + height, structure.rows), device=device)
            places, signs = structure.places({"constants": self.constants}, index)
            rows = _summed(given, places, signs) if made else given[start : start + height]
            for j, place in enumerate(places.unbind(1)):
                total.index_add_(0, place, rows if signs is None else rows * signs[:, j, None].to(rows.dtype))
                counts.index_add_(0, place, torch.ones_like(counts[:1]).expand(place.shape[0], 1))
        return total, counts.clamp_min(1)


def _inner(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other.double()).sum())
