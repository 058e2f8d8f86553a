"""The formats at the ends of what sizes can be, and arguments of types that are nearly right."""

import pytest
import torch

import tensorbed as tb


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(
    "format",
    [
        tb.NonlinearTrain(rank=1),
        tb.DeepHash(hashes=4, hidden=9),
        tb.Hashed(buckets=1, hashes=2, signed=True),  # a row may be a bucket less itself
    ],
    ids=repr,
)
def test_tables_of_few_rows_are_born_at_scale(format, rows):
    for seed in range(20):
        torch.manual_seed(seed)
        layer = tb.Embedding(rows, 4, format)
        assert float(layer.weight.detach().square().mean().sqrt()) == pytest.approx(0.3, rel=1e-3)
        assert max(float(one.detach().abs().max()) for one in layer.parameters()) < 1e4


@pytest.mark.parametrize(
    "format", [tb.DeepHash(hashes=16, ratio=1e6), tb.CanonicalPolyadic(ratio=1e5), tb.NonlinearTrain(ratio=1e4)]
)
def test_ratios_of_tables_with_more_numbers_than_can_be_counted(format):
    assert tb.Embedding(2**62, 16, format, device="meta").compression_ratio >= format.ratio


def test_an_activation_that_is_no_name():
    with pytest.raises(ValueError, match=r"activation=\['relu'\] for NonlinearTrain: choose one of"):
        tb.NonlinearTrain(rank=2, activation=["relu"])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16])
def test_orders_of_any_whole_numbers(dtype):
    order = torch.arange(5).flip(0)
    assert tb.Permuted(tb.Dense(), order.to(dtype)) == tb.Permuted(tb.Dense(), order)
