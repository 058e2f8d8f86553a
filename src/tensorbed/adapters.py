"""Other libraries whose models hold our layers: each has an integration, which enters itself here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn

from tensorbed.nn.table import StructuredTable


class Adapter(Protocol):
    """Who knows what the models of a library need."""

    def check_layers(self, model: Any, layers: Iterable[StructuredTable]) -> None:
        """Refuse layers that such a model cannot have."""

    def adopt(self, model: Any) -> object:
        """Have a model with layers of ours saved, tied and loaded with them."""


# By the module that defines a library's base class for models; called where such a model is met.
ADAPTERS: dict[str, Callable[[], Adapter]] = {}


def check_layers(model: nn.Module, layers: Iterable[StructuredTable]) -> None:
    """Refuse, before anything is changed, layers that a library's models cannot have."""
    layers = list(layers)
    for module, adapter in _outermost(model):
        adapter().check_layers(module, layers)


def tell(model: nn.Module) -> None:
    """Have models with layers of ours saved, tied and loaded with them."""
    for module, adapter in _outermost(model):
        if any(isinstance(part, StructuredTable) for part in module.modules()):
            adapter().adopt(module)


def _outermost(model: nn.Module) -> list[tuple[nn.Module, Callable[[], Adapter]]]:
    """Models of other libraries that are not parts of others, with their adapter."""
    bases = [(module, base.__module__) for module in model.modules() for base in reversed(type(module).__mro__)]
    known = {module: ADAPTERS[base] for module, base in bases if base in ADAPTERS}
    inside = {part for module in known for part in module.modules() if part is not module}
    return [(module, adapter) for module, adapter in known.items() if module not in inside]
