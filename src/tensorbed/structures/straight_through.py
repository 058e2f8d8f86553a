"""Training for quantised rows and cores: floats that are read as their codes, so that packing them changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.coded import Quantized
from tensorbed.backends.scores import codes as code_scores
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.dispatch import working_dtype
from tensorbed.structures.base import Params, Structure, TensorSpec, each_once, mean_square
from tensorbed.structures.dense import Dense, DenseMatrix
from tensorbed.structures.formats import Budget, Fit, Format, Use, require_format, written
from tensorbed.structures.quantized_rows import STEPS, QuantizedRows, QuantizedRowsMatrix, in_blocks, packed
from tensorbed.structures.quantized_tensors import QuantizedTensorsMatrix, ReadTensorsMatrix
from tensorbed.structures.registry import register, text_of

_BLOCK = 2**20  # numbers of the table quantised at once
_TABLE = Dense()


@register("straight_through")
@dataclass(frozen=True)
class StraightThroughMatrix(DenseMatrix):
    r"""Every number of the table, of which rows are read as :class:`QuantizedRowsMatrix` would keep them.

    The largest number of a group is its largest code, which takes no sum over the group: a row is read with the same
    bits in whatever company. Gradients pass the rounding as if it were none.

    Shape:
        - table: ``(rows, cols)``
    """

    fits_exactly = False
    packs = True
    takes_half = True  # scales are read as they will be stored

    bits: int
    group: int  # cols where there are none
    stored: QuantizedRowsMatrix = field(init=False, repr=False, compare=False)  # what it becomes

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hold(stored=QuantizedRowsMatrix(self.rows, self.cols, self.bits, self.group))

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return self.read(super().take(p, index))

    def eager_rows(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        take: Callable[[Params, Tensor], Tensor] = super().take

        def read_rows(index: Tensor) -> Tensor:  # (n,) -> (n, cols)
            rows: Tensor = _Read.apply(take(p, index), self)  # type: ignore[no-untyped-call]
            return rows

        return each_once(read_rows, index, self.cols, p["table"].dtype)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return self.read(p["table"])

    def read(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:  # (n, cols) -> (n, cols)
        """Rows as their codes say, differentiable; in another dtype from the same codes, steps and scales."""
        shares, steps, scale = self._shares(rows)
        codes = shares.detach().round().clamp(-self.stored.reach, self.stored.reach - 1)
        # The difference of a number and its code is exact, and so is what it is added to.
        return self.stored.made(shares + (codes - shares.detach()), steps, scale.to(dtype or scale.dtype))

    def values(self, rows: Tensor) -> Tensor:  # (n, cols) -> (n, cols)
        """The same bits, in fewer passes and without a derivative."""
        shares, steps, scale = self._shares(rows.detach())
        return self.stored.made(self._codes(shares), steps, scale)

    def _shares(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:  # -> (n, cols), (n, groups), (n, 1)
        """What is rounded to codes, in codes, differentiable; steps and scales."""
        stored = self.stored
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        steps, scale = self._steps(wide.detach())
        scale = scale.to(rows.dtype)
        width = scale.to(wide.dtype) / stored.reach
        if steps is not None:
            width = width * (stored.spread(steps) / STEPS)
        # Numbers so small that a width is none are codes of 0.
        return wide / torch.where(width == 0, 1, width), steps, scale

    def _codes(self, shares: Tensor) -> Tensor:  # (n, cols) -> (n, cols)
        """Whole numbers as floats, in place; a zero has no sign."""
        return shares.round_().clamp_(-self.stored.reach, self.stored.reach - 1).add_(0)

    def _steps(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:  # (n, cols) -> (n, groups), (n, 1)
        """The larger side of a group has the code that reaches further, so that steps have a sign.

        Groups of zeros have a step as well, and rows of zeros a scale: their gradients pass too.
        """
        if self.group >= self.cols:
            low, high = rows.aminmax(dim=1, keepdim=True)
            most = torch.where(high >= -low, -high, -low)
            return None, torch.where(most == 0, 1, most)
        groups = F.pad(rows, (0, -self.cols % self.group)) if self.cols % self.group else rows
        low, high = groups.unflatten(1, (-1, self.group)).aminmax(dim=2)
        top, sign = torch.maximum(high, -low), torch.where(high >= -low, -1, 1).to(rows.dtype)
        most = top.amax(1, keepdim=True)
        most = torch.where(most == 0, 1, most)
        steps = (top / most * (STEPS - 1)).round().clamp_min(1) * sign
        return steps, most * (STEPS / (STEPS - 1))

    @property
    def row_multiply_adds(self) -> int:
        return self.stored.row_multiply_adds

    def scorings(self) -> list[Scoring]:
        """At the counted cost of what is stored: the same one is taken there, and its sums have one order."""
        return [*Structure.scorings(self), *code_scores.scorings(self)]

    def block(self, p: Params, start: int, stop: int, impl: str) -> Tensor:  # -> (stop - start, cols)
        rows = p["table"][start:stop]
        return self.read(rows, working_dtype(rows))

    def coded_block(self, p: Params, start: int, stop: int) -> Quantized:
        """A block of rows for the compiled kernels."""
        rows = p["table"][start:stop]
        packed = self._packed(rows)
        return self.stored.as_codes({**packed, "scale": packed["scale"].to(working_dtype(rows))})

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        """A normal draw, rounded to what is read of it."""
        table = p["table"].normal_(generator=generator)
        blocks = table.split(max(1, _BLOCK // self.cols))
        for block in blocks:
            block.copy_(self.values(block))
        # Of what is read again: small groups beside large ones are not always read as they were rounded.
        norms = [torch.linalg.vector_norm(self.values(block), dtype=torch.float64) for block in blocks]
        table.mul_(std / float(torch.stack(norms).square().sum() / table.numel()) ** 0.5)

    def packed(self, p: Params) -> tuple[Structure, Params]:
        """What is stored once training is over, of equal rows: codes, steps and scales of the table as it is."""
        table = p["table"].detach()
        return self.stored, in_blocks(self.stored, table, table.dtype, "packing rows", self._packed)

    def _packed(self, rows: Tensor) -> dict[str, Tensor]:  # (n, cols)
        shares, steps, scale = self._shares(rows.detach())
        codes = self._codes(shares)
        found = {"codes": codes.to(torch.int8) if self.bits == 8 else packed(codes), "scale": scale}
        return found if steps is None else {**found, "steps": steps.to(torch.int8)}

    def describe(self) -> str:
        return self.stored.describe()


class _Read(torch.autograd.Function):
    """Rows as they are read, and their gradient as it is: nothing is kept of what happens between."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, structure: StraightThroughMatrix) -> Tensor:  # (n, cols) -> (n, cols)
        return structure.values(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@register("straight_through_tensors")
@dataclass(frozen=True)
class StraightThroughTensorsMatrix(ReadTensorsMatrix):
    """A structure whose trainable tensors are floats, read as :class:`QuantizedTensorsMatrix` would keep them.

    Shape:
        - all tensors: as the structure keeps them
    """

    packs = True

    roundings: dict[str, StraightThroughMatrix] = field(init=False, repr=False, compare=False)  # as tables, by name

    def __post_init__(self) -> None:
        super().__post_init__()
        tables = self.stored.items()
        roundings = {name: StraightThroughMatrix(t.rows, t.cols, t.bits, t.group) for name, t in tables}
        self.hold(roundings=roundings, can_initialise=self.inner.can_initialise)

    def kept(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (spec,)

    def read_tensor(self, p: Params, name: str, index: Tensor | None, dtype: torch.dtype) -> Tensor:
        rounding = self.roundings[name]
        table = p[name].reshape(rounding.rows, rounding.cols)
        return rounding.read(table if index is None else table.index_select(0, index), dtype)

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        """As the structure draws its tensors, which are then drawn the same for what rounding made of the deviation."""
        device = next(iter(p.values())).device
        seed = int(torch.randint(2**31, (), generator=generator, device=device))
        asked = std
        for _ in range(2):
            self.inner.initialise(p, asked, torch.Generator(device).manual_seed(seed))
            asked *= std / float(mean_square(self, p, generator).sqrt())

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        inner, tensors = self.inner.resized(p, rows)
        return replace(self, rows=rows, inner_text=text_of(inner)), tensors

    def packed(self, p: Params) -> tuple[Structure, Params]:
        """What is stored once training is over, of equal rows: codes, steps and scales of each tensor as it is."""
        stored = QuantizedTensorsMatrix(self.rows, self.cols, self.inner_text, self.bits, self.group)
        found = {name: tensor for name, tensor in p.items() if name not in self.stored}
        for name, rounding in self.roundings.items():
            table = p[name].reshape(rounding.rows, rounding.cols)
            found |= {f"{name}_{kept}": tensor for kept, tensor in rounding.packed({"table": table})[1].items()}
        return stored, found


@dataclass(frozen=True, repr=False)
class StraightThrough(Format):
    """Training for quantisation: floats that are read as the codes they will be stored as by ``layer.packed()``.

    By itself it becomes ``tb.QuantizedRows``. Around another format, ``tb.StraightThrough(tb.TensorTrain(rank=16))``,
    it is that one's trainable tensors that are rounded, with a scale for each entry of their first axis. While it is
    trained all are floats, and ``compression_ratio`` says so; that of the packed layer counts codes and scales.

    Args:
        format: of the table.
        bits: 8 or 4.
        group: how many columns, or numbers of a tensor's row, share a step; by default the whole row for 8 bits, and
            32 for 4.

    Example::

        >>> layer = tb.Embedding(1000, 64, tb.StraightThrough(bits=4))
        >>> small = layer.packed()
        >>> small.structure.describe(), round(small.compression_ratio, 1)
        ('bits=4, group=32', 6.7)
        >>> index = torch.arange(1000)
        >>> torch.equal(layer(index), small(index))
        True
    """

    format: Format = _TABLE
    bits: int = field(default=8, kw_only=True)
    group: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_format(self.format)
        QuantizedRows(bits=self.bits, group=self.group)  # refuses what cannot be stored

    __repr__ = written

    @property
    def can_fit(self) -> bool:
        return self.format.can_fit

    @property
    def weighs_use(self) -> bool:
        return self.format.weighs_use

    @property
    def squares_numbers(self) -> bool:  # type: ignore[override]
        return self.format.squares_numbers

    def multiplied(self, params: Params) -> list[str]:
        return self.format.multiplied(params)

    def bind(self, budget: Budget) -> Structure:
        return self._around(self.format.bind(budget), budget)

    def _around(self, inner: Structure, budget: Budget) -> Structure:
        if self.format.is_plain:
            stored = QuantizedRows(bits=self.bits, group=self.group).bind(budget)
            return StraightThroughMatrix(stored.rows, stored.cols, stored.bits, stored.group)
        group = self.group or (0 if self.bits == 8 else 32)
        return StraightThroughTensorsMatrix(budget.rows, budget.cols, text_of(inner), self.bits, group)

    def constants(self, structure: Structure) -> Mapping[str, Tensor]:
        inner = getattr(structure, "inner", None)
        return {} if inner is None else self.format.constants(inner)

    def sized_as(self, structure: Structure) -> StraightThrough:
        inner = getattr(structure, "inner", None)
        return self if inner is None else replace(self, format=self.format.sized_as(inner))

    def sample(self, table: Tensor, structure: Structure) -> tuple[Tensor, Format]:
        some, format = self.format.sample(table, getattr(structure, "inner", structure))
        return some, replace(self, format=format)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """That of the format, of a table itself."""
        return self.fit_to_use(table, budget, Use())

    def fit_to_use(self, table: Tensor, budget: Budget, use: Use) -> Fit:
        found = self.format.fit_to_use(table, budget, use)
        return Fit(self._around(found.structure, budget), found.params)
