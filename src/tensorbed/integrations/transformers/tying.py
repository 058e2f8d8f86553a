"""Layers as transformers ties them, by a map of parameter names, which has to name ours, and as it resizes them."""

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tensorbed.compress.resizing import resized
from tensorbed.files.description import put, tables, ties
from tensorbed.nn.table import StructuredTable
from tensorbed.nn.ties import identity, shared_names, tied_layers


def separate(model: nn.Module) -> None:
    """Make every place a layer of its own: transformers and accelerate know layers by their names."""
    placed: set[StructuredTable] = set()
    for name, layer in tables(model).items():
        if layer in placed:
            twin = copy.deepcopy(layer, {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())})
            twin.share(layer)
            put(model, {name: twin})
        placed.add(layer)


def tie_weights(model: PreTrainedModel, *args: Any, **options: Any) -> None:
    """``model.tie_weights()``, after which layers that share tensors go on when they are moved."""
    type(model).tie_weights(model, *args, **options)
    share_tensors(model, ties(tables(model)))


def share_tensors(model: nn.Module, sources: Mapping[str, str]) -> None:
    """Each layer holds the tensors of its source."""
    found = tables(model)
    for name, source in sources.items():
        found[name].share(found[source])


def untied(model: PreTrainedModel) -> set[str]:
    """Of what transformers would tie to a layer of ours, or of ours, that which is not."""
    found = tables(model)
    sources = ties(found)
    names: set[str] = set()
    for prefix, part in model.named_modules(remove_duplicate=False):
        for target, source in part.__dict__.get("_dense_tied_weights_keys", {}).items():
            ends = _layer_name(prefix, target), _layer_name(prefix, source)
            if found.keys() & ends and not _are_tied(*ends, found, sources):
                names.add(ends[0])
    return names


def rewrite(model: PreTrainedModel, sources: Mapping[str, str]) -> None:
    """In the tie map of the model and its parts, name our tensors; drop ties that are none any more."""
    found = tables(model)
    for prefix, part in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(part, PreTrainedModel) or not part._tied_weights_keys:
            continue
        stock = part.__dict__.setdefault("_dense_tied_weights_keys", part._tied_weights_keys)
        part._tied_weights_keys = {}
        for target, source in stock.items():
            ends = _layer_name(prefix, target), _layer_name(prefix, source)
            if not found.keys() & ends:
                part._tied_weights_keys[target] = source
            elif _are_tied(*ends, found, sources):
                inside = _layer_name("", target), _layer_name("", source)
                part._tied_weights_keys |= _between(*inside, found[ends[0]])
    named = model.get_expanded_tied_weights_keys(all_submodels=True)
    known = {target.rpartition(".")[0] for target in named}
    for name, source in sources.items():
        if name not in known:  # transformers has no entry for it
            model._tied_weights_keys = {**(model._tied_weights_keys or {}), **_between(name, source, found[name])}
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def restore(model: PreTrainedModel, broken: Collection[str]) -> None:
    """The tie map as it was before ours, without the layers whose tie is broken."""
    for prefix, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, PreTrainedModel) and "_dense_tied_weights_keys" in part.__dict__:
            stock = part.__dict__.pop("_dense_tied_weights_keys")
            part._tied_weights_keys = {a: b for a, b in stock.items() if _layer_name(prefix, a) not in broken}
            if stock and not any(target.endswith(".weight") for target in part._tied_weights_keys):
                part.config.tie_word_embeddings = False  # as a file of dense tables has to say it
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _layer_name(prefix: str, weight: str) -> str:
    return f"{prefix}.{weight}".strip(".").removesuffix(".weight")


def _are_tied(one: str, other: str, found: Mapping[str, StructuredTable], sources: Mapping[str, str]) -> bool:
    return {one, other} <= found.keys() and sources.get(one, one) == sources.get(other, other)


def _between(target: str, source: str, layer: StructuredTable) -> dict[str, str]:
    return {f"{target}.{name}": f"{source}.{name}" for name in shared_names(layer)}


def resized_layer(
    method: str, model: PreTrainedModel, layer: nn.Module, new_num_tokens: int | None = None, *args: Any, **options: Any
) -> nn.Module:
    """The methods that ``model.resize_token_embeddings`` calls; all layers over a table get as many rows."""
    if not isinstance(layer, StructuredTable):
        stock: nn.Module = getattr(type(model), method)(model, layer, new_num_tokens, *args, **options)
        return stock
    rows = layer.structure.rows if new_num_tokens is None else new_num_tokens
    if method == "_get_resized_embeddings":
        multiple = options.get("pad_to_multiple_of", args[0] if args else None) or 1
        rows = -(-rows // multiple) * multiple
    if rows == layer.structure.rows:
        return layer
    others = {name: other for name, other in tables(model).items() if identity(other) == identity(layer)}
    if any(peer not in others.values() for peer in tied_layers(layer)):
        name = type(model).__name__
        raise ValueError(f"layers outside of this {name} share its table; resize the embeddings of the whole model.")
    made = resized(layer, rows)
    for name, other in others.items():
        if other is not layer:
            new = resized(other, rows)
            new.share(made)
            put(model, {name: new})
    return made
