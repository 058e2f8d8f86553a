"""Layers as plain data and back, what files keep of a layer besides its tensors; and layers into a model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tensorbed.nn.bag import EmbeddingBag
from tensorbed.nn.embedding import Embedding, ScaledEmbedding
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable
from tensorbed.structures.registry import read, registered

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
    "ScaledEmbedding": (*_TABLE, "impl", "embed_scale"),
    "EmbeddingBag": (*_TABLE, "impl", "mode", "include_last_offset"),
    "Head": ("padding_idx", "std", "impl", "memory_budget"),
}
_LATER = ("mode", "include_last_offset", "embed_scale")  # not of every table
_DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


def described(layer: StructuredTable) -> dict[str, Any]:
    """Class, structure, dtype and options of a layer, for JSON."""
    kind = next((name for name, cls in _KINDS.items() if isinstance(layer, cls)), None)
    if type(layer).forward is not _KINDS[kind or "Embedding"].forward:
        raise TypeError(f"a {type(layer).__name__} has a forward of its own, which a file cannot hold.")
    text = layer.structure.text
    if kind is None or text is None or registered().get(layer.structure.kind) is not type(layer.structure):
        raise TypeError(f"a {type(layer).__name__} over {layer.structure.kind} cannot be described; register its kind.")
    found: dict[str, Any] = {"layer": kind, "structure": text, "dtype": str(layer._dtype)[6:]}
    found["options"] = {name: getattr(layer, name) for name in _OPTIONS[kind]}
    if isinstance(layer, Head):
        found["options"]["bias"] = layer.bias is not None
    return found


def rebuilt(description: Any, device: torch.device | str | None = "meta") -> StructuredTable:
    """A layer from its description, its tensors still empty. ``ValueError`` where the description is none."""
    try:
        kind, dtype = _KINDS[description["layer"]], _DTYPES[description["dtype"]]
        structure, options = read(description["structure"]), dict(description["options"])
        unknown = set(options) - {*_OPTIONS[description["layer"]], "bias"}
        if unknown:
            raise ValueError(f"unknown options {', '.join(sorted(unknown))}")
        layer = kind.__new__(kind)
        later = {name: options.pop(name) for name in _LATER if name in options}
        bias, budget, impl = (
            options.pop(n, d) for n, d in (("bias", False), ("memory_budget", None), ("impl", "auto"))
        )
        layer._set_up(structure, device, dtype, **options)
        for name, value in later.items():
            setattr(layer, name, value)
        if isinstance(layer, Head):
            layer._finish(bool(bias), impl, budget)
        else:
            layer.impl = impl
        return layer
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, RuntimeError) as error:
        raise ValueError(f"not a description of a layer that this version knows ({error}).") from error


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
