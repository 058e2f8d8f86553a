"""A model on paper of the time that the kernels take: bytes and multiply-adds of each launch against published peaks.

Nothing here was measured. A launch takes no less than its bytes at the memory's peak bandwidth, nor than its
multiply-adds at the peak of its dtype: that sum is the floor. The expectation assumes half of the bandwidth, a quarter
of the arithmetic, as tiles are small, and a few microseconds for each launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import torch

from benchmarks.heads import HeadWorkload
from benchmarks.workloads import WORKLOADS, Table, Workload
from tensorbed.backends.chain import Chain, most_rows
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.backends.torch import find_prefixes
from tensorbed.structures import Structure
from tensorbed.vocabulary.tiling import GROUPS, Task, choose

_SHARE_OF_BANDWIDTH, _SHARE_OF_ARITHMETIC = 0.5, 0.25
_LAUNCH = 5e-6  # seconds: of a kernel or an operator of PyTorch, one after the other, without a graph of CUDA
_SINGLE, _ID = 4, 8  # bytes
_SORT = 8 * 2 * 16  # bytes that sorting one id with its place reads and writes: eight passes


@dataclass(frozen=True)
class Device:
    """Peaks of a GPU as its maker publishes them, without sparsity: bytes and operations of each dtype in a second."""

    name: str
    bandwidth: float
    operations: dict[str, float]


A100 = Device("A100 SXM 80 GB", 2.039e12, {"float32": 19.5e12, "float32 as tf32": 156e12, "bfloat16": 312e12})
H100 = Device("H100 SXM", 3.35e12, {"float32": 67e12, "float32 as tf32": 494.5e12, "bfloat16": 989e12})
DEVICES = (A100, H100)


@dataclass(frozen=True)
class Launch:
    """One kernel of one call, or as many operators of PyTorch as ``count`` says."""

    name: str
    multiply_adds: float
    bytes: float
    count: int = 1
    widened: bool = False  # whether factors of half precision are multiplied in single

    def floor(self, device: Device, dtype: str) -> float:
        """Seconds at the peaks."""
        return max(self.bytes / device.bandwidth, self._computed(device, dtype))

    def expected(self, device: Device, dtype: str) -> float:
        read = self.bytes / device.bandwidth / _SHARE_OF_BANDWIDTH
        return max(read, self._computed(device, dtype) / _SHARE_OF_ARITHMETIC) + self.count * _LAUNCH

    def _computed(self, device: Device, dtype: str) -> float:
        by = "float32" if self.widened and dtype == "bfloat16" else dtype
        return 2 * self.multiply_adds / device.operations[by]


@dataclass(frozen=True)
class Call:
    """The launches of a forward and of its backward."""

    name: str
    forward: list[Launch]
    backward: list[Launch]


# Operators of PyTorch around the kernels of a plan: keys, a sort, marks, sums of them, and what they are scattered to.
_PLAN_LAUNCHES = 24


def lookup(workload: Workload, itemsize: int) -> Call:
    """All tables of a workload in the same launches: level by level, then pooled or shown."""
    forward, backward = _Sums(), _Sums()
    plan, pieces = workload.tokens * (_SORT + 8 * _ID), _pieces(workload)
    shown = workload.batch * workload.cols * itemsize
    read = workload.unpooled_numbers * _SINGLE
    forward.add("plan", 0, plan, _PLAN_LAUNCHES)
    if pieces > 1:  # each is a call of its own for some of the unique rows, forward and again backward
        for way in (forward, backward):
            way.add("plans of pieces", 0, plan, pieces * _PLAN_LAUNCHES)
            way.add("rows of pieces", 0, 2 * read, pieces)
    for k, table in enumerate(workload.tables):
        _add_levels(table, workload.table_ids(k), itemsize, forward, backward, pieces)
    forward.add("pool" if workload.bag else "rows", workload.unpooled_numbers if workload.bag else 0, read + shown)
    backward.add("gradients of rows", workload.unpooled_numbers, read + shown)
    return Call(workload.name, forward.launches, backward.launches)


def _pieces(workload: Workload) -> int:
    """In how many pieces the unique rows are computed; several tables are computed whole."""
    if len(workload.tables) > 1:
        return 1
    (table,) = workload.tables
    chain = Chain(table.rows, table.row_factors, table.col_factors, tuple(table.ranks))
    return -(-min(workload.tokens, table.rows) // most_rows(chain, workload.tokens))


class _Sums:
    """Launches by name, those of several tables together."""

    def __init__(self) -> None:
        self._found: dict[str, Launch] = {}

    def add(self, name: str, multiply_adds: float, size: float, count: int = 1) -> None:
        # Left products are single precision, and so is what is multiplied with them.
        before = self._found.get(name, Launch(name, 0, 0, count, widened="extend by core 2" not in name))
        multiply_adds, size = before.multiply_adds + multiply_adds, before.bytes + size
        self._found[name] = replace(before, multiply_adds=multiply_adds, bytes=size)

    @property
    def launches(self) -> list[Launch]:
        return list(self._found.values())


def _add_levels(table: Table, ids: torch.Tensor, itemsize: int, forward: _Sums, backward: _Sums, pieces: int) -> None:
    """Left products are single precision and read once by each that extends them, slices once by each group."""
    counts, ranks = find_prefixes(ids, table.row_factors).counts, table.ranks
    widths = list(accumulate(table.col_factors, mul))
    for k in range(1, table.order):
        made, inner, outer = counts[k], ranks[k], table.col_factors[k] * ranks[k + 1]
        adds = made * widths[k - 1] * inner * outer
        left, below = made * widths[k - 1] * inner, made * widths[k - 1] * outer
        slices = min(table.row_factors[k], made) * inner * outer
        core = table.row_factors[k] * inner * outer
        extended = adds, _SINGLE * (left + below) + itemsize * slices, pieces
        forward.add(f"extend by core {k + 1}", *extended)
        if k < table.order - 1:
            backward.add(f"extend by core {k + 1} again", *extended)
        # Sums of chunks by one kernel, and all of a slice by another.
        backward.add(f"gradient of core {k + 1}", adds, _SINGLE * (left + below + slices + core), 2 * pieces)
        parents = counts[k - 1] * widths[k - 1] * inner
        backward.add(f"gradient of left products {k}", adds, _SINGLE * (below + parents) + itemsize * slices, pieces)


def head(name: str, structure: Structure, workload: HeadWorkload, itemsize: int) -> Call:
    """The loss and its gradients by the way and the tiles that the library counts as cheapest."""
    task = Task.of(structure, workload.tokens, _SINGLE, None, trains=True, at_once=True, on_device=True)
    tiling = choose(task)
    scoring: Scoring = tiling.scoring
    tiles = -(-structure.rows // tiling.height) * len(tiling.groups())
    scores = structure.rows * workload.tokens
    once = scoring.cost.multiply_adds * workload.tokens
    kept = scoring.cost.kept * workload.tokens
    again = 1 if tiling.passes == GROUPS else 2
    made = Launch("scores through cores", once, itemsize * (scores + 2 * kept), 2 * tiles)
    forward = [made, Launch("running log-sum-exp", 0, itemsize * scores, 2 * tiles)]
    backward = [Launch("scores again", once, itemsize * (scores + 2 * kept), 2 * tiles)] if again == 2 else []
    backward += [
        Launch("gradient in place", 0, 2 * itemsize * scores, tiles),
        Launch("gradients of vectors and cores", 2 * once, 2 * itemsize * (scores + 2 * kept), 4 * tiles),
    ]
    return Call(f"{name}, {tiling.name}", forward, backward)


def codes_lookup(name: str, rows: int, cols: int, row_bytes: int, itemsize: int, ids: int = 2048) -> Call:
    """Rows of codes: read, multiplied where they are made, and written; the gradient of their floats by PyTorch."""
    read, shown = ids * (_ID + row_bytes), ids * cols * itemsize
    backward = Launch("gradient of the floats", ids * cols, read + 2 * shown + rows * _SINGLE, 6)
    return Call(name, [Launch("rows of codes", ids * cols, read + shown)], [backward])


def lookups(itemsize: int) -> list[Call]:
    return [lookup(workload, itemsize) for workload in WORKLOADS.values()]
