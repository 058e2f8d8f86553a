"""Rows and bags of a chain under ``torch.compile``: one operator, because the sizes of the work depend on the data.

It checks the indices when the graph runs. A graph knows no plan: backward makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, Cores
from tensorbed.backends.pooling import pool_rows, scale_by_frequency, with_padding
from tensorbed.dispatch import Asked, World


class Work(Protocol):
    """What one backend does with a batch of indices, found out once."""

    def rows(self, cores: Cores) -> Tensor: ...
    def gradients(self, cores: Cores, grad: Tensor) -> list[Tensor]: ...


# By the backend's name: chain, cores and index, then where there are bags bounds, weights, mean and padding_idx or -1.
WORKS: dict[str, Callable[..., Work]] = {}


ROWS = (None, None, False, -1)  # what the operator is told of bags where there are none


def graph_rows(asked: Asked, backend: str) -> Tensor:  # -> (n, cols)
    """Rows by an operator of the graph."""
    return with_padding(_rows(asked, backend), asked)


def graph_bags(asked: Asked, backend: str) -> Tensor:  # -> (bags, cols)
    """Rows by an operator of the graph, pooled in the graph."""
    rows = _rows(asked, backend)
    if asked.by_frequency:
        rows = scale_by_frequency(rows, asked.ids, World.COMPILED)
    return pool_rows(rows, asked, asked.ids)


def _rows(asked: Asked, backend: str) -> Tensor:
    chain, cores = asked.made_of
    rows: Tensor = chain_op(asked.ids, cores, chain.packed(), backend, *ROWS)
    return rows


def graph_pooled(asked: Asked, backend: str) -> Tensor:  # -> (bags, cols)
    """Sums or means of the rows of each bag by an operator of the graph, which writes no row."""
    chain, cores = asked.made_of
    skip = -1 if asked.padding_idx is None else asked.padding_idx
    pooled: Tensor = chain_op(
        asked.ids, cores, chain.packed(), backend, asked.bounds, asked.weights, asked.mode == "mean", skip
    )
    return pooled


@torch.library.custom_op("tensorbed::chain_rows", mutates_args=())
def chain_op(
    index: Tensor,
    cores: Sequence[Tensor],
    sizes: Sequence[int],
    backend: str,
    bounds: Tensor | None,
    weights: Tensor | None,
    mean: bool,
    skip: int,
) -> Tensor:
    """Rows ``(n, cols)``, or with bounds ``(bags + 1,)`` bags ``(bags, cols)``."""
    chain = Chain.unpacked(sizes)
    if index.numel() == 0:
        return cores[0].new_zeros(0 if bounds is None else bounds.shape[0] - 1, chain.cols)
    return _work(backend, chain, cores, index, bounds, weights, mean, skip).rows(cores)


def _work(backend: str, chain: Chain, cores: Cores, index: Tensor, bounds: Tensor | None, *pooling: Any) -> Work:
    return WORKS[backend](chain, cores, index, *(() if bounds is None else (bounds, *pooling)))


@chain_op.register_fake
def _(
    index: Tensor,
    cores: Sequence[Tensor],
    sizes: Sequence[int],
    backend: str,
    bounds: Tensor | None,
    *_: Any,
) -> Tensor:
    count = index.shape[0] if bounds is None else bounds.shape[0] - 1
    return cores[0].new_empty(count, Chain.unpacked(sizes).cols)


@torch.library.custom_op("tensorbed::chain_rows_backward", mutates_args=())
def chain_backward_op(
    grad: Tensor,
    index: Tensor,
    cores: Sequence[Tensor],
    sizes: Sequence[int],
    backend: str,
    bounds: Tensor | None,
    weights: Tensor | None,
    mean: bool,
    skip: int,
) -> list[Tensor]:
    """Gradients of the cores, then of the weights if there are any."""
    if index.numel() == 0:
        tensors = cores if weights is None else [*cores, weights]
        return [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    return _work(backend, Chain.unpacked(sizes), cores, index, bounds, weights, mean, skip).gradients(cores, grad)


@chain_backward_op.register_fake
def _(
    grad: Tensor,
    index: Tensor,
    cores: Sequence[Tensor],
    sizes: Sequence[int],
    backend: str,
    bounds: Tensor | None,
    weights: Tensor | None,
    *_: Any,
) -> list[Tensor]:
    tensors = cores if weights is None else [*cores, weights]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    index, cores, sizes, backend, bounds, weights, mean, skip = inputs
    ctx.sizes, ctx.backend, ctx.mean, ctx.skip = sizes, backend, mean, skip
    ctx.pooled, ctx.weighted = bounds is not None, weights is not None
    others = [tensor for tensor in (bounds, weights) if tensor is not None]
    ctx.save_for_backward(index, *others, *cores)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    index, *cores = ctx.saved_tensors
    bounds = cores.pop(0) if ctx.pooled else None
    weights = cores.pop(0) if ctx.weighted else None
    made = chain_backward_op(grad, index, cores, ctx.sizes, ctx.backend, bounds, weights, ctx.mean, ctx.skip)
    of_weights = made.pop() if ctx.weighted else None
    return None, made, None, None, None, of_weights, None, None


chain_op.register_autograd(_backward, setup_context=_setup_context)
