"""The loss without logits inside ``model(input_ids, labels=...)``: a head that answers with logits not yet made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorbed.dispatch import World, differentiable_once, is_autocast, recording, world_of
from tensorbed.integrations.transformers.gradients import Watch, WatchedTensor
from tensorbed.nn.head import Head


def loss_without_logits(model: nn.Module, on: bool = True) -> nn.Module:
    """While ``model`` trains, our heads give logits that ``F.cross_entropy`` never makes. Off with ``on=False``.

    ``model(input_ids, labels=labels).loss`` then takes the memory of :meth:`tensorbed.Head.loss`. Whatever else is done
    with the logits, a softcap for instance, makes them as before: they, their views and their copies are read, written
    and differentiated as those of any head. In ``torch.compile`` the graph breaks there.
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
    # Parameters that are none were put in place of the head's own for this call alone.
    own = all(isinstance(parameter, nn.Parameter) for parameter in head.parameters())
    followed = world_of(h) in (World.TRANSFORMED, World.RECORDED)
    lazily = head.training and torch.is_grad_enabled() and own and not followed and not args and not options
    return _lazy_logits(head, h) if lazily else Head.forward(head, h, *args, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _lazy_logits(head: Head, h: Tensor) -> LazyLogits:
    call = _Call(head, h)
    like = torch.empty(*h.shape[:-1], head.num_classes, dtype=call.mixed or h.dtype, device="meta")
    sources = [tensor for tensor in (h, *head.parameters()) if tensor.requires_grad]
    return LazyLogits(call, like, h, partial(call.logits, h), partial(call.differentiated, sources), sources)


class _Call:
    """One call of a head, and all logits that come of it: they are made together, before any is written to."""

    def __init__(self, head: Head, h: Tensor) -> None:
        self.head, self.h = head, h
        mixed = is_autocast(h) and h.dtype != torch.float64
        self.mixed = torch.get_autocast_dtype(h.device.type) if mixed else None
        self.members: list[weakref.ref[LazyLogits]] = []
        self.watch = Watch()
        self.parameters = dict(head.named_parameters())
        self.versions = [(t, t._version) for t in (h, *head.parameters(), *head.buffers()) if not t.is_inference()]

    def logits(self, h: Tensor) -> Tensor:
        self.check()
        with self.under(self.mixed):
            made: Tensor = Head.forward(self.head, h)
        return made

    def under(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """Autocast as it was when the head was called, or to another dtype."""
        device = self.h.device.type
        if not torch.amp.is_autocast_available(device):
            return nullcontext()
        return torch.autocast(device, enabled=False) if dtype is None else torch.autocast(device, dtype=dtype)

    def make(self) -> None:
        """All that somebody still holds."""
        with torch.inference_mode(False), recording(True):
            for member in self.living():
                if member._kept is None:
                    member._kept = member._make()

    def living(self) -> Iterator[LazyLogits]:
        """A view after what it is a view of."""
        return (member for member in (reference() for reference in self.members) if member is not None)

    def check(self) -> None:
        """Refuse to compute with other numbers than the head was called with."""
        now = dict(self.head.named_parameters())
        # Shards are of another type, and gathered when the head is called.
        same = (now[name] is own or type(now[name]) is not nn.Parameter for name, own in self.parameters.items())
        if not all(same) or any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "these logits were not made yet, and what they are made from has changed since the head was called. "
                "Compute with them before the optimiser's step, or have them made at once: "
                "loss_without_logits(model, on=False)."
            )

    def differentiated(self, sources: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden vectors and the parameters for one of the logits."""
        with torch.enable_grad():
            logits = self.logits(self.h)
        return torch.autograd.grad(logits, sources, grad, allow_unused=True)

    def is_watched(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.watch.is_on or any(member.retains_grad for member in self.living())


class LazyLogits(WatchedTensor):
    """``head(h)`` to be: known in shape and dtype, made by the first computation that wants its numbers.

    Casts, slices of positions and ``view(-1, classes)`` leave it so; ``F.cross_entropy`` is the head's own loss. Once
    made they are kept, and may be written to: whatever was a view of them then is a view of what was made.
    """

    _call: _Call
    _h: Tensor  # the hidden vectors of these positions
    _like: Tensor  # laid out as these logits, without numbers
    _make: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        call: _Call,
        like: Tensor,
        h: Tensor,
        make: Callable[[], Tensor],
        differentiated: Callable[[Tensor], tuple[Tensor | None, ...]],
        sources: Sequence[Tensor],
    ) -> LazyLogits:
        lazy: LazyLogits = _Place.apply(like, h.device, differentiated, *sources)  # type: ignore[no-untyped-call]
        lazy._call, lazy._like, lazy._h, lazy._make = call, like, h, make
        lazy._watch, lazy._kept = call.watch, None
        call.members.append(weakref.ref(lazy))
        return lazy

    def _handled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        watched = super()._handled(func, args, kwargs)
        if watched is not NotImplemented:
            return watched
        handler = _HANDLED.get(func)
        if handler is None or self._kept is not None or not args:
            return NotImplemented
        answer = handler(*args, **kwargs)
        return NotImplemented if answer is None else answer

    def _numbers(self) -> Tensor:
        if self._kept is None:
            self._call.make()
        assert self._kept is not None
        return self._kept

    def _derived(self, step: Callable[[Tensor], Tensor], h: Tensor) -> LazyLogits | None:
        """What a step, a view or a cast, makes of these: perhaps themselves."""
        like = step(self._like)
        if like is self._like:
            return self
        if not torch.is_grad_enabled():
            return None
        shape, dtype, device = self.shape, self.dtype, self.device

        def differentiated(grad: Tensor) -> tuple[Tensor | None, ...]:
            with torch.enable_grad():
                before = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
                after = step(before)
            return torch.autograd.grad(after, before, grad)

        return LazyLogits(self._call, like, h, lambda: step(self._numbers()), differentiated, [self])


class _Place(torch.autograd.Function):
    """Where logits that are not made stand in the graph, so that a gradient can be asked for there."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, device: torch.device, differentiated: Any, *sources: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.differentiated, ctx.sources = differentiated, len(sources)
        layout: Any = {"strides": like.stride(), "storage_offset": like.storage_offset(), "dtype": like.dtype}
        lazy: Tensor = Tensor._make_wrapper_subclass(LazyLogits, like.shape, device=device, **layout)
        return lazy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * (3 + ctx.sources)
        return None, None, None, *_pulled_back(ctx, grad)


class _Loss(torch.autograd.Function):
    """A loss computed without logits. Its gradient goes past them, and through them where somebody asks for theirs."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor, call: _Call, differentiated: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.differentiated = call, differentiated
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None or not ctx.call.is_watched():
            return grad, None, None, None
        return None, *_pulled_back(ctx, grad), None, None


@differentiable_once
def _pulled_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    gradients: tuple[Any, ...] = ctx.differentiated(grad)
    return gradients


def _cast(lazy: LazyLogits, *args: Any, **kwargs: Any) -> LazyLogits | None:
    """``to`` another floating dtype where nothing else changes."""
    if kwargs.keys() - {"dtype"}:
        return None
    dtype = kwargs.get("dtype", args[0] if args else lazy.dtype)
    dtype = lazy.dtype if isinstance(dtype, (str, torch.device)) and torch.device(dtype) == lazy.device else dtype
    plain = isinstance(dtype, torch.dtype) and dtype.is_floating_point and len(args) + len(kwargs) <= 1
    return lazy._derived(lambda logits: logits.to(dtype), lazy._h) if plain else None


def _laid_out(method: Callable[..., Tensor], lazy: LazyLogits, *args: Any, **kwargs: Any) -> LazyLogits | None:
    """Positions laid out otherwise, classes last as before."""

    def step(logits: Tensor) -> Tensor:
        return method(logits, *args, **kwargs)

    like = step(lazy._like)
    if like.dtype != lazy.dtype or like.shape[-1:] != lazy.shape[-1:]:
        return None
    return lazy._derived(step, lazy._h.reshape(*like.shape[:-1], lazy._h.shape[-1]))


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
    return lazy._derived(lambda logits: logits[parts], lazy._h[parts])


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
    if lazy.dim() != 2 or target.is_floating_point() or size_average is not None or reduce is not None:
        return None
    call, h, dtype = lazy._call, lazy._h, lazy.dtype
    call.check()
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    # Logits of half precision that were cast to single have a loss of single precision; so has autocast.
    half = h.dtype in (torch.float16, torch.bfloat16) and dtype == torch.float32
    with call.under(call.mixed or (h.dtype if half else None)):
        loss = call.head.loss(h, target, class_weight=weight, **options).to(dtype)

    def differentiated(grad: Tensor) -> tuple[Tensor | None, ...]:
        logits = call.logits(h).to(dtype).requires_grad_()
        with torch.enable_grad():
            again = F.cross_entropy(logits, target, weight, **options)
        return torch.autograd.grad(again, logits, grad)

    made: Tensor = _Loss.apply(loss, lazy, call, differentiated)  # type: ignore[no-untyped-call]
    return made


_HANDLED: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.float: lambda lazy, **named: lazy._derived(lambda logits: logits.float(**named), lazy._h),
    Tensor.to: _cast,
    Tensor.contiguous: partial(_laid_out, Tensor.contiguous),
    Tensor.view: partial(_laid_out, Tensor.view),
    Tensor.reshape: partial(_laid_out, Tensor.reshape),
    Tensor.__getitem__: _sliced,
    F.cross_entropy: _cross_entropy,
}
