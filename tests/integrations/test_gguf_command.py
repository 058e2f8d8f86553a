"""``tensorbed compress`` on a GGUF file: its weights are unpacked, and whoever runs it knows that first."""

import json

import pytest
import torch
import transformers
from commands import SMALL, invoke, refused, run
from model_folders import make_gguf

from tensorbed.integrations.transformers import compressing

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_gguf(tmp_path_factory.mktemp("models") / "gguf")


def unpacked(source, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file="tiny.gguf", dtype=dtype)
    return sum(parameter.nbytes for parameter in model.parameters())


def test_the_first_row_of_the_table_is_what_comes_out_of_the_file(source, tmp_path):
    result = invoke("compress", source, tmp_path / "out", "--format", "int8", *SMALL)
    assert result.exit_code == 0, result.output
    disk, whole = (source / "tiny.gguf").stat().st_size, unpacked(source, torch.float32)
    numbers = [f"{number:.2f}" for number in (disk / 1e6, whole / 1e6, disk / whole)]
    assert result.stdout.splitlines()[1].split() == ["unpacked", "from", "GGUF", "float32", *numbers]
    found = json.loads(run("compress", source, tmp_path / "again", "--format", "int8", *SMALL, "--json"))
    assert (found["unpacked"], found["dtype"]) == (whole, "float32")
    assert found["disk_after"] > found["disk_before"]


def test_it_is_said_before_the_fit_begins(source, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise ValueError("the fit begins")

    monkeypatch.setattr(compressing, "compress_", fail)
    result = invoke("compress", source, tmp_path / "out", "--format", "int8", *SMALL)
    lines = [line for line in result.stderr.splitlines() if line.startswith("tensorbed: ")]
    assert lines[0].startswith("tensorbed: tiny.gguf is unpacked: 0.0 MB become 0.1 MB in float32, of which the tables")
    assert lines[0].endswith("or about half of that with --dtype bfloat16.")
    assert lines[1] == "tensorbed: the fit begins"


def test_another_dtype(source, tmp_path):
    out = tmp_path / "out"
    result = invoke("compress", source, out, "--format", "int8", *SMALL, "--dtype", "bfloat16", "--json")
    assert result.exit_code == 0, result.output
    assert "with --dtype" not in result.stderr
    found = json.loads(result.stdout)
    assert (found["unpacked"], found["dtype"]) == (unpacked(source, torch.bfloat16), "bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert "Invalid value for '--dtype'" in refused("compress", source, out, "--dtype", "int8", code=2)


def test_a_tokenizer_that_cannot_be_written_is_told_before_the_fit(source, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise ValueError("no such tokenizer")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    monkeypatch.delattr(compressing, "compress_")
    result = invoke("compress", source, tmp_path / "out", "--format", "int8", *SMALL)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("cannot be loaded: no such tokenizer")


def test_a_plan_says_it_too(source):
    assert "note: the weights of tiny.gguf are quantised already" in run("plan", source, "--ratio", "2", *SMALL)
