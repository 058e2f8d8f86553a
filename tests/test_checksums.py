"""Damage to files is seen: every tensor and the description have a checksum, compared before anything is loaded."""

import copy
import json
import random
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_contents import LAYERS
from test_files import Model, checksums_of, header_of, rewrite, same
from torch import nn

import tensorbed as tb
from tensorbed.cli.inspection import inspect
from tensorbed.files.description import described


def every_layer(seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: make() for name, make in LAYERS.items()})
    model["tied"] = tb.Head.tied_to(model["embedding"], bias=True)
    model["body"] = nn.Linear(3, 3)
    model["body"].register_buffer("mask", torch.arange(7, dtype=torch.uint8))
    return model


def test_checksums_are_of_the_bytes_in_the_file(tmp_path):
    path = tmp_path / "m"
    for model in (Model().bfloat16(), Model(tied=False)):
        tb.save(model, path)
        header, body = header_of(path)
        assert json.loads(header["__metadata__"]["tensorbed.checksums"]) == checksums_of(header, body)


def test_every_flipped_bit_of_a_tensor_is_seen_and_named(tmp_path):
    """Some bits of every tensor, its first and last among them."""
    path = tmp_path / "m"
    model = every_layer()
    tb.save(model, path)
    header, body = header_of(path)
    tensors = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    chance, before = random.Random(0), copy.deepcopy(model)
    for name, (start, stop) in tensors.items():
        for bit in {8 * start, 8 * stop - 1, *(chance.randrange(8 * start, 8 * stop) for _ in range(4))}:
            damaged = bytearray(body)
            damaged[bit // 8] ^= 1 << bit % 8
            rewrite(path, header, bytes(damaged))
            with pytest.raises(ValueError, match=rf"{name} in .*m is damaged: .* checksum"):
                tb.load(path, into=model)
    same(model, before)


def test_a_damaged_layer_is_refused_by_all_who_read_its_numbers(tmp_path):
    path = tmp_path / "layer"
    tb.save(tb.Embedding(300, 12, tb.LowRank(rank=2)), path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for read in (tb.load, inspect):
        with pytest.raises(ValueError, match=r"v in .*layer is damaged"):
            read(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"std": null', '"std": 1.25'),
        ('"padding_idx": 4', '"padding_idx": 5'),
        ('rows\\": 300', 'rows\\": 299'),
        ('"version": 2', '"version": 9'),
    ],
)
def test_a_changed_description_is_refused(old, new, tmp_path):
    path = tmp_path / "layer"
    tb.save(LAYERS["embedding"](), path)
    header, body = header_of(path)
    description = header["__metadata__"]["description"]
    assert old in description
    header["__metadata__"]["description"] = description.replace(old, new)
    rewrite(path, header, body)
    with pytest.raises(ValueError, match=r"the description in .*layer is damaged: .* checksum"):
        tb.load(path)


@pytest.mark.parametrize(
    ("checksums", "match"),
    [
        ("", "the checksums in .* cannot be read"),
        ("[]", "the checksums in .* cannot be read"),
        ('{"description": 1, "tensors": {}}', "cannot be read"),
        ('{"description": "00000000", "tensors": []}', "cannot be read"),
        ('{"description": "00000000", "tensors": {"core_0": 7}}', "cannot be read"),
        ('{"tensors": {}}', "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("1" * 5000, "cannot be read"),
    ],
)
def test_checksums_that_are_none_are_refused(checksums, match, tmp_path):
    path = tmp_path / "layer"
    tb.save(LAYERS["embedding"](), path)
    header, body = header_of(path)
    header["__metadata__"]["tensorbed.checksums"] = checksums
    rewrite(path, header, body)
    with pytest.raises(ValueError, match=match):
        tb.load(path)


def test_a_tensor_without_its_checksum_is_refused(tmp_path):
    path = tmp_path / "layer"
    tb.save(LAYERS["embedding"](), path)
    header, body = header_of(path)
    checksums = json.loads(header["__metadata__"]["tensorbed.checksums"])
    checksums["tensors"].pop("core_1")
    header["__metadata__"]["tensorbed.checksums"] = json.dumps(checksums)
    rewrite(path, header, body)
    with pytest.raises(ValueError, match=r"core_1 in .* has no checksum"):
        tb.load(path)


def test_dtypes_that_are_read_in_another_way_are_refused(tmp_path):
    """The same bytes as other numbers: of a tensor that no layer describes."""
    path = tmp_path / "m"
    tb.save(every_layer(), path)
    header, body = header_of(path)
    header["body.mask"]["dtype"] = "I8"
    rewrite(path, header, body)
    with pytest.raises(ValueError, match=r"body\.mask in .* is damaged"):
        tb.load(path, into=every_layer())


def test_files_of_before_load_with_a_note(tmp_path):
    path, model = tmp_path / "m", Model()
    tb.save(model, path)
    header, body = header_of(path)
    header["__metadata__"].pop("tensorbed.checksums")
    rewrite(path, header, body)
    with pytest.warns(UserWarning, match=r"m has no checksums, .* tb\.save\(") as notes:
        same(tb.load(path, into=Model(compressed=False)), model)
    assert [note.filename for note in notes] == [__file__]
    with pytest.warns(UserWarning, match="no checksums") as notes:
        inspect(path)
    assert len(notes) == 1
    tb.save(model, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tb.load(path, into=Model())


def test_the_header_of_a_file_has_three_entries(tmp_path):
    tb.save(LAYERS["embedding"](), tmp_path / "layer")
    header, _ = header_of(tmp_path / "layer")
    assert set(header["__metadata__"]) == {"format", "description", "tensorbed.checksums"}


def test_strided_empty_and_single_numbers_have_checksums(tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"words": tb.TTEmbedding(300, 12, 3)})
        others = {
            "turned": torch.randn(4, 5).T,
            "none": torch.empty(0, 3),
            "single": torch.randn(()),
            "yes": torch.ones(3) > 0,
        }
        for name, tensor in others.items():
            model.register_buffer(name, tensor)
        return model

    tb.save(made(0), tmp_path / "m")
    same(tb.load(tmp_path / "m", into=made(1)), made(0))


def test_random_bytes_anywhere_are_refused_or_harmless(tmp_path):
    """Bits, bytes and lengths of whole files: what loads is what was saved."""
    path = tmp_path / "m"
    model, other = every_layer(), every_layer(seed=1)
    tb.save(model, path)
    good, chance = path.read_bytes(), random.Random(0)
    head = 8 + int.from_bytes(good[:8], "little")
    refused = 0
    for number in range(100):
        damaged = bytearray(good)
        for _ in range(chance.choice([1, 1, 2, 8])):
            place = chance.randrange(len(good) if number % 2 else head)
            damaged[place] = damaged[place] ^ (1 << chance.randrange(8)) if number % 3 else chance.randrange(256)
        path.write_bytes(damaged)
        into = copy.deepcopy(other)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tb.load(path, into=into)
            except ValueError:
                refused += 1
                continue
        same(into, model)
        assert [described(into[name]) for name in LAYERS] == [described(model[name]) for name in LAYERS]
    assert refused > 80


def test_other_programs_that_write_our_files_lose_the_checksums_only(tmp_path):
    path = tmp_path / "layer"
    layer = LAYERS["embedding"]()
    tb.save(layer, path)
    header, _ = header_of(path)
    kept = {name: text for name, text in header["__metadata__"].items() if name != "tensorbed.checksums"}
    save_file(load_file(path), path, kept)
    with pytest.warns(UserWarning, match="no checksums"):
        same(tb.load(path), layer)
