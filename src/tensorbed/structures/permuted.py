"""Another order of rows before any other format, so that rows which are alike stand side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from tensorbed.backends.parts import AskedOfPart, Located
from tensorbed.decompose.clusters import clustered
from tensorbed.dispatch import Asked, World, checked_indices
from tensorbed.structures.base import Params, Structure, TensorSpec
from tensorbed.structures.formats import Budget, Fit, Format, Use, require_format
from tensorbed.structures.parts import ComposedMatrix, constants_of_parts, described, fit_part, joined
from tensorbed.structures.registry import register, text_of

CLUSTERS = "clusters"
_MOST = 2**31  # rows that int32 can tell apart


@register("permuted")
@dataclass(frozen=True)
class PermutedMatrix(ComposedMatrix):
    """Row ``i`` is row ``places[i]`` of another structure.

    Shape:
        - places: ``(rows,)`` int32, a permutation
        - part_*: the tensors of the structure
    """

    noun = "permuted rows"
    hands_on = True

    part_text: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows > _MOST:
            raise ValueError(
                f"a table of {self.rows} rows cannot be permuted: its order is kept in int32, {_MOST} rows."
            )
        self.compose({"part": self.part_text}, TensorSpec("places", (self.rows,), torch.int32, trainable=False))

    def check_own(self, p: Params) -> None:
        _require_permutation(p["places"], "places")

    def masked(self, p: Params, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:  # (n,) -> (n,), (n,)
        yield torch.ones_like(index, dtype=torch.bool), p["places"].index_select(0, index).long()

    def located(self, p: Params, index: Tensor) -> Located:  # (n,)
        everywhere = torch.arange(index.shape[0], device=index.device)
        return Located([AskedOfPart(p["places"].index_select(0, index).long(), everywhere)])

    def handed_on(self, asked: Asked) -> Asked:
        """Of its part, whose kernels then compute all tables of a collection at once."""
        index = asked.ids if asked.checked else checked_indices(asked.ids, self.rows, World.EAGER)
        ((part, tensors),), places = self.with_tensors(asked.params), asked.params["places"]
        padding = None if asked.padding_idx is None else int(places[asked.padding_idx])
        ids = places.index_select(0, index).long()
        of_part = {"table": part, "params": tensors, "made_of": part.made_of(tensors)}
        # Not checked: the order comes with the tensors, and may be damaged.
        return asked._replace(**of_part, ids=ids, padding_idx=padding, checked=False)

    def scored_rows(self, own: Sequence[Tensor]) -> Tensor:  # -> (rows,)
        return _inverse(own[0].long())

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        ((part, tensors),) = self.with_tensors(p)
        return part.full(tensors).index_select(0, p["places"].long())

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        """New rows stand behind the others."""
        if rows < self.rows:
            raise ValueError(
                f"the last of {self.rows} permuted rows stand anywhere: {rows} of them are no smaller table. "
                "Make one and fit it with from_pretrained."
            )
        ((part, tensors),) = self.with_tensors(p)
        places = torch.arange(rows, dtype=torch.int32, device=p["places"].device)
        places[: self.rows] = p["places"]
        return self.with_parts(rows, [places], [Fit(*part.resized(tensors, rows))])

    def describe(self) -> str:
        return described(self.parts[0])


@dataclass(frozen=True, eq=False)
class Permuted(Format):
    """The rows in another order, in any other format, so that rows which are alike may share numbers.

    The order is stored, four bytes a row: a table of float32 becomes at most as many times smaller as it has columns.

    Args:
        format: of the rows in their new order.
        order: the rows in their new order, row ``order[j]`` as row ``j`` of ``format``; or, for a table that is fitted,
            ``"clusters"``: rows that are alike side by side.

    Shape:
        - order: ``(rows,)``, a permutation

    Example::

        >>> layer = tb.Embedding.from_pretrained(torch.randn(4096, 64), tb.Permuted(tb.LowRank(rank=16)))
        >>> round(layer.compression_ratio, 2)
        3.71
    """

    format: Format
    order: Any = CLUSTERS  # a tensor once checked

    def __post_init__(self) -> None:
        require_format(self.format, "format")
        if isinstance(self.order, str):
            if self.order != CLUSTERS:
                raise ValueError(f'order={self.order!r}: give a permutation of the rows, or "{CLUSTERS}".')
            return
        try:
            order = torch.as_tensor(self.order, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"order must be a permutation of the rows, got {type(self.order).__name__}.") from error
        if order.dim() != 1 or order.is_floating_point() or order.is_complex() or order.dtype == torch.bool:
            raise TypeError(f"order must be a list of whole numbers, got {order.dtype} of shape {tuple(order.shape)}.")
        order = order.long()  # unsigned numbers cannot be compared
        _require_permutation(order, "order")
        object.__setattr__(self, "order", order.to(torch.int32, copy=True))

    def __repr__(self) -> str:
        order = repr(self.order) if isinstance(self.order, str) else f"<{self.order.shape[0]} rows>"
        return f"Permuted({self.format!r}, order={order})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Permuted) or self.format != other.format:
            return False
        orders = self.order, other.order
        named = [order for order in orders if isinstance(order, str)]
        return len(named) == 2 if named else torch.equal(*orders)

    def __hash__(self) -> int:
        return hash((self.format, self.order if isinstance(self.order, str) else self.order.shape[0]))

    @property
    def can_fit(self) -> bool:
        return self.format.can_fit

    @property
    def weighs_use(self) -> bool:
        return self.format.weighs_use

    def bind(self, budget: Budget) -> PermutedMatrix:
        text = text_of(self.format.bind(self._budget(budget)))
        return PermutedMatrix(budget.rows, budget.cols, text)

    def _budget(self, budget: Budget) -> Budget:
        """Of the format, which the order counts against."""
        if not isinstance(self.order, str) and self.order.shape[0] != budget.rows:
            raise ValueError(f"order names {self.order.shape[0]} rows of {budget.rows}; it must name each row once.")
        return replace(budget, reserved=budget.reserved + budget.rows * torch.int32.itemsize)

    def constants(self, structure: Structure) -> dict[str, Tensor]:
        if isinstance(self.order, str):
            raise ValueError(
                f'order="{CLUSTERS}" orders the rows of a trained table; fit one with from_pretrained, or give order= '
                f"a permutation of {structure.rows} rows."
            )
        assert isinstance(structure, PermutedMatrix)
        return {"places": _inverse(self.order.long()).int(), **constants_of_parts(structure, [self.format])}

    def sample(self, table: Tensor, structure: Structure) -> tuple[Tensor, Format]:
        assert isinstance(structure, PermutedMatrix)
        (part,) = structure.parts
        if not isinstance(self.order, str):  # the error is that of the rows in their new order
            return self.format.sample(table[self.order.to(table.device).long()], part)
        some, format = self.format.sample(table, part)
        return some, Permuted(format)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """The rows in their new order, by the format."""
        return self.fit_to_use(table, budget, Use())

    def fit_to_use(self, table: Tensor, budget: Budget, use: Use) -> Fit:
        """The same, with the rows' use in that order."""
        own = self._budget(budget)
        order = clustered(table) if isinstance(self.order, str) else self.order.to(table.device).long()
        fit = fit_part(self.format, table, order, own, use)
        return joined(partial(PermutedMatrix, budget.rows, budget.cols), [_inverse(order).int()], [fit])


def _inverse(order: Tensor) -> Tensor:  # (n,) int64 -> (n,)
    return torch.empty_like(order).index_copy_(0, order, torch.arange(order.shape[0], device=order.device))


def _require_permutation(order: Tensor, name: str) -> None:  # (n,)
    """Each number from 0 on once, or an error that names one that is not."""
    rows = order.shape[0]
    outside = ((order < 0) | (order >= rows)).nonzero()
    if outside.numel():
        raise ValueError(
            f"{name} holds {int(order[outside[0, 0]])}; a permutation of {rows} rows holds 0 to {rows - 1}."
        )
    twice = (torch.bincount(order.long(), minlength=rows) > 1).nonzero()
    if twice.numel():
        raise ValueError(f"{name} holds {int(twice[0, 0])} more than once; a permutation holds each row once.")
