"""The loss without logits inside ``model(input_ids, labels=...)``: a head that answers with logits not yet made."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from tensorbed.dispatch import World, differentiable_once, is_autocast, recording, world_of
from tensorbed.nn.head import Head
from tensorbed.nn.lazy import LazyTensor, with_numbers

_Make = Callable[[], Tensor]  # the numbers of logits
_Pull = Callable[[Tensor], tuple[Tensor | None, ...]]  # the gradient of a tensor to those of what it is made from


def loss_without_logits(model: nn.Module, on: bool = True) -> nn.Module:
    """While ``model`` trains, our heads give logits that ``F.cross_entropy`` never makes. Off with ``on=False``.

    ``model(input_ids, labels=labels).loss`` then takes the memory of :meth:`tensorbed.Head.loss`. Whatever else is done
    with the logits, a softcap for instance, makes them as before: they, their views and their copies are read, written
    and differentiated as those of any head. In ``torch.compile`` the graph breaks there.

    Args:
        model: changed in place and returned; it has a head of this library.
        on: ``False`` makes its heads ordinary ones again.

    Example::

        >>> from tensorbed.integrations.transformers import loss_without_logits
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=3000, **sizes))
        >>> report = tb.compress_(model, tb.TensorTrain(rank=8), fit=False)
        >>> words = torch.randint(0, 3000, (2, 8))
        >>> loss_without_logits(model).train()(words, labels=words).loss.backward()
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
        self.members: list[weakref.ref[LazyLogits]] = []  # a view after what it is a view of
        self.is_watched = False  # whether somebody asks for gradients of any of them
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
            for reference in self.members:
                if (member := reference()) is not None and member._kept is None:
                    member._kept = member._make()

    def check(self) -> None:
        """Refuse to compute with other numbers than the head was called with."""
        now = dict(self.head.named_parameters())
        # Shards are of another type, and gathered when the head is called.
        same = (now[name] is own or type(now[name]) is not nn.Parameter for name, own in self.parameters.items())
        if not all(same) or any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "what these logits are to be made from has changed since the head was called; compute with them before "
                "the optimiser's step, or have them made at once: loss_without_logits(model, on=False)."
            )

    def differentiated(self, sources: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden vectors and the parameters for one of the logits."""
        with torch.enable_grad():
            logits = self.logits(self.h)
        return torch.autograd.grad(logits, sources, grad, allow_unused=True)


class LazyLogits(LazyTensor):
    """``head(h)`` to be: known in shape and dtype, made by the first computation that wants its numbers.

    Casts, slices of positions and ``view(-1, classes)`` leave it so; ``F.cross_entropy`` is the head's own loss. Once
    made they are kept, and may be written to: whatever was a view of them then is a view of what was made. They have
    two places in the graph, before they are made and after: their gradient is the sum of both.
    """

    _call: _Call
    _kept: Tensor | None  # the numbers, once they are made
    _h: Tensor  # the hidden vectors of these positions
    _like: Tensor  # laid out as these logits, without numbers
    _make: _Make

    @staticmethod
    def __new__(
        cls, call: _Call, like: Tensor, h: Tensor, make: _Make, differentiated: _Pull, sources: Sequence[Tensor]
    ) -> LazyLogits:
        lazy: LazyLogits = _Place.apply(like, h.device, differentiated, *sources)  # type: ignore[no-untyped-call]
        lazy._call, lazy._like, lazy._h, lazy._make, lazy._kept = call, like, h, make, None
        call.members.append(weakref.ref(lazy))
        return lazy

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIFFERENTIATING:
            return _DIFFERENTIATING[func](*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _handled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _WATCHED:
            return _WATCHED[func](*args, **kwargs)
        lazily = func in _HANDLED and self._kept is None and args
        answer = _HANDLED[func](*args, **kwargs) if lazily else None
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
        # The gradients depend on them; those of a view or a cast of logits do not, and would keep what it is of.
        ctx.save_for_backward(*(source for source in sources if not isinstance(source, LazyLogits)))
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
        ctx.save_for_backward(call.h, *call.parameters.values())  # which its gradient depends on
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None or not ctx.call.is_watched:
            return grad, None, None, None
        return None, *_pulled_back(ctx, grad), None, None


@differentiable_once
def _pulled_back(ctx: Any, _: Sequence[Tensor], grad: Tensor) -> tuple[Any, ...]:
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
    lazy: LazyLogits, target: Tensor, weight: Tensor | None, size_average: Any, reduce: Any, **options: Any
) -> Tensor | None:
    if lazy.dim() != 2 or target.is_floating_point() or size_average is not None or reduce is not None:
        return None
    call, h, dtype = lazy._call, lazy._h, lazy.dtype
    call.check()
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


def _places(lazy: LazyLogits) -> list[Any]:
    """Where the graph has these logits: for losses without them, and for whatever was computed with their numbers."""
    with torch._C.DisableTorchFunctionSubclass():
        unmade = [get_gradient_edge(lazy)] if lazy.requires_grad else []
    return unmade if lazy._kept is None else [*unmade, lazy._kept]


def _gradients(
    outputs: Any, inputs: Sequence[Any], *, allow_unused: bool | None, materialize_grads: bool, **options: Any
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` with regard to logits, among others."""
    places = [_places(one) if isinstance(one, LazyLogits) else [with_numbers(one)] for one in inputs]
    before = {one._call: one._call.is_watched for one in inputs if isinstance(one, LazyLogits)}
    try:
        for call in before:
            call.is_watched = True
        found = iter(torch.autograd.grad(with_numbers(outputs), list(chain(*places)), allow_unused=True, **options))
    finally:
        for call, was_watched in before.items():
            call.is_watched = was_watched
    gradients = [_total([next(found) for _ in part]) for part in places]
    if materialize_grads:
        return tuple(torch.zeros_like(one) if g is None else g for one, g in zip(inputs, gradients, strict=True))
    if not allow_unused and any(gradient is None for gradient in gradients):
        raise RuntimeError("a tensor appears to not have been used in the graph; set allow_unused=True if it may be.")
    return tuple(gradients)


def _backward(tensors: Any, *, inputs: Sequence[Any] | None, **options: Any) -> None:
    """``torch.autograd.backward``, into ``grad`` of logits too where they are among the inputs."""
    lazy = [one for one in inputs or () if isinstance(one, LazyLogits)]
    made = [one._kept for one in lazy if one._kept is not None]
    for one in lazy:
        one._call.is_watched = True
    tensors, options = with_numbers((tensors, options))
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.backward(tensors, inputs=None if inputs is None else [*inputs, *made], **options)


def _total(gradients: Sequence[Tensor | None]) -> Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    return sum(there[1:], there[0]) if there else None


def _grad(lazy: LazyLogits) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        held = [lazy.grad] if lazy.retains_grad else []
    if lazy._kept is not None:
        with warnings.catch_warnings():  # of some versions of torch, about a tensor on the way that has no gradient
            warnings.simplefilter("ignore", UserWarning)
            held.append(lazy._kept.grad)
    return _total(held)


def _set_grad(lazy: LazyLogits, grad: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        lazy.grad = None
    lazy._numbers().grad = grad


def _retain_grad(lazy: LazyLogits) -> None:
    lazy._call.is_watched = True
    with torch._C.DisableTorchFunctionSubclass():
        lazy.retain_grad()
    lazy._numbers().retain_grad()


class _Handles(ExitStack):
    """Of a hook in both places that logits have in the graph."""

    remove = ExitStack.close


def _register_hook(lazy: LazyLogits, hook: Callable[[Tensor], Any]) -> _Handles:
    lazy._call.is_watched = True
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
# Of logits that are not made.
_HANDLED: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.float: lambda lazy, **named: lazy._derived(lambda logits: logits.float(**named), lazy._h),
    Tensor.to: _cast,
    Tensor.contiguous: partial(_laid_out, Tensor.contiguous),
    Tensor.view: partial(_laid_out, Tensor.view),
    Tensor.reshape: partial(_laid_out, Tensor.reshape),
    Tensor.__getitem__: _sliced,
    F.cross_entropy: _cross_entropy,
}
# Of those that are made, too.
_WATCHED: dict[Callable[..., Any], Callable[..., Any]] = {
    _GRAD.__get__: _grad,
    _GRAD.__set__: _set_grad,
    Tensor.retain_grad: _retain_grad,
    Tensor.register_hook: _register_hook,
}
