"""Dropout on a processor, against what it is by definition."""

import pytest
import torch

from experiments.lab.dropout import dropout


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.999])
def test_a_share_is_zero_and_the_rest_is_scaled_so_that_the_mean_stays(share):
    torch.manual_seed(0)
    x = torch.ones(1001, 333, dtype=torch.float64, requires_grad=True)
    dropped = dropout(x, share)
    kept = dropped != 0
    deviation = (share * (1 - share) / x.numel()) ** 0.5
    assert 1 - kept.double().mean().item() == pytest.approx(share, abs=4 * deviation + 2**-16)
    torch.testing.assert_close(
        dropped[kept].unique(), torch.tensor([1 / (1 - share)], dtype=torch.float64), rtol=2e-2, atol=0
    )
    assert dropped.mean().item() == pytest.approx(1, abs=4 * deviation / (1 - share))
    dropped.sum().backward()
    torch.testing.assert_close(x.grad, dropped.detach())


def test_numbers_are_dropped_independently_of_each_other_and_of_the_call():
    torch.manual_seed(0)
    x = torch.ones(2**20)
    first, second = (dropout(x, 0.3) == 0 for _ in range(2))
    for other in (second, *(first.roll(by) for by in (1, 2, 3, 4, 8))):
        assert (first & other).double().mean().item() == pytest.approx(0.09, abs=0.002)


def test_the_seed_decides_and_types_and_shapes_stay():
    for x in (torch.randn(3, 5, 7, dtype=torch.bfloat16), torch.randn(4, 6).T, torch.randn(0, 3)):
        drawn = []
        for _ in range(2):
            torch.manual_seed(1)
            drawn.append(dropout(x, 0.5))
        assert torch.equal(*drawn)
        assert (drawn[0].dtype, drawn[0].shape) == (x.dtype, x.shape)
        torch.testing.assert_close(drawn[0][drawn[0] != 0], 2 * x[drawn[0] != 0])
    assert torch.equal(dropout(x, 0.0), x)
