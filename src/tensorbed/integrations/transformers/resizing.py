"""``model.resize_token_embeddings`` for our layers, by the two methods it calls, set on the model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tensorbed.compress.resizing import resized
from tensorbed.files.description import put, tables
from tensorbed.nn.table import StructuredTable, identity


def resized_embeddings(
    model: PreTrainedModel,
    layer: nn.Module,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *args: Any,
    **options: Any,
) -> nn.Module:
    """``model._get_resized_embeddings``."""
    if not isinstance(layer, StructuredTable):
        stock: Any = type(model)._get_resized_embeddings
        made: nn.Module = stock(model, layer, new_num_tokens, pad_to_multiple_of, *args, **options)
        return made
    rows = layer.structure.rows if new_num_tokens is None else new_num_tokens
    multiple = pad_to_multiple_of or 1
    return _resized(model, layer, -(-rows // multiple) * multiple)


def resized_head(
    model: PreTrainedModel, layer: nn.Module, new_num_tokens: int | None = None, *args: Any, **options: Any
) -> nn.Module:
    """``model._get_resized_lm_head``."""
    if not isinstance(layer, StructuredTable):
        made: nn.Module = type(model)._get_resized_lm_head(model, layer, new_num_tokens, *args, **options)
        return made
    return _resized(model, layer, layer.structure.rows if new_num_tokens is None else new_num_tokens)


def _resized(model: PreTrainedModel, layer: StructuredTable, rows: int) -> StructuredTable:
    """The layer with so many rows; all others over its table have as many."""
    if rows == layer.structure.rows:
        return layer
    others = {name: other for name, other in tables(model).items() if identity(other) == identity(layer)}
    if any(identity(peer) == identity(layer) and peer not in others.values() for peer in layer._peers_alive()):
        raise ValueError(
            f"layers outside of this {type(model).__name__} share its table; call resize_token_embeddings of the whole "
            "model."
        )
    made = _as_before(resized(layer, rows), layer)
    for name, other in others.items():
        if other is not layer:
            new = _as_before(resized(other, rows), other)
            new.share(made)
            put(model, {name: new})
    return made


def _as_before(made: StructuredTable, layer: StructuredTable) -> StructuredTable:
    """With what others have added to the layer that it replaces."""
    for key, value in vars(layer).items():
        if key.endswith("_hooks") and value:
            setattr(made, key, value)
    if "forward" in vars(layer):
        made.__dict__["forward"] = partial(vars(layer)["forward"].func, made)
    return made
