"""Tied layers as transformers ties them: by a map of parameter names, which has to name ours."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tensorbed.files.description import put, tables, ties
from tensorbed.nn.table import StructuredTable, shared_names


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
            ends = [f"{prefix}.{end}".strip(".").removesuffix(".weight") for end in (target, source)]
            if not set(ends) & set(found):
                continue
            if not set(ends) <= set(found) or sources.get(ends[0], ends[0]) != sources.get(ends[1], ends[1]):
                names.add(ends[0])
    return names


def rewrite(model: PreTrainedModel, sources: Mapping[str, str]) -> None:
    """In the tie map of the model and its parts, name our tensors; drop ties that are none any more."""
    found = tables(model)
    for prefix, part in list(model.named_modules(remove_duplicate=False)):
        if isinstance(part, PreTrainedModel) and part._tied_weights_keys:
            stock = part.__dict__.setdefault("_dense_tied_weights_keys", part._tied_weights_keys)
            part._tied_weights_keys = dict(_rewritten(stock, prefix, found, sources))
    named = model.get_expanded_tied_weights_keys(all_submodels=True)
    known = {target.rpartition(".")[0] for target in named}
    own = dict(_between(found, {name: source for name, source in sources.items() if name not in known}))
    if own:  # ties that transformers has no entry for
        model._tied_weights_keys = {**(model._tied_weights_keys or {}), **own}
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def restore(model: PreTrainedModel, broken: Collection[str]) -> None:
    """The tie map as it was before ours, without the layers whose tie is broken."""
    for prefix, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, PreTrainedModel) and "_dense_tied_weights_keys" in part.__dict__:
            stock = part.__dict__.pop("_dense_tied_weights_keys")
            full = {target: f"{prefix}.{target}".strip(".").removesuffix(".weight") for target in stock}
            part._tied_weights_keys = {a: b for a, b in stock.items() if full[a] not in broken}
            if stock and not any(target.endswith(".weight") for target in part._tied_weights_keys):
                part.config.tie_word_embeddings = False  # as a file of dense tables has to say it
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _between(found: Mapping[str, StructuredTable], sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for target, source in sources.items():
        for name in shared_names(found[target]):
            yield f"{target}.{name}", f"{source}.{name}"


def _rewritten(
    stock: Mapping[str, str], prefix: str, found: Mapping[str, StructuredTable], sources: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    for target, source in stock.items():
        ends = [name.removesuffix(".weight") for name in (target, source)]
        full = [f"{prefix}.{end}" if prefix else end for end in ends]
        ours = [name for name in full if name in found]
        if not ours:
            yield target, source
        elif len(ours) == 2 and sources.get(full[0], full[0]) == sources.get(full[1], full[1]):
            yield from ((f"{ends[0]}.{name}", f"{ends[1]}.{name}") for name in shared_names(found[full[0]]))
