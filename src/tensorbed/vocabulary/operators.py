"""The loss as an operator for ``torch.compile``: the structure's sizes travel as text.

Eager calls do not come through here. A sum or mean leaves its gradients with the graph, as eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorbed.structures.registry import read, registered
from tensorbed.vocabulary.loss import Asked, Options, differentiate, evaluate, working_dtype
from tensorbed.vocabulary.scorer import Vocabulary
from tensorbed.vocabulary.targets import check_targets


def can_trace(asked: Asked) -> bool:
    """Whether the operator can name the structure."""
    structure = asked.structure
    return registered().get(structure.kind) is type(structure)


def traced_cross_entropy(asked: Asked) -> Tensor:
    """The loss in a graph; targets are checked when it runs."""
    v, said = asked.vocabulary, asked.options
    needs = [asked.x.requires_grad, v.bias is not None and v.bias.requires_grad, *(t.requires_grad for t in v.tensors)]
    made: list[Tensor] = _loss_op(
        asked.x,
        asked.target,
        list(v.tensors),
        v.bias,
        asked.class_weight,
        v.padding_row,
        v.structure.text,
        -1 if v.padding_idx is None else v.padding_idx,
        [torch.is_grad_enabled() and need for need in needs],
        said.reduction,
        said.ignore_index,
        said.label_smoothing,
        said.z_loss,
        said.softcap,
        said.memory_budget,
    )
    return made[0]


def _asked(
    x: Tensor,
    target: Tensor,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    class_weight: Tensor | None,
    padding_row: Tensor | None,
    structure: str,
    padding_idx: int,
    needs: Sequence[bool],
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    memory_budget: int | None,
) -> Asked:
    """The call again; below autograd, so that what asks for a gradient has to be said."""
    x = x.detach().requires_grad_(needs[0])
    bias = None if bias is None else bias.detach().requires_grad_(needs[1])
    marked = tuple(t.detach().requires_grad_(need) for t, need in zip(tensors, needs[2:], strict=True))
    vocabulary = Vocabulary(read(structure), marked, bias, None if padding_idx < 0 else padding_idx, padding_row)
    options = Options(ignore_index, label_smoothing, reduction, z_loss, softcap, memory_budget)
    return Asked(vocabulary, x, target, class_weight, options)


@torch.library.custom_op("tensorbed::linear_cross_entropy", mutates_args=())
def _loss_op(
    x: Tensor,
    target: Tensor,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    class_weight: Tensor | None,
    padding_row: Tensor | None,
    structure: str,
    padding_idx: int,
    needs: Sequence[bool],
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    memory_budget: int | None,
) -> list[Tensor]:
    given = (x, target, tensors, bias, class_weight, padding_row, structure, padding_idx, needs)
    asked = _asked(*given, reduction, ignore_index, label_smoothing, z_loss, softcap, memory_budget)
    check_targets(target, asked.structure.rows, ignore_index)
    made = evaluate(asked)
    if not _is_at_once(needs, reduction):
        return [made.loss, made.lse]
    # Which walk is the best depends on sizes that a graph may not know: it always gets the gradients.
    grads = differentiate(asked, made.lse, torch.ones_like(made.loss)) if made.grads is None else made.grads
    return [made.loss, made.lse, *_filled(grads, x, bias, tensors)]


def _is_at_once(needs: Sequence[bool], reduction: str) -> bool:
    return any(needs) and reduction != "none"


def _filled(grads: Sequence[Tensor | None], x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the dtypes of what they are of; an operator has no ``None`` to return."""
    return [
        x.new_empty(0) if grad is None or of is None else grad.to(of.dtype).contiguous()
        for grad, of in zip(grads, (x, bias, *tensors), strict=True)
    ]


def _like(needs: Sequence[bool], x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.empty_like(of, memory_format=torch.contiguous_format) if need and of is not None else x.new_empty(0)
        for need, of in zip(needs, (x, bias, *tensors), strict=True)
    ]


@_loss_op.register_fake
def _(
    x: Tensor,
    target: Tensor,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    class_weight: Tensor | None,
    padding_row: Tensor | None,
    structure: str,
    padding_idx: int,
    needs: Sequence[bool],
    reduction: str,
    *_: object,
) -> list[Tensor]:
    lse = x.new_empty(x.shape[0], dtype=working_dtype(x, *tensors))
    loss = torch.empty_like(lse) if reduction == "none" else lse.new_empty(())
    return [loss, lse, *(_like(needs, x, bias, tensors) if _is_at_once(needs, reduction) else ())]


@torch.library.custom_op("tensorbed::linear_cross_entropy_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    lse: Tensor,
    x: Tensor,
    target: Tensor,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    class_weight: Tensor | None,
    padding_row: Tensor | None,
    structure: str,
    padding_idx: int,
    needs: Sequence[bool],
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    memory_budget: int | None,
) -> list[Tensor]:
    given = (x, target, tensors, bias, class_weight, padding_row, structure, padding_idx, needs)
    asked = _asked(*given, reduction, ignore_index, label_smoothing, z_loss, softcap, memory_budget)
    return _filled(differentiate(asked, lse, grad), x, bias, tensors)


@_backward_op.register_fake
def _(
    grad: Tensor,
    lse: Tensor,
    x: Tensor,
    target: Tensor,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    class_weight: Tensor | None,
    padding_row: Tensor | None,
    structure: str,
    padding_idx: int,
    needs: Sequence[bool],
    *_: object,
) -> list[Tensor]:
    return _like(needs, x, bias, tensors)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, target, tensors, bias, class_weight, padding_row, *ctx.said = inputs
    ctx.needs, ctx.at_once = inputs[8], _is_at_once(inputs[8], inputs[9])
    if ctx.at_once:
        ctx.save_for_backward(*output[2:])
    else:
        ctx.save_for_backward(output[1], x, target, bias, class_weight, padding_row, *tensors)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    if ctx.at_once:
        made = [one * grads[0] for one in ctx.saved_tensors]
    else:
        lse, x, target, bias, class_weight, padding_row, *tensors = ctx.saved_tensors
        made = _backward_op(grads[0], lse, x, target, tensors, bias, class_weight, padding_row, *ctx.said)
    of_x, of_bias, *of_tensors = [one if need else None for one, need in zip(made, ctx.needs, strict=True)]
    return of_x, None, of_tensors, of_bias, *[None] * 11


_loss_op.register_autograd(_backward, setup_context=_setup_context)
