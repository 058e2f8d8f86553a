"""Structured matrices: one file each, found and registered by itself.

Adding a structure is adding a file here with a frozen dataclass under ``@register("name")`` and a format that binds it;
nothing else in the library knows structures by name.
"""

import importlib
import pkgutil

from tensorbed.structures.base import Params, Structure, TensorSpec
from tensorbed.structures.explanation import Explanation, Explanations
from tensorbed.structures.formats import Fit, Format, Use
from tensorbed.structures.registry import register, registered

__all__ = [
    "Explanation",
    "Explanations",
    "Fit",
    "Format",
    "Params",
    "Structure",
    "TensorSpec",
    "Use",
    "register",
    "registered",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
