"""Truncated factors, TT-SVD and tensor rings by alternating least squares."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorbed.decompose import ring, truncate
from tensorbed.decompose.ring import improve, tr_svd
from tensorbed.decompose.train import Folded, balanced, tt_svd


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def train(cores):
    full = cores[0]
    for core in cores[1:]:
        full = torch.tensordot(full, core, 1)
    return full.squeeze(0).squeeze(-1)


def close_ring(cores):
    full = cores[0]
    for core in cores[1:]:
        full = torch.tensordot(full, core, 1)
    return full.diagonal(dim1=0, dim2=-1).sum(-1)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (5000, 30), (30, 5000), (9, 9)])
@pytest.mark.parametrize("rank", [1, 4, 100])
def test_truncation_is_the_best_there_is(shape, rank):
    matrix = normal(*shape)
    found = truncate.truncate(matrix, rank=rank)
    kept = min(rank, *shape)
    values = torch.linalg.svdvals(matrix)
    best = math.sqrt(float(values[kept:].square().sum()))
    assert found.left.shape == (shape[0], kept)
    assert float(torch.linalg.vector_norm(matrix - found.left @ found.right)) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert found.lost == pytest.approx(best, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(found.left.T @ found.left, torch.eye(kept, dtype=torch.float64))
    torch.testing.assert_close(found.right.norm(dim=1), values[:kept])


@pytest.mark.parametrize("shape", [(1500, 1300), (1300, 1500)])
def test_leading_factors_of_a_matrix_long_on_both_sides(shape):
    scale = 0.97 ** torch.arange(1300, dtype=torch.float64)
    matrix = normal(1500, 1300) * scale
    matrix = matrix.reshape(1500, 1300) if shape[0] == 1500 else matrix.T.contiguous()
    values = torch.linalg.svdvals(matrix)
    for rank in (5, 60):
        found = truncate.truncate(matrix, rank=rank)
        best = math.sqrt(float(values[rank:].square().sum()))
        made = float(torch.linalg.vector_norm(matrix - found.left @ found.right))
        assert made == pytest.approx(found.lost, rel=1e-9)
        assert made <= best * 1.0001
    for bound in (0.5 * float(matrix.norm()), 0.05 * float(matrix.norm()), 1e-9):
        found = truncate.truncate(matrix, bound=bound)
        assert float(torch.linalg.vector_norm(matrix - found.left @ found.right)) <= bound
        needed = int((values.square().flip(0).cumsum(0).flip(0).sqrt() > bound).sum())
        assert needed <= found.right.shape[0] <= needed + 1


def with_a_large_mean(rows, cols):
    return normal(rows, cols) + 50 * normal(cols, seed=1)


@cache
def squared_singular_values(name, dtype):
    return torch.linalg.svdvals(FLAT[name].to(dtype).double()).square()


FLAT = {
    "flat": normal(1400, 1100),
    "mean": with_a_large_mean(1400, 1100),
    "identity": torch.eye(1100, dtype=torch.float64),
}


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("flat", 1),
        ("flat", 16),
        ("flat", 130),
        ("flat", 250),
        ("mean", 16),
        ("identity", 16),
    ],
)
@pytest.mark.parametrize(
    ("transposed", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["tall-single", "wide-half"]
)
def test_flat_spectra_are_cut_as_well_as_others(name, rank, transposed, dtype):
    """Singular values close together are where powers of a matrix need many passes."""
    given = (FLAT[name].T if transposed else FLAT[name]).to(dtype)
    squares = squared_singular_values(name, dtype)
    found = truncate.truncate(given, rank=rank)
    kept, lost = float(squares[:rank].sum()), float(squares[rank:].sum())
    left = float((given.double() - found.left.double() @ found.right.double()).square().sum())
    assert left - lost <= 1e-5 * min(kept, lost)
    assert found.lost**2 == pytest.approx(left, rel=1e-6)
    torch.testing.assert_close(found.left.T @ found.left, torch.eye(rank, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_matrix_of_lower_rank_than_asked_for_is_found_again(dtype):
    given = (normal(1300, 5) @ normal(5, 1200, seed=1)).to(dtype)
    for matrix in (given, given.T, torch.zeros_like(given)):
        found = truncate.truncate(matrix, rank=16)
        left = (matrix.double() - found.left @ found.right).norm()
        assert float(left) <= 10 * torch.finfo(dtype).eps * float(matrix.double().norm())
        torch.testing.assert_close(found.left.T @ found.left, torch.eye(16, dtype=torch.float64))


def test_directions_below_single_precision_are_told_apart():
    matrix = normal(1200, 1100) * 10.0 ** (-torch.arange(1100, dtype=torch.float64) / 8)
    best = math.sqrt(float(torch.linalg.svdvals(matrix)[60:].square().sum()))
    found = truncate.truncate(matrix, rank=60)
    assert float((matrix - found.left @ found.right).norm()) <= 1.05 * best


def test_small_singular_values_are_exact_not_squared():
    """A Gram matrix would lose everything below 1e-8 of the largest."""
    u, _ = torch.linalg.qr(normal(60, 5))
    v, _ = torch.linalg.qr(normal(50, 5, seed=1))
    matrix = u @ torch.diag(torch.tensor([1.0, 1e-3, 1e-6, 1e-9, 1e-12]).double()) @ v.T
    assert truncate.truncate(matrix, bound=1e-10).right.shape[0] == 4
    assert truncate.truncate(matrix, bound=2e-9).right.shape[0] == 3


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=5),
    st.sampled_from([0.9, 0.3, 0.1, 1e-2, 1e-6]),
    st.integers(0, 99),
)
def test_tt_svd_honours_its_bound(sizes, rel_error, seed):
    tensor = normal(*sizes, seed=seed)
    cores = tt_svd(tensor, bound=rel_error * float(tensor.norm()))
    assert float((train(cores) - tensor).norm()) <= rel_error * float(tensor.norm()) * (1 + 1e-12)


def test_what_a_cut_leaves_goes_to_the_next(monkeypatch):
    """Squares of errors add up: each of the cuts to come has an equal share of what is left."""
    losses, shares = iter([0.0, math.sqrt(4 / 3), 5.0, 0.0]), []

    def cut(matrix, *, bound, **_):
        shares.append(bound)
        return truncate.Truncated(matrix[:, :1], matrix[:1], next(losses))

    monkeypatch.setattr("tensorbed.decompose.train.truncate", cut)
    tt_svd(normal(2, 2, 2, 2, 2), bound=2.0)
    assert shares == pytest.approx([1.0, math.sqrt(4 / 3), math.sqrt(4 / 3), 0.0])


def test_tt_svd_finds_a_train_again():
    cores = [normal(1, 6, 3), normal(3, 7, 4, seed=1), normal(4, 5, 1, seed=2)]
    found = tt_svd(train(cores), ranks=(3, 4))
    assert [c.shape for c in found] == [c.shape for c in cores]
    torch.testing.assert_close(train(found), train(cores))
    assert [tuple(c.shape) for c in tt_svd(train(cores), bound=1e-9)] == [(1, 6, 3), (3, 7, 4), (4, 5, 1)]


def test_balancing_keeps_the_product():
    cores = [100 * normal(1, 4, 3), normal(3, 5, 1, seed=1) / 1000]
    torch.testing.assert_close(train(balanced(cores)), train(cores))
    sizes = [float(c.square().mean()) for c in balanced(cores)]
    assert sizes[0] == pytest.approx(sizes[1])
    assert balanced([torch.zeros(1, 2, 1), torch.ones(1, 2, 1)])[1].tolist() == [[[1.0], [1.0]]]


def test_tensorize_pairs_row_and_column_digits():
    table = torch.arange(6 * 4).reshape(6, 4)
    tensor = Folded(table, (2, 3), (2, 2), table.dtype).tensor
    assert tensor.shape == (4, 6)
    for i1, i2, j1, j2 in ((0, 0, 0, 0), (1, 2, 0, 1), (1, 0, 1, 0)):
        assert tensor[i1 * 2 + j1, i2 * 2 + j2] == table[i1 * 3 + i2, j1 * 2 + j2]


@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 3, 2), (3, 2, 4)])
def test_sweeps_never_make_a_ring_worse(ranks):
    tensor = normal(8, 9, 10)
    start = tr_svd(tensor, ranks)
    assert [c.shape[0] for c in start] == list(ranks)
    before = float((close_ring(start) - tensor).norm())
    errors = [float((close_ring(improve(tensor, start, sweeps=n)) - tensor).norm()) for n in (1, 3, 10)]
    assert before * (1 + 1e-9) >= errors[0] >= errors[1] * (1 - 1e-9) >= errors[2] * (1 - 1e-6)
    assert errors[2] < before


def test_most_rings_are_found_again():
    found = 0
    for seed in range(10):
        cores = [normal(2, 8, 2, seed=seed), normal(2, 9, 2, seed=seed + 50), normal(2, 10, 2, seed=seed + 100)]
        tensor = close_ring(cores)
        made = close_ring(improve(tensor, tr_svd(tensor, (2, 2, 2)), sweeps=200))
        found += float((made - tensor).norm() / tensor.norm()) < 1e-2
    assert found >= 6


@pytest.mark.parametrize("rel_error", [0.5, 0.1, 1e-3])
def test_tr_svd_honours_its_bound(rel_error):
    for seed, sizes in enumerate([(6, 7), (5, 6, 7), (3, 4, 5, 4)]):
        tensor = normal(*sizes, seed=seed)
        bound = rel_error * float(tensor.norm())
        cores = tr_svd(tensor, bound=bound)
        assert cores[0].shape[0] == cores[-1].shape[2]
        assert float((close_ring(cores) - tensor).norm()) <= bound * (1 + 1e-9)
        assert float((close_ring(improve(tensor, cores)) - tensor).norm()) <= bound * (1 + 1e-9)


def test_contracting_in_chunks_changes_nothing(monkeypatch):
    tensor = normal(6, 7, 8, 5)
    cores = tr_svd(tensor, (2, 3, 2, 3))
    whole = [ring._seen_by(tensor, cores, k) for k in range(4)]
    monkeypatch.setattr(ring, "_CHUNK", 1)
    for k in range(4):
        torch.testing.assert_close(ring._seen_by(tensor, cores, k), whole[k])


@pytest.mark.parametrize("k", [0, 1, 2])
def test_normal_equations_of_one_core(k):
    """Against the least-squares problem written out with the design matrix."""
    tensor = normal(4, 5, 6)
    cores = [normal(2, 4, 3), normal(3, 5, 2, seed=1), normal(2, 6, 2, seed=2)]
    left, n, right = cores[k].shape
    columns = []
    for entry in range(left * n * right):
        unit = torch.zeros(left * n * right, dtype=torch.float64)
        unit[entry] = 1
        columns.append(close_ring([*cores[:k], unit.reshape(left, n, right), *cores[k + 1 :]]).flatten())
    design = torch.stack(columns, 1)
    expected = torch.linalg.lstsq(design, tensor.flatten()).solution.reshape(left, n, right)
    torch.testing.assert_close(ring._solve(ring._gram(cores, k), ring._seen_by(tensor, cores, k)), expected)
