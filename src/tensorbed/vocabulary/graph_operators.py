"""Loss, logits and top-k as operators for ``torch.compile``; the structure's sizes travel as text.

Eager calls do not come through here. A sum or mean leaves its gradients with the graph, as eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorbed.dispatch import working_dtype
from tensorbed.structures import Structure
from tensorbed.structures.registry import read, registered
from tensorbed.vocabulary import sampling
from tensorbed.vocabulary.checks import check_targets
from tensorbed.vocabulary.logits import differentiated, scored
from tensorbed.vocabulary.loss import Asked, Options, differentiate, evaluate, in_dtypes
from tensorbed.vocabulary.scorer import Vocabulary


def can_trace(structure: Structure) -> bool:
    """Whether the operators can name the structure, and have something to compute: rows that are there need no help."""
    named = structure.text is not None and registered().get(structure.kind) is type(structure)
    return named and structure.row_multiply_adds != 0


def _parts(v: Vocabulary) -> tuple[list[Tensor], Tensor | None, Tensor | None, str | None, int]:
    """A vocabulary as operators take it."""
    return list(v.tensors), v.bias, v.padding_row, v.structure.text, -1 if v.padding_idx is None else v.padding_idx


def _vocabulary(
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    padding_row: Tensor | None,
    structure: str,
    padding_idx: int,
    *,
    needs: Sequence[bool] | None = None,
) -> Vocabulary:
    """The inverse; below autograd, so that what asks for a gradient, bias first, has to be said."""
    needs = needs or [False] * (1 + len(tensors))
    bias = None if bias is None else bias.detach().requires_grad_(needs[0])
    marked = tuple(t.detach().requires_grad_(need) for t, need in zip(tensors, needs[1:], strict=True))
    return Vocabulary(read(structure), marked, bias, None if padding_idx < 0 else padding_idx, padding_row)


def _needs(v: Vocabulary, x: Tensor) -> list[bool]:
    """Which of the vectors, the bias and the tensors ask for a gradient."""
    on = torch.is_grad_enabled()
    asking = (x.requires_grad, v.bias is not None and v.bias.requires_grad, *(t.requires_grad for t in v.tensors))
    return [on and one for one in asking]


def _filled(grads: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """An operator has no ``None`` to return."""
    return [like.new_empty(0) if grad is None else grad.contiguous() for grad in grads]


def _like(needs: Sequence[bool], inputs: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Fake gradients. They keep the dtype computed in until the incoming gradient was multiplied with them."""
    x = inputs[0]
    assert x is not None
    return [
        torch.empty_like(of, dtype=dtype, memory_format=torch.contiguous_format)
        if need and of is not None
        else x.new_empty(0, dtype=dtype)
        for need, of in zip(needs, inputs, strict=True)
    ]


def _settled(
    made: Sequence[Tensor], needs: Sequence[bool], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Gradients of the vectors, the bias and the tensors, as autograd wants them."""
    wanted = [one if need else None for one, need in zip(made, needs, strict=True)]
    of_x, of_bias, *of_tensors = in_dtypes(wanted, dtypes)
    return of_x, of_bias, of_tensors


def _dtypes(x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> list[torch.dtype | None]:
    return [x.dtype, None if bias is None else bias.dtype, *(t.dtype for t in tensors)]


# What both passes are told of a loss, in the order in which :func:`traced_cross_entropy` says it.
_OF_LOSS = (
    "Tensor x, Tensor target, Tensor? class_weight, Tensor[] tensors, Tensor? bias, Tensor? padding_row, "
    "str structure, int padding_idx, bool[] needs, str reduction, float[] terms, float? softcap, int? ignore_index, "
    "int? memory_budget"
)
# The same of logits; top-k has no gradients to need.
_OF_TABLE = "Tensor x, Tensor[] tensors, Tensor? bias, Tensor? padding_row, str structure, int padding_idx"
_OF_LOGITS = f"{_OF_TABLE}, bool[] needs, int? memory_budget"


def traced_cross_entropy(asked: Asked) -> Tensor:
    """The loss in a graph; targets are checked when it runs."""
    o = asked.options
    made: list[Tensor] = _loss_op(
        asked.x,
        asked.target,
        asked.class_weight,
        *_parts(asked.vocabulary),
        _needs(asked.vocabulary, asked.x),
        o.reduction,
        [o.label_smoothing, o.z_loss],
        o.softcap,
        o.ignore_index,
        o.memory_budget,
    )
    return made[0]


def _asked(x: Tensor, target: Tensor, class_weight: Tensor | None, *table_and_needs: Any) -> Asked:
    """The call again, from what an operator was given."""
    *table, needs, reduction, terms, softcap, ignore_index, memory_budget = table_and_needs
    options = Options(ignore_index, terms[0], reduction, terms[1], softcap, memory_budget)
    vocabulary = _vocabulary(*table, needs=needs[1:])
    return Asked(vocabulary, x.detach().requires_grad_(needs[0]), target, class_weight, options)


@torch.library.custom_op("tensorbed::linear_cross_entropy", mutates_args=(), schema=f"({_OF_LOSS}) -> Tensor[]")
def _loss_op(*given: Any) -> list[Tensor]:
    asked = _asked(*given)
    check_targets(asked.target, asked.structure.rows, asked.options.ignore_index)
    made = evaluate(asked)
    if not _is_at_once(given):
        return [made.loss, made.lse]
    # Which walk is the best depends on sizes that a graph may not know: it always gets the gradients.
    grads = differentiate(asked, made.lse, torch.ones_like(made.loss)) if made.grads is None else made.grads
    return [made.loss, made.lse, *_filled(grads, made.lse)]


def _is_at_once(given: Sequence[Any]) -> bool:
    """Whether forward makes the gradients."""
    needs, reduction = given[8:10]
    return any(needs) and reduction != "none"


@_loss_op.register_fake
def _(*given: Any) -> list[Tensor]:
    x, _, _, tensors, bias = given[:5]
    needs, reduction = given[8:10]
    dtype = working_dtype(x, *tensors)
    lse = x.new_empty(x.shape[0], dtype=dtype)
    loss = torch.empty_like(lse) if reduction == "none" else lse.new_empty(())
    return [loss, lse, *(_like(needs, (x, bias, *tensors), dtype) if _is_at_once(given) else ())]


@torch.library.custom_op(
    "tensorbed::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor lse, {_OF_LOSS}) -> Tensor[]",
)
def _loss_backward_op(grad: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    return _filled(differentiate(_asked(*given), lse, grad), lse)


@_loss_backward_op.register_fake
def _(grad: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    x, _, _, tensors, bias = given[:5]
    return _like(given[8], (x, bias, *tensors), lse.dtype)


def _keep_for_loss(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, target, class_weight, tensors, bias, padding_row, *ctx.said = inputs
    ctx.needs, ctx.dtypes, ctx.at_once = inputs[8], _dtypes(x, bias, tensors), _is_at_once(inputs)
    if ctx.at_once:
        ctx.save_for_backward(*output[2:])
    else:
        ctx.save_for_backward(output[1], x, target, class_weight, bias, padding_row, *tensors)


def _loss_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    if ctx.at_once:
        made = [one * grads[0] for one in ctx.saved_tensors]
    else:
        lse, x, target, class_weight, bias, padding_row, *tensors = ctx.saved_tensors
        made = _loss_backward_op(grads[0], lse, x, target, class_weight, tensors, bias, padding_row, *ctx.said)
    of_x, of_bias, of_tensors = _settled(made, ctx.needs, ctx.dtypes)
    return of_x, None, None, of_tensors, of_bias, None, *[None] * len(ctx.said)


_loss_op.register_autograd(_loss_backward, setup_context=_keep_for_loss)


def traced_logits(v: Vocabulary, x: Tensor, memory_budget: int | None) -> Tensor:  # (n, cols) -> (n, rows)
    """All scores in a graph, by the cheapest way."""
    made: Tensor = _logits_op(x, *_parts(v), _needs(v, x), memory_budget)
    return made


@torch.library.custom_op("tensorbed::linear_scores", mutates_args=(), schema=f"({_OF_LOGITS}) -> Tensor")
def _logits_op(x: Tensor, *given: Any) -> Tensor:
    *table, needs, memory_budget = given
    return scored(_vocabulary(*table), x, memory_budget, trains=any(needs))


@_logits_op.register_fake
def _(x: Tensor, *given: Any) -> Tensor:
    return x.new_empty(x.shape[0], read(given[3]).rows)


@torch.library.custom_op(
    "tensorbed::linear_scores_backward", mutates_args=(), schema=f"(Tensor grad, {_OF_LOGITS}) -> Tensor[]"
)
def _logits_backward_op(grad: Tensor, x: Tensor, *given: Any) -> list[Tensor]:
    *table, needs, memory_budget = given
    vocabulary = _vocabulary(*table, needs=needs[1:])
    made = differentiated(vocabulary, x.detach().requires_grad_(needs[0]), memory_budget, grad)
    return _filled(made, x.new_empty(0, dtype=working_dtype(x, *vocabulary.tensors)))


@_logits_backward_op.register_fake
def _(grad: Tensor, x: Tensor, *given: Any) -> list[Tensor]:
    tensors, bias, needs = given[0], given[1], given[5]
    return _like(needs, (x, bias, *tensors), working_dtype(x, *tensors))


def _keep_for_logits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tensors, bias, padding_row, *ctx.said = inputs
    ctx.needs = inputs[6]
    ctx.save_for_backward(x, bias, padding_row, *tensors)


def _logits_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, bias, padding_row, *tensors = ctx.saved_tensors
    made = _logits_backward_op(grad, x, tensors, bias, padding_row, *ctx.said)
    of_x, of_bias, of_tensors = _settled(made, ctx.needs, _dtypes(x, bias, tensors))
    return of_x, of_tensors, of_bias, None, *[None] * len(ctx.said)


_logits_op.register_autograd(_logits_backward, setup_context=_keep_for_logits)


def traced_topk(v: Vocabulary, x: Tensor, k: int, memory_budget: int | None) -> list[Tensor]:  # (n, cols)
    """Values and indices ``(n, k)`` in a graph, without all scores."""
    found: list[Tensor] = _topk_op(x.detach(), *_parts(v.detached()), k, memory_budget)
    return found


@torch.library.custom_op(
    "tensorbed::linear_topk", mutates_args=(), schema=f"({_OF_TABLE}, int k, int? memory_budget) -> Tensor[]"
)
def _topk_op(x: Tensor, *given: Any) -> list[Tensor]:
    *table, k, memory_budget = given
    return list(sampling.topk(_vocabulary(*table), x, k, memory_budget))


@_topk_op.register_fake
def _(x: Tensor, *given: Any) -> list[Tensor]:
    n, k = x.shape[0], given[5]
    return [x.new_empty(n, k), x.new_empty(n, k, dtype=torch.int64)]
