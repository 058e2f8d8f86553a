"""Folders of sentence-transformers: what belongs to other modules than the model is copied whole."""

import json
import shutil

import pytest
import torch
from commands import SMALL, run
from model_folders import TEXTS, make_bert, save_tokenizer, small

from tensorbed.integrations.transformers import folders


@pytest.fixture
def routed(tmp_path):
    """A model with a router over dense layers, and a dense layer after it, saved by sentence-transformers."""
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Router, Transformer

    small("BertModel").save_pretrained(tmp_path / "bert")
    save_tokenizer(tmp_path / "bert")
    torch.manual_seed(1)
    router = Router({"query": [Dense(32, 24)], "document": [Dense(32, 48), Dense(48, 24)]}, default_route="query")
    modules = [Transformer(str(tmp_path / "bert")), Pooling(32, "mean"), router, Dense(24, 16)]
    library.SentenceTransformer(modules=modules, device="cpu").save_pretrained(
        str(tmp_path / "routed"), create_model_card=False
    )
    return tmp_path / "routed"


def test_nested_modules_are_copied_and_the_result_loads(routed, tmp_path):
    from sentence_transformers import SentenceTransformer

    modules = json.loads((routed / "modules.json").read_text())
    for module, path in zip(modules, ("", "./1_Pooling", "2_Router/", ".//3_Dense/."), strict=True):
        module["path"] = path
    (routed / "modules.json").write_text(json.dumps(modules))
    out, texts = tmp_path / "out", [text for text in TEXTS if text]
    run("compress", routed, out, "--format", "int8", *SMALL)
    before, after = (SentenceTransformer(str(one), device="cpu", local_files_only=True) for one in (routed, out))
    assert type(after[0].auto_model.embeddings.word_embeddings).__name__ == "Embedding"
    for task in ("query", "document"):
        vectors = [torch.as_tensor(model.encode(texts, task=task)) for model in (before, after)]
        assert vectors[0].shape == (len(texts), 16)
        # Codes of 8 bits are off by at most half a step of 1/127 of what is largest in a row.
        assert torch.linalg.norm(vectors[0] - vectors[1]) < 0.02 * torch.linalg.norm(vectors[0])


WEIGHTS = {
    "model.safetensors": "model",
    "pytorch_model.bin": "old",
    "onnx/model.onnx": "old",
    "2_Router/a_0_Dense/model.safetensors": "module",
    "2_Router/a_0_Dense/deeper/still/pytorch_model.bin": "module",
    "2_Router/.state/model.safetensors": "module",
    "4_Own/sub/model.safetensors": "module",
    "4_Own/sub2/model.safetensors": "old",
    ".hidden/3_Dense/model.safetensors": "module",
    ".cache/model/config.json": "old",
    "4_Own/.cache/config.json": "old",
    "2_Routers/model.safetensors": "old",
}


@pytest.mark.parametrize("model", ["", "4_Own"])
def test_weights_are_copied_with_the_module_they_belong_to(tmp_path, model):
    """The nearest of the modules that lie above a file has it."""
    source, out = tmp_path / "source", tmp_path / "out"
    make_bert(source / model)
    for name in WEIGHTS:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if name != "model.safetensors":
            (source / name).write_text(name)
    paths = [model, "./2_Router/", "4_Own/sub/", ".hidden/3_Dense", "5_Normalize", "2_Router"]
    (source / "modules.json").write_text(json.dumps([{"path": path} for path in paths]))
    run("compress", source, out, "--format", "int8", *SMALL)
    for name, what in WEIGHTS.items():
        if what == "module":
            assert (out / name).read_text() == name
        elif what == "old":
            assert not (out / name).exists(), name
    assert folders.opened(out).is_compressed
    assert folders.opened(source).modules == ("2_Router", "4_Own/sub", ".hidden/3_Dense", "5_Normalize")


def test_a_module_in_the_root_keeps_its_weights(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    make_bert(source / "0_Transformer")
    (source / "model.safetensors").write_text("of the second module")
    (source / "modules.json").write_text(json.dumps([{"path": "0_Transformer"}, {"path": "."}]))
    run("compress", source, out, "--format", "int8", *SMALL)
    assert (out / "model.safetensors").read_text() == "of the second module"
    assert not (out / "0_Transformer" / "tf_model.h5").exists()


def test_large_files_of_modules_are_copied(tmp_path, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "out"
    make_bert(source)
    monkeypatch.setattr(folders, "_LARGE", 5_000)
    for name in ("notes.txt", "2_Dense/vectors.txt"):
        (source / name).write_bytes(bytes(6_000))
    notes = json.loads(run("compress", source, out, "--format", "int8", *SMALL, "--json"))["notes"]
    assert (out / "2_Dense" / "vectors.txt").stat().st_size == 6_000
    assert not (out / "notes.txt").exists()
    assert any(note.startswith("notes.txt was not copied") for note in notes)


def test_folders_that_cannot_be_read_are_not_left_out_in_silence(tmp_path, monkeypatch):
    """os.walk passes over them if nothing else is said."""
    source = make_bert(tmp_path / "source")
    scandir = folders.os.scandir

    def refusing(path):
        if str(path).endswith("2_Dense"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(folders.os, "scandir", refusing)
    with pytest.raises(PermissionError):
        folders.rest_of(folders.opened(source))
    shutil.rmtree(source / "2_Dense")
    folders.rest_of(folders.opened(source))
