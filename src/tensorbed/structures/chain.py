"""What tensor trains and tensor rings share: everything but their ends and how they are fitted."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, ChainOfCores, full, sum_of_squares, take
from tensorbed.backends.scores import through_cores
from tensorbed.backends.scores.scoring import Scoring
from tensorbed.backends.torch import find_prefixes
from tensorbed.checks import require_positive
from tensorbed.decompose.powers import frobenius
from tensorbed.decompose.train import Folded, split_core
from tensorbed.progress import track
from tensorbed.shapes import Shape, as_shape, check_shape, guarantees_full_rank, suggest_shape, useful_ranks
from tensorbed.structures.base import Params, Structure, TensorSpec, scale_to_std, with_rows
from tensorbed.structures.explanation import Explanation
from tensorbed.structures.formats import Budget, Fit, RankedFormat, S

DEFAULT_ORDER = 3


@dataclass(frozen=True)
class CoresMatrix(Structure):
    """A table that is kept in cores; ``ranks`` are all of ``(R_0, ..., R_N)`` with ``R_0 = R_N``.

    Shape:
        - core_k: ``(I_k, R_{k-1}, J_k, R_k)`` as stored, ``(R_{k-1}, I_k, J_k, R_k)`` as in the paper
    """

    closed: ClassVar[bool]  # whether the ends are joined, and R_0 is a rank that users give

    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    chain: Chain = field(init=False, repr=False, compare=False)
    specs: tuple[TensorSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shape((self.row_factors, self.col_factors), self.rows, self.cols)
        if len(self.ranks) != len(self.row_factors) + 1 or self.ranks[0] != self.ranks[-1] or min(self.ranks) < 1:
            raise ValueError(
                f"ranks={self.ranks} for {len(self.row_factors)} cores: one more of them, positive, equal at the ends."
            )
        chain = Chain(self.rows, self.row_factors, self.col_factors, self.ranks)
        specs = tuple(TensorSpec(f"core_{k}", chain.core_shape(k)) for k in range(chain.order))
        self.hold(chain=chain, specs=specs)

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.specs

    @property
    def row_multiply_adds(self) -> int:
        return self.chain.multiply_adds([1] * len(self.row_factors))

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        first, tensors = resized_first(self.specs[0].name, self.row_factors, p, rows)
        return replace(self, rows=rows, row_factors=(first, *self.row_factors[1:])), tensors

    def cores(self, p: Params) -> tuple[Tensor, ...]:
        """Views in the paper's layout ``(R_{k-1}, I_k, J_k, R_k)``."""
        return tuple(p[spec.name].transpose(0, 1) for spec in self.specs)

    def describe(self) -> str:
        shape = self.row_factors, self.col_factors
        return f"shape={shape[0]} x {shape[1]}, ranks={self.shown_ranks(self.ranks)}"

    def shown_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks a user gives, out of ``(R_0, ..., R_N)``."""
        return ranks[0 if self.closed else 1 : -1]


def resized_first(name: str, row_factors: Sequence[int], p: Params, rows: int) -> tuple[int, dict[str, Tensor]]:
    """The first tensor with slices for more rows or for fewer, and how many; a new slice is the mean of the others.

    Rows up to ``I_1 ... I_N`` are there already, if only as padding.
    """
    first = -(-rows // math.prod(row_factors[1:]))
    return first, {**p, name: with_rows(p[name], first, p[name].double().mean(0, keepdim=True))}


@dataclass(frozen=True)
class ChainMatrix(CoresMatrix):
    """A table as a chain of cores."""

    making = ChainOfCores

    def made_of(self, p: Params) -> ChainOfCores:
        return ChainOfCores(self.chain, [p[spec.name] for spec in self.specs])

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return take(*self.made_of(p), index)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return full(*self.made_of(p))

    def explain(self, index: Tensor, impl: str) -> Explanation:  # (n,)
        told, counts = super().explain(index, impl), find_prefixes(index, self.row_factors).counts
        shared = told.multiply_adds if told.path == "reference" else self.chain.multiply_adds(counts)
        return replace(told, prefixes=counts, multiply_adds=shared)

    def scorings(self) -> list[Scoring]:
        every_prefix = list(accumulate(self.row_factors, mul))
        return [self.by_rows(self.chain.multiply_adds(every_prefix)), *through_cores.scorings(self, self.chain)]

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        r"""Draw :math:`\mathcal{G}^{(k)} \sim \mathcal{N}(0, (\sigma / \Sigma)^{2/N})`, then scale to the exact norm.

        With standard normal cores the table's variance is :math:`\Sigma^2 = \prod_k R_k` (eq. 3 of the paper); a
        ring sums over its joint once more, which that product, taken over all bonds, already counts.
        """
        variance = math.prod(self.ranks[1:])
        core_std = (std / variance**0.5) ** (1 / len(self.row_factors))
        for core in self.made_of(p).cores:
            core.normal_(std=core_std, generator=generator)
        scale_to_std(p, self.sum_of_squares(p), self.rows * self.cols, std)

    def sum_of_squares(self, p: Params) -> Tensor:  # -> ()
        """Squared Frobenius norm of the real rows."""
        return sum_of_squares(*self.made_of(p))

    def describe(self) -> str:
        shape = self.row_factors, self.col_factors
        useful = useful_ranks(list(map(mul, *shape)), self.ranks)
        note = "" if useful == self.ranks else f" (at most {self.shown_ranks(useful)} useful)"
        doubt = "" if guarantees_full_rank(shape, self.rows) else ", full rank not guaranteed"
        return f"{super().describe()}{note}{doubt}"


@dataclass(frozen=True, kw_only=True, repr=False)
class FactorsFormat(RankedFormat[S]):
    """A format that factors the rows and columns of a table, by order or by its whole shape.

    Args:
        rank, ratio, rel_error: see :class:`RankedFormat`.
        order: number of factors when ``shape`` is not given.
        shape: ``((I_1, ..., I_N), (J_1, ..., J_N))``; by default :func:`tensorbed.suggest_shape`.
    """

    order: int = DEFAULT_ORDER
    shape: Shape | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if require_positive(self.order, "order") < 2:
            raise ValueError(f"order={self.order} for {self.name}: a chain has at least 2 cores.")
        if self.shape is not None:
            # Against the table it is checked when bound; as tuples, equal formats compare equal.
            object.__setattr__(self, "shape", as_shape(self.shape))
            if self.order not in (DEFAULT_ORDER, len(self.shape[0])):
                raise ValueError(
                    f"order={self.order} for {self.name}, but shape={self.shape} has {len(self.shape[0])}."
                )

    def factors(self, budget: Budget) -> Shape:
        """The shape given, or the suggested one."""
        if self.shape is not None:
            return check_shape(self.shape, budget.rows, budget.cols)
        return suggest_shape(budget.rows, budget.cols, self.order)

    def fit_filled(
        self,
        table: Tensor,
        budget: Budget,
        decompose: Callable[[Tensor, list[Tensor] | None], list[Tensor]],
        stored: Callable[[Sequence[Tensor]], Fit],
        *,
        fills: bool = True,
    ) -> Fit:
        """What ``decompose`` finds for a table as the tensor ``(I_1 J_1, ..., I_N J_N)``, its padded rows filled.

        It is given what it found before, if anything, and ``stored`` makes a fit of that.
        """
        # In float64 where that is cheap.
        dtype = torch.float64 if table.numel() <= _CHEAP else table.dtype
        folded = Folded(table, *self.factors(budget), dtype)
        found = decompose(folded.tensor, None)
        rounds = _rounds(folded, budget, sum(core.numel() for core in found)) if fills else 0
        for _ in track(range(rounds), f"fitting {self.name}, filling the padding"):
            if _fill(folded, stored(found)):
                break
            found = decompose(folded.tensor, found)
        del folded
        return stored(found)


@dataclass(frozen=True, kw_only=True, repr=False)
class ChainFormat(FactorsFormat[ChainMatrix]):
    """A chain by its rank, ranks, ratio or error, its order, or its whole shape.

    Args:
        rank, ratio, rel_error, order, shape: see :class:`FactorsFormat`.
        ranks: one for each bond.
    """

    sizes: ClassVar[tuple[str, ...]] = ("rank", "ranks", "ratio", "rel_error")
    squares_numbers = True
    structure: ClassVar[type[ChainMatrix]]

    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks is not None:
            if not isinstance(self.ranks, Iterable):
                raise TypeError(
                    f"ranks={self.ranks!r} for {self.name}: give a list, or rank= for one that is the same."
                )
            ranks = tuple(self.check_rank(rank, f"ranks[{k}]") for k, rank in enumerate(self.ranks))
            object.__setattr__(self, "ranks", ranks)

    @abstractmethod
    def decompose(
        self, tensor: Tensor, ranks: tuple[int, ...] | None, bound: float | None, start: list[Tensor] | None
    ) -> list[Tensor]:
        """Cores ``(R_{k-1}, n_k, R_k)`` for a tensor ``(n_1, ..., n_N)``, of all these ranks or within an error.

        ``start`` are those of a tensor that was nearly the same, for algorithms that go on from there.
        """

    def given(self, order: int) -> int:
        """How many ranks a user gives for a chain of this order."""
        return order if self.structure.closed else order - 1

    def _made(self, budget: Budget, ranks: Sequence[int], clip: bool) -> ChainMatrix:
        row_factors, col_factors = self.factors(budget)
        order, closed = len(row_factors), self.structure.closed
        if len(ranks) != self.given(order):
            raise ValueError(
                f"ranks={tuple(ranks)} for {self.name} of order {order}: give {self.given(order)}, "
                f"{'R_0 (which is also R_N) to R_{N-1}' if closed else 'R_1 to R_{N-1}'}."
            )
        bonds = (*ranks, ranks[0]) if closed else (1, *ranks, 1)
        if clip:
            bonds = useful_ranks(list(map(mul, row_factors, col_factors)), bonds)
        return self.structure(budget.rows, budget.cols, row_factors, col_factors, bonds)

    def with_rank(self, budget: Budget, rank: int, *, clip: bool) -> ChainMatrix:
        return self._made(budget, [rank] * self.given(len(self.factors(budget)[0])), clip)

    def target(self, budget: Budget, *, clip: bool = True) -> ChainMatrix:
        return super().target(budget, clip=clip) if self.ranks is None else self._made(budget, self.ranks, clip)

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        bound = self.error_bound(table, budget, parts=len(self.factors(budget)[0]))
        ranks = self.target(budget).ranks if bound is None else None
        return self.fit_filled(
            table,
            budget,
            lambda tensor, start: self.decompose(tensor, ranks, bound, start),
            lambda found: self._stored(found, budget),
            fills=ranks is not None,
        )

    def _stored(self, found: Sequence[Tensor], budget: Budget) -> Fit:
        """Cores ``(R_{k-1}, n_k, R_k)`` as a structure and the tensors it keeps."""
        row_factors, col_factors = self.factors(budget)
        bonds = (*[core.shape[0] for core in found], found[0].shape[0])
        structure = self.structure(budget.rows, budget.cols, row_factors, col_factors, bonds)
        stored = [split_core(core, i, j) for core, i, j in zip(found, row_factors, col_factors, strict=True)]
        return Fit(structure, structure.named(stored))


# Padded rows are free: nobody looks them up. Zeros there are as good as anything for most tables, but spoil the rank
# of one that has the format's structure; filling in what the fit itself says, and fitting again, restores it.
_SETTLED = 1e-9  # a filling that moved by less, against the table, is final
_IDLE = 1e-2  # and so is one that moved by less than this fraction of what the fit misses anyway
_CHEAP = 2**22  # numbers of a table that is fitted in float64


def _rounds(folded: Folded, budget: Budget, stored: int) -> int:
    """How often a fit may be repeated for the padding's sake: not at all where that takes long, or much memory."""
    numbers = folded.tensor.numel()
    padded = numbers > budget.rows * budget.cols
    light = numbers <= _CHEAP or (numbers <= 2**24 and 4 * stored <= numbers)
    return min(400, 2**26 // numbers) if padded and light else 0


def _fill(folded: Folded, fit: Fit) -> bool:
    """Overwrite the padded rows with those of the fit; whether another fit would not differ."""
    tensor, before = folded.tensor, folded.padding()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    stored = {name: core.to(wide) for name, core in fit.params.items()}
    whole: Any = replace(fit.structure, rows=fit.structure.rows + before.shape[0])
    index = torch.arange(fit.structure.rows, whole.rows, device=tensor.device)
    rows = whole.lookup(stored, index).to(tensor.dtype)
    norm, moved = frobenius(tensor), frobenius(before - rows)
    # A fit is a projection: what it misses and what it holds are at right angles.
    held = float(whole.sum_of_squares(stored))
    missed = math.sqrt(max(0.0, norm**2 - held))
    folded.fill(rows)
    return moved <= max(_SETTLED * norm, _IDLE * missed)
