"""What users write: a format, bound to a table's size or fitted to a table to become a structure."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tensorbed.checks import require_int, require_number
from tensorbed.decompose.powers import far_exponent, frobenius, shifted
from tensorbed.structures.base import Params, Structure


class _Unsaid(int):
    """A default that can be told from the same number given."""


DEFAULT_RANK: int = _Unsaid(16)
S = TypeVar("S", bound=Structure)


@dataclass(frozen=True)
class Budget:
    """A table to be beaten: the layer's dtype, and bytes stored besides the structure (a padding row)."""

    rows: int
    cols: int
    dtype: torch.dtype = torch.float32
    reserved: int = 0

    def ratio(self, structure: Structure) -> float:
        """Dense bytes over stored bytes, real rows only."""
        return self.rows * self.cols * self.dtype.itemsize / (structure.bytes(self.dtype) + self.reserved)


@dataclass(frozen=True)
class Fit:
    """A structure with the tensors found for a table."""

    structure: Structure
    params: Params


@dataclass(frozen=True)
class Use:
    """How a trained table is used, seen on typical inputs; what is not known is ``None``.

    Shape:
        - counts: ``(rows,)``, how often each row was looked up
        - moment: ``(cols, cols)``, the mean of ``h h^T`` over the vectors ``h`` that rows were multiplied with

    Example::

        >>> hidden = torch.randn(500, 64)
        >>> use = tb.structures.Use(counts=torch.arange(1000), moment=hidden.T @ hidden / 500)
        >>> layer = tb.Embedding.from_pretrained(torch.randn(1000, 64), tb.HotRows(), use=use)
    """

    counts: Tensor | None = None
    moment: Tensor | None = None

    def row_weights(self) -> Tensor | None:  # (rows,) float32, mean 1
        """How much rows count, those never seen as if seen once."""
        if self.counts is None:
            return None
        seen = self.counts.double() + 1
        return (seen / seen.mean()).float()


class OutOfReachError(ValueError):
    """A size that a format cannot have for a table this small."""


class OutOfRangeError(ValueError):
    """A table of numbers so large or so small that its dtype cannot hold a fit to it."""


class Spelling(NamedTuple):
    """A format as the command line names it: one whose size is settled, or what makes one of a ``ratio=``."""

    format: Format | Callable[..., Format]
    help: str


class Format(ABC):
    """A small configuration that becomes a structure when it meets a table's size.

    What others have to know of a format it says itself: how it is named on the command line, what plans weigh of it,
    what becomes of a trained table. They ask all of :func:`tensorbed.structures.registry.formats` and name none.
    """

    known: ClassVar[dict[str, type[Format]]] = {}  # all of them, by name
    is_plain: ClassVar[bool] = False  # whether it is the table itself, where nothing is gained by another
    sample_rows: ClassVar[int] = 2**13  # rows that tell the error of a table
    suits_heads: ClassVar[bool] = False  # whether fits to a trained vocabulary head leave its scores nearly as they are
    squares_numbers: ClassVar[bool] = False  # whether a fit wants numbers that can be squared, see :func:`fitted`
    spelling: ClassVar[tuple[str, str] | None] = None  # its name on the command line, with a ratio, and what it is

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Format.known[cls.__qualname__] = cls

    @classmethod
    def spellings(cls) -> Mapping[str, Spelling]:
        """Its names on the command line."""
        return {} if cls.spelling is None else {cls.spelling[0]: Spelling(cls, cls.spelling[1])}

    @classmethod
    def candidates(cls, ratio: float) -> Iterable[Format]:
        """What a plan weighs for a trained table where tables are to be that many times smaller."""
        return ()

    @classmethod
    def candidates_to_train(cls, ratio: float) -> Iterable[Format]:
        """The same for a table that is trained from scratch."""
        return ()

    @classmethod
    def without_training(cls) -> Iterable[Format]:
        """What a trained table may become without being trained again."""
        return ()

    @property
    def weighs_use(self) -> bool:
        """Whether :meth:`fit_to_use` is another fit than :meth:`fit`."""
        return type(self).fit_to_use is not Format.fit_to_use

    @property
    def can_fit(self) -> bool:
        """Whether there is a :meth:`fit`; other formats are drawn, and trained."""
        return type(self).fit is not Format.fit

    @abstractmethod
    def bind(self, budget: Budget) -> Structure:
        """The structure with every factor and rank settled."""

    def constants(self, structure: Structure) -> Mapping[str, Tensor]:
        """Of a table that is drawn, the tensors that are neither drawn nor known from its sizes; by name."""
        return {}

    def sized_as(self, structure: Structure) -> Format:
        """The format that gives tables of other heights what this one gave ``structure``; itself where it would."""
        return self

    def sample(self, table: Tensor, structure: Structure) -> tuple[Tensor, Format]:
        """Some of a table and the format for it, whose error tells that of ``structure`` fitted to the whole."""
        return some_rows(table, self.sample_rows), self.sized_as(structure)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """The structure and tensors nearest to a finite ``(rows, cols)`` table; an error where there is no way.

        The tensors may be of higher precision than ``budget.dtype``; the caller rounds them.
        """
        raise self.no_fit()

    def no_fit(self) -> ValueError:
        """What is said where :attr:`can_fit` does not hold."""
        return ValueError(
            f"{self!r} cannot be fitted to a table: draw it with tb.Embedding(rows, cols, format) or "
            "tb.compress_(model, format, fit=False), and train it."
        )

    def fit_to_use(self, table: Tensor, budget: Budget, use: Use) -> Fit:
        """As :meth:`fit`, with errors weighed as they are met in use; formats that cannot weigh them fit as always."""
        return self.fit(table, budget)

    def multiplied(self, params: Params) -> list[str]:
        """The tensors whose product the table is: what all of them are multiplied by multiplies it."""
        return list(params)


def require_format(format: object, name: str = "format") -> None:
    """A format, or an error that shows one."""
    if not isinstance(format, Format):
        example = f"{format.__name__}()" if isinstance(format, type) else "tb.TensorTrain(rank=16)"
        raise TypeError(f"{name} must be a format such as {example}, got {format!r}.")


def fitted(format: Format, table: Tensor, budget: Budget, use: Use | None = None) -> Fit:
    """What a format makes of a table, with errors weighed by its use where that is known.

    A table of very large or very small numbers is brought near size 1 by a power of two for a fit that squares them;
    the tensors found have it back in equal shares.
    """
    exponent = far_exponent(table) if format.squares_numbers else 0
    near = shifted(table, -exponent)
    fit = format.fit(near, budget) if use is None else format.fit_to_use(near, budget, use)
    if not exponent:
        return fit
    names = format.multiplied(fit.params)
    # In float64, because the caller's dtype may be wider than the table's.
    back = {name: shifted(fit.params[name].double(), exponent / len(names)) for name in names}
    return Fit(fit.structure, {**fit.params, **back})


def largest(
    format: Format, sizes: Sequence[int], made: Callable[[int], S], budget: Budget, ratio: float, least: str
) -> S:
    """Of ascending sizes the last that is still ``ratio`` times smaller than the table, by bisection."""
    sizes = sizes[: sys.maxsize]  # as many as have a length
    count = bisect_right(sizes, -ratio, key=lambda size: -budget.ratio(made(size)))
    if count == 0:
        advice = ", or change the order or shape" if hasattr(format, "shape") else ""
        raise OutOfReachError(
            f"ratio={ratio:g} for {type(format).__name__}: {least} this table of {budget.rows} x {budget.cols} is "
            f"{budget.ratio(made(sizes[0])):.4g} times smaller, the most it can be; ask for at most that{advice}."
        )
    return made(sizes[count - 1])


def some_rows(table: Tensor, count: int) -> Tensor:  # (rows, cols) -> (at most count, cols)
    """One row, drawn at random, of each of ``count`` equal stretches of a table: what rows are first stays first."""
    rows = table.shape[0]
    if rows <= count:
        return table
    begin = torch.arange(count + 1, device="cpu") * rows // count
    draw = torch.rand(count, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")
    return table[(begin[:-1] + (draw * begin.diff()).long()).to(table.device)]


def written(format: Any) -> str:
    """A format as one would write it: what differs from the defaults."""
    said = [f for f in fields(format) if getattr(format, f.name) != f.default]
    return f"{type(format).__name__}({', '.join(f'{f.name}={getattr(format, f.name)!r}' for f in said)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class RankedFormat(Format, Generic[S]):
    """A format whose size is a rank: given, or found for a ratio or an error.

    Args:
        rank: one rank for every bond, kept as given; 16 when nothing is said.
        ratio: the largest uniform rank at which the dense table takes at least this many times the stored bytes.
        rel_error: for fitting only: ranks found by the cuts so that ``||W - fit||_F <= rel_error * ||W||_F``.
    """

    # Each way to say the size excludes the others; a fit that keeps no error has no ``rel_error``.
    sizes: ClassVar[tuple[str, ...]] = ("rank", "ratio", "rel_error")
    sample_rows: ClassVar[int] = 2**14  # few rows have fewer directions

    rank: int | None = None
    ratio: float | None = None
    rel_error: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{self.name}: {' and '.join(given)} both set the size; give one.")
        if not given:
            object.__setattr__(self, "rank", int(DEFAULT_RANK))
        if self.rank is not None:
            object.__setattr__(self, "rank", self.check_rank(self.rank, "rank"))
        if self.ratio is not None:
            require_number(self.ratio, "ratio", low=0)
        if self.rel_error is not None and "rel_error" not in self.sizes:
            raise ValueError(
                f"rel_error={self.rel_error!r} for {self.name}: no fit of it keeps an error; give rank= or ratio=."
            )
        if self.rel_error is not None:
            require_number(self.rel_error, "rel_error", low=0, high=1)

    __repr__ = written

    @property
    def name(self) -> str:
        return type(self).__name__

    def check_rank(self, rank: object, what: str) -> int:
        """A positive int, or an error that offers the ratio."""
        number = require_int(rank, what)
        if number < 1:
            raise ValueError(
                f"{what}={number} for {self.name}: ranks are positive; use ratio=... to let the size decide."
            )
        return number

    @abstractmethod
    def with_rank(self, budget: Budget, rank: int, *, clip: bool) -> S:
        """The structure of one uniform rank, clipped to what the shape can use if asked."""

    def bind(self, budget: Budget) -> S:
        if self.rel_error is not None:
            raise ValueError(
                f"{self.name}(rel_error={self.rel_error}) needs a table to measure the error on: use from_pretrained, "
                "or give rank= or ratio=."
            )
        return self.target(budget, clip=False)

    def target(self, budget: Budget, *, clip: bool = True) -> S:
        """By rank or ratio; clipped for a fit, which has no use for more rank than the table has."""
        if self.ratio is not None:
            # Beyond rows * cols no format has a use for more rank: clipping has settled the size by then.
            ranks, clipped = range(1, budget.rows * budget.cols + 1), partial(self.with_rank, budget, clip=True)
            return largest(self, ranks, clipped, budget, self.ratio, "at rank 1")
        assert self.rank is not None
        return self.with_rank(budget, self.rank, clip=clip)

    def error_bound(self, table: Tensor, budget: Budget, *, parts: int) -> float | None:
        """The Frobenius error a fit by ``rel_error`` may make, less what rounding ``parts`` tensors can add."""
        if self.rel_error is None:
            return None
        rounding = parts * torch.finfo(budget.dtype).eps
        if self.rel_error <= rounding:
            raise ValueError(
                f"rel_error={self.rel_error:g}: {parts} tensors of {str(budget.dtype)[6:]} are themselves rounded by "
                f"about {rounding:.1g}; ask for more than that, or give a wider dtype=."
            )
        return frobenius(table) * math.sqrt(self.rel_error**2 - rounding**2)
