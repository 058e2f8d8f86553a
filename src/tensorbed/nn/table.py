"""The module that owns a structured table's tensors: what every layer over a table has in common."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor, nn

from tensorbed.checks import require_bool, require_float_dtype, require_positive, wrapped_padding_idx
from tensorbed.dispatch import World, full_precision, world_of
from tensorbed.fitting import check_table, fit_table, require_finite
from tensorbed.functional import check_impl, dtype_of
from tensorbed.nn.lazy import LazyTable, refuse_setting
from tensorbed.nn.options import (
    GLOROT,
    Deviation,
    TableOptions,
    check_options,
    options_shown,
)
from tensorbed.nn.ties import Peers, settle, shared_names
from tensorbed.structures import Format, Params, Structure, Use
from tensorbed.structures.formats import Budget, require_format
from tensorbed.vocabulary.scorer import Vocabulary

# When a layer is made: a row is stored, or nothing could come of it.
_SETTLED = ("padding_idx", "max_norm", "sparse")


class StructuredTable(nn.Module):
    """An ``I x J`` table as a structure, its tensors flat attributes of this module (``core_0``, ``core_1``, ...).

    Attributes:
        structure: the frozen description that computes with the tensors.
        padding_row: with a ``padding_idx``, the constant row shown there: zero at birth, the table's own after
            :meth:`from_pretrained`. Stored, counted, without gradient.
        fit_error: relative Frobenius error of :meth:`from_pretrained`, else ``None``.
    """

    # What a layer calls the rows and columns of its table.
    _size_names: ClassVar[tuple[str, str]] = ("num_embeddings", "embedding_dim")

    num_embeddings: int
    embedding_dim: int
    padding_row: Tensor | None
    # Layers that share tensors, this one among them. Where they are replaced in one, they are in all.
    _peers: Peers | None = None
    # By name what its format gave a table that is drawn, see Format.constants; None where the buffer holds it.
    _constants: dict[str, Tensor | None]

    @options_shown
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        format: Format,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        rows = require_positive(num_embeddings, "num_embeddings")
        cols = require_positive(embedding_dim, "embedding_dim")
        budget = _checked_budget(rows, cols, dtype or torch.get_default_dtype(), format, options)
        structure = format.bind(budget)
        if not structure.can_initialise:
            raise ValueError(f"{structure.kind} cannot be drawn at random; fit it to a table with from_pretrained.")
        constants = format.constants(structure)
        self._set_up(structure, device, budget.dtype, **options)
        self._constants.update(constants)
        self.reset_parameters()

    def _set_up(
        self,
        structure: Structure,
        device: torch.device | str | None,
        dtype: torch.dtype,
        *,
        padding_idx: int | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        std: Deviation = None,
        impl: str = "auto",
        **refused: object,
    ) -> None:
        """Become a module with empty tensors. The options were checked; what is refused was not set."""
        check_impl(structure, impl)
        super().__init__()
        self.structure = structure
        for name, size in zip(self._size_names, (structure.rows, structure.cols), strict=True):
            setattr(self, name, size)
        self.padding_idx = wrapped_padding_idx(padding_idx, structure.rows)
        self.max_norm, self.norm_type, self.sparse = None, norm_type, False
        self.scale_grad_by_freq = scale_grad_by_freq
        self.std, self.impl = std, impl
        self.fit_error: float | None = None
        self._constants = {}
        self._make_tensors(device, dtype)

    def _make_tensors(self, device: torch.device | str | None, dtype: torch.dtype) -> None:
        """Empty ones, with a padding row of zeros where there is one."""
        for spec in self.structure.tensors():
            tensor = torch.empty(spec.shape, device=device, dtype=spec.dtype or dtype)
            if spec.trainable:
                self.register_parameter(spec.name, nn.Parameter(tensor))
            else:
                self.register_buffer(spec.name, tensor)
        row = None if self.padding_idx is None else torch.zeros(self.structure.cols, device=device, dtype=dtype)
        self.register_buffer("padding_row", row)

    @classmethod
    def _fitted(
        cls,
        table: Tensor,
        format: Format,
        freeze: bool,
        dtype: torch.dtype | None,
        use: Use | None = None,
        **options: Any,
    ) -> Self:
        """The layer whose structure was fitted to ``table``; the padding row is the table's own."""
        require_bool(freeze, "freeze")
        table = check_table(table)
        budget = _checked_budget(table.shape[0], table.shape[1], dtype or table.dtype, format, options)
        fit = fit_table(table, format, dtype=budget.dtype, reserved=budget.reserved, use=use)
        layer = cls.__new__(cls)
        layer._set_up(fit.structure, table.device, budget.dtype, **options)
        with torch.no_grad():
            for name, tensor in fit.params.items():
                getattr(layer, name).copy_(tensor)
            if layer.padding_row is not None:
                require_finite(layer.padding_row.copy_(table[layer.padding_idx]), "padding_row", table)
        layer.fit_error = fit.error
        return layer.requires_grad_(not freeze)

    @torch.no_grad()
    def packed(self) -> Self:
        """The layer that is stored when training is over: frozen, smaller, and every output the same to the bit."""
        trained: Any = self.structure
        if not trained.packs:
            raise ValueError(f"a {self.structure.kind} is trained as it is stored: there is nothing to pack.")
        structure, tensors = trained.packed(self.params())
        # A copy in all but the tensors, which would be thrown away.
        layer = copy.deepcopy(self, {id(tensor): tensor for tensor in self.params().values()})
        for spec in self.structure.tensors():
            delattr(layer, spec.name)
        row, layer.structure = layer.padding_row, structure
        layer._make_tensors(next(iter(tensors.values())).device, self._dtype)
        layer.padding_row, layer.fit_error, layer._constants = row, None, {}
        for name, tensor in tensors.items():
            getattr(layer, name).copy_(tensor)
        return layer.requires_grad_(False)

    def params(self) -> dict[str, Tensor]:
        """The structure's tensors by name."""
        held, params = self._parameters, {}
        for spec in self.structure.tensors():
            tensor = held.get(spec.name)  # ten times as fast as an attribute, and a lookup has microseconds
            params[spec.name] = getattr(self, spec.name) if tensor is None else tensor
        return params

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the table anew with standard deviation ``std``, by default that of this kind of layer."""
        params: Params = {name: tensor.detach() for name, tensor in self.params().items()}
        if any(tensor.is_meta for tensor in params.values()):
            return
        if not self.structure.can_initialise:
            raise NotImplementedError(f"{self.structure.kind} cannot be drawn at random.")
        std = self._deviation()
        info = torch.finfo(self._dtype)
        if not info.tiny <= std <= info.max / 16:
            raise ValueError(f"std={std:g} is outside what a table of {self._dtype} can hold; choose another.")
        # Half precisions are drawn in single, so that rounding does not bend the scale.
        half = (torch.float16, torch.bfloat16)
        drawn = {name: t.float() if t.dtype in half else t for name, t in params.items()}
        drawn |= {name: held.to(drawn[name].device) for name, held in self._constants.items() if held is not None}
        self.structure.initialise(drawn, std)
        for name, tensor in params.items():
            tensor.copy_(drawn[name])
            if tensor.is_floating_point() and not (bool(torch.isfinite(tensor).all()) and bool(tensor.any())):
                raise ValueError(f"std={std:g} is outside what tensors of {tensor.dtype} can hold; choose another.")
        self._constants.update(dict.fromkeys(self._constants))
        if self.padding_row is not None:
            self.padding_row.zero_()
        self.fit_error = None

    def _deviation(self) -> float:
        """Of the table at birth."""
        if self.std == GLOROT:
            return float((2 / (self.structure.rows + self.structure.cols)) ** 0.5)
        return self._default_std() if self.std is None else float(self.std)

    def _default_std(self) -> float:
        """Near the best for tables that are looked up."""
        return 0.3

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTLED and name in self.__dict__:
            self._check_settled(name, value)
        else:
            super().__setattr__(name, value)

    def _check_settled(self, name: str, value: Any) -> None:
        """It is what it was, or refused."""
        check_options(**{name: value})  # what is refused at birth says why
        if name == "padding_idx" and wrapped_padding_idx(value, self.structure.rows) != self.padding_idx:
            raise AttributeError(
                f"padding_idx of {type(self).__name__} is {self.padding_idx} and cannot be changed to {value!r}: it is "
                "settled when a table is made. Set it on the dense layer before compressing it, or make this one anew."
            )

    @property
    def weight(self) -> Tensor:
        """The full table, differentiable: ``(num_embeddings, embedding_dim)``. For tests, export and inspection.

        ``layer.weight.shape`` and the like cost nothing; the numbers are made anew by each use of it. To set the table,
        use :meth:`from_pretrained`, or write the tensors it is made from (``layer.cores``).
        """
        world = world_of(next(iter(self.params().values())))
        return LazyTable(self) if world in (World.EAGER, World.META) else self._table()

    @weight.setter
    def weight(self, value: object) -> None:
        refuse_setting(self)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":  # a Parameter that is assigned comes here and not to the setter
            refuse_setting(self)
        super().register_parameter(name, param)

    def _table(self) -> Tensor:
        params = self.params()
        with full_precision(next(iter(params.values()))):
            table = self.structure.table_of(params)
        row = self.padding_row
        if row is None:
            return table
        at = torch.tensor([self.padding_idx], device=table.device)
        return table.index_copy(0, at, row[None])

    @property
    def cores(self) -> tuple[Tensor, ...]:
        """Of a tensor train or ring: the cores as in the paper, ``(R_{k-1}, I_k, J_k, R_k)``, views of the parameters.

        ``layer.cores[k].data.copy_(...)`` writes the layer; an optimiser is given ``layer.parameters()``.
        """
        cores = getattr(self.structure, "cores", None)
        if cores is None:
            names = ", ".join(spec.name for spec in self.structure.tensors())
            raise AttributeError(f"{self.structure.kind} has no cores; its tensors are {names}.")
        views: tuple[Tensor, ...] = cores(self.params())
        return views

    @property
    def compression_ratio(self) -> float:
        """Bytes of the dense table, real rows only, over the bytes stored here, padding row included."""
        return self._dense_bytes / self._stored_bytes

    @property
    def _dense_bytes(self) -> int:
        return self.structure.rows * self.structure.cols * self._dtype.itemsize

    @property
    def _stored_bytes(self) -> int:
        reserved = 0 if self.padding_row is None else self.padding_row.numel() * self.padding_row.element_size()
        return self.structure.bytes(self._dtype) + reserved

    @property
    def _stored_numbers(self) -> int:
        return self.structure.numel + (0 if self.padding_row is None else self.padding_row.numel())

    @property
    def _dtype(self) -> torch.dtype:
        return dtype_of(self.structure, self.params())

    def extra_repr(self) -> str:
        parts = [self._sizes_shown(), self.structure.kind, self.structure.describe()]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.scale_grad_by_freq:
            parts.append("scale_grad_by_freq=True")
        parts.append(f"parameters={self._stored_numbers:,}, ratio={self.compression_ratio:.4g}")
        return ", ".join(dict.fromkeys(parts))

    def _sizes_shown(self) -> str:
        return f"{self.structure.rows}, {self.structure.cols}"

    def vocabulary(self, bias: Tensor | None = None) -> Vocabulary:
        """The table as what hidden vectors are scored against, for a loss or a tied head."""
        tensors = tuple(self.params().values())
        return Vocabulary(self.structure, tensors, bias, self.padding_idx, self.padding_row)

    def _own(self) -> dict[str, Tensor | None]:
        return {**self._parameters, **self._buffers}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = self._own()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._keep_constants(before)
        settle(self, before)
        return self

    def _keep_constants(self, before: Mapping[str, Tensor | None]) -> None:
        """After a move, which may have left nothing but empty memory: constants cannot be drawn anew."""
        for name, constant in self._constants.items():
            old, new = before[name], getattr(self, name)
            if constant is None and new.is_meta:
                self._constants[name] = old
            elif constant is None and new is not old:
                new.copy_(old)

    def share(self, source: StructuredTable) -> None:
        """Hold the source's very tensors, and go on when those of either are replaced: what a tie is.

        None of them has the tensors from another, which may be on disk, or be replaced by another layer.
        """
        for name in shared_names(self):
            setattr(self, name, getattr(source, name))
        self._constants = source._constants
        deviation = source._deviation()
        if source._peers is None:
            source._peers = Peers(source)
        self._peers = source._peers
        self._peers.layers[self] = None
        if self._deviation() != deviation:  # drawn anew it is the source's table, and not a head's own
            self.std = deviation

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._peers is not None:
            self._peers.layers[self] = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        dense, before = state_dict.get(f"{prefix}weight"), self._own()
        others = [name for name in state_dict if name.startswith(prefix) and name.removeprefix(prefix) not in before]
        for name in others:
            # Empty tensors speak to those who do not know the layer, see integrations.transformers.
            if isinstance(state_dict[name], Tensor) and not state_dict[name].numel():
                del state_dict[name]
        if dense is not None and dense.numel():
            errors: list[str] = args[-1]
            errors.append(
                f'"{prefix}weight" is a dense table of shape {tuple(dense.shape)}; this layer keeps a '
                f"{self.structure.kind} of it. Fit one with {type(self).__name__}.from_pretrained(table, ...)."
            )
            return
        try:
            self._check_state(state_dict, prefix)
        except ValueError as error:
            args[-1].append(f"{prefix.removesuffix('.') or type(self).__name__}: {error}")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in self._constants if not args[-1] else ():
            if prefix + name in state_dict and not getattr(self, name).is_meta:
                self._constants[name] = None
        settle(self, before)  # tensors may have been assigned and not copied into

    def _check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """``ValueError`` for numbers that no table of this structure has; shapes are torch's to refuse."""
        state, readable = {}, True
        for spec in self.structure.tensors():
            if spec.dtype is not None:
                given = state[spec.name] = state_dict.get(prefix + spec.name, getattr(self, spec.name))
                if torch.is_tensor(given) and not torch.can_cast(given.dtype, spec.dtype):
                    raise ValueError(f"{spec.name} is {given.dtype}, and holds whole numbers: give it as {spec.dtype}.")
                readable &= type(given) in (Tensor, nn.Parameter) and not given.is_meta and given.shape == spec.shape
        if readable:
            self.structure.check_values(state)


def _checked_budget(rows: int, cols: int, dtype: torch.dtype, format: Format, options: Mapping[str, Any]) -> Budget:
    """What a structure has to keep to, once all that a layer was given has been checked."""
    require_float_dtype(dtype)
    require_format(format)
    check_options(**options)
    padded = wrapped_padding_idx(options.get("padding_idx"), rows) is not None
    return Budget(rows, cols, dtype, reserved=cols * dtype.itemsize if padded else 0)
