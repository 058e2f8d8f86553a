"""Indices of a table that is made of parts: which row of which part each of them is, by the kernels or in PyTorch.

Both refuse indices outside the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tensorbed.backends import native
from tensorbed.backends.coded import Coded
from tensorbed.backends.native import TYPES
from tensorbed.backends.native.chains import unready
from tensorbed.indexing import check_range

if TYPE_CHECKING:
    from tensorbed import _native


class AskedOfPart(NamedTuple):
    """Which rows are asked of one part.

    Shape:
        - ids: ``(m,)``, its rows
        - at: ``(m,)``, ascending, where they stand in the batch
    """

    ids: Tensor
    at: Tensor


class Located:
    """A batch of ``count`` indices as the kernels keep it, or what is asked of each part as PyTorch has found it."""

    def __init__(self, rows: _native.Located | Sequence[AskedOfPart], count: int = 0) -> None:
        self._rows, self._count = rows, count

    def split(self) -> Sequence[AskedOfPart]:
        """What is asked of each part."""
        if isinstance(self._rows, Sequence):
            return self._rows
        both = torch.empty(2 * self._count, dtype=torch.int64, device="cpu")  # each tensor takes a microsecond
        counts = self._rows.split(both.data_ptr(), both.data_ptr() + self._count * both.itemsize)
        pieces = both.split(counts * 2)
        return list(map(AskedOfPart, pieces[: len(counts)], pieces[len(counts) :]))

    def fill(self, out: Tensor, codes: Sequence[Coded]) -> bool:  # (n, cols)
        """Write all rows of :func:`all_codes` in one call, if it is the kernels that keep the batch."""
        if isinstance(self._rows, Sequence):
            return False
        handles = [part.handle() for part in codes]
        self._rows.rows(TYPES[out.dtype], handles, out.data_ptr(), torch.get_num_threads())
        return True


def all_codes(makings: Iterable[Any], dtype: torch.dtype, cols: int) -> list[Coded] | None:
    """What parts are made of, if the kernels decode every one of them into rows of this dtype."""
    codes = []
    for making in makings:
        if not isinstance(making, Coded) or not making.fills(dtype, cols):
            return None
        codes.append(making)
    return codes


def located_by_ends(index: Tensor, ends: Sequence[int]) -> Located:  # (n,)
    """Parts that are consecutive bands of rows; ``ends`` says where each of them ends."""
    firsts = [0, *ends[:-1]]
    if _readable(index):
        assert native.module is not None
        index, count = index.contiguous(), index.shape[0]
        return Located(native.module.Located.by_ends(index.data_ptr(), count, ends), count)
    index = check_range(index, ends[-1])
    part = torch.bucketize(index.contiguous(), torch.tensor(ends, device=index.device), right=True)
    places = [(part == k).nonzero()[:, 0] for k in range(len(ends))]
    return Located(
        [AskedOfPart(index.index_select(0, at) - first, at) for first, at in zip(firsts, places, strict=True)]
    )


def located_by_places(index: Tensor, places: Tensor, rows: int) -> Located:  # (n,), (hot rows,)
    """Two parts: the rows in ``places``, which ascend, and of ``rows`` all others."""
    if _readable(index, places) and places.is_contiguous():
        assert native.module is not None
        index, count = index.contiguous(), index.shape[0]
        where = (index.data_ptr(), count, rows, places.data_ptr(), places.shape[0])
        return Located(native.module.Located.by_places(*where), count)
    index = check_range(index, rows)
    before = torch.searchsorted(places, index.contiguous())
    is_hot = places.index_select(0, before.clamp_max(places.shape[0] - 1)) == index
    hot, rest = is_hot.nonzero()[:, 0], is_hot.logical_not().nonzero()[:, 0]
    return Located(
        [AskedOfPart(before.index_select(0, hot), hot), AskedOfPart((index - before).index_select(0, rest), rest)]
    )


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
        trained = ctx.needs_input_grad[1 + len(places) :]
        grads = (grad.index_select(0, at) if wanted else None for at, wanted in zip(places, trained, strict=True))
        return None, *(None for _ in places), *grads


def _readable(*tensors: Tensor) -> bool:
    return native.available and unready(tensors, torch.int64) is None
