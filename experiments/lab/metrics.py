"""What a model is measured by: a name, a direction and a way to print; and how all processes do it together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from experiments.lab.batches import Batch

T = TypeVar("T")
_DIVERGED = 1e12  # a number, because JSON knows no infinity


@dataclass(frozen=True)
class Metric:
    """``unit`` says how two values are compared: in ``points``, hundredths; in ``%``; or as they are."""

    name: str
    higher: bool = True  # is better
    digits: int = 3
    unit: str = "points"
    log: bool = False  # in pictures

    @property
    def worst(self) -> float:
        return 0.0 if self.higher else _DIVERGED

    def better(self, value: float, than: float | None) -> bool:
        """Strictly; anything is better than nothing."""
        return than is None or (value > than if self.higher else value < than)

    def best(self, of: Iterable[T], value: Callable[[T], float]) -> T:
        return max(of, key=value) if self.higher else min(of, key=value)

    def written(self, value: float) -> str:
        """``0.413``."""
        return "diverged" if value >= _DIVERGED else f"{value:.{self.digits}f}"

    def beside(self, value: float, base: float) -> float:
        """How far a value is from another, in the metric's unit."""
        if self.unit == "%":
            return 100 * (value / base - 1)
        return (100 if self.unit == "points" else 1) * (value - base)

    def told(self, value: float, base: float) -> str:
        """``1.2 points above``."""
        difference = self.beside(value, base)
        return f"{abs(difference):.1f} {self.unit} {'above' if difference >= 0 else 'below'}"


LOSS = Metric("loss", higher=False, digits=2, unit="nats")  # that a model is trained by


def perplexity(loss: float) -> float:
    """Of a mean loss over tokens; that of a run that diverged where it has no number."""
    return min(math.exp(min(loss, 100.0)), _DIVERGED)


@dataclass(frozen=True)
class Evaluation:
    """What a task measures with."""

    model: nn.Module
    settings: Any
    accelerator: Any

    def mine(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """This process's part of each batch, on its device."""
        index, count = self.accelerator.process_index, self.accelerator.num_processes
        return (batch.part(index, count).to(self.accelerator.device) for batch in batches)

    def totals(self, batches: Iterable[Batch], score: Callable[[Batch], Sequence[Tensor | float]]) -> list[float]:
        """What ``score`` tells of each part, summed over all batches and processes."""
        sums: Tensor | float = 0.0
        for batch in self.mine(batches):
            sums = sums + batch.weight * torch.tensor([float(value) for value in score(batch)], dtype=torch.float64)
        if self.accelerator.num_processes > 1:
            sums = self.accelerator.reduce(torch.as_tensor(sums).to(self.accelerator.device), "sum")
        total: list[float] = torch.as_tensor(sums).tolist()
        return total

    def gathered(self, values: list[Any]) -> list[Any]:
        """The values of all processes, one process after another."""
        from accelerate.utils import gather_object  # slow to import, and of no use to most commands

        everything: list[Any] = gather_object(values) if self.accelerator.num_processes > 1 else values
        return everything
