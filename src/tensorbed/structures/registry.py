"""The names under which structures are stored, tested and found."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

from tensorbed.structures.base import Structure

S = TypeVar("S", bound=type[Structure])

_STRUCTURES: dict[str, type[Structure]] = {}


def register(kind: str) -> Callable[[S], S]:
    """Class decorator: give a structure its name."""

    def enter(cls: S) -> S:
        if kind in _STRUCTURES and _STRUCTURES[kind].__qualname__ != cls.__qualname__:
            raise ValueError(
                f'structure "{kind}" is {_STRUCTURES[kind].__qualname__} already; choose another name for '
                f"{cls.__qualname__}."
            )
        cls.kind = kind
        _STRUCTURES[kind] = cls
        return cls

    return enter


@lru_cache(maxsize=4096)
def read(text: str) -> Structure:
    """The registered structure that has this :attr:`Structure.text`."""
    fields: dict[str, Any] = json.loads(text)
    kind = fields.pop("kind")
    made: Any = _STRUCTURES[kind]
    structure: Structure = made(**{name: _tuples(value) for name, value in fields.items()})
    return structure


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def registered() -> MappingProxyType[str, type[Structure]]:
    """Every registered structure by name."""
    return MappingProxyType(_STRUCTURES)
