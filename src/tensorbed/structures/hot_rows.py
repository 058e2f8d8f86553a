"""Few rows in one format, the rest in another: rows that are used often may be kept more exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Self

import torch
from torch import Tensor

from tensorbed.backends.scores.scoring import JoinedScores, Scoring
from tensorbed.checks import require_number
from tensorbed.dispatch import World, world_of
from tensorbed.structures.base import Params, Structure, TensorSpec
from tensorbed.structures.explanation import Explanation
from tensorbed.structures.formats import Budget, Fit, Format, Spelling, Use, fitted
from tensorbed.structures.quantized_rows import QuantizedRows
from tensorbed.structures.registry import read, register


@register("hot_rows")
@dataclass(frozen=True)
class HotRowsMatrix(Structure):
    """The rows in ``places`` are those of one structure, all others, in their order, those of another.

    Shape:
        - places: ``(hot rows,)`` int64, ascending
        - hot_*, rest_*: the tensors of the two structures
    """

    can_initialise = False
    fits_exactly = False
    composed = True

    hot_text: str  # the two structures as text, so that this one has one too
    rest_text: str
    hot: Structure = field(init=False, repr=False, compare=False)
    rest: Structure = field(init=False, repr=False, compare=False)
    specs: tuple[TensorSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        hot, rest = read(self.hot_text), read(self.rest_text)
        if (hot.rows + rest.rows, hot.cols, rest.cols) != (self.rows, self.cols, self.cols):
            raise ValueError(
                f"{hot.rows} x {hot.cols} hot rows and {rest.rows} x {rest.cols} others are no "
                f"table of {self.rows} x {self.cols}."
            )
        places = TensorSpec("places", (hot.rows,), torch.int64, trainable=False)
        of_hot = [replace(spec, name=f"hot_{spec.name}") for spec in hot.tensors()]
        of_rest = [replace(spec, name=f"rest_{spec.name}") for spec in rest.tensors()]
        self.hold(hot=hot, rest=rest, specs=(places, *of_hot, *of_rest))

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def _parts(self, p: Params) -> tuple[tuple[Structure, Params], tuple[Structure, Params]]:
        """The two structures with their tensors."""
        of_hot = {spec.name: p[f"hot_{spec.name}"] for spec in self.hot.tensors()}
        of_rest = {spec.name: p[f"rest_{spec.name}"] for spec in self.rest.tensors()}
        return (self.hot, of_hot), (self.rest, of_rest)

    def check_values(self, p: Params) -> None:
        places = p["places"]
        if int(places[0]) < 0 or int(places[-1]) >= self.rows or bool((places.diff() <= 0).any()):
            raise ValueError(f"places of hot rows must ascend from 0 on, below {self.rows}.")
        for part, tensors in self._parts(p):
            part.check_values(tensors)

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        # ONNX has no search: exported graphs compare with all places.
        exported = world_of(index) is World.EXPORTED
        places, index = p["places"], index.contiguous()
        before = (places < index[:, None]).sum(1) if exported else torch.searchsorted(places, index)
        is_hot, in_hot, in_rest = self._places(p, index, before)
        (hot, of_hot), (rest, of_rest) = self._parts(p)
        return torch.where(is_hot[:, None], hot.take(of_hot, in_hot), rest.take(of_rest, in_rest))

    def _places(self, p: Params, index: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (n,) each
        """Which rows are hot, and where each is among the hot rows or the others, in range for both.

        ``before`` is how many hot rows stand before each.
        """
        in_hot = before.clamp_max(self.hot.rows - 1)
        is_hot = p["places"].index_select(0, in_hot) == index
        return is_hot, in_hot, (index - before).clamp(0, self.rest.rows - 1)

    def rows_by_parts(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """By the kernels of both structures: all rows by the one that has most of them, then the other's in place."""
        is_hot, in_hot, in_rest = self._places(p, index, torch.searchsorted(p["places"], index.contiguous()))
        hot, rest = self._parts(p)
        fewer, most, few = (hot, in_hot), (rest, in_rest), is_hot.nonzero()[:, 0]
        if 2 * few.shape[0] > index.shape[0]:
            (fewer, most), few = (most, fewer), is_hot.logical_not().nonzero()[:, 0]
        (part, tensors), where = most
        rows = part.lookup(tensors, where, world=World.EAGER)
        if few.shape[0] == 0:
            return rows
        (part, tensors), where = fewer
        others = part.lookup(tensors, where.index_select(0, few), world=World.EAGER)
        kept = torch.is_grad_enabled() and (rows.requires_grad or others.requires_grad)
        return rows.index_copy(0, few, others) if kept else rows.index_copy_(0, few, others)

    def explain(self, index: Tensor, impl: str) -> Explanation:  # (n,)
        """By the ways of its two structures; how many rows are hot, tensors alone tell."""
        told, hot, rest = super().explain(index, impl), self.hot.explain(index, impl), self.rest.explain(index, impl)
        if impl != "auto":
            return told
        if hot.path == rest.path:
            return replace(told, path=rest.path, why=rest.why)
        return replace(told, path=f"{hot.path} and {rest.path}", why=f"{hot.why}; {rest.why}")

    def scorings(self) -> list[Scoring]:
        """Each of the two structures by every way of its own."""
        return [
            Scoring(
                f"{hot.name} and {rest.name}",
                hot.cost + rest.cost,
                partial(self._open, hot, rest),
                hot.trains and rest.trains,
            )
            for hot, rest in product(self.hot.scorings(), self.rest.scorings())
        ]

    def _open(
        self, hot: Scoring, rest: Scoring, tensors: Sequence[Tensor], dtype: torch.dtype, keeps: bool
    ) -> JoinedScores:
        places, *own = tensors
        count = len(self.hot.tensors())
        others = torch.ones(self.rows, dtype=torch.bool, device=places.device).index_fill_(0, places, False)
        order = torch.cat([places, others.nonzero()[:, 0]])
        tables = [hot.open(own[:count], dtype, keeps), rest.open(own[count:], dtype, keeps)]
        return JoinedScores(tables, order, constants=1)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return self.take(p, torch.arange(self.rows, device=p["places"].device))

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        """Hot rows stay hot; new ones are not."""
        places = p["places"][p["places"] < rows]
        if not 0 < len(places) < rows:
            raise ValueError(f"of {rows} rows {len(places)} would be hot; a table keeps rows of both kinds.")
        heights = len(places), rows - len(places)
        parts = [part.resized(own, height) for (part, own), height in zip(self._parts(p), heights, strict=True)]
        found = _joined(rows, self.cols, places, parts)
        assert isinstance(found.structure, type(self))
        return found.structure, dict(found.params)

    @property
    def row_multiply_adds(self) -> int | None:
        each = self.hot.row_multiply_adds, self.rest.row_multiply_adds
        return None if each[0] is None or each[1] is None else each[0] + each[1]

    def describe(self) -> str:
        hot, rest = self.hot, self.rest
        return f"{hot.rows} rows {hot.kind} {hot.describe()}, the rest {rest.kind} {rest.describe()}"


def _joined(rows: int, cols: int, places: Tensor, parts: Sequence[tuple[Structure, Params]]) -> Fit:
    """A table of hot rows in these places, and of the others."""
    structure = _matrix(rows, cols, *(part for part, _ in parts))
    own = [tensors[spec.name] for part, tensors in parts for spec in part.tensors()]
    return Fit(structure, structure.named([places, *own]))


def _matrix(rows: int, cols: int, hot: Structure, rest: Structure) -> HotRowsMatrix:
    if hot.text is None or rest.text is None:
        raise ValueError(f"{hot.kind} and {rest.kind} must both be registered structures to stand in one table.")
    return HotRowsMatrix(rows, cols, hot.text, rest.text)


@dataclass(frozen=True, kw_only=True)
class HotRows(Format):
    """``tb.HotRows()``: six rows of a hundred in 8 bits and the others in 4, for a trained table.

    Hot are the rows most often looked up, where a fit is told the use of a table; else the first, since vocabularies
    are mostly ordered by frequency.

    Args:
        share: of the rows that are hot.
        hot, rest: the formats of the two kinds of rows.
    """

    share: float = 0.06
    hot: Format = field(default_factory=lambda: QuantizedRows(bits=8))
    rest: Format = field(default_factory=lambda: QuantizedRows(bits=4))

    def __post_init__(self) -> None:
        require_number(self.share, "share", low=0, high=1)
        for name, format in (("hot", self.hot), ("rest", self.rest)):
            if not isinstance(format, Format):
                raise TypeError(f"{name} must be a format such as tb.QuantizedRows(bits=8), got {format!r}.")

    @property
    def suits_heads(self) -> bool:  # type: ignore[override]
        # Frequent words make most of the scores that matter; the others bear coarser rows.
        return self.hot.suits_heads and isinstance(self.rest, QuantizedRows)

    @classmethod
    def spellings(cls) -> dict[str, Spelling]:
        return {"hot": Spelling(cls(), "the rows used most in 8 bits, others in 4, for language models")}

    @classmethod
    def candidates(cls, ratio: float) -> list[HotRows]:
        return [cls(), cls(share=0.25), cls(share=0.5)]

    def bind(self, budget: Budget) -> HotRowsMatrix:
        hot, rest = self._budgets(budget)
        return _matrix(budget.rows, budget.cols, self.hot.bind(hot), self.rest.bind(rest))

    def _budgets(self, budget: Budget) -> tuple[Budget, Budget]:
        if budget.rows < 2:
            raise ValueError("HotRows divides the rows of a table and needs two or more of them, got 1.")
        hot = min(max(1, int(self.share * budget.rows)), budget.rows - 1)
        return replace(budget, rows=hot, reserved=0), replace(budget, rows=budget.rows - hot)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """Each kind of rows by its own format, the first rows hot."""
        return self.fit_to_use(table, budget, Use())

    def fit_to_use(self, table: Tensor, budget: Budget, use: Use) -> Fit:
        """Each kind of rows by its own format, those most often looked up hot."""
        budgets = self._budgets(budget)
        order = torch.arange(budget.rows, device=table.device)
        if use.counts is not None:
            order = use.counts.argsort(descending=True, stable=True)
        places = [rows.sort().values for rows in order.split([own.rows for own in budgets])]
        parts = []
        for format, own, rows in zip((self.hot, self.rest), budgets, places, strict=True):
            counts = None if use.counts is None else use.counts[rows]
            fit = fitted(format, table[rows], own, Use(counts, use.moment))
            parts.append((fit.structure, fit.params))
        return _joined(budget.rows, budget.cols, places[0], parts)
