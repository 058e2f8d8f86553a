"""Training for quantised rows: a table of floats that is read as its codes, so that packing it changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tensorbed.backends.coded import Quantized
from tensorbed.backends.scores import codes as code_scores
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.dispatch import working_dtype
from tensorbed.structures.base import Params, Structure
from tensorbed.structures.dense import DenseMatrix
from tensorbed.structures.formats import Budget, Fit, Format
from tensorbed.structures.quantized_rows import STEPS, QuantizedRows, QuantizedRowsMatrix, in_blocks, packed
from tensorbed.structures.registry import register

_BLOCK = 2**20  # numbers of the table quantised at once


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
    takes_half = True  # scales are read as they will be stored

    bits: int
    group: int  # cols where there are none
    stored: QuantizedRowsMatrix = field(init=False, repr=False, compare=False)  # what it becomes

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hold(stored=QuantizedRowsMatrix(self.rows, self.cols, self.bits, self.group))

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return self._read(p["table"].index_select(0, index))

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return self._read(p["table"])

    def _read(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:  # (n, cols) -> (n, cols)
        """Rows as their codes say; in another dtype from the same codes, steps and scales."""
        codes, steps, scale = self._coded(rows)
        return self.stored.made(codes, steps, scale.to(dtype or scale.dtype))

    def _coded(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:  # -> (n, cols), (n, groups), (n, 1)
        """Codes, whole numbers as floats with the gradient of what was rounded to them, steps and scales."""
        stored = self.stored
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        steps, scale = self._steps(wide.detach())
        scale = scale.to(rows.dtype)
        width = scale.to(wide.dtype) / stored.reach
        if steps is not None:
            width = width * (stored.spread(steps) / STEPS)
        # Numbers so small that a width is none are codes of 0.
        shares = wide / torch.where(width == 0, 1, width)
        codes = shares.detach().round().clamp(-stored.reach, stored.reach - 1)
        # The difference of a number and its code is exact, and so is what it is added to.
        return shares + (codes - shares.detach()), steps, scale

    def _steps(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:  # (n, cols) -> (n, groups), (n, 1)
        """The larger side of a group has the code that reaches further, so that steps have a sign.

        Groups of zeros have a step as well, and rows of zeros a scale: their gradients pass too.
        """
        groups = torch.nn.functional.pad(rows, (0, -self.cols % self.group)).unflatten(1, (-1, self.group))
        top = groups.abs().amax(2)
        sign = torch.where(groups.amax(2) >= -groups.amin(2), -1, 1).to(rows.dtype)
        most = top.amax(1, keepdim=True)
        if self.group >= self.cols:
            return None, torch.where(most == 0, 1, most * sign)
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
        return self._read(rows, working_dtype(rows))

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
            block.copy_(self._read(block))
        # Of what is read again: small groups beside large ones are not always read as they were rounded.
        norms = [torch.linalg.vector_norm(self._read(block), dtype=torch.float64) for block in blocks]
        table.mul_(std / float(torch.stack(norms).square().sum() / table.numel()) ** 0.5)

    def packed(self, p: Params) -> tuple[Structure, Params]:
        """What is stored once training is over, of equal rows: codes, steps and scales of the table as it is."""
        table = p["table"].detach()
        return self.stored, in_blocks(self.stored, table, table.dtype, "packing rows", self._packed)

    def _packed(self, rows: Tensor) -> dict[str, Tensor]:  # (n, cols)
        codes, steps, scale = self._coded(rows)
        found = {"codes": codes.to(torch.int8) if self.bits == 8 else packed(codes), "scale": scale}
        return found if steps is None else {**found, "steps": steps.to(torch.int8)}

    def describe(self) -> str:
        return self.stored.describe()


@dataclass(frozen=True, kw_only=True)
class StraightThrough(Format):
    """``tb.StraightThrough(bits=4)``: trained as ``tb.QuantizedRows(bits=4)`` will be stored, then ``layer.packed()``.

    While it is trained it is as large as the table; see ``compression_ratio``.

    Args:
        bits: 8 or 4.
        group: columns that share a step; by default the whole row for 8 bits, 32 for 4.
    """

    bits: int = 8
    group: int | None = None

    def __post_init__(self) -> None:
        QuantizedRows(bits=self.bits, group=self.group)  # refuses what cannot be stored

    def bind(self, budget: Budget) -> StraightThroughMatrix:
        stored = QuantizedRows(bits=self.bits, group=self.group).bind(budget)
        return StraightThroughMatrix(stored.rows, stored.cols, stored.bits, stored.group)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """The table itself."""
        return Fit(self.bind(budget), {"table": table})
