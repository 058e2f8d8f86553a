"""Chains of cores in PyTorch alone: unique rows, shared prefixes, batched products; any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, ChainOfCores
from tensorbed.backends.graphs import graph_bags, graph_rows
from tensorbed.backends.pooling import pool_unique, with_padding
from tensorbed.backends.torch.shared_rows import SharedRows
from tensorbed.dispatch import Asked, World, differentiable_once, side_by_side


class Torch:
    """For installs without a compiler, and devices without kernels of their own."""

    name = "torch"
    limits = "with chains of cores"

    def knows(self, making: type | None, device: torch.device | None = None) -> bool:
        return making is ChainOfCores

    def shares(self, making: type | None) -> bool:
        return True

    def why(self, device: torch.device) -> str:
        return "there are no compiled kernels" if device.type == "cpu" else f"the indices are on {device}"

    def takes(self, asked: Asked, world: World) -> bool:
        if not isinstance(asked.made_of, ChainOfCores):
            return False
        return world is World.COMPILED or (world is World.EAGER and asked.ids.numel() > 0)

    def rows(self, asked: Sequence[Asked], world: World) -> Tensor:
        if world is World.COMPILED:
            return side_by_side([graph_rows(table, self.name) for table in asked])
        return side_by_side([with_padding(chain_rows(table.made_of, table.ids), table) for table in asked])

    def bags(self, asked: Sequence[Asked], world: World) -> Tensor:
        if world is World.COMPILED:
            return side_by_side([graph_bags(table, self.name) for table in asked])
        return side_by_side([pool_unique(partial(chain_rows, table.made_of), table) for table in asked])


def chain_rows(made_of: ChainOfCores, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
    """Rows, differentiable in the cores. ``index`` holds at least one."""
    chain, cores = made_of
    if torch.is_grad_enabled() and any(core.requires_grad for core in cores):
        rows: Tensor = _SharedRows.apply(chain, index, *cores)[0]  # type: ignore[no-untyped-call]
        return rows
    return SharedRows.of(chain, index).rows(cores)


class _SharedRows(torch.autograd.Function):
    """What was found about the indices is kept between forward and backward."""

    @staticmethod
    def forward(chain: Chain, index: Tensor, *cores: Tensor) -> tuple[Tensor, SharedRows]:
        batch = SharedRows.of(chain, index)
        return batch.rows(cores), batch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, SharedRows]) -> None:
        ctx.batch = output[1]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.batch.gradients(ctx.saved_tensors, grad)
