"""The loss without logits inside ``model(input_ids, labels=...)``: a head that answers with logits not yet made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorbed.nn.head import Head
from tensorbed.nn.lazy import LazyTensor


def loss_without_logits(model: nn.Module, on: bool = True) -> nn.Module:
    """While ``model`` trains, our heads give logits that ``F.cross_entropy`` never makes. Off with ``on=False``.

    ``model(input_ids, labels=labels).loss`` then takes the memory of :meth:`tensorbed.Head.loss`. Whatever else is done
    with the logits, a softcap for instance, makes them as before. In ``torch.compile`` the graph breaks there.
    """
    heads = [module for module in model.modules() if isinstance(module, Head)]
    if not heads:
        raise ValueError(f"this {type(model).__name__} has no head of tensorbed; compress it with include_heads=True.")
    for head in heads:
        head.__dict__.pop("forward", None)
        if on:
            # Not a closure: models are pickled and copied.
            head.__dict__["forward"] = partial(_forward, head)
    return model


def _forward(head: Head, h: Tensor, *args: Any, **options: Any) -> Any:
    lazily = head.training and torch.is_grad_enabled() and not args and not options
    if not lazily:
        return Head.forward(head, h, *args, **options)
    device = h.device.type
    mixed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return LazyLogits(head, h, mixed, mixed or h.dtype)


class LazyLogits(LazyTensor):
    """``head(h)`` to be: known in shape and dtype, made by the first computation that wants its numbers.

    Casts, slices of positions and ``view(-1, classes)`` leave it so; ``F.cross_entropy`` is the head's own loss. Once
    made they are kept, and may be written to.
    """

    _head: Head
    _h: Tensor
    _mixed: torch.dtype | None  # of autocast when the head was called
    _kept: Tensor | None

    @staticmethod
    def __new__(cls, head: Head, h: Tensor, mixed: torch.dtype | None, dtype: torch.dtype) -> LazyLogits:
        shape = (*h.shape[:-1], head.num_classes)
        made: LazyLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=h.device, requires_grad=True)
        made._head, made._h, made._mixed, made._kept = head, h, mixed, None
        return made

    def _handled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        handler = _HANDLED.get(func)
        if handler is None or self._kept is not None or not args:
            return NotImplemented
        found = handler(*args, **kwargs)
        return NotImplemented if found is None else found

    def _with(self, h: Tensor, dtype: torch.dtype | None = None) -> LazyLogits:
        return LazyLogits(self._head, h, self._mixed, dtype or self.dtype)

    def _under(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        device = self._h.device.type
        return torch.autocast(device, enabled=False) if dtype is None else torch.autocast(device, dtype=dtype)

    def _numbers(self) -> Tensor:
        if self._kept is None:
            with self._under(self._mixed):
                self._kept = Head.forward(self._head, self._h).to(self.dtype)
        return self._kept


def _cast(lazy: LazyLogits, *args: Any, **kwargs: Any) -> LazyLogits | None:
    """``to`` another floating dtype where nothing else changes."""
    if kwargs.keys() - {"dtype"}:
        return None
    dtype = kwargs.get("dtype", args[0] if args else lazy.dtype)
    dtype = lazy.dtype if isinstance(dtype, (str, torch.device)) and torch.device(dtype) == lazy.device else dtype
    plain = isinstance(dtype, torch.dtype) and dtype.is_floating_point and len(args) + len(kwargs) <= 1
    return lazy._with(lazy._h, dtype) if plain else None


def _viewed(lazy: LazyLogits, *shape: Any, **named: Any) -> LazyLogits | None:
    """Positions laid out otherwise, classes last as before."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if named or len(sizes) < 2 or not all(isinstance(size, int) for size in sizes):
        return None
    classes = lazy.shape[-1]
    if sizes[-1] != classes and not (sizes[-1] == -1 and lazy._h.shape[:-1].numel() == torch.Size(sizes[:-1]).numel()):
        return None
    return lazy._with(lazy._h.reshape(*sizes[:-1], lazy._h.shape[-1]))


def _sliced(lazy: LazyLogits, index: Any) -> LazyLogits | None:
    """Some positions, all classes."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(type(part) in (slice, int, type(Ellipsis)) for part in parts) or parts.count(Ellipsis) > 1:
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (lazy.dim() + 1 - len(parts)), *parts[at + 1 :])
    if len(parts) > lazy.dim() or (len(parts) == lazy.dim() and parts[-1] != slice(None)):
        return None
    return lazy._with(lazy._h[parts])


def _cross_entropy(
    lazy: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    by_class = lazy.dim() == 2 and not target.is_floating_point() and size_average is None and reduce is None
    if not by_class:
        return None
    # Logits of half precision that were cast to single have a loss of single precision; so has autocast.
    half = lazy._h.dtype in (torch.float16, torch.bfloat16) and lazy.dtype == torch.float32
    with lazy._under(lazy._mixed or (lazy._h.dtype if half else None)):
        loss = lazy._head.loss(
            lazy._h,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            class_weight=weight,
        )
    return loss.to(lazy.dtype)


_HANDLED: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.float: lambda lazy, **_: lazy._with(lazy._h, torch.float32),
    Tensor.to: _cast,
    Tensor.contiguous: lambda lazy, **_: lazy,
    Tensor.view: _viewed,
    Tensor.reshape: _viewed,
    Tensor.__getitem__: _sliced,
    F.cross_entropy: _cross_entropy,
}
