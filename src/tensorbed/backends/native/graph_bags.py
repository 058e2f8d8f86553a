"""Bags of a chain's rows under ``torch.compile``: pooled inside the compiled kernels, unpooled rows never written.

Eager calls go to ``compiled.compute`` themselves; these operators are for graphs, which know no plan. Backward makes
the plan again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, Cores
from tensorbed.backends.native.chains import Planned, Table, knows
from tensorbed.indexing import check_range


def can_trace(cores: Cores, impl: str) -> bool:
    """Whether the operator below may stand in a graph for these cores."""
    dtype = cores[0].dtype
    return impl in ("auto", "native") and knows(dtype) and all(core.is_cpu and core.dtype == dtype for core in cores)


def chain_bags(
    chain: Chain,
    cores: Cores,
    index: Tensor,
    bounds: Tensor,
    weights: Tensor | None,
    mean: bool,
    padding_idx: int | None,
) -> Tensor:  # (n,), (bags + 1,) -> (bags, cols)
    """Sums or means of the rows of each bag, in a graph."""
    skip = -1 if padding_idx is None else padding_idx
    pooled: Tensor = _bags_op(index, bounds, weights, list(cores), chain.packed(), mean, skip)
    return pooled


def _planned(
    index: Tensor, bounds: Tensor, weights: Tensor | None, cores: Cores, sizes: Sequence[int], mean: bool, skip: int
) -> Planned | None:
    """The call with real tensors; ``None`` where no bag holds an index."""
    chain = Chain.unpacked(sizes)
    check_range(index, chain.rows)
    end = int(bounds[-1]) if bounds.shape[0] > 1 else 0  # what lies beyond the last bag is in none
    if end == 0:
        return None
    weights = None if weights is None else weights[:end]
    padding = None if skip < 0 else skip
    return Planned([Table(chain, cores, index[:end], padding, None, bounds, weights, mean)])


@torch.library.custom_op("tensorbed::chain_bags", mutates_args=())
def _bags_op(
    index: Tensor,
    bounds: Tensor,
    weights: Tensor | None,
    cores: Sequence[Tensor],
    sizes: Sequence[int],
    mean: bool,
    skip: int,
) -> Tensor:
    call = _planned(index, bounds, weights, cores, sizes, mean, skip)
    if call is None:
        return cores[0].new_zeros(bounds.shape[0] - 1, Chain.unpacked(sizes).cols)
    return call.forward(cores, keep=False)


@_bags_op.register_fake
def _fake_bags(
    index: Any, bounds: Tensor, weights: Any, cores: Sequence[Tensor], sizes: Sequence[int], *_: Any
) -> Tensor:
    return cores[0].new_empty(bounds.shape[0] - 1, Chain.unpacked(sizes).cols)


@torch.library.custom_op("tensorbed::chain_bags_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    index: Tensor,
    bounds: Tensor,
    weights: Tensor | None,
    cores: Sequence[Tensor],
    sizes: Sequence[int],
    mean: bool,
    skip: int,
) -> list[Tensor]:
    """Gradients of the cores, then of the weights if there are any."""
    call = _planned(index, bounds, weights, cores, sizes, mean, skip)
    extra = [] if weights is None else [weights.new_zeros(weights.shape)]
    if call is None:
        return [core.new_zeros(core.shape) for core in cores] + extra
    made = [one for one in call.backward(cores, grad) if one is not None]
    if extra:
        found = made.pop()
        extra[0][: found.shape[0]] = found
    return made + extra


@_backward_op.register_fake
def _fake_gradients(
    grad: Any, index: Any, bounds: Any, weights: Tensor | None, cores: Sequence[Tensor], *_: Any
) -> list[Tensor]:
    made = [torch.empty_like(core, memory_format=torch.contiguous_format) for core in cores]
    return made if weights is None else [*made, weights.new_empty(weights.shape)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    index, bounds, weights, cores, ctx.sizes, ctx.mean, ctx.skip = inputs
    ctx.weighted = weights is not None
    ctx.save_for_backward(index, bounds, *([weights] if ctx.weighted else []), *cores)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    index, bounds, *rest = ctx.saved_tensors
    weights = rest.pop(0) if ctx.weighted else None
    made = _backward_op(grad, index, bounds, weights, rest, ctx.sizes, ctx.mean, ctx.skip)
    of_weights = made[-1] if ctx.weighted else None
    return None, None, of_weights, made[: len(rest)], None, None, None


_bags_op.register_autograd(_backward, setup_context=_setup_context)
