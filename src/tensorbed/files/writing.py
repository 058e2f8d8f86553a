"""Tensors into a safetensors file: by torch alone, since safetensors' own function for it needs numpy.

The format is a length, a header in JSON and the bytes of all tensors: https://github.com/huggingface/safetensors#format.
"""

import ctypes
import json
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

# What safetensors calls the dtypes, in the order in which it writes tensors: the widest first, so that all are aligned.
STORED_AS = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: place for place, dtype in enumerate(STORED_AS)}
_ALIGNMENT = 8
_LONGEST_HEADER = 100_000_000  # what readers take


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a whole file: the tensors, from any device, one after the other and without a copy of those in memory."""
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED_AS:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files do not have; convert it first.")
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": STORED_AS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _LONGEST_HEADER:
        raise ValueError(
            f"the names and descriptions of {len(tensors):,} tensors take {len(text):,} bytes, more than the "
            f"{_LONGEST_HEADER:,} that a safetensors file may have; save the parts of the model apart."
        )
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in names:
        file.write(bytes_in_file(tensors[name]))


def bytes_in_file(tensor: Tensor) -> memoryview:
    """A tensor's bytes as files have them, little-endian: its own memory where that is in order, else a copy."""
    plain = tensor.detach().cpu().contiguous()
    if sys.byteorder == "big":
        numbers = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
        plain = numbers.view(torch.uint8).view(-1, numbers.element_size()).flip(-1)
    size = plain.numel() * plain.element_size()
    memory = (ctypes.c_ubyte * size).from_address(plain.data_ptr()) if size else (ctypes.c_ubyte * 0)()
    memory.owner = plain  # type: ignore[attr-defined]  # what is read lives as long as its reader
    return memoryview(memory)
