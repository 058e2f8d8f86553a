"""``tensorbed`` on models that are named as the Hugging Face Hub names them; the Hub itself is never asked."""

from pathlib import Path

import huggingface_hub
import pytest
from commands import SMALL, invoke, refused, run
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from model_folders import TEXTS, in_hub_cache, make_gguf, make_llama

from tensorbed.integrations.transformers import hub

INT8 = ("--format", "int8", *SMALL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    root = tmp_path_factory.mktemp("cache")
    make_llama(root / "llama")
    in_hub_cache(root, root / "llama", "models--org--llama")
    return root / "hub"


@pytest.fixture
def offline(cache, monkeypatch, tmp_path):
    """A Hub that does not answer, and the cache that the tests made; in an empty folder."""

    def silent(name):
        raise ConnectionError("no route\nto the Hub")

    monkeypatch.setattr(hub, "list_repo_files", silent)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("offline")
def test_every_command_finds_a_model_in_the_cache():
    assert "spectrum" in run("inspect", "org/llama")
    assert "all" in run("plan", "org/llama", *SMALL)
    said = run("compress", "org/llama", "out", *INT8)
    assert "tensorbed verify out --against org/llama" in said
    Path("texts.txt").write_text("\n".join(TEXTS))
    assert "cosine" in run("verify", "out", "--against", "org/llama", "--texts", "texts.txt")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("command", [("inspect",), ("plan",), ("compress", "out")])
def test_a_model_that_is_neither_here_nor_in_the_cache(command):
    line = refused(command[0], "org/gpt", *command[1:])
    assert "there is no folder org/gpt" in line
    assert line.endswith("the cache of the Hub has no such model, and it cannot be fetched: no route to the Hub")
    assert "there is no folder out" not in line
    assert not Path("out").exists()


@pytest.mark.usefixtures("offline")
def test_a_folder_of_that_name_comes_first():
    make_llama(Path("org") / "llama")
    (Path("org") / "llama" / "only_here.txt").touch()
    run("compress", "org/llama", "out", *INT8)
    assert (Path("out") / "only_here.txt").exists()


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "name", ["bert", "/org/bert", "../org/bert", "a/b/c", "org/be rt", ".org/bert", "a--b/c", "a/b..c"]
)
def test_what_cannot_be_a_name_of_the_hub_is_not_looked_up(name, monkeypatch):
    def asked(name):
        raise AssertionError(name)

    monkeypatch.setattr(hub, "list_repo_files", asked)
    assert hub.local_folder(Path(name)) == Path(name)


@pytest.mark.parametrize(
    ("kind", "said"), [(RepositoryNotFoundError, "the Hub shows no model of that name"), (GatedRepoError, "is gated")]
)
def test_a_model_that_the_hub_does_not_give(monkeypatch, tmp_path, kind, said):
    def unknown(name):
        raise kind.__new__(kind)

    monkeypatch.setattr(hub, "list_repo_files", unknown)
    line = refused("compress", "org/secret", tmp_path / "out")
    assert said in line
    assert "hf auth login" in line


@pytest.mark.usefixtures("offline")
def test_what_is_not_whole_in_the_cache_is_not_taken(cache):
    (cache.parent / "part").mkdir()
    (cache.parent / "part" / "config.json").write_text("{}")
    in_hub_cache(cache.parent, cache.parent / "part", "models--org--part")
    assert "it cannot be fetched" in refused("inspect", "org/part")


def test_only_what_is_read_is_fetched(monkeypatch, cache):
    files = [
        *("README.md", "config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "rust_model.ot"),
        *("2_Dense/pytorch_model.bin", "onnx/model.onnx", "model.safetensors.index.json", "weird[1].bin"),
    ]
    asked = {}
    monkeypatch.setattr(hub, "list_repo_files", lambda name: files)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: asked.update(options, name=name) or cache)
    assert hub.local_folder(Path("org/large")) == cache
    left = ["pytorch_model.bin", "tf_model.h5", "rust_model.ot", "onnx/model.onnx", "weird[[]1].bin"]
    assert asked == {"name": "org/large", "ignore_patterns": left}
    assert hub.unread(["a.bin", "a.gguf"]) == ["a.gguf"]
    assert hub.unread(["a.gguf", "b.h5"]) == ["b.h5"]


def test_unpacking_gguf_draws_no_bar_into_a_file(tmp_path, capfd):
    pytest.importorskip("gguf")
    make_gguf(tmp_path / "source")
    result = invoke("compress", tmp_path / "source", tmp_path / "out", *INT8)
    assert result.exit_code == 0
    assert "it/s" not in result.stderr + capfd.readouterr().err
