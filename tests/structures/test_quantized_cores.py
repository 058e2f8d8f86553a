"""Straight-through rounding around other formats: it learns, packing changes no bit, sizes are honest."""

import pytest
import torch
from others import Unfitted
from torch import nn

import tensorbed as tb

FORMATS = [
    tb.StraightThrough(tb.TensorTrain(rank=4)),
    tb.StraightThrough(tb.TensorRing(rank=3), bits=8, group=16),
    tb.StraightThrough(tb.LowRank(rank=6), bits=4),
    tb.StraightThrough(tb.CanonicalPolyadic(rank=8), bits=4, group=8),
    tb.StraightThrough(tb.NonlinearTrain(rank=6)),
]
ROWS, COLS = 300, 64


def same_bits(one, other):
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_layer_packs_to_the_bit(format, dtype):
    torch.manual_seed(0)
    index, hidden = torch.arange(ROWS), torch.randn(5, COLS).to(dtype)
    embedding = tb.Embedding(ROWS, COLS, format, padding_idx=3, dtype=dtype)
    bag = tb.EmbeddingBag(ROWS, COLS, format, mode="sum", dtype=dtype)
    head = tb.Head(COLS, ROWS, format, dtype=dtype)
    for embedding.impl in ("auto", "reference"):
        assert same_bits(embedding.packed()(index), embedding(index))
    assert same_bits(bag.packed()(index.view(20, 15)), bag(index.view(20, 15)))
    assert same_bits(head.packed()(hidden), head(hidden))
    assert torch.equal(head.packed().topk(hidden, 7).indices, head.topk(hidden, 7).indices)
    assert torch.equal(head.packed().loss(hidden, index[:5]), head.loss(hidden, index[:5]))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_is_read_has_as_many_values_as_the_bits_allow(format):
    layer = tb.Embedding(ROWS, COLS, format)
    structure, params = layer.structure, {name: tensor.detach() for name, tensor in layer.params().items()}
    for name, read in structure.read(params, torch.float32).items():
        part = structure.stored[name]
        flat = read.reshape(part.rows, part.cols)
        assert max(len(row.unique()) for row in flat[:, : part.group]) <= 2**format.bits
        given = params[name].reshape(flat.shape)
        assert float((flat - given).norm() / given.norm()) < (0.01 if format.bits == 8 else 0.12)


def test_training_helps_through_codes():
    torch.manual_seed(0)
    embedding, head = tb.embedding_and_head(60, 64, FORMATS[0], tied=True, std=0.3)
    turn = nn.Linear(64, 64)
    words, goals = torch.arange(60), torch.randperm(60)
    optimiser = torch.optim.Adam([*embedding.parameters(), *turn.parameters()], lr=0.01)
    losses = []
    for _ in range(80):
        optimiser.zero_grad()
        loss = head.loss(turn(embedding(words)), goals)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    tied = tb.Head.tied_to(embedding.packed())
    with torch.no_grad():
        hidden = turn(embedding(words))
        assert torch.equal(tied.loss(hidden, goals), head.loss(hidden, goals))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_sizes_are_those_of_what_is_stored(format, tmp_path):
    layer = tb.Embedding(ROWS, COLS, format)
    stored = layer.packed()
    assert layer.compression_ratio == tb.Embedding(ROWS, COLS, format.format).compression_ratio
    assert stored.compression_ratio == pytest.approx(
        4 * ROWS * COLS / sum(t.nbytes for t in stored.state_dict().values())
    )
    assert stored.compression_ratio > (2 if format.bits == 8 else 3) * layer.compression_ratio
    for one in (layer, stored):
        tb.save(one, tmp_path / "layer.safetensors")
        loaded = tb.load(tmp_path / "layer.safetensors")
        assert loaded.structure == one.structure
        assert same_bits(loaded(torch.arange(ROWS)), layer(torch.arange(ROWS)))


def test_constants_of_a_format_are_kept_as_they_are():
    format = tb.StraightThrough(tb.ProductQuantized(parts=4))
    layer = tb.Embedding.from_pretrained(torch.randn(ROWS, COLS), format, freeze=False)
    stored = layer.packed()
    assert torch.equal(stored.codes, layer.codes)
    assert same_bits(stored(torch.arange(ROWS)), layer(torch.arange(ROWS)))


def test_fits_are_those_of_the_format():
    table = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    plain = tb.Embedding.from_pretrained(table, tb.LowRank(rank=40))
    rounded = tb.Embedding.from_pretrained(table, tb.StraightThrough(tb.LowRank(rank=40)))
    assert same_bits(rounded.u, plain.u)
    assert plain.fit_error < rounded.fit_error < plain.fit_error + 0.01
    with pytest.raises(ValueError, match=r"cannot be fitted to a table"):
        tb.Embedding.from_pretrained(table, tb.StraightThrough(Unfitted()))


def test_refusals():
    with pytest.raises(ValueError, match="choose 8 or 4"):
        tb.StraightThrough(tb.TensorTrain(rank=2), bits=2)
    with pytest.raises(ValueError, match="group"):
        tb.StraightThrough(tb.TensorTrain(rank=2), group=0)
    with pytest.raises(TypeError, match=r"format must be a format such as tb\.TensorTrain"):
        tb.StraightThrough(8)
    with pytest.raises(ValueError, match="scaled must be a registered structure"):
        tb.Embedding(9, 4, tb.StraightThrough(Unfitted()))
