"""Which layers of transformers' models are vocabulary heads: those that they call so."""

import pytest
import tiny  # noqa: F401  (offline, before transformers is imported)
import torch
import transformers
from torch import nn

import tensorbed as tb

FORMAT = tb.LowRank(rank=2)
SIZE = 64  # of positions, and of hidden vectors
SIZES = {"vocab_size": 320, "hidden_size": SIZE, "max_position_embeddings": SIZE}


def gpt_neo(kind="GPTNeoForCausalLM", tied=True):
    """Hidden vectors as wide as there are positions, as in the default configuration."""
    layers = {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
    config = transformers.GPTNeoConfig(**SIZES, **layers, tie_word_embeddings=tied)
    torch.manual_seed(0)
    return getattr(transformers, kind)(config)


def bert(kind):
    config = transformers.BertConfig(**SIZES, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    return getattr(transformers, kind)(config)


class Wrapped(nn.Module):
    def __init__(self, model, **layers):
        super().__init__()
        self.model = model
        for name, layer in layers.items():
            setattr(self, name, layer)


def names(report):
    return [entry.names for entry in report.entries]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (gpt_neo, [("transformer.wte", "lm_head"), ("transformer.wpe",)]),
        (lambda: gpt_neo(tied=False), [("transformer.wte",), ("transformer.wpe",), ("lm_head",)]),
        (lambda: gpt_neo("GPTNeoModel"), [("wte",), ("wpe",)]),
        (lambda: gpt_neo("GPTNeoForSequenceClassification"), [("transformer.wte",), ("transformer.wpe",)]),
        (
            lambda: Wrapped(gpt_neo(tied=False)),
            [("model.transformer.wte",), ("model.transformer.wpe",), ("model.lm_head",)],
        ),
        (
            lambda: Wrapped(gpt_neo("GPTNeoModel"), head=nn.Linear(SIZE, 320)),
            [("model.wte",), ("model.wpe",), ("head",)],
        ),
        # The pooler stands outside of all lists.
        (
            lambda: bert("BertModel"),
            [("embeddings.word_embeddings",), ("embeddings.position_embeddings",)],
        ),
    ],
    ids=["tied", "untied", "no head", "classes", "inside", "head outside", "pooler"],
)
def test_layers_as_wide_as_there_are_positions_are_no_heads(make, expected):
    model = make()
    plan = tb.plan(model, ratio=2, formats=[FORMAT], min_rows=SIZE)
    assert list(plan) == [places[0] for places in expected]
    report = tb.compress_(model, FORMAT, min_rows=SIZE)
    assert names(report) == expected
    assert [note.split()[0] for note in report.notes] == [n for (n, *_) in expected if n == "head"]
