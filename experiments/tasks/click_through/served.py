"""A trained model as it serves: nothing is differentiated, and a row may come alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorbed as tb
from experiments.tasks.click_through.model import ClickModel

# Products of weights in oneDNN's own order, with the bias and the ReLU in one pass: what torch.compile calls on a CPU.
_NEEDED = ("_linear_pointwise", "_reorder_linear_weight")
PACKS = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in _NEEDED)


class ServedModel:
    """The scores of a model in less time: of layers that are not packed bit for bit, else as near to the exact ones.

    Shape:
        - ids: ``(batch, features)``
        - output: ``(batch,)``
    """

    def __init__(self, model: ClickModel, full_up_to: int) -> None:
        self.model = model
        self.tables = JoinedTables(model.features, full_up_to)
        *layers, self.last = (part for part in model.body if isinstance(part, nn.Linear))
        self.body = PackedLayers(layers) if PACKS else PlainLayers(layers)

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        score: Tensor = self.last(self.body(self.model.inputs(self.tables(ids)))).squeeze(1)
        return score


class PlainLayers:
    """ReLU layers one after another, as the model has them; ``(batch, in) -> (batch, out)``."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        # Layers write to these in turn: a batch spends a twentieth of its time on new memory otherwise.
        self.hidden = [torch.empty(0), torch.empty(0)]

    def __call__(self, values: Tensor) -> Tensor:
        for layer, out in zip(self.layers, cycle(self.hidden), strict=False):
            out.resize_(len(values), layer.out_features)
            values = torch.addmm(layer.bias, values, layer.weight.T, out=out).relu_()
        return values


class PackedLayers:
    """The same by weights that are packed once, as they are now."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        pack = torch.ops.mkldnn._reorder_linear_weight
        self.layers = [(pack(layer.weight.detach()), layer.bias.detach().clone()) for layer in layers]

    def __call__(self, values: Tensor) -> Tensor:
        for weight, bias in self.layers:
            values = torch.ops.mkldnn._linear_pointwise(values, weight, bias, "relu", [], "")
        return values


class JoinedTables:
    """The values of a collection whose tables of few rows are full, and joined to one.

    For a row that comes alone, a call for each of them takes longer than what is computed. The full ones are copied.
    Ids are those of the maps: none is checked.

    Shape:
        - ids: ``(batch, features)``
        - output: ``(batch, features * dim)``
    """

    def __init__(self, tables: tb.EmbeddingBagCollection, full_up_to: int) -> None:
        layers: dict[str, Any] = dict(tables.tables.items())
        dim = tables.dims[tables.names[0]]
        others = {name: layer for name, layer in layers.items() if layer.num_embeddings > full_up_to}
        full = [layer for name, layer in layers.items() if name not in others]
        self.joined = torch.cat([torch.empty(0, dim), *(layer.weight.detach() for layer in full)])
        self.first_rows = torch.tensor([0, *accumulate(layer.num_embeddings for layer in full)])[:-1]
        self.others = tb.EmbeddingBagCollection(others) if others else None
        is_full = [name not in others for name in layers]
        self.columns = {kind: torch.tensor([it is kind for it in is_full]).nonzero()[:, 0] for kind in (True, False)}
        self.runs = [(kind, dim * len(list(run))) for kind, run in groupby(is_full)]  # neighbours are copied together
        self.widths = {kind: [width for it, width in self.runs if it is kind] for kind in (True, False)}

    def __call__(self, ids: Tensor) -> Tensor:
        full = F.embedding(ids[:, self.columns[True]] + self.first_rows, self.joined).flatten(1)
        if self.others is None:
            return full
        others = self.others(ids[:, self.columns[False]]).values
        pieces = {kind: iter(of.split(self.widths[kind], 1)) for kind, of in ((True, full), (False, others))}
        return torch.cat([next(pieces[kind]) for kind, _ in self.runs], 1)
