"""Layers of more rows, or of fewer."""

import pytest
import torch

import tensorbed as tb
from tensorbed.compress.resizing import resized

FORMATS = [
    tb.TensorTrain(rank=3),
    tb.TensorRing(rank=2),
    tb.LowRank(rank=2),
    tb.QuantizedRows(bits=4, group=4),
    tb.QuantizedRows(bits=8),
    tb.ProductQuantized(parts=4),
    tb.ProductQuantized(parts=4, rotate=True),
    tb.HotRows(),
    tb.StraightThrough(bits=4, group=4),
    tb.Dense(),
]
TABLE = torch.randn(300, 8, generator=torch.Generator().manual_seed(0)) + 1


@pytest.mark.parametrize("format", FORMATS, ids=repr)
@pytest.mark.parametrize("rows", [301, 700, 290])
def test_kept_rows_are_unchanged_and_new_ones_near_the_mean(format, rows):
    layer = tb.Embedding.from_pretrained(TABLE, format, freeze=False, padding_idx=2)
    made = resized(layer, rows)
    kept = min(rows, 300)
    assert type(made) is type(layer)
    assert made(torch.arange(rows)).shape == (rows, 8)
    torch.testing.assert_close(made.weight[:kept], layer.weight[:kept])
    assert torch.equal(made.padding_row, TABLE[2])
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in layer.parameters()]
    if rows > 600:
        apart = (made.weight[-50:].mean(0) - layer.weight.mean(0)).norm() / layer.weight.mean(0).norm()
        assert apart < 0.3


def test_heads_with_a_bias():
    head = tb.Head.from_pretrained(TABLE, tb.LowRank(rank=2), bias=torch.arange(300.0))
    made = resized(head, 310)
    assert made.bias.shape == (310,)
    assert torch.equal(made.bias[:300], head.bias)
    assert made.bias[305] == head.bias.mean()
    assert not made.bias.requires_grad
    made.loss(torch.randn(4, 8), torch.tensor([0, 5, 305, 309]))


def test_what_cannot_be_is_refused():
    layer = tb.Embedding.from_pretrained(TABLE, tb.ProductQuantized(parts=4), padding_idx=280)
    with pytest.raises(ValueError, match="no row 280"):
        resized(layer, 270)
    with pytest.raises(ValueError, match="256 entries a part cannot have 100 rows"):
        resized(tb.Embedding.from_pretrained(TABLE, tb.ProductQuantized(parts=4)), 100)
    with pytest.raises(ValueError, match="rows=0"):
        resized(layer, 0)
