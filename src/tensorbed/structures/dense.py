"""The table itself: the baseline that goes through the same code as everything else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.projection import Way, rows_of_table
from tensorbed.structures.base import Params, Structure, TensorSpec, scale_to_std, with_rows
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
    fused_loss = "torch.nn.functional.linear_cross_entropy"

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("table", (self.rows, self.cols)),)

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return p["table"].index_select(0, index)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return p["table"].view_as(p["table"])

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        return replace(self, rows=rows), {"table": with_rows(p["table"], rows, self.mean_row(p))}

    @property
    def row_multiply_adds(self) -> int:
        return 0

    def project(self, p: Params, x: Tensor, start: int, stop: int) -> Tensor:  # (..., cols) -> (..., stop - start)
        # One product, which is rounded once in the table's own dtype too.
        block = p["table"][start:stop]
        return (x.to(block.dtype) @ block.T).to(x.dtype)

    def ways(self) -> list[Way]:
        way = replace(self.way_by_rows(0), making_numbers=0, by_block=False)
        return [replace(way, open=lambda tensors, dtype: rows_of_table(tensors[0], dtype))]

    def cross_entropy(self, p: Params, x: Tensor, target: Tensor, chunk: int, **options: Any) -> Tensor | None:
        """PyTorch's own fused loss, ``chunk`` vectors at a time: as it comes it is many times slower on a CPU."""
        if not hasattr(F, "linear_cross_entropy"):
            return None
        # A graph may be kept, as with any other loss; without being told PyTorch uses up its gradients.
        chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, allow_retain_graph=True)
        return F.linear_cross_entropy(x, p["table"], target, options=chunks, **options)

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        table = p["table"].normal_(generator=generator)
        scale_to_std(p, torch.linalg.vector_norm(table, dtype=torch.float64).square(), self.rows * self.cols, std)

    def describe(self) -> str:
        return "dense"


@dataclass(frozen=True)
class Dense(Format):
    """``tb.Dense()``: an ordinary table, for baselines that differ in one argument."""

    suits_heads: ClassVar[bool] = True

    def bind(self, budget: Budget) -> DenseMatrix:
        return DenseMatrix(budget.rows, budget.cols)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        return Fit(self.bind(budget), {"table": table})
