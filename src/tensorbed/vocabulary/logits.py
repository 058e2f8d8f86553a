"""All scores of some vectors, by the cheapest way and differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorbed.dispatch import differentiable_once, full_precision
from tensorbed.vocabulary.loss import in_dtypes
from tensorbed.vocabulary.scorer import Scorer, Vocabulary
from tensorbed.vocabulary.tiling import Task, choose


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
    itemsize = vocabulary.dtype(x).itemsize
    task = Task.of(vocabulary.structure, x.shape[0], itemsize, memory_budget, trains=trains, whole=True)
    return Scorer(vocabulary, x, choose(task), softcap)


@torch.no_grad()
def scored(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, *, trains: bool = False) -> Tensor:
    """Scores ``(n, rows)`` in the dtype of the vectors."""
    with full_precision(x):
        scorer = scorer_of(vocabulary.detached(), x.detach(), memory_budget, trains=trains)
        order, out = scorer.scores.order, x.new_empty(x.shape[0], vocabulary.structure.rows)
        in_place = scorer.scores.any_layout and order is None and out.dtype == scorer.x.dtype
        buffer = None if in_place else scorer.buffer()
        for group in scorer.groups():
            if buffer is None:
                for start, stop, block in scorer.each_block():
                    scorer.write(block, start, group, out[group.at, start:stop].T)
                continue
            for start, _, tile in scorer.tiles(group, buffer, by_vector=True):
                stop = start + tile.shape[0]
                if order is None:
                    out[group.at, start:stop] = tile.T
                else:
                    out[group.at, order[start:stop]] = tile.T.to(out.dtype)
    return out


@torch.no_grad()
def differentiated(vocabulary: Vocabulary, x: Tensor, memory_budget: int | None, grad: Tensor) -> list[Tensor | None]:
    """Gradients of the vectors, the bias and the tensors for those of the scores, ``(n, rows)``."""
    with full_precision(x):
        scorer = scorer_of(vocabulary, x, memory_budget, trains=True)
        order, dtype = scorer.scores.order, scorer.x.dtype
        copies = not scorer.scores.any_layout or scorer.padding is not None
        for group in scorer.groups():
            for start, stop, block in scorer.each_block():
                tile = grad[group.at, start:stop] if order is None else grad[group.at, order[start:stop]]
                tile = (
                    tile.T.to(dtype, copy=True, memory_format=torch.contiguous_format) if copies else tile.T.to(dtype)
                )
                scorer.backward(block, start, group, tile)
            scorer.finish(group)
        return scorer.gradients()


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
