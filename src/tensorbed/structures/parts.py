"""Tables made of other tables, their *parts*: each row is one of a part's, which computes and scores it its own way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from tensorbed.backends.parts import Located, all_codes, put_together
from tensorbed.backends.scores.scoring import JoinedScores, Scoring, joined_scorings
from tensorbed.dispatch import World
from tensorbed.structures.base import Params, Structure, TensorSpec, each_once
from tensorbed.structures.explanation import Explanation
from tensorbed.structures.formats import Budget, Fit, Format, Use, fitted
from tensorbed.structures.registry import read, text_of


@dataclass(frozen=True)
class ComposedMatrix(Structure):
    """Rows that are those of other structures.

    A subclass keeps its parts as text, so that it has one too, and hands them to :meth:`compose`. It says which row of
    which part an index is: by :meth:`located` for the kernels of the parts, by :meth:`masked` for graphs.

    Shape:
        - first the tensors that say where rows are, then those of each part, their names after the part's
    """

    noun: ClassVar[str] = "rows"  # what the text calls the rows of its parts

    parts: tuple[Structure, ...] = field(init=False, repr=False, compare=False)
    specs: tuple[TensorSpec, ...] = field(init=False, repr=False, compare=False)
    own: tuple[TensorSpec, ...] = field(init=False, repr=False, compare=False)  # of those the first, no part's
    names: tuple[dict[str, str], ...] = field(init=False, repr=False, compare=False)  # of each part's tensors, here

    def compose(self, parts: Mapping[str, str], *own: TensorSpec) -> None:
        """Settle the parts, given as text by the names that their tensors begin with, and the tensors besides."""
        found = tuple(map(read, parts.values()))
        height, wrong = sum(part.rows for part in found), [part.cols for part in found if part.cols != self.cols]
        if wrong or height != self.rows:
            sizes = " and ".join(f"{part.rows} x {part.cols}" for part in found)
            raise ValueError(f"{sizes} {self.noun} are no table of {self.rows} x {self.cols}.")
        specs = list(own)
        names = [
            {spec.name: f"{name}_{spec.name}" for spec in part.tensors()}
            for name, part in zip(parts, found, strict=True)
        ]
        for part, known in zip(found, names, strict=True):
            specs += [replace(spec, name=known[spec.name]) for spec in part.tensors()]
        self.hold(
            parts=found,
            own=own,
            names=tuple(names),
            specs=tuple(specs),
            can_initialise=all(part.can_initialise for part in found),
            fits_exactly=all(part.fits_exactly for part in found),
            packs=any(part.packs for part in found),
        )

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def with_tensors(self, p: Params) -> list[tuple[Structure, Params]]:
        """The parts with their tensors."""
        pairs = zip(self.parts, self.names, strict=True)
        return [(part, {name: p[known] for name, known in names.items()}) for part, names in pairs]

    @abstractmethod
    def located(self, p: Params, index: Tensor) -> Located:  # (n,)
        """Which row of which part each index is; eagerly."""

    @abstractmethod
    def masked(self, p: Params, index: Tensor) -> Iterable[tuple[Tensor, Tensor]]:  # (n,) -> (n,), (n,)
        """For each part which indices are its rows, unless a later part has them, and a row of it for every index."""

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        rows: Tensor | None = None
        for (part, tensors), (mask, ids) in zip(self.with_tensors(p), self.masked(p, index), strict=True):
            own = part.take(tensors, ids)
            rows = own if rows is None else torch.where(mask[:, None], own, rows)
        assert rows is not None
        return rows

    def eager_rows(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """By the kernels of the parts: one call where all parts are codes, else each into its rows of one output."""
        parts = self.with_tensors(p)
        dtype = next(tensor.dtype for tensor in p.values() if tensor.is_floating_point())
        codes = all_codes((part.made_of(own) for part, own in parts), dtype, self.cols)
        if codes is not None:
            out = self._empty_rows(index, dtype)
            if self.located(p, index).fill(out, codes):
                return out
        return each_once(partial(self._joined_rows, p, dtype), index, self.cols, dtype)

    def _empty_rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:  # (n,) -> (n, cols)
        # Before all that is smaller: allocators then have the memory of the last batch's rows for it, and no new pages.
        return torch.empty(index.shape[0], self.cols, dtype=dtype, device=index.device)

    def _joined_rows(self, p: Params, dtype: torch.dtype, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        out = self._empty_rows(index, dtype)
        pairs = zip(self.with_tensors(p), self.located(p, index).split(), strict=True)
        # Parts that train and have no row here are asked for none: as rows of torch.nn.Embedding that nobody looks up
        # they have a gradient of zeros, for which DistributedDataParallel waits.
        asked = [(part, own, ids, at) for (part, own), (ids, at) in pairs if ids.shape[0] or _trains(own)]
        if len(asked) == 1:
            part, tensors, ids, _ = asked[0]
            return part.lookup(tensors, ids, world=World.EAGER)
        if any(_trains(own) for _, own, _, _ in asked):
            rows = [part.lookup(own, ids, world=World.EAGER) for part, own, ids, _ in asked]
            return put_together(out, [at for _, _, _, at in asked], rows)
        for part, tensors, ids, at in asked:
            out.index_copy_(0, at, part.lookup(tensors, ids, world=World.EAGER))
        return out

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return self.take(p, torch.arange(self.rows, device=next(iter(p.values())).device))

    def check_own(self, p: Params) -> None:
        """``ValueError`` for tensors that should say where rows are, and do not."""

    def check_values(self, p: Params) -> None:
        self.check_own(p)
        for part, names in zip(self.parts, self.names, strict=True):
            part.check_values({name: p[known] for name, known in names.items() if known in p})

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        """Each part with this standard deviation. Where rows are is not drawn: those tensors have their values."""
        self.check_own(p)
        for part, tensors in self.with_tensors(p):
            part.initialise(tensors, std, generator)

    def with_parts(self, rows: int, own: Sequence[Tensor], fits: Sequence[Fit]) -> tuple[Self, dict[str, Tensor]]:
        """A table of this kind of other parts; ``own`` are the tensors besides."""
        found = joined(partial(self.of_texts, rows, self.cols), own, fits)
        assert isinstance(found.structure, type(self))
        return found.structure, dict(found.params)

    @classmethod
    def of_texts(cls, rows: int, cols: int, *texts: str) -> Self:
        """Of these parts, in their order."""
        return cls(rows, cols, *texts)

    def packed(self, p: Params) -> tuple[Structure, Params]:
        """Of each part what is stored once training is over; those that are trained as they are stored stay."""
        parts: list[tuple[Any, Params]] = list(self.with_tensors(p))
        fits = [Fit(*part.packed(own)) if part.packs else Fit(part, own) for part, own in parts]
        return self.with_parts(self.rows, [p[spec.name] for spec in self.own], fits)

    def explain(self, index: Tensor, impl: str) -> Explanation:  # (n,)
        """By the ways of its parts; how many rows each of them has, tensors alone tell."""
        told = super().explain(index, impl)
        if impl != "auto":
            return told
        parts = [part.explain(index % part.rows, impl) for part in self.parts]
        ways = {part.path: part.why for part in parts}
        return replace(told, path=" and ".join(ways), why="; ".join(ways.values()))

    def scorings(self) -> list[Scoring]:
        """Each part by a way of its own."""
        return [
            Scoring(
                " and ".join(way.name for way in ways),
                sum((way.cost for way in ways[1:]), ways[0].cost),
                partial(self._open, ways),
                all(way.trains for way in ways),
                all(way.halves for way in ways),
            )
            for ways in joined_scorings([part.scorings() for part in self.parts])
        ]

    def _open(
        self, ways: Sequence[Scoring], tensors: Sequence[Tensor], dtype: torch.dtype, keeps: bool, impl: str = "auto"
    ) -> JoinedScores:
        own, rest, tables = len(self.own), list(tensors), []
        order = self.scored_rows(rest[:own])
        del rest[:own]
        for way, names in zip(ways, self.names, strict=True):
            tables.append(way.open(rest[: len(names)], dtype, keeps, impl))
            del rest[: len(names)]
        return JoinedScores(tables, order, constants=own)

    def scored_rows(self, own: Sequence[Tensor]) -> Tensor | None:  # -> (rows,)
        """Which row of the table each row of the parts is, one part after the other; ``None`` in the table's order."""
        return None

    @property
    def row_multiply_adds(self) -> int | None:
        most = 0
        for part in self.parts:
            each = part.row_multiply_adds
            if each is None:
                return None
            most = max(most, each)
        return most

    def describe(self) -> str:
        return ", ".join(f"{part.rows} rows {described(part)}" for part in self.parts)


def _trains(tensors: Params) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values())


def described(part: Structure) -> str:
    """Kind and sizes, in one line."""
    return " ".join(dict.fromkeys((part.kind, part.describe())))


def fit_part(format: Format, table: Tensor, rows: Tensor | slice, budget: Budget, use: Use) -> Fit:
    """Some rows of a table by a format, weighed by their own use."""
    return fitted(format, table[rows], budget, Use(None if use.counts is None else use.counts[rows], use.moment))


def constants_of_parts(structure: ComposedMatrix, formats: Iterable[Format]) -> dict[str, Tensor]:
    """What the formats of its parts give a table that is drawn, by the names that the tensors have in it."""
    parts = zip(formats, structure.parts, structure.names, strict=True)
    return {names[name]: tensor for format, part, names in parts for name, tensor in format.constants(part).items()}


def joined(made: Callable[..., ComposedMatrix], own: Sequence[Tensor], fits: Sequence[Fit]) -> Fit:
    """A table of these parts; ``made`` takes their texts, ``own`` are the tensors besides."""
    structure = made(*(text_of(fit.structure) for fit in fits))
    tensors = [fit.params[spec.name] for fit in fits for spec in fit.structure.tensors()]
    return Fit(structure, structure.named([*own, *tensors]))
