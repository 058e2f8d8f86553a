"""Products of many left factors with a few core slices: ``left[n] @ slices[digit[n]]`` and its two gradients.

Three ways, one interface. ``PerRow`` gathers a slice for each row, right for a handful of rows. ``Grouped`` hands runs
of rows that share a slice to :func:`torch.nn.functional.grouped_mm`. ``Tiled`` cuts the runs into tiles of equal
height for a batched product, for every device and dtype that ``grouped_mm`` does not take.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.contraction.plan import Level


class Products(Protocol):
    """One way to multiply: whether it wants levels sorted by digit, and whether it copies a slice for each row."""

    by_digit: bool
    gathers_slices: bool

    def multiply(self, left: Tensor, slices: Tensor, level: Level) -> Tensor:
        """``(n, m, K), (G, K, N) -> (n, m, N)``."""

    def multiply_transposed(self, grad: Tensor, slices: Tensor, level: Level) -> Tensor:
        """``(n, m, N), (G, K, N) -> (n, m, K)``: the gradient of the left factors."""

    def slice_gradients(self, left: Tensor, grad: Tensor, level: Level, groups: int) -> Tensor:
        """``(n, m, K), (n, m, N) -> (G, K, N)``: the gradient of the slices, summed over the rows of each."""


class PerRow:
    """One gathered slice and one small product a row."""

    by_digit = False
    gathers_slices = True

    def multiply(self, left: Tensor, slices: Tensor, level: Level) -> Tensor:
        return torch.bmm(left, slices.index_select(0, level.digit))

    def multiply_transposed(self, grad: Tensor, slices: Tensor, level: Level) -> Tensor:
        return torch.bmm(grad, slices.index_select(0, level.digit).transpose(1, 2))

    def slice_gradients(self, left: Tensor, grad: Tensor, level: Level, groups: int) -> Tensor:
        return sum_into(torch.bmm(left.transpose(1, 2), grad), level.digit, groups)


class Grouped:
    """Runs of rows with one slice through ``grouped_mm``: no slice is copied, no product is done twice."""

    by_digit = True
    gathers_slices = False

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """What ``grouped_mm`` is known to run and is exact enough: single precision on a CPU."""
        return tensor.is_cpu and tensor.dtype == torch.float32

    def multiply(self, left: Tensor, slices: Tensor, level: Level) -> Tensor:
        n, m, _ = left.shape
        cols = slices.shape[2]
        rows = _aligned(left.reshape(n * m, -1), 1)
        out = F.grouped_mm(rows, _aligned(slices, 1, 2), offs=_ends(level, m))
        return out[:, :cols].reshape(n, m, cols)

    def multiply_transposed(self, grad: Tensor, slices: Tensor, level: Level) -> Tensor:
        n, m, _ = grad.shape
        inner = slices.shape[1]
        rows = _aligned(grad.reshape(n * m, -1), 1)
        out = F.grouped_mm(rows, _aligned(slices, 1, 2).transpose(1, 2), offs=_ends(level, m))
        return out[:, :inner].reshape(n, m, inner)

    def slice_gradients(self, left: Tensor, grad: Tensor, level: Level, groups: int) -> Tensor:
        n, m, inner = left.shape
        cols = grad.shape[2]
        rows = _aligned(left.reshape(n * m, inner), 1)
        out = F.grouped_mm(rows.t(), _aligned(grad.reshape(n * m, cols), 1), offs=_ends(level, m))
        return out[:, :inner, :cols]


class Tiled:
    """Runs cut into tiles of equal height, one batched product over the tiles; the host waits once a product."""

    by_digit = True
    gathers_slices = False

    def __init__(self, height: int = 16) -> None:
        self.height = height

    def multiply(self, left: Tensor, slices: Tensor, level: Level) -> Tensor:
        return self._through(left, slices, level)

    def multiply_transposed(self, grad: Tensor, slices: Tensor, level: Level) -> Tensor:
        return self._through(grad, slices.transpose(1, 2), level)

    def slice_gradients(self, left: Tensor, grad: Tensor, level: Level, groups: int) -> Tensor:
        slot, owner, height = self._tiles(level)
        a, b = _spread(left, slot, owner, height), _spread(grad, slot, owner, height)
        return sum_into(torch.bmm(a.transpose(1, 2), b), owner, groups)

    def _through(self, rows: Tensor, slices: Tensor, level: Level) -> Tensor:
        m = rows.shape[1]
        slot, owner, height = self._tiles(level)
        out = torch.bmm(_spread(rows, slot, owner, height), slices.index_select(0, owner))
        return out.reshape(-1, m, out.shape[2]).index_select(0, slot)

    def _tiles(self, level: Level) -> tuple[Tensor, Tensor, int]:
        """Slot of each row in the padded tiles, the digit each tile belongs to, and the tiles' height.

        Tiles are no higher than runs are long on average: padding at most doubles the rows.

        Shape:
            - output: ``(n,)`` and ``(tiles,)``
        """
        assert level.ends is not None
        ends = level.ends.long()
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        height = max(1, min(self.height, level.digit.shape[0] // ends.shape[0]))
        tiles = (ends - starts + height - 1) // height
        first_tile = tiles.cumsum(0) - tiles
        every = torch.arange(tiles.shape[0], device=tiles.device)
        owner = torch.repeat_interleave(every, tiles)
        row = torch.arange(level.digit.shape[0], device=tiles.device)
        slot = first_tile[level.digit] * height + row - starts[level.digit]
        return slot, owner, height


def _spread(rows: Tensor, slot: Tensor, owner: Tensor, height: int) -> Tensor:
    """Rows at their slots of zero-padded tiles: ``(n, m, width) -> (tiles, height * m, width)``."""
    _, m, width = rows.shape
    padded = rows.new_zeros(owner.shape[0] * height, m, width)
    padded[slot] = rows
    return padded.reshape(owner.shape[0], height * m, width)


def sum_into(rows: Tensor, position: Tensor, size: int) -> Tensor:
    """Add up rows that share a position: ``(n, ...) -> (size, ...)``."""
    return rows.new_zeros(size, *rows.shape[1:]).index_add_(0, position, rows)


def _ends(level: Level, height: int) -> Tensor:
    assert level.ends is not None
    return level.ends * height


def _aligned(tensor: Tensor, *dims: int) -> Tensor:
    """Zero-pad dimensions to the 16 bytes that ``grouped_mm`` asks of inner sizes."""
    unit = 16 // tensor.element_size()
    short = [0] * (2 * tensor.dim())
    for dim in dims:
        short[2 * (tensor.dim() - 1 - dim) + 1] = -tensor.shape[dim] % unit
    return F.pad(tensor, short) if any(short) else tensor.contiguous()
