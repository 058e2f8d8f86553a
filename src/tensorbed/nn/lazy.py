"""The full table as a tensor that is made only when somebody computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from tensorbed.nn.table import StructuredTable

# What a tensor says of itself without its numbers.
_PROPERTIES = ("shape", "dtype", "device", "layout", "requires_grad", "ndim", "grad", "is_meta", "is_cpu", "is_cuda")
_METHODS = (
    "is_floating_point",
    "is_complex",
    "element_size",
    "size",
    "dim",
    "numel",
    "nelement",
    "get_device",
    "__len__",
)
_ANSWERED: frozenset[Callable[..., Any]] = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES] + [getattr(Tensor, name) for name in _METHODS]
)
_FREEZING = (getattr(Tensor, "requires_grad").__set__, Tensor.requires_grad_)  # noqa: B009


class LazyTensor(Tensor):
    """Known in shape, dtype and device; its numbers are made (:meth:`_numbers`) by whoever computes with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(kwargs.get("out"), LazyTensor):
            kwargs["out"]._be_written(func)
        first = next(iter((*args, *kwargs.values())), None)
        found = first._handled(func, args, kwargs) if isinstance(first, LazyTensor) else NotImplemented
        return func(*_made(args), **_made(kwargs)) if found is NotImplemented else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_made(args), **_made(kwargs or {}))

    def _numbers(self) -> Tensor:
        raise NotImplementedError

    def _be_written(self, func: Any) -> None:
        """Told before something is written to it."""

    def _handled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call whose first argument this is, where it needs no numbers; ``NotImplemented`` else."""
        return NotImplemented


def _made(given: Any) -> Any:
    return tree_map_only(LazyTensor, lambda lazy: lazy._numbers(), given)


class LazyTable(LazyTensor):
    """``layer.weight``.

    Freezing it freezes the tensors it is made from, and its ``data_ptr`` is the first one's: two layers that share
    their tensors have the same. It cannot be written to.
    """

    _layer: StructuredTable

    @staticmethod
    def __new__(cls, layer: StructuredTable) -> LazyTable:
        own = list(layer.params().values())
        made: LazyTable = Tensor._make_wrapper_subclass(
            cls,
            (layer.structure.rows, layer.structure.cols),
            dtype=layer._dtype,
            device=own[0].device,
            requires_grad=any(tensor.requires_grad for tensor in own),
        )
        made._layer = layer
        return made

    def _numbers(self) -> Tensor:
        return self._layer._table()

    def _be_written(self, func: Any) -> None:
        _refuse(func, self._layer)

    def _handled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is Tensor.data_ptr:
            return next(iter(self._layer.params().values())).data_ptr()
        if func in _FREEZING:
            return self._freeze(*args[1:], **kwargs)
        _refuse_writing(func, self._layer)
        if not args:
            return NotImplemented
        table = self._numbers()
        return _kept_from_writing(func(table, *_made(args[1:]), **_made(kwargs)), table, self._layer)

    def _freeze(self, requires_grad: bool = True) -> Tensor:
        for spec in self._layer.structure.tensors():
            if spec.trainable:
                getattr(self._layer, spec.name).requires_grad_(requires_grad)
        return LazyTable(self._layer)


def _kept_from_writing(made: Any, table: Tensor, layer: StructuredTable) -> Any:
    """What is written to a view of a table that was made for it alone would be lost."""
    if not isinstance(made, Tensor) or made.untyped_storage().data_ptr() != table.untyped_storage().data_ptr():
        return made
    view = made.as_subclass(_ReadOnly)
    view._layer = layer
    return view


class _ReadOnly(Tensor):
    """``layer.weight.data`` or ``layer.weight[3]``: numbers to read. A copy is an ordinary tensor."""

    tensorbed_plain = True  # see dispatch.is_traced
    _layer: StructuredTable

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(iter((*args, *kwargs.values())), None)
        if isinstance(first, _ReadOnly):
            _refuse_writing(func, first._layer)
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **kwargs)
            return _kept_from_writing(made, first, first._layer) if isinstance(first, _ReadOnly) else made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._copied()

    def _copied(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor).clone()


def _refuse_writing(func: Any, layer: StructuredTable) -> None:
    name = getattr(func, "__name__", "")
    if name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")):
        _refuse(func, layer)


def _refuse(func: Any, layer: StructuredTable) -> None:
    names = ", ".join(spec.name for spec in layer.structure.tensors())
    raise RuntimeError(
        f"weight of {type(layer).__name__} is made from {names} and cannot be written to ({func.__name__}); write "
        f"those, or fit a table with {type(layer).__name__}.from_pretrained."
    )
