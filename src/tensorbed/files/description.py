"""Layers as plain data and back, what files keep of a layer besides its tensors; and layers into a model."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tensorbed.checks import require_number
from tensorbed.functional import check_impl
from tensorbed.nn.bag import EmbeddingBag, check_mode
from tensorbed.nn.embedding import Embedding, ScaledEmbedding
from tensorbed.nn.head import Head
from tensorbed.nn.options import check_options
from tensorbed.nn.table import StructuredTable
from tensorbed.printable import shortened
from tensorbed.structures import Structure
from tensorbed.structures.registry import read, registered
from tensorbed.vocabulary.checks import check_budget
from tensorbed.vocabulary.head_calls import check_impl as check_head_impl

# The classes by name, the most special first, and what each has besides a structure and a dtype.
_KINDS: dict[str, type[StructuredTable]] = {
    "EmbeddingBag": EmbeddingBag,
    "Head": Head,
    "ScaledEmbedding": ScaledEmbedding,
    "Embedding": Embedding,
}
_TABLE = ("padding_idx", "scale_grad_by_freq", "std")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "Embedding": (*_TABLE, "impl"),
    "ScaledEmbedding": (*_TABLE, "impl", "embed_scale", "rounds_scale"),
    "EmbeddingBag": (*_TABLE, "impl", "mode", "include_last_offset"),
    "Head": ("std", "impl", "memory_budget", "bias"),
}
# A head has a padding row where it is tied to a table that has one, and keeps it when it is saved without that table.
_OPTIONAL: dict[str, tuple[str, ...]] = {"Head": ("padding_idx",)}
_FLAGS = ("scale_grad_by_freq", "include_last_offset", "bias", "rounds_scale")
_LATER = ("mode", "include_last_offset", "embed_scale", "rounds_scale")  # not of every table
_DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


def described(layer: StructuredTable) -> dict[str, Any]:
    """Class, structure, dtype and options of a layer, for JSON."""
    kind = kind_of(layer)
    if kind is not None and type(layer).forward is not _KINDS[kind].forward:
        raise TypeError(f"a {type(layer).__name__} has a forward of its own, which a file cannot hold.")
    text, own = layer.structure.text, type(layer.structure)
    known = registered().get(layer.structure.kind)
    if known is not own and known is not None and known.__qualname__ == own.__qualname__:
        raise TypeError(
            f"a {type(layer).__name__} over a {own.__qualname__} that was registered again since; make the layer anew."
        )
    if kind is None or text is None or known is not own:
        raise TypeError(f"a {type(layer).__name__} over {layer.structure.kind} cannot be described; register its kind.")
    options = {name: _plain(name, getattr(layer, name)) for name in _OPTIONS[kind]}
    options |= {name: value for name in _OPTIONAL.get(kind, ()) if (value := getattr(layer, name)) is not None}
    return {"layer": kind, "structure": text, "dtype": str(layer._dtype)[6:], "options": options}


def kind_of(layer: StructuredTable) -> str | None:
    """The name under which layers like this one are described."""
    return next((name for name, cls in _KINDS.items() if isinstance(layer, cls)), None)


def _plain(name: str, value: Any) -> Any:
    """An option as JSON has it, numpy's numbers too."""
    if name == "bias":
        return value is not None
    if name in _FLAGS:
        return bool(value)
    if value is None or isinstance(value, str):
        return value
    return value.__index__() if hasattr(value, "__index__") else float(value)


def take_options(layer: StructuredTable, other: StructuredTable) -> None:
    """Make a layer behave as another of its kind and structure does."""
    for name in {*_OPTIONS[kind_of(other) or ""], *_OPTIONAL.get(kind_of(other) or "", ())} - {"bias"}:
        setattr(layer, name, getattr(other, name))


def owner(layer: StructuredTable) -> StructuredTable:
    """The layer whose tensors these are: itself, or what it is tied to."""
    while isinstance(layer, Head) and layer._tied:
        layer = layer._tied[0]
    return layer


def identity(layer: StructuredTable) -> Hashable:
    """Equal for layers that hold the same tensors, tied by us or by others."""
    layer, specs = owner(layer), layer.structure.tensors()
    # Moves copy what is not a Parameter.
    kept = [spec for spec in specs if spec.trainable] or specs
    return tuple(id(getattr(layer, spec.name)) for spec in kept)


def rebuilt(description: Any, device: torch.device | str | None = "meta") -> StructuredTable:
    """A layer from its description, its tensors still empty. ``ValueError`` where the description is none."""
    try:
        kind, dtype = _KINDS[description["layer"]], _DTYPES[description["dtype"]]
        structure, options = read(description["structure"]), dict(description["options"])
        _check_options(description["layer"], structure, options)
        layer = kind.__new__(kind)
        later = {name: options.pop(name) for name in _LATER if name in options}
        bias, budget, impl = options.pop("bias", False), options.pop("memory_budget", None), options.pop("impl")
        layer._set_up(structure, device, dtype, **options)
        for name, value in later.items():
            setattr(layer, name, value)
        if isinstance(layer, Head):
            layer._finish(bias, impl, budget)
        else:
            layer.impl = impl
        return layer
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, RuntimeError) as error:
        reason = shortened(str(error), 300)
        raise ValueError(f"not a description of a layer that this version knows ({reason}).") from error


def _check_options(kind: str, structure: Structure, options: Mapping[str, Any]) -> None:
    """As strict as the layer's own constructor: all that it asks, of the type that it asks."""
    needed = set(_OPTIONS[kind])
    if unknown := set(options) - needed - set(_OPTIONAL.get(kind, ())):
        raise ValueError(f"unknown options {', '.join(sorted(unknown))}")
    if lacking := needed - set(options):
        raise ValueError(f"without options {', '.join(sorted(lacking))}")
    for name in _FLAGS:
        if name in options and not isinstance(options[name], bool):
            raise TypeError(f"{name} must be true or false, got {options[name]!r}")
    check_options(std=options["std"])
    if "mode" in options:
        check_mode(options["mode"], options["scale_grad_by_freq"])
    if "embed_scale" in options:
        require_number(options["embed_scale"], "embed_scale", low=-math.inf)
    if kind == "Head":
        check_budget(options["memory_budget"])
        check_head_impl(options["impl"])
    else:
        check_impl(structure, options["impl"])


def put(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Set modules by their full names, all or, where the model refuses one, none."""
    before = {name: model.get_submodule(name) for name in layers}
    try:
        _set(model, layers)
    except Exception:
        with suppress(Exception):
            _set(model, before)
        raise


def _set(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
