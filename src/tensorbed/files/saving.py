"""Layers and models in files: safetensors with a description in the header, written whole or not at all."""

import json
import os
import secrets
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tensorbed.adapters import check_layers, tell
from tensorbed.files.description import VERSION, check_reducers, descriptions, put, tables, take_options
from tensorbed.files.header import FORMAT, Checksums, Contents, differently_shared, inside, opened, understood
from tensorbed.files.writing import write_tensors
from tensorbed.nn.embedding import Embedding, EmbeddingBag
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable
from tensorbed.nn.ties import identity


def save(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a layer, or a model with its layers of this library described, to one file.

    Tensors that share their memory, of tied layers for instance, are stored once; a tied head without its table is
    stored as one that is not tied. Every tensor and the description have a checksum, by which :func:`load` sees damage.
    The file is written beside ``path`` and takes its place when it is complete:
    whatever happens, there is the old file or the new one.

    Args:
        module: a layer of this library, or a model that has some.
        path: of the file, a safetensors one.

    Example::

        >>> layer = tb.TTEmbedding(25_000, 256, rank=16)
        >>> tb.save(layer, "layer.safetensors")
        >>> again = tb.load("layer.safetensors")
        >>> torch.equal(again(torch.arange(10)), layer(torch.arange(10)))
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"save takes a layer or a model, got {type(module).__name__}.")
    module = unwrapped(module)
    layers = tables(module)
    if not layers:
        raise ValueError("nothing here is a layer of tensorbed; compress the model first, or use safetensors itself.")
    stored, aliases = _stored_once(_tensors_of(module))
    _check_layers(layers, aliases)
    description = json.dumps({"version": VERSION, "aliases": aliases, "layers": descriptions(layers)}, allow_nan=False)
    header = {"format": FORMAT, "description": description, **Checksums.of(description, stored).entry()}
    _write(Path(path), stored, header)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model in what ``torch.compile`` and data parallelism put around one: names in a file are the model's own."""
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif _is_compiled(module):
            module = module.get_submodule("_orig_mod")
        else:
            return module


def _is_compiled(module: nn.Module) -> bool:
    """What ``torch.compile`` makes of a module has that alone, and no tensors of its own."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not own and [name for name, _ in module.named_children()] == ["_orig_mod"]


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All that a module keeps, ordinary tensors with numbers."""
    state = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}, of get_extra_state perhaps; a file holds tensors: keep it in a "
                "buffer, or save it apart."
            )
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet; run the model once, so that its lazy layers are complete.")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no numbers to save.")
        if type(tensor.data) is not Tensor or tensor.is_quantized or tensor.layout != torch.strided:
            kind = f"{type(tensor.data).__name__} of {tensor.layout} and {tensor.dtype}"
            raise ValueError(f"{name} is a {kind}; make an ordinary dense tensor of it first.")
    return dict(state)


def _sharing(name: str, tensor: Tensor) -> Hashable:
    """Equal for names of one tensor."""
    if not tensor.numel():
        return name
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))


def _stored_once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by their first name, contiguous and none in the memory of another; and other names for them."""
    first: dict[Hashable, str] = {}
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    taken: set[tuple[int, str]] = set()
    for name, tensor in state.items():
        if (own := first.setdefault(_sharing(name, tensor), name)) != name:
            aliases[name] = own
            continue
        whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
        place = (whole.untyped_storage().data_ptr(), str(whole.device))
        stored[name] = whole.clone() if place in taken else whole
        taken.add(place)
    return stored, aliases


def _check_layers(layers: Mapping[str, StructuredTable], aliases: Mapping[str, str]) -> None:
    """What layers share they share as a whole, and all of one are of its dtype: a file has no way to say more."""
    owners = {
        inside(name, key): (id(layer) if key == "bias" else identity(layer), key)
        for name, layer in layers.items()
        for key in layer.state_dict()
    }
    for alias, name in aliases.items():
        ends = [owners.get(one, (0, "")) for one in (alias, name)]
        # A bias may be another module's too.
        if ends[0] != ends[1] and sorted(key for _, key in ends) != ["", "bias"]:
            raise ValueError(
                f"{alias} and {name} share their memory, but are not of layers that are tied; tie a head with "
                "tb.Head.tied_to, use one layer twice, or give each its own numbers."
            )
    for name, layer in layers.items():
        for spec in layer.structure.tensors():
            found, wanted = getattr(layer, spec.name).dtype, spec.dtype or layer._dtype
            if found != wanted:
                raise ValueError(f"{inside(name, spec.name)} is {found}, its layer {wanted}; convert one of them.")


def _write(path: Path, tensors: Mapping[str, Tensor], header: dict[str, str]) -> None:
    """Beside the path first, then in its place."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it, for instance model.safetensors.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}; make it first.")
    path = path.resolve()  # of a link, what it points to is replaced
    part = path.with_name(f".tensorbed.{secrets.token_hex(8)}.part")
    old_mode = path.stat().st_mode & 0o777 if path.exists() else None
    # The system takes the umask off the mode: to ask for the umask is to change it, for all threads.
    mode = 0o666 if old_mode is None else old_mode | 0o600
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            write_tensors(file, tensors, header)
        sync(part)
        if old_mode is not None:
            part.chmod(old_mode)
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:  # which names no file where the disk is full
        raise type(error)(error.errno, f"{path} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path, flags: int = os.O_RDWR) -> None:
    """Have the system write what it keeps in memory of a file, which on Windows has to be open for writing."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """The same for a folder; where it cannot be opened, on Windows none can, the system sees to it by itself."""
    with suppress(PermissionError):
        sync(path, os.O_RDONLY)


def load(path: str | os.PathLike[str], into: nn.Module | None = None) -> nn.Module:
    """A layer from a file; or ``into`` a model, whose layers of the same names become those of the file.

    Everything is read and checked before the model is touched: a file that is damaged, foreign, of a newer version or
    of another model raises ``ValueError`` with the reason and leaves the model as it was. Layers that have the file's
    structure already keep their Parameters, and an optimiser over them goes on; dtype, device and what is frozen stay.

    Args:
        path: of a file that :func:`save` wrote.
        into: the model, dense or compressed, when the file is one of a model.

    Example::

        >>> model = torch.nn.Sequential(torch.nn.Embedding(5000, 64), torch.nn.Linear(64, 2))
        >>> report = tb.compress_(model, tb.QuantizedRows(bits=8))
        >>> tb.save(model, "model.safetensors")
        >>> dense = torch.nn.Sequential(torch.nn.Embedding(5000, 64), torch.nn.Linear(64, 2))
        >>> tb.load("model.safetensors", into=dense)[0].structure.kind
        'quantized_rows'
    """
    with opened(path) as file:
        contents = understood(file, Path(path))
        if into is None:
            _check_alone(contents)
            fill(contents.layers, contents.read(file))
            return contents.layers[""]
        model = unwrapped(into)
        _check_model(model, contents)
        places = dict(model.named_modules(remove_duplicate=False))
        new = {name: places[name] for name, layer in contents.layers.items() if not _is_like(places[name], layer)}
        check_reducers(into, new)
        _fill_model(model, contents, contents.read(file))
        return into


def fill(layers: Mapping[str, StructuredTable], state: Mapping[str, Tensor]) -> None:
    """Give layers without numbers those of a file."""
    for name, layer in layers.items():
        layer.load_state_dict({key: state[inside(name, key)] for key in layer.state_dict()}, assign=True)


def _check_alone(contents: Contents) -> None:
    layers, path = contents.layers, contents.path
    if set(layers) != {""}:
        names = ", ".join(layers)
        raise ValueError(f"{path} holds a model ({names}), not one layer; give the model: load(path, into=model).")
    own = layers[""].state_dict()
    if set(own) != set(contents.tensors):
        raise ValueError(f"{path} has other tensors than its layer: {_difference(contents.tensors, own)}.")


def _check_model(model: nn.Module, contents: Contents) -> None:
    """The model is of the file's class: the same tensors in the same places, shared by the same names."""
    layers, path = contents.layers, contents.path
    modules = dict(model.named_modules(remove_duplicate=False))
    if "" in layers:
        raise ValueError(f"{path} is one layer, and not of a model: load(path) gives it; put it where it belongs.")
    if missing := [name for name in layers if name not in modules]:
        raise ValueError(f"the model has no {', '.join(missing)}.")
    kept = _kept_tensors(model, layers)
    new = {inside(n, k): t for n, one in layers.items() for k, t in one.state_dict(keep_vars=True).items()}
    expected = {name: tuple(tensor.shape) for name, tensor in {**kept, **new}.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in contents.tensors.items()}
    if expected != shapes:
        raise ValueError(f"{path} is of another model: {_difference(shapes, expected)}.")
    for name, layer in layers.items():
        _check_place(name, modules[name], layer, path)
    for name, tensor in kept.items():
        found = contents.tensors[name]
        if tensor.is_floating_point() != found.is_floating_point() and not tensor.is_complex():
            raise ValueError(f"{path} is of another model: {name} is {found.dtype} there, and here {tensor.dtype}.")
    here = {name: modules[name] for name in layers}
    places = {n: identity(one) if isinstance(one, StructuredTable) else id(one.weight) for n, one in here.items()}
    _check_sharing(places, {name: identity(layer) for name, layer in layers.items()}, path)
    shared = {name: _sharing(name, tensor) for name, tensor in kept.items()}
    _check_sharing(shared, {name: id(contents.tensors[name]) for name in kept}, path)


def _kept_tensors(model: nn.Module, layers: Iterable[str]) -> dict[str, Tensor]:
    """What of a model's tensors is not in the places of the layers."""
    within = tuple(f"{name}." for name in layers)
    state = {name: one for name, one in model.state_dict(keep_vars=True).items() if not name.startswith(within)}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or is_lazy(tensor) or tensor.is_meta:
            what = "no tensor" if not isinstance(tensor, Tensor) else "without a shape or numbers yet"
            raise ValueError(f"{name} of the model is {what}; a file is loaded into a complete model.")
    return state


def _check_sharing(model: Mapping[str, Hashable], file: Mapping[str, Hashable], path: Path) -> None:
    if wrong := differently_shared(model, file):
        one, other, in_model = wrong
        if in_model:
            fix = f"untie them first, each with a Parameter of its own, or save a model in which {other} is tied"
        else:
            fix = f"tie them first, as {one} and {other} were in the model that was saved"
        here, there = ("are tied", "not") if in_model else ("are not tied", "they are")
        raise ValueError(f"{one} and {other} {here} in the model, and in {path} {there}; {fix}.")


def _check_place(name: str, old: nn.Module, layer: StructuredTable, path: Path) -> None:
    """What a layer replaces is a table or head of its size."""
    kinds = ((EmbeddingBag, nn.EmbeddingBag), (Head, nn.Linear), (Embedding, nn.Embedding))
    allowed = next(kind for kind in kinds if isinstance(layer, kind[0]))
    size = (layer.structure.rows, layer.structure.cols)
    found = tuple(getattr(getattr(old, "weight", None), "shape", ()))
    if not isinstance(old, allowed) or found != size:
        there, here = f"{type(layer).__name__} {size}", f"{type(old).__name__} {found}"
        raise ValueError(f"{path} is of another model: {name} there is {there}, here {here}.")
    biased = [getattr(one, "bias", None) is not None for one in (layer, old)]
    if biased[0] != biased[1]:
        there, here = ("a bias" if one else "none" for one in biased)
        raise ValueError(f"{path} is of another model: {name} has {there} there, and here {here}.")


def _fill_model(model: nn.Module, contents: Contents, state: Mapping[str, Tensor]) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    # Layers that are tied stay or go together.
    gone = {identity(one) for name, one in contents.layers.items() if not _is_like(modules[name], one)}
    new = {name: one for name, one in contents.layers.items() if identity(one) in gone}
    check_layers(model, new.values())
    for name, layer in new.items():
        fill({name: layer}, state)
        _make_alike(layer, modules[name])
    within = tuple(f"{name}." for name in new)
    copied = {name: tensor for name, tensor in state.items() if not name.startswith(within)}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in copied}
    try:
        model.load_state_dict(copied, strict=False)
        put(model, new)
    except Exception as error:
        with suppress(Exception):  # what could not be written to was not
            model.load_state_dict(before, strict=False)
        raise ValueError(f"the model did not take its tensors ({error}); it is as it was.") from error
    for name, layer in contents.layers.items():
        if name not in new:
            old: Any = modules[name]
            take_options(old, layer)
            old.fit_error = None
    _share_biases(model, contents)
    tell(model)


def _share_biases(model: nn.Module, contents: Contents) -> None:
    """A head's bias that another module held as well is held by both again."""
    within = tuple(f"{name}." for name in contents.layers)
    held = {id(one): name for name, one in contents.tensors.items() if not name.startswith(within)}
    for name, layer in contents.layers.items():
        if isinstance(layer, Head) and layer.bias is not None:
            other = held.get(id(contents.tensors[inside(name, "bias")]))
            if other is not None:
                model.get_submodule(name).bias = model.get_parameter(other)


def _is_like(old: nn.Module, layer: StructuredTable) -> bool:
    """Whether a layer can take the numbers of another into its own Parameters."""
    if not isinstance(old, StructuredTable) or type(old).forward is not type(layer).forward:
        return False
    own = old.state_dict()
    same = old.structure == layer.structure and own.keys() == layer.state_dict().keys()
    return same and not any(tensor.is_meta for tensor in own.values())


def _make_alike(layer: StructuredTable, old: nn.Module) -> None:
    """Mode, device, dtype and what is frozen as in the module that it replaces."""
    layer.train(old.training)
    own = next((p for key, p in old.named_parameters() if key != "bias"), None)
    if own is not None and not own.is_meta:
        layer.to(device=own.device, dtype=own.dtype)
    shares = isinstance(layer, Head) and layer.is_tied
    for key, parameter in layer.named_parameters():
        like = getattr(old, "bias", None) if key == "bias" else own
        if like is not None and (key == "bias" or not shares):
            parameter.requires_grad_(like.requires_grad)


def _difference(found: Any, expected: Any) -> str:
    """The first few names that only one of them has, or that differ."""
    lacking, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if lacking or extra:
        parts = [f"without {', '.join(lacking[:3])}"] if lacking else []
        parts += [f"with {', '.join(extra[:3])}"] if extra else []
        return " and ".join(parts)
    other = [name for name in found if found[name] != expected[name]]
    return f"{other[0]} has shape {found[other[0]]}, not {expected[other[0]]}"
