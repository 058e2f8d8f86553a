"""What every launch of a kernel has in common: its buffers, the sizes of its tiles, and how products are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
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
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def halves_as_single() -> bool:
    """Whether kernels widen bfloat16 before they compute: the interpreter does not know its arithmetic."""
    return state.interpreted


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that a kernel fills. All of it comes from here, so that tests can put guards around it."""
    return torch.empty(shape, dtype=dtype, device=device)


def power_of_2(number: int) -> int:
    """The first that is not smaller."""
    return 1 << (number - 1).bit_length()


def side(most: int, number: int) -> int:
    """Of a tile, no larger than what there is to compute, and at least the 16 that products of tiles have."""
    return max(16, min(most, power_of_2(number)))


def chain_kernels() -> ModuleType:
    """The kernels themselves: with them Triton is imported, which takes a while and may not be there."""
    from tensorbed.backends.triton import chain_kernels

    return chain_kernels


def plan_kernels() -> ModuleType:
    """Those that make plans."""
    from tensorbed.backends.triton import plan_kernels

    return plan_kernels


_CAPTURED: list[Tensor] = []  # what captured graphs read whenever they are replayed


def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:  # -> (n,) int64
    """Whole numbers for kernels, copied once; from pinned memory, for which the host need not wait."""
    pinned, copied = _copied(numbers, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _CAPTURED.extend((pinned, copied))
    return copied


@lru_cache(maxsize=1024)
def _copied(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host, host.to(device, non_blocking=True)
