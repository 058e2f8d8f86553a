"""The implementations under comparison, all holding the same tables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, SparseAdam

import tensorbed as tb
from benchmarks.workloads import Table, Workload

AUTO = "tensorbed auto"
NATIVE = "tensorbed native"
TORCH = "tensorbed torch"
WHOLE = "whole table + gather"
GATHER = "gather + bmm"
TENSORLY = "tensorly-torch"
TORCHTT = "torchTT"
DENSE = "nn.Embedding"
SPARSE = "nn.Embedding sparse"

# Those that ``auto`` chooses from, or could.
OURS = (NATIVE, TORCH, GATHER)

_CHECKED = 64  # entries of a batch compared with the definition
_GB = 10**9

Cores = Sequence[Tensor]  # (R_{k-1}, I_k, J_k, R_k) each, as in the paper
Builder = Callable[[Table, Cores, Tensor], nn.Module]  # a table, its cores, and the ids that will be asked of it

Needs = Callable[[Workload], int]
Refuses = Callable[[Workload], str | None]


class CannotRunError(Exception):
    """Why an implementation has no times; shown in its place."""


def _nothing(workload: Workload) -> int:
    return 0


def _never(workload: Workload) -> str | None:
    return None


def _adam(layer: nn.Module) -> Optimizer:
    return Adam(layer.parameters())


@dataclass(frozen=True)
class Peer:
    """An implementation by name.

    Attributes:
        rows: makes a layer that looks up rows, ``(n,) -> (n, cols)``, or raises :class:`CannotRunError`.
        bags: makes one that sums bags, ``(bags, length) -> (bags, cols)``; by default rows, then a sum.
        join: makes one layer of several tables' bags, ``(n, tables) -> (n, cols)``; by default a loop over rows.
        needs: bytes for training on a workload, beside which the machine must have some to spare.
        refuses: a reason not to try.
    """

    name: str
    rows: Builder
    bags: Builder | None = None
    join: Callable[[list[nn.Module]], nn.Module] | None = None
    needs: Needs = _nothing
    refuses: Refuses = _never
    optimiser: Callable[[nn.Module], Optimizer] = _adam


def draw(workload: Workload) -> list[Cores]:
    """Cores of every table of the workload, the same for each implementation and in each process."""
    torch.manual_seed(workload.seed)
    layers = [tb.TTEmbedding(table.rows, table.cols, table.rank, shape=table.shape) for table in workload.tables]
    return [[core.detach() for core in layer.cores] for layer in layers]


def build(peer: Peer, workload: Workload, cores: Sequence[Cores], *, check: bool = True) -> nn.Module:
    """The peer's layer with these cores, its rows checked unless they were before, or :class:`CannotRunError`."""
    reason = peer.refuses(workload)
    if reason is not None:
        raise CannotRunError(reason)
    require_memory(peer.needs(workload))
    try:
        layer = _assembled(peer, workload, cores)
        if check:
            _check(layer, workload, cores)
    except ImportError as error:
        raise CannotRunError(f"not installed ({error.name})") from error
    except (RuntimeError, ValueError, IndexError, MemoryError) as error:
        raise CannotRunError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
    return layer


def _assembled(peer: Peer, workload: Workload, cores: Sequence[Cores]) -> nn.Module:
    parts = range(len(workload.tables))
    whole_bags = peer.bags if workload.bag or (workload.many and peer.join) else None
    make = whole_bags or peer.rows
    layers = [make(workload.tables[k], cores[k], workload.table_ids(k)) for k in parts]
    if workload.many:
        return (peer.join or _Loop)(layers)
    return _Summed(layers[0]) if workload.bag and whole_bags is None else layers[0]


def _check(layer: nn.Module, workload: Workload, cores: Sequence[Cores]) -> None:
    """Compare the batch's first entries with :func:`definition`."""
    with torch.no_grad():
        found = layer(workload.ids)
    if found.shape != (workload.batch, workload.cols):
        raise CannotRunError(f"gives {tuple(found.shape)}, not {(workload.batch, workload.cols)}")
    first = min(workload.batch, _CHECKED)
    bag = workload.bag or 1
    rows = [definition(part, workload.table_ids(k)[: first * bag]) for k, part in enumerate(cores)]
    expected = torch.cat([part.reshape(first, bag, -1).sum(1) for part in rows], dim=1)
    apart = float((found[:first].double() - expected).abs().max() / expected.abs().max())
    if not apart <= 1e-4:
        raise CannotRunError(f"gives other rows: {apart:.1e} of the largest number apart")


def definition(cores: Cores, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
    """Rows in double precision, by the definition of a tensor train and nothing of the library's own."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    digits = torch.unravel_index(unique, [core.shape[1] for core in cores])
    left = torch.ones(unique.shape[0], 1, 1, dtype=torch.float64)
    for core, digit in zip(cores, digits, strict=True):
        left = torch.einsum("nmr,rnjs->nmjs", left, core[:, digit].double()).flatten(1, 2)
    return left.flatten(1)[inverse]


def require_memory(need: int) -> None:
    """Raise :class:`CannotRunError` unless so many bytes, and some to spare, can be had."""
    free = available_bytes()
    if need > free - _GB:
        raise CannotRunError(f"needs about {need / _GB:.1f} GB, {free / _GB:.1f} GB are free")


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class _Summed(nn.Module):
    """Bags by way of their rows."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:  # (bags, length) -> (bags, cols)
        rows: Tensor = self.rows(ids.flatten())
        return rows.reshape(*ids.shape, -1).sum(1)


class _Loop(nn.Module):
    """Several tables one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:  # (n, tables) -> (n, cols)
        return torch.cat([layer(ids[:, k]) for k, layer in enumerate(self.layers)], dim=1)


class Collected(nn.Module):
    """The library's own collection of tables."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        # The same layers that every other implementation is made from: bags, whatever their static type.
        self.collection = tb.EmbeddingBagCollection(
            {f"table_{k}": layer for k, layer in enumerate(layers)}  # type: ignore[misc]
        )

    def forward(self, ids: Tensor) -> Tensor:  # (n, tables) -> (n, cols)
        values: Tensor = self.collection(ids)[0]
        return values


def _tensorbed(name: str, impl: str, needs: Needs = _nothing, refuses: Refuses = _never) -> Peer:
    """One of the library's own implementations, or its choice."""

    def refused(workload: Workload) -> str | None:
        table = workload.tables[0]
        layer = tb.TTEmbedding(table.rows, table.cols, table.rank, shape=table.shape, device="meta")
        if impl in layer.structure.impls:
            return refuses(workload)
        return "no compiled kernels in this installation" if impl == "native" else f'impl="{impl}" does not exist'

    join = Collected if hasattr(tb, "EmbeddingBagCollection") else None
    rows, bags = _own(tb.TTEmbedding, impl=impl), _own(tb.TTEmbeddingBag, impl=impl, mode="sum")
    return Peer(name, rows, bags, join, needs, refused)


def _own(kind: type[tb.TTEmbedding] | type[tb.TTEmbeddingBag], **options: Any) -> Builder:
    def build_layer(table: Table, cores: Cores, ids: Tensor) -> nn.Module:
        layer = kind(table.rows, table.cols, table.rank, shape=table.shape, **options)
        for own, core in zip(layer.cores, cores, strict=True):
            own.data.copy_(core)
        return layer

    return build_layer


class _WholeTable(nn.Module):
    """Every number of the table at each call, and rows of it: as cores are used without a lookup of their own."""

    def __init__(self, table: Table, cores: Cores, ids: Tensor) -> None:
        super().__init__()
        self.layer = _own(tb.TTEmbedding)(table, cores, ids)

    def forward(self, ids: Tensor) -> Tensor:  # (*) -> (*, cols)
        table: Tensor = self.layer.weight  # type: ignore[assignment]
        return F.embedding(ids, torch.clone(table))


def _whole_table_refuses(workload: Workload) -> str | None:
    size = 4 * workload.dense_numbers
    return f"would build tables of {size / _GB:.1f} GB at each call" if size > _GB else None


def _gathered_bytes(workload: Workload) -> int:
    """A slice of every core for every token, kept for backward, where there is as much again and a copy of it."""
    tokens = workload.tokens // len(workload.tables)
    return max(12 * tokens * sum(table.slice_numbers) for table in workload.tables)


def _tensorly(table: Table, cores: Cores, ids: Tensor) -> nn.Module:
    import tltorch

    # It knows no padded rows: the product of the factors is its number of rows, of which only the real ones are asked.
    layer: nn.Module = tltorch.FactorizedEmbedding(
        prod(table.row_factors),
        table.cols,
        auto_tensorize=False,
        tensorized_num_embeddings=table.row_factors,
        tensorized_embedding_dim=table.col_factors,
        factorization="blocktt",
        rank=table.ranks,
    )
    with torch.no_grad():
        for factor, core in zip(layer.parameters(), cores, strict=True):
            factor.copy_(core)
    return layer


class _TorchTT(nn.Module):
    """Rows of a torchTT matrix: it has no lookup, and a one-hot batch would be a dense ``(n, rows)``, so each unique
    row is sliced out of the matrix and made full, which is the least work that its interface allows."""

    def __init__(self, table: Table, cores: Cores, ids: Tensor) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says at length that its solvers are not compiled
            import torchtt
        self.make = torchtt.TT
        self.factors = table.row_factors
        self.cores = nn.ParameterList([core.clone() for core in cores])

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        matrix = self.make(list(self.cores))
        unique, inverse = torch.unique(ids, return_inverse=True)
        digits = torch.stack(torch.unravel_index(unique, self.factors), dim=1).tolist()
        every = (slice(None),) * len(self.factors)
        rows = [matrix[(*(slice(digit, digit + 1) for digit in row), *every)].full().flatten() for row in digits]
        return torch.stack(rows)[inverse]


def _torchtt_refuses(workload: Workload) -> str | None:
    """A slice costs some 0.4 ms in Python, and its gradient is as large as the core."""
    seconds = 0.0
    for k, table in enumerate(workload.tables):
        unique = int(workload.table_ids(k).unique().numel())
        seconds += unique * (0.4e-3 * table.order + 4 * table.core_numbers / 4e9)
    return f"has no lookup: slicing row by row takes about {seconds:.0f} s" if seconds > 4 else None


def _dense_weight(table: Table, cores: Cores, ids: Tensor) -> Tensor:
    """The table, filled where it is looked up: no other row is read, and gigabytes need not be computed."""
    weight = torch.full((table.rows, table.cols), 0.01)
    unique = ids.unique()
    for part in unique.split(64):
        weight[part] = definition(cores, part).float()
    return weight


def _dense(kind: type[nn.Embedding] | type[nn.EmbeddingBag], **options: Any) -> Builder:
    def build_layer(table: Table, cores: Cores, ids: Tensor) -> nn.Module:
        layer: nn.Module = kind.from_pretrained(_dense_weight(table, cores, ids), freeze=False, **options)
        return layer

    return build_layer


PEERS = (
    _tensorbed(AUTO, "auto"),
    _tensorbed(NATIVE, "native"),
    _tensorbed(TORCH, "torch"),
    Peer(WHOLE, _WholeTable, refuses=_whole_table_refuses),
    _tensorbed(GATHER, "reference", needs=_gathered_bytes),
    Peer(TENSORLY, _tensorly, needs=_gathered_bytes),
    Peer(TORCHTT, _TorchTT, refuses=_torchtt_refuses),
    # Weight, gradient and the two moments of Adam.
    Peer(
        DENSE,
        _dense(nn.Embedding),
        _dense(nn.EmbeddingBag, mode="sum"),
        needs=lambda workload: 16 * workload.dense_numbers,
    ),
    Peer(
        SPARSE,
        _dense(nn.Embedding, sparse=True),
        _dense(nn.EmbeddingBag, mode="sum", sparse=True),
        needs=lambda workload: 12 * workload.dense_numbers,
        optimiser=lambda layer: SparseAdam(list(layer.parameters())),
    ),
)
