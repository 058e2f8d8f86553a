"""Canonical polyadic decomposition by alternating least squares (Carroll and Chang 1970, Harshman 1970)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tensorbed.decompose.truncate import truncate
from tensorbed.progress import track

_STARTS = 3  # the singular vectors of the tensor, then draws
_SWEEPS = 60  # over all factors, of the best start; a third of it where one takes long
_TRIED = 8  # of each start, before the best goes on
_LARGE = 2**30  # multiply-adds of a sweep from which on one start has to do
_AGAIN = 2  # sweeps from a start that was given
_RIDGE, _TINY = 1e-11, 1e-250  # of the squared size of terms, and where they have none
_SETTLED = 1e-7  # of the tensor's squared norm that a sweep gains at the end


def canonical_polyadic(
    tensor: Tensor, start: Sequence[Tensor] | None, *, rank: int
) -> list[Tensor]:  # (n_1, ..., n_N) -> (n_k, rank) each
    """The factors, whose columns are of equal size, of a sum of ``rank`` outer products near to a tensor.

    The same at every call. A large tensor is read twice a sweep. ``start`` are those of one that was nearly the same.
    """
    tensor = tensor.float() if tensor.dtype.itemsize < 4 else tensor
    total = float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
    if start is not None:
        factors = [factor.to(tensor.dtype, copy=True) for factor in start]
        _improve(tensor, factors, total, _AGAIN)
        return _of_equal_size(factors)
    generator, tried = torch.Generator("cpu").manual_seed(0), []
    for draws in range(_STARTS if tensor.numel() * rank < _LARGE else 1):
        factors = _start(tensor, rank, generator, drawn=draws > 0)
        missed = _improve(tensor, factors, total, _TRIED)
        tried.append((missed, factors))
    _, factors = min(tried, key=lambda one: one[0])
    sweeps = _SWEEPS if tensor.numel() * rank < 4 * _LARGE else _SWEEPS // 3
    _improve(tensor, factors, total, sweeps, label="fitting canonical polyadic")
    return _of_equal_size(factors)


def _start(tensor: Tensor, rank: int, generator: torch.Generator, *, drawn: bool) -> list[Tensor]:
    """Leading singular vectors of each unfolding, and draws where there are too few, or in place of all."""
    factors = []
    for k, size in enumerate(tensor.shape):
        draw = torch.randn(size, rank, generator=generator, dtype=torch.float64, device="cpu")
        factor = (draw / size**0.5).to(tensor.device, tensor.dtype)
        if not drawn:
            flat = tensor.movedim(k, 0).reshape(size, -1)
            leading = truncate(flat, rank=min(rank, *flat.shape), label="fitting canonical polyadic").left
            factor[:, : leading.shape[1]] = leading.to(tensor.dtype)
        factors.append(factor)
    return factors


def _improve(tensor: Tensor, factors: list[Tensor], total: float, sweeps: int, label: str | None = None) -> float:
    """Least squares for one factor after the other, in place; the squared error after the last."""
    order, cut = tensor.dim(), max(1, tensor.dim() // 2)
    matrix = tensor.reshape(math.prod(tensor.shape[:cut]), -1)
    missed = math.inf
    for _ in track(range(sweeps), label) if label else range(sweeps):
        before = missed
        for own, others, flat in ((range(cut), range(cut, order), matrix), (range(cut, order), range(cut), matrix.T)):
            # What the factors of the other half leave, (n_k ..., rank), serves all of this one.
            left = flat @ _outer([factors[k] for k in others])
            left = left.reshape(*[tensor.shape[k] for k in own], -1)
            for at, k in enumerate(own):
                missed = _solve(left, factors, own, at, k, total)
        if before - missed <= _SETTLED * total:
            break
    return missed


def _solve(left: Tensor, factors: list[Tensor], own: Sequence[int], at: int, k: int, total: float) -> float:
    """The best factor ``k`` beside all others, in place, and the squared error that remains."""
    right = left
    for axis in reversed(range(len(own))):
        if axis != at:
            right = (right * _along(factors[own[axis]], axis, right.dim())).sum(axis)
    gram = torch.ones((), dtype=torch.float64, device=left.device)
    for other, factor in enumerate(factors):
        if other != k:
            wide = factor.double()
            gram = gram * (wide.T @ wide)
    wide = right.double()
    # Terms that have become alike are held apart by a little of their size.
    ridge = (_RIDGE * gram.diagonal().mean()).clamp_min(_TINY)
    root = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    found = torch.cholesky_solve(wide.T, root).T
    factors[k].copy_(found)
    _balance(factors, k)
    return total - 2 * float((found * wide).sum()) + float(((found.T @ found) * gram).sum())


def _balance(factors: list[Tensor], k: int) -> None:
    """The lengths of the columns of a new factor go into another one, so that all but one are of length 1."""
    lengths = torch.linalg.vector_norm(factors[k], dim=0)
    lengths = torch.where(lengths > 0, lengths, 1)
    factors[k] /= lengths
    factors[(k + 1) % len(factors)] *= lengths


def _outer(factors: Sequence[Tensor]) -> Tensor:  # (n_k, rank) each -> (prod n_k, rank)
    """Outer products of the columns."""
    made = factors[0]
    for factor in factors[1:]:
        made = (made[:, None] * factor).flatten(0, 1)
    return made


def _along(factor: Tensor, axis: int, dims: int) -> Tensor:
    """A factor ``(n, rank)`` as one axis, and the last, of a tensor of so many."""
    shape = [1] * dims
    shape[axis], shape[-1] = factor.shape
    return factor.view(shape)


def _of_equal_size(factors: Sequence[Tensor]) -> list[Tensor]:
    """Each term's length in equal shares, so that all factors train at the same pace; in double precision."""
    wide = [factor.double() for factor in factors]
    lengths = torch.stack([torch.linalg.vector_norm(factor, dim=0) for factor in wide])
    share = lengths.log().mean(0).exp()  # of a term that is none it is 0
    return [factor * (share / length.where(length > 0, 1)) for factor, length in zip(wide, lengths, strict=True)]
