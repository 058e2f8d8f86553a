"""Rows of a chain under autograd and ``torch.compile``.

Eagerly an autograd function keeps what was found about the indices between forward and backward. Under
``torch.compile`` the same work sits behind ``torch.library`` operators, because its sizes depend on the data; there
backward finds it out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, Cores, take, widened
from tensorbed.backends.native.chains import IMPLS as KERNELS
from tensorbed.backends.native.chains import KernelRows, Table, compute, takes
from tensorbed.backends.torch.shared_rows import SharedRows
from tensorbed.dispatch import differentiable_once, full_precision, is_recorded, is_traced, is_transformed

IMPLS = ("auto", "reference", "torch", *KERNELS)


def chain_rows(chain: Chain, cores: Cores, index: Tensor, impl: str) -> Tensor:  # (n,) -> (n, cols)
    """Rows by the named way, one of :data:`IMPLS`, differentiable in the cores. ``index`` is int64 and in range."""
    # Transforms differentiate, batch and nest as they like: only the plain path follows them.
    if impl == "reference" or index.is_meta or is_transformed() or is_recorded():
        return take(chain, cores, index)
    if impl in ("auto", "native") and not is_traced(index) and takes(cores, index):
        return compute([Table(chain, cores, index)])
    if is_traced(index):
        traced: Tensor = _rows_op(index, list(cores), chain.packed(), impl)
        return traced
    if index.numel() == 0:
        return take(chain, cores, index)
    if torch.is_grad_enabled() and any(core.requires_grad for core in cores):
        rows: Tensor = _ChainRows.apply(chain, impl, index, *cores)[0]  # type: ignore[no-untyped-call]
        return rows
    return _Work(chain, cores, index, impl).rows(cores)


class _Work:
    """Rows of a batch by the kernels, where they take it, or in PyTorch; autocast off, half precision in single."""

    def __init__(self, chain: Chain, cores: Cores, index: Tensor, impl: str) -> None:
        self.dtype = cores[0].dtype
        with full_precision(index):
            by_kernels = impl == "native" or (impl == "auto" and takes(cores, index))
            self.batch = KernelRows(chain, cores, index) if by_kernels else SharedRows.of(chain, index)

    def _read(self, cores: Cores) -> Cores:
        """The kernels widen what they read themselves."""
        return cores if isinstance(self.batch, KernelRows) else widened(cores)

    def rows(self, cores: Cores) -> Tensor:
        with full_precision(cores[0]):
            return self.batch.rows(self._read(cores)).to(self.dtype)

    def gradients(self, cores: Cores, grad: Tensor) -> list[Tensor]:
        cores = self._read(cores)
        with full_precision(grad):
            made = self.batch.gradients(cores, grad.to(cores[0].dtype))
        return [one.to(self.dtype).contiguous() for one in made]


class _ChainRows(torch.autograd.Function):
    @staticmethod
    def forward(chain: Chain, impl: str, index: Tensor, *cores: Tensor) -> tuple[Tensor, _Work]:
        work = _Work(chain, cores, index, impl)
        return work.rows(cores), work

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, _Work]) -> None:
        ctx.work = output[1]
        # The index too: a tape may hold it, and autograd notices when it is written to before backward.
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        _, *cores = ctx.saved_tensors
        return None, None, None, *ctx.work.gradients(cores, grad)


@torch.library.custom_op("tensorbed::chain_rows", mutates_args=())
def _rows_op(index: Tensor, cores: Sequence[Tensor], sizes: Sequence[int], impl: str) -> Tensor:
    chain = Chain.unpacked(sizes)
    if index.numel() == 0:
        return cores[0].new_empty(0, chain.cols)
    return _Work(chain, cores, index, impl).rows(cores)


@_rows_op.register_fake
def _(index: Tensor, cores: Sequence[Tensor], sizes: Sequence[int], impl: str) -> Tensor:
    return cores[0].new_empty(index.shape[0], Chain.unpacked(sizes).cols)


@torch.library.custom_op("tensorbed::chain_rows_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    index: Tensor,
    cores: Sequence[Tensor],
    sizes: Sequence[int],
    impl: str,
) -> list[Tensor]:
    if index.numel() == 0:
        return [torch.zeros_like(core) for core in cores]
    return _Work(Chain.unpacked(sizes), cores, index, impl).gradients(cores, grad)


@_backward_op.register_fake
def _(
    grad: Tensor,
    index: Tensor,
    cores: Sequence[Tensor],
    sizes: Sequence[int],
    impl: str,
) -> list[Tensor]:
    return [torch.empty_like(core, memory_format=torch.contiguous_format) for core in cores]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    index, cores, ctx.sizes, ctx.impl = inputs
    ctx.save_for_backward(index, *cores)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    index, *cores = ctx.saved_tensors
    return None, _backward_op(grad, index, cores, ctx.sizes, ctx.impl), None, None


_rows_op.register_autograd(_backward, setup_context=_setup_context)
