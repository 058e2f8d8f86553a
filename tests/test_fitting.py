"""Fitting trained tables through the layers."""

import multiprocessing

import pytest
import torch

import tensorbed as tb
from benchmarks.fit import FORMATS, measure

FORMATS_BY_RANK = [tb.TensorTrain, tb.TensorRing, tb.LowRank]


def fitted(format, table, dtype=None, padding_idx=None, **size):
    return tb.Embedding.from_pretrained(table, format(**size), dtype=dtype, padding_idx=padding_idx)


@pytest.fixture
def table():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(500, 32, generator=generator) * 0.8 ** torch.arange(32)


@pytest.mark.parametrize("format", FORMATS_BY_RANK)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_tables_that_are_not_finite_are_refused_with_the_place(format, bad, table):
    table[17, 5] = bad
    with pytest.raises(ValueError, match=rf"holds {bad} at row 17, column 5; .*nan_to_num"):
        fitted(format, table, rank=2)


@pytest.mark.parametrize("format", FORMATS_BY_RANK)
def test_bad_tables(format):
    for bad in (torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(0, 4), torch.zeros(4, 0)):
        with pytest.raises(ValueError, match="non-empty matrix"):
            fitted(format, bad, rank=2)
    with pytest.raises(TypeError, match="floating-point"):
        fitted(format, torch.zeros(8, 8, dtype=torch.int64), rank=2)
    with pytest.raises(TypeError, match="must be a tensor, got list"):
        fitted(format, [[1.0]], rank=2)


@pytest.mark.parametrize("format", FORMATS_BY_RANK)
def test_one_size_only(format, table):
    with pytest.raises(ValueError, match="rank and rel_error both set the size"):
        fitted(format, table, rank=2, rel_error=0.1)
    for bad in (0, 1, -0.5, 2):
        with pytest.raises(ValueError, match="rel_error="):
            fitted(format, table, rel_error=bad)


@pytest.mark.parametrize("format", FORMATS_BY_RANK)
def test_bounds_are_honoured_in_the_layer_s_own_precision(format, table):
    for dtype, rel_error in ((torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        made = fitted(format, table, rel_error=rel_error, dtype=dtype)
        assert next(made.parameters()).dtype == dtype
        # The bound is on the table that the stored numbers stand for; rows are rounded once more on the way out.
        distance = (made.double().weight.detach() - table.double()).norm() / table.double().norm()
        assert float(distance) <= rel_error


@pytest.mark.parametrize("format", FORMATS_BY_RANK)
def test_a_bound_finer_than_the_precision_is_refused(format, table):
    with pytest.raises(ValueError, match="of bfloat16 are themselves rounded by about"):
        fitted(format, table.bfloat16(), rel_error=1e-3)


@pytest.mark.parametrize("format", FORMATS_BY_RANK)
def test_fits_clip_their_ranks(format):
    table = torch.randn(12, 8)
    made = fitted(format, table, rank=1000)
    assert made.fit_error < 1e-3
    assert max(max(c.shape) for c in made.parameters()) <= 96


@pytest.mark.parametrize("format", FORMATS_BY_RANK)
def test_ratio_counts_the_padding_row(format, table):
    for padding_idx in (None, 0):
        made = fitted(format, table, ratio=6, padding_idx=padding_idx)
        stored = sum(t.numel() for t in made.state_dict().values())
        assert made.compression_ratio == pytest.approx(table.numel() / stored)
        assert made.compression_ratio >= 6


@pytest.mark.parametrize("format", FORMATS_BY_RANK)
def test_a_table_of_zeros(format):
    made = fitted(format, torch.zeros(30, 8), rank=2)
    assert made.fit_error == 0.0
    assert made.weight.count_nonzero() == 0


def test_rows_that_the_dtype_cannot_hold_are_refused():
    table = (torch.randn(100, 16, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * 60000).half()
    with pytest.raises(ValueError, match=r"does not fit into torch\.float16"):
        tb.TTEmbedding.from_pretrained(table, rank=16)


def test_tables_without_values_are_refused():
    with pytest.raises(TypeError, match="on the meta device and has no values to fit; load them first"):
        tb.TTEmbedding.from_pretrained(torch.zeros(8, 8, device="meta"), rank=2)
    with pytest.raises(TypeError, match=r"an ordinary tensor, got one of layout torch\.sparse_coo; use \.to_dense\(\)"):
        tb.TTEmbedding.from_pretrained(torch.eye(8).to_sparse(), rank=2)


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (torch.ones(8), r"use must be a tb\.structures\.Use"),
        (tb.structures.Use(counts=[1] * 8), "counts must be a tensor, got list; use torch.as_tensor"),
    ],
)
def test_a_use_that_is_none_is_refused_by_name(use, match):
    with pytest.raises(TypeError, match=match):
        tb.Embedding.from_pretrained(torch.randn(8, 8), tb.HotRows(), use=use)


def test_hard_tables_keep_their_bounds():
    """Nearly singular tables, on which normal equations lose digits."""
    i, j = torch.arange(300).double(), torch.arange(64).double()
    hilbert = 1 / (i[:, None] + j + 1)
    for format in FORMATS_BY_RANK:
        for rel_error in (1e-4, 1e-8, 1e-10):
            assert fitted(format, hilbert, rel_error=rel_error).fit_error <= rel_error


def test_drawing_anew_forgets_the_fit(table):
    layer = tb.TTEmbedding.from_pretrained(table, rank=2)
    layer.reset_parameters()
    assert layer.fit_error is None


def test_more_rank_less_error(table):
    errors = [tb.TTEmbedding.from_pretrained(table, rank=r).fit_error for r in (1, 4, 16, 64)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05 < errors[0]


def test_the_table_is_left_as_it_was(table):
    before = table.clone()
    tb.TTEmbedding.from_pretrained(table, rank=4, padding_idx=3)
    dense = tb.Embedding.from_pretrained(table, tb.Dense(), freeze=False)
    with torch.no_grad():
        dense.table.zero_()
    assert torch.equal(table, before)


def test_tables_that_require_gradients_or_are_not_contiguous(table):
    parameter = torch.nn.Parameter(table)
    assert tb.TTEmbedding.from_pretrained(parameter, rank=4).core_0.grad_fn is None
    turned = tb.TTEmbedding.from_pretrained(table.T.contiguous().T, rank=4)
    assert turned.fit_error == pytest.approx(tb.TTEmbedding.from_pretrained(table, rank=4).fit_error)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_table_of_half_a_gigabyte_is_fitted_in_four_more(name):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        _, extra, error, _ = pool.apply(measure, (name, 267_735, 512))
    assert extra < 4 * 2**30
    assert error < 1
