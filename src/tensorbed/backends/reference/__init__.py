"""Plain differentiable PyTorch, for every structure, device, dtype and derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorbed.backends.chain import ChainOfCores
from tensorbed.backends.pooling import pool_rows, pool_unique, with_padding
from tensorbed.dispatch import Asked, Backend, World, checked_indices, full_precision


class Reference(Backend):
    """The structure's own :meth:`take`, one row for each index. It takes everything."""

    name = "reference"
    scores = True

    def knows(self, making: type | None, device: torch.device | None = None) -> bool:
        return True

    def shares(self, making: type | None) -> bool:
        return False

    def why(self, device: torch.device) -> str:
        return "what auto takes for every batch"

    def takes(self, asked: Asked, world: World) -> bool:
        return True

    def compute_table(self, asked: Asked, world: World) -> Tensor:
        refused_later = asked.table.refuses_rows and asked.bounds is None and _is_chosen(asked, world)
        known = asked.checked or refused_later
        index = asked.ids if known else checked_indices(asked.ids, asked.table.rows, world)
        if asked.bounds is None:
            return with_padding(_rows(asked, index, world), asked, index)
        if _is_chosen(asked, world) and index.numel():
            return pool_unique(lambda unique: _rows(asked, unique, world), asked)
        dtype = next(tensor.dtype for tensor in asked.params.values() if tensor.is_floating_point())
        if isinstance(asked.made_of, ChainOfCores):
            # In half precision bags are rounded once, as the kernels do it.
            asked = asked._replace(params=asked.table.widened(asked.params))
        return pool_rows(_rows(asked, index, world), asked, index, world).to(dtype)


def _is_chosen(asked: Asked, world: World) -> bool:
    """Whether nobody asked for plain PyTorch, where there might be something else."""
    return asked.impl == "auto" and world is World.EAGER


def _rows(asked: Asked, index: Tensor, world: World) -> Tensor:  # (n,), in range -> (n, cols)
    with full_precision(index):
        rows = asked.table.eager_rows if _is_chosen(asked, world) else asked.table.rows_of
        made: Tensor = rows(asked.params, index)
        return made
