"""The README does what it says: its lines run as they are printed."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from torch import nn

import tensorbed as tb
from tensorbed.cli.commands import app

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
TABLE = TEXT.partition("| you have | you write |\n|---|---|\n")[2].partition("\n\n")[0]
ROWS = dict(row.strip("| ").split(" | ") for row in TABLE.splitlines())


def lines_of(row):
    """What of a row is code, in order; arguments that are only named, as `ratio=`, are none."""
    return [line for line in re.findall(r"`([^`]+)`", ROWS[row]) if not line.endswith("=")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(3000, 32), nn.Linear(32, 32), nn.Linear(32, 3000)


def tiny_llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=3000, **sizes))


# What the reader of a row has.
GIVEN = {
    "a vocabulary to score": {"hidden": torch.randn(2, 512), "target": torch.tensor([0, 267_734])},
    "a model": {"model": Model(), "path": "model.safetensors"},
    "a trained table": {"table": torch.randn(4096, 64)},
    "a batch that takes long": {"layer": tb.TTEmbedding(300, 12, 2), "index": torch.arange(5)},
}


def test_every_row_is_read():
    assert len(ROWS) == TABLE.count("\n") + 1
    assert all(lines_of(row) for row in ROWS)
    assert GIVEN.keys() <= ROWS.keys()


@pytest.mark.parametrize("row", [row for row in ROWS if "tensorbed compress" not in ROWS[row]])
def test_lines_of_the_table_run_as_printed(row, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"tb": tb, **GIVEN.get(row, {})}
    lines = lines_of(row)
    if row == "a Hugging Face model":  # which begins with the line before
        lines = [lines_of("a model")[0], *lines]
        names |= {
            "model": tiny_llama(),
            "AutoModelForCausalLM": pytest.importorskip("transformers").AutoModelForCausalLM,
        }
    for line in lines:
        exec(line, names)
    if any(line.startswith("print(") for line in lines):
        assert capsys.readouterr().out.strip()


def test_arguments_that_are_named_exist():
    named = re.findall(r"`(\w+)=`", ROWS["a trained table"])
    assert named == ["ratio", "rel_error"]
    assert set(named) <= inspect.signature(tb.TTEmbedding.from_pretrained).parameters.keys()


def test_commands_of_the_table_are_understood():
    (row,) = (row for row in ROWS if "tensorbed compress" in ROWS[row])
    commands = typer.main.get_command(app).commands
    for line in (line for line in lines_of(row) if line.startswith("tensorbed ")):
        _, name, *arguments = shlex.split(line)
        assert commands[name].make_context(name, arguments).params
    assert "[cli,transformers]" in row


def test_the_first_example_runs_and_its_numbers_are_right():
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(example, names)
    assert names["vectors"].shape == (32, 100, 256)
    assert f"{sum(p.numel() for p in names['embedding'].parameters()):,} numbers" in example
    assert f"{names['embedding'].compression_ratio:.0f} times fewer" in example


def test_sizes_in_the_table_are_right():
    bag = tb.TTEmbeddingBag(10_000_000, 64, rank=32, mode="sum")
    assert f"{sum(p.numel() for p in bag.parameters()):,} numbers" in ROWS["ten million ids in bags"]
    assert tb.TTEmbedding(25_000, 256, ratio=50).compression_ratio >= 50


def test_the_first_screen_says_what_runs_on_a_gpu():
    screen = TEXT.partition("| you have |")[0]
    assert "GPU" in screen
    assert "not been tried" in screen
