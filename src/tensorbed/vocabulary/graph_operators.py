"""Scores, losses and top-k as operators for ``torch.compile``; the structure's sizes travel as text.

Eager calls do not come through here. A sum or mean leaves its gradients with the graph, as eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends import triton
from tensorbed.backends.triton import serving
from tensorbed.dispatch import World, differentiated_once, no_second_derivative, of_all_examples, working_dtype
from tensorbed.structures import Structure
from tensorbed.structures.registry import read, registered
from tensorbed.vocabulary import sampling
from tensorbed.vocabulary.loss import Asked, Options, differentiate, evaluate, in_dtypes
from tensorbed.vocabulary.scorer import Vocabulary

_TABLE = "Tensor[] tensors, Tensor? bias, Tensor? padding_row, str structure, int padding_idx, str impl"
# What both passes are told, in the order of :func:`traced`.
_ASKED = (
    f"Tensor x, Tensor? target, Tensor? class_weight, {_TABLE}, bool[] needs, str reduction, float[] terms, "
    "float? softcap, int? ignore_index, int? memory_budget"
)


def can_trace(structure: Structure) -> bool:
    """Whether the operators can name the structure, and have something to compute: rows that are there need no help."""
    named = structure.text is not None and registered().get(structure.kind) is type(structure)
    return named and structure.row_multiply_adds != 0


def traced(asked: Asked) -> Tensor:
    """The loss, or the scores, in a graph; targets are checked when it runs."""
    v, x, o = asked.vocabulary, asked.x, asked.options
    wanted = (x.requires_grad, v.bias is not None and v.bias.requires_grad, *(t.requires_grad for t in v.tensors))
    needs = [torch.is_grad_enabled() and need for need in wanted]  # of the vectors, the bias and the tensors
    terms = [o.label_smoothing, o.z_loss]
    said = (needs, o.reduction, terms, o.softcap, o.ignore_index, o.memory_budget)
    made: list[Tensor] = _computed_op(x, asked.target, asked.class_weight, *_table(v), *said)
    return made[0]


def traced_topk(v: Vocabulary, x: Tensor, k: int, memory_budget: int | None) -> list[Tensor]:  # (n, cols)
    """Values and indices ``(n, k)`` in a graph, without all scores."""
    found: list[Tensor] = _topk_op(x.detach(), *_table(v.detached()), k, memory_budget)
    return found


def check_targets(target: Tensor, classes: int, ignore_index: int | None, impl: str = "auto") -> None:
    """Every target a class or ignored; ``IndexError`` that shows the first which is neither.

    By kernels of a device it comes without a wait: as an error of the device, later, that shows no number.
    """
    if serving.asked_for(impl) and not triton.absent(target.device):
        valid = (target >= 0) & (target < classes)
        if ignore_index is not None:
            valid |= target == ignore_index
        torch._assert_async(valid.all(), f"a target is out of range for {classes} classes (valid: 0 to {classes - 1}).")
        return
    low, high = map(int, torch.aminmax(target)) if target.numel() else (0, 0)
    if low >= 0 and high < classes:  # as almost always
        return
    bad = (target < 0) | (target >= classes)
    if ignore_index is not None:
        bad &= target != ignore_index
    if bool(bad.any()):
        first = int(target[bad][0])
        ignored = "" if ignore_index is None else f", or ignore_index={ignore_index}"
        raise IndexError(f"target {first} is out of range for {classes} classes (valid: 0 to {classes - 1}{ignored}).")


def checked_targets(target: Tensor, classes: int, ignore_index: int | None, world: World, impl: str = "auto") -> Tensor:
    """Checked where there are values, or by an operator when a graph runs."""
    if world is World.COMPILED:
        checked: Tensor = _check_op(target, classes, ignore_index)
        return checked
    if world in (World.EAGER, World.TRANSFORMED):
        check_targets(of_all_examples(target), classes, ignore_index, impl)
    return target


@torch.library.custom_op("tensorbed::check_targets", mutates_args=())
def _check_op(target: Tensor, classes: int, ignore_index: int | None) -> Tensor:
    check_targets(target, classes, ignore_index)
    return target.clone()


@_check_op.register_fake
def _(target: Tensor, classes: int, ignore_index: int | None) -> Tensor:
    return torch.empty_like(target)


def _table(v: Vocabulary) -> tuple[Any, ...]:
    """A vocabulary as operators take it."""
    padding_idx = -1 if v.padding_idx is None else v.padding_idx
    return list(v.tensors), v.bias, v.padding_row, v.structure.text, padding_idx, v.impl


def _vocabulary(
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    padding_row: Tensor | None,
    structure: str,
    padding_idx: int,
    impl: str,
) -> Vocabulary:
    """The inverse."""
    padding = None if padding_idx < 0 else padding_idx
    return Vocabulary(read(structure), tuple(tensors), bias, padding, padding_row, impl)


def _asked(x: Any, target: Tensor | None, class_weight: Tensor | None, tensors: Any, bias: Any, *said: Any) -> Asked:
    """The call again, from what an operator was given: below autograd, so that it has to be said what has gradients."""
    *table, needs, reduction, (label_smoothing, z_loss), softcap, ignore_index, memory_budget = said
    options = Options(ignore_index, label_smoothing, reduction, z_loss, softcap, memory_budget)
    pairs = zip((x, bias, *tensors), needs, strict=True)
    x, bias, *tensors = [None if t is None else t.detach().requires_grad_(need) for t, need in pairs]
    return Asked(_vocabulary(tensors, bias, *table), x, target, class_weight, options)


def _makes_gradients(given: Sequence[Any]) -> bool:
    """Whether forward does."""
    needs, reduction = given[9:11]
    return given[1] is not None and any(needs) and reduction != "none"


def _filled(grads: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """An operator has no ``None`` to return."""
    return [like.new_empty(0) if grad is None else grad.contiguous() for grad in grads]


def _fake_gradients(given: Sequence[Any]) -> list[Tensor]:
    """They keep the dtype computed in until the incoming gradient was multiplied with them."""
    x, _, _, tensors, bias = given[:5]
    like = torch.empty_like(x, dtype=working_dtype(x, *tensors))
    pairs = zip((x, bias, *tensors), given[9], strict=True)
    return [like.new_empty(of.shape if need and of is not None else 0) for of, need in pairs]


@torch.library.custom_op("tensorbed::over_vocabulary", mutates_args=(), schema=f"({_ASKED}) -> Tensor[]")
def _computed_op(*given: Any) -> list[Tensor]:
    asked = _asked(*given)
    if asked.target is not None:
        check_targets(asked.target, asked.structure.rows, asked.options.ignore_index, asked.vocabulary.impl)
    out, lse, grads = evaluate(asked)
    if lse is None:
        return [out]
    if not _makes_gradients(given):
        return [out, lse]
    # Which walk is the best depends on sizes that a graph may not know: it always gets the gradients.
    grads = differentiate(asked, lse, torch.ones_like(out)) if grads is None else grads
    return [out, lse, *_filled(grads, lse)]


@_computed_op.register_fake
def _(*given: Any) -> list[Tensor]:
    x, target, _, tensors = given[:4]
    if target is None:
        return [x.new_empty(x.shape[0], read(given[6]).rows)]
    lse = x.new_empty(x.shape[0], dtype=working_dtype(x, *tensors))
    loss = torch.empty_like(lse) if given[10] == "none" else lse.new_empty(())
    return [loss, lse, *(_fake_gradients(given) if _makes_gradients(given) else ())]


@torch.library.custom_op(
    "tensorbed::over_vocabulary_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? lse, {_ASKED}) -> Tensor[]",
)
def _backward_op(grad: Tensor, lse: Tensor | None, *given: Any) -> list[Tensor]:
    asked = _asked(*given)
    like = asked.x.new_empty(0, dtype=asked.vocabulary.dtype(asked.x))
    return _filled(differentiate(asked, lse, grad), like)


@_backward_op.register_fake
def _(grad: Tensor, lse: Tensor | None, *given: Any) -> list[Tensor]:
    return _fake_gradients(given)


_backward_op.register_autograd(no_second_derivative)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, target, class_weight, tensors, bias, padding_row, *ctx.said = inputs
    ctx.at_once = _makes_gradients(inputs)
    lse, kept = (None, ()) if target is None else (output[1], output[2:])
    ctx.save_for_backward(lse, x, target, class_weight, bias, padding_row, *tensors, *kept)
    ctx.tensors = len(tensors)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    lse, x, target, class_weight, bias, padding_row, *rest = ctx.saved_tensors
    tensors, made = rest[: ctx.tensors], rest[ctx.tensors :]
    if ctx.at_once:
        made = [one * grads[0] for one in made]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            sources = [t for t in (x, class_weight, bias, *tensors) if t is not None and t.requires_grad]
            made = [differentiated_once(one, sources) for one in made]
    else:
        made = _backward_op(grads[0], lse, x, target, class_weight, tensors, bias, padding_row, *ctx.said)
    needs = ctx.said[3]
    wanted = [one if need else None for one, need in zip(made, needs, strict=True)]
    of_x, of_bias, *of_tensors = in_dtypes(wanted, (x, bias, *tensors))
    return of_x, None, None, of_tensors, of_bias, None, *[None] * len(ctx.said)


_computed_op.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op(
    "tensorbed::linear_topk", mutates_args=(), schema=f"(Tensor x, {_TABLE}, int k, int? memory_budget) -> Tensor[]"
)
def _topk_op(x: Tensor, *given: Any) -> list[Tensor]:
    *table, k, memory_budget = given
    return list(sampling.topk(_vocabulary(*table), x, k, memory_budget))


@_topk_op.register_fake
def _(x: Tensor, *given: Any) -> list[Tensor]:
    n, k = x.shape[0], given[6]
    return [x.new_empty(n, k), x.new_empty(n, k, dtype=torch.int64)]
