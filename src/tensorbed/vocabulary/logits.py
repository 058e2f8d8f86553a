"""All scores of some vectors, by the cheapest way and differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorbed.dispatch import differentiable_once, full_precision, working_dtype
from tensorbed.vocabulary.loss import in_dtypes
from tensorbed.vocabulary.schedule import Schedule, Task, choose
from tensorbed.vocabulary.scorer import Scorer, Vocabulary


def logits(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None) -> Tensor:  # (n, cols) -> (n, rows)
    """Scores of every row."""
    if torch.is_grad_enabled() and (x.requires_grad or vocabulary.trains):
        made: Tensor = _Logits.apply(vocabulary, memory_budget, x, vocabulary.bias, *vocabulary.tensors)  # type: ignore[no-untyped-call]
        return made
    return scored(vocabulary, x, memory_budget)


def scorer_of(
    vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, *, trains: bool = False, softcap: float | None = None
) -> Scorer:
    """By the cheapest way for these vectors, with or without gradients to follow."""
    return Scorer(vocabulary, _schedule(vocabulary, x, memory_budget, trains), _dtype(vocabulary, x), softcap)


def _dtype(vocabulary: Vocabulary, x: Tensor) -> torch.dtype:
    return working_dtype(x, *vocabulary.tensors)


def _schedule(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, trains: bool) -> Schedule:
    itemsize = _dtype(vocabulary, x).itemsize
    return choose(Task.of(vocabulary.structure, x.shape[0], itemsize, memory_budget, trains=trains, whole=True))


@torch.no_grad()
def scored(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, *, trains: bool = False) -> Tensor:
    """Scores ``(n, rows)`` in the dtype of the vectors."""
    with full_precision(x):
        scorer = scorer_of(vocabulary.detached(), x, memory_budget, trains=trains)
        out = x.new_empty(x.shape[0], vocabulary.structure.rows)
        wide = x.detach().to(_dtype(vocabulary, x))
        buffer = scorer.buffer(wide)
        for at in scorer.schedule.groups():
            for start, _, tile, _ in scorer.tiles(scorer.vectors(wide[at], grad=False), buffer):
                out[at, start : start + tile.shape[0]] = tile.T
    return out


@torch.no_grad()
def differentiated(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, grad: Tensor) -> list[Tensor | None]:
    """Gradients of the vectors, the bias and the tensors for those of the scores, ``(n, rows)``."""
    with full_precision(x):
        scorer = scorer_of(vocabulary, x, memory_budget, trains=True)
        wide = x.detach().to(_dtype(vocabulary, x))
        x_grad = torch.empty_like(wide) if x.requires_grad else None
        for at in scorer.schedule.groups():
            vectors = scorer.vectors(wide[at], grad=x.requires_grad)
            for start, stop, part in scorer.parts():
                tape = scorer.scratch(part, vectors.count)
                part.refill(vectors, tape)
                tile = grad[at, start:stop].T.to(wide.dtype, copy=True, memory_format=torch.contiguous_format)
                scorer.backward(part, start, vectors, tile, tape)
            scorer.projection.done(vectors)
            if x_grad is not None:
                x_grad[at] = scorer.projection.gradient_of(vectors)
        return [x_grad, scorer.bias_grad, *scorer.projection.gradients()]


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vocabulary: Vocabulary, memory_budget: int | None, *inputs: Tensor | None) -> Tensor:
        x = inputs[0]
        assert x is not None
        ctx.structure, ctx.padding_idx, ctx.memory_budget = vocabulary.structure, vocabulary.padding_idx, memory_budget
        ctx.save_for_backward(vocabulary.padding_row, *inputs)
        return scored(vocabulary, x, memory_budget, trains=True)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padding_row, x, bias, *tensors = ctx.saved_tensors
        vocabulary = Vocabulary(ctx.structure, tuple(tensors), bias, ctx.padding_idx, padding_row)
        made = differentiated(vocabulary, x, ctx.memory_budget, grad)
        return None, None, *in_dtypes(made, [None if t is None else t.dtype for t in (x, bias, *tensors)])
