"""Products of one matrix with many, as scores through cores are made of, and their gradients; sums are single.

The many matrices are read where they are, as if they stood side by side: ``(parts, depth, width)`` is a matrix of
``parts * width`` columns. No result depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensorbed.backends.triton.serving import precision


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
        total = tl.dot(a, b, total, input_precision=PRECISION)
    made = total.to(out.dtype.element_ty)
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
        a = tl.load(grad + row[:, None] * width + at[None, :], mask=(row < height)[:, None] & inside[None, :], other=0.0)
        at = part * depth * width + column % width
        b = tl.load(x + k[None, :] * width + at[:, None], mask=inside[:, None] & (k < depth)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = number * height * depth + row[:, None] * depth + k[None, :]
    tl.store(out + place, total, mask=(row < height)[:, None] & (k < depth)[None, :])


_PIECES = 64  # of the columns at most that gradients are summed over apart from each other ...
_NUMBERS = 2**20  # ... as long as their sums are no more numbers than this


def times(matrix: Tensor, x: Tensor, out: Tensor) -> None:  # (h, d), (p, d, w) -> (p, h, w)
    """One matrix, or its transpose, times many."""
    (height, depth), (parts, _, width) = matrix.shape, x.shape
    columns, x = parts * width, x.contiguous()
    if not out.numel():
        return
    blocks = _blocks(x.dtype, height, depth, columns)
    times_many[(-(-columns // blocks["COLUMNS"]), -(-height // blocks["HEIGHT"]))](
        matrix, x, out, height, depth, columns, width, *matrix.stride(), PRECISION=precision(), **blocks
    )


def add_outer(total: Tensor, grad: Tensor, x: Tensor) -> None:  # (h, d), (p, h, w), (p, d, w)
    """``total += sum_p grad[p] @ x[p].T``: pieces of the sum each by themselves, then all in their order."""
    (height, depth), (parts, _, width) = total.shape, x.shape
    columns, grad, x = parts * width, grad.contiguous(), x.contiguous()
    if not columns or not total.numel():
        return
    blocks = _blocks(x.dtype, height, columns, depth)
    blocks["COLUMNS"], blocks["DEPTH"] = blocks["DEPTH"], blocks["COLUMNS"]  # the sum runs over columns here
    pieces = max(1, min(_PIECES, _NUMBERS // total.numel(), columns // (4 * blocks["COLUMNS"])))
    piece = -(-columns // (pieces * blocks["COLUMNS"])) * blocks["COLUMNS"]
    pieces = -(-columns // piece)
    room = total.new_empty(pieces, height, depth, dtype=torch.float32)
    outer_parts[(-(-height // blocks["HEIGHT"]), -(-depth // blocks["DEPTH"]), pieces)](
        grad, x, room, height, depth, columns, width, piece, PRECISION=precision(), **blocks
    )
    total += room.sum(0)


def _blocks(dtype: torch.dtype, height: int, depth: int, columns: int) -> dict[str, int]:
    """Sizes of what a program multiplies: smaller in single precision, whose exact products have no tensor cores."""
    tall, deep, wide = (32, 32, 64) if dtype == torch.float32 else (64, 32, 64)

    def fitting(most: int, size: int) -> int:
        return min(most, max(16, triton.next_power_of_2(size)))

    return {"HEIGHT": fitting(tall, height), "DEPTH": fitting(deep, depth), "COLUMNS": fitting(wide, columns)}
