"""Layers and models in files: safetensors with a description in the header, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tensorbed.nn.bag import EmbeddingBag
from tensorbed.nn.described import described, put, rebuilt
from tensorbed.nn.embedding import Embedding
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable

FORMAT, VERSION = "tensorbed", 1


def save(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a layer, or a model with its layers of this library described, to one file.

    Tensors that share their memory, of tied layers for instance, are stored once. The file is written beside ``path``
    and takes its place when it is complete: whatever happens, there is the old file or the new one.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"save takes a layer or a model, got {type(module).__name__}.")
    state = module.state_dict(keep_vars=True)
    stored, aliases = _stored_once(state)
    every = module.named_modules(remove_duplicate=False)
    layers = {name: layer for name, layer in every if isinstance(layer, StructuredTable)}
    if not layers:
        raise ValueError("nothing here is a layer of tensorbed; compress the model first, or use safetensors itself.")
    names: dict[int, str] = {}
    for name, layer in layers.items():
        names.setdefault(id(layer), name)
    description = {
        "version": VERSION,
        "aliases": aliases,
        "layers": {
            name: {**described(layer), "tied_to": _tied_to(layer, names), "same_as": names[id(layer)]}
            for name, layer in layers.items()
        },
    }
    header = {"format": FORMAT, "description": json.dumps(description)}
    _write(Path(path), {name: tensor.detach().contiguous() for name, tensor in stored.items()}, header)


def _stored_once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by their first name, and for the other names which that is."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no numbers to save.")
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first.setdefault(key, name)
            stored[name] = tensor
    return stored, aliases


def _tied_to(layer: StructuredTable, names: Mapping[int, str]) -> str | None:
    """The name of the table that a head shares, if both are saved."""
    table = layer._tied[0] if isinstance(layer, Head) and layer._tied else None
    return None if table is None else names.get(id(table))


def _write(path: Path, tensors: Mapping[str, Tensor], header: dict[str, str]) -> None:
    """Beside the path first, then in its place."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it, for instance model.safetensors.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}; make it first.")
    path = path.resolve()  # of a link, what it points to is replaced
    handle, name = tempfile.mkstemp(prefix=".tensorbed.", suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        save_file(dict(tensors), name, header)
        _sync(Path(name))
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        Path(name).replace(path)
        _sync(path.parent)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    """Have the system write what it keeps in memory of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: str | os.PathLike[str], into: nn.Module | None = None) -> nn.Module:
    """A layer from a file; or ``into`` a model, whose layers of the same names become those of the file.

    Everything is read and checked before the model is touched: a file that is damaged, foreign, of a newer version or
    of another model raises ``ValueError`` with the reason and leaves the model as it was.
    """
    with _opened(path) as file:
        return _loaded(file, into, Path(path))


def described_in(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The description in a file."""
    with _opened(path) as file:
        return _description(file, Path(path))


def layers_in(path: str | os.PathLike[str]) -> dict[str, StructuredTable]:
    """The layers of this library in a file, by name, without a model."""
    with _opened(path) as file:
        description, layers, _ = _understood(file, Path(path))
        state = _state(file, description["aliases"])
        for name, layer in layers.items():
            prefix = f"{name}." if name else ""
            names = {key: prefix + key for key in layer.state_dict()}
            layer.load_state_dict({key: state[full] for key, full in names.items()}, assign=True)
        return layers


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error}).") from None


def _understood(file: Any, path: Path) -> tuple[dict[str, Any], dict[str, StructuredTable], dict[str, tuple[int, ...]]]:
    """The description, its layers without numbers, and the shapes of all tensors, which the layers fit."""
    description = _description(file, path)
    layers = {name: _layer(name, one, path) for name, one in description["layers"].items()}
    for name, one in description["layers"].items():
        _tie(layers, name, one["tied_to"], path)
    layers = {name: layers[description["layers"][name]["same_as"]] for name in layers}
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    shapes.update({alias: shapes[name] for alias, name in description["aliases"].items() if name in shapes})
    for name, layer in layers.items():
        _check_shapes(layer, name, shapes, path)
    return description, layers, shapes


def _state(file: Any, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    # Copies: what comes out of the file is a view of it, and changes when it does.
    state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    return state | {alias: state[name] for alias, name in aliases.items() if name in state}


def _loaded(file: Any, into: nn.Module | None, path: Path) -> nn.Module:
    description, layers, shapes = _understood(file, path)
    if into is None:
        return _alone(file, layers, path)
    expected = _expected(into, layers)
    if expected != shapes:
        raise ValueError(f"{path} is of another model: {_difference(shapes, expected)}.")
    for name, layer in layers.items():
        _check_place(name, into.get_submodule(name), layer, path)
    return _filled(file, into, layers, description["aliases"])


def _description(file: Any, path: Path) -> dict[str, Any]:
    header = file.metadata() or {}
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by tensorbed.save; its format is {header.get('format')!r}.")
    try:
        found = json.loads(header["description"])
        version, layers, aliases = found["version"], found["layers"], found["aliases"]
        wrong = type(version) is not int or not isinstance(layers, dict) or not isinstance(aliases, dict) or not layers
        wrong = wrong or not all(
            isinstance(one, dict) and {"tied_to", "same_as"} <= set(one) for one in layers.values()
        )
        wrong = wrong or not all(one["same_as"] in layers for one in layers.values())
        stored = set(file.keys())
        wrong = wrong or not set(aliases.values()) <= stored or bool(set(aliases) & stored) or version < 1
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the description in {path} cannot be read ({type(error).__name__}: {error}).") from None
    if wrong:
        raise ValueError(f"the description in {path} has not the parts that it should have.")
    if version > VERSION:
        raise ValueError(
            f"{path} has version {version} of the format, this tensorbed reads up to {VERSION}: update it."
        )
    return dict(found)


def _layer(name: str, description: Any, path: Path) -> StructuredTable:
    try:
        return rebuilt({key: value for key, value in description.items() if key not in ("tied_to", "same_as")})
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"layer {name!r} in {path}: {error}") from None


def _tie(layers: dict[str, StructuredTable], name: str, to: Any, path: Path) -> None:
    """A head that shares a table's tensors does so again."""
    if to is None:
        return
    head, table = layers[name], layers.get(to) if isinstance(to, str) else None
    if not isinstance(head, Head) or table is None or isinstance(table, Head) or table.structure != head.structure:
        raise ValueError(f"{path} ties {name!r} to {to!r}, which is no table of its shape.")
    try:
        bias = head.bias is not None
        layers[name] = type(head).tied_to(table, bias, impl=head.impl, memory_budget=head.memory_budget)
    except (TypeError, ValueError) as error:
        raise ValueError(f"layer {name!r} in {path}: {error}") from None


def _check_shapes(layer: StructuredTable, name: str, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    prefix = f"{name}." if name else ""
    for key, tensor in layer.state_dict().items():
        found = shapes.get(prefix + key)
        if found != tuple(tensor.shape):
            what = "is missing" if found is None else f"has shape {found}"
            raise ValueError(f"{prefix}{key} {what} in {path}; its description needs {tuple(tensor.shape)}.")


def _alone(file: Any, layers: Mapping[str, StructuredTable], path: Path) -> nn.Module:
    if set(layers) != {""}:
        names = ", ".join(layers)
        raise ValueError(f"{path} holds a model ({names}), not one layer; give the model: load(path, into=model).")
    layer = layers[""]
    if set(layer.state_dict()) != set(file.keys()):
        raise ValueError(f"{path} has other tensors than its layer: {_difference(file.keys(), layer.state_dict())}.")
    layer.load_state_dict(_state(file, {}), assign=True)
    return layer


def _expected(model: nn.Module, layers: Mapping[str, StructuredTable]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors once the layers are in it."""
    inside = tuple(f"{name}." for name in layers)
    kept = {key: tuple(t.shape) for key, t in model.state_dict().items() if not key.startswith(inside)}
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in layers if name not in modules]
    if missing or "" in layers:
        raise ValueError(f"the model has no {', '.join(missing) or 'place for a layer that is a file by itself'}.")
    return kept | {
        f"{name}.{key}": tuple(t.shape) for name, one in layers.items() for key, t in one.state_dict().items()
    }


def _check_place(name: str, old: nn.Module, layer: StructuredTable, path: Path) -> None:
    """What a layer replaces is a table or head of its size."""
    kinds: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
        EmbeddingBag: (nn.EmbeddingBag, EmbeddingBag),
        Head: (nn.Linear, Head),
        Embedding: (nn.Embedding, Embedding),
    }
    allowed = next(places for kind, places in kinds.items() if isinstance(layer, kind))
    size = (layer.structure.rows, layer.structure.cols)
    if isinstance(old, StructuredTable):
        found = (old.structure.rows, old.structure.cols)
    else:
        found = tuple(getattr(getattr(old, "weight", None), "shape", ()))
    if not isinstance(old, allowed) or found != size:
        raise ValueError(
            f"{path} is of another model: {name} there is {type(layer).__name__} {size}, here "
            f"{type(old).__name__} {found}."
        )


def _filled(
    file: Any, model: nn.Module, layers: Mapping[str, StructuredTable], aliases: Mapping[str, str]
) -> nn.Module:
    state = _state(file, aliases)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, layer in layers.items():
        old = modules[name]
        layer.train(old.training)
        inside = {key[len(name) + 1 :]: tensor for key, tensor in state.items() if key.startswith(f"{name}.")}
        layer.load_state_dict(inside, assign=True)
        own = next((p for key, p in old.named_parameters() if key != "bias"), None)
        if own is not None and not own.is_meta:
            layer.to(device=own.device, dtype=own.dtype)
        for key, parameter in layer.named_parameters():
            like = getattr(old, "bias", None) if key == "bias" else own
            if like is not None and not (isinstance(layer, Head) and layer.is_tied and key != "bias"):
                parameter.requires_grad_(like.requires_grad)
    rest = {key: tensor for key, tensor in state.items() if not key.startswith(tuple(f"{name}." for name in layers))}
    before = {key: tensor.clone() for key, tensor in model.state_dict().items() if key in rest}
    try:
        model.load_state_dict(rest, strict=False)
        put(model, layers)
    except Exception as error:
        with suppress(Exception):  # what could not be written to was not
            model.load_state_dict(before, strict=False)
        raise ValueError(f"the model did not take its tensors ({error}); it is as it was.") from error
    return model


def _difference(found: Any, expected: Any) -> str:
    """The first few names that only one of them has, or that differ."""
    lacking, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if lacking or extra:
        parts = [f"without {', '.join(lacking[:3])}"] if lacking else []
        parts += [f"with {', '.join(extra[:3])}"] if extra else []
        return " and ".join(parts)
    other = [name for name in found if found[name] != expected[name]]
    return f"{other[0]} has shape {found[other[0]]}, not {expected[other[0]]}"
