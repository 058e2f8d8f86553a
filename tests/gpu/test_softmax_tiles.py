"""Tiles of the vocabulary's loss by the kernels for GPUs, in the interpreter, against double precision."""

import itertools
import math

import pytest
import torch
from drawing import integers, normal

from tensorbed.backends import triton

if triton.reason:
    pytest.skip(triton.reason, allow_module_level=True)

from tensorbed.backends.triton import softmax

EPS = torch.finfo(torch.float32).eps
every_shape = pytest.mark.parametrize(("rows", "cols"), list(itertools.product([1, 5, 70, 300], [1, 17, 70])))
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)


def drawn(*shape, seed=0, size=4.0):
    """Multiples of 1/64, whose differences are floats: what is left is the error of exponentials and sums."""
    return (normal(*shape, seed=seed, dtype=torch.float64) * size * 64).round().float() / 64


class Absorbed:
    """What is known of the columns of some scores after tiles of them, each tensor between guards."""

    def __init__(self, guards, tiles, target=None, weight=None, sums=False):
        cols = tiles[0].shape[1]
        self.most, self.total = guards.copy(torch.full((cols,), -torch.inf)), guards.copy(torch.zeros(cols))
        self.picked = guards.copy(torch.full((cols,), 7.0))
        self.sums = guards.copy(torch.zeros(cols)) if sums else None
        target = guards.copy(torch.full((cols,), -1) if target is None else target)
        start = 0
        for tile in tiles:
            own = None if weight is None else guards.copy(weight[start : start + tile.shape[0]])
            given = guards.copy(tile)
            softmax.absorb(given, start, target, self.most, self.total, self.picked, self.sums, own)
            assert torch.equal(given.nan_to_num(), tile.nan_to_num())
            start += tile.shape[0]

    def assert_totals_of(self, scores, units=8):
        """Every exponential errs by a unit or two, and so does each of the few times that a total is rescaled."""
        wide = scores.double()
        assert torch.equal(self.most, scores.float().amax(0))
        wanted = (wide - wide.amax(0)).exp().sum(0)
        assert ((self.total - wanted).abs() <= units * EPS * wanted).all()


@every_shape
@every_dtype
def test_totals_are_those_of_double_precision(guards, rows, cols, dtype):
    scores = drawn(rows, cols).to(dtype)
    Absorbed(guards, [scores]).assert_totals_of(scores)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_tiles_one_after_another_are_one_tile(guards, size):
    scores = drawn(150, 19, seed=1)
    scores += torch.linspace(0, 8, 150)[:, None].mul(64).round() / 64  # every tile has a greater maximum
    Absorbed(guards, scores.split(size)).assert_totals_of(scores)
    Absorbed(guards, scores.flip(0).split(size)).assert_totals_of(scores)


def test_a_tile_among_other_numbers_is_read_and_written_by_its_rows(guards):
    room = guards.copy(torch.full((9, 40), torch.nan))
    tile, scores = room[2:7, :33], drawn(5, 33)
    tile.copy_(scores)
    most, total, picked = (guards.copy(torch.full((33,), start)) for start in (-torch.inf, 0.0, 0.0))
    none = guards.copy(torch.full((33,), -1))
    softmax.absorb(tile, 0, none, most, total, picked, None, None)
    assert torch.equal(most, scores.amax(0))
    lse, ones = guards.copy(most + total.log()), guards.copy(torch.ones(33))
    softmax.differentiate(tile, 0, none, lse, ones, None, ones, None)
    torch.testing.assert_close(tile.sum(0), torch.ones(33))
    assert room[:2].isnan().all()
    assert room[7:].isnan().all()
    assert room[:, 33:].isnan().all()


def test_targets_are_picked_from_the_tile_that_has_them(guards):
    scores = drawn(100, 40, seed=2)
    target = integers(0, 100, (40,), seed=3)
    target[:3] = torch.tensor([0, 99, -1])
    for size in (100, 33, 7):
        found = Absorbed(guards, scores.split(size), target)
        wanted = torch.where(target < 0, 7.0, scores.gather(0, target.clamp_min(0)[None])[0])
        assert torch.equal(found.picked, wanted)


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_scores_are_those_of_double_precision(guards, weighted):
    scores, weight = drawn(130, 21, seed=4), drawn(130, seed=5).abs() if weighted else None
    found = Absorbed(guards, scores.split(50), weight=weight, sums=True)
    wide = scores.double() * (1 if weight is None else weight.double()[:, None])
    assert ((found.sums - wide.sum(0)).abs() <= 8 * EPS * wide.abs().sum(0)).all()


def test_large_scores_do_not_overflow(guards):
    scores = drawn(90, 18, seed=6)
    for offset in (1e4, -1e4):
        Absorbed(guards, (scores + offset).split(40)).assert_totals_of(scores + offset)
    extreme = torch.tensor([[-3e38], [3e38], [-3e38], [1e38]]).expand(4, 18).contiguous()
    found = Absorbed(guards, extreme.split(1))
    assert (found.most == extreme[1]).all()
    assert (found.total == 1).all()


def test_columns_of_minus_infinity_wait_for_a_score(guards):
    nothing, scores = torch.full((70, 20), -torch.inf), drawn(70, 20, seed=7)
    found = Absorbed(guards, [nothing, nothing])
    assert (found.most == -torch.inf).all()
    assert (found.total == 0).all()
    for tiles in ([nothing, scores], [scores, nothing]):
        Absorbed(guards, tiles).assert_totals_of(torch.cat(tiles))


@pytest.mark.parametrize("spoil", [torch.nan, torch.inf])
def test_what_is_no_number_spoils_its_column_for_good_and_no_other(guards, spoil):
    for row in (0, 40, 149):
        scores = drawn(150, 20, seed=8)
        scores[row, 3] = spoil
        for tiles in ([scores], scores.split(50)):
            found = Absorbed(guards, tiles)
            assert found.total[3].isnan()
            clean = torch.arange(20) != 3
            wide = scores[:, clean].double()
            wanted = (wide - wide.amax(0)).exp().sum(0)
            assert ((found.total[clean] - wanted).abs() <= 8 * EPS * wanted).all()


def parts(rows, cols):
    scale = drawn(cols, seed=11, size=1.0)
    scale[::3] = 0
    share = drawn(cols, seed=14, size=1.0)
    return drawn(cols, seed=10) + 16, scale, drawn(cols, seed=12, size=0.1), share, drawn(rows, seed=13, size=1.0)


@every_shape
@every_dtype
@pytest.mark.parametrize("given", ["neither", "smooth", "smooth and weight"])
def test_gradients_are_those_of_double_precision(guards, rows, cols, dtype, given):
    scores = drawn(rows, cols, seed=9).to(dtype)
    lse, scale, smooth, share, weight = parts(rows, cols)
    smooth, weight = smooth if "smooth" in given else None, weight if "weight" in given else None
    target = integers(-3, rows + 9, (cols,), seed=15)
    tile = guards.copy(scores)
    held = [None if part is None else guards.copy(part) for part in (lse, scale, smooth, share, weight)]
    softmax.differentiate(tile, 5, guards.copy(target + 5), *held)
    first = scale.double() * (scores.double() - lse.double()).exp()
    wanted, size = first.clone(), first.abs()
    if smooth is not None:
        second = smooth.double() * (torch.ones(rows, 1) if weight is None else weight[:, None]).double()
        wanted, size = wanted - second, size + second.abs()
    hit = torch.arange(rows)[:, None] == target
    wanted, size = wanted - hit * share.double(), size + hit * share.double().abs()
    rounding = 0.5 * torch.finfo(dtype).eps * wanted.abs() + (6e-8 if dtype == torch.float16 else 0)
    assert ((tile - wanted).abs() <= 2 * EPS * size + rounding).all()


def test_vectors_that_do_not_count_are_zero(guards):
    scores = drawn(40, 20, seed=14)
    for row, strange in enumerate((torch.nan, torch.inf, -torch.inf, 1e4, -1e4)):
        scores[row] = strange
    tile, target = guards.copy(scores), guards.copy(torch.arange(20))
    zeros, lse = guards.copy(torch.zeros(20)), guards.copy(torch.full((20,), math.nan))
    softmax.differentiate(tile, 0, target, lse, zeros, None, zeros, None)
    assert (tile == 0).all()


def test_nothing_is_read_or_written_where_there_is_nothing(guards):
    for shape in ((0, 5), (5, 0)):
        cols = [guards.copy(torch.zeros(shape[1])) for _ in range(3)]
        target = guards.copy(torch.zeros(shape[1], dtype=torch.int64))
        softmax.absorb(guards.copy(torch.zeros(shape)), 0, target, *cols, None, None)
        softmax.differentiate(guards.copy(torch.zeros(shape)), 0, target, cols[0], cols[1], None, cols[2], None)
        assert all((col == 0).all() for col in cols)
