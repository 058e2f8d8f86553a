"""What is in a file or a layer: sizes, the scale of its tables, how fast their spectrum falls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tensorbed.files import described_in, layers_in
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable
from tensorbed.structures.explanation import aligned

_ROWS = 4096  # a table is looked at through so many of its rows
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 24


@dataclass(frozen=True)
class Inspected:
    """One layer. The spectrum is of a sample of its rows, the largest singular value as 1."""

    name: str
    layer: str
    kind: str
    sizes: str
    numbers: int
    bytes: int
    ratio: float
    std: float
    spectrum: tuple[float, ...]

    @property
    def bars(self) -> str:
        """The spectrum as a small picture."""
        return "".join(_BARS[round(value * (len(_BARS) - 1))] for value in self.spectrum)


@dataclass(frozen=True)
class Inspection:
    """All layers of a file or model; ``print`` it."""

    layers: tuple[Inspected, ...]
    version: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        head = ("layer", "is", "kind", "sizes", "numbers", "MB", "ratio", "std", "spectrum")
        rows = [
            (
                one.name or "(alone)",
                one.layer,
                one.kind,
                one.sizes,
                f"{one.numbers:,}",
                f"{one.bytes / 1e6:,.2f}",
                f"{one.ratio:,.1f}",
                f"{one.std:.3g}",
                one.bars,
            )
            for one in self.layers
        ]
        return "\n".join(aligned([head, *rows], "<<<<>>>><"))

    __repr__ = __str__


def inspect(what: nn.Module | str | os.PathLike[str]) -> Inspection:
    """The layers of this library in a model, or in a file of :func:`tensorbed.save`."""
    if isinstance(what, nn.Module):
        found: Mapping[str, Any] = {n: m for n, m in what.named_modules() if isinstance(m, StructuredTable)}
        return Inspection(tuple(_inspected(name, layer) for name, layer in found.items()))
    version = described_in(what)["version"]
    return Inspection(tuple(_inspected(name, layer) for name, layer in layers_in(what).items()), version)


@torch.no_grad()
def _inspected(name: str, layer: StructuredTable) -> Inspected:
    rows = _sampled(layer)
    values = torch.linalg.svdvals(rows.double())
    top = float(values[0]) if len(values) else 0.0
    places = torch.linspace(0, len(values) - 1, min(_WIDTH, len(values))).round().long()
    spectrum = tuple(float(v) / top if top else 0.0 for v in values[places])
    tied = " (tied)" if isinstance(layer, Head) and layer.is_tied else ""
    return Inspected(
        name=name,
        layer=f"{type(layer).__name__}{tied}",
        kind=layer.structure.kind,
        sizes=layer.structure.summary,
        numbers=layer._stored_numbers,
        bytes=layer._stored_bytes,
        ratio=layer.compression_ratio,
        std=float(rows.double().square().mean().sqrt()),
        spectrum=spectrum,
    )


def _sampled(layer: StructuredTable) -> Tensor:  # -> (n, cols)
    count = layer.structure.rows
    index = torch.arange(count)
    if count > _ROWS:
        index = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:_ROWS]
    params = {name: tensor.detach() for name, tensor in layer.params().items()}
    device = next(iter(params.values())).device
    return layer.structure.lookup(params, index.to(device), "auto")
