"""Plans, products and operators below the layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorbed import native
from tensorbed.contraction import cost
from tensorbed.contraction.chain import Chain, full
from tensorbed.contraction.executors import EXECUTORS, Runs, choose
from tensorbed.contraction.operators import _backward_op, _rows_op
from tensorbed.contraction.plan import find_prefixes, make_plan
from tensorbed.contraction.products import Grouped, PerRow, Tiled
from tensorbed.testing import assert_near, largest_allocation


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
def test_every_executor_agrees_with_the_table(chain, n, seed):
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
        for executor in EXECUTORS.values():
            tape = executor.prepare(chain, cores, index, None)
            assert_near(executor.rows(chain, cores, tape), expected.detach())
            for made, wanted in zip(executor.backward(chain, cores, tape, grad), expected_grads, strict=True):
                assert_near(made, wanted)


@settings(max_examples=40)
@given(chains(), st.integers(1, 60), st.integers(0, 2**30))
def test_runs_of_rows_add_up(chain, n, seed):
    """As above with next to nothing held at once, so that every batch is cut."""
    generator = torch.Generator().manual_seed(seed)
    cores = [torch.randn(chain.core_shape(k), generator=generator, dtype=torch.float64) for k in range(chain.order)]
    index = torch.randint(0, chain.rows, (n,), generator=generator)
    grad = torch.randn(n, chain.cols, generator=generator, dtype=torch.float64)
    prefixes = find_prefixes(index, chain.row_factors)
    runs = Runs(torch.tensor_split(prefixes.rows, min(3, prefixes.rows.shape[0])), prefixes.inverse)
    executor = EXECUTORS["grouped"]
    whole = executor.prepare(chain, cores, index, None)
    assert_near(executor.rows(chain, cores, runs), executor.rows(chain, cores, whole))
    for made, wanted in zip(
        executor.backward(chain, cores, runs, grad), executor.backward(chain, cores, whole, grad), strict=True
    ):
        assert_near(made, wanted)


@given(st.lists(st.integers(0, 119), min_size=1, max_size=60), st.booleans())
def test_a_plan_leads_every_index_to_its_digits(index, by_digit):
    factors = (4, 5, 6)
    plan = make_plan(find_prefixes(torch.tensor(index), factors), factors, by_digit=by_digit)
    for at, i in zip(plan.position.tolist(), index, strict=True):
        found = []
        for level in reversed(plan.levels):
            found.insert(0, level.digit[at].item())
            at = level.parent[at].item() if level.parent.numel() else at
        assert (found[0] * 5 + found[1]) * 6 + found[2] == i
    # Nothing is computed twice: as many prefixes at each level as there are distinct ones.
    assert [level.digit.shape[0] for level in plan.levels] == [len({i // s for i in index}) for s in (30, 6, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "inner", "outer"), [(1, 1, 1), (3, 5, 7), (2, 4, 8), (5, 3, 33)])
def test_products_agree_at_sizes_that_need_padding(dtype, m, inner, outer):
    torch.manual_seed(0)
    index = torch.randint(0, 4 * 9, (50,))
    prefixes = find_prefixes(index, (4, 9))
    slices = torch.randn(9, inner, outer, dtype=torch.float64)
    grouped = [Grouped()] if Grouped.takes(slices.to(dtype)) else []
    assert bool(grouped) == (dtype == torch.float32)
    for products in (PerRow(), *grouped, Tiled(), Tiled(height=1), Tiled(height=3)):
        level = make_plan(prefixes, (4, 9), by_digit=products.by_digit).levels[1]
        n = level.digit.shape[0]
        left, grad = torch.randn(n, m, inner).double(), torch.randn(n, m, outer).double()
        low = [t.to(dtype) for t in (left, grad, slices)]
        assert_near(products.multiply(low[0], low[2], level), (left @ slices[level.digit]).to(dtype))
        assert_near(products.multiply_transposed(low[1], low[2], level), (grad @ slices[level.digit].mT).to(dtype))
        sums = torch.zeros_like(slices).index_add(0, level.digit, left.mT @ grad)
        assert_near(products.slice_gradients(low[0], low[1], level, 9), sums.to(dtype))


def test_digits_that_no_index_has_get_no_gradient():
    chain = Chain(12, (3, 4), (2, 2), (1, 3, 1))
    cores = [torch.randn(chain.core_shape(k)) for k in range(2)]
    for name, executor in EXECUTORS.items():
        tape = executor.prepare(chain, cores, torch.tensor([5, 5, 5]), None)
        first, second = executor.backward(chain, cores, tape, torch.ones(3, 4))
        assert first[[0, 2]].count_nonzero() == 0, name
        assert second[[0, 2, 3]].count_nonzero() == 0, name
        assert first[1].count_nonzero() == 6, name


def test_the_whole_table_is_chosen_only_where_the_batch_is_larger(monkeypatch):
    monkeypatch.setattr(native, "available", False)
    chain = Chain(6, (2, 3), (2, 2), (1, 2, 1))
    cores = [torch.randn(chain.core_shape(k)) for k in range(2)]
    every = torch.arange(6)
    for n in (1, 5):
        assert choose(chain, cores, every[:n], "auto")[0] is not EXECUTORS["whole_table"]
    huge = every.repeat(50_000)
    assert choose(chain, cores, huge, "auto")[0] is EXECUTORS["whole_table"]


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
@pytest.mark.parametrize("name", [name for name in EXECUTORS if name != "whole_table"])
def test_large_batches_allocate_nothing_of_the_table_s_size(name, ranks, n):
    chain = Chain(25_000, (25, 30, 40), (4, 8, 8), ranks)
    cores = [torch.randn(chain.core_shape(k)) for k in range(3)]
    # Distinct rows, few enough that their own vectors are not the table.
    index = torch.randperm(25_000, generator=torch.Generator().manual_seed(0))[:n]
    with largest_allocation() as most:
        tape = EXECUTORS[name].prepare(chain, cores, index, None)
        rows = EXECUTORS[name].rows(chain, cores, tape)
        EXECUTORS[name].backward(chain, cores, tape, rows)
    assert most() < 25_000 * 256 / 2


def test_more_work_costs_more():
    chain = Chain(27000, (30, 30, 30), (4, 8, 8), (1, 16, 16, 1))
    assert cost.per_row(chain, (1, 1, 1)) < cost.grouped(chain, (1, 1, 1))
    assert cost.grouped(chain, (30, 900, 20000)) < cost.per_row(chain, (30, 900, 20000))
    assert cost.whole_table(chain) < cost.grouped(chain, (30, 900, 27000))
    assert cost.whole_table(chain) > cost.grouped(chain, (30, 300, 500))


@pytest.mark.parametrize("impl", ["auto", *EXECUTORS])
def test_operators_pass_opcheck(impl):
    chain = Chain(50, (4, 13), (2, 3), (1, 4, 1))
    cores = [torch.randn(chain.core_shape(k), requires_grad=True) for k in range(2)]
    index = torch.tensor([3, 49, 3, 0])
    torch.library.opcheck(_rows_op, (index, cores, chain.packed(), impl))
    plain = [c.detach() for c in cores]
    torch.library.opcheck(_backward_op, (torch.randn(4, 6), index, plain, chain.packed(), impl))
    torch.library.opcheck(_rows_op, (index[:0], cores, chain.packed(), impl))


def test_packing():
    chain = Chain(50, (4, 13, 2), (2, 3, 1), (2, 4, 5, 2))
    assert Chain.unpacked(chain.packed()) == chain


def test_tables_of_more_than_two_to_the_31_rows():
    rows = 10**12
    chain = Chain(rows, (10**4, 10**4, 10**4), (1, 2, 2), (1, 2, 2, 1))
    cores = [torch.randn(chain.core_shape(k)) for k in range(3)]
    index = torch.tensor([0, 2**31, 2**31 + 1, 2**39 + 7, rows - 1])
    for executor in (EXECUTORS["grouped"], EXECUTORS["per_row"], EXECUTORS["tiled"]):
        made = executor.rows(chain, cores, executor.prepare(chain, cores, index, None))
        for row, i in zip(made, index.tolist(), strict=True):
            a, b, c = i // 10**8, i // 10**4 % 10**4, i % 10**4
            left = torch.einsum("ajr,rks->jks", cores[0][a], cores[1][b])
            torch.testing.assert_close(row, torch.einsum("jks,slt->jkl", left, cores[2][c]).flatten())
