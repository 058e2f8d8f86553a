"""Few rows in one format, the rest in another: rows that are used often may be kept more exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from tensorbed.backends.parts import Located, located_by_places
from tensorbed.checks import require_number
from tensorbed.dispatch import World, world_of
from tensorbed.structures.base import Params, Structure, TensorSpec
from tensorbed.structures.formats import Budget, Fit, Format, Spelling, Use, require_format
from tensorbed.structures.parts import ComposedMatrix, constants_of_parts, fit_part, joined
from tensorbed.structures.quantized_rows import QuantizedRows
from tensorbed.structures.registry import read, register, text_of


@register("hot_rows")
@dataclass(frozen=True)
class HotRowsMatrix(ComposedMatrix):
    """The rows in ``places`` are those of one structure, all others, in their order, those of another.

    Shape:
        - places: ``(hot rows,)`` int64, ascending
        - hot_*, rest_*: the tensors of the two structures
    """

    noun = "hot rows and others"
    refuses_rows = True

    hot_text: str
    rest_text: str

    def __post_init__(self) -> None:
        super().__post_init__()
        places = TensorSpec("places", (read(self.hot_text).rows,), torch.int64, trainable=False)
        self.compose({"hot": self.hot_text, "rest": self.rest_text}, places)

    def check_own(self, p: Params) -> None:
        places = p["places"]
        if int(places[0]) < 0 or int(places[-1]) >= self.rows or bool((places.diff() <= 0).any()):
            raise ValueError(f"places of hot rows must ascend from 0 on, below {self.rows}.")

    def masked(self, p: Params, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:  # (n,) -> (n,), (n,)
        # ONNX has no search: exported graphs compare with all places.
        exported = world_of(index) is World.EXPORTED
        (hot, rest), places, index = self.parts, p["places"], index.contiguous()
        before = (places < index[:, None]).sum(1) if exported else torch.searchsorted(places, index)
        in_hot = before.clamp_max(hot.rows - 1)
        is_hot = places.index_select(0, in_hot) == index
        yield is_hot, in_hot
        yield is_hot.logical_not(), (index - before).clamp(0, rest.rows - 1)

    def located(self, p: Params, index: Tensor) -> Located:  # (n,)
        return located_by_places(index, p["places"], self.rows)

    def scored_rows(self, own: Sequence[Tensor]) -> Tensor:  # -> (rows,)
        (places,) = own
        others = torch.ones(self.rows, dtype=torch.bool, device=places.device).index_fill_(0, places, False)
        return torch.cat([places, others.nonzero()[:, 0]])

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        """Hot rows stay hot; new ones are not."""
        places = p["places"][p["places"] < rows]
        if not 0 < len(places) < rows:
            raise ValueError(f"of {rows} rows {len(places)} would be hot; a table keeps rows of both kinds.")
        heights = len(places), rows - len(places)
        fits = [
            Fit(*part.resized(own, height)) for (part, own), height in zip(self.with_tensors(p), heights, strict=True)
        ]
        return self.with_parts(rows, [places], fits)

    def describe(self) -> str:
        hot, rest = self.parts
        return f"{hot.rows} rows {hot.kind} {hot.describe()}, the rest {rest.kind} {rest.describe()}"


@dataclass(frozen=True, kw_only=True)
class HotRows(Format):
    """The rows that are used most in one format, the others in another: by default 8 bits and 4, for a trained table.

    The hot rows are those that are looked up most often, where a fit knows how the table is used (``calibrate=`` of
    :func:`tensorbed.compress_`). Otherwise they are the first ones, since vocabularies are mostly ordered by frequency.

    Args:
        share: which part of the rows is hot, between 0 and 1.
        hot: the format of the hot rows.
        rest: the format of the others.

    Example::

        >>> layer = tb.Embedding.from_pretrained(torch.randn(4096, 64), tb.HotRows())
        >>> round(layer.compression_ratio, 1), layer.fit_error < 0.1
        (6.4, True)
    """

    share: float = 0.06
    hot: Format = field(default_factory=lambda: QuantizedRows(bits=8))
    rest: Format = field(default_factory=lambda: QuantizedRows(bits=4))

    def __post_init__(self) -> None:
        require_number(self.share, "share", low=0, high=1)
        for name, format in (("hot", self.hot), ("rest", self.rest)):
            require_format(format, name)

    @property
    def suits_heads(self) -> bool:  # type: ignore[override]
        # Frequent words make most of the scores that matter; the others bear coarser rows.
        return self.hot.suits_heads and isinstance(self.rest, QuantizedRows)

    @property
    def can_fit(self) -> bool:
        return self.hot.can_fit and self.rest.can_fit

    @classmethod
    def spellings(cls) -> dict[str, Spelling]:
        return {"hot": Spelling(cls(), "the rows used most in 8 bits, others in 4, for language models")}

    @classmethod
    def candidates(cls, ratio: float) -> list[HotRows]:
        return [cls(), cls(share=0.25), cls(share=0.5)]

    def bind(self, budget: Budget) -> HotRowsMatrix:
        hot, rest = self._budgets(budget)
        texts = text_of(self.hot.bind(hot)), text_of(self.rest.bind(rest))
        return HotRowsMatrix(budget.rows, budget.cols, *texts)

    def constants(self, structure: Structure) -> dict[str, Tensor]:
        """Of a table that is drawn the first rows are hot."""
        assert isinstance(structure, HotRowsMatrix)
        hot, _ = structure.parts
        return {"places": torch.arange(hot.rows, device="cpu"), **constants_of_parts(structure, (self.hot, self.rest))}

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
        formats = zip((self.hot, self.rest), places, budgets, strict=True)
        fits = [fit_part(format, table, rows, own, use) for format, rows, own in formats]
        return joined(partial(HotRowsMatrix, budget.rows, budget.cols), [places[0]], fits)
