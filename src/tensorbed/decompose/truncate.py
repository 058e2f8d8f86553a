"""Low-rank factors of a large matrix, in float64, with little memory beside it: the best, or within a hair of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorbed.decompose.directions import leading_directions
from tensorbed.decompose.powers import frobenius
from tensorbed.progress import track


@dataclass(frozen=True)
class Truncated:
    """``matrix ~ left @ right``.

    Shape:
        - left: ``(m, r)`` with orthonormal columns; where that was not asked for, they may be orthogonal only
        - right: ``(r, n)`` with orthogonal rows, whose norms are the singular values; else they may be orthonormal
        - lost: Frobenius norm of what was cut off
    """

    left: Tensor
    right: Tensor
    lost: float


# A matrix with both sides longer than this is not decomposed whole where a part of its rank will do.
_LONG = 1024
_BLOCK = 2**21  # numbers taken in float64 at once
_CHEAP = 2**22  # a matrix of no more numbers has factors in float64, a larger one in its own precision
_MEASURABLE = 1e-6  # of a matrix's norm: a smaller difference of norms is rounding


def truncate(
    matrix: Tensor,
    *,
    rank: int | None = None,
    bound: float | None = None,
    label: str = "fitting",
    orthonormal: bool = True,
) -> Truncated:
    """Cut to a rank, or to the smallest rank that loses at most ``bound`` in Frobenius norm."""
    short = min(matrix.shape)
    if short <= _LONG or (rank is not None and rank > short // 4):
        return _exactly(matrix, rank, bound, label, orthonormal)
    if rank is not None:
        return _leading(matrix, rank, label)
    assert bound is not None
    # Look for the bound among a few directions first, then among more.
    guess = _LONG // 8
    while guess <= short // 4 and bound > _MEASURABLE * frobenius(matrix):
        found = _leading(matrix, guess, label)
        if found.lost <= bound:
            rank, lost = _cut(torch.linalg.vector_norm(found.right, dim=1), None, bound, found.lost)
            return Truncated(found.left[:, :rank], found.right[:rank], lost)
        guess *= 2
    return _exactly(matrix, rank, bound, label, orthonormal)


def _leading(matrix: Tensor, rank: int, label: str) -> Truncated:
    """The leading factors of a matrix long on both sides, by directions of its short side."""
    long = matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix  # (long side, short side)
    directions = leading_directions(long, rank, f"{label}: singular vectors")
    # A step in float64 from either side makes good what directions found in single precision lack.
    there = torch.linalg.qr(_multiply(long, directions, label)).Q
    back = _multiply(long.T, there, label)
    if long is matrix:
        found = _exactly(back.T, rank, None, label)
        left, right = there @ found.left, found.right
    else:
        basis, triangle = torch.linalg.qr(back)
        u, s, vh = torch.linalg.svd(triangle)
        left, right = basis @ u, s[:, None] * (vh @ there.T)
    return Truncated(left, right, math.sqrt(max(0.0, frobenius(matrix) ** 2 - frobenius(right) ** 2)))


def _exactly(matrix: Tensor, rank: int | None, bound: float | None, label: str, orthonormal: bool = True) -> Truncated:
    """By all singular values.

    They come from a triangular factor gathered block by block, as exact as a full decomposition and without its
    workspace: beside the matrix only blocks and the two factors are held.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    long = matrix.T if wide else matrix  # (long side, short side)
    _, s, vh = torch.linalg.svd(_triangular(long, label))
    rank, lost = _cut(s, rank, bound)
    short = vh[:rank].T.clone()  # (short side, r): orthonormal
    kept = torch.float64 if matrix.numel() <= _CHEAP else torch.promote_types(matrix.dtype, torch.float32)
    if wide:
        # Written as it is read by the next cut, which would have to copy a transposed one.
        right = short.new_empty(rank, long.shape[0], dtype=kept)
        _multiply(long, short, label, out=right.T)
        return Truncated(short, right, lost)
    if not orthonormal:
        return Truncated(_multiply(long, short, label, dtype=kept), short.T, lost)
    # Orthonormalise the long factor itself: dividing by small singular values would not give it.
    left, right = torch.linalg.qr(_multiply(long, short, label))
    return Truncated(left, right @ short.T, lost)


def _triangular(long: Tensor, label: str) -> Tensor:  # (m, n) -> (min(m, n), n)
    """``R`` of a QR decomposition, from one block of rows after the other."""
    height = max(2048, 4 * long.shape[1])
    r = long.new_empty(0, long.shape[1], dtype=torch.float64)
    for start in track(range(0, long.shape[0], height), f"{label}: singular values"):
        block = long[start : start + height].to(torch.float64)
        r = torch.linalg.qr(torch.cat([r, block]), mode="r").R
    return r


def _multiply(
    long: Tensor, short: Tensor, label: str, *, dtype: torch.dtype = torch.float64, out: Tensor | None = None
) -> Tensor:  # (m, n), (n, r) float64 -> (m, r)
    """Summed in float64, whatever the product is kept in."""
    out = short.new_empty(long.shape[0], short.shape[1], dtype=dtype) if out is None else out
    height = max(256, _BLOCK // max(long.shape[1], short.shape[1]))
    for start in track(range(0, long.shape[0], height), f"{label}: factors"):
        out[start : start + height] = long[start : start + height].to(torch.float64) @ short
    return out


def _cut(s: Tensor, rank: int | None, bound: float | None, lost: float = 0.0) -> tuple[int, float]:
    """Rank to keep and the norm of the rest, for singular values in descending order where so much is lost already."""
    squares = torch.cat([s.square(), s.new_tensor([lost**2])])
    tail = squares.flip(0).cumsum(0).flip(0).sqrt()  # tail[r]: lost when r are kept
    if rank is None:
        assert bound is not None
        rank = int((tail > bound).sum())
    rank = max(1, min(rank, s.shape[0]))
    return rank, float(tail[rank])
