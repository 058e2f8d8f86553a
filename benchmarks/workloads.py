"""What is looked up: tables of the paper's experiments, and batches of ids drawn as words are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

# Names of implementations that floors refer to.
AUTO = "tensorbed auto"
GATHER = "gather + bmm"
TENSORLY = "tensorly-torch"
DENSE = "torch.nn.Embedding"


@dataclass(frozen=True)
class Workload:
    """A tensor train and a batch; ``floors`` is by how much ``auto`` must beat an implementation."""

    name: str
    rows: int
    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    rank: int
    tokens: int
    seed: int = 0
    floors: Mapping[str, float] = field(default_factory=dict)

    @property
    def cols(self) -> int:
        return prod(self.col_factors)

    @property
    def title(self) -> str:
        shape = f"{_times(self.row_factors)} x {_times(self.col_factors)}"
        return f"{self.name}: {self.rows:,} rows as {shape}, rank {self.rank}, {self.tokens:,} tokens"

    def ids(self) -> Tensor:  # -> (tokens,)
        """Ids in order of frequency, ``p(id) ~ 1 / (id + 1)``: what a batch of text asks of a sorted vocabulary."""
        generator = torch.Generator().manual_seed(self.seed)
        frequency = 1 / torch.arange(1, self.rows + 1, dtype=torch.float64)
        return torch.multinomial(frequency, self.tokens, replacement=True, generator=generator)

    def gradient(self) -> Tensor:  # -> (tokens, cols)
        """What comes back from the layers above, the same for every implementation."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.tokens, self.cols, generator=generator)

    def record(self) -> dict[str, Any]:
        """The sizes, for a result file."""
        sizes = asdict(self)
        del sizes["floors"]
        return sizes


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("LM", 267_735, (60, 60, 75), (8, 8, 8), 16, 4096, floors={GATHER: 1.5, TENSORLY: 2.0}),
        Workload("IMDB", 25_000, (25, 30, 40), (4, 8, 8), 16, 32_768, floors={TENSORLY: 12.0}),
        Workload("NMT", 32_768, (32, 32, 32), (8, 8, 16), 64, 4096, floors={TENSORLY: 10.0}),
    )
}


def _times(factors: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, factors))})"
