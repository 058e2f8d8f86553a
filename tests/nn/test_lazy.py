"""``layer.weight``: a table that is made when somebody computes with it."""

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tensorbed as tb

FORMATS = [tb.TensorTrain(rank=3), tb.LowRank(rank=2), tb.Dense()]


@pytest.fixture(params=FORMATS, ids=lambda f: type(f).__name__)
def layer(request):
    return tb.Embedding(50, 8, request.param)


def count_tables(layer, monkeypatch):
    made = []
    table = type(layer)._table
    monkeypatch.setattr(type(layer), "_table", lambda self: made.append(1) or table(self))
    return made


def test_what_it_is_costs_nothing(layer, monkeypatch):
    made = count_tables(layer, monkeypatch)
    weight = layer.weight
    assert weight.shape == (50, 8)
    assert (weight.size(0), len(weight), weight.dim(), weight.ndim, weight.numel()) == (50, 50, 2, 2, 400)
    assert weight.dtype == torch.float32
    assert weight.device == torch.device("cpu")
    assert weight.requires_grad
    assert weight.grad is None
    assert weight.is_floating_point()
    assert weight.data_ptr() == next(layer.parameters()).data_ptr()
    assert isinstance(weight, torch.Tensor)
    assert made == []
    weight[3]
    assert made == [1]


def test_it_computes_as_the_table(layer):
    rows = layer(torch.arange(50))
    weight = layer.weight
    index = torch.tensor([3, 4])
    for found, expected in (
        (weight + 0, rows),
        (weight[3:5], rows[3:5]),
        (F.embedding(index, weight), rows[index]),
        (F.linear(torch.ones(8), weight), rows.sum(1)),
        (torch.cat([rows, weight]), torch.cat([rows, rows])),
        (weight.T, rows.T),
        (weight.detach().double(), rows.detach().double()),
    ):
        torch.testing.assert_close(found, expected)
    assert np.asarray(weight.detach()).shape == (50, 8)


def test_gradients_reach_the_tensors(layer):
    (layer.weight * 2).sum().backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    (layer(torch.arange(50)) * 2).sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def test_freezing_it_freezes_the_layer(layer):
    layer.weight.requires_grad = False
    assert not any(p.requires_grad for p in layer.parameters())
    assert not layer.weight.requires_grad
    layer.weight.requires_grad_()
    assert all(p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.normal_(),
        lambda w: w.copy_(torch.zeros(50, 8)),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: torch.nn.init.normal_(w),
        lambda w: w.detach_(),
        lambda w: setattr(w, "data", torch.zeros(50, 8)),
        lambda w: w.data.__setitem__(3, 0.0),
        lambda w: w.data.normal_(),
        lambda w: w.data[3].zero_(),
        lambda w: w.data.T[0].copy_(torch.zeros(50)),
        lambda w: torch.nn.init.zeros_(w.data),
        lambda w: w[-1].copy_(torch.zeros(8)),
        lambda w: w.detach().fill_(1.0),
        lambda w: w.T.zero_(),
        lambda w: w.view(-1).zero_(),
        lambda w: torch.add(torch.zeros(50, 8), 1, out=w),
    ],
)
def test_writing_is_refused(write):
    layer = tb.TTEmbedding(50, 8, rank=2)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="core_0, core_1, core_2 and cannot be written to"):
        write(layer.weight)
    assert torch.equal(layer.weight, before)


def test_data_is_read_as_usual(layer):
    data = layer.weight.data
    rows = layer(torch.arange(50)).detach()
    torch.testing.assert_close(data + 0, rows)
    torch.testing.assert_close(data[3:5].clone(), rows[3:5])
    assert not data.requires_grad
    assert type(data.clone()) is type(data * 2) is type(data[torch.tensor([1, 2])]) is torch.Tensor
    copy = data.clone()
    copy[3] = 0
    assert np.asarray(data).shape == (50, 8)
    again = tb.Embedding.from_pretrained(data, tb.Dense())
    torch.testing.assert_close(again(torch.arange(50)), rows)


def test_copies_are_plain_tensors(layer):
    buffer = io.BytesIO()
    torch.save(layer.weight.detach(), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), layer.weight)
    assert torch.equal(copy.deepcopy(layer.weight.detach()), layer.weight)
    assert type(layer.weight.clone()) is torch.Tensor


def test_devices_dtypes_and_padding():
    assert tb.TTEmbedding(50, 8, rank=2, device="meta").weight.is_meta
    assert tb.TTEmbedding(50, 8, rank=2, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    padded = tb.TTEmbedding(50, 8, rank=2, padding_idx=4)
    assert padded.weight[4].count_nonzero() == 0


def test_graphs_hold_the_table_itself():
    layer = tb.TTEmbedding(50, 8, rank=2)
    compiled = torch.compile(lambda x: x @ layer.weight.T, backend="eager", fullgraph=True)
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(x), x @ layer.weight.T)
    grads = torch.func.grad(lambda x: (x @ layer.weight.T).sum())(x)
    torch.testing.assert_close(grads, layer.weight.sum(0).expand(3, 8))


def test_an_empty_dense_weight_is_no_table(layer):
    state = {**layer.state_dict(), "weight": torch.empty(0)}
    assert layer.load_state_dict(state) == torch.nn.modules.module._IncompatibleKeys([], [])
    with pytest.raises(RuntimeError, match="dense table"):
        layer.load_state_dict({**layer.state_dict(), "weight": torch.zeros(50, 8)})
