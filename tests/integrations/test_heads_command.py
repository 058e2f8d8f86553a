"""``tensorbed compress`` where a table is also the head: what is counted, calibrated and said."""

import json

import pytest
import torch
import transformers
from commands import SMALL, invoke, make_folders, refused, run
from model_folders import TEXTS, WORDS, make_llama, save_tokenizer
from tiny import ARCHITECTURES

import tensorbed as tb

COMMON = [f"other{number}" for number in range(200)]  # words before those of the texts


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders that no test changes."""
    root = make_folders(tmp_path_factory.mktemp("models"))
    make_llama(root / "late")
    save_tokenizer(root / "late", [*COMMON, *WORDS])
    return root


def entries(*arguments):
    return json.loads(run("compress", *arguments, *SMALL, "--json"))["report"]["entries"]


@pytest.mark.parametrize("options", [(), ("--untie",), ("--untie", "--no-heads")])
def test_a_budget_is_kept_whatever_becomes_of_the_tie(made, tmp_path, options):
    found = entries(made / "llama", tmp_path / "x", "--budget", "16kB", *options)
    assert sum(entry["bytes_after"] for entry in found) <= 16_000
    assert len(found) == (2 if options == ("--untie",) else 1)


def test_hot_rows_on_the_command_line(made, tmp_path):
    result = invoke("compress", made / "llama", tmp_path / "x", "--format", "hot", "--ratio", "9", *SMALL)
    assert result.exit_code == 0
    assert "--ratio is not used" in result.stderr
    assert "hot_rows, 19 rows quantized_rows bits=8" in result.stdout


def test_calibrating_is_what_the_library_does(made, tmp_path):
    out = tmp_path / "x"
    run("compress", made / "late", out, "--format", "hot", "--calibrate", made / "texts.txt", *SMALL)
    found = transformers.AutoModelForCausalLM.from_pretrained(out).model.embed_tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(made / "late")
    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "late")
    tokens = [tokenizer(text, return_tensors="pt").input_ids for text in filter(None, TEXTS)]
    tb.compress_(model, tb.HotRows(), min_rows=100, calibrate=lambda m: [m(input_ids=ids) for ids in tokens])
    assert set(torch.cat(tokens, 1).unique().tolist()) <= set(found.places.tolist())
    expected = model.model.embed_tokens.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_calibrating_other_models(tmp_path, name):
    config, kind, sizes = ARCHITECTURES[name]
    torch.manual_seed(0)
    getattr(transformers, kind)(getattr(transformers, config)(**sizes)).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", [*COMMON, *WORDS])
    (tmp_path / "texts.txt").write_text("man dog\n")
    options = ("--format", "hot", "--calibrate", tmp_path / "texts.txt", *SMALL)
    run("compress", tmp_path / "model", tmp_path / "x", *options)
    table = transformers.AutoModel.from_pretrained(tmp_path / "x").get_input_embeddings()
    assert {204, 205} <= set(table.places.tolist())


def test_what_calibrating_refuses(made, tmp_path):
    out = tmp_path / "x"
    said = refused("compress", made / "llama", out, "--format", "tt", "--calibrate", made / "texts.txt", code=2)
    assert "--calibrate is for lr, bands, int8, int4, hot, pq and auto" in said
    (tmp_path / "empty.txt").touch()
    assert "there is no text" in refused("compress", made / "llama", out, "--calibrate", tmp_path / "empty.txt")
    save_tokenizer(make_llama(tmp_path / "wide"), [f"word{number}" for number in range(400)])
    (tmp_path / "texts.txt").write_text("word399\n")
    options = ("--format", "hot", "--calibrate", tmp_path / "texts.txt", *SMALL)
    said = refused("compress", tmp_path / "wide", out, *options)
    assert "the model in" in said
    assert "does not read the texts" in said


def notes(*arguments):
    return [note for note in json.loads(run("compress", *arguments, *SMALL, "--json"))["notes"] if "head" in note]


def test_tables_that_are_heads_are_told(made, tmp_path):
    outs = (tmp_path / str(number) for number in range(9))
    texts = ("--calibrate", made / "texts.txt")
    (said,) = notes(made / "llama", next(outs), "--format", "int4")
    assert said.startswith("model.embed_tokens is used as a vocabulary head")
    assert "--format hot" in said
    assert "--calibrate" in said
    (said,) = notes(made / "llama", next(outs), "--format", "hot")
    assert "--format hot" not in said
    (said,) = notes(made / "llama", next(outs), "--format", "int4", *texts)
    assert "--format hot" in said
    assert notes(made / "llama", next(outs), "--format", "hot", *texts) == []
    assert notes(made / "llama", next(outs), "--format", "int8") == []  # near enough for any head
    assert notes(made / "bert", next(outs), "--format", "int4") == []
    (said,) = notes(made / "llama", next(outs), "--format", "lr", "--ratio", "4")
    assert "LowRank(ratio=4.0) may cost it more predictions than its fit error says" in said
    assert said.endswith("--force --format hot --calibrate texts.txt")


def test_a_head_is_not_spoilt_unless_somebody_says_so(made, tmp_path):
    out, asked = tmp_path / "x", ("--ratio", "12", *SMALL)
    said = refused("compress", made / "llama", out, *asked)
    assert "Smaller formats spoil the scores of a vocabulary head: model.embed_tokens." in said
    assert "--calibrate FILE" in said
    assert "--yes" in said
    assert "careful" not in said
    assert not out.exists()
    run("compress", made / "llama", out, *asked, "--yes")
    run("compress", made / "llama", tmp_path / "y", *asked, "--calibrate", made / "texts.txt")
    run("compress", made / "bert", tmp_path / "z", *asked)


def test_plans_tell_it_too(made):
    said = run("plan", made / "llama", "--ratio", "12", *SMALL)
    assert "note: model.embed_tokens is used as a vocabulary head" in said
    assert "may cost it more predictions" in said
    for model, ratio in (("llama", "1.5"), ("bert", "3")):
        said = run("plan", made / model, "--ratio", ratio, *SMALL)
        assert "head" not in said


@pytest.mark.parametrize("texts", [False, True], ids=["as it comes", "calibrated"])
def test_the_default_suits_heads_in_every_dtype_and_width(made, tmp_path, texts):
    """Half precision and narrow rows reach less than 7, and a smaller format would spoil the head."""
    more = ["--calibrate", made / "texts.txt"] if texts else []
    said = run("compress", made / "llama", tmp_path / "out", *SMALL, *more, "--json")
    done = json.loads(said)
    assert done["dtype"] == "bfloat16"
    (entry,) = done["report"]["entries"]
    assert entry["format"].startswith(("hot_rows", "quantized_rows"))
    assert 1.5 < entry["ratio"] < 3.5


def test_plans_and_compressing_agree(made):
    planned = json.loads(run("plan", made / "llama", *SMALL, "--json"))
    assert not any("refuses" in note for note in planned["notes"])
    smaller = json.loads(run("plan", made / "llama", *SMALL, "--ratio", "6", "--json"))
    (refusal,) = [note for note in smaller["notes"] if note.startswith("tensorbed compress refuses this: ")]
    assert "--calibrate FILE" in refusal


def test_what_may_hurt_and_the_command_that_does_better_are_the_last_line(made, tmp_path):
    said = run("compress", made / "llama", tmp_path / "out", *SMALL, "--format", "tt")
    last = said.splitlines()[-1]
    assert last.startswith("note: model.embed_tokens is used as a vocabulary head")
    better = f"tensorbed compress {made / 'llama'} {tmp_path / 'out'} --force --format hot --calibrate texts.txt"
    assert last.endswith(better)
