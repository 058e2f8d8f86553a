"""Layers with more rows or fewer, for vocabularies that grow."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from tensorbed.checks import require_positive
from tensorbed.files.description import described, rebuilt
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable
from tensorbed.structures.base import with_rows

Layer = TypeVar("Layer", bound=StructuredTable)


@torch.no_grad()
def resized(layer: Layer, rows: int) -> Layer:
    """A layer whose first rows are this one's; new ones are about the mean of them."""
    rows = require_positive(rows, "rows")
    if layer.padding_idx is not None and layer.padding_idx >= rows:
        raise ValueError(f"a table of {rows} rows has no row {layer.padding_idx}, the padding_idx of this one.")
    params = {name: tensor.detach() for name, tensor in layer.params().items()}
    structure, tensors = layer.structure.resized(params, rows)
    description = {**described(layer), "structure": structure.text}
    made = rebuilt(description, next(iter(tensors.values())).device)
    assert isinstance(made, type(layer)) or isinstance(layer, type(made))
    for name, tensor in tensors.items():
        getattr(made, name).copy_(tensor)
        getattr(made, name).requires_grad_(getattr(layer, name).requires_grad)
    if layer.padding_row is not None and made.padding_row is not None:
        made.padding_row.copy_(layer.padding_row)
    if isinstance(layer, Head) and isinstance(made, Head) and layer.bias is not None:
        made.bias = nn.Parameter(with_rows(layer.bias, rows, layer.bias.mean(0, keepdim=True)))
        made.bias.requires_grad_(layer.bias.requires_grad)
    made.train(layer.training)
    return made  # type: ignore[return-value]
