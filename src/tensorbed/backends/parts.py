"""Indices of a table that is made of parts, split by the part that has their rows: natively, or in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorbed.backends import native
from tensorbed.backends.native.chains import unready


class Located(NamedTuple):
    """What is asked of one part.

    Shape:
        - ids: ``(m,)``, its rows
        - at: ``(m,)``, ascending, where they stand in the batch
    """

    ids: Tensor
    at: Tensor


def split_by_ends(index: Tensor, ends: Sequence[int]) -> list[Located]:  # (n,)
    """Parts that are consecutive bands of rows; ``ends`` says where each of them ends."""
    firsts = [0, *ends[:-1]]
    if _readable(index):
        assert native.module is not None
        index, room = index.contiguous(), _Room(index.shape[0])
        return room.cut(native.module.split_by_ends(index.data_ptr(), index.shape[0], ends, *room.addresses))
    part = torch.bucketize(index.contiguous(), torch.tensor(ends, device=index.device), right=True)
    places = [(part == k).nonzero()[:, 0] for k in range(len(ends))]
    return [Located(index.index_select(0, at) - first, at) for first, at in zip(firsts, places, strict=True)]


def split_by_places(index: Tensor, places: Tensor, rows: int) -> list[Located]:  # (n,), (hot rows,)
    """Two parts: the rows in ``places``, which ascend, and of ``rows`` all others."""
    if _readable(index, places) and places.is_contiguous():
        assert native.module is not None
        index, room = index.contiguous(), _Room(index.shape[0])
        where = (index.data_ptr(), index.shape[0], rows, places.data_ptr(), places.shape[0])
        return room.cut(native.module.split_by_places(*where, *room.addresses))
    before = torch.searchsorted(places, index.contiguous())
    is_hot = places.index_select(0, before.clamp_max(places.shape[0] - 1)) == index
    hot, rest = is_hot.nonzero()[:, 0], is_hot.logical_not().nonzero()[:, 0]
    return [Located(before.index_select(0, hot), hot), Located((index - before).index_select(0, rest), rest)]


def put_together(out: Tensor, places: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:  # (n, cols) each
    """Rows of each part where they stand in the batch, all of it between them, written to ``out``; differentiable."""
    together: Tensor = _PutTogether.apply(out, *places, *rows)  # type: ignore[no-untyped-call]
    return together


class _PutTogether(torch.autograd.Function):
    """A chain of ``index_copy_``, whose gradient would be copied whole for each part."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        places, rows = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        ctx.mark_dirty(out)
        ctx.save_for_backward(*places)
        for at, own in zip(places, rows, strict=True):
            out.index_copy_(0, at, own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        places = ctx.saved_tensors
        return None, *(None for _ in places), *(grad.index_select(0, at) for at in places)


def _readable(*tensors: Tensor) -> bool:
    return native.available and unready(tensors, torch.int64) is None


class _Room:
    """Where the kernels write rows and places: one tensor, because each that is made takes a microsecond."""

    def __init__(self, n: int) -> None:
        self._both = torch.empty(2 * n, dtype=torch.int64, device="cpu")
        first = self._both.data_ptr()
        self.addresses = first, first + n * self._both.itemsize

    def cut(self, counts: list[int]) -> list[Located]:
        pieces = self._both.split(counts * 2)
        return list(map(Located, pieces[: len(counts)], pieces[len(counts) :]))
