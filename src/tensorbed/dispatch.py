"""Which world a call runs in, which backend computes it there, and the checks that hold in each.

The walk of a lookup is layer, :mod:`tensorbed.functional`, structure, backend. A backend stands in :data:`BACKENDS` and
knows some *makings*: what a structure says that its table is made of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tensorbed.checks import naming, require_integer_indices
from tensorbed.indexing import check_range

_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
# Asked in advance: torch 2.10 cannot ask in a graph.
_AUTOCAST_DEVICES = frozenset(
    name for name in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(name)
)


class World(Enum):
    """Where a call runs: how values are checked there, and what may compute."""

    EAGER = "values are read, and memory may be handed to kernels"
    COMPILED = "torch.compile: the library's operators stand in the graph and check values when it runs"
    RECORDED = "make_fx, or a transform inside a graph: checks are operators, all else is plain PyTorch"
    TRANSFORMED = "torch.func, forward mode, torch.jit.trace: values are read, all else is plain PyTorch"
    EXPORTED = "a graph that runs without this library: values are clamped, all is plain PyTorch"
    META = "there are no values: plain PyTorch"


def world_of(tensor: Tensor) -> World:
    """Asked once by whoever is called from outside, and passed on."""
    if torch.compiler._is_exporting_flag:  # the function of this name says yes in every graph of torch 2.10
        return World.EXPORTED
    if tensor.is_meta:
        return World.META
    # By level: the stack of interpreters itself is something else to torch.compile.
    transformed = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
    if torch.compiler.is_compiling():
        return World.RECORDED if transformed else World.COMPILED
    if torch._C._get_dispatch_mode(_PROXY) is not None:
        return World.RECORDED
    recorded = torch._C._get_tracing_state() is not None
    plain = type(tensor) in (Tensor, torch.nn.Parameter) or getattr(type(tensor), "tensorbed_plain", False)
    # Where fake tensors are made from real ones, the tensor itself does not tell that its values cannot be read.
    if not plain or torch._C._get_dispatch_mode(_FAKE) is not None:
        return World.RECORDED if transformed or recorded else World.COMPILED
    return World.TRANSFORMED if transformed or recorded else World.EAGER


class Asked(NamedTuple):
    """Rows or bags that are asked of one table."""

    table: Any  # the structure: its size, and rows in plain PyTorch (``rows_of``)
    params: Mapping[str, Tensor]  # its tensors by name
    made_of: Any  # what backends compute with instead; None where there is plain PyTorch alone
    ids: Tensor  # (n,) int64, of any value
    impl: str = "auto"  # or the backend asked for
    padding_idx: int | None = None
    padding_row: Tensor | None = None  # (cols,), shown where an index is padding_idx, None for zeros; not of bags
    bounds: Tensor | None = None  # (bags + 1,) int64, checked, where each bag begins and the last one ends
    weights: Tensor | None = None  # (n,)
    mode: str = "sum"  # how the rows of a bag are pooled
    by_frequency: bool = False  # whether the gradient of a row is divided by how often it is asked for; of bags only
    checked: bool = False  # whether the ids are known to be in range


class Backend(ABC):
    """How rows and bags are computed. Its name is what ``impl=`` takes.

    Indices mostly come unchecked: a backend refuses those outside the table, in whatever way its world has.
    """

    name: str
    limits = "with everything"
    scores = False  # whether heads take its name, too: of the library's own, whose ways to score know it
    checks_on_device = False  # whether an index outside the table is the device's error, which names no number

    def absent(self, device: torch.device | None = None) -> str:
        """Why it cannot be had, on this device or on any, and what to do, in one line; empty where it can."""
        return ""

    @abstractmethod
    def knows(self, making: type | None, device: torch.device | None = None) -> bool:
        """Whether it computes tables that are made of this: by its name, or where there is a device by ``"auto"``."""

    def shares(self, making: type | None) -> bool:
        """Whether it computes a row once, however often it is asked for."""
        return making is not None

    @abstractmethod
    def why(self, device: torch.device) -> str:
        """Why it is taken where ``impl="auto"``."""

    @abstractmethod
    def takes(self, asked: Asked, world: World) -> bool:
        """Whether it computes this, here."""

    def compute(self, asked: Sequence[Asked], world: World) -> Tensor:  # -> (n or bags, sum of cols)
        """The rows of each table, or the bags where there are bounds, side by side, differentiable."""
        if len(asked) == 1:
            return self.compute_table(asked[0], world)
        return torch.cat([self.compute_table(table, world) for table in asked], 1)

    @abstractmethod
    def compute_table(self, asked: Asked, world: World) -> Tensor:  # -> (n or bags, cols)
        """The same of one table."""


BACKENDS: dict[str, Backend] = {}  # by name, from the plainest, which takes everything, to the one that is asked first


def chosen(asked: Asked, world: World) -> Backend:
    """The backend that computes this: the one that is named, else the first that takes it."""
    if asked.impl != "auto":
        named = BACKENDS[asked.impl]
        if named.takes(asked, world):
            return named
        if world is World.COMPILED or (world is World.EAGER and asked.ids.numel()):
            if why := named.absent(asked.ids.device):
                raise ValueError(f'impl="{named.name}" cannot be had: {why}; or use impl="auto".')
            tensors = (*asked.params.values(), asked.ids)
            kinds = {f"{type(t).__name__} of {str(t.dtype)[6:]} on {t.device}" for t in tensors}
            raise ValueError(
                f'impl="{named.name}" computes {named.limits}, got {asked.ids.numel()} indices and '
                f'{", ".join(sorted(kinds))}; use impl="auto".'
            )
        return BACKENDS["reference"]  # where only plain PyTorch can follow, or there is nothing to compute
    for backend in reversed(BACKENDS.values()):
        if backend.takes(asked, world):
            break
    return backend


def handed_on(asked: Asked, world: World) -> Asked:
    """What to choose a backend for: the same, or what its structure asks of another table, see ``hands_on``."""
    while asked.table.hands_on and world is World.EAGER and asked.impl == "auto":
        asked = asked.table.handed_on(asked)
    return asked


def checked_indices(index: Tensor, rows: int, world: World, owner: str = "") -> Tensor:  # (*) -> (n,) int64
    """Flat int64 indices in ``[0, rows)``; ``IndexError`` otherwise, eager and compiled, naming any owner.

    Exported graphs cannot raise: there indices are clamped into the range. On the meta device there are no values.
    """
    require_integer_indices(index)
    flat = index.reshape(-1)
    if world is World.EXPORTED:
        return flat.clamp(0, rows - 1).long()
    if world is World.COMPILED or world is World.RECORDED:
        checked: Tensor = _check_op(flat, rows, owner)
        return checked
    if world is not World.META:
        with naming(owner):
            check_range(of_all_examples(flat), rows)
    return flat.long()


def of_all_examples(tensor: Tensor) -> Tensor:  # (*shape) -> (*examples, *shape)
    """The values of a tensor of which vmap shows one example at a time."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        at = functorch.maybe_get_bdim(tensor)
        tensor = functorch.get_unwrapped(tensor)
        tensor = tensor if at < 0 else tensor.movedim(at, 0)
    return tensor


@torch.library.custom_op("tensorbed::check_indices", mutates_args=())
def _check_op(index: Tensor, rows: int, owner: str = "") -> Tensor:
    with naming(owner):
        return check_range(index, rows).to(torch.int64, copy=True)


@_check_op.register_fake
def _(index: Tensor, rows: int, owner: str = "") -> Tensor:
    return torch.empty_like(index, dtype=torch.int64)


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward pass without one of its own, which says so when it is differentiated, and batches no gradients.

    It is written as ``backward(ctx, saved, *grads)``: what was saved is unpacked once, as checkpointing wants it.
    ``torch.autograd.function.once_differentiable`` does where the incoming gradient requires one; a loss's does not,
    and its second derivative would be left out without a word. Gradients depend on what was saved for them, too: who
    asks for the second derivative with respect to a parameter comes past here only if they do in the graph.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if any(_is_batched(g) for g in grads if isinstance(g, Tensor)):
            raise RuntimeError('gradients are not batched this way; use impl="reference" under vmap of a gradient.')
        saved = ctx.saved_tensors
        with torch.no_grad():
            made = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return made
        sources = [t for t in (*grads, *saved) if isinstance(t, Tensor) and t.requires_grad]
        return tuple(differentiated_once(g, sources) if isinstance(g, Tensor) else g for g in made)

    return wrapped


def _is_batched(grad: Tensor) -> bool:
    """By torch.func.vmap, or as autograd does it for ``is_grads_batched`` and ``jacobian(vectorize=True)``."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(grad) or functorch.is_legacy_batchedtensor(grad)


def no_second_derivative(ctx: Any, *grads: Any) -> Any:
    """The backward pass of what has none, of an operator for instance that computes gradients."""
    raise RuntimeError(
        'no second derivative is computed this way; use impl="reference" for create_graph=True, and where '
        "loss_without_logits is on, loss_without_logits(model, on=False)."
    )


class _Refused(torch.autograd.Function):
    """A gradient that depends on the sources, in a way that is not known."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()  # a view could not be written to in place

    backward = staticmethod(no_second_derivative)


def differentiated_once(gradient: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """The gradient, which refuses to be differentiated; it is in the graph even where no source is known."""
    known = sources or [torch.empty(0, requires_grad=True)]
    refused: Tensor = _Refused.apply(gradient.detach(), *known)  # type: ignore[no-untyped-call]
    return refused


def recording(on: bool) -> AbstractContextManager[object]:
    """Gradients recorded, or not, in here, also below an operator, where torch by itself records none."""
    return _recording(on) if on or torch.is_grad_enabled() else nullcontext()


@contextmanager
def _recording(on: bool) -> Iterator[None]:
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
