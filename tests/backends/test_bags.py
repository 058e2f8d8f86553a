"""Bags in graphs: the operators that torch.compile sees."""

import pytest
import torch

from tensorbed.backends import native
from tensorbed.backends.chain import Chain, take
from tensorbed.backends.graphs import chain_backward_op, chain_op
from tensorbed.testing import assert_near
from tensorbed.testing.samples import assert_all_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

CHAIN = Chain(50, (4, 13), (2, 3), (1, 4, 1))
INDEX = torch.tensor([3, 49, 3, 0, 7, 7, 12])
BOUNDS = torch.tensor([0, 2, 2, 6])  # an empty bag, and an index that is in none


def cores():
    generator = torch.Generator().manual_seed(0)
    shapes = [CHAIN.core_shape(k) for k in range(2)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize(
    ("weighted", "mean", "skip"), [(False, False, -1), (False, True, 7), (True, False, 7), (True, True, -1)]
)
def test_operators_pass_opcheck(weighted, mean, skip):
    weights = torch.randn(7, dtype=torch.float64, requires_grad=True) if weighted else None
    torch.library.opcheck(chain_op, (INDEX, cores(), CHAIN.packed(), "native", BOUNDS, weights, mean, skip))
    plain = [c.detach() for c in cores()]
    grad = torch.randn(3, 6, dtype=torch.float64)
    fixed = None if weights is None else weights.detach()
    pooling = (BOUNDS, fixed, mean, skip)
    torch.library.opcheck(chain_backward_op, (grad, INDEX, plain, CHAIN.packed(), "native", *pooling))


@pytest.mark.parametrize("skip", [-1, 7])
def test_bags_are_sums_of_rows(skip):
    made, weights = cores(), torch.randn(7, dtype=torch.float64, requires_grad=True)
    keep = torch.ones(7, dtype=torch.float64) if skip < 0 else (skip != INDEX).double()
    rows = take(CHAIN, made, INDEX) * (weights * keep)[:, None]
    expected = torch.stack([rows[a:b].sum(0) for a, b in ((0, 2), (2, 2), (2, 6))])
    pooled = chain_op(INDEX, made, CHAIN.packed(), "native", BOUNDS, weights, False, skip)
    assert_near(pooled, expected)
    grad = torch.randn(3, 6, dtype=torch.float64)
    leaves = [*made, weights]
    assert_all_near(torch.autograd.grad(pooled, leaves, grad), torch.autograd.grad(expected, leaves, grad))


def test_no_index_in_any_bag():
    bounds = torch.tensor([0, 0, 0])
    made, weights = cores(), torch.ones(7, dtype=torch.float64, requires_grad=True)
    pooled = chain_op(INDEX, made, CHAIN.packed(), "native", bounds, weights, False, -1)
    assert pooled.tolist() == [[0.0] * 6] * 2
    for found in torch.autograd.grad(pooled.sum(), [*made, weights]):
        assert found.count_nonzero() == 0


def test_an_index_beyond_the_last_bag_is_checked_too():
    with pytest.raises(IndexError, match="index 50 is out of range"):
        chain_op(INDEX.index_fill(0, torch.tensor([6]), 50), cores(), CHAIN.packed(), "native", BOUNDS, None, False, -1)
