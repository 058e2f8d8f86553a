"""The table itself: the baseline that goes through the same code as everything else."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.scoring import Cost, Scoring
from tensorbed.structures.base import Params, Structure, TensorSpec, mean_row, scale_to_std, with_rows
from tensorbed.structures.formats import Budget, Fit, Format
from tensorbed.structures.registry import register


@register("dense")
@dataclass(frozen=True)
class DenseMatrix(Structure):
    """Every number of the table.

    Shape:
        - table: ``(rows, cols)``
    """

    takes_half = True  # to compute in single precision would take another table
    row_tensor = "table"

    specs: tuple[TensorSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hold(specs=(TensorSpec("table", (self.rows, self.cols)),))

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        table = p["table"]
        # Its gradient is faster than that of index_select, and adds up half precision in half precision.
        return F.embedding(index, table) if table.itemsize >= 4 else table.index_select(0, index)

    def eager_rows(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return self.take(p, index)  # which is in its dtype

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return p["table"].view_as(p["table"])

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        return replace(self, rows=rows), {"table": with_rows(p["table"], rows, mean_row(self, p))}

    @property
    def row_multiply_adds(self) -> int:
        return 0

    def scorings(self) -> list[Scoring]:
        return [replace(self.by_rows(0), cost=Cost(multiply_adds=self.rows * self.cols))]

    def block(self, p: Params, start: int, stop: int, impl: str) -> Tensor:  # -> (stop - start, cols)
        return p["table"][start:stop]

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        table = p["table"].normal_(generator=generator)
        scale_to_std(p, torch.linalg.vector_norm(table, dtype=torch.float64).square(), self.rows * self.cols, std)

    def describe(self) -> str:
        return "dense"


@dataclass(frozen=True)
class Dense(Format):
    """An ordinary table, for baselines that differ from a compressed model in one argument alone.

    Example::

        >>> tb.Embedding(25_000, 256, tb.Dense()).compression_ratio
        1.0
    """

    is_plain: ClassVar[bool] = True
    suits_heads: ClassVar[bool] = True

    def bind(self, budget: Budget) -> DenseMatrix:
        return DenseMatrix(budget.rows, budget.cols)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        return Fit(self.bind(budget), {"table": table})
