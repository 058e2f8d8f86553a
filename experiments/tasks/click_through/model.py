"""A table for each feature, their rows side by side, and four layers over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import tensorbed as tb
from experiments.lab.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class ClickThroughSettings(Settings):
    """Of the model, and of the rows it reads."""

    dim: int = option(16, "numbers per value of a feature", least=1)
    hidden: int = option(1024, "neurons of a layer", least=1)
    layers: int = option(4, "between the tables and the score", least=1)
    full_up_to: int = option(2_000, "tables of at most so many rows are full in every row", least=0)
    interaction: bool = option(False, "products of all pairs of features beside them, as in DLRM")
    batch: int = option(4_096, "rows of a batch", least=1)
    epochs: int = option(3, "at most", least=1)
    validations: int = option(10, "of each epoch", least=1)
    patience: int | None = option(10, "validations without improvement before the end", least=1)
    window: int = option(8, "row groups of a Parquet file that are shuffled together", least=1)
    least: int = option(2, "sightings in training of a value with a row of its own; of Book-Crossing", least=1)
    values: int | None = option(None, "of each category of synthetic rows; left out, as Criteo has them", least=1)
    rows: int | None = option(None, "as if each split had only so many rows", least=1)


class ClickModel(nn.Module):
    """The score of a click, before the sigmoid.

    Shape:
        - ids: ``(batch, features)``
        - output: ``(batch,)``
    """

    maps: Tensor  # the checksum of the maps that numbered its values

    def __init__(self, settings: ClickThroughSettings, sizes: Mapping[str, int], maps: int = 0) -> None:
        super().__init__()
        self.register_buffer("maps", torch.tensor(maps))
        self.interaction = settings.interaction
        pairs = len(sizes) * (len(sizes) - 1) // 2 if settings.interaction else 0
        widths = [len(sizes) * settings.dim + pairs, *[settings.hidden] * settings.layers]
        layers = [part for width in pairwise(widths) for part in (nn.Linear(*width), nn.ReLU())]
        self.body = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        # The tables come last: whatever they draw, the body has drawn the same numbers before them.
        self.features = tb.EmbeddingBagCollection(
            {
                name: tb.EmbeddingBag(rows, settings.dim, format_of(settings, rows), mode="sum", std=settings.std)
                for name, rows in sizes.items()
            }
        )

    def forward(self, ids: Tensor) -> Tensor:
        score: Tensor = self.body(self.inputs(self.features(ids).values)).squeeze(1)
        return score

    def inputs(self, values: Tensor) -> Tensor:  # (batch, features * dim) -> (batch, width of the body)
        """What the layers are given: rows side by side, and their products if there is interaction."""
        return torch.cat([values, self.products(values)], dim=1) if self.interaction else values

    def products(self, values: Tensor) -> Tensor:  # (batch, features * dim) -> (batch, pairs)
        """Of each pair of different features."""
        rows = values.unflatten(1, (len(self.features.names), -1))
        first, second = torch.triu_indices(rows.shape[1], rows.shape[1], 1, device=rows.device)
        products: Tensor = (rows @ rows.mT)[:, first, second]
        return products


def format_of(settings: ClickThroughSettings, rows: int) -> Any:
    """Of a table: full if it is small, or else that of the row, as near to its ratio as a table of this size can be."""
    if rows <= settings.full_up_to:
        return tb.Dense()
    for ratio in () if settings.ratio is None else reachable(settings.ratio):
        format = replace(settings, ratio=ratio).table_format(rows, settings.dim)
        if can_be(rows, settings.dim, format):
            return format
    return settings.table_format(rows, settings.dim)  # the library says what is wrong


def reachable(ratio: float) -> Iterable[float]:
    """Ratios to try, in steps of a hundredth down to no compression."""
    while ratio > 1:
        yield ratio
        ratio /= 1.01


def can_be(rows: int, cols: int, format: Any) -> bool:
    """Whether there is such a table; nothing is allocated."""
    try:
        tb.EmbeddingBag(rows, cols, format, device="meta")
    except ValueError:
        return False
    return True
