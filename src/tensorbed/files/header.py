"""What a file of this library holds: read from its header, and refused with the reason where that is not sound."""

import json
import os
import stat
import warnings
import zlib
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tensorbed.checks import frames_in_packages, naming
from tensorbed.files.description import checked, rebuilt
from tensorbed.files.writing import STORED_AS, bytes_in_file
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable
from tensorbed.printable import short_messages, shortened
from tensorbed.structures.registry import refuse_constant

FORMAT = "tensorbed"
_CHECKSUMS = "tensorbed.checksums"  # an entry of the header, where other programs may have some too
# Not of the structure, so that mixed precision may leave them in another floating-point dtype.
_BESIDES = ("bias", "padding_row")


@dataclass(frozen=True)
class Checksums:
    """CRC-32 of the description and of each tensor by its name in the file, as hexadecimal digits."""

    description: str
    tensors: Mapping[str, str]

    @classmethod
    def of(cls, description: str, tensors: Mapping[str, Tensor]) -> Self:
        return cls(_of_text(description), {name: _of_tensor(tensor) for name, tensor in tensors.items()})

    @classmethod
    def read(cls, header: Mapping[str, str], path: object) -> Self | None:
        """Those in the header of a file; ``None`` where it has none."""
        if _CHECKSUMS not in header:
            return None
        try:
            entry = json.loads(header[_CHECKSUMS])
            description, tensors = entry["description"], entry["tensors"]
            sound = all(isinstance(text, str) for text in (description, *tensors.values()))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            sound = False
        if not sound:
            raise ValueError(f"the checksums in {path} cannot be read; the file is damaged.")
        return cls(description, tensors)

    def entry(self) -> dict[str, str]:
        """For the header of a file."""
        return {_CHECKSUMS: json.dumps({"description": self.description, "tensors": self.tensors})}

    def check_description(self, text: str, place: object) -> None:
        """``ValueError`` for a description that is not the one that was written."""
        fix = "to change an option, change the layer and save it again"
        _compare(f"the description in {place}", _of_text(text), self.description, fix)

    def check_tensor(self, name: str, tensor: Tensor, place: object) -> None:
        """``ValueError`` for a tensor that is not the one that was written under this name."""
        if name not in self.tensors:
            raise ValueError(f"{name} in {place} has no checksum, as the other tensors have; the file is damaged.")
        fix = "if a program has changed the tensor, have it drop the checksums from the header"
        _compare(f"{name} in {place}", _of_tensor(tensor), self.tensors[name], fix)


def _compare(what: str, found: str, written: str, fix: str) -> None:
    if found != written:
        damage = f"{what} is damaged: its checksum is {found}, and {written} was written"
        raise ValueError(f"{damage}. Take another copy of the file; {fix}.")


def _of_text(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _of_tensor(tensor: Tensor) -> str:
    """Of dtype and shape, which say what the bytes mean, and the bytes as a file has them."""
    meaning = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    return f"{zlib.crc32(bytes_in_file(tensor), meaning):08x}"


@dataclass(frozen=True)
class Contents:
    """A sound file: its layers, tied as they were, and all tensors by all of their names, still without numbers."""

    path: Path
    version: int
    layers: Mapping[str, StructuredTable]
    tensors: Mapping[str, Tensor]  # on the meta device, one for all of its names
    aliases: Mapping[str, str]
    checksums: Checksums | None

    def read(self, file: Any) -> dict[str, Tensor]:
        """The tensors by all of their names, all of them compared with their checksums, those of the layers checked."""
        # Copies: what comes out of the file is a view of it, and changes when it does.
        stored = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if self.checksums is None:
            warnings.warn(
                f"{self.path} has no checksums, as files of older versions, so that damage to its numbers cannot be "
                "seen; load it and write it again with tb.save(module, path), which adds them.",
                stacklevel=frames_in_packages("tensorbed"),
            )
        else:
            for name, tensor in stored.items():
                self.checksums.check_tensor(name, tensor, self.path)
        state = {name: stored[self.aliases.get(name, name)] for name in self.tensors}
        for name, layer in self.layers.items():
            own = {spec.name: state[inside(name, spec.name)] for spec in layer.structure.tensors()}
            with naming(f"layer {name!r} in {self.path}"):
                layer.structure.check_values(own)
        return state


def inside(name: str, key: str) -> str:
    """The full name of a layer's tensor; a layer that is a file by itself has no name."""
    return f"{name}.{key}" if name else key


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """The file, whose header safetensors has checked against its length."""
    check_readable(path)
    try:
        with short_messages(), safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        said = shortened(str(error), 300)
        raise ValueError(f"{path} is damaged or not a safetensors file ({said}).") from None


def check_readable(path: str | os.PathLike[str]) -> None:
    """``PermissionError`` where that is why: safetensors says of every file that it cannot open that there is none."""
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)  # what is no file may wait for a writer when it is opened
        if is_file:
            Path(path).open("rb").close()
    except PermissionError as error:
        raise PermissionError(
            f"{path} may not be read ({error.strerror}); change its permissions, for instance by chmod u+r, or "
            "those of its folder."
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        is_file = False
    if not is_file:
        raise FileNotFoundError(f"there is no file {path}.")


def understood(file: Any, path: Path) -> Contents:
    """The contents of an open file; nothing is allocated for its tensors."""
    header = file.metadata() or {}
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by tensorbed.save; its format is {header.get('format')!r}.")
    checksums = Checksums.read(header, path)
    if checksums is not None:
        checksums.check_description(header.get("description", ""), path)
    version, described, aliases = _description(header, set(file.keys()), path)
    tensors: dict[str, Tensor] = {}
    for name in file.keys():  # noqa: SIM118
        shape, stored_as = file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()
        dtype = next((dtype for dtype, known in STORED_AS.items() if known == stored_as), None)
        if dtype is None:
            raise ValueError(f"{name} in {path} is {stored_as}, which this version does not read; update tensorbed.")
        tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
    tensors |= {alias: tensors[name] for alias, name in aliases.items()}
    layers = _layers(described, aliases, path)
    for name, layer in layers.items():
        _check_tensors(layer, name, tensors, path)
    shared = {
        inside(name, key): id(tensor)
        for name, layer in layers.items()
        for key, tensor in layer.state_dict(keep_vars=True).items()
    }
    if wrong := differently_shared(shared, {name: id(tensors[name]) for name in shared}):
        one, other, tied = wrong
        here, there = ("tied", "stored apart") if tied else ("apart", "stored as one")
        raise ValueError(f"{path} describes {one} and {other} as {here}, but they are {there}.")
    return Contents(path, version, layers, tensors, aliases, checksums)


def differently_shared(
    one: Mapping[str, Hashable], other: Mapping[str, Hashable]
) -> tuple[str, str, bool] | None:  # of the same names
    """Two names that are one thing in only one of both, and whether that is the first; ``None`` where they agree."""
    first: dict[Hashable, str] = {}
    second: dict[Hashable, str] = {}
    for name in one:
        here, there = first.setdefault(one[name], name), second.setdefault(other[name], name)
        if here != there:
            tied = here != name and other[here] != other[name]
            return (here, name, True) if tied else (there, name, False)
    return None


def _description(
    header: Mapping[str, str], stored: set[str], path: Path
) -> tuple[int, dict[str, dict[str, Any]], dict[str, str]]:
    """Its version, the descriptions of the layers, and which tensor other names are for."""
    place = f"the description in {path}"
    try:
        found = json.loads(header["description"], parse_constant=refuse_constant)
        version, layers, aliases = found["version"], found["layers"], found["aliases"]
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{place} cannot be read ({type(error).__name__}: {error}).") from None
    layers = checked(version, layers, place)
    try:
        sound = set(aliases.values()) <= stored and not set(aliases) & stored
    except (TypeError, AttributeError):
        sound = False
    if not sound:
        raise ValueError(f"{place} has not the parts that it should have: aliases name tensors that are not stored.")
    return version, layers, aliases


def _layers(described: Mapping[str, Any], aliases: Mapping[str, str], path: Path) -> dict[str, StructuredTable]:
    """All layers without numbers, those tied that were, and one for all names of one."""
    layers: dict[str, StructuredTable] = {}
    alike: dict[Hashable, StructuredTable] = {}  # over the same tensors, the bias too
    for name, description in sorted(described.items(), key=lambda item: item[1]["tied_to"] is not None):
        to, bias = description["tied_to"], inside(name, "bias")
        with naming(f"layer {name!r} in {path}"):
            layer = rebuilt(description)
        if to is not None and layers[to].structure != layer.structure:
            raise ValueError(f"{path} ties {name!r} to {to!r}, which is no table of its shape.")
        own = aliases.get(bias, bias) if isinstance(layer, Head) and layer.bias is not None else None
        key = (name if to is None else to, json.dumps({**description, "tied_to": None}, sort_keys=True), own)
        layers[name] = alike.setdefault(key, layer)
        if to is not None and layers[name] is layer:
            layer.share(layers[to])
    return {name: layers[name] for name in described}


def _check_tensors(layer: StructuredTable, name: str, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Shapes and dtypes are those of the description."""
    for key, tensor in layer.state_dict().items():
        full = inside(name, key)
        found, shape = tensors.get(full), tuple(tensor.shape)
        if found is None or found.shape != shape:
            what = "is missing" if found is None else f"has shape {tuple(found.shape)}"
            raise ValueError(f"{full} {what} in {path}; its description needs {shape}.")
        if found.dtype != tensor.dtype and not (key in _BESIDES and found.is_floating_point()):
            raise ValueError(f"{full} is stored as {found.dtype} in {path}; its description needs {tensor.dtype}.")
