"""Rows of small integers, each with a scale: the honest choice for a trained table that is not trained again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from tensorbed.backends import coded
from tensorbed.backends.scores import codes as code_scores
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.checks import require_int, require_positive
from tensorbed.decompose.feedback import feedback
from tensorbed.progress import track
from tensorbed.structures.base import Params, Structure, TensorSpec, mean_row, with_rows
from tensorbed.structures.formats import Budget, Fit, Format, Spelling, Use
from tensorbed.structures.registry import register

_BLOCK = 2**18  # numbers of the table quantised at once, which stay in the cache
STEPS = 128  # of a group's scale, of either sign; the largest is 127
# Shares of the largest number that the largest code may stand for.
_CLIPS = (1.0, 0.97, 0.94, 0.9, 0.86, 0.82, 0.78, 0.74)
_STRIP = 32  # columns without a step of their own that are rounded between two products with the errors before them


@register("quantized_rows")
@dataclass(frozen=True)
class QuantizedRowsMatrix(Structure):
    r"""``codes / 2**(bits - 1) * steps / 128 * scale``, codes of 8 or 4 bits, then two a byte, the first one low.

    With groups each ``group`` columns of a row have a step of their own, an 8-bit integer of either sign that
    multiplies the row's scale; without, one step is the whole row's and is left out.

    Shape:
        - codes: ``(rows, cols)`` int8, or ``(rows, ceil(cols / 2))`` uint8
        - steps: ``(rows, ceil(cols / group))`` int8, only with groups
        - scale: ``(rows, 1)``, trainable
    """

    can_initialise = False
    fits_exactly = False
    making = coded.Quantized

    bits: int
    group: int  # cols where there are none
    specs: tuple[TensorSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8) or not 1 <= self.group <= self.cols:
            raise ValueError(
                f"bits={self.bits}, group={self.group}: bits are 4 or 8, a group 1 to {self.cols} columns."
            )
        width, dtype = (self.cols, torch.int8) if self.bits == 8 else (-(-self.cols // 2), torch.uint8)
        codes = TensorSpec("codes", (self.rows, width), dtype, trainable=False)
        steps = TensorSpec("steps", (self.rows, -(-self.cols // self.group)), torch.int8, trainable=False)
        scale = TensorSpec("scale", (self.rows, 1))
        self.hold(specs=(codes, steps, scale) if self.group < self.cols else (codes, scale))

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        steps = p["steps"].index_select(0, index) if "steps" in p else None
        return self.made(self._numbers(p["codes"].index_select(0, index)), steps, p["scale"].index_select(0, index))

    def as_codes(self, p: Params) -> coded.Quantized:
        """The same for the compiled kernels."""
        return coded.Quantized(self.cols, p["codes"], p["scale"], p.get("steps"), self.group, self.bits)

    made_of = as_codes

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        new = _fitted(self, mean_row(self, p), None)
        return replace(self, rows=rows), {name: with_rows(tensor, rows, new[name]) for name, tensor in p.items()}

    def scorings(self) -> list[Scoring]:
        return [*super().scorings(), *code_scores.scorings(self)]

    def coded_block(self, p: Params, start: int, stop: int) -> coded.Quantized:
        """A block of rows for the compiled kernels."""
        return self.as_codes(p).part(start, stop)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return self.made(self._numbers(p["codes"]), p.get("steps"), p["scale"])

    def _numbers(self, codes: Tensor) -> Tensor:  # -> (n, cols)
        return codes if self.bits == 8 else unpacked(codes, self.cols)

    def made(self, numbers: Tensor, steps: Tensor | None, scale: Tensor) -> Tensor:  # (n, cols) -> (n, cols)
        """Rows from codes as numbers. Half precision is computed in single and rounded once."""
        wide = torch.promote_types(scale.dtype, torch.float32)
        shares = numbers.to(wide) / self.reach
        if steps is not None:
            shares = shares * (self.spread(steps.to(wide)) / STEPS)
        return (shares * scale.to(wide)).to(scale.dtype)

    def spread(self, steps: Tensor) -> Tensor:  # (n, groups) -> (n, cols)
        """For each column what its group has."""
        if self.cols % self.group == 0:
            return steps.repeat_interleave(self.group, 1)
        # Not the first columns of that, which graphs of Inductor read beyond its end.
        return steps.index_select(1, torch.arange(self.cols, device=steps.device) // self.group)

    @property
    def reach(self) -> int:
        """The largest code, so that a scale is as large as the row's numbers and half precision holds it."""
        return 128 if self.bits == 8 else 8

    @property
    def row_multiply_adds(self) -> int:
        return 2 * self.cols

    def describe(self) -> str:
        return f"bits={self.bits}" + (f", group={self.group}" if self.group < self.cols else "")


def packed(codes: Tensor) -> Tensor:  # (n, cols) in [-8, 7] -> (n, ceil(cols / 2)) uint8
    """Two codes a byte, the first one low."""
    shifted = (codes + 8).to(torch.uint8)
    if shifted.shape[1] % 2:
        shifted = torch.nn.functional.pad(shifted, (0, 1), value=8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)


def unpacked(codes: Tensor, cols: int) -> Tensor:  # -> (n, cols) int8
    """The inverse of :func:`packed`."""
    # Signed before they are put together: ONNX takes the shifted ones to be of another type than the masked.
    return torch.stack([(codes & 15).to(torch.int8), (codes >> 4).to(torch.int8)], 2).flatten(1)[:, :cols] - 8


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizedRows(Format):
    """Whole numbers of 8 or 4 bits with a scale for each row, for a trained table that is not trained again.

    Args:
        bits: 8 or 4.
        group: how many columns share a step; by default the whole row for 8 bits, and 32 columns for 4.

    Example::

        >>> layer = tb.Embedding.from_pretrained(torch.randn(4096, 64), tb.QuantizedRows(bits=4))
        >>> round(layer.compression_ratio, 1), layer.fit_error < 0.1
        (6.7, True)
    """

    bits: int = 8
    group: int | None = None

    def __repr__(self) -> str:
        return f"QuantizedRows(bits={self.bits}{'' if self.group is None else f', group={self.group}'})"

    def __post_init__(self) -> None:
        if require_int(self.bits, "bits") not in (4, 8):
            raise ValueError(f"bits={self.bits} for QuantizedRows: choose 8 or 4.")
        if self.group is not None:
            require_positive(self.group, "group")

    @property
    def suits_heads(self) -> bool:  # type: ignore[override]
        return self.bits == 8

    @classmethod
    def spellings(cls) -> dict[str, Spelling]:
        return {f"int{bits}": Spelling(cls(bits=bits), f"rows of {bits}-bit integers") for bits in (8, 4)}

    @classmethod
    def candidates(cls, ratio: float) -> list[QuantizedRows]:
        return [cls(bits=8), cls(bits=4, group=16), cls(bits=4, group=32)]

    @classmethod
    def without_training(cls) -> list[QuantizedRows]:
        return [cls(bits=8), cls(bits=4)]

    def bind(self, budget: Budget) -> QuantizedRowsMatrix:
        group = self.group or (budget.cols if self.bits == 8 else 32)
        return QuantizedRowsMatrix(budget.rows, budget.cols, self.bits, min(group, budget.cols))

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """Codes, steps and scales of least squared error, row by row."""
        return self.fit_to_use(table, budget, Use())

    def fit_to_use(self, table: Tensor, budget: Budget, use: Use) -> Fit:
        """Columns rounded in turn, each error made good in those after it, as the vectors that rows meet see it."""
        structure, feed = self.bind(budget), None if use.moment is None else feedback(use.moment).float()

        def fitted(rows: Tensor) -> dict[str, Tensor]:
            # In float32 squares of small and large numbers are lost: rows are brought to size 1.
            size = rows.abs().amax(1, keepdim=True).double()
            found = _fitted(structure, (rows / size.where(size > 0, 1)).float(), feed)
            return {**found, "scale": found["scale"] * size}

        return Fit(structure, in_blocks(structure, table, torch.float64, "quantising rows", fitted))


def in_blocks(
    structure: QuantizedRowsMatrix,
    table: Tensor,
    dtype: torch.dtype,
    label: str,
    coded: Callable[[Tensor], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """The structure's tensors, scales in ``dtype``, from a block of rows after the other.

    Written where they stay: results kept between blocks that come and go would hold the blocks' memory too.
    """
    empty = [torch.empty(s.shape, dtype=s.dtype or dtype, device=table.device) for s in structure.tensors()]
    found = structure.named(empty)
    height = max(1, _BLOCK // structure.cols)
    for start in track(range(0, structure.rows, height), label):
        for name, part in coded(table[start : start + height]).items():
            found[name][start : start + height] = part
    return found


def _fitted(structure: QuantizedRowsMatrix, rows: Tensor, feed: Tensor | None) -> dict[str, Tensor]:  # (n, cols)
    n, cols, group = rows.shape[0], structure.cols, structure.group
    low, high = (-128, 127) if structure.bits == 8 else (-8, 7)
    padded = torch.nn.functional.pad(rows, (0, -cols % group)).view(n, -1, group)
    step = _best_step(padded, low, high)  # (n, groups)
    scale, whole = step, torch.ones_like(step)
    if group < cols:
        scale = step.abs().amax(1, keepdim=True) / (STEPS - 1)
        whole = _whole_steps(step, scale)
    if feed is None:
        codes = _coded(padded, whole * scale, low, high).view(n, -1)[:, :cols]
    else:
        codes, whole = _fed(rows, feed, scale, whole, group, (low, high))
    found = {"codes": codes.to(torch.int8) if structure.bits == 8 else packed(codes)}
    if group >= cols:
        return {**found, "scale": scale.double() * structure.reach}
    return {**found, "steps": whole.to(torch.int8), "scale": scale.double() * structure.reach * STEPS}


def _whole_steps(step: Tensor, scale: Tensor) -> Tensor:
    """In units of the scale; a group that is small beside others keeps the smallest step rather than none."""
    whole = torch.where(scale > 0, (step / scale.where(scale > 0, 1)).round().clamp(1 - STEPS, STEPS - 1), 0)
    return torch.where((whole == 0) & (step != 0), step.sign(), whole)


def _fed(
    rows: Tensor, feed: Tensor, scale: Tensor, whole: Tensor, group: int, reach: tuple[int, int]
) -> tuple[Tensor, Tensor]:  # (n, cols), (cols, cols), (n, 1), (n, groups) -> (n, cols), (n, groups)
    """Codes column by column under :func:`feedback`; a group's step is found anew for what it has become."""
    cols = rows.shape[1]
    given = rows.T.contiguous()  # columns one after the other in memory
    codes, errors = torch.empty_like(given), torch.empty_like(given)
    width = group if group < cols else _STRIP
    for start in range(0, cols, width):
        stop = min(start + width, cols)
        strip = given[start:stop] - feed[:start, start:stop].T @ errors[:start]
        if group < cols:
            step = _best_step(strip.T[:, None].contiguous(), *reach)
            whole[:, start // group] = _whole_steps(step, scale)[:, 0]
        step = (whole[:, start // group] * scale[:, 0]).contiguous()
        inverse = torch.where(step != 0, 1 / step, 0)
        for j in range(start, stop):
            column = strip[j - start]
            codes[j] = (column * inverse).round_().clamp_(*reach)
            errors[j] = (column - codes[j] * step) / feed[j, j]
            strip[j - start + 1 :].addr_(feed[j, j + 1 : stop], errors[j], alpha=-1)
    return codes.T, whole


def _best_step(groups: Tensor, low: int, high: int) -> Tensor:  # (n, g, group) -> (n, g)
    """Of several clippings the one of least squared error, then the best step for its codes.

    The side that reaches further, by one code, is given to the larger number, so that steps have a sign.
    """
    top = groups.abs().amax(2)
    sign = torch.where(groups.amax(2) >= -groups.amin(2), -1.0, 1.0)
    best, least = torch.zeros_like(top), torch.full_like(top, torch.inf)
    for clip in _CLIPS:
        step = sign * top * clip / -low
        codes = _coded(groups, step, low, high)
        squares = codes.square().sum(2)
        step = torch.where(squares > 0, (codes * groups).sum(2) / squares.clamp_min(1), step)
        error = (groups - _coded(groups, step, low, high) * step[..., None]).square().sum(2)
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return best


def _coded(groups: Tensor, step: Tensor, low: int, high: int) -> Tensor:
    width = step[..., None]
    return torch.where(width != 0, (groups / torch.where(width != 0, width, 1)).round(), 0).clamp(low, high)
