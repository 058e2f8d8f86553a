"""What a structure is: an ``I x J`` matrix kept in few numbers, as a frozen description that works on given tensors."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, reduce, wraps
from math import prod
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.scoring import Cost, RowScores, Scoring
from tensorbed.checks import require_positive
from tensorbed.dispatch import BACKENDS, Asked, World, chosen, handed_on, working_dtype, world_of
from tensorbed.structures.explanation import Explanation

Params = Mapping[str, Tensor]
_BLOCK = 2**20  # numbers of the table that exist at once
_CACHED = 2**20  # numbers of rows that stay in the cache
_MEASURED = 2**28  # multiply-adds, and at least so many rows, that tell the mean square of a table
_FEWEST_MEASURED = 2**14


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a structure; ``dtype=None`` means the layer's, and what is not trainable becomes a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


@dataclass(frozen=True)
class Structure(ABC):
    """An ``I x J`` matrix in few numbers.

    A subclass says which tensors it keeps (:meth:`tensors`) and how rows (:meth:`take`) and the table (:meth:`full`)
    come from them; everything else has a default written on those. Index checks, padding rows, autocast, state and
    files are the layers' business: here indices are flat, int64 and in range, and numbers at least single precision,
    unless :attr:`takes_half`.
    """

    kind: ClassVar[str]  # set by @register
    can_initialise: ClassVar[bool] = True
    row_tensor: ClassVar[str | None] = None  # whose rows are those of :meth:`block`, or have at least their gradients
    fits_exactly: ClassVar[bool] = True  # whether fitting a table of this kind gives it back
    making: ClassVar[type | None] = None  # of what :meth:`made_of` returns
    packs: ClassVar[bool] = False  # whether it has ``packed``: what is stored when training is over is another kind
    hands_on: ClassVar[bool] = False  # whether it has ``handed_on``: eagerly rows are asked of another table instead
    refuses_rows: ClassVar[bool] = False  # whether :meth:`eager_rows` itself refuses indices outside the table
    takes_half: ClassVar[bool] = False  # whether take, full and block are given half precision, and round it once

    rows: int
    cols: int
    # Kind and sizes as JSON, see registry.read; None where they are more than numbers, strings and tuples of these.
    text: str | None = field(init=False, repr=False, compare=False)

    def __init_subclass__(cls, **options: Any) -> None:
        """See to it that :meth:`__post_init__` is run, also where a subclass has its own and forgets ``super()``."""
        super().__init_subclass__(**options)
        own = cls.__dict__.get("__post_init__")
        if own is None:
            return

        @wraps(own)
        def complete(self: Structure) -> None:
            own(self)
            if "text" not in vars(self):
                Structure.__post_init__(self)

        cls.__post_init__ = complete  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        require_positive(self.rows, "num_embeddings")
        require_positive(self.cols, "embedding_dim")
        sizes = {size.name: getattr(self, size.name) for size in fields(self) if size.init}
        kind = getattr(self, "kind", None)
        plain = kind and all(map(_is_plain, sizes.values()))
        self.hold(text=json.dumps({"kind": kind, **sizes}) if plain else None)

    def hold(self, **values: Any) -> None:
        """Keep what is worked out once: a lookup of one row has no time for it, and graphs make no Python objects."""
        vars(self).update(values)

    @abstractmethod
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors it is kept in, in a fixed order. No name may contain "weight"."""

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Tensors in the order of :meth:`tensors`, by name."""
        return {spec.name: tensor for spec, tensor in zip(self.tensors(), tensors, strict=True)}

    @abstractmethod
    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """Reference: rows of the table in plain differentiable PyTorch, never from the table."""

    @abstractmethod
    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        """The table, differentiable."""

    def widened(self, p: Params, *others: Tensor) -> Params:
        """For :meth:`take`, :meth:`full` and :meth:`block`, of one dtype with ``others``.

        Single precision in place of half: so what they make is rounded once, and gradients are added up in it too.
        """
        if self.takes_half:
            return p
        dtype = working_dtype(*p.values(), *others)
        return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in p.items()}

    def rows_of(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """:meth:`take` in the tensors' own dtype."""
        return rounded(self.take(self.widened(p), index), p)

    def eager_rows(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """The same where nothing records a graph: kernels may compute them, and second derivatives need not exist."""
        return self.rows_of(p, index)

    def table_of(self, p: Params) -> Tensor:  # -> (rows, cols)
        """:meth:`full` in the tensors' own dtype."""
        return rounded(self.full(self.widened(p)), p)

    def lookup(
        self, p: Params, index: Tensor, impl: str = "auto", world: World | None = None
    ) -> Tensor:  # (n,) -> (n, cols)
        """Rows by the named backend, one of :attr:`impls`; in half precision rounded once."""
        world = world or world_of(index)
        asked = handed_on(Asked(self, p, self.made_of(p), index, impl), world)
        return chosen(asked, world).compute([asked], world)

    def made_of(self, p: Params) -> Any:
        """What backends know to compute with, a :attr:`making`; ``None`` where there is :meth:`take` alone."""
        return None

    @property
    def impls(self) -> tuple[str, ...]:
        """What ``impl=`` may be: the backends that know what this is made of."""
        return ("auto", *(name for name, backend in BACKENDS.items() if backend.knows(self.making)))

    @property
    def row_multiply_adds(self) -> int | None:
        """Multiply-adds of one row computed by itself; ``None`` where nobody counted."""
        return None

    def explain(self, index: Tensor, impl: str) -> Explanation:  # (n,)
        """What :meth:`lookup` would do, counted and not done."""
        n, each = index.shape[0], self.row_multiply_adds
        unique = torch.unique(index).shape[0]
        backend, why = BACKENDS["reference"], "there is nothing to compute"
        if n and impl != "auto":
            backend, why = BACKENDS[impl], f'as asked by impl="{impl}"'
        elif n:
            backend = next(b for b in reversed(BACKENDS.values()) if b.knows(self.making, index.device))
            why = backend.why(index.device)
        computed = unique if backend.shares(self.making) else n
        return Explanation(
            kind=self.kind,
            description=self.summary,
            indices=n,
            unique_rows=unique,
            prefixes=(),
            multiply_adds_plain=None if each is None else n * each,
            multiply_adds=None if each is None else computed * each,
            path=backend.name,
            why=why,
        )

    @property
    def summary(self) -> str:
        """The table's size, and what :meth:`describe` adds to its kind."""
        size, more = f"{self.rows:,} x {self.cols:,}", self.describe()
        return size if more == self.kind else f"{size}, {more}"

    def scorings(self) -> list[Scoring]:
        """How scores of all rows, ``x @ table.T``, can be computed; the loss and the head choose by cost."""
        return [self.by_rows(self.rows * (self.row_multiply_adds or self.cols))]

    def by_rows(self, making: int, besides: int = 0) -> Scoring:
        """Rows made block by block: by how many multiply-adds, and how many numbers written besides them, in all."""
        numbers = self.rows * self.cols
        cost = Cost(multiply_adds=numbers, making=making, made=numbers + besides)
        return Scoring("rows", cost, partial(RowScores, self), halves=True)

    def turned(self, p: Params, x: Tensor) -> Tensor:  # (n, cols) -> (n, k)
        """Vectors as :meth:`block` meets them, differentiable: of a table ``A @ B``, ``x @ B.T`` once for all rows."""
        return x

    def block(self, p: Params, start: int, stop: int, impl: str) -> Tensor:  # -> (stop - start, k)
        """Rows of the table, or of that ``A``, differentiable: ``turned @ block.T`` are their scores."""
        return self.lookup(p, torch.arange(start, stop, device=next(iter(p.values())).device), impl)

    def check_values(self, p: Params) -> None:  # noqa: B027
        """``ValueError`` for tensors of the right shapes and dtypes that no table of this structure has.

        Floats of the layer's dtype may all be; the others alone are sure to be given.
        """

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        """Draw the tensors in place so that the table's entries have mean 0 and exactly this standard deviation."""
        raise NotImplementedError(f"{self.kind} cannot be drawn at random; fit it to a table with from_pretrained.")

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        """The table with fewer rows, or with more of about the mean; those that stay do not change."""
        raise NotImplementedError(
            f"{self.kind} cannot be resized; make a table of {rows} rows and fit it with from_pretrained."
        )

    @abstractmethod
    def describe(self) -> str:
        """Sizes in one line, for ``extra_repr``."""

    def bytes(self, dtype: torch.dtype) -> int:
        """Stored bytes when the layer's dtype is ``dtype``."""
        return sum(spec.numel * (spec.dtype or dtype).itemsize for spec in self.tensors())

    @property
    def numel(self) -> int:
        """Stored numbers."""
        return sum(spec.numel for spec in self.tensors())


def rounded(made: Tensor, p: Params) -> Tensor:
    """In the dtype of the numbers that a table is kept in."""
    dtypes = [tensor.dtype for tensor in p.values() if tensor.is_floating_point()]
    return made.to(reduce(torch.promote_types, dtypes)) if dtypes else made


def each_once(
    rows_of: Callable[[Tensor], Tensor], index: Tensor, cols: int, dtype: torch.dtype
) -> Tensor:  # (n,) -> (n, cols)
    """Rows of equal indices are made once, where the batch would not stay in the cache. For eager calls.

    Not in half precision, in which torch would add up the gradients of equal indices.
    """
    if index.shape[0] * cols <= _CACHED or dtype.itemsize < 4:
        return rows_of(index)
    if bool((index[1:] > index[:-1]).all()):  # none is equal to another: bags and tables around this one ask so
        return rows_of(index)
    unique, place = torch.unique(index, return_inverse=True)
    return F.embedding(place, rows_of(unique))


def mean_row(structure: Structure, p: Params) -> Tensor:  # -> (1, cols)
    """The mean of all rows, a block of them at a time."""
    step = max(1, _BLOCK // structure.cols)
    total = torch.zeros(1, structure.cols, dtype=torch.float64, device=next(iter(p.values())).device)
    for start in range(0, structure.rows, step):
        index = torch.arange(start, min(start + step, structure.rows), device=total.device)
        total += structure.lookup(p, index, "auto").sum(0, dtype=torch.float64)
    return total / structure.rows


def mean_square(structure: Structure, p: Params, generator: torch.Generator | None = None) -> Tensor:  # -> ()
    """Of all entries of the table, a block of rows at a time; where these are too many, of rows drawn at random."""
    device = next(iter(p.values())).device
    each = 64 + max(structure.cols, structure.row_multiply_adds or 0)  # however narrow, a row takes some time
    count, step = max(_FEWEST_MEASURED, _MEASURED // each), max(1, _BLOCK // each)
    index = torch.arange(structure.rows, device=device) if structure.rows <= count else None
    if index is None:
        index = torch.randint(structure.rows, (count,), device=device, generator=generator)
    squares = [torch.linalg.vector_norm(structure.take(p, part), dtype=torch.float64) for part in index.split(step)]
    return torch.stack(squares).square().sum() / (index.shape[0] * structure.cols)


def with_rows(tensor: Tensor, rows: int, new: Tensor) -> Tensor:  # (n, ...), (1, ...) -> (rows, ...)
    """The first rows of a tensor, and ``new`` again and again where it has too few."""
    more = new.to(tensor.dtype).expand(max(0, rows - tensor.shape[0]), *tensor.shape[1:])
    return torch.cat([tensor[:rows], more])


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, str, bool)


def scale_to_std(p: Params, sum_of_squares: Tensor, entries: int, std: float) -> None:
    """Multiply all tensors by one factor so that the table, a product of all of them, has this standard deviation.

    Distinct entries of a drawn table are uncorrelated with mean 0, so its mean square is its variance.
    """
    realised = (sum_of_squares.double() / float(entries)).sqrt()
    factor = (std / realised) ** (1 / len(p))
    for tensor in p.values():
        tensor.mul_(factor.to(tensor.dtype))
