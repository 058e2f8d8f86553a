"""Other libraries whose models hold our layers: each has an integration, imported where such a model is met."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from torch import nn

from tensorbed.nn.table import StructuredTable

# The module that defines a library's base class for models, and who knows what such models need.
_INTEGRATIONS = {"transformers.modeling_utils": "tensorbed.integrations.transformers"}


def check_layers(model: nn.Module, layers: Iterable[StructuredTable]) -> None:
    """Refuse, before anything is changed, layers that a library's models cannot have."""
    layers = list(layers)
    for module, integration in _outermost(model):
        import_module(integration).check_layers(module, layers)


def tell(model: nn.Module) -> None:
    """Have models with layers of ours saved, tied and loaded with them."""
    for module, integration in _outermost(model):
        if any(isinstance(part, StructuredTable) for part in module.modules()):
            import_module(integration).adopt(module)


def _outermost(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Models of other libraries that are not parts of others, with their integration."""
    found = {id(module): (module, one) for module in model.modules() if (one := _integration(module)) is not None}
    inside = {id(part) for module, _ in found.values() for part in module.modules() if part is not module}
    return [entry for key, entry in found.items() if key not in inside]


def _integration(module: nn.Module) -> str | None:
    return next((_INTEGRATIONS[c.__module__] for c in type(module).__mro__ if c.__module__ in _INTEGRATIONS), None)
