"""All scores of some vectors, by the cheapest way and differentiable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tensorbed.dispatch import full_precision
from tensorbed.vocabulary.loss import working_dtype
from tensorbed.vocabulary.schedule import FOR_SCORES, Schedule, choose, numbers_allowed
from tensorbed.vocabulary.scorer import Scorer, Vocabulary


def logits(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None) -> Tensor:  # (n, cols) -> (n, rows)
    """Scores of every row."""
    if torch.is_grad_enabled() and (x.requires_grad or vocabulary.trains):
        made: Tensor = _Logits.apply(vocabulary, memory_budget, x, vocabulary.bias, *vocabulary.tensors)  # type: ignore[no-untyped-call]
        return made
    return _scored(vocabulary, x, memory_budget, trains=False)


def scorer_of(
    vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, *, trains: bool = False, softcap: float | None = None
) -> Scorer:
    """By the cheapest way for these vectors, with or without gradients to follow."""
    return Scorer(vocabulary, _schedule(vocabulary, x, memory_budget, trains), _dtype(vocabulary, x), softcap)


def _dtype(vocabulary: Vocabulary, x: Tensor) -> torch.dtype:
    return working_dtype(x, *vocabulary.tensors)


def _schedule(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, trains: bool) -> Schedule:
    rows = vocabulary.structure.rows
    numbers = numbers_allowed(memory_budget, x.shape[0], rows, _dtype(vocabulary, x).itemsize, least=FOR_SCORES)
    return choose(vocabulary.structure, x.shape[0], numbers, trains=trains, at_once=False)


@torch.no_grad()
def _scored(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, *, trains: bool) -> Tensor:
    with full_precision(x):
        scorer = scorer_of(vocabulary.detached(), x, memory_budget, trains=trains)
        out = x.new_empty(x.shape[0], vocabulary.structure.rows)
        wide = x.to(_dtype(vocabulary, x))
        buffer = wide.new_empty(scorer.schedule.height * scorer.schedule.group)
        for at in scorer.schedule.groups():
            vectors = scorer.vectors(wide[at], grad=False)
            n = vectors.count
            for start, stop, part in scorer.parts():
                tile = buffer[: (stop - start) * n].view(stop - start, n)
                scorer.write(part, start, vectors, tile, scorer.scratch(part, n))
                out[at, start:stop] = tile.T
    return out


@torch.no_grad()
def _differentiated(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, grad: Tensor) -> list[Tensor | None]:
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
            if x_grad is not None:
                x_grad[at] = scorer.projection.gradient_of(vectors)
        return [x_grad, scorer.bias_grad, *scorer.projection.gradients()]


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vocabulary: Vocabulary, memory_budget: int | None, *inputs: Tensor | None) -> Tensor:
        x = inputs[0]
        assert x is not None
        ctx.vocabulary, ctx.memory_budget = replace(vocabulary, tensors=(), bias=None), memory_budget
        ctx.save_for_backward(*inputs)
        return _scored(vocabulary, x, memory_budget, trains=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, *tensors = ctx.saved_tensors
        vocabulary = replace(ctx.vocabulary, tensors=tuple(tensors), bias=bias)
        made = _differentiated(vocabulary, x, ctx.memory_budget, grad)
        inputs = (x, bias, *tensors)
        return (
            None,
            None,
            *(
                one if one is None or given is None else one.to(given.dtype)
                for one, given in zip(made, inputs, strict=True)
            ),
        )
