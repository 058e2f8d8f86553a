"""``tensorbed`` on folders that name, link to or claim what is not theirs."""

import json
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
from commands import SMALL, invoke, refused, run
from model_folders import in_hub_cache, make_bert
from rights import without_rights

from tensorbed.integrations.transformers import folders

INT8 = ("--format", "int8", *SMALL)
ELSEWHERE = [
    "../victim",
    "./../victim",
    "1_Pooling/../../victim",
    "{root}/victim",
    "/",
    "..\\victim",
    "C:\\victim",
    "C:victim",
    "\\\\host\\share",
    "link",
    "link/1_Pooling",
    "a\0b",
    None,
    5,
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A dense and a compressed model that no test changes."""
    root = tmp_path_factory.mktemp("models")
    make_bert(root / "bert")
    run("compress", root / "bert", root / "small", *INT8)
    return root


@pytest.fixture
def root(models, tmp_path):
    """A model to be harmed, and one that is made hostile."""
    shutil.copytree(models / "bert", tmp_path / "victim")
    shutil.copytree(models / "bert", tmp_path / "hostile")
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def name_modules(folder, *paths):
    (folder / "modules.json").write_text(json.dumps([{"path": path} for path in paths]))


@pytest.mark.parametrize("path", ELSEWHERE, ids=repr)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_modules_lie_below_their_folder(root, path, first):
    path = path.format(root=root) if isinstance(path, str) else path
    (root / "hostile" / "link").symlink_to(root / "victim")
    name_modules(root / "hostile", *((path,) if first else ("", path)))
    before = contents(root)
    said = refused("compress", root / "hostile", root / "out", *INT8)
    assert f"modules.json names {path!r}" in said
    assert "stay" in said
    assert contents(root) == before
    with pytest.raises(ValueError, match=r"modules\.json names"):
        folders.opened(root / "hostile")  # so do the other commands


def test_a_loop_of_links_is_no_module(root):
    (root / "hostile" / "link").symlink_to("link")
    name_modules(root / "hostile", "", "link")
    assert "modules.json names 'link'" in refused("compress", root / "hostile", root / "out", *INT8)


@pytest.mark.parametrize("path", ["../victim/model.safetensors", "{root}/victim/model.safetensors", "link", 5])
@pytest.mark.parametrize("command", ["compress", "inspect"])
def test_weights_of_an_index_lie_below_its_folder(root, command, path):
    hostile = root / "hostile"
    (hostile / "model.safetensors").unlink()
    (hostile / "link").symlink_to(root / "victim" / "model.safetensors")
    path = path.format(root=root) if isinstance(path, str) else path
    index = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": path}}
    (hostile / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refused(*((command, hostile) if command == "inspect" else (command, hostile, root / "out", *INT8)))
    assert f"model.safetensors.index.json names {path!r}" in said


def test_weights_that_a_config_names_lie_below_its_folder(root):
    file = root / "hostile" / "config.json"
    (root / "hostile" / "sub").mkdir()
    (root / "hostile" / "sub" / "x.safetensors.index.json").write_text('{"weight_map": {"a": "../victim/x"}}')
    config = {**json.loads(file.read_text()), "transformers_weights": "sub/x.safetensors.index.json"}
    file.write_text(json.dumps(config))
    assert "sub/x.safetensors.index.json names '../victim/x'" in refused("inspect", root / "hostile")
    for path in ("../victim/model.safetensors", "sub/../../victim/model.safetensors"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "transformers_weights": path}))
        assert f"config.json names {path!r}" in refused("inspect", root / "hostile")


@pytest.mark.parametrize("kind", [list, dict.fromkeys], ids=["list", "dict"])
def test_weights_that_a_config_for_some_version_names_lie_below_its_folder(root, kind):
    """transformers takes the config for its version from those that config.json names."""
    hostile, victim = root / "hostile", root / "victim" / "model.safetensors"
    config = json.loads((hostile / "config.json").read_text())
    (hostile / "config.json").write_text(json.dumps({**config, "configuration_files": kind(["config.4.0.0.json"])}))
    (hostile / "sub").mkdir()
    (hostile / "sub" / "x.safetensors.index.json").write_text('{"weight_map": {"a": "../victim/model.safetensors"}}')
    (hostile / "sub" / "link.safetensors").symlink_to(victim)
    for weights, said in (
        ("sub/x.safetensors.index.json", "sub/x.safetensors.index.json names '../victim/model.safetensors'"),
        ("sub/link.safetensors", "config.4.0.0.json names 'sub/link.safetensors'"),
    ):
        (hostile / "config.4.0.0.json").write_text(json.dumps({**config, "transformers_weights": weights}))
        assert said in refused("inspect", hostile)
        assert said in refused("compress", hostile, root / "out", *INT8)
    (hostile / "config.json").write_text(json.dumps({**config, "configuration_files": kind(["../victim/config.json"])}))
    assert "config.json names '../victim/config.json'" in refused("inspect", hostile)


def test_an_adapter_brings_no_other_model(root):
    """transformers loads the model that an adapter names, wherever it is, where the folder has no config."""
    hostile = root / "adapter"
    hostile.mkdir()
    (hostile / "one.gguf").touch()
    (hostile / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(root / "victim")}))
    assert "adapter_config.json" in refused("inspect", hostile)
    # And where the folder has one, what is saved is the adapter alone.
    shutil.copyfile(hostile / "adapter_config.json", root / "hostile" / "adapter_config.json")
    assert "adapter_config.json" in refused("compress", root / "hostile", root / "out", *INT8)


def test_links_are_followed_inside_the_folder_only(root):
    hostile = root / "hostile"
    (root / "secret").write_text("mine")
    (hostile / "notes.md").symlink_to("README.md")
    (hostile / "1_Pooling" / "notes.md").symlink_to(hostile / "README.md")
    run("compress", hostile, root / "out", *INT8)
    for name in ("notes.md", "1_Pooling/notes.md"):
        assert not (root / "out" / name).is_symlink()
        assert (root / "out" / name).read_text() == "about the model"
    for name in ("key.txt", "2_Dense/key.txt", "tokenizer.json", "model.safetensors"):
        (hostile / name).unlink(missing_ok=True)
        (hostile / name).symlink_to(root / "secret")
        said = refused("compress", hostile, root / "other", *INT8)
        assert f"{name} is a link to {root / 'secret'}, outside of" in said
        assert not (root / "other").exists()
        (hostile / name).unlink()


def test_links_to_nothing_and_to_folders_are_told(root):
    hostile = root / "hostile"
    (hostile / "nothing").symlink_to("nowhere")
    (hostile / "loop").symlink_to("loop")
    (hostile / "folder").symlink_to("1_Pooling")
    (hostile / "outside").symlink_to(root / "victim")
    (hostile / "old.safetensors").symlink_to("nowhere")  # no weights either
    os.mkfifo(hostile / "pipe")
    found = json.loads(run("compress", hostile, root / "out", *INT8, "--json"))
    for name in ("nothing", "loop", "folder", "outside", "pipe"):
        assert any(note.startswith(f"{name} was not copied:") for note in found["notes"]), name
        assert not os.path.lexists(root / "out" / name)


@pytest.mark.parametrize("link", ["2_Dense", "2_Dense/inside", "0_Model", "outer"])
def test_folders_of_modules_are_no_links(root, link):
    """They would be left out, and the result would not load."""
    hostile = root / "hostile"
    (hostile / "real" / "3_Dense").mkdir(parents=True)
    name_modules(hostile, "0_Model" if link == "0_Model" else "", "2_Dense", "outer/3_Dense")
    if link == "2_Dense":
        shutil.rmtree(hostile / "2_Dense")
    if link == "0_Model":
        shutil.copytree(root / "victim", hostile / "real", dirs_exist_ok=True)
    (hostile / link).symlink_to(hostile / "real")
    assert f"{link} is a link to a folder" in refused("compress", hostile, root / "out", *INT8)


def test_snapshots_of_the_hub_are_compressed_as_their_blobs(models, tmp_path):
    snapshot = in_hub_cache(tmp_path, models / "bert")
    run("compress", snapshot, tmp_path / "out", *INT8)
    names = {path.relative_to(models / "small") for path in contents(models / "small")}
    assert {path.relative_to(tmp_path / "out") for path in contents(tmp_path / "out")} == names
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    (tmp_path / "latest").symlink_to(snapshot)
    run("compress", tmp_path / "latest", tmp_path / "again", *INT8)
    inner = snapshot / "old"  # a folder of a model inside a snapshot
    inner.mkdir()
    for name in ("config.json", "model.safetensors"):
        (inner / name).symlink_to((snapshot / name).resolve())
    run("compress", inner, tmp_path / "third", *INT8)


def test_blobs_are_those_of_the_same_model(models, tmp_path):
    snapshot = in_hub_cache(tmp_path, models / "bert")
    other = in_hub_cache(tmp_path, models / "bert", "models--org--private")
    (snapshot / "key.txt").symlink_to((other / "README.md").resolve())
    assert "key.txt is a link to" in refused("compress", snapshot, tmp_path / "out", *INT8)
    (snapshot / "key.txt").unlink()
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    assert "is a link to" in refused("compress", snapshot, tmp_path / "out", *INT8)


def test_force_replaces_only_what_tensorbed_wrote(models, tmp_path):
    out = tmp_path / "out"
    command = ("compress", models / "bert", out, *INT8, "--force")
    for config, modules in (
        (None, None),
        ("{}", None),
        ("{", None),
        ("[]", None),
        ('{"quantization_config": {"quant_method": "gptq"}}', None),
        (json.dumps({"quantization_config": {"quant_method": "tensorbed"}}), [{"path": "inside"}]),
        (None, [{"path": "../small"}]),
        (None, [{"path": "link"}]),
        (None, []),
    ):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(models / "small", tmp_path / "small", dirs_exist_ok=True)
        out.mkdir()
        (out / "mine").write_text("kept")
        (out / "link").symlink_to(tmp_path / "small")
        if config is not None:
            (out / "config.json").write_text(config)
        if modules is not None:
            (out / "modules.json").write_text(json.dumps(modules))
        before = contents(tmp_path)
        assert "was not written by tensorbed" in refused(*command)
        assert contents(tmp_path) == before


def test_force_replaces_what_tensorbed_wrote_in_a_folder_inside(models, tmp_path):
    """As older folders of sentence-transformers have it."""
    (tmp_path / "old").mkdir()
    shutil.copytree(models / "bert", tmp_path / "old" / "0_Transformer")
    name_modules(tmp_path / "old", "0_Transformer")
    out = tmp_path / "out"
    run("compress", tmp_path / "old", out, *INT8)
    (out / "notes.txt").touch()
    assert "--force" in refused("compress", tmp_path / "old", out, *INT8)
    run("compress", tmp_path / "old", out, *INT8, "--force")
    assert not (out / "notes.txt").exists()


def test_a_target_reached_through_links(models, tmp_path):
    source = tmp_path / "bert"
    shutil.copytree(models / "bert", source)
    (tmp_path / "into").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path)
    for out in (tmp_path / "into" / "out", tmp_path / "into", tmp_path / "up" / "bert" / "1_Pooling", tmp_path / "up"):
        assert "lie in each other" in refused("compress", source, out, *INT8, "--force")
    assert "lie in each other" in refused("compress", tmp_path / "into", source / "out", *INT8)
    # What a link of the folder leads to is not the folder: nothing of it is taken, nothing is written there.
    (tmp_path / "outside").mkdir()
    (source / "inside").symlink_to(tmp_path / "outside")
    assert "lie in each other" not in run("compress", source, source / "inside" / "out", *INT8)
    assert folders.opened(tmp_path / "outside" / "out").is_compressed


def test_a_folder_that_appears_meanwhile_is_not_replaced(models, tmp_path, monkeypatch):
    """Fits take minutes; another command may have written to the same place."""
    out, load = tmp_path / "out", folders.load_model

    def slow(folder, dtype):
        out.mkdir()
        (out / "mine").touch()
        return load(folder, dtype)

    monkeypatch.setattr("tensorbed.integrations.transformers.folders.load_model", slow)
    assert "exists already" in refused("compress", models / "bert", out, *INT8)
    assert os.listdir(out) == ["mine"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("file", ["model", "rest"])
def test_a_full_disk_is_told_in_a_line(models, tmp_path, file):
    """A limit on the size of files gives the errors of a full disk: that of safetensors, and that of Python."""
    source = models / "bert"
    if file == "rest":
        source = tmp_path / "bert"
        shutil.copytree(models / "bert", source)
        (source / "large.txt").write_bytes(bytes(20_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        said = refused("compress", source, tmp_path / "out", *INT8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in said
    assert "out" in said
    assert set(os.listdir(tmp_path)) <= {"bert"}


@pytest.mark.parametrize("model", ["bert", "small"])
def test_weights_that_may_not_be_read_are_not_called_missing(models, model):
    """As safetensors calls them."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / model
        shutil.copytree(models / model, folder)
        for path in (Path(root), *folder.rglob("*")):
            path.chmod(0o711 if path.is_dir() else 0o644)
        folder.chmod(0o755)
        (folder / "model.safetensors").chmod(0)
        with without_rights():
            said = refused("inspect", folder)
        assert f"{folder / 'model.safetensors'} may not be read (Permission denied); change its permissions" in said


def test_what_a_folder_says_is_shown_without_control_characters(root):
    """Architectures, file names and texts reach the terminal as they are written, not as commands to it."""
    hostile, evil = root / "hostile", "\x1b[2J\x9b1m\x07[red]:dog:\u202e\nnote: all is well"
    config = json.loads((hostile / "config.json").read_text())
    (hostile / "config.json").write_text(json.dumps({**config, "architectures": [evil]}))
    name = evil.replace("\n", "\r")
    (hostile / name).symlink_to("nowhere")
    result = invoke("compress", hostile, root / "out", *INT8)
    assert result.exit_code == 0, result.output
    assert not set(result.stdout) & set("\x1b\x9b\x07\r\u202e")
    assert "\\x1b[2J\\x9b1m\\x07[red]:dog:\\u202e\\nnote: all is well" in result.stdout.replace("\n", "")
    assert not any(line.startswith("note: all is well") for line in result.stdout.splitlines())
    (hostile / "config.json").write_text(json.dumps({"model_type": evil}))
    said = refused("inspect", hostile)
    assert not set(said) & set("\x1b\x9b\x07\u202e")
    assert "\\x1b[2J" in said
