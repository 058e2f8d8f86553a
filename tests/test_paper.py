"""The paper's tables and theorem, recomputed.

Every ratio that follows from a shape is here. Those of the click-through table are not: it gives the number of factors,
not the factors. All ratios are over the real vocabulary, and cut or rounded in print.
"""

import math

import pytest
import torch

import tensorbed as tb

IMDB = (25000, 256)
SST = (17200, 256)
NMT = (32768, 1024)
WIKI = (267735, 512)
TT1, TT2, TT3 = (
    ((25, 30, 40), (4, 8, 8)),
    ((10, 10, 15, 20), (4, 4, 4, 4)),
    ((5, 5, 5, 5, 6, 8), (2, 2, 2, 2, 4, 4)),
)
SST1, SST2, SST3 = (
    ((24, 25, 30), (4, 8, 8)),
    ((10, 10, 12, 15), (4, 4, 4, 4)),
    ((4, 5, 5, 5, 6, 6), (2, 2, 2, 2, 4, 4)),
)
BIG = ((32, 32, 32), (8, 8, 16))
LONG = ((60, 60, 75), (8, 8, 8))


def ratio(size, format):
    return tb.Embedding(*size, format, device="meta").compression_ratio


@pytest.mark.parametrize(
    ("size", "shape", "rank", "published"),
    [
        (IMDB, TT1, 16, 93),
        (IMDB, TT2, 16, 232),
        (IMDB, TT3, 16, 441),
        (SST, SST1, 16, 78),
        (SST, SST2, 16, 182),
        (SST, SST3, 16, 307),
    ],
)
def test_sentiment_tensor_trains(size, shape, rank, published):
    # The tables cut or round to an integer.
    assert abs(ratio(size, tb.TensorTrain(rank=rank, shape=shape)) - published) < 1


@pytest.mark.parametrize(
    ("size", "shape", "published"),
    [(IMDB, TT1, 152), (IMDB, TT2, 455), (IMDB, TT3, 1042), (SST, SST1, 128), (SST, SST2, 366), (SST, SST3, 800)],
)
def test_sentiment_tensor_rings(size, shape, published):
    assert abs(ratio(size, tb.TensorRing(rank=8, shape=shape)) - published) < 1


@pytest.mark.parametrize(("shape", "published", "computed"), [(TT1, 45, 37.9), (TT2, 109, 113.6), (TT3, 215, 260.4)])
def test_erratum_rank_16_rings_do_not_follow_from_their_shapes(shape, published, computed):
    found = ratio(IMDB, tb.TensorRing(rank=16, shape=shape))
    assert found == pytest.approx(computed, abs=0.05)
    assert abs(found - published) > 1


@pytest.mark.parametrize(("rank", "published"), [(64, 15.3), (48, 26.8), (32, 58.5)])
def test_translation_tensor_trains_with_embedding_and_softmax_apart(rank, published):
    # Counted as V d / (2 * parameters).
    assert ratio(NMT, tb.TensorTrain(rank=rank, shape=BIG)) / 2 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(("rank", "published"), [(32, 16), (16, 64)])
def test_translation_tensor_rings(rank, published):
    assert ratio(NMT, tb.TensorRing(rank=rank, shape=BIG)) / 2 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(("rank", "published"), [(64, 15.5), (32, 31), (16, 62)])
def test_translation_low_rank_with_embedding_and_softmax_tied(rank, published):
    assert ratio(NMT, tb.LowRank(rank=rank)) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(("rank", "published"), [(192, 3.8), (128, 8.6), (96, 15.1)])
def test_language_model_tensor_trains(rank, published):
    assert ratio(WIKI, tb.TensorTrain(rank=rank, shape=LONG)) / 2 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(("rank", "published"), [(128, 4), (96, 5.3), (48, 10.7)])
def test_language_model_low_rank(rank, published):
    # Erratum: the row printed as rank 64 is rank 48.
    assert ratio(WIKI, tb.LowRank(rank=rank)) == pytest.approx(published, rel=0.01)


def sizes(shape):
    return tuple(math.prod(factors) for factors in shape)


def matrix_rank(layer):
    return int(torch.linalg.matrix_rank(layer.weight))


# No row factor smaller than its column factor, or none larger.
GUARANTEED = [
    ((4, 5), (3, 4)),
    ((4, 5, 6), (2, 2, 3)),
    ((3, 3, 3, 3), (2, 2, 2, 2)),
    ((3, 2, 4), (3, 5, 4)),
    ((3, 4), (3, 4)),
]


@pytest.mark.parametrize("shape", GUARANTEED)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_theorem_1_tensor_trains_have_full_matrix_rank(shape, rank):
    torch.manual_seed(0)
    rows, cols = sizes(shape)
    for format in (tb.TensorTrain, tb.TensorRing):
        layer = tb.Embedding(rows, cols, format(rank=rank, shape=shape), dtype=torch.float64)
        assert matrix_rank(layer) == min(rows, cols)
    low = tb.Embedding(rows, cols, tb.LowRank(rank=rank), dtype=torch.float64)
    assert matrix_rank(low) == rank


@pytest.mark.parametrize(
    ("shape", "rank", "reached"),
    [
        (((2, 7, 1), (4, 1, 5)), 2, 8),
        (((3, 6, 6), (5, 4, 5)), 2, 96),
        # At rank 1 the table is a Kronecker product: its rank is that of its factors multiplied.
        (((2, 7, 1), (4, 1, 5)), 1, 2),
        (((3, 6, 6), (5, 4, 5)), 1, 60),
    ],
)
def test_erratum_theorem_1_does_not_hold_for_every_shape(shape, rank, reached):
    torch.manual_seed(0)
    layer = tb.TTEmbedding(*sizes(shape), rank, shape=shape, dtype=torch.float64)
    assert matrix_rank(layer) == reached < min(sizes(shape))
    assert "full rank not guaranteed" in repr(layer)
    assert "full rank not guaranteed" in str(layer.explain(torch.tensor([0])))


def test_padding_may_cut_off_what_theorem_1_counts_on():
    """Of ((2, 2), (2, 1)) at rank 1 the first two rows are multiples of one; three are enough for both columns."""
    torch.manual_seed(0)
    shape = ((2, 2), (2, 1))
    for rows, reached in ((2, 1), (3, 2), (4, 2)):
        layer = tb.TTEmbedding(rows, 2, 1, shape=shape, dtype=torch.float64)
        assert matrix_rank(layer) == reached
        assert ("full rank not guaranteed" in repr(layer)) == (reached < 2)


@pytest.mark.parametrize("shape", [*GUARANTEED, TT1, TT2, TT3, SST1, SST2, SST3, BIG, LONG])
def test_theorem_1_holds_for_the_paper_s_shapes(shape):
    for format in (tb.TensorTrain, tb.TensorRing):
        assert "full rank" not in repr(tb.Embedding(*sizes(shape), format(rank=2, shape=shape), device="meta"))


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("size", [(60, 16), (96, 48), (100, 96), (150, 36), (200, 150), (343, 64), (30, 120)])
def test_suggested_shapes_have_full_matrix_rank(size, order):
    """Guaranteed or not."""
    torch.manual_seed(0)
    assert matrix_rank(tb.TTEmbedding(*size, 2, order=order, dtype=torch.float64)) == min(size)
