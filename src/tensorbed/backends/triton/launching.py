"""What every launch of a kernel has in common: its buffers, the sizes of its tiles, and how products are rounded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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


# Exact products of single precision are made without tensor cores, and hold whole rows and columns of their operands in
# registers: larger tiles than the small ones would spill, and on some targets those of small ranks would too.
_SMALL, _LARGE = Tiles(32, 32, 16, 4, 2), Tiles(64, 64, 32, 8, 2)
_SMALL_RANK = 16


def tiles(rank: int, dtype: torch.dtype) -> Tiles:
    """For products whose sums are of this length; those of halves are of single precision from the second core on."""
    return _SMALL if precision() == "ieee" or rank <= _SMALL_RANK else _LARGE


def options(sizes: Tiles) -> dict[str, Any]:
    """Of a launch, by name. Multiply-adds are fused because this says so: Triton's own default changes with 3.10."""
    return {"num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": True}


def tunes() -> bool:
    """Whether users asked for sizes to be tried when a kernel first runs: better ones, after minutes."""
    return os.environ.get("TENSORBED_TRITON_TUNE") == "1"


@lru_cache(maxsize=1024)
def tuned(kernel: Any, inner: int, outer: int) -> Any:
    """A kernel of products of these sizes that tries sizes of tiles when it first runs."""
    import triton

    sides = [(cols, depth) for cols in (16, 32, 64, 128) for depth in (16, 32, 64)]
    fitting = [(c, d) for c, d in sides if c <= 2 * side(128, outer) and d <= 2 * side(64, inner)]
    configs = [
        triton.Config({"COLS": cols, "DEPTH": depth}, num_warps=warps, num_stages=stages)
        for cols, depth in fitting
        for warps in (4, 8)
        for stages in (2, 3)
    ]
    # Every size that is tried runs the kernel: one that adds to what it is given finds it as it was each time.
    added_to = ["out"] if kernel is chain_kernels().left_gradients else []
    # Sizes of a call change none of it: each table has kernels of its own here.
    return triton.autotune(configs, key=["FIRST"], restore_value=added_to)(kernel)


def launch_product(
    kernel: Any, grid: Callable[[int], Sequence[int]], sizes: Tiles, inner: int, outer: int, **arguments: Any
) -> None:
    """A kernel whose tiles have ``COLS`` columns, on which the grid depends, and sums of ``DEPTH`` terms at once."""
    if tunes():
        tuned(kernel, inner, outer)[lambda chosen: tuple(grid(chosen["COLS"]))](enable_fp_fusion=True, **arguments)
        return
    cols, depth = side(sizes.cols, outer), side(sizes.depth, inner)
    kernel[tuple(grid(cols))](COLS=cols, DEPTH=depth, **arguments, **options(sizes))


def precision() -> str:
    """Of products of single precision: torch's setting, which is about products on CUDA whoever computes them."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def halves_as_single() -> bool:
    """Whether kernels widen bfloat16 before they compute: the interpreter does not know its arithmetic."""
    return state.interpreted


def current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on torch's current device: this one, in here."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    pinned, copied, event = _copied(numbers, device)
    if event is not None:
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED.extend((pinned, copied))
        else:  # it may have been copied in another stream
            torch.cuda.current_stream(device).wait_event(event)
    return copied


@lru_cache(maxsize=1024)
def _copied(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
    on_gpu = device.type == "cuda"
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
    copied = host.to(device, non_blocking=True)
    return host, copied, torch.cuda.current_stream(device).record_event() if on_gpu else None
