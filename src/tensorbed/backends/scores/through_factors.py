"""Scores of a sum of Kronecker products: its factors, multiplied to two, are a chain of two cores to pass through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain
from tensorbed.backends.scores.scoring import Cost, Scorable, Scoring
from tensorbed.backends.scores.through_cores import Route, ThroughCores


@dataclass(frozen=True)
class FactorsRoute(Route):
    """Factors ``(I_k, J_k, R)`` before the cut multiplied term by term to the first core, the others to the last."""

    order: int
    cut: int

    @property
    def name(self) -> str:
        ends = [(1, self.cut), (self.cut + 1, self.order)]
        names = [f"{a}-{b}" if b > a else f"{b}" for a, b in ends]
        return f"factors {', '.join(reversed(names) if self.reverse else names)}"

    @property
    def cost(self) -> Cost:
        # Each number of the two is one product of numbers made before it, and all those before are fewer.
        return replace(super().cost, merging=2 * self.chain.numel)

    def matrices(self, cores: Sequence[Tensor]) -> list[Tensor]:
        first, last = _multiplied(cores[: self.cut]), _multiplied(cores[self.cut :])
        return super().matrices([first.unsqueeze(1), last.transpose(1, 2).unsqueeze(3)])


def scorings(structure: Scorable, cuts: Sequence[tuple[int, Chain]]) -> list[Scoring]:
    """Every cut, passed from either end, whose two cores stay well below the table."""
    routes = [
        FactorsRoute(chain, (1, 1), reverse, len(cuts) + 1, cut)
        for cut, chain in cuts
        if chain.numel <= chain.rows * chain.cols // 4
        for reverse in (False, True)
    ]
    return [Scoring(route.name, route.cost, partial(ThroughCores, route, structure), halves=True) for route in routes]


def _multiplied(factors: Sequence[Tensor]) -> Tensor:  # (I_k, J_k, R) each -> (prod I_k, prod J_k, R)
    """Term by term: Kronecker products of the factors, for each of the last axis."""
    made = factors[0]
    for factor in factors[1:]:
        made = torch.einsum("ajr,bkr->abjkr", made, factor).flatten(2, 3).flatten(0, 1)
    return made
