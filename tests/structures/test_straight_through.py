"""Straight-through training beyond the laws that hold for every structure: it learns, and packing changes no bit."""

import pytest
import torch

import tensorbed as tb

FORMATS = [
    tb.StraightThrough(),
    tb.StraightThrough(bits=8, group=16),
    tb.StraightThrough(bits=4),
    tb.StraightThrough(bits=4, group=64),
]


def table(rows=300, cols=64):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


def same_bits(one, other):
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_training_helps_and_packing_changes_nothing(format):
    """Pairs of words and classes: cross-entropy through a lookup and a tied head, both read as codes."""
    torch.manual_seed(0)
    embedding, head = tb.embedding_and_head(60, 64, format, tied=True, std=0.3)
    turn = torch.nn.Linear(64, 64)
    words, goals = torch.arange(60), torch.randperm(60)
    optimiser = torch.optim.Adam([*embedding.parameters(), *turn.parameters()], lr=0.01)
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        loss = head.loss(turn(embedding(words)), goals)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]
    stored = embedding.packed()
    tied = tb.Head.tied_to(stored)
    with torch.no_grad():
        hidden = turn(embedding(words))
        assert same_bits(stored(words), embedding(words))
        assert same_bits(tied(hidden), head(hidden))
        assert torch.equal(tied.loss(hidden, goals), head.loss(hidden, goals))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_layer_packs_to_the_bit(format, dtype):
    rows = table().to(dtype)
    index, hidden = torch.arange(300), table(5).to(dtype)
    embedding = tb.Embedding.from_pretrained(rows, format, padding_idx=3)
    assert same_bits(embedding.packed()(index), embedding(index))
    assert torch.equal(embedding.packed()(torch.tensor(3)), rows[3])
    bag = tb.EmbeddingBag.from_pretrained(rows, format, mode="max")
    assert same_bits(bag.packed()(index.view(20, 15)), bag(index.view(20, 15)))
    head = tb.Head.from_pretrained(rows, format, bias=rows[:, 0])
    assert same_bits(head.packed()(hidden), head(hidden))
    assert torch.equal(head.packed().topk(hidden, 7).indices, head.topk(hidden, 7).indices)


def test_packed_layers_are_of_the_ordinary_kind(tmp_path):
    layer = tb.EmbeddingBag(300, 64, tb.StraightThrough(bits=4), mode="sum", padding_idx=1, impl="reference")
    stored = layer.packed()
    assert stored.structure == tb.EmbeddingBag.from_pretrained(table(), tb.QuantizedRows(bits=4)).structure
    assert (stored.mode, stored.padding_idx, stored.impl) == ("sum", 1, "reference")
    assert not any(parameter.requires_grad for parameter in stored.parameters())
    assert layer.table.requires_grad
    assert layer.compression_ratio == pytest.approx(300 / 301)  # a padding row besides the table
    assert stored.compression_ratio > 6
    for one in (layer, stored):
        tb.save(one, tmp_path / "layer.safetensors")
        loaded = tb.load(tmp_path / "layer.safetensors")
        assert torch.equal(loaded.weight, one.weight)
    with pytest.raises(ValueError, match="nothing to pack"):
        stored.packed()
    embedding = tb.Embedding(10, 4, tb.StraightThrough())
    head = tb.Head.tied_to(embedding)
    with pytest.raises(ValueError, match=r"tb\.Head\.tied_to\(embedding\.packed\(\)\)"):
        head.packed()


def test_gradients_pass_the_rounding_in_rows_of_zeros_too():
    rows = table(6, 64)
    rows[2] = 0
    rows[3, :32] = 0
    for format in FORMATS:
        layer = tb.Embedding.from_pretrained(rows, format, freeze=False)
        grad = table(6, 64)
        layer(torch.arange(6)).backward(grad)
        torch.testing.assert_close(layer.table.grad, grad)
        assert layer(torch.tensor(2)).count_nonzero() == 0


@pytest.mark.parametrize(("format", "most"), [(FORMATS[0], 0.008), (FORMATS[1], 0.006), (FORMATS[2], 0.09)], ids=str)
def test_what_is_read_is_near_the_table(format, most):
    assert 0.2 * most < tb.Embedding.from_pretrained(table(), format).fit_error < most


@pytest.mark.parametrize("format", [*FORMATS, tb.StraightThrough(tb.LowRank(rank=3))], ids=str)
def test_tangents_pass_the_rounding_where_no_gradient_is_recorded(format):
    """Forward mode is not switched off by ``no_grad``."""
    layer = tb.Embedding(20, 8, format)
    index, params = torch.tensor([3, 7, 3]), dict(layer.named_parameters())
    tangents = {name: torch.ones_like(tensor) for name, tensor in params.items()}

    def tangent_of_rows():
        return torch.func.jvp(lambda p: torch.func.functional_call(layer, p, index), (params,), (tangents,))[1]

    expected = tangent_of_rows()
    assert expected.count_nonzero()
    with torch.no_grad():
        assert torch.equal(tangent_of_rows(), expected)


def test_refusals():
    with pytest.raises(ValueError, match="choose 8 or 4"):
        tb.StraightThrough(bits=3)
