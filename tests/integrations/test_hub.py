"""``tensorbed`` on models that are named as the Hugging Face Hub names them; the Hub itself is never asked."""

import json
import os
import re
from pathlib import Path

import huggingface_hub
import pytest
from commands import SMALL, invoke, python, refused, run
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
def test_what_is_said_of_a_model_has_its_name_and_not_its_place_in_the_cache():
    result = invoke("compress", "org/llama", "out", "--format", "lr", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    assert "hub/models--" not in result.stdout + result.stderr
    done = json.loads(result.stdout)
    assert done["source"] == "org/llama"
    assert "tensorbed compress org/llama out --force --format hot" in done["notes"][0]
    assert "It was made of `org/llama`." in (Path("out") / "README.md").read_text()
    assert refused("compress", "org/llama", "nothing").startswith("tensorbed: org/llama: nothing")
    make_llama(Path("here"))
    run("compress", "here", "small", *INT8)
    assert "It was made of" not in (Path("small") / "README.md").read_text()


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
    with pytest.raises(FileNotFoundError, match=re.escape(f"there is no file or folder {name}")) as caught:
        hub.local_folder(Path(name))
    assert ("named owner/name" in str(caught.value)) == ("/" not in name)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "bert"),
        ("plan", "bert", "--ratio", "7"),
        ("compress", "bert", "out"),
        ("verify", "out", "--against", "bert", "--texts", "texts.txt"),
    ],
    ids=lambda command: command[0],
)
def test_a_name_that_nothing_has(command):
    Path("texts.txt").write_text("a text")
    line = refused(*command, code=2 if command[0] == "plan" else 1)
    assert "there is no file or folder bert" in line
    assert "owner/name" in line


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_by_a_variable_is_a_sentence_that_names_it(variable, tmp_path):
    """In a process of its own: the variables are read once, on import."""
    own = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    command = ("-m", "tensorbed", "inspect", "org/gpt")
    result = python(*command, env={**own, variable: "1", "HF_HUB_CACHE": str(tmp_path)}, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "tensorbed: there is no folder org/gpt, the cache of the Hub has no such model, and it cannot be fetched: the "
        f"environment variable {variable} says to stay offline; unset it, or give a folder.\n"
    )


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


@pytest.fixture
def asked(monkeypatch, cache):
    """What is fetched of a model whose files are set as ``files``."""
    found = {"files": []}
    monkeypatch.setattr(hub, "list_repo_files", lambda name: found["files"])
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: found.update(options, name=name) or cache)
    return found


def test_only_what_is_read_is_fetched(asked, cache):
    asked["files"] = [
        *("README.md", "config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "rust_model.ot"),
        *("2_Dense/pytorch_model.bin", "onnx/model.onnx", "model.safetensors.index.json", "weird[1].bin"),
    ]
    assert hub.local_folder(Path("org/large")) == cache
    left = ["pytorch_model.bin", "tf_model.h5", "rust_model.ot", "onnx/model.onnx", "weird[[]1].bin"]
    assert (asked["name"], asked["ignore_patterns"]) == ("org/large", left)


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OPENVINO = ["openvino/openvino_model.bin", "openvino/openvino_model.xml", "openvino_tokenizer.bin"]


@pytest.mark.parametrize(
    ("read", "left"),
    [
        (["a.bin"], ["a.gguf"]),
        (["a.gguf"], ["b.h5"]),
        (SHARDS, ["consolidated.safetensors"]),
        (["pytorch_model.bin"], ["consolidated.safetensors"]),
        (["model.safetensors", "2_Dense/pytorch_model.bin"], OPENVINO),
        (["pytorch_model.bin"], OPENVINO),
        (["0_Transformer/model.safetensors"], ["gguf/model.gguf"]),
        (["config.json", "model.xml", "1_Pooling/config.json"], []),
    ],
    ids=lambda files: files[0] if files else "",
)
def test_copies_for_others_are_not_read(read, left):
    assert hub.unread([*read, *left]) == left


@pytest.mark.parametrize("more", [(), ("config.json", "tokenizer.json", "imatrix.dat")], ids=["alone", "config"])
def test_of_many_gguf_files_one_is_to_be_chosen(asked, more):
    asked["files"] = [*more, *(f"llama-{bits}.gguf" for bits in ("Q8_0", "Q2_K", "Q4_K_M", "BF16"))]
    line = refused("inspect", "org/llama-gguf")
    assert line == (
        "tensorbed: org/llama-gguf has the model in GGUF files, llama-BF16.gguf, llama-Q2_K.gguf, llama-Q4_K_M.gguf "
        "and 1 more: choose one, fetch it with hf download org/llama-gguf llama-BF16.gguf --local-dir FOLDER, and give "
        "that folder."
    )
    assert "name" not in asked
    asked["files"] = [*more, "llama-Q8_0.gguf"]
    hub.local_folder(Path("org/llama-gguf"))
    assert asked["ignore_patterns"] == []


@pytest.mark.parametrize("files", [["consolidated.safetensors", "onnx/a.onnx"], []], ids=["others", "none"])
def test_a_model_without_weights_to_read_is_not_fetched(asked, files):
    asked["files"] = ["config.json", *files]
    line = refused("inspect", "org/other")
    assert "org/other has no weights that transformers reads, .safetensors, .bin, .gguf; it has " in line
    assert all(file in line for file in files)
    assert "name" not in asked


def test_gguf_files_in_folders_are_to_be_chosen_too(asked):
    asked["files"] = ["README.md", "BF16/a.gguf"]
    assert "has the model in GGUF files, BF16/a.gguf: choose one" in refused("inspect", "org/llama-gguf")


def test_unpacking_gguf_draws_no_bar_into_a_file(tmp_path, capfd):
    pytest.importorskip("gguf")
    make_gguf(tmp_path / "source")
    result = invoke("compress", tmp_path / "source", tmp_path / "out", *INT8)
    assert result.exit_code == 0
    assert "it/s" not in result.stderr + capfd.readouterr().err
