"""What every launch of a kernel has in common: its buffers, the sizes of its tiles, and how products are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorbed.backends import triton as state


class Tiles(NamedTuple):
    """Sizes of the products that one program makes, and who computes them. All are powers of 2, at least 16."""

    rows: int
    cols: int
    depth: int  # of a sum that is added up at once
    warps: int
    stages: int


# By the largest rank of a call, then by whether numbers are halves: from small tests on paper, not measured. A tile's
# accumulator is rows x cols floats over 32 * warps threads; two operands a stage are in shared memory.
_BY_RANK = (
    (16, {False: Tiles(64, 32, 16, 4, 2), True: Tiles(64, 32, 16, 4, 3)}),
    (32, {False: Tiles(64, 64, 32, 4, 2), True: Tiles(64, 64, 32, 4, 3)}),
    (64, {False: Tiles(64, 64, 32, 4, 3), True: Tiles(64, 64, 64, 4, 3)}),
)
_LARGER = {False: Tiles(64, 128, 32, 8, 3), True: Tiles(64, 128, 64, 8, 3)}


def tiles(rank: int, dtype: torch.dtype) -> Tiles:
    """For products whose sums are of this length."""
    halves = dtype.itemsize < 4
    return next((sizes[halves] for most, sizes in _BY_RANK if rank <= most), _LARGER[halves])


def options(sizes: Tiles) -> dict[str, Any]:
    """Of a launch, by name. Multiply-adds are fused because this says so: Triton's own default changes with 3.10."""
    return {"num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": True}


def precision() -> str:
    """Of products of single precision: torch's setting, which is about products on CUDA whoever computes them."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def halves_as_single() -> bool:
    """Whether kernels widen bfloat16 before they compute: the interpreter does not know its arithmetic."""
    return state.interpreted


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that a kernel fills. All of it comes from here, so that tests can put guards around it."""
    return torch.empty(shape, dtype=dtype, device=device)
