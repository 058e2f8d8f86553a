"""A tile of the vocabulary's loss on a GPU: the running log-sum-exp of each column, and the gradient in its place.

A tile is cut into strips of rows. Each strip's maximum and sum are written by one program and merged, in the order of
the strips, by another: there are no atomics, and the bits are the same every time. Scores of half precision are read
as they are, computed with in single and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensorbed.backends.triton import launching
from tensorbed.backends.triton.rounding import rounded

_STRIPS = 64  # of a tile at most: as many as are merged at once
_STRIP = 64  # rows of one at least
_TILES = launching.Tiles(rows=16, cols=64, depth=1, warps=4, stages=2)
_NUMBERS = _TILES.rows * _TILES.cols  # of a tile that a program has at once


@triton.jit
def absorb_strips(
    tile,  # (rows, cols) a row every `stride` numbers
    target,  # (cols,) int64, of the whole vocabulary
    weight,  # (rows,) or nothing
    picked,  # (cols,) written where the target is in the tile
    strip_most,  # (strips, cols)
    strip_total,
    strip_scores,
    rows,
    cols,
    stride,
    start,
    strip,
    SUMS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    number = tl.program_id(0)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < cols
    aim = tl.load(target + column, mask=inside, other=-1) - start
    first = number * strip
    last = tl.minimum(first + strip, rows)
    most = tl.full((COLS,), float("-inf"), tl.float32)
    total = tl.zeros((COLS,), tl.float32)
    scores = tl.zeros((COLS,), tl.float32)
    chosen = tl.zeros((COLS,), tl.float32)
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        known = (row < last)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * stride + column[None, :]
        x = tl.load(tile + place, mask=known, other=float("-inf")).to(tl.float32)
        top = tl.maximum(most, tl.max(x, 0))
        # A column of -inf alone has no maximum to subtract: 0 is as good, its terms are 0.
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp(most - base) + tl.sum(tl.exp(x - base[None, :]), 0)
        most = top
        chosen += tl.sum(tl.where(row[:, None] == aim[None, :], x, 0.0), 0)
        if SUMS:
            x = tl.where(known, x, 0.0)
            if WEIGHTED:
                x *= tl.load(weight + row, mask=row < last, other=0.0)[:, None]
            scores += tl.sum(x, 0)
    tl.store(picked + column, chosen, mask=inside & (aim >= first) & (aim < last))
    place = number.to(tl.int64) * cols + column
    tl.store(strip_most + place, most, mask=inside)
    tl.store(strip_total + place, total, mask=inside)
    if SUMS:
        tl.store(strip_scores + place, scores, mask=inside)


@triton.jit
def absorb_merge(
    strip_most,  # (strips, cols)
    strip_total,
    strip_scores,
    most,  # (cols,) so far, and with the strips
    total,
    all_scores,
    strips,
    cols,
    SUMS: tl.constexpr,
    STRIPS: tl.constexpr,
    COLS: tl.constexpr,
):
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = column < cols
    strip = tl.arange(0, STRIPS)
    known = (strip < strips)[:, None] & inside[None, :]
    place = strip.to(tl.int64)[:, None] * cols + column[None, :]
    mosts = tl.load(strip_most + place, mask=known, other=float("-inf"))
    totals = tl.load(strip_total + place, mask=known, other=0.0)
    before = tl.load(most + column, mask=inside, other=float("-inf"))
    top = tl.maximum(before, tl.max(mosts, 0))
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.sum(totals * tl.exp(mosts - base[None, :]), 0)
    old = tl.load(total + column, mask=inside, other=0.0)
    tl.store(total + column, old * tl.exp(before - base) + sums, mask=inside)
    tl.store(most + column, top, mask=inside)
    if SUMS:
        scores = tl.load(strip_scores + place, mask=known, other=0.0)
        old = tl.load(all_scores + column, mask=inside, other=0.0)
        tl.store(all_scores + column, old + tl.sum(scores, 0), mask=inside)


@triton.jit
def differentiate_tile(
    tile,  # (rows, cols) a row every `stride` numbers
    target,  # (cols,) int64, of the whole vocabulary
    weight,  # (rows,) or nothing
    lse,  # (cols,)
    scale,
    smooth,
    share,
    rows,
    cols,
    stride,
    start,
    SMOOTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < cols
    known = (row < rows)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * stride + column[None, :]
    x = tl.load(tile + place, mask=known, other=0.0).to(tl.float32)
    a = tl.load(scale + column, mask=inside, other=0.0)[None, :]
    y = a * tl.exp(x - tl.load(lse + column, mask=inside, other=0.0)[None, :])
    y = tl.where(a == 0, 0.0, y)  # a vector that does not count, whatever its scores are
    if SMOOTH:
        b = tl.load(smooth + column, mask=inside, other=0.0)[None, :]
        if WEIGHTED:
            b = b * tl.load(weight + row, mask=row < rows, other=0.0)[:, None]
        y -= b
    aim = tl.load(target + column, mask=inside, other=-1) - start
    g = tl.load(share + column, mask=inside, other=0.0)[None, :]
    y = tl.where(row[:, None] == aim[None, :], y - g, y)
    tl.store(tile + place, rounded(y, tile, WIDEN), mask=known)


def absorb(
    tile: Tensor,
    start: int,
    target: Tensor,
    most: Tensor,
    total: Tensor,
    picked: Tensor,
    all_scores: Tensor | None,
    weight: Tensor | None,
) -> None:
    """Take a tile, whose first row is class ``start``, into what is known of each column.

    Shape:
        - tile: ``(rows, n)``, side by side in memory
        - target: ``(n,)`` int64, classes; others than those of the tile are in other tiles, or in none
        - most, total: ``(n,)``, the largest score so far and the sum of ``exp(score - most)``
        - picked: ``(n,)``, the target's score, written if it is in this tile
        - all_scores: ``(n,)``, the sum of all scores, those of a class times its weight ``(rows,)`` if there is one
    """
    rows, cols = tile.shape
    if not rows or not cols:
        return
    strip = max(_STRIP, launching.power_of_2(-(-rows // _STRIPS)))
    strips, width = -(-rows // strip), _width(cols)
    across, options = -(-cols // width), launching.options(_TILES)
    room = launching.empty((2 if all_scores is None else 3, strips, cols), torch.float32, tile.device)
    sums = None if all_scores is None else room[2]
    said = {"SUMS": sums is not None, "COLS": width, **options}
    with launching.current(tile.device):
        absorb_strips[(strips, across)](
            tile, target, weight, picked, room[0], room[1], sums, rows, cols, tile.stride(0), start, strip,
            WEIGHTED=weight is not None, ROWS=_NUMBERS // width, **said,
        )  # fmt: skip
        absorb_merge[(across,)](room[0], room[1], sums, most, total, all_scores, strips, cols, STRIPS=_STRIPS, **said)


def differentiate(
    tile: Tensor,
    start: int,
    target: Tensor,
    lse: Tensor,
    scale: Tensor,
    smooth: Tensor | None,
    share: Tensor,
    weight: Tensor | None,
) -> None:
    """``tile = scale * exp(tile - lse) - smooth * weight - share * [class is target]`` in place.

    The first term is 0 where ``scale`` is, whatever the scores are.

    Shape:
        - tile, target, weight: as :func:`absorb` has them
        - lse, scale, smooth, share: ``(n,)``
    """
    rows, cols = tile.shape
    if not rows or not cols:
        return
    width = _width(cols)
    height = _NUMBERS // width
    with launching.current(tile.device):
        differentiate_tile[(-(-rows // height), -(-cols // width))](
            tile, target, weight, lse, scale, smooth, share, rows, cols, tile.stride(0), start,
            SMOOTH=smooth is not None, WEIGHTED=weight is not None, WIDEN=launching.halves_as_single(),
            ROWS=height, COLS=width, **launching.options(_TILES),
        )  # fmt: skip


def _width(cols: int) -> int:
    """Columns that a program has at once, which are neighbours in memory."""
    return launching.side(_TILES.cols, cols)
