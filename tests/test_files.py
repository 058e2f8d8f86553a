"""Files: round trips, refusals, and nothing half-done."""

import copy
import fcntl
import json
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import zlib
from pathlib import Path

import pytest
import torch
from rights import without_rights
from safetensors.torch import load_file, save_file
from samples import SAMPLES
from torch import nn

import tensorbed as tb
from tensorbed.files.writing import write_tensors

EVERY = [group[0] for group in SAMPLES.values()]


def made(sample, kind=tb.Embedding, **options):
    torch.manual_seed(0)
    if not sample.structure.can_initialise:
        return kind.from_pretrained(torch.randn(sample.rows, sample.cols), sample.format, **options)
    if kind is tb.Head:
        return tb.Head(sample.cols, sample.rows, sample.format, **options)
    return kind(sample.rows, sample.cols, sample.format, **options)


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize("sample", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_come_back_as_they_were(sample, dtype, tmp_path):
    path = tmp_path / "layer.safetensors"
    bias = torch.ones(sample.rows) if not sample.structure.can_initialise else True
    layers = [
        made(sample, padding_idx=1, scale_grad_by_freq=True, std=0.1),
        made(sample, tb.EmbeddingBag, mode="sum", include_last_offset=True),
        made(sample, tb.Head, bias=bias, memory_budget=12345),
    ]
    for layer in layers:
        layer.to(dtype)
        tb.save(layer, path)
        found = tb.load(path)
        same(layer, found)
        assert repr(found).partition("(")[2] == repr(layer).partition("(")[2]
        assert found.structure == layer.structure
        for name in (
            "padding_idx",
            "mode",
            "include_last_offset",
            "scale_grad_by_freq",
            "std",
            "memory_budget",
            "impl",
        ):
            assert getattr(found, name, None) == getattr(layer, name, None)
    index = torch.tensor([0, 1, 2, 2])
    tb.save(layers[0], path)
    assert torch.equal(tb.load(path)(index), layers[0](index))
    assert [f.name for f in tmp_path.iterdir()] == ["layer.safetensors"]


class Model(nn.Module):
    def __init__(self, compressed=True, tied=True, rank=3, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        if compressed:
            self.words, self.head = tb.embedding_and_head(300, 12, tb.TensorTrain(rank=rank), tied=tied, padding_idx=2)
        else:
            self.words, self.head = nn.Embedding(300, 12, padding_idx=2), nn.Linear(12, 300, bias=False)
            self.head.weight = self.words.weight if tied else self.head.weight
        self.body = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12))

    def forward(self, index):
        return self.head(self.body(self.words(index)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("compressed", [True, False], ids=["into its like", "into a dense one"])
def test_models_come_back_tied_as_they_were(tied, compressed, tmp_path):
    path = tmp_path / "model.safetensors"
    model = Model(tied=tied).eval()
    tb.save(model, path)
    other = Model(compressed=compressed, tied=tied, seed=1).eval()
    assert tb.load(path, into=other) is other
    same(model, other)
    assert (other.head.core_0 is other.words.core_0) is tied
    index = torch.arange(7)
    assert torch.equal(other(index), model(index))
    assert not other.words.training
    stored = load_file(path)
    assert ("head.core_0" in stored) is not tied


def test_a_frozen_table_stays_frozen(tmp_path):
    tb.save(Model(), tmp_path / "m")
    other = Model(compressed=False)
    other.words.requires_grad_(False)
    tb.load(tmp_path / "m", into=other)
    assert not other.words.core_0.requires_grad


def header_of(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def rewrite(path, header, body):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


# The dtypes of torch that safetensors names otherwise.
NAMED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
NAMED |= {"I8": "int8", "U8": "uint8", "BOOL": "bool"}


def checksums_of(header, body):
    """What the checksums of a file have to be, from its bytes."""
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            kind = f"torch.{NAMED[entry['dtype']]} {entry['shape']}".encode()
            tensors[name] = f"{zlib.crc32(body[start:stop], zlib.crc32(kind)):08x}"
    description = header["__metadata__"]["description"].encode()
    return {"description": f"{zlib.crc32(description):08x}", "tensors": tensors}


def rewrite_on_purpose(path, header, body):
    """As somebody does who is right about the checksums."""
    header["__metadata__"]["tensorbed.checksums"] = json.dumps(checksums_of(header, body))
    rewrite(path, header, body)


def described(path, change):
    """The same file with its description changed."""
    header, body = header_of(path)
    description = json.loads(header["__metadata__"]["description"])
    header["__metadata__"]["description"] = json.dumps(change(description))
    rewrite_on_purpose(path, header, body)


@pytest.mark.parametrize(
    "layer",
    [tb.TTEmbedding(300, 12, 3), tb.TTEmbeddingBag(300, 12, 3, mode="max"), tb.TTHead(12, 300, 3, bias=True)],
    ids=lambda layer: type(layer).__name__,
)
def test_shorthands_stay_what_they_are(layer, tmp_path):
    tb.save(layer, tmp_path / "layer")
    assert type(tb.load(tmp_path / "layer")) is type(layer)
    low_rank = '{"kind": "low_rank", "rows": 300, "cols": 12, "rank": 2}'
    described(tmp_path / "layer", lambda d: edit(d, structure=low_rank))
    with pytest.raises(ValueError, match="has a tensor train, not a low_rank table"):
        tb.load(tmp_path / "layer")


def test_numbers_of_a_shorthand_go_into_the_general_layer(tmp_path):
    """It has the structure already, and an optimiser over it goes on."""
    tb.save(nn.ModuleList([tb.TTEmbedding(300, 12, 3)]), tmp_path / "model")
    model = nn.ModuleList([tb.Embedding(300, 12, tb.TensorTrain(rank=3))])
    kept = list(model.parameters())
    tb.load(tmp_path / "model", into=model)
    assert all(one is other for one, other in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: {**d, "version": 3}, "version 3 of the format"),
        (lambda d: {**d, "version": "1"}, "has not the parts"),
        (lambda d: {**d, "layers": {}}, "has not the parts"),
        (lambda d: [], "cannot be read"),
        (lambda d: {"version": 1}, "cannot be read"),
        (lambda d: edit(d, layer="Convolution"), "not a description of a layer"),
        (lambda d: edit(d, dtype="int8"), "not a description of a layer"),
        (lambda d: edit(d, structure="{}"), "not a description of a layer"),
        (lambda d: edit(d, structure=d["layers"][""]["structure"].replace("train", "tram")), "not a description"),
        (
            lambda d: edit(d, structure=d["layers"][""]["structure"].replace("300", "10000000000000")),
            "fewer than num_embeddings",
        ),
        (lambda d: edit(d, options={"colour": 1}), "unknown options colour"),
        (lambda d: edit(d, tied_to="words"), "which is no table of its shape"),
        (lambda d: {**d, "layers": {"words": d["layers"][""]}}, "is missing"),
        (lambda d: edit(d, same_as="words"), "which is no table of its shape"),
        (lambda d: {**d, "aliases": {"a": "nowhere"}}, "has not the parts"),
        (lambda d: {**d, "aliases": {"core_0": "core_1"}}, "has not the parts"),
        (lambda d: {**d, "version": 0}, "has not the parts"),
        (lambda d: edit(d, structure="[" * 100_000), "not a description of a layer"),
        (lambda d: edit(d, structure=d["layers"][""]["structure"].replace("[", "[-", 1)), "not a description"),
    ],
)
def test_descriptions_that_are_not_ours_are_refused(change, match, tmp_path):
    path = tmp_path / "layer"
    tb.save(tb.TTEmbedding(300, 12, 3), path)
    described(path, change)
    with pytest.raises(ValueError, match=match):
        tb.load(path)


def edit(description, **fields):
    return {**description, "layers": {"": {**description["layers"][""], **fields}}}


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "f"
    with pytest.raises(FileNotFoundError, match="no file"):
        tb.load(path)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="was not written by tensorbed"):
        tb.load(path)
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        tb.load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="damaged"):
        tb.load(path)


def test_another_model_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "m"
    tb.save(Model(), path)
    with pytest.raises(ValueError, match="give the model"):
        tb.load(path)
    for other, match in (
        (nn.Sequential(nn.Linear(2, 2)), "the model has no"),
        (nn.ModuleDict({"words": nn.Embedding(3, 3), "head": nn.Linear(3, 3)}), "is of another model"),
    ):
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(ValueError, match=match):
            tb.load(path, into=other)
        assert all(torch.equal(before[name], t) for name, t in other.state_dict().items())
    layer = tmp_path / "layer"
    tb.save(tb.TTEmbedding(300, 12, 3), layer)
    with pytest.raises(ValueError, match="is one layer, and not of a model"):
        tb.load(layer, into=Model())


@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        (lambda: 3, TypeError, "got int"),
        (lambda: nn.Linear(2, 2), ValueError, "nothing here is a layer of tensorbed"),
        (lambda: tb.TTEmbedding(300, 12, 3, device="meta"), ValueError, "meta device"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_the_old_file_stays(what, error, match, tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(error, match=match):
        tb.save(what(), path)
    assert path.read_text() == "old"
    with pytest.raises(IsADirectoryError, match="is a folder"):
        tb.save(tb.TTEmbedding(300, 12, 3), tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        tb.save(tb.TTEmbedding(300, 12, 3), tmp_path / "a" / "b")
    assert [f.name for f in tmp_path.iterdir()] == ["f"]


@pytest.mark.filterwarnings("ignore:.*has no checksums")
def test_damaged_files_give_clear_errors_only(tmp_path):
    """Truncations, flipped bytes and changed numbers in the header: two thousand; what loads is what was saved."""
    path, saved = tmp_path / "m", Model(rank=1)
    tb.save(saved, path)
    good, model = path.read_bytes(), Model(compressed=False, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (size,) = struct.unpack("<Q", good[:8])
    chance = random.Random(0)
    cases = [good[: chance.randrange(len(good))] for _ in range(300)]
    for _ in range(1500):
        broken = bytearray(good)
        for _ in range(chance.choice([1, 1, 2, 8])):
            broken[chance.randrange(8 + size)] = chance.randrange(256)
        cases.append(bytes(broken))
    digits = [i for i in range(8, 8 + size) if chr(good[i]).isdigit()]
    for _ in range(300):
        broken = bytearray(good)
        broken[chance.choice(digits)] = ord(chance.choice("0123456789"))
        cases.append(bytes(broken))
    reasons = []
    for case in cases:
        path.write_bytes(case)
        into = copy.deepcopy(model)
        try:
            tb.load(path, into=into)
        except ValueError as error:
            reasons.append(str(error))
        else:
            same(into, saved)
            assert str(into) == str(saved)
            assert into.words.std == saved.words.std
    assert len(reasons) > 0.8 * len(cases)
    assert min(map(len, reasons)) > 20
    path.write_bytes(good[:-1])
    with pytest.raises(ValueError, match="damaged"):
        tb.load(path, into=model)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_a_process_killed_while_saving_leaves_the_old_file(tmp_path):
    """Killed at the moment the new file is complete but not yet in its place."""
    path = tmp_path / "layer"
    old = tb.TTEmbedding(300, 12, 3)
    tb.save(old, path)
    code = f"""
        import os, signal, tensorbed as tb, tensorbed.files.saving as files
        files.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        tb.save(tb.TTEmbedding(300, 12, 5), {str(path)!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    same(old, tb.load(path))


def test_an_error_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "layer"
    tb.save(tb.TTEmbedding(300, 12, 3), path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("tensorbed.files.saving.write_tensors", full)
    with pytest.raises(OSError, match="No space"):
        tb.save(tb.TTEmbedding(300, 12, 5), path)
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["layer"]


def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(tmp_path):
    """Which safetensors' own is not. A limit on the size of files gives the error of a full disk."""
    path = tmp_path / "layer"
    tb.save(tb.TTEmbedding(300, 12, 3), path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=rf"{re.escape(str(path))} cannot be written: .*File too large"):
            tb.save(tb.Embedding(3000, 16, tb.LowRank(rank=4)), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["layer"]


def test_what_was_loaded_does_not_change_with_its_file(tmp_path):
    path = tmp_path / "layer"
    tb.save(tb.Embedding(3000, 16, tb.LowRank(rank=4)), path)
    layer = tb.load(path)
    before = layer.weight.detach().clone()
    with path.open("r+b") as file:
        file.seek(-10_000, 2)
        file.write(b"\x01" * 10_000)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    "other",
    [nn.Embedding(77, 12), nn.Embedding(300, 16), nn.EmbeddingBag(300, 12), nn.Linear(12, 300), nn.Identity()],
    ids=str,
)
def test_a_layer_takes_the_place_of_its_like_only(other, tmp_path):
    path = tmp_path / "m"
    tb.save(Model(), path)
    model = Model(compressed=False)
    model.words = other
    with pytest.raises(ValueError, match="is of another model"):
        tb.load(path, into=model)
    assert model.words is other


def test_the_models_dtype_stays(tmp_path):
    tb.save(Model().bfloat16(), tmp_path / "m")
    model = tb.load(tmp_path / "m", into=Model(compressed=False).double()).eval()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model(torch.arange(3)).dtype == torch.float64


def test_a_module_in_two_places_comes_back_as_one(tmp_path):
    def two(shared):
        return nn.ModuleDict({"a": shared, "inner": nn.ModuleDict({"b": shared})})

    tb.save(two(tb.TTEmbedding(300, 12, 3)), tmp_path / "m")
    model = tb.load(tmp_path / "m", into=two(nn.Embedding(300, 12)))
    assert model["a"] is model["inner"]["b"]
    assert model["a"].structure.kind == "tensor_train"


def test_layers_of_others_are_refused(tmp_path):
    class Louder(tb.Embedding):
        def forward(self, index):
            return 10 * super().forward(index)

    with pytest.raises(TypeError, match="Louder has a forward of its own"):
        tb.save(Louder(300, 12, tb.LowRank(rank=2)), tmp_path / "m")


def test_permissions_and_links_stay(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    tb.save(tb.TTEmbedding(300, 12, 3), real)
    mask = os.umask(0)
    os.umask(mask)
    assert real.stat().st_mode & 0o777 == 0o666 & ~mask
    real.chmod(0o640)
    link.symlink_to(real)
    tb.save(tb.TTEmbedding(300, 12, 2), link)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert tb.load(real).structure.ranks == (1, 2, 2, 1)


def test_the_umask_is_the_processs_own(tmp_path, monkeypatch):
    """It belongs to all threads: changed for a moment, it changes the files of others."""
    masks = []
    monkeypatch.setattr(os, "umask", masks.append)
    tb.save(tb.TTEmbedding(300, 12, 3), tmp_path / "layer")
    assert masks == []


def test_a_private_file_is_private_while_it_is_written(tmp_path, monkeypatch):
    path = tmp_path / "layer"
    tb.save(tb.TTEmbedding(300, 12, 3), path)
    path.chmod(0o400)
    modes = []

    def writing(file, tensors, header):
        write_tensors(file, tensors, header)
        modes.append(os.stat(file.name).st_mode & 0o777)

    monkeypatch.setattr("tensorbed.files.saving.write_tensors", writing)
    tb.save(tb.TTEmbedding(300, 12, 3), path)
    assert modes == [0o600]
    assert path.stat().st_mode & 0o777 == 0o400


@pytest.fixture
def flushed_on_windows(monkeypatch):
    """What is flushed on a system that opens no folder, and flushes no file that was opened for reading."""
    opening, flushing, flushed = os.open, os.fsync, []

    def windows_open(path, flags, *mode, **more):
        if os.path.isdir(path):
            raise PermissionError(13, os.strerror(13), str(path))
        return opening(path, flags, *mode, **more)

    def windows_fsync(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, os.strerror(9))
        flushed.append(descriptor)
        flushing(descriptor)

    monkeypatch.setattr(os, "open", windows_open)
    monkeypatch.setattr(os, "fsync", windows_fsync)
    return flushed


def test_folders_that_cannot_be_opened_are_not_an_error(tmp_path, flushed_on_windows):
    layer = tb.TTEmbedding(300, 12, 3)
    tb.save(layer, tmp_path / "layer")
    assert len(flushed_on_windows) == 1
    same(layer, tb.load(tmp_path / "layer"))
    assert [f.name for f in tmp_path.iterdir()] == ["layer"]


def test_folders_of_models_are_put_in_place_on_windows_too(tmp_path, flushed_on_windows):
    pytest.importorskip("transformers")
    from tensorbed.integrations.transformers.compressing import put_in_place

    with put_in_place(tmp_path / "out") as part:
        (part / "inside").mkdir()
        for file in (part / "config.json", part / "inside" / "config.json"):
            file.write_text("{}")
    assert len(flushed_on_windows) == 2
    assert (tmp_path / "out" / "inside" / "config.json").read_text() == "{}"


def test_a_file_that_may_not_be_read_is_not_called_missing():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer"
        tb.save(tb.TTEmbedding(300, 12, 3), path)
        path.chmod(0)
        os.chmod(folder, 0o711)
        with without_rights(), pytest.raises(PermissionError, match=r"layer may not be read .*chmod"):
            tb.load(path)
        path.chmod(0o666)
        os.chmod(folder, 0)
        with without_rights(), pytest.raises(PermissionError, match="may not be read"):
            tb.load(path)
        os.chmod(folder, 0o700)


def test_a_model_that_does_not_take_its_tensors_is_as_it_was(tmp_path):
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.words = nn.Linear(2, 2), nn.Embedding(300, 12)
            self.register_buffer("b", torch.ones(1).expand(4))  # cannot be written to

    model = Stubborn()
    good = Stubborn()
    good.b, good.words = torch.zeros(4), tb.TTEmbedding(300, 12, 3)
    tb.save(good, tmp_path / "m")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="it is as it was"):
        tb.load(tmp_path / "m", into=model)
    assert type(model.words) is nn.Embedding
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_takes_the_padding_row_of_its_file_and_keeps_its_parameters(tmp_path):
    model, other = (nn.Sequential(tb.TTEmbedding(50, 8, 2, padding_idx=row)) for row in (3, 4))
    tb.save(model, tmp_path / "f")
    before = list(other.parameters())
    tb.load(tmp_path / "f", into=other)
    assert other[0].padding_idx == 3
    assert all(one is old for one, old in zip(other.parameters(), before, strict=True))
    assert torch.equal(other(torch.arange(50)), model(torch.arange(50)))
