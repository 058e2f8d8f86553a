"""Chains of cores in PyTorch alone: unique rows, shared prefixes, batched products; any device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, ChainOfCores
from tensorbed.backends.graphs import graph_output
from tensorbed.backends.pooling import pooled_or_padded
from tensorbed.backends.torch.shared_rows import SharedRows
from tensorbed.dispatch import Asked, Backend, World, differentiable_once


class Torch(Backend):
    """For installs without a compiler, and devices without kernels of their own."""

    name = "torch"
    limits = "with chains of cores"

    def knows(self, making: type | None, device: torch.device | None = None) -> bool:
        return making is ChainOfCores

    def why(self, device: torch.device) -> str:
        return "there are no compiled kernels" if device.type == "cpu" else f"the indices are on {device}"

    def takes(self, asked: Asked, world: World) -> bool:
        in_world = world is World.COMPILED or (world is World.EAGER and asked.ids.numel() > 0)
        return in_world and isinstance(asked.made_of, ChainOfCores)

    def compute_table(self, asked: Asked, world: World) -> Tensor:
        if world is World.COMPILED:
            return graph_output(asked, self.name)
        return pooled_or_padded(partial(chain_rows, asked.made_of), asked)


def chain_rows(made_of: ChainOfCores, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
    """Rows, differentiable in the cores. ``index`` holds at least one."""
    chain, cores = made_of
    if torch.is_grad_enabled() and any(core.requires_grad for core in cores):
        rows: Tensor = _SharedRows.apply(chain, index, *cores)  # type: ignore[no-untyped-call]
        return rows
    return SharedRows.of(chain, index).rows(cores)


class _SharedRows(torch.autograd.Function):
    """What was found about the indices is kept between forward and backward."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, index: Tensor, *cores: Tensor) -> Tensor:
        ctx.batch = SharedRows.of(chain, index)
        ctx.save_for_backward(*cores)
        return ctx.batch.rows(cores)  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.batch.gradients(ctx.saved_tensors, grad)
