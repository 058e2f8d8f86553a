"""Layers that hold the same tensors: who they are, and how they stay tied when tensors are replaced."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

if TYPE_CHECKING:
    from tensorbed.nn.table import StructuredTable


class Peers:
    """Layers that :meth:`StructuredTable.share` tensors. A copy has none: the layers copied along enter themselves."""

    def __init__(self, *layers: StructuredTable) -> None:
        self.layers: WeakKeyDictionary[StructuredTable, None] = WeakKeyDictionary(dict.fromkeys(layers))

    def __reduce__(self) -> tuple[type[Peers], tuple[()]]:
        return Peers, ()


def tied_layers(layer: StructuredTable) -> list[StructuredTable]:
    """Those that were tied and still are, in that order, the layer among them; none where it never was."""
    return [peer for peer in _peers(layer) if identity(peer) == identity(layer)]


def _peers(layer: StructuredTable) -> list[StructuredTable]:
    return [] if layer._peers is None else list(layer._peers.layers)


def settle(layer: StructuredTable, before: Mapping[str, Tensor | None]) -> None:
    """After tensors were replaced: all that shared the ones before have the new ones."""
    for peer in _peers(layer):
        for name in shared_names(layer):
            held: dict[str, Any] = peer._parameters if name in peer._parameters else peer._buffers
            if peer is not layer and held.get(name) is before[name]:
                held[name] = getattr(layer, name)


def shared_names(layer: StructuredTable) -> list[str]:
    """The tensors that a tied layer has from its table."""
    own = [spec.name for spec in layer.structure.tensors()]
    return own if layer.padding_row is None else [*own, "padding_row"]


def identity(layer: StructuredTable) -> Hashable:
    """Equal for layers that hold the same tensors, tied by us or by others."""
    specs = layer.structure.tensors()
    # Moves copy what is not a Parameter.
    kept = [spec for spec in specs if spec.trainable] or specs
    return tuple(id(getattr(layer, spec.name)) for spec in kept)
