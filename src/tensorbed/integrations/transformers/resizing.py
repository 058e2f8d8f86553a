"""``model.resize_token_embeddings`` for our layers, by the two methods it calls, set on the model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tensorbed.integrations.transformers.ties import tables
from tensorbed.nn.described import identity, put
from tensorbed.nn.resizing import resized
from tensorbed.nn.table import StructuredTable

METHODS = ("_get_resized_embeddings", "_get_resized_lm_head")


def install(model: PreTrainedModel) -> None:
    """On the model and on those inside it, of which any may be asked."""
    every = list(tables(model).values())
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            inside = list(tables(part).values())
            held = {identity(layer) for layer in inside}
            # Whether all layers over its tables are its own.
            closed = sum(identity(layer) in held for layer in every) == len(inside)
            for name in METHODS:
                # Not a closure: models are pickled and copied.
                object.__setattr__(part, name, partial(_resized, part, name, closed))


def _resized(
    model: PreTrainedModel,
    method: str,
    closed: bool,
    layer: nn.Module,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: Any = None,
    mean_resizing: bool = True,
    **options: Any,
) -> nn.Module:
    if not isinstance(layer, StructuredTable):
        options["mean_resizing"] = mean_resizing
        if method == "_get_resized_embeddings":
            options["pad_to_multiple_of"] = pad_to_multiple_of
        elif pad_to_multiple_of is not None:
            options["transposed"] = pad_to_multiple_of
        made: nn.Module = getattr(type(model), method)(model, layer, new_num_tokens, **options)
        return made
    rows = layer.structure.rows if new_num_tokens is None else new_num_tokens
    if method == "_get_resized_embeddings" and pad_to_multiple_of is not None:
        rows = -(-rows // pad_to_multiple_of) * pad_to_multiple_of
    if rows == layer.structure.rows:
        return layer
    if not closed:
        raise ValueError(
            f"layers outside of this {type(model).__name__} share its table; call resize_token_embeddings of the whole "
            "model."
        )
    made = _as_before(resized(layer, rows), layer)
    for name, other in tables(model).items():
        if other is not layer and identity(other) == identity(layer):
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
