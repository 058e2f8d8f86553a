"""What commands have found, in tables for people."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tensorbed as tb
from tensorbed.cli import terminal
from tensorbed.cli.inspection import inspect
from tensorbed.compress.report import Entry, Report

NAMES = ("model.language_model.embed_tokens_per_layer", "embeddings.word_embeddings = lm_head")

MINILM = ("embeddings.word_embeddings", "auto_model.embeddings.position_embeddings", "bert.embeddings.token_type")


def entry(name):
    sizes = {
        "numbers_before": 11_720_448,
        "numbers_after": 5_960_000,
        "bytes_before": 46_880_000,
        "bytes_after": 6_250_000,
    }
    return Entry((name,), 30_522, 384, "product_quantized, parts=192 of 2", error=0.089, **sizes)


def shown(monkeypatch, capsys, width):
    monkeypatch.setattr(terminal, "_WIDE", width)
    report = Report(tuple(map(entry, NAMES)), 22_715_000, 16_954_000, 90_860_000, 50_230_000, left={})
    disk = {"disk_before": 90_870_000, "disk_after": 50_240_000, "unpacked": None}
    terminal.show_compressed(SimpleNamespace(report=report, notes=[], out="small", source="large", **disk))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60, 40])
def test_names_are_never_broken(monkeypatch, capsys, width):
    text = "\n".join(shown(monkeypatch, capsys, width))
    for name in (*NAMES, "product_quantized,", "parts=192", "30,522 x 384", "whole model", "weights on disk"):
        assert name in text


def test_a_table_that_fits_has_a_line_for_each(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, 200)[:5]
    assert len({line.index("  30,522 x") for line in lines[1:3]}) == 1
    assert [line.split("  ")[0] for line in lines] == ["table", *NAMES, "whole model", "weights on disk"]


def test_a_table_that_does_not_fit_keeps_to_the_width(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, 80)
    assert all(len(line) <= 80 for line in lines)
    name = lines.index(NAMES[0])
    assert lines[name + 1].startswith("  30,522 x 384  product_quantized,")
    assert lines[name + 1].split() == ["30,522", "x", "384", "product_quantized,", "46.88", "6.25", "7.5", "0.089"]
    assert lines[name + 2].strip() == "parts=192 of 2"
    (whole,) = [line for line in lines if line.startswith("whole model")]
    assert whole.split() == ["whole", "model", "90.86", "50.23", "1.81"]


def plan_of(names):
    torch.manual_seed(0)
    tables = nn.ModuleDict({name.replace(".", "_"): nn.Embedding(4000, 16) for name in names})
    return tb.plan(tables, ratio=3, formats=[tb.ProductQuantized(ratio=6), tb.QuantizedRows(bits=4, group=16)])


def test_plans_keep_to_the_width_too(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_WIDE", 80)
    terminal.show_plan(plan_of(MINILM), ["more is known"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("note: "))
    for name in MINILM:
        assert sum(line.startswith(name.replace(".", "_")) for line in lines) == 1
    assert sum("4,000 x 16" in line for line in lines) == len(MINILM)
    assert lines[-1] == "note: more is known"


def test_inspections_keep_to_the_width_too(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_WIDE", 80)
    model = nn.ModuleDict({name.replace(".", "_"): nn.Embedding(30_522, 16) for name in MINILM})
    model["pooled"] = tb.TTEmbeddingBag(30_522, 32, rank=4)
    with torch.no_grad():
        model["pooled"].core_0.fill_(torch.nan)
    terminal.show_inspection(inspect(model))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for name in MINILM:
        name = name.replace(".", "_")
        assert next(line for line in lines if line.startswith(name)) == name
        assert sum(line.startswith(f"{name} could be QuantizedRows(bits=8)") for line in lines) == 1
    assert sum("Embedding, dense 30,522 x 16" in line for line in lines) == len(MINILM)
    assert any("TTEmbeddingBag, tensor_train" in line for line in lines)
    assert lines[-1] == "pooled holds NaN or infinite numbers; no format can be fitted to it."
