"""``tensorbed compress``, ``plan`` and ``inspect`` on folders of models."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import transformers
from commands import SMALL, invoke, make_folders, python, refused, run
from model_folders import make_bert, make_llama
from safetensors.torch import load_file, save_file

from tensorbed.integrations.transformers import compressing, folders


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders that no test changes."""
    return make_folders(tmp_path_factory.mktemp("models"))


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_compressed_with_all_that_is_small_in_it(made, tmp_path):
    out = tmp_path / "out"
    said = run("compress", made / "bert", out, "--format", "int4", *SMALL)
    assert "embeddings.word_embeddings  320 x 32  quantized_rows, bits=4" in said
    assert "weights on disk" in said
    assert f"tensorbed verify {out} --against {made / 'bert'} --texts" in said
    kept = {"1_Pooling/config.json", "2_Dense/model.safetensors", "modules.json", "README.md"}
    kept |= {"tokenizer.json", "tokenizer_config.json"}
    assert files(out) == {*kept, "config.json", "model.safetensors"}
    assert all((out / name).read_bytes() == (made / "bert" / name).read_bytes() for name in kept - {"README.md"})
    assert (out / "README.md").read_text().endswith("\n\nabout the model")
    # Whoever may read the folder may read the weights.
    assert out.joinpath("model.safetensors").stat().st_mode & 0o777 == out.stat().st_mode & 0o666
    assert os.listdir(tmp_path) == ["out"]
    model = transformers.AutoModel.from_pretrained(out)
    assert type(model).__name__ == "BertModel"
    assert model.embeddings.word_embeddings.structure.kind == "quantized_rows"


@pytest.mark.parametrize(
    ("format", "kind"),
    [("pq", "product_quantized"), ("tt", "tensor_train"), ("tr", "tensor_ring"), ("lr", "low_rank"), ("auto", None)],
)
def test_every_format_keeps_the_ratio(made, tmp_path, format, kind):
    found = json.loads(
        run("compress", made / "bert", tmp_path / "x", "--format", format, "--ratio", "1.2", *SMALL, "--json")
    )
    (entry,) = found["report"]["entries"]
    assert entry["ratio"] >= 1.2
    assert kind is None or entry["format"].startswith(kind)
    assert found["disk_after"] == (tmp_path / "x" / "model.safetensors").stat().st_size
    assert found["disk_before"] == (made / "bert" / "model.safetensors").stat().st_size


def test_class_dtype_and_ties_stay(made):
    model = transformers.AutoModelForCausalLM.from_pretrained(made / "small")
    assert json.loads((made / "small" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert model.dtype == torch.bfloat16
    assert model.lm_head.codes is model.model.embed_tokens.codes


def test_options_reach_the_compression(made, tmp_path):
    def compressed(*options):
        out = tmp_path / str(len(os.listdir(tmp_path)))
        found = json.loads(run("compress", made / "llama", out, "--format", "int8", *SMALL, *options, "--json"))
        return [entry["names"] for entry in found["report"]["entries"]]

    assert compressed() == [["model.embed_tokens", "lm_head"]]
    assert compressed("--untie") == [["model.embed_tokens"], ["lm_head"]]
    assert compressed("--untie", "--no-heads") == [["model.embed_tokens"]]
    assert "model.embed_tokens" in refused(
        "compress", made / "llama", tmp_path / "x", "--format", "int8", *SMALL, "--no-heads"
    )
    assert refused("compress", made / "llama", tmp_path / "x", *SMALL, "--skip", "*embed*", "--skip", "lm_head")


def test_a_budget_is_kept(made, tmp_path):
    found = json.loads(
        run("compress", made / "bert", tmp_path / "x", "--format", "auto", "--budget", "12kB", *SMALL, "--json")
    )
    assert sum(entry["bytes_after"] for entry in found["report"]["entries"]) <= 12_000
    said = refused("compress", made / "bert", tmp_path / "y", "--budget", "10B", *SMALL)
    assert "at the least" in said
    assert not (tmp_path / "y").exists()


def test_nothing_is_overwritten_without_force(made, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(made / "small", out)
    (out / "note.txt").write_text("mine")
    before = files(out)
    command = ("compress", made / "bert", out, "--format", "int8", *SMALL)
    assert "--force" in refused(*command)
    assert files(out) == before
    run(*command, "--force")
    assert "note.txt" not in files(out)
    assert folders.opened(out).config["architectures"] == ["BertModel"]
    assert os.listdir(tmp_path) == ["out"]


def test_force_replaces_only_folders_of_its_own(made, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    assert "was not written by tensorbed" in refused("compress", made / "bert", tmp_path / "photos", *SMALL, "--force")
    (tmp_path / "file").touch()
    assert "is a file" in refused("compress", made / "bert", tmp_path / "file", "--force")
    inside = refused("compress", made / "bert", made / "bert" / "out", "--force")
    assert "lie in each other" in inside
    assert "lie in each other" in refused("compress", made / "bert", made, "--force")
    assert "there is no folder" in refused("compress", made / "bert", tmp_path / "a" / "b")


@pytest.mark.parametrize("there", [False, True])
def test_an_error_while_saving_leaves_what_was_there(made, tmp_path, monkeypatch, there):
    out = tmp_path / "out"
    if there:
        shutil.copytree(made / "small", out)
    before = files(tmp_path)

    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    said = refused("compress", made / "bert", out, "--format", "int8", *SMALL, *["--force"] * there)
    assert "No space left on device" in said
    assert files(tmp_path) == before


def test_a_replacement_that_fails_is_undone(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    rename = Path.rename

    def failing(path, target):
        if path.name.endswith(".part"):
            raise OSError("cannot")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="cannot"), compressing.put_in_place(out) as part:
        (part / "new").touch()
    assert files(tmp_path) == {"out/old"}


def test_killed_while_saving_leaves_no_half_written_folder(made, tmp_path):
    out = tmp_path / "out"
    code = (
        "import os, signal, transformers\n"
        "from tensorbed.cli.commands import app\n"
        "save = transformers.PreTrainedModel.save_pretrained\n"
        "def killed(self, folder, **options):\n"
        "    save(self, folder, **options)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "transformers.PreTrainedModel.save_pretrained = killed\n"
        f"app(['compress', {str(made / 'bert')!r}, {str(out)!r}, '--format', 'int8', '--min-rows', '100'])\n"
    )
    assert python("-c", code).returncode == -signal.SIGKILL
    assert not out.exists()
    (part,) = tmp_path.iterdir()
    assert part.name.startswith(".out.")
    assert part.name.endswith(".part")


@pytest.fixture
def killed(made, tmp_path):
    """A folder that a command was about to replace when it was killed, between the two renames."""
    out = tmp_path / "out"
    shutil.copytree(made / "small", out)
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tensorbed.integrations.transformers import compressing\n"
        "rename = Path.rename\n"
        "def killed(path, target):\n"
        "    rename(path, target)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Path.rename = killed\n"
        "with compressing.put_in_place(Path(sys.argv[1])) as part:\n"
        "    (part / 'new').touch()\n"
    )
    assert python("-c", code, out).returncode == -signal.SIGKILL
    assert not out.exists()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".old", ".part"]
    return out


def test_killed_between_the_renames_the_old_folder_is_named(made, killed):
    (old,) = killed.parent.glob(".out.*.old")
    for command in (
        ("verify", killed, "--against", made / "llama", "--texts", made / "texts.txt"),
        ("compress", killed, killed.parent / "other"),
    ):
        assert f"A command that was killed left the one that was there as {old};" in refused(*command)
    assert old.is_dir()


def test_killed_between_the_renames_the_old_folder_comes_back(made, killed):
    (killed.parent / ".out.notes.old").mkdir()  # of somebody else
    command = ("compress", made / "bert", killed, "--format", "int8", *SMALL)
    assert "--force" in refused(*command)
    assert files(killed) == files(made / "small")
    assert not list(killed.parent.glob(".out.????????.old"))
    run(*command, "--force")
    assert folders.opened(killed).config["architectures"] == ["BertModel"]
    assert (killed.parent / ".out.notes.old").is_dir()


def test_planning_and_inspecting_a_folder(made):
    found = json.loads(run("plan", made / "bert", "--ratio", "2", *SMALL, "--json"))
    assert found["tables"]["embeddings.word_embeddings"]["error"] > 0
    assert found["bytes"] <= found["allowed"]
    inspected = json.loads(run("inspect", made / "small", "--json"))
    table, head = inspected["layers"]
    assert (table["name"], table["kind"]) == ("model.embed_tokens", "quantized_rows")
    assert head["layer"] == "Head (tied)"
    assert table["std"] == pytest.approx(0.02, rel=0.1)


def test_inspecting_dense_tables(tmp_path):
    folder = make_llama(tmp_path / "large", vocab_size=2400)
    said = run("inspect", folder)
    assert "lm_head             Linear (tied), dense 2,400 x 32" in said
    assert "model.embed_tokens could be QuantizedRows(bits=8)" in said
    assert f"tensorbed plan {folder}" in said


def test_inspecting_the_file_of_a_folder(made, tmp_path):
    folder = make_llama(tmp_path / "large", vocab_size=2400)
    said = run("inspect", folder / "model.safetensors")
    assert "model.embed_tokens.weight  tensor, dense 2,400 x 32" in said
    said = refused("inspect", made / "small" / "model.safetensors")
    assert said.endswith(f"is of a compressed model; look into its folder, {made / 'small'}.")


@pytest.mark.parametrize("command", [("compress", "{}", "{}.out"), ("plan", "{}", "--ratio", "2"), ("inspect", "{}")])
def test_folders_that_are_no_models(tmp_path, command):
    def said(name):
        return refused(*(one.format(tmp_path / name) for one in command))

    for name in ("empty", "list", "broken", "foreign", "coded", "cut"):
        (tmp_path / name).mkdir()
    assert "there is no config.json" in said("empty")
    (tmp_path / "list" / "config.json").write_text("[]")
    assert "is not a config" in said("list")
    (tmp_path / "broken" / "config.json").write_text("{")
    assert "is damaged" in said("broken")
    (tmp_path / "foreign" / "config.json").write_text("{}")
    assert "cannot be loaded" in said("foreign")
    coded = {"model_type": "mine", "architectures": ["MineModel"], "auto_map": {"AutoModel": "mine.MineModel"}}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(coded))
    (tmp_path / "coded" / "mine.py").write_text("raise SystemExit('code was run')")
    assert "code of its own, which is not run" in said("coded")
    make_bert(tmp_path / "whole")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "cut" / name).write_bytes((tmp_path / "whole" / name).read_bytes()[:5000])
    assert "cannot be loaded" in said("cut")
    strange = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "cut" / "config.json").write_text(json.dumps({**strange, "vocab_size": "x"}))
    assert "cannot be loaded" in said("cut")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    tensors.pop("embeddings.word_embeddings.weight")
    save_file(tensors, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    assert "have no embeddings.word_embeddings.weight, the table of the model" in said("whole")


def test_reading_gguf_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    line = refused("compress", tmp_path / "source", tmp_path / "out")
    assert line == 'tensorbed: one.gguf is read by the package gguf: pip install "gguf>=0.17"'


def test_a_gguf_is_taken_where_it_is_alone(made, tmp_path):
    (tmp_path / "one.gguf").touch()
    assert folders.opened(tmp_path).gguf == "one.gguf"
    (tmp_path / "two.gguf").touch()
    for _ in range(2):  # a config beside them changes nothing
        with pytest.raises(ValueError, match=r"the model in GGUF files, one\.gguf, two\.gguf: choose one"):
            folders.opened(tmp_path)
        (tmp_path / "config.json").write_text("{}")
    both = tmp_path / "both"
    shutil.copytree(made / "bert", both)
    (both / "one.gguf").touch()
    assert folders.opened(both).gguf is None


def test_a_model_in_a_folder_inside(made, tmp_path):
    """As older folders of sentence-transformers have it."""
    shutil.copytree(made / "bert", tmp_path / "old" / "0_Transformer")
    modules = [{"path": "0_Transformer"}, {"path": "1_Pooling"}]
    (tmp_path / "old" / "modules.json").write_text(json.dumps(modules))
    run("compress", tmp_path / "old", tmp_path / "out", "--format", "int8", *SMALL)
    assert {"modules.json", "0_Transformer/model.safetensors"} <= files(tmp_path / "out")
    assert folders.opened(tmp_path / "out").is_compressed


def test_what_compress_refuses(made, tmp_path):
    out = tmp_path / "out"
    assert "320 rows" in refused("compress", made / "bert", out, "--format", "int8")
    assert "compressed already" in refused("compress", made / "small", out)
    assert "the most it can be" in refused("compress", made / "bert", out, "--format", "pq", "--ratio", "999", *SMALL)
    for options in (
        ("--format", "zip"),
        ("--format", "pq", "--ratio", "-1"),
        ("--format", "pq", "--budget", "1MB"),
        ("--ratio", "8", "--budget", "1MB"),
        ("--min-rows", "0"),
        ("--ratio", "nan"),
        ("--budget", "20 apples"),
    ):
        assert "(see " in refused("compress", made / "bert", out, *options, code=2)
    assert not out.exists()


@pytest.mark.parametrize("format", ["int8", "auto"])
def test_where_nothing_can_be_compressed_it_is_said_what_would_help(made, tmp_path, format):
    command = ("compress", made / "bert", tmp_path / "out", "--format", format)
    few = refused(*command)
    reason = "embeddings.word_embeddings (320 rows, fewer than --min-rows 2,000)"
    assert f"{made / 'bert'}: nothing can be compressed: {reason}" in few
    assert few.endswith(". To take them lower --min-rows.")
    skipped = refused(*command, "--min-rows", "1", "--skip", "*word*", "--skip", "*_[pt]*", "--skip", "*.[pt]*")
    assert "embeddings.word_embeddings (left out by --skip *word*)" in skipped
    assert skipped.endswith("). To take them leave out the pattern of --skip.")
    both = refused(*command, "--skip", "*word*")
    assert both.endswith(". To take them lower --min-rows, or leave out the pattern of --skip.")
    heads = refused("compress", made / "llama", tmp_path / "out", "--format", format, *SMALL, "--no-heads")
    assert (
        "(a head, and --no-heads); compress both, skip model.embed_tokens too, or break the tie with --untie." in heads
    )


def test_what_is_left_has_its_true_reason(made, tmp_path):
    said = run("compress", made / "bert", tmp_path / "out", "--min-rows", "10", "--skip", "*position*")
    assert "left as it was: embeddings.position_embeddings, left out by --skip *position*" in said
    assert "left as it was: embeddings.token_type_embeddings, 2 rows, fewer than --min-rows 10" in said


def test_int8_says_that_it_has_its_own_ratio(made, tmp_path):
    result = invoke("compress", made / "bert", tmp_path / "x", "--format", "int8", "--ratio", "8", *SMALL, "--json")
    assert result.exit_code == 0
    assert "--ratio is not used" in result.stderr
    json.loads(result.stdout)


def test_as_a_user_runs_it(made, tmp_path):
    out = tmp_path / "out"
    code = "import sys; sys.modules['transformers'] = None; from tensorbed.__main__ import main; main()"
    missing = python("-c", code, "inspect", made / "bert")
    assert missing.returncode == 1
    assert missing.stderr == (
        'tensorbed: folders of models need transformers: pip install "transformers>=5.20" "accelerate>=1.10"\n'
    )
    result = python("-m", "tensorbed", "compress", made / "bert", out, "--format", "int8", *SMALL, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["out"] == str(out)
    assert result.stderr == ""


def test_help_and_facts_wait_for_nothing():
    code = (
        "import sys; from typer.testing import CliRunner; from tensorbed.cli.commands import app\n"
        "for command in (['--help'], ['compress', '--help'], ['verify', '--help'], ['info']):\n"
        "    assert CliRunner().invoke(app, command).exit_code == 0\n"
        "print({'transformers', 'sentence_transformers'} & set(sys.modules))"
    )
    assert python("-c", code).stdout == "set()\n"
