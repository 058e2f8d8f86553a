"""The cross-entropy of vectors against all rows of a table, without the table and without the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tensorbed.dispatch import differentiable_once, full_precision
from tensorbed.structures import Structure
from tensorbed.vocabulary import passes
from tensorbed.vocabulary.scorer import Scorer, Vocabulary
from tensorbed.vocabulary.softmax import Terms
from tensorbed.vocabulary.tiling import GROUPS, Task, choose


@dataclass(frozen=True)
class Options:
    """How the loss is formed; what every call says besides its tensors."""

    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    z_loss: float = 0.0
    softcap: float | None = None
    memory_budget: int | None = None

    def counted(self, target: Tensor) -> Tensor:  # (n,) -> (n,) bool
        """Which targets are not ignored."""
        return torch.ones_like(target, dtype=torch.bool) if self.ignore_index is None else target != self.ignore_index


@dataclass(frozen=True)
class Asked:
    """One loss: vectors ``(n, cols)``, checked targets ``(n,)``, and what they are scored against."""

    vocabulary: Vocabulary
    x: Tensor
    target: Tensor
    class_weight: Tensor | None
    options: Options

    @property
    def structure(self) -> Structure:
        return self.vocabulary.structure

    @property
    def trains(self) -> bool:
        return self.x.requires_grad or self.vocabulary.trains

    def scorer(self) -> Scorer:
        """By the cheapest way."""
        options, itemsize = self.options, self.vocabulary.dtype(self.x).itemsize
        asked = {"trains": self.trains, "at_once": options.reduction != "none"}
        task = Task.of(self.structure, self.x.shape[0], itemsize, options.memory_budget, **asked)
        return Scorer(self.vocabulary, self.x, choose(task), options.softcap)

    def targets_and_terms(self, scorer: Scorer) -> tuple[Tensor, Terms]:
        """In the order in which rows are scored; -1 for targets that are ignored."""
        weight, options = self.class_weight, self.options
        if weight is not None:
            weight = scorer.in_order(weight.detach().to(scorer.x.dtype)).contiguous()
        position = scorer.position(self.target.clamp(0, self.structure.rows - 1))
        target = torch.where(options.counted(self.target), position, -1)
        return target, Terms(self.structure.rows, options.label_smoothing, weight, options.z_loss)


@dataclass(frozen=True)
class Made:
    """A loss and what backward goes on from: all gradients, or the log-sum-exp of each vector."""

    loss: Tensor
    lse: Tensor
    grads: list[Tensor | None] | None  # of the vectors, the bias and the tensors


def cross_entropy(asked: Asked) -> Tensor:
    """The loss, differentiable in the vectors, the bias and the tensors. Ignored vectors are not even scored."""
    counted = asked.options.counted(asked.target)
    if bool(counted.all()):
        return _of_counted(asked)
    kept = counted.nonzero()[:, 0]
    loss = _of_counted(replace(asked, x=asked.x.index_select(0, kept), target=asked.target.index_select(0, kept)))
    if asked.options.reduction != "none":
        return loss
    return loss.new_zeros(counted.shape).index_copy(0, kept, loss)


def _of_counted(asked: Asked) -> Tensor:
    vocabulary = asked.vocabulary
    if torch.is_grad_enabled() and asked.trains:
        inputs = (asked.x, vocabulary.bias, *vocabulary.tensors)
        loss: Tensor = _Loss.apply(asked, *inputs)  # type: ignore[no-untyped-call]
        return loss
    return evaluate(replace(asked, x=asked.x.detach(), vocabulary=vocabulary.detached())).loss


@torch.no_grad()
def evaluate(asked: Asked) -> Made:
    """The loss, and its gradients where making them now is cheaper."""
    reduction = asked.options.reduction
    with full_precision(asked.x):
        scorer = asked.scorer()
        target, terms = asked.targets_and_terms(scorer)
        divisors = terms.divisors(target, scorer.x.dtype, reduction)
        grads = None
        if scorer.tiling.passes == GROUPS:
            found = passes.in_groups(scorer, target, terms, _scales(target, divisors, scorer.x))
            grads = scorer.gradients()
        else:
            found = passes.forward(scorer, target, terms)
        loss = found.loss + found.z_loss
        if reduction != "none":
            loss = found.loss.sum() / divisors[0]
            if terms.z_loss:
                loss = loss + found.z_loss.sum() / divisors[1]
    return Made(loss, found.lse, grads)


@torch.no_grad()
def differentiate(asked: Asked, lse: Tensor, grad: Tensor) -> list[Tensor | None]:
    """Gradients of the vectors, the bias and the tensors, where they were not made before."""
    with full_precision(asked.x):
        scorer = asked.scorer()
        target, terms = asked.targets_and_terms(scorer)
        divisors = terms.divisors(target, scorer.x.dtype, asked.options.reduction)
        grad = grad.to(scorer.x.dtype)
        plain, z = _scales(target, divisors, scorer.x)
        passes.backward(scorer, target, terms, lse, (grad * plain, grad * z))
        return scorer.gradients()


def _scales(target: Tensor, divisors: tuple[Tensor | float, Tensor | float], x: Tensor) -> tuple[Tensor, Tensor]:
    """One over what each loss is divided by, for every vector."""
    ones = x.new_ones(target.shape[0])
    return ones / divisors[0], ones / divisors[1]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asked: Asked, *inputs: Tensor | None) -> Tensor:
        made = evaluate(asked)
        ctx.at_once, ctx.dtypes = made.grads is not None, [None if t is None else t.dtype for t in inputs]
        if made.grads is not None:
            ctx.save_for_backward(*made.grads)
            return made.loss
        # Every tensor is saved by autograd, which notices when one is written to before backward.
        v = asked.vocabulary
        ctx.options, ctx.structure, ctx.padding_idx = asked.options, asked.structure, v.padding_idx
        ctx.save_for_backward(made.lse, asked.target, asked.class_weight, v.padding_row, *inputs)
        return made.loss

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.at_once:
            made = _scaled(ctx.saved_tensors, grad)
        else:
            lse, target, class_weight, padding_row, x, bias, *tensors = ctx.saved_tensors
            vocabulary = Vocabulary(ctx.structure, tuple(tensors), bias, ctx.padding_idx, padding_row)
            made = differentiate(Asked(vocabulary, x, target, class_weight, ctx.options), lse, grad)
        return None, *in_dtypes(made, ctx.dtypes)


def _scaled(grads: Sequence[Tensor | None], by: Tensor) -> list[Tensor | None]:
    """Times a number; in place, unless backward may be asked for again: those of a dense table are as large as it."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return [None if grad is None else grad * by for grad in grads]
    if by.is_cpu and float(by) == 1:
        return list(grads)
    return [None if grad is None else grad.mul_(by) for grad in grads]


def in_dtypes(grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Gradients in the dtypes of what they are of."""
    pairs = zip(grads, dtypes, strict=True)
    return [grad if grad is None or dtype is None else grad.to(dtype) for grad, dtype in pairs]
