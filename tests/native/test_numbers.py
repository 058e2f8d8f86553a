"""Rows and gradients of every instruction set against float64, at sizes that fit no register."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.backends.chain import Chain
from tensorbed.testing import assert_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import (
    CHAINS,
    assert_as_exact,
    by_kernels,
    by_reference,
    by_torch,
    draw_cores,
    draw_grad,
    draw_ids,
    every_isa_with,
    exact,
    isas,
    kernels_of,
    norm,
)

every_isa = pytest.mark.parametrize("isa", isas())
every_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())


@st.composite
def chains(draw):
    order = draw(st.integers(2, 6))
    row_factors = tuple(draw(st.sampled_from([1, 2, 3, 5, 7])) for _ in range(order))
    # Few wide cores: an order of 6 is about levels, not about megabytes.
    widths = st.sampled_from([1, 3, 5, 7] if order <= 3 else [1, 1, 3])
    col_factors = tuple(draw(widths) for _ in range(order))
    ranks = st.integers(1, 33) | st.sampled_from([16, 17, 32, 33])
    joint = draw(st.sampled_from([1, 1, 1, 2, 3, 5]))
    inner = [draw(ranks if order <= 3 else st.integers(1, 9)) for _ in range(order - 1)]
    padded = int(torch.tensor(row_factors).prod())
    return Chain(draw(st.integers(1, padded)), row_factors, col_factors, (joint, *inner, joint))


def assert_as_exact_as_torch(chain, cores, ids, grad):
    rows, grads = exact(chain, cores, ids, grad)
    positive_rows, positive_grads = exact(chain, [core.abs() for core in cores], ids, grad.abs())
    found = [path(chain, cores, ids, grad) for path in (by_kernels, by_reference, by_torch)]
    made, *theirs = ([one, *gradients] for one, gradients in found)
    for k, (wanted, positive) in enumerate(zip([rows, *grads], [positive_rows, *positive_grads], strict=True)):
        if wanted.dtype == made[k].dtype:  # then nothing is more exact than anything else
            assert norm(made[k] - wanted) <= 16 * torch.finfo(wanted.dtype).eps * norm(positive)
        else:
            assert_as_exact(made[k], [other[k] for other in theirs], wanted, positive)


@every_isa
@every_chain
def test_double_precision_is_that_of_the_plain_path(isa, chain):
    cores, ids = draw_cores(chain), draw_ids(chain, 150)
    grad = draw_grad(150, chain.cols)
    rows, grads = exact(chain, cores, ids, grad)
    with kernels_of(isa):
        made, made_grads = by_kernels(chain, cores, ids, grad)
    assert_near(made, rows)
    for one, other in zip(made_grads, grads, strict=True):
        assert_near(one, other)


@every_isa_with(["chain"], {name: (chain,) for name, chain in CHAINS.items()}, [torch.float32, torch.bfloat16])
def test_errors_are_no_larger_than_torch_s(isa, dtype, chain):
    n = 150
    with kernels_of(isa):
        assert_as_exact_as_torch(
            chain, draw_cores(chain, dtype), draw_ids(chain, n), draw_grad(n, chain.cols, dtype=dtype)
        )


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(max_examples=25)
@given(chains(), st.integers(1, 90), st.integers(0, 2**30))
def test_any_sizes_are_as_exact_as_torch(isa, dtype, chain, n, seed):
    with kernels_of(isa):
        cores, ids = draw_cores(chain, dtype, seed), draw_ids(chain, n, seed + 1)
        assert_as_exact_as_torch(chain, cores, ids, draw_grad(n, chain.cols, dtype, seed + 2))


@every_isa
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33])
def test_every_rank_is_as_exact_as_torch(isa, rank):
    """Ranks are depths and widths of the products: each leaves other columns and rows over."""
    with kernels_of(isa):
        for joint in (1, 3):
            chain = Chain(340, (5, 7, 10), (3, 7, 5), (joint, rank, 34 - rank, joint))
            ids, grad = draw_ids(chain, 70), draw_grad(70, chain.cols)
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                assert_as_exact_as_torch(chain, draw_cores(chain, dtype), ids, grad.to(dtype))


FORMATS = {
    "train": tb.TensorTrain(rank=17),
    "ring": tb.TensorRing(rank=5),
    "low rank": tb.LowRank(rank=7),
}


@every_isa
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layers_are_as_exact_as_the_reference_in_every_precision(isa, format, dtype):
    torch.manual_seed(0)
    layer = tb.Embedding(1999, 45, format, dtype=dtype, std=1.0)
    plain = tb.Embedding(1999, 45, format, dtype=dtype, impl="reference")
    wide = tb.Embedding(1999, 45, format, dtype=torch.float64, impl="reference")
    plain.load_state_dict(layer.state_dict())
    wide.load_state_dict(layer.state_dict())
    ids, grad = torch.randint(0, 1999, (5, 40)), torch.randn(5, 40, 45).to(dtype)
    with kernels_of(isa):
        made, theirs, wanted = (
            [rows.detach(), *torch.autograd.grad(rows, list(one.parameters()), grad.to(rows.dtype))]
            for one in (layer, plain, wide)
            for rows in [one(ids)]
        )
    for mine, other, right in zip(made, theirs, wanted, strict=True):
        assert_as_exact(mine, [other], right, right)


@every_isa
def test_what_is_not_finite_stays_where_it_is(isa):
    """Nothing of one row is read into another, nothing of a slice that no id has into any."""
    chain = CHAINS["train, order 3"]
    cores = [core.detach() for core in draw_cores(chain, torch.float32)]
    cores[0][3], cores[1][4], cores[2][5] = torch.inf, torch.nan, -torch.inf
    ids = draw_ids(chain, 400)
    digits = torch.stack([ids // 1200, ids // 40 % 30, ids % 40], 1)
    spoilt = (digits == torch.tensor([3, 4, 5])).any(1)
    assert 0 < int(spoilt.sum()) < 400
    with kernels_of(isa):
        rows = by_kernels(chain, [c.requires_grad_() for c in cores], ids, torch.ones(400, chain.cols))[0]
        assert torch.equal(rows.isfinite().all(1), ~spoilt)
        clean = ids[~spoilt]
        _, grads = by_kernels(chain, cores, clean, torch.ones(clean.shape[0], chain.cols))
    assert all(grad.isfinite().all() for grad in grads)


def test_rounding_to_bfloat16_is_torch_s():
    """A table of one column and rank 1 shows the rounding alone: its rows are its cores' products."""
    chain = Chain(2**12, (2**12, 1), (1, 1), (1, 1, 1))
    first = torch.randn(2**12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).bfloat16()
    # Ties, subnormal numbers, what overflows, infinities and what is no number.
    first[:8] = torch.tensor([1.0, 1.0078125, 3e38, -3e38, 1e-40, torch.inf, -torch.inf, torch.nan])
    ids = torch.arange(2**12)
    for factor in (1.5, 1.00390625, -0.01171875, 1e-38):
        last = torch.tensor(factor).bfloat16()
        rows, _ = by_kernels(
            chain,
            [first.reshape(-1, 1, 1, 1).clone().requires_grad_(), last.reshape(1, 1, 1, 1).requires_grad_()],
            ids,
            torch.ones(2**12, 1, dtype=torch.bfloat16),
        )
        wanted = (first.float() * last.float()).bfloat16()
        assert torch.equal(rows[:, 0].nan_to_num(7.0), wanted.nan_to_num(7.0))
