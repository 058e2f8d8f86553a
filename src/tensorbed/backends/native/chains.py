"""Rows and bags of chains by the compiled kernels: tensors in, addresses on, autograd around them.

The kernels are handed addresses and sizes. What they rely on is settled here: device, dtype, contiguity and shapes.
The values of indices and offsets they check themselves, before anything is read through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tensorbed.backends import native
from tensorbed.backends.chain import Chain, ChainOfCores, Cores
from tensorbed.backends.graphs import ROWS, WORKS, graph_output
from tensorbed.backends.native import MOST, TYPES
from tensorbed.backends.pooling import pooled_or_padded
from tensorbed.dispatch import Asked, Backend, World, differentiable_once
from tensorbed.indexing import check_range

if TYPE_CHECKING:
    from tensorbed import _native

_PLAIN = (Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")  # the kernels write to what is made here, whatever the default device


class Table(NamedTuple):
    """One table of a call, and what is asked of it, as in :class:`Asked`; ids of any stride."""

    chain: Chain
    cores: Cores
    ids: Tensor
    padding_idx: int | None = None
    padding_row: Tensor | None = None
    bounds: Tensor | None = None
    weights: Tensor | None = None
    mean: bool = False


def unready(tensors: Iterable[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """The first that the kernels cannot read where its address says, if any."""
    for tensor in tensors:
        # A subclass, of a sharded tensor for instance, or a negated view does not hold its numbers at its address.
        if tensor is not None and (
            type(tensor) not in _PLAIN or tensor.dtype != dtype or not tensor.is_cpu or tensor.is_neg()
        ):
            return tensor
    return None


def compute(tables: Sequence[Table], checked: bool = False) -> Tensor:  # -> (n or bags, sum of cols)
    """What is asked of each table, side by side, in one call; differentiable in the cores and the weights.

    Every table has the same dtype and as many rows or bags to give. ``IndexError`` and ``ValueError`` come before
    anything is computed, also where what the tensors are was ``checked`` before.
    """
    if tables[0].cores[0].dtype == torch.float16:
        return compute([_in_single(table) for table in tables]).half()
    tensors: list[Tensor] = []
    for table in tables:
        tensors += table.cores
    for table in tables:
        if table.weights is not None:
            tensors.append(table.weights)
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return _differentiable(tables, checked, *tensors)
    return Planned(tables, checked).forward(tensors, keep=False)


def _in_single(table: Table) -> Table:
    """Half precision is computed in single."""
    return table._replace(
        cores=[core.float() for core in table.cores],
        padding_row=None if table.padding_row is None else table.padding_row.float(),
        weights=None if table.weights is None else table.weights.float(),
    )


class Planned:
    """The planned tables of one call. ``tensors`` are the cores of all, then the weights of those that have any."""

    def __init__(self, tables: Sequence[Table], checked: bool = False) -> None:
        assert native.module is not None
        first = tables[0]
        self.dtype = first.cores[0].dtype
        self.rows = first.ids.shape[0] if first.bounds is None else first.bounds.shape[0] - 1
        self.cols: list[int] = []
        self.weighted: list[int | None] = []  # how many weights a table has
        self.padding: list[Tensor | None] = []
        self.shapes: list[torch.Size] = []
        asked, alive = [], []
        for table in tables:
            (handle, shapes, cols), ids, row = _known(table.chain), table.ids, table.padding_row
            if not checked:
                _check(table, self.dtype, self.rows)
            bounds = None if table.bounds is None else table.bounds.contiguous()
            weights = None if table.weights is None else table.weights.detach().contiguous()
            alive.append((bounds, weights))  # until they were planned with
            self.shapes += shapes
            self.cols.append(cols)
            self.weighted.append(None if weights is None else weights.shape[0])
            self.padding.append(None if row is None else row.contiguous())
            skip = -1 if table.padding_idx is None else table.padding_idx
            bags = (0, -1) if bounds is None else (bounds.data_ptr(), bounds.shape[0] - 1)
            pooling = (*bags, 0 if weights is None else weights.data_ptr(), table.mean)
            where = (ids.data_ptr(), ids.shape[0], ids.stride(0), skip)
            asked.append(native.module.Asked(handle, *where, *pooling))
        self.batch: _native.Batch = native.module.Batch(TYPES[self.dtype], asked, torch.get_num_threads())

    def _check_again(self, tensors: Sequence[Tensor]) -> None:
        """The cores may have changed since they were planned with."""
        for core, shape in zip(tensors, self.shapes, strict=False):
            if core.shape != shape or unready((core,), self.dtype) is not None:
                raise RuntimeError(
                    f"a core is now {str(core.dtype)[6:]} of shape {tuple(core.shape)} on {core.device}; forward had "
                    f"{str(self.dtype)[6:]} of shape {tuple(shape)} on the CPU. Convert layers before forward."
                )

    def _addresses(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """The cores, contiguous, and where they are."""
        cores, addresses = [], []
        for core in tensors[: len(self.shapes)]:
            whole = core.contiguous()
            cores.append(whole)
            addresses.append(whole.data_ptr())
        if 0 in addresses:
            raise RuntimeError("a core has no memory: its storage was freed, or is sharded elsewhere.")
        return cores, addresses

    def forward(self, tensors: Sequence[Tensor], keep: bool) -> Tensor:
        """Rows or bags from the tensors that were planned with."""
        _alive, addresses = self._addresses(tensors)
        width = sum(self.cols)
        out = tensors[0].new_empty(self.rows, width)
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
        self._check_again(tensors)
        cores, addresses = self._addresses(tensors)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        grad = grad.resolve_neg()
        grad = grad if grad.stride(1) == 1 else grad.contiguous()  # rows of a wider tensor are read where they are
        if grad.shape != (self.rows, sum(self.cols)) or unready((grad,), self.dtype) is not None:
            raise ValueError(
                f"the gradient is {grad.dtype} of shape {tuple(grad.shape)}; the output was {self.dtype} of shape "
                f"{(self.rows, sum(self.cols))}."
            )
        # Like the cores, which takes a third of the time that a shape does: a collection has hundreds of them.
        made = [torch.empty_like(core, dtype=wide) for core in cores]
        scales = [None if n is None else torch.zeros(n, dtype=torch.float64, device=_CPU) for n in self.weighted]
        self.batch.backward(
            addresses,
            self._columns(grad),
            [grad.stride(0)] * len(self.cols),
            [gradient.data_ptr() for gradient in made],
            [0 if scale is None or not weights else scale.data_ptr() for scale in scales],
            torch.get_num_threads(),
        )
        of_weights = [scale.to(self.dtype) if weights else None for scale in scales if scale is not None]
        narrow = made if wide == self.dtype else [gradient.to(self.dtype) for gradient in made]
        return [*narrow, *of_weights]

    def _columns(self, joined: Tensor) -> list[int]:
        """Where each table's columns begin in ``(rows, sum of cols)``."""
        columns = [joined.data_ptr()]
        for cols in self.cols[:-1]:
            columns.append(columns[-1] + cols * joined.element_size())
        return columns


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tables: Sequence[Table], checked: bool, *tensors: Tensor) -> Tensor:
        ctx.call = Planned(tables, checked)
        ctx.save_for_backward(*tensors)
        return ctx.call.forward(tensors, keep=True)  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, tensors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        weights = any(ctx.needs_input_grad[2 + len(call.shapes) :])
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None  # a loss that is kept should not keep the plan and the left products
        return None, None, *call.backward(tensors, grad, weights)


# Past Function.apply, which takes a tenth of a lookup of one row to see to transforms: none reaches these kernels.
_differentiable: Callable[..., Tensor] = super(torch.autograd.Function, _Compute).apply


@lru_cache(maxsize=4096)
def _known(chain: Chain) -> tuple[_native.Chain, tuple[torch.Size, ...], int]:
    """Its handle, the shapes of its cores and its columns, worked out once: a call for one row has microseconds."""
    assert native.module is not None
    handle = native.module.Chain(chain.rows, list(chain.row_factors), list(chain.col_factors), list(chain.ranks))
    return handle, tuple(torch.Size(chain.core_shape(k)) for k in range(chain.order)), chain.cols


def _check(table: Table, dtype: torch.dtype, rows: int) -> None:
    """The kernels are given addresses and believe what they are told of them: nothing may be elsewhere, or smaller."""
    chain, cores, ids, _, row, bounds, weights, _ = table
    _, shapes, cols = _known(chain)
    wrong = unready((*cores, weights, row), dtype)
    if wrong is not None:
        found = f"{type(wrong).__name__} of {str(wrong.dtype)[6:]} on {wrong.device}" + ", negated" * wrong.is_neg()
        raise ValueError(
            f"the kernels compute with plain tensors of one dtype on the CPU, here {str(dtype)[6:]}, got a "
            f'{found}; convert it, or use impl="reference".'
        )
    if dtype not in TYPES:
        raise ValueError(f"the kernels compute in float32, float64 and bfloat16, not in {str(dtype)[6:]}.")
    for tensor in (ids, bounds):
        if tensor is not None and not (tensor.is_cpu and tensor.dtype == torch.int64):
            raise ValueError(f"ids and offsets must be int64 on the CPU, got {tensor.dtype} on {tensor.device}.")
    if len(cores) != len(shapes):
        raise ValueError(f"{len(cores)} cores for a chain of {len(shapes)}.")
    for core, shape in zip(cores, shapes, strict=True):
        if core.shape != shape:
            raise ValueError(f"a core has shape {tuple(core.shape)}; {chain} keeps it as {tuple(shape)}.")
    given = ids.shape[0] if bounds is None else bounds.shape[0] - 1
    if given != rows:
        raise ValueError(f"a table gives {given} rows, the first one {rows}; all of a call give the same number.")
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"weights of shape {tuple(weights.shape)} for {ids.shape[0]} ids: one for each.")
    if row is not None and row.shape != (cols,):
        raise ValueError(f"padding_row has shape {tuple(row.shape)}; a row has {cols} numbers.")


class KernelRows:
    """Rows or bags of one table for a graph, whose backward makes the plan again.

    Indices beyond the end of the last bag are checked and are in none.
    """

    def __init__(self, chain: Chain, cores: Cores, index: Tensor, *pooling: Any) -> None:
        bounds, weights, mean, skip = pooling or ROWS
        self.cols, self.weights, end = chain.cols, weights, index.shape[0]
        self.count = end
        if bounds is not None:
            check_range(index, chain.rows)
            self.count = bounds.shape[0] - 1
            end = int(bounds[-1]) if self.count else 0
        padding = None if skip < 0 else skip
        own = None if weights is None else weights[:end]
        table = Table(chain, cores, index[:end], padding, None, bounds, own, mean)
        self.planned = Planned([_in_single(table) if cores[0].dtype == torch.float16 else table]) if end else None

    def rows(self, cores: Cores) -> Tensor:
        if self.planned is None:  # no bag holds an index
            return cores[0].new_zeros(self.count, self.cols)
        return self.planned.forward([core.to(self.planned.dtype) for core in cores], keep=False).to(cores[0].dtype)

    def gradients(self, cores: Cores, grad: Tensor) -> list[Tensor]:
        """Of the cores, then of the weights if there are any."""
        extra = [] if self.weights is None else [torch.zeros_like(self.weights)]
        if self.planned is None:
            return [torch.zeros_like(core, memory_format=torch.contiguous_format) for core in cores] + extra
        wide = self.planned.backward([core.to(self.planned.dtype) for core in cores], grad.to(self.planned.dtype))
        gradients = [gradient.to(cores[0].dtype) for gradient in wide if gradient is not None]
        if extra:
            of_weights = gradients.pop()
            extra[0][: of_weights.shape[0]] = of_weights
        return gradients + extra


WORKS["native"] = KernelRows


class Native(Backend):
    """The compiled kernels: chains of cores, and tables of codes."""

    name = "native"
    limits = "on the CPU, with plain tensors of one dtype, codes contiguous, and at most 2^31 - 1 indices"

    def absent(self, device: torch.device | None = None) -> str:
        return native.reason

    def knows(self, making: type | None, device: torch.device | None = None) -> bool:
        known = making is ChainOfCores or hasattr(making, "kernel_rows")
        return native.available and known and (device is None or device.type == "cpu")

    def shares(self, making: type | None) -> bool:
        return making is ChainOfCores

    def why(self, device: torch.device) -> str:
        return "the compiled kernels take every batch on a CPU"

    def takes(self, asked: Asked, world: World) -> bool:
        made_of, index = asked.made_of, asked.ids
        if not native.available or made_of is None or (world is not World.EAGER and world is not World.COMPILED):
            return False
        if not isinstance(made_of, ChainOfCores):
            return world is World.EAGER and _reads(index) and bool(made_of.known())
        dtype = made_of.cores[0].dtype
        if (dtype not in TYPES and dtype != torch.float16) or max(made_of.chain.row_factors) > MOST:
            return False
        if world is World.EAGER:
            return _reads(index) and unready(made_of.cores, dtype) is None
        on_cpu = all(tensor.device.type == "cpu" for tensor in (index, *made_of.cores))
        return on_cpu and all(core.dtype == dtype for core in made_of.cores)

    def compute(self, asked: Sequence[Asked], world: World) -> Tensor:
        first = asked[0]
        if world is World.EAGER and _pools(first):
            # Of rows without a padding row everything was looked at to choose this backend, and that tables have as
            # many is known where their ids are columns of one batch.
            known = first.padding_row is None and first.bounds is None
            if len(asked) > 1:
                known = all(table.checked and table.padding_row is None and table.bounds is None for table in asked)
            return compute(list(map(_table, asked)), known)
        return super().compute(asked, world)

    def compute_table(self, asked: Asked, world: World) -> Tensor:
        made_of = asked.made_of
        if world is World.COMPILED:
            return graph_output(asked, self.name, pools=_pools(asked))
        if isinstance(made_of, ChainOfCores):
            return pooled_or_padded(lambda unique: compute([Table(*made_of, unique)]), asked)
        return pooled_or_padded(made_of.kernel_rows, asked)


def _pools(asked: Asked) -> bool:
    """Whether the kernels write what is asked: of a chain rows, or sums of weighted rows, whose gradients are too."""
    return isinstance(asked.made_of, ChainOfCores) and asked.mode != "max" and not asked.by_frequency


def _reads(index: Tensor) -> bool:
    return index.is_cpu and 0 < index.numel() <= MOST and not index.is_neg()


def _table(asked: Asked) -> Table:
    (chain, cores), row, weights = asked.made_of, asked.padding_row, asked.weights
    # In the dtype of the parameters, which mixed precision may have cast without it.
    row = None if row is None else row.resolve_neg().to(cores[0].dtype)
    weights = None if weights is None else weights.resolve_neg()
    return Table(chain, cores, asked.ids, asked.padding_idx, row, asked.bounds, weights, asked.mode == "mean")
