"""The full table as a tensor that is made only when somebody computes with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from tensorbed.nn.table import StructuredTable

# What a tensor says of itself without its numbers.
_PROPERTIES = ("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_meta", "is_cpu", "is_cuda")
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
_GRAD = getattr(Tensor, "grad").__get__  # noqa: B009
# Where torch refuses what is no Parameter, having asked for its type.
_ASSIGNING = (nn.Module.__setattr__.__code__, nn.Module.register_parameter.__code__)
_TIE = "tie a head by tb.Head.tied_to(embedding), or make both ends at once by tb.embedding_and_head(..., tied=True)"
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)
_FREEZING = (getattr(Tensor, "requires_grad").__set__, Tensor.requires_grad_)  # noqa: B009


class LazyTensor(Tensor):
    """Known in shape, dtype and device; its numbers are made (:meth:`_numbers`) by whoever computes with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next(iter((*args, *kwargs.values())), None)
        answer = first._handled(func, args, kwargs) if isinstance(first, LazyTensor) else NotImplemented
        return func(*with_numbers(args), **with_numbers(kwargs)) if answer is NotImplemented else answer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*with_numbers(args), **with_numbers(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._numbers().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = self._numbers().__deepcopy__(memo)
        return copied

    def _numbers(self) -> Tensor:
        raise NotImplementedError

    def _handled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call whose first argument this is, where it needs no numbers; ``NotImplemented`` else."""
        return NotImplemented


def with_numbers(given: Any) -> Any:
    """The same with numbers for all that is lazy."""
    return tree_map_only(LazyTensor, lambda lazy: lazy._numbers(), given)


class LazyTable(LazyTensor):
    """``layer.weight``.

    Freezing it freezes the tensors it is made from, and its ``data_ptr`` is the first one's: two layers that share
    their tensors have the same. It cannot be written to.
    """

    _layer: StructuredTable

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FREEZING:
            _refuse_writing(func, args, kwargs or {})
        if func is Tensor.type:
            _refuse_assigning(args[0])
        return super().__torch_function__(func, types, args, kwargs)

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
        return _read_only(self._layer._table(), self._layer)

    def _handled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is Tensor.data_ptr:
            return next(iter(self._layer.params().values())).data_ptr()
        if func in _FREEZING:
            return self._freeze(*args[1:], **kwargs)
        if func in _HOOKS:
            raise RuntimeError(
                f"{_made_from(self._layer)} for each use, and no gradient of it is kept ({func.__name__}); hook those, "
                "or what the layer gives: its rows have the gradients that rows of a dense weight would have."
            )
        return None if func == _GRAD else NotImplemented

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """The one method that torch does not ask a subclass about."""
        _refuse_writing_to(self, Tensor.set_)

    def _freeze(self, requires_grad: bool = True) -> Tensor:
        for spec in self._layer.structure.tensors():
            if spec.trainable:
                getattr(self._layer, spec.name).requires_grad_(requires_grad)
        return LazyTable(self._layer)


class _ReadOnly(Tensor):
    """``layer.weight.data`` or ``layer.weight[3]``: numbers to read. A copy is an ordinary tensor.

    What is written to a table that was made for one use, or to a view of it, would be lost. Operators declare what they
    write to, so that all of them are refused in one place, whatever they are called and wherever the table stands.
    """

    tensorbed_plain = True  # see dispatch.world_of
    _layer: StructuredTable

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse_writing(func, args, kwargs)
        if func is Tensor.type:
            _refuse_assigning(args[0])
        if func in (Tensor.numpy, Tensor.__array__):
            array = func(_writable(args[0]), *args[1:], **kwargs)
            array.flags.writeable = False
            return array
        if func in (Tensor.tolist, Tensor.__repr__, Tensor.__format__):  # of ordinary tensors only
            return func(_writable(args[0]), *args[1:], **kwargs)
        if func is Tensor.__dlpack__:  # who takes it need not know that it is not to be written to
            return func(args[0]._copied(), *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                _refuse_writing_to(args[at] if at < len(args) else kwargs.get(argument.name), func)
        result = func(*tree_map_only(_ReadOnly, _writable, args), **tree_map_only(_ReadOnly, _writable, kwargs))
        tables = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _ReadOnly)]
        return tree_map_only(Tensor, lambda tensor: _kept_from_writing(tensor, tables), result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._copied()

    def _copied(self) -> Tensor:
        """An ordinary leaf, as a copy of a dense weight is."""
        return self.detach().clone().requires_grad_(self.requires_grad)


def _read_only(table: Tensor, layer: StructuredTable) -> _ReadOnly:
    view = table.as_subclass(_ReadOnly)
    view._layer = layer
    return view


def _writable(table: _ReadOnly) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return table.as_subclass(Tensor)


def _kept_from_writing(tensor: Tensor, tables: list[_ReadOnly]) -> Tensor:
    """The tensor, read-only where it is a view of one of the tables."""
    table = next((table for table in tables if torch._C._is_alias_of(tensor, table)), None)  # type: ignore[attr-defined]
    return tensor if table is None else _read_only(tensor, table._layer)


def _refuse_writing(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Before torch refuses for reasons of its own, and where a method is no operator: ``weight.data = ...``."""
    name = getattr(func, "__name__", "")
    if name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")):
        _refuse_writing_to(args[:1], func)
    _refuse_writing_to(kwargs.get("out"), func)


def _refuse_writing_to(written: Any, func: Any) -> None:
    for leaf in tree_leaves(written):
        if isinstance(leaf, (LazyTable, _ReadOnly)):
            name = type(leaf._layer).__name__
            tied = f" Or {_TIE}." if func is Tensor.requires_grad_ else ""  # what nn.Parameter(weight) does
            raise RuntimeError(
                f"{_made_from(leaf._layer)} and cannot be written to ({func.__name__}); write those, or fit a table "
                f"with {name}.from_pretrained. A copy of it, weight.detach().clone(), is an ordinary tensor.{tied}"
            )


def _refuse_assigning(weight: LazyTable | _ReadOnly) -> None:
    """What ``lm_head.weight = embedding.weight`` should have been, where torch only says that it takes a Parameter.

    The modules are torch's own, and all that they ask of the tensor before they refuse it is its type: whether they ask
    is seen by who called.
    """
    asking = sys._getframe(2)
    if asking.f_code is not torch.typename.__code__ or asking.f_back is None or asking.f_back.f_code not in _ASSIGNING:
        return
    module, name = (asking.f_back.f_locals[local] for local in ("self", "name"))
    raise TypeError(
        f"{type(module).__name__}.{name} takes a Parameter, and {_made_from(weight._layer)} for each use; {_TIE}."
    )


def refuse_setting(layer: StructuredTable) -> NoReturn:
    """For ``layer.weight = ...``, whatever it is."""
    raise AttributeError(
        f"{_made_from(layer)} and cannot be set; {_TIE}. For the numbers of a dense table there is "
        f"{type(layer).__name__}.from_pretrained(table, ...)."
    )


def _made_from(layer: StructuredTable) -> str:
    names = ", ".join(spec.name for spec in layer.structure.tensors())
    return f"weight of {type(layer).__name__} is made from {names}"
