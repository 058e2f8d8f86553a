"""Products of one matrix with many, as scores through cores are made of, and their gradients; sums are single.

The many matrices are read where they are, as if they stood side by side: ``(parts, depth, width)`` is a matrix of
``parts * width`` columns. No result depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensorbed.backends.triton import launching
from tensorbed.backends.triton.rounding import rounded


@triton.jit
def times_many(
    matrix,  # (height, depth), by its strides
    x,  # (parts, depth, width)
    out,  # (parts, height, width)
    height,
    depth,
    columns,
    width,
    matrix_row,
    matrix_column,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    HEIGHT: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    part = column // width
    inside = (column < columns)[None, :]
    read, written = part * depth * width + column % width, part * height * width + column % width
    total = tl.zeros((HEIGHT, COLUMNS), tl.float32)
    for begin in range(0, depth, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        known = (row < height)[:, None] & (k < depth)[None, :]
        a = tl.load(matrix + row[:, None] * matrix_row + k[None, :] * matrix_column, mask=known, other=0.0)
        b = tl.load(x + read[None, :] + k[:, None] * width, mask=(k < depth)[:, None] & inside, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    made = rounded(total, out, WIDEN)
    tl.store(out + written[None, :] + row[:, None] * width, made, mask=(row < height)[:, None] & inside)


@triton.jit
def outer_parts(
    grad,  # (parts, height, width)
    x,  # (parts, depth, width)
    out,  # (pieces, height, depth) single
    height,
    depth,
    columns,
    width,
    piece,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    HEIGHT: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    k = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    number = tl.program_id(2).to(tl.int64)
    first = number * piece
    last = tl.minimum(first + piece, columns)
    total = tl.zeros((HEIGHT, DEPTH), tl.float32)
    for begin in range(first, last, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        part = column // width
        inside = column < last
        at = part * height * width + column % width
        a = tl.load(
            grad + row[:, None] * width + at[None, :], mask=(row < height)[:, None] & inside[None, :], other=0.0
        )
        at = part * depth * width + column % width
        b = tl.load(x + k[None, :] * width + at[:, None], mask=inside[:, None] & (k < depth)[None, :], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = number * height * depth + row[:, None] * depth + k[None, :]
    tl.store(out + place, total, mask=(row < height)[:, None] & (k < depth)[None, :])


_HALVES = launching.Tiles(64, 64, 32, 4, 3)  # of products of half precision, which tensor cores always make
_PIECES = 64  # of the columns at most that gradients are summed over apart from each other


def times(matrix: Tensor, x: Tensor, out: Tensor) -> None:  # (h, d), (p, d, w) -> (p, h, w)
    """One matrix, or its transpose, times many."""
    (height, depth), (parts, _, width) = matrix.shape, x.shape
    if not out.numel():
        return
    columns, sizes = parts * width, tiles_of(depth, x.dtype)
    tall, deep, wide = (
        launching.side(sizes.rows, height),
        launching.side(sizes.depth, depth),
        launching.side(sizes.cols, columns),
    )
    with launching.current(out.device):
        times_many[(-(-columns // wide), -(-height // tall))](
            matrix, x.contiguous(), out, height, depth, columns, width, *matrix.stride(), **products_of(sizes),
            HEIGHT=tall, DEPTH=deep, COLUMNS=wide,
        )  # fmt: skip


def add_outer(total: Tensor, grad: Tensor, x: Tensor) -> None:  # (h, d), (p, h, w), (p, d, w)
    """``total += sum_p grad[p] @ x[p].T``: pieces of the sum each by themselves, then all in their order."""
    (height, depth), (parts, _, width) = total.shape, x.shape
    columns, sizes = parts * width, tiles_of(depth, x.dtype)
    if not columns or not total.numel():
        return
    tall, wide, deep = (
        launching.side(sizes.rows, height),
        launching.side(sizes.cols, depth),
        launching.side(sizes.depth, columns),
    )
    # Their sums take no more memory than the gradient itself does.
    pieces = max(1, min(_PIECES, grad.numel() // total.numel(), columns // (4 * deep)))
    piece = -(-columns // (pieces * deep)) * deep
    pieces = -(-columns // piece)
    room = launching.empty((pieces, height, depth), torch.float32, total.device)
    with launching.current(total.device):
        outer_parts[(-(-height // tall), -(-depth // wide), pieces)](
            grad.contiguous(), x.contiguous(), room, height, depth, columns, width, piece, **products_of(sizes),
            HEIGHT=tall, DEPTH=wide, COLUMNS=deep,
        )  # fmt: skip
    total += room.sum(0)


def tiles_of(depth: int, dtype: torch.dtype) -> launching.Tiles:
    """For products of factors of this dtype."""
    return launching.tiles(depth, dtype) if dtype == torch.float32 else _HALVES


def products_of(sizes: launching.Tiles) -> dict[str, Any]:
    """What kernels that multiply are told of how."""
    return {
        "PRECISION": launching.precision(),
        "WIDEN": launching.halves_as_single(),
        **launching.options(sizes),
    }
