"""Layers with more rows or fewer, for vocabularies that grow."""

import copy
from typing import TypeVar

import torch
from torch import nn

from tensorbed.checks import require_positive
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable
from tensorbed.structures.base import with_rows

Layer = TypeVar("Layer", bound=StructuredTable)


@torch.no_grad()
def resized(layer: Layer, rows: int) -> Layer:
    """A layer whose first rows are this one's; new ones are about the mean of them. Hooks and options stay."""
    rows = require_positive(rows, "rows")
    if layer.padding_idx is not None and layer.padding_idx >= rows:
        raise ValueError(f"a table of {rows} rows has no row {layer.padding_idx}, the padding_idx of this one.")
    structure, tensors = layer.structure.resized({name: one.detach() for name, one in layer.params().items()}, rows)
    hooks = [value for key, value in vars(layer).items() if key.endswith("_hooks")]
    made = copy.deepcopy(layer, {id(kept): kept for kept in (*layer.parameters(), *layer.buffers(), *hooks)})
    made.structure, made.fit_error = structure, None
    made._constants = {}  # they were those of the old size, and stand in the tensors
    setattr(made, made._size_names[0], rows)
    if isinstance(layer, Head) and layer.bias is not None:
        tensors["bias"] = with_rows(layer.bias, rows, layer.bias.mean(0, keepdim=True))
    if layer.padding_row is not None:
        tensors["padding_row"] = layer.padding_row
    for name, tensor in tensors.items():
        old, new = getattr(layer, name), tensor.detach().clone()
        setattr(made, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
    return made
