"""Which world a call runs in: eager, traced by a compiler, or exported; and the checks that hold in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tensorbed.checks import naming, require_integer_indices
from tensorbed.indexing import check_range

# Asked in advance: torch 2.10 cannot ask in a graph.
_AUTOCAST_DEVICES = frozenset(
    name for name in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(name)
)


def is_traced(tensor: Tensor) -> bool:
    """Whether values cannot be read here: ``torch.compile``, or a tensor subclass such as a fake tensor.

    Where fake tensors are made from real ones, the tensor itself does not tell.
    """
    if torch.compiler.is_compiling():
        return True
    if type(tensor) not in (Tensor, torch.nn.Parameter) and not getattr(type(tensor), "tensorbed_plain", False):
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_exporting() -> bool:
    """Whether a graph is made that runs without this library."""
    # By its flag: the function of this name says yes in every graph of torch 2.10.
    return torch.compiler._is_exporting_flag


def is_recorded() -> bool:
    """Whether calls are written down one by one, by ``torch.jit.trace`` or ``make_fx``, which see no kernel."""
    return not torch.compiler.is_compiling() and (torch._C._get_tracing_state() is not None or _is_proxied())


def _is_proxied() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_transformed() -> bool:
    """Whether a ``torch.func`` transform is at work, ``grad`` of ``grad``, ``vmap``, ``jacrev``, or forward-mode AD."""
    # Asked by level: the stack of interpreters itself is something else to torch.compile.
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def is_plain(tensor: Tensor) -> bool:
    """Whether values can be read and kept here: eager, on a real device, under no transform."""
    return not (is_traced(tensor) or tensor.is_meta or is_transformed())


def checked_indices(index: Tensor, rows: int, owner: str = "") -> Tensor:  # (*) -> (n,) int64
    """Flat int64 indices in ``[0, rows)``; ``IndexError`` otherwise, eager and compiled, naming any owner.

    Exported graphs cannot raise: there indices are clamped into the range. On the meta device there are no values.
    """
    require_integer_indices(index)
    flat = index.reshape(-1)
    if is_exporting() or flat.is_meta:
        return clamped_for_export(flat, rows).long()
    if is_traced(flat) or _is_proxied():
        checked: Tensor = _check_op(flat, rows, owner)
        return checked
    with naming(owner):
        check_range(_values(flat), rows)
    return flat.long()


def _values(index: Tensor) -> Tensor:
    """The numbers themselves where ``vmap`` shows one example at a time."""
    while torch._C._functorch.is_functorch_wrapped_tensor(index):
        index = torch._C._functorch.get_unwrapped(index)
    return index


def clamped_for_export(index: Tensor, rows: int) -> Tensor:
    """The index itself, except in an exported graph: there it is brought into the table."""
    return index.clamp(0, rows - 1) if is_exporting() and isinstance(index, Tensor) else index


@torch.library.custom_op("tensorbed::check_indices", mutates_args=())
def _check_op(index: Tensor, rows: int, owner: str = "") -> Tensor:
    with naming(owner):
        return check_range(index, rows).to(torch.int64, copy=True)


@_check_op.register_fake
def _(index: Tensor, rows: int, owner: str = "") -> Tensor:
    return torch.empty_like(index, dtype=torch.int64)


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward pass without one of its own, which says so when it is differentiated.

    ``torch.autograd.function.once_differentiable`` does where the incoming gradient requires one; a loss's does not,
    and its second derivative would be left out without a word.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            made = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return made
        said = 'no second derivative is computed this way; use impl="reference" for create_graph=True.'
        tensors = [one.detach().requires_grad_() for one in made if isinstance(one, Tensor)]
        marked = torch._C._functions.DelayedError(said.encode(), len(tensors))(*tensors)
        rest = iter(marked if isinstance(marked, tuple) else (marked,))
        return tuple(next(rest) if isinstance(one, Tensor) else one for one in made)

    return wrapped


@contextmanager
def recording(on: bool) -> Iterator[None]:
    """Gradients recorded, or not, in here, also below an operator, where torch by itself records none."""
    below = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.set_grad_enabled(on), below if on else nullcontext():
        yield


def is_autocast(tensor: Tensor) -> bool:
    """Whether autocast is on where this tensor is."""
    device = tensor.device.type
    return device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device)


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """What is computed in: the widest of the tensors' dtypes, and single precision for half, which is rounded once."""
    wide = any(t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Autocast off: a lookup returns the parameters' dtype, as ``torch.nn.Embedding`` does."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast(tensor) else nullcontext()
