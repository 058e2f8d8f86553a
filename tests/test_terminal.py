"""What commands have found, in tables for people."""

from types import SimpleNamespace

import pytest

from tensorbed.cli import terminal

NAMES = ("model.language_model.embed_tokens_per_layer", "embeddings.word_embeddings = lm_head")


def entry(name):
    sizes = {"rows": 30_522, "cols": 384, "ratio": 7.5, "bytes_before": 46_880_000, "bytes_after": 6_250_000}
    return SimpleNamespace(names=(name,), format="product_quantized, parts=192 of 2", error=0.089, **sizes)


def shown(monkeypatch, capsys, width):
    monkeypatch.setattr(terminal, "_WIDE", width)
    sizes = {"ratio": 1.81, "bytes_before": 90_860_000, "bytes_after": 50_230_000}
    report = SimpleNamespace(entries=list(map(entry, NAMES)), left={}, notes=[], warnings=[], **sizes)
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
