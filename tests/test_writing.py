"""Files are those that safetensors itself would have written, of every dtype that it has."""

import io
import json

import pytest
import torch
from safetensors.torch import _SIZE, load_file, save_file

from tensorbed.files import writing
from tensorbed.files.writing import STORED_AS, bytes_in_file, write_tensors


def of_dtype(dtype):
    """Some bytes, read as numbers of a dtype."""
    numbers = torch.arange(2 * 3 * dtype.itemsize, dtype=torch.uint8).view(2, 3 * dtype.itemsize)
    return numbers.bool() if dtype == torch.bool else numbers.view(dtype)


EVERY = {str(dtype): of_dtype(dtype) for dtype in STORED_AS}
EVERY |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5), 'a "name", ü, \n': torch.ones(5).half()}


def parts(data):
    """The header of a file, and the bytes of each tensor."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    ends = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return header, {name: data[8 + size + start : 8 + size + end] for name, (start, end) in ends.items()}


def written(tensors, metadata):
    file = io.BytesIO()
    write_tensors(file, tensors, metadata)
    return file.getvalue()


def test_files_are_those_of_safetensors(tmp_path):
    metadata = {"format": "tensorbed", "description": '{"ü": "\x01"}'}
    save_file(EVERY, tmp_path / "theirs", metadata)
    ours, theirs = parts(written(EVERY, metadata)), parts((tmp_path / "theirs").read_bytes())
    assert ours == theirs


def test_safetensors_reads_them(tmp_path):
    (tmp_path / "ours").write_bytes(written(EVERY, {}))
    found = load_file(tmp_path / "ours")
    assert found.keys() == EVERY.keys()
    for name, tensor in EVERY.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_in_file(found[name]) == bytes_in_file(tensor)


def test_every_tensor_is_aligned():
    data = written(EVERY, {"a": "b"})
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 8 == 0
    for name, tensor in EVERY.items():
        assert (start + parts(data)[0][name]["data_offsets"][0]) % tensor.element_size() == 0


def test_no_dtype_of_safetensors_is_forgotten():
    """But for pairs of four-bit numbers, which a file holds in another shape."""
    assert {dtype for dtype in _SIZE if dtype is not None} - set(STORED_AS) == {torch.float4_e2m1fn_x2}


def test_memory_is_written_as_it_is():
    sources = []

    class Recorded(io.BytesIO):
        def write(self, data):
            sources.append(data)
            return super().write(data)

    table = torch.zeros(1000, 4)
    write_tensors(Recorded(), {"table": table}, {})
    table[0, 0] = 1
    assert bytes(sources[-1][:4]) == b"\x00\x00\x80?"
    assert sum(len(data) for data in sources if isinstance(data, bytes)) < 200


def test_what_is_read_lives_as_long_as_its_reader():
    view = bytes_in_file(torch.arange(100_000, dtype=torch.int32)[::2])  # a copy that nobody else holds
    torch.zeros(50_000, dtype=torch.int32)
    assert bytes(view[-4:]) == (99_998).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("tensor", "swapped"),
    [
        (torch.tensor([1, 258], dtype=torch.int32), "0000000100000102"),
        (torch.tensor(1, dtype=torch.int16), "0001"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "3f80"),
        (torch.tensor([1 + 2j], dtype=torch.complex64), "3f80000040000000"),
        (torch.tensor([True, False]), "0100"),
        (torch.zeros(0), ""),
    ],
    ids=str,
)
def test_machines_of_the_other_byte_order_turn_the_bytes_round(tensor, swapped, monkeypatch):
    monkeypatch.setattr(writing.sys, "byteorder", "big")
    assert bytes_in_file(tensor).hex() == swapped


def test_what_a_file_cannot_hold_is_refused_before_anything_is_written(monkeypatch):
    file = io.BytesIO()
    with pytest.raises(ValueError, match=r"phases is torch.complex128, which safetensors files do not have; convert"):
        write_tensors(file, {"phases": torch.zeros(3, dtype=torch.complex128)}, {})
    monkeypatch.setattr(writing, "_LONGEST_HEADER", 100)
    with pytest.raises(ValueError, match="save the parts of the model apart"):
        write_tensors(file, {"table": torch.zeros(3)}, {"description": "long" * 100})
    assert file.getvalue() == b""
