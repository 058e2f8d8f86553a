"""The low-rank factorisation: the baseline of the paper."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, ChainOfCores
from tensorbed.backends.scores.scoring import Cost, Scoring
from tensorbed.checks import require_positive
from tensorbed.decompose.feedback import root_of_metric
from tensorbed.decompose.truncate import Truncated, truncate
from tensorbed.structures.base import Params, Structure, TensorSpec, scale_to_std, with_rows
from tensorbed.structures.formats import Budget, Fit, RankedFormat, Use
from tensorbed.structures.registry import register


@register("low_rank")
@dataclass(frozen=True)
class LowRankMatrix(Structure):
    """``U @ V.T``: the factorised table every structured one is measured against. Its matrix rank is ``rank``.

    Shape:
        - u: ``(rows, rank)``
        - v: ``(cols, rank)``
    """

    making = ChainOfCores
    row_tensor = "u"

    rank: int
    chain: Chain = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self.rank, "rank")
        self.hold(chain=Chain(self.rows, (self.rows, 1), (1, self.cols), (1, self.rank, 1)))

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("u", (self.rows, self.rank)), TensorSpec("v", (self.cols, self.rank)))

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return p["u"].index_select(0, index) @ p["v"].T

    def rows_of(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """Of the large factor only rows that are asked for are widened, unless their gradients are to be added up."""
        u = p["u"]
        if u.dtype.itemsize < 4 and not (u.requires_grad and torch.is_grad_enabled()):
            p, index = {**p, "u": u.index_select(0, index)}, torch.arange(index.shape[0], device=index.device)
        return super().rows_of(p, index)

    def made_of(self, p: Params) -> ChainOfCores:
        """Two cores: each row a slice of the first, and one slice of the last that all share."""
        u, v = p["u"].reshape(self.rows, 1, 1, self.rank), p["v"].T.reshape(1, self.rank, self.cols, 1)
        return ChainOfCores(self.chain, [u, v])

    def scorings(self) -> list[Scoring]:
        cost = Cost(multiply_adds=(self.rows + self.cols) * self.rank)
        return [replace(self.by_rows(0), name="factors", cost=cost)]

    def turned(self, p: Params, x: Tensor) -> Tensor:  # (n, cols) -> (n, rank)
        return x @ p["v"]

    def block(self, p: Params, start: int, stop: int, impl: str) -> Tensor:  # -> (stop - start, rank)
        return p["u"][start:stop]

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return p["u"] @ p["v"].T

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        u = p["u"]
        mean = u.double().mean(0, keepdim=True)
        return replace(self, rows=rows), {"u": with_rows(u, rows, mean), "v": p["v"]}

    @property
    def row_multiply_adds(self) -> int:
        return self.rank * self.cols

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        # A sum of R products of two independent normals has variance R: the paper's equation at order 2.
        for tensor in p.values():
            tensor.normal_(std=(std / self.rank**0.5) ** 0.5, generator=generator)
        u, v = p["u"].double(), p["v"].double()
        scale_to_std(p, ((u.T @ u) * (v.T @ v)).sum(), self.rows * self.cols, std)

    def describe(self) -> str:
        note = f" (at most {most} useful)" if self.rank > (most := min(self.rows, self.cols)) else ""
        return f"rank={self.rank}{note}"


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRank(RankedFormat[LowRankMatrix]):
    """The product of two thin matrices, ``U @ V.T``. Give ``rank``, ``ratio`` or, for fitting alone, ``rel_error``.

    Args:
        rank: how many columns ``U`` and ``V`` have; 16 when nothing is said.
        ratio: the largest rank at which the dense table takes at least this many times the stored bytes.
        rel_error: the smallest rank that keeps ``||W - fit||_F <= rel_error * ||W||_F`` for the table ``W``.

    Example::

        >>> tb.Embedding(25_000, 256, tb.LowRank(ratio=8))
        Embedding(25000, 256, low_rank, rank=31, parameters=782,936, ratio=8.174)
    """

    squares_numbers = True
    spelling = ("lr", "low rank, which wants training after")

    @classmethod
    def candidates(cls, ratio: float) -> list[LowRank]:
        return [cls(ratio=each) for each in (2, 4, 8, 16, 32)]

    def with_rank(self, budget: Budget, rank: int, *, clip: bool) -> LowRankMatrix:
        most = min(budget.rows, budget.cols)
        return LowRankMatrix(budget.rows, budget.cols, min(rank, most) if clip else rank)

    def sized_as(self, structure: Structure) -> LowRank:
        assert isinstance(structure, LowRankMatrix)
        return LowRank(rank=structure.rank)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """The best approximation of its rank, by singular values (Eckart and Young)."""
        bound = self.error_bound(table, budget, parts=2)
        aim = None if bound is not None else self.target(budget).rank
        found = truncate(table, rank=aim, bound=bound, label="fitting low rank", orthonormal=False)
        return self._shared(found, budget)

    def fit_to_use(self, table: Tensor, budget: Budget, use: Use) -> Fit:
        """The best of its rank where rows are weighed and errors are measured by the vectors that rows meet."""
        if self.rel_error is not None:
            return self.fit(table, budget)  # the bound is on the error as it is
        weights = use.row_weights()
        # In float16 rows that are weighed heavily would overflow, and weights of those hardly seen be none.
        wide = torch.float32 if table.dtype == torch.float16 else table.dtype
        weights = table.new_ones(budget.rows) if weights is None else weights
        rows = weights.to(wide).sqrt()[:, None]
        seen = None if use.moment is None else root_of_metric(use.moment)
        weighed = table * rows if seen is None else table * rows @ seen.to(wide)
        found = truncate(weighed, rank=self.target(budget).rank, label="fitting low rank", orthonormal=False)
        right = found.right
        if seen is not None:
            right = torch.linalg.solve_triangular(seen, right, upper=False, left=False)
        return self._shared(replace(found, left=found.left.div_(rows), right=right), budget)

    def _shared(self, found: Truncated, budget: Budget) -> Fit:
        """The scale is shared between the two factors, so that both train at the same pace. In place, being large."""
        left, right = _lengths(found.left.T), _lengths(found.right)
        size = torch.where((left > 0) & (right > 0), (right / left).sqrt(), 1)
        u, v = found.left.mul_(size.to(found.left.dtype)), (found.right.double() / size[:, None]).T
        return Fit(LowRankMatrix(budget.rows, budget.cols, u.shape[1]), {"u": u, "v": v})


def _lengths(vectors: Tensor) -> Tensor:  # (r, n) -> (r,) float64
    return torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in vectors])
