"""Gradients of rows that occur more often than half precision counts."""

import pytest
import torch

import tensorbed as tb


@pytest.mark.without_kernels
def test_half_precision_sums_are_divided_before_they_are_rounded():
    for impl in ("auto", "reference"):
        torch.manual_seed(0)
        options = {"mode": "sum", "scale_grad_by_freq": True, "impl": impl}
        layer = tb.EmbeddingBag(10, 4, tb.TensorTrain(rank=2), dtype=torch.float16, std=1.0, **options)
        index = torch.zeros(1, 100, dtype=torch.long)
        layer(index).backward(torch.full((1, 4), 1000.0, dtype=torch.float16))
        for parameter in layer.parameters():
            assert torch.isfinite(parameter.grad).all(), impl


def test_counts_beyond_what_half_precision_holds():
    layer = tb.Embedding(10, 4, tb.Dense(), dtype=torch.float16, scale_grad_by_freq=True)
    rows = layer(torch.zeros(70_000, dtype=torch.long))
    rows.backward(torch.full_like(rows, 4.0))
    # 70,000 parts of 4 / 70,000 each, which half precision keeps with three digits.
    assert 3.5 <= float(next(layer.parameters()).grad[0, 0]) <= 4.5


@pytest.mark.parametrize(
    "format",
    [tb.Dense(), tb.Bands(((5, tb.Dense()), (None, tb.Dense()))), tb.StraightThrough(), tb.StraightThrough(bits=4)],
    ids=repr,
)
@pytest.mark.parametrize("count", [300, 5000])
def test_gradients_of_a_row_asked_for_again_and_again_are_added_up_in_single_precision(format, count):
    """bfloat16 holds 256 and not 257: sums of ones in it end there. More than a million numbers are added up, too."""
    layer = tb.Embedding(10, 256, format, dtype=torch.bfloat16)
    rows = layer(torch.full((count,), 2))
    rows.backward(torch.ones_like(rows))
    bag = tb.EmbeddingBag(10, 256, format, mode="sum", dtype=torch.bfloat16)
    bags = bag(torch.full((count, 1), 2))
    bags.backward(torch.ones_like(bags))
    expected = torch.zeros(10, 256)
    expected[2] = count
    for given in (layer, bag):
        grads = torch.cat([parameter.grad for parameter in given.parameters()])
        torch.testing.assert_close(grads, expected.bfloat16(), rtol=2**-8, atol=0)
