"""``layer.weight``: a table that is made when somebody computes with it."""

import copy
import io
import operator
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tensorbed as tb

pytestmark = pytest.mark.without_kernels

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
        lambda w: torch.mul(torch.zeros(50, 8), 2, out=w.data),
        lambda w: torch.max(torch.zeros(50, 8), 0, out=(w.data[0], torch.empty(8, dtype=torch.long))),
        lambda w: torch.add(torch.zeros(50), 1, out=w.data[:, 1]),
        lambda w: torch._foreach_mul_([torch.zeros(3), w], 2.0),
        lambda w: torch._foreach_mul_([w.data, torch.zeros(3)], 2.0),
        lambda w: w.set_(torch.zeros(50, 8)),
        lambda w: w.data.set_(torch.zeros(50, 8)),
        lambda w: w.data.resize_(3),
        lambda w: F.embedding(torch.tensor([3]), w, max_norm=1e-3),
        lambda w: F.embedding(torch.tensor([3]), w.data, max_norm=1e-3),
        lambda w: F.embedding_bag(torch.tensor([[3]]), w.data, max_norm=1e-3),
        lambda w: F.relu(w.data, inplace=True),
        lambda w: torch.fill_(w.data, 1.0),
        lambda w: w.data.unbind()[3].zero_(),
        lambda w: [row.zero_() for row in w.data],
        lambda w: w.data.split(10)[1].zero_(),
        lambda w: w.data.view(torch.int32).zero_(),
        lambda w: w.data.real.zero_(),
        lambda w: w.contiguous().float().zero_(),
        lambda w: setattr(w.data, "data", torch.zeros(50, 8)),
        lambda w: operator.imul(w.data, 2),
        lambda w: torch.nn.Parameter(w.data),
    ],
)
def test_writing_is_refused(write):
    layer = tb.TTEmbedding(50, 8, rank=2)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="core_0, core_1, core_2 and cannot be written to"):
        write(layer.weight)
    assert torch.equal(layer.weight, before)


def test_arrays_are_read_only(layer):
    rows = layer(torch.arange(50)).detach().numpy()
    for array in (layer.weight.data.numpy(), np.asarray(layer.weight.data), layer.weight.detach()[:].numpy(force=True)):
        np.testing.assert_allclose(array, rows, rtol=1e-5, atol=1e-7)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    layer.weight.data.numpy().copy()[0] = 0
    shared = torch.from_dlpack(layer.weight.data)  # whoever takes it knows nothing of us: a copy
    torch.testing.assert_close(shared, torch.from_numpy(rows))
    shared.zero_()
    with pytest.raises(RuntimeError, match="requires grad"):
        layer.weight.numpy()
    np.testing.assert_allclose(layer.requires_grad_(False).weight.numpy(), rows, rtol=1e-5, atol=1e-7)


def test_data_is_read_as_usual(layer):
    data = layer.weight.data
    rows = data + 0
    torch.testing.assert_close(rows, layer(torch.arange(50)).detach())
    torch.testing.assert_close(data[3:5].clone(), rows[3:5])
    assert not data.requires_grad
    assert type(data.clone()) is type(data * 2) is type(data[torch.tensor([1, 2])]) is torch.Tensor
    copy = data.clone()
    copy[3] = 0
    assert np.asarray(data).shape == (50, 8)
    assert data.tolist() == rows.tolist()
    assert repr(data[:3]) == repr(rows[:3])
    assert torch.equal(torch.as_tensor(data), rows)
    assert torch.equal(torch.tensor(data.tolist()), rows)
    assert f"{data[3, 4]:.3f}" == f"{rows[3, 4]:.3f}"
    again = tb.Embedding.from_pretrained(data, tb.Dense())
    torch.testing.assert_close(again(torch.arange(50)), rows)


def test_copies_are_plain_tensors(layer):
    buffer = io.BytesIO()
    torch.save(layer.weight.detach(), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), layer.weight)
    assert torch.equal(copy.deepcopy(layer.weight.detach()), layer.weight)
    assert type(layer.weight.clone()) is torch.Tensor


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_of_the_weight_are_those_of_a_dense_one(layer, copied, frozen):
    layer.requires_grad_(not frozen)
    other = copied(layer.weight)
    assert type(other) is torch.Tensor
    assert other.is_leaf
    assert other.requires_grad is copied(torch.nn.Embedding(3, 2).requires_grad_(not frozen).weight).requires_grad
    assert torch.equal(other, layer.weight)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        other.zero_()
    assert torch.equal(layer.weight, before)
    twice = copy.deepcopy([first := layer.weight, first])
    assert twice[0] is twice[1]


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
