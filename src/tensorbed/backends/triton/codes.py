"""Tables of codes on a GPU: rows, and scores against vectors, from the codes themselves.

What is read outside of a table, an index or the name of a codebook's entry, is masked and gives zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensorbed.backends.coded import Coded, Product, Quantized
from tensorbed.backends.triton import launching
from tensorbed.backends.triton.products import products_of, tiles_of
from tensorbed.backends.triton.rounding import rounded
from tensorbed.dispatch import full_precision, no_second_derivative, working_dtype
from tensorbed.indexing import out_of_range


@triton.jit
def _numbers(codes, steps, row, column, known, width, groups, group, BITS: tl.constexpr, GROUPED: tl.constexpr):
    """Shares of the rows' scales: whole numbers times steps, of few digits, so that these products are exact."""
    if BITS == 8:
        number = tl.load(codes + row * width + column, mask=known, other=0).to(tl.float32) / 128
    else:  # two a byte, the first one low
        byte = tl.load(codes + row * width + column // 2, mask=known, other=0).to(tl.int32)
        number = (((byte >> (4 * (column % 2))) & 15) - 8).to(tl.float32) / 8
    if GROUPED:
        number *= tl.load(steps + row * groups + column // group, mask=known, other=0).to(tl.float32) / 128
    return number


@triton.jit
def _entries(codes, books, row, column, known, parts, words, width):
    """Of each part of a row the entry of its codebook that the code names."""
    part = column // width
    code = tl.load(codes + row * parts + part, mask=known, other=0).to(tl.int32)
    place = (part * words + code) * width + column % width
    return tl.load(books + place, mask=known & (code < words), other=0.0)


@triton.jit
def _vectors(x, column, vector, cols, n, WIDEN: tl.constexpr):
    """Some columns of some vectors, which stand in ``x`` side by side, as products take them."""
    there = (column < cols)[:, None] & (vector < n)[None, :]
    numbers = tl.load(x + column.to(tl.int64)[:, None] * n + vector[None, :], mask=there, other=0.0)
    if WIDEN:
        numbers = numbers.to(tl.float32)
    return numbers


@triton.jit
def quantized_rows(
    index,  # (count,) int64
    codes,  # (rows, width)
    steps,  # (rows, groups) or nothing
    scale,  # (rows,)
    out,  # (count, cols)
    count,
    rows,
    cols,
    width,
    groups,
    group,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row = tl.load(index + place, mask=place < count, other=-1)
    valid = (row >= 0) & (row < rows)
    known = valid[:, None] & (column < cols)[None, :]
    numbers = _numbers(codes, steps, row[:, None], column[None, :], known, width, groups, group, BITS, GROUPED)
    size = tl.load(scale + row, mask=valid, other=0.0).to(tl.float32)
    made = rounded(numbers * size[:, None], out, WIDEN)
    written = (place < count)[:, None] & (column < cols)[None, :]
    tl.store(out + place.to(tl.int64)[:, None] * cols + column[None, :], made, mask=written)


@triton.jit
def product_rows(
    index,  # (count,) int64
    codes,  # (rows, parts)
    books,  # (parts, words, width)
    out,  # (count, cols)
    count,
    rows,
    cols,
    parts,
    words,
    width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row = tl.load(index + place, mask=place < count, other=-1)
    known = ((row >= 0) & (row < rows))[:, None] & (column < cols)[None, :]
    made = _entries(codes, books, row[:, None], column[None, :], known, parts, words, width)
    written = (place < count)[:, None] & (column < cols)[None, :]
    tl.store(out + place.to(tl.int64)[:, None] * cols + column[None, :], made, mask=written)


@triton.jit
def quantized_scores(
    codes,  # (rows, width)
    steps,  # (rows, groups) or nothing
    scale,  # (rows,)
    x,  # (cols, n)
    out,  # (rows, n)
    rows,
    cols,
    n,
    width,
    groups,
    group,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    total = tl.zeros((ROWS, VECTORS), tl.float32)
    for begin in range(0, cols, COLS):
        column = begin + tl.arange(0, COLS)
        known = (row < rows)[:, None] & (column < cols)[None, :]
        numbers = _numbers(codes, steps, row[:, None], column[None, :], known, width, groups, group, BITS, GROUPED)
        numbers = tl.where(known, numbers, 0.0)
        vectors = _vectors(x, column, vector, cols, n, WIDEN)
        total = tl.dot(numbers.to(vectors.dtype), vectors, total, input_precision=PRECISION)
    size = tl.load(scale + row, mask=row < rows, other=0.0).to(tl.float32)
    made = rounded(total * size[:, None], out, WIDEN)
    tl.store(out + row[:, None] * n + vector[None, :], made, mask=(row < rows)[:, None] & (vector < n)[None, :])


@triton.jit
def product_scores(
    codes,  # (rows, parts)
    books,  # (parts, words, width)
    x,  # (cols, n)
    out,  # (rows, n)
    rows,
    cols,
    n,
    parts,
    words,
    width,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    total = tl.zeros((ROWS, VECTORS), tl.float32)
    for begin in range(0, cols, COLS):
        column = begin + tl.arange(0, COLS)
        known = (row < rows)[:, None] & (column < cols)[None, :]
        made = _entries(codes, books, row[:, None], column[None, :], known, parts, words, width)
        vectors = _vectors(x, column, vector, cols, n, WIDEN)
        total = tl.dot(made.to(vectors.dtype), vectors, total, input_precision=PRECISION)
    inside = (row < rows)[:, None] & (vector < n)[None, :]
    tl.store(out + row[:, None] * n + vector[None, :], rounded(total, out, WIDEN), mask=inside)


@triton.jit
def entry_sums(
    codes,  # (rows, parts)
    tables,  # (parts * words, n)
    out,  # (rows, n)
    rows,
    n,
    parts,
    words,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    inside = (row < rows)[:, None] & (vector < n)[None, :]
    total = tl.zeros((ROWS, VECTORS), tl.float32)
    for part in range(parts):
        code = tl.load(codes + row * parts + part, mask=row < rows, other=0).to(tl.int64)
        place = (part * words + code)[:, None] * n + vector[None, :]
        total += tl.load(tables + place, mask=inside & (code < words)[:, None], other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * n + vector[None, :], rounded(total, out, WIDEN), mask=inside)


_SAID = "Tensor index, Tensor codes, Tensor floats, Tensor? steps, int cols, int group, int bits"


def rows(coded: Coded, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
    """Rows, differentiable in the floats and the rotation; an index outside the table is the device's error."""
    if isinstance(coded, Product) and coded.rotation is not None:
        # Half precision in single, rounded once.
        floats, rotation = coded.floats, coded.rotation
        wide = working_dtype(floats, rotation)
        with full_precision(index):
            made = rows(replace(coded, floats=floats.to(wide), rotation=None), index) @ rotation.to(wide)
            return made.to(torch.promote_types(floats.dtype, rotation.dtype))
    steps, group, bits = (coded.steps, coded.group, coded.bits) if isinstance(coded, Quantized) else (None, 1, 0)
    out: Tensor = _rows_op(index, coded.codes, coded.floats, steps, coded.cols, group, bits)
    return out


@torch.library.custom_op("tensorbed::coded_rows", mutates_args=(), schema=f"({_SAID}) -> Tensor")
def _rows_op(index: Tensor, codes: Tensor, floats: Tensor, steps: Tensor | None, *sizes: int) -> Tensor:
    rows = codes.shape[0]
    torch._assert_async(((index >= 0) & (index < rows)).all(), out_of_range(None, rows))
    return _made(_coded(codes, floats, steps, *sizes), index)


@_rows_op.register_fake
def _(index: Tensor, codes: Tensor, floats: Tensor, steps: Tensor | None, cols: int, *_: int) -> Tensor:
    return floats.new_empty(index.shape[0], cols)


@torch.library.custom_op("tensorbed::coded_rows_backward", mutates_args=(), schema=f"(Tensor grad, {_SAID}) -> Tensor")
def _gradient_op(grad: Tensor, index: Tensor, *said: Any) -> Tensor:
    return _coded(*said).gradient(index, grad, _made)


@_gradient_op.register_fake
def _(grad: Tensor, index: Tensor, codes: Tensor, floats: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(floats)


_gradient_op.register_autograd(no_second_derivative)


def _coded(codes: Tensor, floats: Tensor, steps: Tensor | None, cols: int, group: int, bits: int) -> Coded:
    """The table again, from what an operator was given; 0 bits are those of a codebook's entry."""
    if bits == 0:
        return Product(cols, codes, floats)
    return Quantized(cols, codes, floats, steps, group, bits)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.cols, ctx.group, ctx.bits = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_floats: Tensor = _gradient_op(grad, *ctx.saved_tensors, ctx.cols, ctx.group, ctx.bits)
    return None, None, of_floats, None, None, None, None


_rows_op.register_autograd(_backward, setup_context=_keep)


_TILES = launching.Tiles(rows=16, cols=64, depth=1, warps=4, stages=2)  # of what is read and written, not multiplied
_NUMBERS = _TILES.rows * _TILES.cols  # that a program has at once


def _made(coded: Coded, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
    index, codes, floats = index.contiguous(), coded.codes.contiguous(), coded.floats.contiguous()
    count, cols = index.shape[0], coded.cols
    out = launching.empty((count, cols), floats.dtype, floats.device)
    if not count:
        return out
    width = min(256, launching.power_of_2(cols))
    height = _NUMBERS // width
    grid, said = (-(-count // height), -(-cols // width)), {"ROWS": height, "COLS": width, **launching.options(_TILES)}
    if isinstance(coded, Quantized):
        steps, *lengths, kind = _quantized(coded)
        said |= {**kind, "WIDEN": launching.halves_as_single()}
        with launching.current(out.device):
            quantized_rows[grid](index, codes, steps, floats, out, count, coded.rows, cols, *lengths, **said)
    else:
        with launching.current(out.device):
            product_rows[grid](index, codes, floats, out, count, coded.rows, cols, *floats.shape, **said)
    return out


def _quantized(coded: Quantized) -> tuple[Any, ...]:
    """What kernels are told of quantised rows: steps, bytes of a row, its groups, columns of each, and constants."""
    steps = None if coded.steps is None else coded.steps.contiguous()
    kind = {"BITS": coded.bits, "GROUPED": steps is not None}
    return steps, coded.codes.shape[1], 1 if steps is None else steps.shape[1], coded.group, kind


def scores(coded: Coded, x: Tensor, out: Tensor) -> None:  # (cols, n) -> (rows, n)
    """Write ``rows @ x``; sums are single."""
    (rows, n), cols = out.shape, coded.cols
    if not rows or not n:
        return
    codes, floats, sizes = coded.codes.contiguous(), coded.floats.contiguous(), tiles_of(cols, x.dtype)
    height, depth, vectors = sizes.rows, launching.side(sizes.depth, cols), launching.side(sizes.cols, n)
    said = {"ROWS": height, "COLS": depth, "VECTORS": vectors, **products_of(sizes)}
    grid = -(-rows // height), -(-n // vectors)
    if isinstance(coded, Quantized):
        steps, *lengths, kind = _quantized(coded)
        with launching.current(out.device):
            quantized_scores[grid](codes, steps, floats, x, out, rows, cols, n, *lengths, **kind, **said)
    else:
        with launching.current(out.device):
            product_scores[grid](codes, floats, x, out, rows, cols, n, *floats.shape, **said)


def sums(coded: Product, tables: Tensor, out: Tensor) -> None:  # (parts * words, n) -> (rows, n)
    """Write of each row the sum of the entries that its codes name."""
    rows, n = out.shape
    if not rows or not n:
        return
    parts, words, _ = coded.floats.shape
    vectors = launching.side(_TILES.cols, n)
    height = _NUMBERS // vectors
    with launching.current(out.device):
        entry_sums[(-(-rows // height), -(-n // vectors))](
            coded.codes.contiguous(), tables, out, rows, n, parts, words, WIDEN=launching.halves_as_single(),
            ROWS=height, VECTORS=vectors, **launching.options(_TILES),
        )  # fmt: skip
