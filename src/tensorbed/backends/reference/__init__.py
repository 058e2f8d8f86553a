"""Plain differentiable PyTorch, for every structure, device, dtype and derivative."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorbed.backends.chain import ChainOfCores
from tensorbed.backends.pooling import pool_rows, pool_unique, scale_by_frequency, with_padding
from tensorbed.dispatch import Asked, World, checked_indices, full_precision, side_by_side


class Reference:
    """The structure's own :meth:`take`, one row for each index. It takes everything."""

    name = "reference"
    limits = "with everything"

    def knows(self, making: type | None, device: torch.device | None = None) -> bool:
        return True

    def shares(self, making: type | None) -> bool:
        return False

    def why(self, device: torch.device) -> str:
        return "what auto takes for every batch"

    def takes(self, asked: Asked, world: World) -> bool:
        return True

    def rows(self, asked: Sequence[Asked], world: World) -> Tensor:
        return side_by_side([self._rows(table, world) for table in asked])

    def bags(self, asked: Sequence[Asked], world: World) -> Tensor:
        return side_by_side([self._bags(table, world) for table in asked])

    def _rows(self, asked: Asked, world: World) -> Tensor:
        index = checked_indices(asked.ids, asked.table.rows, world)
        return with_padding(_made(asked, index, world), asked, index)

    def _bags(self, asked: Asked, world: World) -> Tensor:
        index = checked_indices(asked.ids, asked.table.rows, world)
        if _is_chosen(asked, world) and index.numel():
            return pool_unique(lambda unique: _made(asked, unique, world), asked)
        dtypes = [tensor.dtype for tensor in asked.params.values() if tensor.is_floating_point()]
        if isinstance(asked.made_of, ChainOfCores):
            # In half precision bags are rounded once, as the kernels do it.
            asked = asked._replace(params=asked.table.widened(asked.params))
        rows = _made(asked, index, world)
        if asked.by_frequency:
            rows = scale_by_frequency(rows, index, world)
        return pool_rows(rows, asked, index).to(dtypes[0])


def _is_chosen(asked: Asked, world: World) -> bool:
    """Whether nobody asked for plain PyTorch, where there might be something else."""
    return asked.impl == "auto" and world is World.EAGER


def _made(asked: Asked, index: Tensor, world: World) -> Tensor:  # (n,), in range -> (n, cols)
    with full_precision(index):
        if asked.table.composed and _is_chosen(asked, world):
            rows: Tensor = asked.table.lookup(asked.params, index, "auto")
        else:
            rows = asked.table.rows_of(asked.params, index)
        return rows
