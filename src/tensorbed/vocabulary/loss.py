"""The cross-entropy of vectors against all rows of a table, without the table and without the logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tensorbed.dispatch import full_precision
from tensorbed.structures import Structure
from tensorbed.vocabulary import walks
from tensorbed.vocabulary.schedule import GROUPS, Schedule, choose, numbers_allowed
from tensorbed.vocabulary.scorer import Scorer, Vocabulary
from tensorbed.vocabulary.softmax import Terms


@dataclass(frozen=True)
class Options:
    """How the loss is formed; what every call says besides its tensors."""

    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    z_loss: float = 0.0
    softcap: float | None = None
    memory_budget: int | None = None

    def terms(self, classes: int, class_weight: Tensor | None) -> Terms:
        return Terms(classes, self.ignore_index, self.label_smoothing, class_weight, self.z_loss)


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
    def dtype(self) -> torch.dtype:
        """What is computed in: sums of half precision numbers are single."""
        return working_dtype(self.x, *self.vocabulary.tensors)

    @property
    def trains(self) -> bool:
        return self.x.requires_grad or self.vocabulary.trains

    def schedule(self) -> Schedule:
        n, rows = self.x.shape[0], self.structure.rows
        numbers = numbers_allowed(self.options.memory_budget, n, rows, self.dtype.itemsize)
        return choose(self.structure, n, numbers, trains=self.trains, at_once=self.options.reduction in ("mean", "sum"))

    def terms(self) -> Terms:
        weight = None if self.class_weight is None else self.class_weight.detach().to(self.dtype).contiguous()
        return self.options.terms(self.structure.rows, weight)


@dataclass(frozen=True)
class Made:
    """A loss and what backward goes on from: all gradients, or the log-sum-exp of each vector."""

    loss: Tensor
    lse: Tensor
    grads: list[Tensor | None] | None  # of the vectors, the bias and the tensors


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest of the tensors', at least float32."""
    wide = any(t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def cross_entropy(asked: Asked) -> Tensor:
    """The loss, differentiable in the vectors, the bias and the tensors."""
    vocabulary = asked.vocabulary
    if torch.is_grad_enabled() and asked.trains:
        inputs = (asked.x, vocabulary.bias, *vocabulary.tensors)
        loss: Tensor = _Loss.apply(asked, *inputs)  # type: ignore[no-untyped-call]
        return loss
    return evaluate(replace(asked, x=asked.x.detach(), vocabulary=vocabulary.detached())).loss


@torch.no_grad()
def evaluate(asked: Asked) -> Made:
    """The loss, and its gradients where making them now is cheaper."""
    schedule, terms, dtype = asked.schedule(), asked.terms(), asked.dtype
    x = asked.x.detach().to(dtype)
    reduction = asked.options.reduction
    with full_precision(x):
        scorer = Scorer(asked.vocabulary, schedule, dtype, asked.options.softcap)
        divisors = terms.divisors(asked.target, dtype, reduction)
        grads = None
        if schedule.walk == GROUPS:
            scales = _scales(x, divisors)
            found = walks.in_groups(scorer, x, asked.target, terms, scales, grad=asked.x.requires_grad)
            grads = _gradients(scorer, found.x_grad)
        else:
            found = walks.forward(scorer, x, asked.target, terms)
        loss = found.loss + found.z_loss
        if reduction != "none":
            loss = found.loss.sum() / divisors[0] + found.z_loss.sum() / divisors[1] * bool(terms.z_loss)
    return Made(loss, found.lse, grads)


@torch.no_grad()
def differentiate(asked: Asked, lse: Tensor, grad: Tensor) -> list[Tensor | None]:
    """Gradients of the vectors, the bias and the tensors, where they were not made before."""
    terms, dtype = asked.terms(), asked.dtype
    x, grad = asked.x.detach().to(dtype), grad.to(dtype)
    with full_precision(x):
        scorer = Scorer(asked.vocabulary, asked.schedule(), dtype, asked.options.softcap)
        plain, z = _scales(x, terms.divisors(asked.target, dtype, asked.options.reduction))
        scales = (grad * plain, grad * z)
        x_grad = walks.backward(scorer, x, asked.target, terms, lse, scales, grad=asked.x.requires_grad)
        return _gradients(scorer, x_grad)


def _scales(x: Tensor, divisors: tuple[Tensor | float, Tensor | float]) -> tuple[Tensor, Tensor]:
    """One over what each loss is divided by, for every vector."""
    ones = x.new_ones(x.shape[0])
    return ones / divisors[0], ones / divisors[1]


def _gradients(scorer: Scorer, x_grad: Tensor | None) -> list[Tensor | None]:
    return [x_grad, scorer.bias_grad, *scorer.projection.gradients()]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asked: Asked, *inputs: Tensor | None) -> Tensor:
        made = evaluate(asked)
        # Tensors that autograd watches are saved by it, which notices when they are written to before backward.
        ctx.asked, ctx.grads = replace(asked, x=made.lse, vocabulary=Vocabulary(asked.structure, ())), made.grads
        ctx.vocabulary = replace(asked.vocabulary, tensors=(), bias=None)
        ctx.dtypes = [None if t is None else t.dtype for t in inputs]
        if made.grads is None:
            ctx.save_for_backward(made.lse, *inputs)
        return made.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            lse, x, bias, *tensors = ctx.saved_tensors
            vocabulary = replace(ctx.vocabulary, tensors=tuple(tensors), bias=bias)
            made = differentiate(replace(ctx.asked, x=x, vocabulary=vocabulary), lse, grad)
        else:
            made = [None if one is None else one * grad for one in ctx.grads]
        return None, *(
            one if one is None or dtype is None else one.to(dtype) for one, dtype in zip(made, ctx.dtypes, strict=True)
        )
