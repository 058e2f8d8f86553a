"""Checksums of what a file holds, written into its header and compared when it is read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from tensorbed.files.writing import bytes_in_file

_ENTRY = "tensorbed.checksums"  # of the header, where other programs may have entries too


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
        if _ENTRY not in header:
            return None
        try:
            entry = json.loads(header[_ENTRY])
            description, tensors = entry["description"], entry["tensors"]
            sound = all(isinstance(text, str) for text in (description, *tensors.values()))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            sound = False
        if not sound:
            raise ValueError(f"the checksums in {path} cannot be read; the file is damaged.")
        return cls(description, tensors)

    def entry(self) -> dict[str, str]:
        """For the header of a file."""
        return {_ENTRY: json.dumps({"description": self.description, "tensors": self.tensors})}

    def check_description(self, text: str, place: object) -> None:
        """``ValueError`` for a description that is not the one that was written."""
        if (found := _of_text(text)) != self.description:
            raise ValueError(
                f"the description in {place} is damaged: {_difference(found, self.description)}. Take another copy of "
                "the file; to change an option, change the layer and save it again."
            )

    def check_tensor(self, name: str, tensor: Tensor, place: object) -> None:
        """``ValueError`` for a tensor that is not the one that was written under this name."""
        if name not in self.tensors:
            raise ValueError(f"{name} in {place} has no checksum, as the other tensors have; the file is damaged.")
        if (found := _of_tensor(tensor)) != self.tensors[name]:
            raise ValueError(
                f"{name} in {place} is damaged: {_difference(found, self.tensors[name])}. Take another copy of the "
                "file; if a program has changed the tensor, have it drop the checksums from the header."
            )


def _difference(found: str, written: str) -> str:
    return f"its checksum is {found}, and {written} was written"


def _of_text(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _of_tensor(tensor: Tensor) -> str:
    """Of dtype and shape, which say what the bytes mean, and the bytes as a file has them."""
    meaning = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    return f"{zlib.crc32(bytes_in_file(tensor), meaning):08x}"
