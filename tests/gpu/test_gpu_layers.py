"""Layers by the kernels for GPUs: in graphs, explained, and where they hand on to PyTorch."""

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import graphs
from tensorbed.testing import assert_near

FORMATS = {"train": tb.TensorTrain(rank=3), "ring": tb.TensorRing(rank=2), "low rank": tb.LowRank(rank=3)}
INDEX, OFFSETS = [3, 59, 1, 3, 0, 7, 7, 12], [0, 3, 3, 7]


def made_and_gradients(layer, call, *arguments):
    made = call(*arguments)
    grad = torch.linspace(-1, 1, made.numel()).view_as(made).to(made.dtype)
    return made, torch.autograd.grad(made, [p for p in layer.parameters() if p.requires_grad], grad)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_compiled_layers_compute_the_same(format):
    torch.compiler.reset()
    layer = tb.EmbeddingBag(60, 8, format, padding_idx=1, impl="triton")
    index, offsets = torch.tensor(INDEX), torch.tensor(OFFSETS)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (made, grads), (expected, wanted) = (made_and_gradients(layer, f, index, offsets) for f in (compiled, layer))
    assert torch.equal(made, expected)
    assert all(map(torch.equal, grads, wanted))
    with pytest.raises(RuntimeError, match=r"out of range for a table of 60 rows"):
        compiled(index + 60, offsets)


def test_the_operator_is_as_torch_wants_operators():
    chain = tb.Embedding(60, 8, FORMATS["train"]).structure.chain
    cores = [torch.ones(chain.core_shape(k), requires_grad=True) for k in range(chain.order)]
    told = (torch.tensor(INDEX), cores, chain.packed(), "triton", *graphs.ROWS)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(graphs.chain_op, told, test_utils=tests)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_is_computed_is_explained(format):
    layer = tb.Embedding(60, 8, format, impl="triton")
    told, plain = (layer.structure.explain(torch.tensor(INDEX), impl) for impl in ("triton", "torch"))
    assert (told.path, told.why) == ("triton", 'as asked by impl="triton"')
    assert (told.unique_rows, told.multiply_adds) == (6, plain.multiply_adds)


def test_double_precision_goes_to_pytorch():
    layer = tb.Embedding(60, 8, FORMATS["train"], dtype=torch.float64, impl="triton")
    index = torch.tensor(INDEX)
    made, grads = made_and_gradients(layer, layer, index)
    layer.impl = "torch"
    expected, wanted = made_and_gradients(layer, layer, index)
    assert torch.equal(made, expected)
    assert all(map(torch.equal, grads, wanted))


def test_auto_goes_on_without_the_kernels():
    """They were measured on no device, and a tensor on the CPU is never for them."""
    layer = tb.Embedding(60, 8, FORMATS["train"])
    assert layer.explain(torch.tensor(INDEX)).path != "triton"


def test_fields_of_different_orders_are_side_by_side():
    tables = {
        "a": tb.EmbeddingBag(60, 8, tb.TensorTrain(rank=2), mode="sum", impl="triton"),
        "b": tb.EmbeddingBag(50, 6, tb.LowRank(rank=2), mode="mean", padding_idx=0, impl="triton"),
        "c": tb.EmbeddingBag(97, 4, tb.TensorTrain(rank=2, order=2), mode="sum", impl="triton"),
    }
    fields = tb.EmbeddingBagCollection(tables)
    ids = torch.tensor([[3, 0, 96], [59, 7, 7]])
    values, split = fields(ids)
    for at, (name, layer) in enumerate(tables.items()):
        layer.impl = "reference"
        assert_near(split[name], layer(ids[:, at : at + 1]))
    assert torch.equal(values, torch.cat(list(split.values()), 1))
