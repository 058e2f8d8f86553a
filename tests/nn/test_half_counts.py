"""Gradients divided by counts that half precision cannot hold."""

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
