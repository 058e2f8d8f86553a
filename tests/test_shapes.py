"""Suggested shapes, given shapes, and useful ranks."""

import itertools
import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorbed import suggest_shape
from tensorbed.shapes import check_shape, factor_evenly, useful_ranks

pytestmark = pytest.mark.filterwarnings("ignore:embedding_dim")


def parameters(shape, rank=16):
    rows, cols = shape
    ranks = [1, *[rank] * (len(rows) - 1), 1]
    return sum(ranks[k] * rows[k] * cols[k] * ranks[k + 1] for k in range(len(rows)))


def cheapest_by_trying_everything(num, dim, order):
    """Every assignment of rows within the bounds, and every order of the column factors."""
    center = num ** (1 / order)
    values = range(max(1, int(center / 2)), int(center * 2.2) + 2)
    best = math.inf
    for head in itertools.product(values, repeat=order - 1):
        least, most = min(head), max(head)
        last = max(-(-num // math.prod(head)), -(-most // 2))
        if most > 2 * least or last > 2 * least or math.prod(head) * last > 1.05 * num:
            continue
        for cols in set(itertools.permutations(factor_evenly(dim, order))):
            best = min(best, parameters(((*head, last), cols)))
    return best


@settings(max_examples=300)
@given(st.integers(1_000, 10**7), st.integers(1, 2048), st.integers(2, 4))
def test_padding_balance_and_exact_columns(num, dim, order):
    rows, cols = suggest_shape(num, dim, order)
    assert len(rows) == len(cols) == order
    assert num <= math.prod(rows) <= 1.05 * num
    assert max(rows) <= 2 * min(rows)
    assert math.prod(cols) == dim


@pytest.mark.parametrize(
    ("num", "dim", "order"),
    [(1000, 16, 2), (25000, 256, 2), (1009, 64, 3), (5000, 50, 3), (17200, 256, 3), (1234, 96, 4), (3001, 17, 4)],
)
def test_fewest_parameters_within_the_bounds(num, dim, order):
    assert parameters(suggest_shape(num, dim, order)) == cheapest_by_trying_everything(num, dim, order)


@given(st.integers(1, 10**18), st.integers(1, 4096), st.integers(2, 8))
def test_any_size_gets_a_balanced_shape(num, dim, order):
    rows, cols = suggest_shape(num, dim, order)
    assert math.prod(rows) >= num
    assert max(rows) <= 2 * min(rows)
    assert math.prod(cols) == dim


@pytest.mark.parametrize(
    ("dim", "order", "factors"),
    [
        (512, 3, (8, 8, 8)),
        (256, 3, (4, 8, 8)),
        (480, 4, (4, 4, 5, 6)),
        (16, 3, (2, 2, 4)),
        (7, 3, (1, 1, 7)),
        (1, 2, (1, 1)),
    ],
)
def test_columns_as_evenly_as_they_go(dim, order, factors):
    assert factor_evenly(dim, order) == factors


@given(st.integers(1, 600), st.integers(2, 3))
def test_even_factors_have_the_least_sum(size, order):
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    least = min(sum(f) for f in itertools.product(divisors, repeat=order) if math.prod(f) == size)
    assert sum(factor_evenly(size, order)) == least


@pytest.mark.filterwarnings("default")
def test_a_prime_dimension_works_and_says_so_once():
    with pytest.warns(UserWarning, match="embedding_dim=499 does not split into 3 factors above 1: using"):
        shape = suggest_shape(12_345, 499)
    assert sorted(shape[1]) == [1, 1, 499]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert suggest_shape(12_345, 499) == shape
        assert suggest_shape(54_321, 499)[1] == shape[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "num_embeddings=0"),
        ((-5, 8), "num_embeddings=-5"),
        ((10, 0), "embedding_dim=0"),
        ((10, 8, 1), "order=1: a chain has at least 2"),
        ((2**63, 8), r"2\*\*62 at the most"),
    ],
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        suggest_shape(*arguments)
    with pytest.raises(TypeError, match="must be an int"):
        suggest_shape(10.0, 8)


def test_given_shapes_are_checked_with_the_fix():
    assert check_shape([[25, 30, 40], (4, 8, 8)], 25000, 256) == ((25, 30, 40), (4, 8, 8))
    with pytest.raises(ValueError, match=r"holds 24750 rows, fewer than num_embeddings=25000; .*\(25, 30, 34\)"):
        check_shape(((25, 30, 33), (4, 8, 8)), 25000, 256)
    with pytest.raises(ValueError, match=r"rows of 128 numbers, but embedding_dim=256; .*\(4, 8, 8\)"):
        check_shape(((25, 30, 40), (4, 4, 8)), 25000, 256)
    with pytest.raises(ValueError, match="3 row and 2 column factors"):
        check_shape(((25, 30, 40), (16, 16)), 25000, 256)
    with pytest.raises(ValueError, match="1 row and 1 column"):
        check_shape(((30000,), (256,)), 25000, 256)
    with pytest.raises(ValueError, match=r"a row factor of shape .*=0"):
        check_shape(((25, 0, 40), (4, 8, 8)), 25000, 256)
    for bad in (5, (1, 2, 3), ((25, 30, 40),), None):
        with pytest.raises(ValueError, match="give the row factors and the column factors"):
            check_shape(bad, 25000, 256)


class Counted(tuple):
    """A shape that counts how often it is written out."""

    written = 0

    def __repr__(self):
        Counted.written += 1
        return super().__repr__()


def test_long_shapes_are_refused_at_once():
    """Without writing the shape out for each of its factors, which takes the square of their number."""
    with pytest.raises(ValueError, match="has 12000 row and 12000 column factors; at most 64 of each"):
        check_shape(((1,) * 12_000, (1,) * 12_000), 1, 1)
    Counted.written = 0
    assert check_shape(Counted(((2,) * 10, (1,) * 10)), 1024, 1) == ((2,) * 10, (1,) * 10)
    assert Counted.written <= 2
    with pytest.raises(ValueError, match="give the row factors and the column factors") as refused:
        check_shape([1] * 100_000, 1, 1)
    assert len(str(refused.value)) < 1000


def test_refusing_a_shape_searches_no_factors_of_huge_sizes():
    """735,134,400 has millions of factorisations; rows of 5,000 digits cannot even be printed."""
    with pytest.raises(ValueError, match=r"must multiply to it exactly\.$"):
        check_shape(((2,) * 8, (2,) * 8), 256, 735_134_400)
    with pytest.raises(ValueError, match=r"rows are counted in int64, 2\*\*63 - 1 at the most"):
        check_shape(((10**4000,) * 2, (2, 2)), 256, 4)


def test_useful_ranks():
    assert useful_ranks((10, 10, 10, 10, 24, 32), (1, 16, 16, 16, 16, 16, 1)) == (1, 10, 16, 16, 16, 16, 1)
    assert useful_ranks((4, 4), (1, 99, 1)) == (1, 4, 1)
    assert useful_ranks((2, 3, 2), (1, 50, 50, 1)) == (1, 2, 2, 1)
    assert useful_ranks((4, 5, 6), (5, 5, 5, 5)) == (5, 5, 5, 5)
    assert useful_ranks((4, 5, 6), (8, 9, 9, 8)) == (6, 6, 6, 6)
    assert useful_ranks((1, 1, 6), (2, 8, 8, 2)) == (1, 1, 1, 1)
