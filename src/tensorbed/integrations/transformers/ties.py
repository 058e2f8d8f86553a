"""Tied layers as transformers ties them: by a map of parameter names, which has to name ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tensorbed.nn.described import described, identity, put, rebuilt
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable, shared_names


def tables(model: nn.Module) -> dict[str, StructuredTable]:
    """Our layers by every name they have."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, StructuredTable)}


def sources_of(found: Mapping[str, StructuredTable]) -> dict[str, str]:
    """For each layer that holds another's tensors, that other; tables before heads."""
    first: dict[Hashable, str] = {}
    sources: dict[str, str] = {}
    for name, layer in sorted(found.items(), key=lambda item: isinstance(item[1], Head)):
        source = first.setdefault(identity(layer), name)
        if source != name:
            sources[name] = source
    return sources


def separate(model: nn.Module) -> None:
    """Make every place that shares tensors a layer of its own, which knows no other.

    A layer that reads another's tensors would find them gone where accelerate has put them on disk, and old ones where
    somebody has set a new table; transformers ties by names instead.
    """
    found = tables(model)
    for name, source in sources_of(found).items():
        layer = found[name]
        alone = rebuilt(described(layer))
        alone.train(layer.training)
        alone.fit_error = layer.fit_error
        if isinstance(layer, Head) and isinstance(alone, Head):
            alone.bias = layer.bias
        alone.share(found[source])
        put(model, {name: alone})


def override(model: PreTrainedModel, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Set methods on the model and on those inside of it, of which any may be called."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            for name, method in methods.items():
                # Not a closure: models are pickled and copied.
                object.__setattr__(part, name, partial(method, part))


def remove_overrides(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Back to the class's own."""
    for part in model.modules():
        for name in names:
            part.__dict__.pop(name, None)


def tie_weights(model: PreTrainedModel, *args: Any, **options: Any) -> None:
    """After it, of whichever part, layers that share tensors go on when they are moved."""
    type(model).tie_weights(model, *args, **options)
    share_tensors(model, sources_of(tables(model)))


def share_tensors(model: nn.Module, sources: Mapping[str, str]) -> None:
    """Each layer holds the tensors of its source."""
    found = tables(model)
    for name, source in sources.items():
        found[name].share(found[source])


def untied(model: PreTrainedModel) -> set[str]:
    """Of what transformers would tie to a layer of ours, or of ours, that which is not."""
    found = tables(model)
    sources = sources_of(found)
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
    ties: Mapping[str, str], prefix: str, found: Mapping[str, StructuredTable], sources: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    for target, source in ties.items():
        ends = [name.removesuffix(".weight") for name in (target, source)]
        full = [f"{prefix}.{end}" if prefix else end for end in ends]
        ours = [name for name in full if name in found]
        if not ours:
            yield target, source
        elif len(ours) == 2 and sources.get(full[0], full[0]) == sources.get(full[1], full[1]):
            yield from ((f"{ends[0]}.{name}", f"{ends[1]}.{name}") for name in shared_names(found[full[0]]))
