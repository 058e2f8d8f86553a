"""Rows of chains in PyTorch, with shared prefixes, and the operators of graphs."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorbed.backends import torch as shared
from tensorbed.backends.chain import Chain, full
from tensorbed.backends.graphs import ROWS, WORKS, chain_backward_op, chain_op
from tensorbed.backends.torch import SharedRows, find_prefixes
from tensorbed.dispatch import BACKENDS
from tensorbed.testing import largest_allocation


@st.composite
def chains(draw):
    order = draw(st.integers(2, 5))
    size = st.integers(1, 5)
    row_factors = tuple(draw(size) for _ in range(order))
    col_factors = tuple(draw(st.integers(1, 3)) for _ in range(order))
    inner = [draw(size) for _ in range(order - 1)]
    joint = draw(st.sampled_from([1, 1, 2, 3]))
    padded = int(torch.tensor(row_factors).prod())
    return Chain(draw(st.integers(1, padded)), row_factors, col_factors, (joint, *inner, joint))


@settings(max_examples=60)
@given(chains(), st.integers(1, 40), st.integers(0, 2**30))
def test_rows_and_gradients_are_those_of_the_table(chain, n, seed):
    generator = torch.Generator().manual_seed(seed)
    cores = [
        torch.randn(chain.core_shape(k), generator=generator, dtype=torch.float64).requires_grad_()
        for k in range(chain.order)
    ]
    index = torch.randint(0, chain.rows, (n,), generator=generator)
    grad = torch.randn(n, chain.cols, generator=generator, dtype=torch.float64)
    expected = full(chain, cores)[index]
    expected_grads = torch.autograd.grad(expected, cores, grad)
    with torch.no_grad():
        batch = SharedRows.of(chain, index)
        near = {"rtol": 1e-10, "atol": 1e-12}  # sums may cancel, and their order is another
        torch.testing.assert_close(batch.rows(cores), expected.detach(), **near)
        torch.testing.assert_close(batch.gradients(cores, grad), list(expected_grads), **near)


@settings(max_examples=40)
@given(chains(), st.integers(1, 60), st.integers(0, 2**30))
def test_pieces_add_up(chain, n, seed):
    """As above with next to nothing held at once, so that every batch is cut."""
    generator = torch.Generator().manual_seed(seed)
    cores = [torch.randn(chain.core_shape(k), generator=generator, dtype=torch.float64) for k in range(chain.order)]
    index = torch.randint(0, chain.rows, (n,), generator=generator)
    grad = torch.randn(n, chain.cols, generator=generator, dtype=torch.float64)
    whole = SharedRows.of(chain, index)
    with mock.patch.object(shared, "most_rows", return_value=3):
        pieces = SharedRows.of(chain, index)
    assert len(pieces.pieces) == -(-len(set(index.tolist())) // 3)
    near = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(pieces.rows(cores), whole.rows(cores), **near)
    torch.testing.assert_close(pieces.gradients(cores, grad), whole.gradients(cores, grad), **near)


@given(st.lists(st.integers(0, 119), min_size=1, max_size=60))
def test_levels_lead_every_index_to_its_digits(index):
    factors = (4, 5, 6)
    prefixes = find_prefixes(torch.tensor(index), factors)
    # Nothing is computed twice: as many prefixes at each level as there are distinct ones.
    assert prefixes.counts == tuple(len({i // s for i in index}) for s in (30, 6, 1))
    second, third = prefixes.levels()
    for level, count in ((second, prefixes.counts[1]), (third, prefixes.counts[2])):
        assert level.place.unique().shape[0] == count <= level.size <= 2 * count
    digits = [of_place(second), of_place(third)]
    for at, i in zip(third.place[prefixes.inverse].tolist(), index, strict=True):
        last, at = digits[1][at]
        middle, at = digits[0][at]
        assert (prefixes.digits[0][at].item() * 5 + middle) * 6 + last == i


def of_place(level):
    """The slice that the left product at each place takes, and the place of the one that it extends."""
    found = []
    for bucket in level.buckets:
        assert bucket.at.start == len(found)
        height = bucket.source.shape[0] // bucket.digit.shape[0]
        found += zip(bucket.digit.repeat_interleave(height).tolist(), bucket.source.tolist(), strict=True)
    assert len(found) == level.size
    return found


def test_digits_that_no_index_has_get_no_gradient():
    chain = Chain(12, (3, 4), (2, 2), (1, 3, 1))
    cores = [torch.randn(chain.core_shape(k)) for k in range(2)]
    first, second = SharedRows.of(chain, torch.tensor([5, 5, 5])).gradients(cores, torch.ones(3, 4))
    assert first[[0, 2]].count_nonzero() == 0
    assert second[[0, 2, 3]].count_nonzero() == 0
    assert first[1].count_nonzero() == 6


@pytest.mark.parametrize(
    ("ranks", "n"),
    [
        ((1, 16, 16, 1), 3_000),
        ((1, 64, 64, 1), 3_000),
        ((1, 16, 16, 1), 12_000),
        ((4, 4, 4, 4), 3_000),
        ((16, 16, 16, 16), 3_000),
    ],
)
def test_large_batches_allocate_nothing_of_the_table_s_size(ranks, n):
    chain = Chain(25_000, (25, 30, 40), (4, 8, 8), ranks)
    cores = [torch.randn(chain.core_shape(k)) for k in range(3)]
    # Distinct rows, few enough that their own vectors are not the table.
    index = torch.randperm(25_000, generator=torch.Generator().manual_seed(0))[:n]
    with largest_allocation() as most:
        batch = SharedRows.of(chain, index)
        batch.gradients(cores, batch.rows(cores))
    assert most() < 25_000 * 256 / 2


@pytest.mark.parametrize("backend", [name for name in WORKS if not BACKENDS[name].absent(torch.device("cpu"))])
def test_operators_pass_opcheck(backend):
    chain = Chain(50, (4, 13), (2, 3), (1, 4, 1))
    cores = [torch.randn(chain.core_shape(k), requires_grad=True) for k in range(2)]
    index = torch.tensor([3, 49, 3, 0])
    torch.library.opcheck(chain_op, (index, cores, chain.packed(), backend, *ROWS))
    plain = [c.detach() for c in cores]
    torch.library.opcheck(chain_backward_op, (torch.randn(4, 6), index, plain, chain.packed(), backend, *ROWS))
    torch.library.opcheck(chain_op, (index[:0], cores, chain.packed(), backend, *ROWS))


def test_packing():
    chain = Chain(50, (4, 13, 2), (2, 3, 1), (2, 4, 5, 2))
    assert Chain.unpacked(chain.packed()) == chain


def test_tables_of_more_than_two_to_the_31_rows():
    rows = 10**12
    chain = Chain(rows, (10**4, 10**4, 10**4), (1, 2, 2), (1, 2, 2, 1))
    cores = [torch.randn(chain.core_shape(k)) for k in range(3)]
    index = torch.tensor([0, 2**31, 2**31 + 1, 2**39 + 7, rows - 1])
    for row, i in zip(SharedRows.of(chain, index).rows(cores), index.tolist(), strict=True):
        a, b, c = i // 10**8, i // 10**4 % 10**4, i % 10**4
        left = torch.einsum("ajr,rks->jks", cores[0][a], cores[1][b])
        torch.testing.assert_close(row, torch.einsum("jks,slt->jkl", left, cores[2][c]).flatten())
