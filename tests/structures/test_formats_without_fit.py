"""A format that cannot be fitted says so by name wherever a fit is asked for, before anything is done."""

import pytest
import torch
from others import Unfitted
from torch import nn

import tensorbed as tb

REFUSAL = r"Unfitted\(\) cannot be fitted to a table: draw it .*fit=False"


def model():
    return nn.ModuleDict({"words": nn.Embedding(2000, 8)})


def test_fits_are_refused_by_name():
    with pytest.raises(ValueError, match=REFUSAL):
        tb.Embedding.from_pretrained(torch.randn(9, 4), Unfitted())
    with pytest.raises(ValueError, match=REFUSAL):
        tb.Head.from_pretrained(torch.randn(9, 4), Unfitted())


def test_compress_refuses_before_the_model_is_run():
    given = model()
    for format in (Unfitted(), {"words": Unfitted()}):
        with pytest.raises(ValueError, match=REFUSAL):
            tb.compress_(given, format, calibrate=lambda model: pytest.fail("was run"))
    assert type(given["words"]) is nn.Embedding
    tb.compress_(given, Unfitted(), fit=False)
    assert given["words"].structure.kind == "scaled"


def test_plans_that_measure_fits_refuse_it_and_others_take_it():
    with pytest.raises(ValueError, match=REFUSAL):
        tb.plan(model(), ratio=2, formats=[tb.LowRank(rank=1), Unfitted()])
    assert tb.plan(model(), ratio=2, formats=[Unfitted()], purpose="train").chosen["words"].format == Unfitted()


def test_a_deep_hash_of_too_many_layers_is_refused_before_anything_is_made():
    """A file of a few bytes that says so would take all memory."""
    with pytest.raises(ValueError, match=r"layers=10000000000: at most 64\."):
        tb.Embedding(100, 8, tb.DeepHash(hashes=4, hidden=8, layers=10**10))
