"""Calls of the backend that launch every kernel of it, of every dtype, for ranks from small to large."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import tensorbed as tb
from benchmarks.gpu_compile.compiling import TARGETS, Needs, compiled
from tensorbed.backends.coded import Product, Quantized
from tensorbed.backends.triton import chain_kernels, codes, plan_kernels, products, softmax

MODULES: tuple[ModuleType, ...] = (chain_kernels, plan_kernels, codes, products, softmax)
Case = tuple[str, str, int]  # target, dtype, rank
RANKS = (8, 16, 64, 128)
SEVERAL = 16  # the rank of which several tables are computed at once: their number is a constant of the same kernels
# Of single precision two ways: exact, and by tensor cores where torch was told that its products may be.
DTYPES = {
    "float32": torch.float32,
    "float32 as tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def tiles_of_the_loss(dtype: torch.dtype, rank: int) -> None:
    """Of all options, in any precision of the scores."""
    for rows, n, smoothed, weighted in ((512, 64, False, False), (512, 64, True, True)):
        tile, target = torch.zeros(rows, n, dtype=dtype), torch.zeros(n, dtype=torch.int64)
        column, weight = torch.zeros(n), torch.zeros(rows) if weighted else None
        smooth = column.clone() if smoothed else None
        softmax.absorb(tile, 0, target, column, column, column, smooth, weight)
        softmax.differentiate(tile, 0, target, column, column, smooth, column, weight)


def products_through_cores(dtype: torch.dtype, rank: int) -> None:
    """Cores in the middle and the last, of eight columns each, for several and for one vector."""
    for height, depth, width in ((4 * rank, 8 * rank, 512), (60, rank, 1)):
        matrix, x = torch.zeros(height, depth, dtype=dtype), torch.zeros(4, depth, width, dtype=dtype)
        out, total = torch.zeros(4, height, width, dtype=dtype), torch.zeros(height, depth)
        products.times(matrix, x, out)
        products.times(matrix.T, out, torch.zeros_like(x))
        products.add_outer(total, out, x)


def tables_of_codes(dtype: torch.dtype, rank: int) -> None:
    """Rows, scores and sums of tables of four times as many columns as the rank."""
    index, cols = torch.zeros(64, dtype=torch.int64), 4 * rank
    scale, numbers = torch.zeros(64, 1, dtype=dtype), torch.zeros(64, cols, dtype=torch.int8)
    steps, packed = torch.zeros(64, -(-cols // 32), dtype=torch.int8), torch.zeros(64, cols // 2, dtype=torch.uint8)
    named = Product(cols, torch.zeros(64, rank, dtype=torch.uint8), torch.zeros(rank, 64, 4, dtype=dtype))
    whole = Quantized(cols, numbers, scale, None, cols, 8)
    for coded in (whole, Quantized(cols, packed, scale, steps, 32, 4), named):
        codes.rows(coded, index)
        codes.scores(coded, _zeros(cols, 64, dtype), _zeros(64, 64, dtype))
    codes.scores(whole, _zeros(cols, 1, dtype), _zeros(64, 1, dtype))
    codes.sums(named, _zeros(rank * 64, 64, dtype), _zeros(64, 64, dtype))


def chains(dtype: torch.dtype, rank: int) -> None:
    """Training steps of trains and rings, weighted bags of a low-rank table, and several trains at once."""
    shape = ((20, 20, 25), (8, 8, 8))
    said: Any = {"impl": "triton", "dtype": dtype}
    index, offsets = torch.arange(64) * 97 % 10_000, torch.arange(0, 64, 16)
    ring = tb.TensorRing(rank=min(rank, 16), shape=shape)  # whose sums are of rank times rank
    for format in (tb.TensorTrain(rank=rank, shape=shape), ring):
        tb.Embedding(10_000, 512, format, **said)(index).sum().backward()
    bags = tb.EmbeddingBag(10_000, 512, tb.LowRank(rank=rank), mode="sum", **said)
    bags(index, offsets, torch.ones(64, dtype=dtype, requires_grad=True)).sum().backward()
    if rank == SEVERAL:
        sizes = {"C1": 1_000, "C2": 30_000, "C3": 5_000_000}
        fields = tb.EmbeddingBagCollection.from_sizes(sizes, 16, tb.TensorTrain(rank=rank), **said)
        fields(torch.ones(64, 3, dtype=torch.int64))[0].sum().backward()


def _zeros(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(rows, n, dtype=dtype)


CALLS: tuple[Callable[[torch.dtype, int], None], ...] = (
    chains,
    tables_of_codes,
    products_through_cores,
    tiles_of_the_loss,
)


def every_call(name: str, rank: int) -> None:
    """All of them, in a dtype of :data:`DTYPES`."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "float32 as tf32" else "ieee"
    try:
        for call in CALLS:
            call(DTYPES[name], rank)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def compiled_case(case: Case) -> dict[str, list[Needs]]:
    """What all of them need, for a target, a dtype and a rank."""
    target, dtype, rank = case
    return compiled(TARGETS[target], lambda: every_call(dtype, rank))
