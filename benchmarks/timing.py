"""Times of several layers on one batch, taken in turns so that a disturbance meets all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch
from torch import Tensor, nn

_WARM_UP = 3


@dataclass(frozen=True)
class Times:
    """Milliseconds of each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rounds)

    def record(self) -> dict[str, float]:
        """Minimum, quartiles and maximum, for a result file."""
        lower, middle, upper = (
            quantiles(self.rounds, n=4, method="inclusive") if len(self.rounds) > 1 else 3 * [self.rounds[0]]
        )
        return {
            "min": min(self.rounds),
            "lower_quartile": lower,
            "median": middle,
            "upper_quartile": upper,
            "max": max(self.rounds),
        }


@dataclass(frozen=True)
class Timed:
    """A lookup without gradients, and one with its backward pass."""

    forward: Times
    both: Times


def compare(layers: Mapping[str, nn.Module], ids: Tensor, gradient: Tensor, rounds: Iterable[int]) -> dict[str, Timed]:
    """Time every layer once a round, after a warm-up, in an order drawn anew each round.

    A fixed order would let one layer always run in the caches another has just emptied.
    """
    for layer in layers.values():
        for _ in range(_WARM_UP):
            _forward(layer, ids)
            _both(layer, ids, gradient)
    order = random.Random(0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    for _ in rounds:
        for name in order.sample(list(layers), len(layers)):
            found[name].append((_forward(layers[name], ids), _both(layers[name], ids, gradient)))
    return {name: Timed(*map(Times, _columns(times))) for name, times in found.items()}


def _columns(times: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(forward for forward, _ in times), tuple(both for _, both in times)


def _forward(layer: nn.Module, ids: Tensor) -> float:
    with torch.no_grad():
        begin = time.perf_counter()
        layer(ids)
        return 1e3 * (time.perf_counter() - begin)


def _both(layer: nn.Module, ids: Tensor, gradient: Tensor) -> float:
    layer.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    layer(ids).backward(gradient)
    taken = 1e3 * (time.perf_counter() - begin)
    # A dense gradient of hundreds of megabytes should not stay while the others are timed.
    layer.zero_grad(set_to_none=True)
    return taken
