"""Optimisers and the course of their rate, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.lab.errors import ExperimentError


def _novograd(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    try:
        from pytorch_optimizer import NovoGrad
    except ImportError:
        raise ExperimentError("optimizer novograd needs pip install pytorch-optimizer.") from None
    made: torch.optim.Optimizer = NovoGrad(parameters, betas=(0.95, 0.25), **options)  # those of the paper
    return made


class SharingAdam(torch.optim.Adam):
    """Adam, whose groups of parameters may have ``sharing``: so many sets of second moments for the rows of a table.

    Row ``i`` divides by the moments of set ``i % sharing``, those of the sum of squares over all rows of the set. So it
    is with the rows of a tensor train, which share the slices of a core, and their moments with them.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for table in group["params"] if group.get("sharing") else ():
                if table.grad is not None:
                    self.step_sharing(table, table.grad, group)
                    table.grad = None  # torch's own step leaves it alone
        return super().step(closure)

    def step_sharing(
        self, table: Tensor, gradient: Tensor, group: dict[str, Any]
    ) -> None:  # (rows, cols), as the table
        sets, (mean, square) = group["sharing"], group["betas"]
        state = self.state[table]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(table)
            state["exp_avg_sq"] = table.new_zeros(sets, table.shape[1])
        state["step"] += 1
        steps = int(state["step"])
        set_of = torch.arange(len(table), device=table.device) % sets
        squares = torch.zeros_like(state["exp_avg_sq"]).index_add_(0, set_of, gradient.square())
        state["exp_avg"].lerp_(gradient, 1 - mean)
        state["exp_avg_sq"].lerp_(squares, 1 - square)
        spread = (state["exp_avg_sq"] / (1 - square**steps)).sqrt_().add_(group["eps"])
        table.addcdiv_(state["exp_avg"], spread[set_of], value=-group["lr"] / (1 - mean**steps))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(SharingAdam, fused=True),
    "adamw": partial(torch.optim.AdamW, fused=True),
    "novograd": _novograd,
    "sgd": torch.optim.SGD,
}


# The share of the rate in a step, counted from 0; ``rise`` is how many steps it rises in.
SCHEDULES: dict[str, Callable[[int, int, float], float]] = {
    "constant": lambda step, steps, rise: 1.0,
    "cosine": lambda step, steps, rise: 0.5 + 0.5 * math.cos(math.pi * step / steps),
    "inverse_sqrt": lambda step, steps, rise: math.sqrt(max(rise, 1) / max(step + 1, rise, 1)),
    "linear": lambda step, steps, rise: max(0.0, 1 - step / steps),
}


def pace(schedule: str, step: int, steps: int, warm_up: float = 0.0) -> float:
    """The share of the rate: up in a line while it warms up, and never above what its schedule allows."""
    rise = warm_up * steps
    share = SCHEDULES[schedule](step, steps, rise)
    return min((step + 1) / rise, share) if rise else share
