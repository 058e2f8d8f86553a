"""Formats by the names people write: those of the library's own registry, none of them listed here."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch

import tensorbed as tb
from experiments.lab.errors import ExperimentError, unknown

FULL = "full"  # the table itself
SIZES = ("rank", "ratio", "shape")  # what settings have fields for; all else stands in brackets after a name
Maker = Callable[..., Any]  # a format's class, or what makes one of a ratio


def known() -> dict[str, Maker]:
    """Every format under the name it has in results: ``tensor_train`` for ``tb.TensorTrain``.

    So are ways to make one of a ratio that formats tell, by the names they tell.
    """
    usable = [format for format in tb.structures.Format.known.values() if not inspect.isabstract(format)]
    told = {alias: spelling.format for format in usable for alias, spelling in format.spellings().items()}
    makers = {alias: maker for alias, maker in told.items() if callable(maker) and not isinstance(maker, type)}
    return {FULL if format.is_plain else _snake(format): format for format in usable} | makers


def aliases() -> dict[str, str]:
    """Shorter names, which the formats tell themselves: ``tt``."""
    classes: list[tuple[str, Any]] = [(name, format) for name, format in known().items() if isinstance(format, type)]
    told = [(alias, name, one.format is of) for name, of in classes for alias, one in of.spellings().items()]
    plain = {_snake(format): name for name, format in classes if format.is_plain}
    return {alias: name for alias, name, is_own in told if is_own} | plain


def _snake(format: type[Any]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", format.__name__).lower()


@lru_cache(1000)  # thousands of lines name a few
def canonical(text: str, where: str = "") -> str:
    """``tt`` and ``tensor_train`` are one; so are ``TT(order = 4)`` and ``tensor_train(order=4)``."""
    tree, names = _tree(text, where), {**{name: name for name in known()}, **aliases()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if node.id.lower() not in names:
                raise unknown("format", node.id, names, where)
            node.id = names[node.id.lower()]
    return ast.unparse(tree)


@lru_cache(1000)  # asked of every line, as above
def has(text: str, size: str) -> bool:
    """Whether the format takes such a size, or one that it is made of."""
    return any(_takes(known()[node.id], size) for node in ast.walk(_tree(text)) if isinstance(node, ast.Name))


def _takes(format: Maker, size: str) -> bool:
    return size in [field.name for field in fields(format)] if isinstance(format, type) else size == "ratio"


def check_sizes(text: str, sizes: dict[str, Any]) -> None:
    """Only sizes that the format has, and one where it has to have one."""
    for name, value in sizes.items():
        if not has(text, name):
            having = ", ".join(sorted(alias for alias, of in aliases().items() if has(of, name)))
            what = "a full table" if text == FULL else f'format "{text}"'
            raise ExperimentError(f"{name}={value}: {what} has none; give a --format that has one: {having}.")
    if len(sizes.keys() & {"rank", "ratio"}) > 1:
        raise ExperimentError(f"rank={sizes['rank']} and ratio={sizes['ratio']} both set the size; give one.")
    if has(text, "rank") and "(" not in text and not sizes.keys() & {"rank", "ratio"}:
        raise ExperimentError(f'format "{text}" needs a rank or a ratio, for instance --rank 16.')


def made(text: str, sizes: dict[str, Any], rows: int, cols: int) -> Any:
    """The format for a table, as the library takes it; sizes go to the outermost one that takes them.

    Where those are parts of another, as in ``straight_through(format=tt)``, the ratio is still the whole table's.
    """
    tree, ratio = _tree(text), sizes.get("ratio")
    if ratio is None or _takes(known()[re.split(r"\W", text, maxsplit=1)[0]], "ratio"):
        return _made(tree, sizes)
    low, high = ratio / 64, ratio * 64  # of the parts; between them the whole is as small as asked for, or cannot be
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        try:
            layer = tb.Embedding(rows, cols, _made(tree, {**sizes, "ratio": middle}), device="meta")
            small_enough = 4 * rows * cols >= ratio * stored(layer).structure.bytes(torch.float32)
        except ValueError:
            small_enough = True  # smaller than its parts can be
        low, high = (low, middle) if small_enough else (middle, high)
    if high == ratio * 64:
        raise ExperimentError(f"ratio={ratio:g}: {label(text)} cannot make a table of {rows} x {cols} that small.")
    return _made(tree, {**sizes, "ratio": high})


def stored(layer: Any) -> Any:
    """The layer that is kept once training is over."""
    return layer.packed() if layer.structure.packs else layer


def label(text: str) -> str:
    """In words."""
    return text.replace("_", " ").replace("(", " (")


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
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_made(part, sizes) for part in node.elts)
    call = ast.Call(node, [], []) if isinstance(node, ast.Name) else node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return ast.literal_eval(node)
    format = known()[call.func.id]
    own = {name: value for name, value in sizes.items() if _takes(format, name)}
    rest = {name: value for name, value in sizes.items() if name not in own}
    return format(**own, **{str(word.arg): _made(word.value, rest) for word in call.keywords})
