"""What is looked up: tables of the paper's and of recommenders' sizes, and batches of ids drawn as words are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log, prod
from typing import Any

import torch
from torch import Tensor

import tensorbed as tb

FREQUENCY, SHUFFLED, UNIFORM = "frequency order", "shuffled", "uniform"

# Values of the 26 categorical features of Criteo's Kaggle set.
CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


@dataclass(frozen=True)
class Table:
    """One tensor train: its real rows, its factors and its rank."""

    rows: int
    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    rank: int

    @classmethod
    def suggested(cls, rows: int, cols: int, rank: int, order: int = 3) -> Table:
        """Of the shape the library suggests."""
        return cls(rows, *tb.suggest_shape(rows, cols, order), rank)

    @property
    def shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.row_factors, self.col_factors

    @property
    def order(self) -> int:
        return len(self.row_factors)

    @property
    def cols(self) -> int:
        return prod(self.col_factors)

    @property
    def numbers(self) -> int:
        """Of the dense table."""
        return self.rows * self.cols

    @property
    def ranks(self) -> tuple[int, ...]:
        """``(R_0, ..., R_N)``."""
        return (1, *[self.rank] * (self.order - 1), 1)

    @property
    def slice_numbers(self) -> tuple[int, ...]:
        """Numbers in one slice of each core: what one digit of a row picks."""
        sides = zip(self.ranks, self.col_factors, self.ranks[1:], strict=False)
        return tuple(left * j * right for left, j, right in sides)

    @property
    def core_numbers(self) -> int:
        return sum(i * size for i, size in zip(self.row_factors, self.slice_numbers, strict=True))


@dataclass(frozen=True)
class Workload:
    """Tables and a batch: ids ``(batch,)``, bags ``(batch, bag)``, or one id for each of several tables.

    ``calls`` is how often a batch too small for the clock may be looked up in one round.
    """

    name: str
    tables: tuple[Table, ...]
    batch: int
    bag: int | None = None
    order: str = FREQUENCY
    calls: int = 1
    seed: int = 0

    @property
    def many(self) -> bool:
        return len(self.tables) > 1

    @property
    def tokens(self) -> int:
        return self.batch * (self.bag or 1) * len(self.tables)

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    @property
    def cols(self) -> int:
        return sum(table.cols for table in self.tables)

    @property
    def unpooled_numbers(self) -> int:
        """In all rows of the batch before they are pooled."""
        return self.batch * (self.bag or 1) * self.cols

    @property
    def core_numbers(self) -> int:
        return sum(table.core_numbers for table in self.tables)

    @property
    def dense_numbers(self) -> int:
        return sum(table.numbers for table in self.tables)

    @property
    def title(self) -> str:
        first = self.tables[0]
        shape = f"{first.row_factors} x {first.col_factors}"
        held = f"{len(self.tables)} tables, dim {first.cols}" if self.many else shape
        asked = f"{self.batch:,} bags of {self.bag}" if self.bag else f"{self.batch:,} id{'s' * (self.batch > 1)}"
        drawn = "uniform ids" if self.order == UNIFORM else f"Zipf ids, {self.order}"
        return f"{self.name}: {self.rows:,} rows, {held}, rank {first.rank}, {asked}, {drawn}"

    @cached_property
    def ids(self) -> Tensor:
        """``(batch,)``, ``(batch, bag)`` or ``(batch, tables)``; the same every time."""
        generator = torch.Generator().manual_seed(self.seed)
        count = self.batch * (self.bag or 1)
        columns = [_draw(table.rows, count, self.order, generator) for table in self.tables]
        if self.many:
            return torch.stack(columns, dim=1)
        return columns[0] if self.bag is None else columns[0].reshape(self.batch, self.bag)

    def table_ids(self, k: int) -> Tensor:  # -> (batch * bag,)
        """The ids asked of one table."""
        return self.ids[:, k].contiguous() if self.many else self.ids.flatten()

    @cached_property
    def gradient(self) -> Tensor:  # -> (batch, cols)
        """What comes back from the layers above, the same for every implementation."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.batch, self.cols, generator=generator)

    def record(self) -> dict[str, Any]:
        """The sizes, for a result file."""
        return {
            "name": self.name,
            "tables": [[table.rows, *table.shape, table.rank] for table in self.tables],
            "batch": self.batch,
            "bag": self.bag,
            "ids": self.order,
            "unique_ids": sum(int(self.table_ids(k).unique().numel()) for k in range(len(self.tables))),
            "seed": self.seed,
        }


def zipf(rows: int, count: int, generator: torch.Generator) -> Tensor:  # -> (count,)
    """Ids in order of frequency, ``p(id) ~ 1 / (id + 1)``: what a batch of text asks of a sorted vocabulary.

    By the inverse of the distribution. Its head is summed; beyond, ``H(k) - H(m) = log((k + 1/2) / (m + 1/2))`` up to
    ``1 / (24 m^2)``, so that a billion rows cost no more than a million.
    """
    head = torch.arange(1, min(rows, 2**17) + 1, dtype=torch.float64).reciprocal_().cumsum(0)
    middle, below = head.shape[0] + 0.5, float(head[-1])
    total = below + log((rows + 0.5) / middle)
    at = torch.rand(count, dtype=torch.float64, generator=generator) * total
    tail = (middle * torch.exp(at - below) - 0.5).ceil().long() - 1
    return torch.where(at <= below, torch.searchsorted(head, at), tail).clamp_(0, rows - 1)


def shuffled(ids: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """The ids under a random renumbering of the rows, of which only the part that is asked for is drawn."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    if rows <= 8 * unique.numel():
        return torch.randperm(rows, generator=generator).index_select(0, ids)
    names: Tensor = torch.randint(rows, (2 * unique.numel() + 64,), generator=generator).unique()
    names = names[torch.randperm(names.numel(), generator=generator)]
    return names.index_select(0, inverse)


def _draw(rows: int, count: int, order: str, generator: torch.Generator) -> Tensor:
    if order == UNIFORM:
        return torch.randint(rows, (count,), generator=generator)
    ids = zipf(rows, count, generator)
    return shuffled(ids, rows, generator) if order == SHUFFLED else ids


def _both_orders(name: str, tables: tuple[Table, ...], batch: int) -> list[Workload]:
    """Frequent ids first, as in a sorted vocabulary, flatters those who share prefixes; hence once more shuffled."""
    return [
        Workload(name, tables, batch),
        Workload(f"{name} shuffled", tables, batch, order=SHUFFLED),
    ]


def _language_model(rank: int) -> Table:
    return Table(267_735, (60, 60, 75), (8, 8, 8), rank)


def _all() -> list[Workload]:
    found = []
    for rank in (16, 96, 192):
        found += _both_orders(f"LM r{rank}", (_language_model(rank),), 4096)
    found += _both_orders("NMT", (Table(32_768, (32, 32, 32), (8, 8, 16), 64),), 4096)
    found += _both_orders("IMDB TT1", (Table(25_000, (25, 30, 40), (4, 8, 8), 16),), 32_768)
    found += _both_orders("IMDB TT3", (Table(25_000, (5, 5, 5, 5, 6, 8), (2, 2, 2, 2, 4, 4), 16),), 32_768)
    recommender = Table(11_000_000, (200, 220, 250), (4, 4, 4), 32)
    found.append(Workload("TT-Rec", (recommender,), 512, bag=20, order=UNIFORM))
    found += _both_orders("CTR", tuple(Table.suggested(rows, 16, 16) for rows in CRITEO), 4096)
    found.append(Workload("one row", (_language_model(16),), 1, calls=200))
    return found


WORKLOADS = {workload.name: workload for workload in _all()}
