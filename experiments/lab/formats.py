"""Formats by the names people write: those of the library's own registry, none of them listed here."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from functools import lru_cache
from typing import Any

import tensorbed as tb
from experiments.lab.errors import ExperimentError, unknown

FULL = "full"  # the table itself
SIZES = ("rank", "ratio", "shape")  # what settings have fields for; all else stands in brackets after a name


def known() -> dict[str, type[Any]]:
    """Every format under the name it has in results: ``tensor_train`` for ``tb.TensorTrain``."""
    usable = [format for format in tb.structures.Format.known.values() if not inspect.isabstract(format)]
    return {FULL if format.is_plain else _snake(format): format for format in usable}


def aliases() -> dict[str, str]:
    """Shorter names, which the formats tell themselves: ``tt``."""
    short = {alias: name for name, format in known().items() for alias in _spelled(format)}
    return short | {_snake(format): name for name, format in known().items() if format.is_plain}


@lru_cache(1000)  # thousands of lines name a few
def canonical(text: str, where: str = "") -> str:
    """``tt`` and ``tensor_train`` are one; so are ``TT(order = 4)`` and ``tensor_train(order=4)``."""
    tree = _tree(text, where)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = _name(node.id, where)
    return ast.unparse(tree)


def kind(text: str) -> type[Any]:
    """The format's class, whatever is in its brackets."""
    return known()[re.split(r"\W", text, maxsplit=1)[0]]


def has(text: str, size: str) -> bool:
    """Whether the format takes such a size."""
    return size in {field.name for field in fields(kind(text))}


def check_sizes(text: str, sizes: dict[str, Any]) -> None:
    """Only sizes that the format has, and one where it has to have one."""
    given = {name: value for name, value in sizes.items() if value is not None}
    for name, value in given.items():
        if not has(text, name):
            having = ", ".join(sorted(alias for alias, of in aliases().items() if has(of, name)))
            what = "a full table" if text == FULL else f'format "{text}"'
            raise ExperimentError(f"{name}={value}: {what} has none; give a --format that has one: {having}.")
    if len(given.keys() & {"rank", "ratio"}) > 1:
        raise ExperimentError(f"rank={given['rank']} and ratio={given['ratio']} both set the size; give one.")
    if has(text, "rank") and "(" not in text and not given.keys() & {"rank", "ratio"}:
        raise ExperimentError(f'format "{text}" needs a rank or a ratio, for instance --rank 16.')


def made(text: str, sizes: dict[str, Any]) -> Any:
    """The format, as the library takes it."""
    return _made(_tree(text), {name: value for name, value in sizes.items() if value is not None})


def label(text: str) -> str:
    """In words."""
    return text.replace("_", " ")


def _spelled(format: type[Any]) -> list[str]:
    return [alias for alias, spelling in format.spellings().items() if spelling.format is format]


def _snake(format: type[Any]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", format.__name__).lower()


def _name(given: str, where: str) -> str:
    names = {**{name: name for name in known()}, **aliases()}
    if given.lower() not in names:
        raise unknown("format", given, names, where)
    return names[given.lower()]


def _tree(text: str, where: str = "") -> ast.expr:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        tree = ast.Constant(text)
    if not isinstance(tree, ast.Name) and not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
        raise unknown("format", text, known(), where)
    if any(isinstance(node, ast.Call) and node.args for node in ast.walk(tree)):
        raise ExperimentError(f"{where}format {text}: what stands in brackets needs a name, as in tt(order=4).")
    return tree


def _made(node: ast.expr, sizes: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known()[node.id](**sizes)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return known()[node.func.id](**sizes, **{str(word.arg): _made(word.value, {}) for word in node.keywords})
    return ast.literal_eval(node)
