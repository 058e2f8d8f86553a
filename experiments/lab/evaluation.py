"""A model measured by all processes together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from experiments.lab.batches import Batch


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
        everything: list[Any] = gather_object(values) if self.accelerator.num_processes > 1 else values
        return everything
