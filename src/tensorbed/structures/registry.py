"""The names under which structures are stored, tested and found, and the formats that bind them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, get_type_hints

from tensorbed.structures.base import Structure
from tensorbed.structures.formats import Format

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
        read.cache_clear()  # it may hold structures of the class that was here before
        return cls

    return enter


@lru_cache(maxsize=4096)
def read(text: str) -> Structure:
    """The registered structure that has this :attr:`Structure.text`; an error where its sizes are no sizes."""
    fields: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
    kind = fields.pop("kind")
    made: Any = _STRUCTURES[kind]
    types: dict[str, Any] = {}
    with suppress(NameError):  # of annotations for type checkers alone
        types = get_type_hints(made)
    for name, value in fields.items():
        _check_type(kind, name, value, types.get(name))
    structure: Structure = made(**{name: _tuples(value) for name, value in fields.items()})
    return structure


def text_of(structure: Structure) -> str:
    """What :func:`read` takes, for structures that hold others."""
    if structure.text is None or _STRUCTURES.get(structure.kind) is not type(structure):
        raise ValueError(f"{structure.kind} must be a registered structure to be a part of another.")
    return structure.text


def refuse_constant(name: str) -> NoReturn:
    """For ``json.loads``, which otherwise takes numbers that JSON does not have."""
    raise ValueError(f"{name} is no number in JSON")


def _check_type(kind: str, name: str, value: Any, wanted: Any) -> None:
    """Numbers, flags and lists of numbers are what the class declares: 3.0 is no rank, and 1 no flag."""
    if wanted in (int, bool, str) and type(value) is not wanted:
        raise ValueError(f"{name} of {kind} must be {wanted.__name__}, got {value!r}")
    each = {tuple[int, ...]: int, tuple[str, ...]: str}.get(wanted)
    if each and not (isinstance(value, list) and all(type(one) is each for one in value)):
        raise ValueError(f"{name} of {kind} must be a list of {each.__name__}, got {value!r}")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def registered() -> MappingProxyType[str, type[Structure]]:
    """Every registered structure by name."""
    return MappingProxyType(_STRUCTURES)


def formats() -> tuple[type[Format], ...]:
    """Every format."""
    return tuple(Format.known.values())


def plain_format() -> Format:
    """The table itself: what is left where no format gains anything."""
    return next(format() for format in formats() if format.is_plain)
