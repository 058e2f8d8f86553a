"""How fast a lookup could be: what the machine can do, and the least that must be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from benchmarks.workloads import Table, Workload

_FLOAT, _INDEX = 4, 8  # bytes


@dataclass(frozen=True)
class Machine:
    """Measured peaks: floating-point operations a second in a large product, bytes a second in a large copy."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """The least operations and bytes of one call."""

    flops: int
    bytes: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def milliseconds(self, machine: Machine) -> float:
        """``max(flops / peak, bytes / bandwidth)``: computing and moving may overlap, neither can be left out."""
        return 1e3 * max(self.flops / machine.flops, self.bytes / machine.bandwidth)


@dataclass(frozen=True)
class Limit:
    """The least time of a workload, in milliseconds, and the work it comes from."""

    forward: Work
    both: Work
    forward_ms: float
    both_ms: float


def measure_machine(sides: Sequence[int] = (512, 1024, 2048), copied: int = 2**28, repeats: int = 7) -> Machine:
    """Best of several, at the threads the run uses: ``torch.mm`` of each ``side^3``, a copy as read and written."""
    source = torch.ones(copied // _FLOAT)
    target = torch.empty_like(source)
    with torch.no_grad():
        flops = max(_product_flops(side, repeats * max(1, 1024 // side)) for side in sides)
        copy = _best(lambda: target.copy_(source), repeats)
    return Machine(flops, 2 * _FLOAT * source.numel() / copy)


def _product_flops(side: int, repeats: int) -> float:
    """Floating-point operations a second of the best of so many square products."""
    a, b, product = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    return 2 * side**3 / _best(lambda: torch.mm(a, b, out=product), repeats)


def limit(workload: Workload, machine: Machine) -> Limit:
    """The sums over the workload's tables, against the machine."""
    forward, both = Work(0, 0), Work(0, 0)
    for k, table in enumerate(workload.tables):
        ids = workload.table_ids(k)
        forward += forward_work(table, ids, workload.batch)
        both += both_work(table, ids, workload.batch)
    return Limit(forward, both, forward.milliseconds(machine), both.milliseconds(machine))


def forward_work(table: Table, ids: Tensor, outputs: int) -> Work:
    """Forward: ``flops = 2 x multiply-adds`` of the cheapest plan;
    ``bytes = ids + core slices that are touched + output`` (pooled, ``outputs x cols``), each moved once.
    """
    return Work(2 * multiply_adds(table, ids), _INDEX * ids.numel() + touched_bytes(table, ids) + _rows(table, outputs))


def both_work(table: Table, ids: Tensor, outputs: int) -> Work:
    """Forward and backward: ``3 x`` the forward's flops, because each product has a gradient for either side;
    the forward's bytes, the incoming gradient read, the touched slices read again, the cores' gradients written whole.
    """
    forward = forward_work(table, ids, outputs)
    back = _rows(table, outputs) + touched_bytes(table, ids) + _FLOAT * table.core_numbers
    return Work(3 * forward.flops, forward.bytes + back)


def multiply_adds(table: Table, ids: Tensor) -> int:
    """Of the cheapest plan known for these ids.

    A plan has a cut ``s``: products of the first ``s`` cores are made from left to right, once for every unique
    prefix, products of the other cores from right to left, once for every unique suffix, and each unique row is the
    product of the two:

        sum_{k=2..s} prefixes_k J_1..J_{k-1} R_{k-1} J_k R_k + sum_{k>s} (the same from the right)
        + unique rows x J_1..J_s R_s J_{s+1}..J_N

    ``s = N - 1`` is left to right throughout, ``s = 1`` right to left. The whole table is the same with every prefix,
    suffix and real row; for it too the cheapest cut counts.
    """
    unique = ids.unique()
    lengths = range(1, table.order)
    prefixes = [unique.div(prod(table.row_factors[k:]), rounding_mode="floor").unique().numel() for k in lengths]
    suffixes = [(unique % prod(table.row_factors[k:])).unique().numel() for k in lengths]
    every_prefix = [prod(table.row_factors[:k]) for k in lengths]
    every_suffix = [prod(table.row_factors[k:]) for k in lengths]
    cuts = range(1, table.order)
    asked = min(_plan(table, cut, prefixes, suffixes, unique.numel()) for cut in cuts)
    whole = min(_plan(table, cut, every_prefix, every_suffix, table.rows) for cut in cuts)
    return min(asked, whole)


def touched_bytes(table: Table, ids: Tensor) -> int:
    """Of the core slices that the ids pick."""
    digits = torch.unravel_index(ids, table.row_factors)
    sizes = zip(digits, table.slice_numbers, strict=True)
    return _FLOAT * sum(int(digit.unique().numel()) * size for digit, size in sizes)


def _plan(table: Table, cut: int, prefixes: Sequence[int], suffixes: Sequence[int], rows: int) -> int:
    """``prefixes[k - 1]`` are those of the first ``k`` cores, ``suffixes[k - 1]`` those of all but the first ``k``."""
    cols, ranks = table.col_factors, table.ranks
    left = sum(prefixes[k - 1] * prod(cols[:k]) * ranks[k - 1] * ranks[k] for k in range(2, cut + 1))
    right = sum(suffixes[k - 1] * prod(cols[k:]) * ranks[k] * ranks[k + 1] for k in range(cut, table.order - 1))
    return left + right + rows * table.cols * ranks[cut]


def _rows(table: Table, count: int) -> int:
    return _FLOAT * count * table.cols


def _best(call: Callable[[], object], repeats: int) -> float:
    call()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)
