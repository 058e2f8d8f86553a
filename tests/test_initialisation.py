"""Right scale at birth, at every order and rank."""

import math

import pytest
import torch

import tensorbed as tb
from tensorbed.backends.chain import Chain, _squares_by_blocks, _squares_by_transfer, sum_of_squares, take
from tensorbed.structures.formats import Budget


def realised(layer):
    """Root mean square of the real rows, a block at a time in float64."""
    with torch.no_grad():
        blocks = torch.arange(layer.num_embeddings).split(4096)
        total = sum(float(layer(block).double().square().sum()) for block in blocks)
    return math.sqrt(total / layer.num_embeddings / layer.embedding_dim)


@pytest.mark.parametrize("rank", [2, 8, 64])
@pytest.mark.parametrize("order", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", [tb.TensorTrain, tb.TensorRing])
def test_chains_are_born_with_the_standard_deviation_asked_for(kind, order, rank):
    torch.manual_seed(order * rank)
    layer = tb.Embedding(3000, 64, kind(rank=rank, order=order), std=0.3)
    assert realised(layer) == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize("rank", [2, 16, 64])
def test_low_rank_and_dense_too(rank):
    torch.manual_seed(rank)
    for format in (tb.LowRank(rank=rank), tb.Dense()):
        assert realised(tb.Embedding(3000, 64, format, std=0.3)) == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize("format", [tb.Dense(), tb.LowRank(), tb.TensorTrain(), tb.TensorRing(rank=4)])
def test_the_defaults_and_the_deviation_of_the_paper(format):
    for layer in (tb.Embedding(2000, 48, format), tb.EmbeddingBag(2000, 48, format)):
        assert of_table(layer) == pytest.approx(0.3, rel=1e-3)
    assert of_table(tb.Head(48, 2000, format)) == pytest.approx(48**-0.5, rel=1e-3)
    for layer in (tb.Embedding(2000, 48, format, std="glorot"), tb.Head(48, 2000, format, std="glorot")):
        assert of_table(layer) == pytest.approx(math.sqrt(2 / (2000 + 48)), rel=1e-3)


def of_table(layer):
    return float(layer.weight.detach().clone().double().square().mean().sqrt())


def test_both_ends_have_the_deviation_of_their_use():
    embedding, head = tb.embedding_and_head(2000, 48, tb.TensorTrain(rank=4))
    assert of_table(embedding) == pytest.approx(0.3, rel=1e-3)
    assert of_table(head) == pytest.approx(48**-0.5, rel=1e-3)
    embedding, head = tb.embedding_and_head(2000, 48, tb.TensorTrain(rank=4), std="glorot")
    assert of_table(embedding) == pytest.approx(of_table(head), rel=1e-3)
    with pytest.raises(ValueError, match="std='xavier': give a number, or \"glorot\""):
        tb.Embedding(2000, 48, tb.Dense(), std="xavier")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(dtype):
    torch.manual_seed(0)
    assert realised(tb.TTEmbedding(3000, 64, 8, order=5, std=0.3, dtype=dtype)) == pytest.approx(0.3, rel=0.02)


def test_the_equation_alone_would_not_do():
    """At order 6 and rank 2 one draw strays far: the exact norm is what brings it home."""
    structure = tb.TensorTrain(rank=2, order=6).bind(Budget(4096, 64))
    chain = structure.chain
    generator = torch.Generator().manual_seed(0)
    core_std = (1 / math.sqrt(2**5)) ** (1 / 6)
    within = 0
    for _ in range(40):
        cores = [core_std * torch.randn(chain.core_shape(k), generator=generator) for k in range(6)]
        rms = math.sqrt(float(sum_of_squares(chain, cores)) / (4096 * 64))
        within += abs(rms - 1) < 0.05
    assert within < 20


@pytest.mark.parametrize("ranks", [(1, 3, 2, 1), (2, 3, 4, 2), (5, 1, 1, 5)])
@pytest.mark.parametrize("rows", [1, 7, 59, 60, 119, 120])
def test_norm_by_transfer_matrices_counts_real_rows_only(ranks, rows):
    chain = Chain(rows, (4, 5, 6), (2, 3, 1), ranks)
    cores = [torch.randn(chain.core_shape(k), dtype=torch.float64) for k in range(3)]
    expected = take(chain, cores, torch.arange(rows)).square().sum()
    for way in (sum_of_squares, _squares_by_transfer, _squares_by_blocks):
        torch.testing.assert_close(way(chain, cores), expected)


@pytest.mark.parametrize(("std", "dtype"), [(1e5, torch.float16), (1e-30, torch.float16), (1e-200, torch.float64)])
def test_a_std_the_dtype_cannot_make_is_refused(std, dtype):
    with pytest.raises(ValueError, match=r"is outside what .* can hold"):
        tb.TTEmbedding(100, 8, 2, std=std, dtype=dtype)


def test_std_is_checked():
    for bad in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="std="):
            tb.TTEmbedding(100, 8, std=bad)
