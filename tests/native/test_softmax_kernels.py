"""The softmax over tiles of scores: sums of exponentials and probabilities of every instruction set against float64."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tensorbed.backends import native

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import isas, kernels_of

from tensorbed import _native

every_isa = pytest.mark.parametrize("isa", isas())
ROWS, COLS = [1, 5, 33, 1000], [1, 3, 16, 17, 64, 130]
every_shape = pytest.mark.parametrize(("rows", "cols"), list(itertools.product(ROWS, COLS)))
EPS = torch.finfo(torch.float32).eps
GUARD = 12352.0  # a number of bfloat16 too


def drawn(*shape, seed=0, size=4.0):
    """Multiples of 1/64, whose differences are floats: what is left is the error of exponentials and sums."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size
    return (numbers * 64).round().float() / 64


class Tile:
    """Scores amid cells that no kernel has any business with."""

    def __init__(self, scores, before=3, after=5):
        rows, cols = scores.shape
        self.cells = torch.full((rows + 2, before + cols + after), GUARD, dtype=scores.dtype)
        self.numbers = self.cells[1:-1, before : before + cols]
        self.numbers.copy_(scores)

    @property
    def place(self):
        kind = native.TYPES[self.numbers.dtype]
        return kind, self.numbers.data_ptr(), *self.numbers.shape, self.numbers.stride(0)

    def assert_nothing_else_written(self):
        cells = self.cells.clone()
        cells.as_strided(self.numbers.shape, self.numbers.stride(), self.numbers.storage_offset()).fill_(GUARD)
        assert (cells == GUARD).all()


def absorb(pieces, threads=1, gapless=False):
    """Maximum and total of each column after all pieces, in guarded places of their own."""
    cols = pieces[0].shape[1]
    most, total = Tile(torch.full((1, cols), -torch.inf)), Tile(torch.zeros(1, cols))
    for piece in pieces:
        tile = Tile(piece, 0, 0) if gapless else Tile(piece)
        before = tile.cells.clone()
        _native.absorb(*tile.place, most.numbers.data_ptr(), total.numbers.data_ptr(), threads)
        assert torch.equal(tile.cells.view(torch.uint8), before.view(torch.uint8))
    most.assert_nothing_else_written()
    total.assert_nothing_else_written()
    return most.numbers[0].clone(), total.numbers[0].clone()


def probabilities(scores, lse, scale, shift=None, weight=None, threads=1):
    tile = Tile(scores)
    parts = [0 if part is None else part.data_ptr() for part in (lse, scale, shift, weight)]
    _native.probabilities(*tile.place, *parts, threads)
    tile.assert_nothing_else_written()
    return tile.numbers.clone()


def exponentials(x, cols):
    """``exp(x)`` as the kernels have it, ``x`` in rows of ``cols``."""
    rows = -(-x.numel() // cols)
    padded = torch.zeros(rows * cols)
    padded[: x.numel()] = x
    return probabilities(padded.view(rows, cols), torch.zeros(cols), torch.ones(cols)).flatten()[: x.numel()]


def assert_totals(most, total, scores, units=4):
    wide = scores.double()
    assert torch.equal(most, scores.amax(0))
    wanted = (wide - wide.amax(0)).exp().sum(0)
    assert ((total - wanted).abs() <= units * EPS * wanted).all()


@every_isa
@pytest.mark.parametrize("cols", [1, 2, 4, 8, 16, 31])
def test_exponentials_err_by_no_more_than_a_unit_and_a_quarter_in_the_last_place(isa, cols):
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(cols), dtype=torch.float64) * 175 - 87
    # Where one power of two takes over from the next, from both sides.
    edges = (torch.arange(-251, 253, dtype=torch.float64) / 2 * math.log(2)).float()
    edges = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(torch.tensor(-torch.inf))])
    edges = edges[(edges >= -87) & (edges <= 88)]
    x = torch.cat([x.float(), edges, torch.tensor([-87.0, 88.0, 0.0, 1e-10, -1e-10])])
    with kernels_of(isa):
        found = exponentials(x, cols)
    wanted = x.double().exp()
    unit = torch.exp2(wanted.log2().floor() - 23)
    assert float(((found - wanted).abs() / unit).max()) <= 1.25  # 0.9 with fused multiply-adds


@every_isa
@pytest.mark.parametrize("cols", [1, 2, 4, 8, 16])
def test_exponentials_of_every_float_have_their_place(isa, cols):
    low = torch.tensor([-87.4, -87.7, -88.0, -89.0, -103.0, -104.0, -1e4, -3e38, -torch.inf])
    high = torch.tensor([88.73, 89.0, 128.0, 1e4, 3e38, torch.inf])
    top = torch.linspace(88.0, 88.722, 1000)
    # Not every NaN is the usual one; whatever its bits say, it must not pass for a number.
    patterns = [0x7FC00000, -0x400000, 0x7FC000FF, 0x7FFFFFFF, 0x7F800001, -1, 0x7FC00181]
    nans = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    tiny = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-30])
    with kernels_of(isa):
        assert (exponentials(low, cols) <= 1.2e-38).all()
        assert (exponentials(low, cols) >= 0).all()
        assert (exponentials(low[4:], cols) == 0).all()
        assert (exponentials(high, cols) == torch.inf).all()
        assert exponentials(nans, cols).isnan().all()
        assert (exponentials(tiny, cols) == 1).all()
        assert ((exponentials(top, cols) / top.double().exp() - 1).abs() <= EPS).all()


@every_isa
@every_shape
def test_totals_are_those_of_double_precision(isa, rows, cols):
    scores = drawn(rows, cols)
    with kernels_of(isa):
        assert_totals(*absorb([scores]), scores)
        assert_totals(*absorb([scores], gapless=True), scores)


@every_isa
@every_shape
def test_tiles_one_after_another_are_one_tile(isa, rows, cols):
    scores = drawn(rows, cols, seed=1)
    scores += torch.linspace(0, 8, rows)[:, None].mul(64).round() / 64  # every tile has a greater maximum
    with kernels_of(isa):
        for size in (1, 7, 32, 100):
            if rows // size <= 150:
                assert_totals(*absorb(scores.split(size)), scores, units=8)
                assert_totals(*absorb(scores.flip(0).split(size)), scores, units=8)


@every_isa
@pytest.mark.parametrize("cols", [1, 17])
@pytest.mark.parametrize("size", [4_500, 300_000])
def test_many_rows_lose_no_digits(isa, cols, size):
    """Errors of drawn scores cancel; with equal ones every call may round the growing total the same way."""
    scores = drawn(300_000, cols, seed=2, size=1.0)
    with kernels_of(isa):
        assert_totals(*absorb(scores.split(size), gapless=True), scores)
        scores[1:] = -0.328125
        assert_totals(*absorb(scores.split(size), gapless=True), scores, units=4 + 300_000 / size / 4)


@every_isa
@pytest.mark.parametrize("cols", COLS)
def test_large_scores_do_not_overflow(isa, cols):
    scores = drawn(1000, cols, seed=3)
    for offset in (1e4, -1e4):
        with kernels_of(isa):
            assert_totals(*absorb((scores + offset).split(300)), scores + offset)
    scores[::2] += 1e4
    scores[1::2] -= 1e4
    with kernels_of(isa):
        assert_totals(*absorb(scores.split(300)), scores)
        extreme = torch.tensor([[-3e38], [3e38], [-3e38], [1e38]]).expand(4, cols)
        most, total = absorb(extreme.split(1))
    assert (most == extreme[1]).all()
    assert (total == 1).all()


@every_isa
@pytest.mark.parametrize("cols", COLS)
def test_columns_of_minus_infinity_wait_for_a_score(isa, cols):
    nothing = torch.full((70, cols), -torch.inf)
    scores = drawn(70, cols, seed=4)
    mixed = scores.clone()
    mixed[::3] = -torch.inf
    with kernels_of(isa):
        for gapless in (False, True):
            most, total = absorb([nothing, nothing], gapless=gapless)
            assert (most == -torch.inf).all()
            assert (total == 0).all()
            for pieces in ([nothing, scores], [scores, nothing], [nothing, mixed, nothing]):
                assert_totals(*absorb(pieces, gapless=gapless), torch.cat(pieces))


@every_isa
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("spoil", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("gapless", [False, True])
def test_what_is_no_number_spoils_its_column_for_good_and_no_other(isa, cols, spoil, gapless):
    for row, column in itertools.product((0, 1, 40, 149), {0, cols // 2, cols - 1}):
        scores = drawn(150, cols, seed=5)
        scores[row, column] = spoil
        for pieces in ([scores], scores.split(50), (torch.full((3, cols), -torch.inf), scores)):
            with kernels_of(isa):
                most, total = absorb(list(pieces), gapless=gapless)
            assert total[column].isnan()
            clean = torch.arange(cols) != column
            if clean.any():
                assert_totals(most[clean], total[clean], scores[:, clean])


@every_isa
@pytest.mark.parametrize("cols", [1, 16, 21])
def test_a_nan_among_minus_infinities_is_seen(isa, cols):
    scores = torch.full((100, cols), -torch.inf)
    scores[50] = torch.nan
    with kernels_of(isa):
        for gapless in (False, True):
            assert absorb([scores, drawn(10, cols)], gapless=gapless)[1].isnan().all()


def probability_parts(rows, cols):
    scale = drawn(cols, seed=11, size=1.0)
    scale[::3] = 0
    return drawn(cols, seed=10) + 10, scale, drawn(cols, seed=12, size=0.1), drawn(rows, seed=13, size=1.0)


@every_isa
@every_shape
@pytest.mark.parametrize("given", ["neither", "shift", "shift and weight", "weight"])
def test_probabilities_are_those_of_double_precision(isa, rows, cols, given):
    scores = drawn(rows, cols, seed=9)
    lse, scale, shift, weight = probability_parts(rows, cols)
    shift, weight = shift if "shift" in given else None, weight if "weight" in given else None
    with kernels_of(isa):
        found = probabilities(scores, lse, scale, shift, weight)
    first = scale * (scores.double() - lse).exp()
    second = torch.zeros(rows, cols, dtype=torch.float64)
    if shift is not None:
        second = shift.double() * (torch.ones(rows, 1) if weight is None else weight[:, None]).double()
    assert ((found - (first - second)).abs() <= 1.5 * EPS * first.abs() + EPS * second.abs()).all()


@every_isa
@pytest.mark.parametrize("cols", COLS)
def test_tokens_that_do_not_count_are_zero(isa, cols):
    scores = drawn(40, cols, seed=14)
    for row, strange in enumerate((torch.nan, torch.inf, -torch.inf, 1e4, -1e4)):
        scores[row] = strange
    lse, scale, shift, weight = probability_parts(40, cols)
    off = scale == 0
    shift[off] = 0
    with kernels_of(isa):
        for parts in ((), (shift,), (shift, weight)):
            found = probabilities(scores, lse, scale, *parts)
            assert (found[:, off] == 0).all()
            assert found[0, ~off].isnan().all()
        shift[off] = 0.5
        found = probabilities(scores, lse, scale, shift, weight)
        assert torch.equal(found[:, off], (-0.5 * weight[:, None]).expand(40, int(off.sum())))


@every_isa
@pytest.mark.parametrize("cols", COLS)
def test_large_scores_have_probabilities(isa, cols):
    scores = drawn(200, cols, seed=15)
    for offset in (1e4, -1e4):
        lse = torch.full((cols,), offset + 12.0)
        with kernels_of(isa):
            found = probabilities(scores + offset, lse, torch.ones(cols))
        wanted = (scores.double() - 12).exp()
        assert ((found - wanted).abs() <= EPS * wanted).all()


@every_isa
@pytest.mark.parametrize(
    ("rows", "cols"), [(60_000, 1), (20_000, 3), (4_000, 16), (4_000, 17), (1_000, 64), (999, 130), (37, 2_000)]
)
def test_threads_change_no_bit(isa, rows, cols):
    scores = drawn(rows, cols, seed=16)
    parts = probability_parts(rows, cols)
    with kernels_of(isa):
        alone = [*absorb([scores]), *absorb([scores], gapless=True), probabilities(scores, *parts)]
        for threads in (2, 3, 5):
            found = [
                *absorb([scores], threads),
                *absorb([scores], threads, gapless=True),
                probabilities(scores, *parts, threads=threads),
            ]
            assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
    assert_totals(alone[0], alone[1], scores)
    assert_totals(alone[2], alone[3], scores)


@every_isa
@every_shape
def test_half_precision_is_read_as_it_is_and_rounded_once(isa, rows, cols):
    scores = drawn(rows, cols, seed=17, size=40.0).bfloat16()
    scores[0, 0] = -torch.inf
    lse, *parts = probability_parts(rows, cols)
    with kernels_of(isa):
        for gapless in (False, True):
            for half, single in zip(
                absorb([scores], gapless=gapless), absorb([scores.float()], gapless=gapless), strict=True
            ):
                assert torch.equal(half, single)
        found, single = probabilities(scores, lse, *parts), probabilities(scores.float(), lse, *parts)
        assert torch.equal(found, single.bfloat16())
        scores[:] = torch.nan
        assert probabilities(scores, lse, torch.ones(cols)).isnan().all()


def test_scores_of_double_precision_are_refused():
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        _native.absorb(native.TYPES[torch.float64], 0, 1, 1, 1, 0, 0, 1)


def test_calls_from_several_python_threads_do_not_meet():
    scores = [drawn(700, 90, seed=seed) for seed in range(8)]
    parts = probability_parts(700, 90)

    def call(x):
        return *absorb([x], 2), probabilities(x, *parts, threads=2)

    alone = [call(x) for x in scores]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(call, scores))
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@every_isa
def test_nothing_is_read_or_written_where_there_is_nothing(isa):
    with kernels_of(isa):
        for rows, cols in ((0, 5), (5, 0), (0, 0)):
            assert _native.absorb(0, 0, rows, cols, 5, 0, 0, 2) is None
            assert _native.probabilities(0, 0, rows, cols, 5, 0, 0, 0, 0, 2) is None
