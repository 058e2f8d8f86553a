"""What editors, notebooks and type checkers are told of the arguments of layers."""

import inspect
from pathlib import Path

import pytest
import torch

import tensorbed as tb

ROOT = Path(__file__).parents[2]
SHORTHANDS = (tb.TTEmbedding, tb.TTEmbeddingBag, tb.TTHead)


def arguments(function):
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }


@pytest.mark.parametrize("layer", [tb.Embedding, tb.EmbeddingBag, *SHORTHANDS[:2]], ids=lambda layer: layer.__name__)
def test_tables_show_the_arguments_of_torch_and_their_own(layer):
    torchs = torch.nn.EmbeddingBag if issubclass(layer, tb.EmbeddingBag) else torch.nn.Embedding
    # Underscored are what torch keeps to itself.
    expected = {name: default for name, default in arguments(torchs).items() if not name.startswith("_")}
    shown = arguments(layer)
    assert {"std", "impl", "padding_idx"} <= shown.keys()
    assert {name: shown.get(name, "missing") for name in expected} == expected
    fitted = arguments(layer.from_pretrained)
    assert {"freeze", "padding_idx", "std", "impl", "dtype", "use"} <= fitted.keys()
    assert ("mode" in fitted) is (torchs is torch.nn.EmbeddingBag)


@pytest.mark.parametrize("head", [tb.Head, tb.TTHead], ids=lambda head: head.__name__)
def test_heads_show_theirs(head):
    assert {"bias", "std", "impl", "memory_budget", "device", "dtype"} <= arguments(head).keys()
    assert {"freeze", "bias", "std", "impl", "memory_budget", "dtype", "use"} <= arguments(head.from_pretrained).keys()
    assert arguments(head.tied_to).keys() == {"embedding", "bias", "impl", "memory_budget"}


@pytest.mark.parametrize("layer", SHORTHANDS, ids=lambda layer: layer.__name__)
def test_shorthands_show_the_sizes_of_their_format(layer):
    sizes = {"rank", "ranks", "ratio", "order", "shape"}
    assert sizes <= arguments(layer).keys()
    assert "rel_error" not in arguments(layer)
    assert sizes | {"rel_error"} <= arguments(layer.from_pretrained).keys()


def test_collections_and_both_ends_show_the_options_of_their_tables():
    bags, fields = arguments(tb.EmbeddingBag), arguments(tb.EmbeddingBagCollection.from_sizes)
    missing = bags.keys() - fields.keys()
    assert missing == {"num_embeddings"}
    ends = arguments(tb.embedding_and_head)
    assert arguments(tb.Embedding).keys() <= ends.keys()
    assert {"tied", "bias", "memory_budget"} <= ends.keys()


RIGHT = """
import torch
import tensorbed as tb

table = torch.zeros(30, 4)
tb.TTEmbedding(30, 4, rank=2, std=0.1, padding_idx=0, device="cpu")
tb.TTEmbedding(30, 4, ranks=[2, 2], dtype=torch.float64)
tb.Embedding(30, 4, tb.LowRank(ratio=1.5), impl="reference")
tb.TTEmbeddingBag(30, 4, 2, mode="sum", include_last_offset=True)
tb.TTEmbeddingBag.from_pretrained(table, rank=2, mode="max")
tb.EmbeddingBagCollection.from_sizes({"C1": 30}, 4, tb.Dense(), mode="max", padding_idx=0, device="cpu")
tb.embedding_and_head(30, 4, tb.Dense(), tied=True, padding_idx=0, std="glorot")
tb.TTHead(4, 30, rank=2, bias=True, memory_budget=1000)
layer: tb.TTEmbedding = tb.TTEmbedding.from_pretrained(table, rel_error=0.1, freeze=False, padding_idx=3)
head: tb.TTHead = tb.TTHead.tied_to(layer, bias=True)
"""
WRONG = {
    "tb.TTEmbedding(30, 4, rnk=4)": "rnk",
    "tb.TTEmbedding(30, 4, 2, padding_index=4)": "padding_index",
    "tb.TTEmbedding(30, 4, mode='sum')": "mode",
    "tb.Embedding(30, 4, tb.LowRank(order=3))": "order",
    "tb.TTEmbeddingBag(30, 4, 2, mod='sum')": "mod",
    "tb.TTEmbeddingBag(30, 4, 2, rnk=4)": "rnk",
    "tb.TTHead(4, 30, padding_idx=4)": "padding_idx",
    "tb.TTHead(4, 30, rnk=4)": "rnk",
    "tb.TTEmbedding.from_pretrained(table, rnk=4)": "rnk",
    "tb.TTEmbeddingBag.from_pretrained(table, rnk=4)": "rnk",
    "tb.TTHead.from_pretrained(table, rnk=4)": "rnk",
    "tb.TTHead.tied_to(layer, rnk=4)": "rnk",
    "tb.EmbeddingBagCollection.from_sizes({}, 4, tb.Dense(), mod='sum')": "mod",
    "tb.embedding_and_head(30, 4, tb.Dense(), rnk=4)": "rnk",
}


def test_a_type_checker_refuses_what_there_is_not(tmp_path, monkeypatch):
    """And takes what there is; each wrong line is refused for the name in it that is wrong."""
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.chdir(ROOT)  # for its settings, and for what "make types" has read of torch
    program = tmp_path / "program.py"
    program.write_text("\n".join([RIGHT.strip(), *WRONG]))
    told, complaints, code = mypy.run(["--no-error-summary", str(program)])
    assert code == 1, complaints
    errors = {int(line.split(":")[1]): line for line in told.splitlines() if ": error: " in line}
    right = len(RIGHT.strip().split("\n"))
    assert errors.keys() == {right + at for at, _ in enumerate(WRONG, start=1)}, told
    for at, name in enumerate(WRONG.values(), start=right + 1):
        assert f'Unexpected keyword argument "{name}"' in errors[at]
