"""Rows and bags of a chain under ``torch.compile``: one operator, because the sizes of the work depend on the data.

It checks the indices when the graph runs. A graph knows no plan: backward makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, Cores
from tensorbed.backends.pooling import pool_rows, with_padding
from tensorbed.dispatch import Asked, World, no_second_derivative


class Work(Protocol):
    """What one backend does with a batch of indices, found out once."""

    def rows(self, cores: Cores) -> Tensor: ...
    def gradients(self, cores: Cores, grad: Tensor) -> list[Tensor]: ...


# By the backend's name: chain, cores and index, then where there are bags bounds, weights, mean and padding_idx or -1.
WORKS: dict[str, Callable[..., Work]] = {}

ROWS = (None, None, False, -1)  # what the operator is told of bags where there are none


def graph_output(asked: Asked, backend: str, *, pools: bool = False) -> Tensor:  # -> (n or bags, cols)
    """Rows or bags by an operator of the graph, which ``pools`` sums and means itself and writes no row for them."""
    chain, cores = asked.made_of
    operator = partial(chain_op, asked.ids, cores, chain.packed(), backend)
    if asked.bounds is None:
        return with_padding(operator(*ROWS), asked)
    if not pools:
        return pool_rows(operator(*ROWS), asked, asked.ids, World.COMPILED)
    skip = -1 if asked.padding_idx is None else asked.padding_idx
    pooled: Tensor = operator(asked.bounds, asked.weights, asked.mode == "mean", skip)
    return pooled


_ARGUMENTS = (
    "Tensor index, Tensor[] cores, SymInt[] sizes, str backend, Tensor? bounds, Tensor? weights, bool mean, SymInt skip"
)


@torch.library.custom_op("tensorbed::chain_rows", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def chain_op(index: Tensor, cores: Cores, sizes: Sequence[int], backend: str, *pooling: Any) -> Tensor:
    """Rows ``(n, cols)``, or with bounds ``(bags + 1,)`` bags ``(bags, cols)``."""
    if index.numel() == 0:
        return cores[0].new_zeros(_empty(index, cores, sizes, backend, *pooling).shape)
    return _work(index, cores, sizes, backend, *pooling).rows(cores)


def _work(index: Tensor, cores: Cores, sizes: Sequence[int], backend: str, *pooling: Any) -> Work:
    return WORKS[backend](Chain.unpacked(sizes), cores, index, *(() if pooling[0] is None else pooling))


@chain_op.register_fake
def _empty(index: Tensor, cores: Cores, sizes: Sequence[int], backend: str, bounds: Tensor | None, *_: Any) -> Tensor:
    count = index.shape[0] if bounds is None else bounds.shape[0] - 1
    return cores[0].new_empty(count, Chain.unpacked(sizes).cols)


@torch.library.custom_op(
    "tensorbed::chain_rows_backward", mutates_args=(), schema=f"(Tensor grad, {_ARGUMENTS}) -> Tensor[]"
)
def chain_backward_op(grad: Tensor, index: Tensor, cores: Cores, *told: Any) -> list[Tensor]:
    """Gradients of the cores, then of the weights if there are any."""
    if index.numel() == 0:
        return [gradient.zero_() for gradient in _empty_gradients(grad, index, cores, *told)]
    return _work(index, cores, *told).gradients(cores, grad)


@chain_backward_op.register_fake
def _empty_gradients(grad: Tensor, index: Tensor, cores: Cores, *told: Any) -> list[Tensor]:
    _sizes, _backend, _bounds, weights, _mean, _skip = told
    tensors = cores if weights is None else [*cores, weights]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


chain_backward_op.register_autograd(no_second_derivative)


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
