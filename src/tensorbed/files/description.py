"""Layers as plain data and back: what files and configs keep of a layer besides its tensors, and whose these are."""

import math
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tensorbed.checks import require_bool, require_number
from tensorbed.functional import check_mode, check_score_impl
from tensorbed.nn.embedding import Embedding, EmbeddingBag, ScaledEmbedding
from tensorbed.nn.head import Head
from tensorbed.nn.options import check_options
from tensorbed.nn.shorthands import TTEmbedding, TTEmbeddingBag, TTHead
from tensorbed.nn.table import StructuredTable
from tensorbed.nn.ties import identity
from tensorbed.printable import shortened
from tensorbed.structures.registry import read, registered
from tensorbed.vocabulary.loss import check_budget

VERSION = 2  # of descriptions; those of 1 name a layer's other names "same_as"

# What layers have besides a structure and a dtype, by class, the most special first.
_TABLE = ("padding_idx", "scale_grad_by_freq", "std", "impl")
_BAG = (*_TABLE, "mode", "include_last_offset")
_HEAD = ("std", "impl", "memory_budget", "bias")
_OPTIONS: dict[type[StructuredTable], tuple[str, ...]] = {
    **dict.fromkeys((TTEmbeddingBag, EmbeddingBag), _BAG),
    **dict.fromkeys((TTHead, Head), _HEAD),
    ScaledEmbedding: (*_TABLE, "embed_scale", "rounds_scale"),
    **dict.fromkeys((TTEmbedding, Embedding), _TABLE),
}
# A head has a padding row where it is tied to a table that has one, and keeps it when it is saved without that table.
_OPTIONAL = "padding_idx"
_FLAGS = ("scale_grad_by_freq", "include_last_offset", "bias", "rounds_scale")
_DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


def tables(model: nn.Module) -> dict[str, StructuredTable]:
    """Our layers in a model, by every name they have."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, StructuredTable)}


def ties(layers: Mapping[str, StructuredTable]) -> dict[str, str]:
    """For each layer that holds another's tensors the name of that other: the first of them, tables before heads."""
    first: dict[Hashable, str] = {}
    by_rank = sorted(layers.items(), key=lambda item: isinstance(item[1], Head))
    names = {name: first.setdefault(identity(layer), name) for name, layer in by_rank}
    return {name: names[name] for name in layers if names[name] != name}


def descriptions(layers: Mapping[str, StructuredTable]) -> dict[str, dict[str, Any]]:
    """Class, structure, dtype and options of each layer and whose tensors it holds, for JSON."""
    sources = ties(layers)
    return {name: {**described(layer), "tied_to": sources.get(name)} for name, layer in layers.items()}


def described(layer: StructuredTable) -> dict[str, Any]:
    """The same of one layer, without its ties."""
    kind = kind_of(layer)
    if kind is not None and type(layer).forward is not kind.forward:
        raise TypeError(f"a {type(layer).__name__} has a forward of its own, which a file cannot hold.")
    text, own = layer.structure.text, type(layer.structure)
    known = registered().get(layer.structure.kind)
    if known is not None and known is not own and known.__qualname__ == own.__qualname__:
        what = f"a {own.__qualname__} that was registered again since; make the layer anew"
        raise TypeError(f"a {type(layer).__name__} over {what}.")
    if kind is None or text is None or known is not own:
        raise TypeError(f"a {type(layer).__name__} over {layer.structure.kind} cannot be described; register its kind.")
    options = {name: _plain(name, getattr(layer, name)) for name in _OPTIONS[kind]}
    options |= {} if layer.padding_idx is None else {_OPTIONAL: layer.padding_idx}
    return {"layer": kind.__name__, "structure": text, "dtype": str(layer._dtype)[6:], "options": options}


def kind_of(layer: StructuredTable) -> type[StructuredTable] | None:
    """The class as which a layer is described."""
    return next((kind for kind in _OPTIONS if isinstance(layer, kind)), None)


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
    kind = kind_of(other)
    assert kind is not None
    for name in {*_OPTIONS[kind], _OPTIONAL} - {"bias"}:
        vars(layer)[name] = getattr(other, name)  # past what is settled at birth: the padding row was copied along


def checked(version: Any, layers: Any, place: str) -> dict[str, dict[str, Any]]:
    """Descriptions that somebody may have edited, as :func:`descriptions` makes them today; ``place`` has them."""
    parts = f"{place} has not the parts that it should have:"
    if type(version) is not int or version < 1:
        raise ValueError(f"{parts} version {version!r} is no version.")
    if version > VERSION:
        raise ValueError(
            f"{place} has version {version} of the format, this tensorbed reads up to {VERSION}: update it."
        )
    if not isinstance(layers, Mapping) or not layers or not all(isinstance(one, Mapping) for one in layers.values()):
        raise ValueError(f"{parts} layers must be descriptions of layers by name, as tensorbed wrote them.")
    found = {}
    for name, one in layers.items():
        same, to = one.get("same_as", name), one.get("tied_to")
        own = {key: value for key, value in one.items() if key != "same_as"}
        found[name] = {**own, "tied_to": same if to is None and same != name else to}
    for name, one in found.items():
        to = one["tied_to"]
        if to is not None and (not isinstance(to, str) or found.get(to, one)["tied_to"] is not None):
            raise ValueError(f"{place} ties {name!r} to {to!r}, which is no table of its shape.")
    return found


def rebuilt(description: Mapping[str, Any], device: torch.device | str | None = "meta") -> StructuredTable:
    """A layer from its description, its tensors still empty. ``ValueError`` where the description is none."""
    try:
        kinds = {kind.__name__: kind for kind in _OPTIONS}
        kind, dtype = kinds[description["layer"]], _DTYPES[description["dtype"]]
        structure, options = read(description["structure"]), dict(description["options"])
        _check_options(kind, options)
        layer = kind.__new__(kind)
        layer._set_up(structure, device, dtype, **options)
        if isinstance(layer, Head):
            layer._finish(options["bias"], options["impl"], options["memory_budget"])
        for name in set(options) - {*_TABLE, "bias", "memory_budget"}:
            setattr(layer, name, options[name])
        return layer
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, RuntimeError) as error:
        reason = shortened(str(error), 300)
        raise ValueError(f"not a description of a layer that this version knows ({reason}).") from error


def _check_options(kind: type[StructuredTable], options: Mapping[str, Any]) -> None:
    """As strict as the layer's own constructor: all that it asks, of the type that it asks."""
    needed, given = set(_OPTIONS[kind]), set(options)
    for what, names in (("unknown", given - needed - {_OPTIONAL}), ("without", needed - given)):
        if names:
            raise ValueError(f"{what} options {', '.join(sorted(names))}")
    for name in given.intersection(_FLAGS):
        require_bool(options[name], name)
    check_options(std=options["std"])
    if "mode" in options:
        check_mode(options["mode"], options["scale_grad_by_freq"])
    if "embed_scale" in options:
        require_number(options["embed_scale"], "embed_scale", low=-math.inf)
    if issubclass(kind, Head):
        check_budget(options["memory_budget"])
        check_score_impl(options["impl"])


def check_reducers(model: nn.Module, replaced: Mapping[str, nn.Module]) -> None:
    """What averages gradients over processes goes on with the Parameters that it found."""
    reduced = {
        part
        for each in model.modules()
        if isinstance(each, nn.parallel.DistributedDataParallel)
        for part in each.modules()
    }
    if names := [name for name, module in replaced.items() if module in reduced]:
        raise ValueError(
            f"{', '.join(names)} would be replaced below a DistributedDataParallel, which would not average the new "
            "layers' gradients; do this to the model that is in it, its .module, and wrap it then."
        )


def put(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Set modules by their full names, all or, where the model refuses one, none."""
    before = {name: model.get_submodule(name) for name in layers}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
    except Exception:
        with suppress(Exception):
            for name, layer in before.items():
                model.set_submodule(name, layer)
        raise
