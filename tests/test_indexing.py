"""The index law, and Algorithms 1 and 2 of the paper."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorbed.indexing import ravel, unravel

orders = st.sampled_from(["slowest", "fastest"])


@st.composite
def factors_and_index(draw, most=10**12):
    factors = []
    for _ in range(draw(st.integers(1, 6))):
        room = most // prod(factors)
        factors.append(draw(st.integers(1, min(room, 10**6))))
    return tuple(factors), draw(st.integers(0, prod(factors) - 1))


@given(factors_and_index(), orders)
def test_ravel_inverts_unravel(case, first):
    factors, index = case
    digits = unravel(index, factors, first=first)
    assert all(0 <= d < f for d, f in zip(digits, factors, strict=True))
    assert ravel(digits, factors, first=first) == index


@given(factors_and_index(), orders)
def test_tensors_and_ints_agree(case, first):
    factors, index = case
    digits = unravel(torch.tensor([[index]]), factors, first=first)
    assert [d.item() for d in digits] == list(unravel(index, factors, first=first))
    assert all(d.dtype == torch.int64 and d.shape == (1, 1) for d in digits)
    assert ravel(digits, factors, first=first).item() == index


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_unravel_is_a_bijection_onto_all_digits(factors):
    seen = {unravel(i, factors) for i in range(prod(factors))}
    assert len(seen) == prod(factors)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_first_slowest_is_the_law_of_reshape(factors):
    every = torch.arange(prod(factors)).reshape(factors)
    for digits in ([0] * len(factors), [f - 1 for f in factors], [f // 2 for f in factors]):
        assert ravel(digits, factors) == every[tuple(digits)].item()


def test_first_fastest_is_algorithm_1_as_written():
    factors, i = (3, 4, 5), 37
    strides = [1, 3, 12]  # L = {1, I_1, I_1 I_2}
    expected, rest = [], i
    for stride in reversed(strides):
        expected.insert(0, rest // stride)
        rest %= stride
    assert unravel(i, factors, first="fastest") == tuple(expected)


def test_rows_beyond_float_precision_are_told_apart():
    factors = (10**4, 10**4, 10**4)
    big = torch.tensor([2**31 + 1, 2**39 + 1, 10**12 - 1])
    assert ravel(unravel(big, factors), factors).tolist() == big.tolist()
    assert [d[2].item() for d in unravel(big, factors)] == [9999, 9999, 9999]


@pytest.mark.parametrize("bad", [60, -1, 10**13])
def test_out_of_range_raises_with_value_and_bound(bad):
    for index in (bad, torch.tensor([3, bad])):
        with pytest.raises(IndexError, match=rf"index {bad} is out of range .* \(valid: 0 to 59\)"):
            unravel(index, (3, 4, 5))
    with pytest.raises(IndexError, match="digit 1 4 is out of range for a factor of 4"):
        ravel((0, 4, 0), (3, 4, 5))
    with pytest.raises(IndexError, match="digit 0 -1"):
        ravel((torch.tensor(-1), torch.tensor(0), torch.tensor(0)), (3, 4, 5))


def test_integers_only():
    for bad in (1.0, True, "1"):
        with pytest.raises(TypeError, match="must be an int"):
            unravel(bad, (3, 4))
    with pytest.raises(TypeError, match="int32 or int64, got float32"):
        unravel(torch.tensor([1.0]), (3, 4))
    with pytest.raises(TypeError, match="int32 or int64, got float32"):
        ravel((torch.tensor(1.0), torch.tensor(0)), (3, 4))


def test_bad_factors():
    with pytest.raises(ValueError, match="factors is empty"):
        unravel(0, ())
    with pytest.raises(ValueError, match=r"factors\[1\]=0"):
        unravel(0, (3, 0))
    with pytest.raises(ValueError, match="1 digits for 2 factors"):
        ravel((1,), (3, 4))
    with pytest.raises(ValueError, match="slowest"):
        unravel(0, (3, 4), first="last")
    with pytest.raises(ValueError, match=r"2\*\*63"):
        unravel(0, (2**40, 2**40))
