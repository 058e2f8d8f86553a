"""Few rows in one format, the rest in another: rows that are used often may be kept more exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from tensorbed.backends.scores.joined import JoinedScores
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.checks import require_number
from tensorbed.dispatch import World, world_of
from tensorbed.structures.base import Params, Structure, TensorSpec
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

    def __post_init__(self) -> None:
        super().__post_init__()
        # Now, because graphs cannot read text.
        object.__setattr__(self, "hot", read(self.hot_text))
        object.__setattr__(self, "rest", read(self.rest_text))
        if (self.hot.rows + self.rest.rows, self.hot.cols, self.rest.cols) != (self.rows, self.cols, self.cols):
            raise ValueError(
                f"{self.hot.rows} x {self.hot.cols} hot rows and {self.rest.rows} x {self.rest.cols} others are no "
                f"table of {self.rows} x {self.cols}."
            )
        # Worked out once: a lookup has no time for it.
        places = TensorSpec("places", (self.hot.rows,), torch.int64, trainable=False)
        hot = [replace(spec, name=f"hot_{spec.name}") for spec in self.hot.tensors()]
        rest = [replace(spec, name=f"rest_{spec.name}") for spec in self.rest.tensors()]
        object.__setattr__(self, "_specs", (places, *hot, *rest))

    def check_values(self, p: Params) -> None:
        places = p["places"]
        if int(places[0]) < 0 or int(places[-1]) >= self.rows or bool((places.diff() <= 0).any()):
            raise ValueError(f"places of hot rows must ascend from 0 on, below {self.rows}.")
        self.hot.check_values(_named(p, "hot_"))
        self.rest.check_values(_named(p, "rest_"))

    if TYPE_CHECKING:
        hot: ClassVar[Structure]
        rest: ClassVar[Structure]

    def tensors(self) -> tuple[TensorSpec, ...]:
        specs: tuple[TensorSpec, ...] = self._specs  # type: ignore[attr-defined]
        return specs

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        is_hot, in_hot, in_rest = self._places(p, index)
        hot, rest = self.hot.take(_named(p, "hot_"), in_hot), self.rest.take(_named(p, "rest_"), in_rest)
        return torch.where(is_hot[:, None], hot, rest)

    def _places(self, p: Params, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (n,)
        """Which rows are hot, and where each is among the hot rows or the others; in range for both."""
        before = _before(p["places"], index.contiguous())
        in_hot = before.clamp_max(self.hot.rows - 1)
        is_hot = p["places"].index_select(0, in_hot) == index
        return is_hot, in_hot, (index - before).clamp(0, self.rest.rows - 1)

    def rows_by_parts(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """By the kernels of both structures: all rows by the one that has most of them, then the other's in place."""
        is_hot, in_hot, in_rest = self._places(p, index)
        parts = [(self.rest, _named(p, "rest_"), in_rest), (self.hot, _named(p, "hot_"), in_hot)]
        at = is_hot.nonzero()[:, 0]
        if 2 * at.shape[0] > index.shape[0]:
            parts, at = parts[::-1], is_hot.logical_not().nonzero()[:, 0]
        (most, of_most, in_most), (fewer, of_fewer, in_fewer) = parts
        rows = most.lookup(of_most, in_most, world=World.EAGER)
        if at.shape[0] == 0:
            return rows
        others = fewer.lookup(of_fewer, in_fewer[at], world=World.EAGER)
        kept = torch.is_grad_enabled() and (rows.requires_grad or others.requires_grad)
        return rows.index_copy(0, at, others) if kept else rows.index_copy_(0, at, others)

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
        places, of_hot, of_rest = (
            tensors[0],
            tensors[1 : 1 + len(self.hot.tensors())],
            tensors[-len(self.rest.tensors()) :],
        )
        others = torch.ones(self.rows, dtype=torch.bool, device=places.device).index_fill_(0, places, False)
        order = torch.cat([places, others.nonzero()[:, 0]])
        tables = [hot.open(of_hot, dtype, keeps), rest.open(of_rest, dtype, keeps)]
        return JoinedScores(tables, order, constants=1)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return self.take(p, torch.arange(self.rows, device=p["places"].device))

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        """Hot rows stay hot; new ones are not."""
        places = p["places"][p["places"] < rows]
        if not 0 < len(places) < rows:
            raise ValueError(f"of {rows} rows {len(places)} would be hot; a table keeps rows of both kinds.")
        hot, of_hot = self.hot.resized(_named(p, "hot_"), len(places))
        rest, of_rest = self.rest.resized(_named(p, "rest_"), rows - len(places))
        assert hot.text is not None and rest.text is not None  # noqa: PT018
        found = {"places": places, **_prefixed("hot_", of_hot), **_prefixed("rest_", of_rest)}
        return replace(self, rows=rows, hot_text=hot.text, rest_text=rest.text), found

    @property
    def row_multiply_adds(self) -> int | None:
        each = self.hot.row_multiply_adds, self.rest.row_multiply_adds
        return None if each[0] is None or each[1] is None else each[0] + each[1]

    def describe(self) -> str:
        hot, rest = self.hot, self.rest
        return f"{hot.rows} rows {hot.kind} {hot.describe()}, the rest {rest.kind} {rest.describe()}"


def _before(places: Tensor, index: Tensor) -> Tensor:  # (k,), (n,) -> (n,)
    """How many hot rows stand before each row; exported graphs compare them all, ONNX has no search."""
    if world_of(index) is World.EXPORTED:
        return (places < index[:, None]).sum(1)
    return torch.searchsorted(places, index)


def _named(p: Params, prefix: str) -> Params:
    return {name.removeprefix(prefix): tensor for name, tensor in p.items() if name.startswith(prefix)}


def _prefixed(prefix: str, p: Params) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in p.items()}


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
        return self._of(budget, self.hot.bind(hot), self.rest.bind(rest))

    def _budgets(self, budget: Budget) -> tuple[Budget, Budget]:
        if budget.rows < 2:
            raise ValueError("HotRows divides the rows of a table and needs two or more of them, got 1.")
        hot = min(max(1, int(self.share * budget.rows)), budget.rows - 1)
        return replace(budget, rows=hot, reserved=0), replace(budget, rows=budget.rows - hot)

    def _of(self, budget: Budget, hot: Structure, rest: Structure) -> HotRowsMatrix:
        if hot.text is None or rest.text is None:
            raise ValueError(f"{hot.kind} and {rest.kind} must both be registered structures to stand in one table.")
        return HotRowsMatrix(budget.rows, budget.cols, hot.text, rest.text)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """Each kind of rows by its own format, the first rows hot."""
        return self.fit_to_use(table, budget, Use())

    def fit_to_use(self, table: Tensor, budget: Budget, use: Use) -> Fit:
        """Each kind of rows by its own format, those most often looked up hot."""
        budgets = self._budgets(budget)
        order = torch.arange(budget.rows, device=table.device)
        if use.counts is not None:
            order = use.counts.argsort(descending=True, stable=True)
        places = order[: budgets[0].rows].sort().values
        others = order[budgets[0].rows :].sort().values
        found: dict[str, Tensor] = {"places": places}
        made = []
        for name, format, own, rows in (("hot", self.hot, budgets[0], places), ("rest", self.rest, budgets[1], others)):
            counts = None if use.counts is None else use.counts[rows]
            fit = fitted(format, table[rows], own, Use(counts, use.moment))
            found |= _prefixed(f"{name}_", fit.params)
            made.append(fit.structure)
        return Fit(self._of(budget, *made), found)
