"""``model.resize_token_embeddings`` for our layers, by the two methods it calls, set on the model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tensorbed.nn.resizing import resized
from tensorbed.nn.table import StructuredTable

_METHODS = ("_get_resized_embeddings", "_get_resized_lm_head")


def install(model: PreTrainedModel) -> None:
    """On the model and on those inside it, of which any may be asked."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            for name in _METHODS:
                # Not a closure: models are pickled and copied.
                object.__setattr__(part, name, partial(_resized, part, name))


def uninstall(model: PreTrainedModel) -> None:
    """Back to the class's own."""
    for part in model.modules():
        for name in _METHODS:
            part.__dict__.pop(name, None)


def _resized(
    model: PreTrainedModel,
    method: str,
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
    return layer if rows == layer.structure.rows else resized(layer, rows)
