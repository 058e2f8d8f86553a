"""Optimisers and the course of their rate, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from experiments.lab.errors import ExperimentError


def _novograd(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    try:
        from pytorch_optimizer import NovoGrad
    except ImportError:
        raise ExperimentError("optimizer novograd needs pip install pytorch-optimizer.") from None
    made: torch.optim.Optimizer = NovoGrad(parameters, betas=(0.95, 0.25), **options)  # those of the paper
    return made


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, fused=True),
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
