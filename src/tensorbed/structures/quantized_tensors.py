"""Any structure whose tensors are kept as small integers: cores of 8 or 4 bits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from tensorbed.backends.scores import read_first
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.dispatch import World, working_dtype
from tensorbed.structures.base import Params, Structure, TensorSpec, rounded
from tensorbed.structures.explanation import Explanation
from tensorbed.structures.quantized_rows import QuantizedRowsMatrix
from tensorbed.structures.registry import read, register


@dataclass(frozen=True)
class ReadTensorsMatrix(Structure):
    """A structure whose trainable tensors are read from what is kept of them, and then compute with its own kernels.

    Each is a matrix for this, a row for each entry of its first axis. A tensor that has a row for each row of the table
    is read by the rows that are asked for, others whole.
    """

    fits_exactly = False
    takes_half = True  # scales are read as they are stored

    inner_text: str  # the structure as text, so that this one has one too
    bits: int
    group: int  # numbers of a tensor's row that share a step, 0 for the whole row
    inner: Structure = field(init=False, repr=False, compare=False)
    stored: dict[str, QuantizedRowsMatrix] = field(init=False, repr=False, compare=False)  # tensors as tables, by name
    specs: tuple[TensorSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = read(self.inner_text)
        if (inner.rows, inner.cols) != (self.rows, self.cols):
            raise ValueError(f"{inner.rows} x {inner.cols} tensors are no table of {self.rows} x {self.cols}.")
        stored = {spec.name: self._stored(spec) for spec in inner.tensors() if spec.trainable}
        self.hold(inner=inner, stored=stored)
        self.hold(specs=tuple(kept for spec in inner.tensors() for kept in self.kept(spec)))

    def _stored(self, spec: TensorSpec) -> QuantizedRowsMatrix:
        height = spec.shape[0] if len(spec.shape) > 1 else 1
        width = spec.numel // height
        return QuantizedRowsMatrix(height, width, self.bits, min(self.group or width, width))

    @abstractmethod
    def kept(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """What is kept of a tensor of the structure."""

    @abstractmethod
    def read_tensor(self, p: Params, name: str, index: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A tensor of the structure as a matrix, or those rows of it ``(n,)``, in this dtype; differentiable."""

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def read(self, p: Params, dtype: torch.dtype, index: Tensor | None = None) -> dict[str, Tensor]:
        """The structure's tensors, of the one that is indexed by row all of them or those of ``index`` ``(n,)``."""
        found = {}
        for spec in self.inner.tensors():
            if spec.name not in self.stored:
                found[spec.name] = p[spec.name]
                continue
            rows = index if spec.name == self.inner.row_tensor else None
            height = spec.shape[0] if rows is None else rows.shape[0]
            found[spec.name] = self.read_tensor(p, spec.name, rows, dtype).view(height, *spec.shape[1:])
        return found

    @property
    def _by_row(self) -> bool:
        """Whether there is a tensor that is read by rows."""
        return self.inner.row_tensor in self.stored

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        read = self.read(p, working_dtype(*p.values()), index)
        place = torch.arange(index.shape[0], device=index.device) if self._by_row else index
        return self.inner.take(read, place)

    def eager_rows(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """By the structure's own kernels."""
        if index.shape[0] == 0:
            return self.rows_of(p, index)
        inner, dtype, unique = self.inner, working_dtype(*p.values()), None
        if self._by_row:
            unique, index = torch.unique(index, return_inverse=True)
            inner = _of_height(inner, unique.shape[0])
        return rounded(inner.lookup(self.read(p, dtype, unique), index, world=World.EAGER), p)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return self.inner.full(self.read(p, working_dtype(*p.values())))

    def turned(self, p: Params, x: Tensor) -> Tensor:  # (n, cols) -> (n, k)
        first = torch.zeros(1, dtype=torch.int64, device=x.device)  # a tensor that is read by rows turns no vector
        return self.inner.turned(self.read(p, working_dtype(x, *p.values()), first), x)

    def block(self, p: Params, start: int, stop: int, impl: str) -> Tensor:  # -> (stop - start, k)
        dtype, device = working_dtype(*p.values()), next(iter(p.values())).device
        if not self._by_row:
            return self.inner.block(self.read(p, dtype), start, stop, impl)
        return self.inner.block(self.read(p, dtype, torch.arange(start, stop, device=device)), 0, stop - start, impl)

    def scorings(self) -> list[Scoring]:
        """At a cost that codes and floats have in common: the same way is taken for both."""
        return read_first.scorings(
            self, self.inner.scorings(), sum(table.rows * table.cols for table in self.stored.values())
        )

    @property
    def row_multiply_adds(self) -> int | None:
        return self.inner.row_multiply_adds

    def explain(self, index: Tensor, impl: str) -> Explanation:  # (n,)
        told = self.inner.explain(index, impl)
        return replace(told, kind=self.kind, description=self.summary)

    def check_values(self, p: Params) -> None:
        self.inner.check_values({name: tensor for name, tensor in p.items() if name not in self.stored})

    def describe(self) -> str:
        group = f", group={self.group}" if self.group else ""
        return f"{self.inner.kind} {self.inner.describe()}, bits={self.bits}{group}"


@lru_cache(maxsize=256)
def _of_height(structure: Structure, rows: int) -> Structure:
    """The structure of a table of other rows, where only a tensor that is indexed by row has another size."""
    return replace(structure, rows=rows)


@register("quantized_tensors")
@dataclass(frozen=True)
class QuantizedTensorsMatrix(ReadTensorsMatrix):
    """A structure whose trainable tensors are each kept as :class:`QuantizedRowsMatrix` keeps a table.

    Shape:
        - NAME_codes, NAME_steps, NAME_scale: of the tensor NAME as a matrix, see :class:`QuantizedRowsMatrix`
        - others: as the structure keeps them
    """

    can_initialise = False

    def kept(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        table = self.stored.get(spec.name)
        return (spec,) if table is None else tuple(replace(s, name=f"{spec.name}_{s.name}") for s in table.tensors())

    def read_tensor(self, p: Params, name: str, index: Tensor | None, dtype: torch.dtype) -> Tensor:
        table = self.stored[name]
        own = {spec.name: p[f"{name}_{spec.name}"] for spec in table.tensors()}
        own["scale"] = own["scale"].to(dtype)
        return table.full(own) if index is None else table.take(own, index)
