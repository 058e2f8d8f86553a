"""Gradients asked for at a tensor that is not made yet: ``retain_grad``, hooks, ``torch.autograd.grad``, ``grad``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tensorbed.nn.lazy import LazyTensor, with_numbers


class Watch:
    """Whether somebody asks for gradients of any of the tensors that have this watch in common."""

    is_on = False


class WatchedTensor(LazyTensor):
    """A tensor with two places in the graph, before it is made and after: its gradient is the sum of theirs."""

    _watch: Watch
    _kept: Tensor | None  # its numbers, once they are made

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIFFERENTIATING:
            return _DIFFERENTIATING[func](*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _handled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return _WATCHED[func](*args, **kwargs) if func in _WATCHED else NotImplemented


def _places(lazy: WatchedTensor) -> list[Any]:
    """Where the graph has these logits: for losses without them, and for whatever was computed with their numbers."""
    with torch._C.DisableTorchFunctionSubclass():
        unmade = [get_gradient_edge(lazy)] if lazy.requires_grad else []
    return unmade if lazy._kept is None else [*unmade, lazy._kept]


def _gradients(
    outputs: Any,
    inputs: Sequence[Any],
    *,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` with regard to logits, among others."""
    places = [_places(one) if isinstance(one, WatchedTensor) else [with_numbers(one)] for one in inputs]
    before = {one._watch: one._watch.is_on for one in inputs if isinstance(one, WatchedTensor)}
    try:
        for watch in before:
            watch.is_on = True
        found = iter(torch.autograd.grad(with_numbers(outputs), list(chain(*places)), allow_unused=True, **options))
    finally:
        for watch, was_on in before.items():
            watch.is_on = was_on
    gradients = [_total([next(found) for _ in part]) for part in places]
    if materialize_grads:
        return tuple(torch.zeros_like(one) if g is None else g for one, g in zip(inputs, gradients, strict=True))
    if not allow_unused and any(gradient is None for gradient in gradients):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    return tuple(gradients)


def _backward(tensors: Any, *, inputs: Sequence[Any] | None = None, **options: Any) -> None:
    """``torch.autograd.backward``, into ``grad`` of logits too where they are among the inputs."""
    made = [one._kept for one in inputs or () if isinstance(one, WatchedTensor) and one._kept is not None]
    tensors, options = with_numbers((tensors, options))
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.backward(tensors, inputs=None if inputs is None else [*inputs, *made], **options)


def _total(gradients: Sequence[Tensor | None]) -> Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    return sum(there[1:], there[0]) if there else None


def _grad(lazy: WatchedTensor) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        held = [lazy.grad] if lazy.retains_grad else []
    if lazy._kept is not None:
        with warnings.catch_warnings():  # of some versions of torch, about a tensor on the way that has no gradient
            warnings.simplefilter("ignore", UserWarning)
            held.append(lazy._kept.grad)
    return _total(held)


def _set_grad(lazy: WatchedTensor, grad: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        lazy.grad = None
    lazy._numbers().grad = grad


def _retain_grad(lazy: WatchedTensor) -> None:
    lazy._watch.is_on = True
    with torch._C.DisableTorchFunctionSubclass():
        lazy.retain_grad()
    lazy._numbers().retain_grad()


class _Handles(ExitStack):
    """Of a hook in both places that logits have in the graph."""

    remove = ExitStack.close


def _register_hook(lazy: WatchedTensor, hook: Callable[[Tensor], Any]) -> _Handles:
    lazy._watch.is_on = True
    handles = _Handles()
    with torch._C.DisableTorchFunctionSubclass():
        handles.enter_context(Tensor.register_hook(lazy, hook))  # type: ignore[no-untyped-call]
    handles.enter_context(Tensor.register_hook(lazy._numbers(), hook))  # type: ignore[no-untyped-call]
    return handles


_DIFFERENTIATING: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.autograd.grad: _gradients,
    torch.autograd.backward: _backward,
}
_GRAD: Any = vars(torch._C.TensorBase)["grad"]
# Of tensors that are made and of those that are not.
_WATCHED: dict[Callable[..., Any], Callable[..., Any]] = {
    _GRAD.__get__: _grad,
    _GRAD.__set__: _set_grad,
    Tensor.retain_grad: _retain_grad,
    Tensor.register_hook: _register_hook,
}
