"""The loss as an operator for ``torch.compile``: sizes and options travel as text, tensors as tensors.

Eager calls do not come through here. A sum or mean leaves its gradients with the graph, as eagerly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tensorbed.structures.registry import read, registered, written
from tensorbed.vocabulary.loss import Asked, Options, differentiate, evaluate
from tensorbed.vocabulary.scorer import Vocabulary
from tensorbed.vocabulary.targets import check_targets


def can_trace(asked: Asked) -> bool:
    """Whether the operator can name the structure."""
    structure = asked.structure
    return registered().get(structure.kind) is type(structure)


def traced_cross_entropy(asked: Asked) -> Tensor:
    """The loss in a graph; targets are checked when it runs."""
    v = asked.vocabulary
    needs = [asked.x.requires_grad, v.bias is not None and v.bias.requires_grad, *(t.requires_grad for t in v.tensors)]
    wanted = torch.is_grad_enabled()
    said = {"padding_idx": v.padding_idx, "needs": [wanted and need for need in needs], **asdict(asked.options)}
    given = (asked.x, asked.target, list(v.tensors), v.bias, asked.class_weight, v.padding_row)
    made: list[Tensor] = _loss_op(*given, written(v.structure), json.dumps(said))
    return made[0]


def _asked(
    x: Tensor,
    target: Tensor,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    class_weight: Tensor | None,
    padding_row: Tensor | None,
    structure: str,
    said: str,
) -> Asked:
    """The call again; below autograd, so that what asks for a gradient has to be said."""
    options: dict[str, Any] = json.loads(said)
    padding_idx, needs = options.pop("padding_idx"), options.pop("needs")
    inputs = zip((x, bias, *tensors), needs, strict=True)
    marked = [None if t is None else t.detach().requires_grad_(need) for t, need in inputs]
    vocabulary = Vocabulary(
        read(structure), tuple(t for t in marked[2:] if t is not None), marked[1], padding_idx, padding_row
    )
    assert marked[0] is not None
    return Asked(vocabulary, marked[0], target, class_weight, Options(**options))


def _is_at_once(said: str) -> bool:
    """Whether forward makes the gradients: not by the schedule, which a graph cannot wait for."""
    options = json.loads(said)
    return any(options["needs"]) and options["reduction"] != "none"


@torch.library.custom_op("tensorbed::linear_cross_entropy", mutates_args=())
def _loss_op(
    x: Tensor,
    target: Tensor,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    class_weight: Tensor | None,
    padding_row: Tensor | None,
    structure: str,
    said: str,
) -> list[Tensor]:
    asked = _asked(x, target, tensors, bias, class_weight, padding_row, structure, said)
    check_targets(target, asked.structure.rows, asked.options.ignore_index)
    made = evaluate(asked)
    out = [made.loss.clone(), made.lse]
    if not _is_at_once(said):
        return out
    grads = made.grads
    if grads is None:
        grads = differentiate(asked, made.lse, torch.ones_like(made.loss))
    return [*out, *_filled(grads, x, bias, tensors)]


def _filled(grads: Sequence[Tensor | None], x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the dtypes of what they are of; an operator has no ``None`` to return."""
    return [
        x.new_empty(0) if grad is None or of is None else grad.to(of.dtype).contiguous().clone()
        for grad, of in zip(grads, (x, bias, *tensors), strict=True)
    ]


def _like(said: str, x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    needs = json.loads(said)["needs"]
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
    said: str,
) -> list[Tensor]:
    wide = torch.float64 if torch.float64 in (x.dtype, *(t.dtype for t in tensors)) else torch.float32
    lse = x.new_empty(x.shape[0], dtype=wide)
    loss = torch.empty_like(lse) if json.loads(said)["reduction"] == "none" else x.new_empty((), dtype=wide)
    return [loss, lse, *(_like(said, x, bias, tensors) if _is_at_once(said) else ())]


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
    said: str,
) -> list[Tensor]:
    asked = _asked(x, target, tensors, bias, class_weight, padding_row, structure, said)
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
    said: str,
) -> list[Tensor]:
    return _like(said, x, bias, tensors)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, target, tensors, bias, class_weight, padding_row, ctx.structure, ctx.said = inputs
    ctx.count, ctx.at_once = len(tensors), _is_at_once(inputs[7])
    if ctx.at_once:
        ctx.save_for_backward(*output[2:])
    else:
        ctx.save_for_backward(output[1], x, target, bias, class_weight, padding_row, *tensors)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    grad = grads[0]
    if ctx.at_once:
        made = [one * grad for one in ctx.saved_tensors]
    else:
        lse, x, target, bias, class_weight, padding_row, *tensors = ctx.saved_tensors
        made = _backward_op(grad, lse, x, target, tensors, bias, class_weight, padding_row, ctx.structure, ctx.said)
    needs = json.loads(ctx.said)["needs"]
    of_x, of_bias, *of_tensors = [one if need else None for one, need in zip(made, needs, strict=True)]
    return of_x, None, of_tensors, of_bias, None, None, None, None


_loss_op.register_autograd(_backward, setup_context=_setup_context)
