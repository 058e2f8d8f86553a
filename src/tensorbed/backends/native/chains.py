"""Rows and bags of chains by the compiled kernels: tensors in, addresses on, autograd around them.

The kernels are handed addresses and sizes. What they rely on is settled here: device, dtype, contiguity and shapes.
The values of indices and offsets they check themselves, before anything is read through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tensorbed.backends import native
from tensorbed.backends.chain import Chain, Cores
from tensorbed.dispatch import differentiable_once

if TYPE_CHECKING:
    from tensorbed import _native

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_MOST = 2**31 - 1  # indices of a batch, digits of a factor
_CPU = torch.device("cpu")  # said of every tensor made here: the kernels write to it, whatever the default device

IMPLS = ("native",) if native.available else ()


class Table(NamedTuple):
    """One table of a call, and what is asked of it.

    Shape:
        - ids: ``(n,)`` int64, any stride
        - padding_row: ``(cols,)``, shown where an id is ``padding_idx``, ``None`` for zeros; bags leave it out
        - bounds: ``(bags + 1,)`` int64, where each bag begins and the last one ends; ``None`` for a row an id
        - weights: ``(n,)`` or ``None``
    """

    chain: Chain
    cores: Cores
    ids: Tensor
    padding_idx: int | None = None
    padding_row: Tensor | None = None
    bounds: Tensor | None = None
    weights: Tensor | None = None
    mean: bool = False


def knows(dtype: torch.dtype) -> bool:
    """Whether the kernels are there and compute with numbers stored so."""
    return native.available and dtype in TYPES


def takes(cores: Cores, index: Tensor) -> bool:
    """Whether the kernels compute with these: on the CPU, and all of one dtype that they know."""
    dtype = cores[0].dtype
    return (
        native.available
        and 0 < index.numel() <= _MOST
        and (dtype in TYPES or dtype == torch.float16)
        and index.is_cpu
        and index.dtype == torch.int64
        and all(is_ready(core, dtype) for core in cores)
    )


def is_ready(core: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels can read this tensor where its address says."""
    # A subclass, of a sharded tensor for instance, or a negated view does not hold its numbers where its address says.
    plain = type(core) in (Tensor, torch.nn.Parameter) and not core.is_neg()
    return plain and core.is_cpu and core.dtype == dtype and core.shape[0] <= _MOST


def compute(tables: Sequence[Table]) -> Tensor:  # -> (n or bags, sum of cols)
    """What is asked of each table, side by side, in one call; differentiable in the cores and the weights.

    Every table has the same dtype and as many rows or bags to give. ``IndexError`` and ``ValueError`` come before
    anything is computed.
    """
    if tables[0].cores[0].dtype == torch.float16:
        return compute([_in_single(table) for table in tables]).half()
    tensors = [core for table in tables for core in table.cores]
    tensors += [table.weights for table in tables if table.weights is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        out: Tensor = _Compute.apply(tables, *tensors)  # type: ignore[no-untyped-call]
        return out
    return Planned(tables).forward(tensors, keep=False)


def _in_single(table: Table) -> Table:
    """Half precision is computed in single."""
    return table._replace(
        cores=[core.float() for core in table.cores],
        padding_row=None if table.padding_row is None else table.padding_row.float(),
        weights=None if table.weights is None else table.weights.float(),
    )


class Planned:
    """The planned tables of one call. ``tensors`` are the cores of all, then the weights of those that have any."""

    shapes: list[torch.Size]
    cols: list[int]
    weighted: list[int | None]  # how many weights a table has
    padding: list[Tensor | None]
    batch: _native.Batch

    def __init__(self, tables: Sequence[Table]) -> None:
        assert native.module is not None
        first = tables[0]
        _check_memory(tables)
        self.dtype = first.cores[0].dtype
        self.rows = first.ids.shape[0] if first.bounds is None else first.bounds.shape[0] - 1
        self.cols, self.weighted, self.padding = [], [], []
        self.cores, self.shapes = 0, []
        asked, read = [], []
        for table in tables:
            known = _known(table.chain)
            _check_cores(table, known.shapes)
            self.cores += len(known.shapes)
            self.shapes += known.shapes
            self.cols.append(known.cols)
            self.weighted.append(None if table.weights is None else table.weights.shape[0])
            _check_counts(table, self.rows)
            self.padding.append(_ready(table.padding_row, known.cols))
            request, memory = _asked(table, known.handle)
            asked.append(request)
            read.append(memory)
        self.batch = native.module.Batch(TYPES[self.dtype], asked, torch.get_num_threads())

    def _addresses(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """The cores, contiguous, and where they are. They may have changed since they were planned with."""
        cores = [core.contiguous() for core in tensors[: self.cores]]
        for core, shape in zip(cores, self.shapes, strict=True):
            if core.shape != shape or not is_ready(core, self.dtype):
                raise RuntimeError(
                    f"a core is now {str(core.dtype)[6:]} of shape {tuple(core.shape)} on {core.device}; forward had "
                    f"{str(self.dtype)[6:]} of shape {tuple(shape)} on the CPU. Convert layers before forward."
                )
        found = [core.data_ptr() for core in cores]
        if not all(found):
            raise RuntimeError("a core has no memory: its storage was freed, or is sharded elsewhere.")
        return cores, found

    def forward(self, tensors: Sequence[Tensor], keep: bool) -> Tensor:
        _alive, addresses = self._addresses(tensors)
        width = sum(self.cols)
        out = torch.empty((self.rows, width), dtype=self.dtype, device=_CPU)
        self.batch.forward(
            addresses,
            self._columns(out),
            [width] * len(self.cols),
            [0 if row is None else row.data_ptr() for row in self.padding],
            keep,
            torch.get_num_threads(),
        )
        if keep:  # for backward, which does not read it; else rows may be asked for again
            self.padding = []
        return out

    def backward(self, tensors: Sequence[Tensor], grad: Tensor, weights: bool = True) -> list[Tensor | None]:
        """Gradients of all ``tensors``, in their dtype; without ``weights``, ``None`` for those."""
        cores, addresses = self._addresses(tensors)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        grad = grad.resolve_neg().contiguous()
        if grad.shape != (self.rows, sum(self.cols)) or not is_ready(grad, self.dtype):
            raise ValueError(
                f"the gradient is {grad.dtype} of shape {tuple(grad.shape)}; the output was {self.dtype} of shape "
                f"{(self.rows, sum(self.cols))}."
            )
        made = [torch.empty(core.shape, dtype=wide, device=_CPU) for core in cores]
        scales = [None if n is None else torch.zeros(n, dtype=torch.float64, device=_CPU) for n in self.weighted]
        self.batch.backward(
            addresses,
            self._columns(grad),
            [grad.shape[1]] * len(self.cols),
            [one.data_ptr() for one in made],
            [0 if scale is None or not weights else scale.data_ptr() for scale in scales],
            torch.get_num_threads(),
        )
        found = [scale.to(self.dtype) if weights else None for scale in scales if scale is not None]
        return [*[one.to(self.dtype) for one in made], *found]

    def _columns(self, joined: Tensor) -> list[int]:
        """Where each table's columns begin in ``(rows, sum of cols)``."""
        at, found = joined.data_ptr(), []
        for cols in self.cols:
            found.append(at)
            at += cols * joined.element_size()
        return found


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tables: Sequence[Table], *tensors: Tensor) -> Tensor:
        ctx.call = Planned(tables)
        ctx.save_for_backward(*tensors)
        return ctx.call.forward(tensors, keep=True)  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        weights = any(ctx.needs_input_grad[1 + call.cores :])
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None  # a loss that is kept should not keep the plan and the left products
        return None, *call.backward(tensors, grad, weights)


class _Known(NamedTuple):
    """What a chain's sizes say, worked out once: a call for one row has microseconds."""

    handle: _native.Chain
    shapes: tuple[torch.Size, ...]
    cols: int


@lru_cache(maxsize=4096)
def _known(chain: Chain) -> _Known:
    assert native.module is not None
    handle = native.module.Chain(chain.rows, list(chain.row_factors), list(chain.col_factors), list(chain.ranks))
    return _Known(handle, tuple(torch.Size(chain.core_shape(k)) for k in range(chain.order)), chain.cols)


def _check_memory(tables: Sequence[Table]) -> None:
    """One dtype, on the CPU: the kernels are given addresses and believe what they are told of them."""
    dtype = tables[0].cores[0].dtype
    for table in tables:
        for tensor in (*table.cores, table.weights, table.padding_row):
            if tensor is not None and not is_ready(tensor, dtype):
                found = f"{type(tensor).__name__} of {str(tensor.dtype)[6:]} on {tensor.device}"
                found += ", a negated view" * tensor.is_neg()
                raise ValueError(
                    f"the kernels compute with plain tensors of one dtype on the CPU, here {str(dtype)[6:]}, got a "
                    f'{found}; convert it, or use impl="reference".'
                )
        for tensor in (table.ids, table.bounds):
            if tensor is not None and not (tensor.is_cpu and tensor.dtype == torch.int64):
                raise ValueError(f"ids and offsets must be int64 on the CPU, got {tensor.dtype} on {tensor.device}.")
    if dtype not in TYPES:
        raise ValueError(f"the kernels compute in float32, float64 and bfloat16, not in {str(dtype)[6:]}.")


def _check_cores(table: Table, shapes: tuple[torch.Size, ...]) -> None:
    """The kernels read what the chain says: nothing may be smaller."""
    if len(table.cores) != len(shapes):
        raise ValueError(f"{len(table.cores)} cores for a chain of {len(shapes)}.")
    for core, shape in zip(table.cores, shapes, strict=True):
        if core.shape != shape:
            raise ValueError(f"a core has shape {tuple(core.shape)}; {table.chain} keeps it as {tuple(shape)}.")


def _check_counts(table: Table, rows: int) -> None:
    """As many rows or bags from every table as there is room for, and a weight for each id."""
    given = table.ids.shape[0] if table.bounds is None else table.bounds.shape[0] - 1
    if given != rows:
        raise ValueError(f"a table gives {given} rows, the first one {rows}; all of a call give the same number.")
    if table.weights is not None and table.weights.shape != table.ids.shape:
        raise ValueError(f"weights of shape {tuple(table.weights.shape)} for {table.ids.shape[0]} ids: one for each.")


def _ready(row: Tensor | None, cols: int) -> Tensor | None:
    if row is None:
        return None
    if row.shape != (cols,):
        raise ValueError(f"padding_row has shape {tuple(row.shape)}; a row has {cols} numbers.")
    return row.contiguous()


def _asked(table: Table, handle: _native.Chain) -> tuple[_native.Asked, object]:
    """One table's request, and what must live until it was planned with."""
    assert native.module is not None
    ids, padding = table.ids, -1 if table.padding_idx is None else table.padding_idx
    where = (handle, ids.data_ptr(), ids.shape[0], ids.stride(0), padding)
    if table.bounds is None:
        return native.module.Asked(*where, 0, -1, 0, False), ids
    bounds = table.bounds.contiguous()
    weights = None if table.weights is None else table.weights.detach().contiguous()
    address = 0 if weights is None else weights.data_ptr()
    asked: _native.Asked = native.module.Asked(*where, bounds.data_ptr(), bounds.shape[0] - 1, address, table.mean)
    return asked, (ids, bounds, weights)


class KernelRows:
    """Rows of one table for a graph, whose backward makes the plan again."""

    def __init__(self, chain: Chain, cores: Cores, index: Tensor) -> None:
        self.planned = Planned([Table(chain, _single(cores), index)])

    def rows(self, cores: Cores) -> Tensor:
        return self.planned.forward(_single(cores), keep=False)

    def gradients(self, cores: Cores, grad: Tensor) -> list[Tensor]:
        made = self.planned.backward(_single(cores), grad.to(self.planned.dtype))
        return [one for one in made if one is not None]


def _single(cores: Cores) -> Cores:
    return [core.float() for core in cores] if cores[0].dtype == torch.float16 else cores
