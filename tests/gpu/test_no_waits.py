"""Nothing in a step waits for the device: no operator runs whose result the host has to see.

The operators' bodies are run as they are on a GPU, on the CPU: checks there are the device's, and the compiled kernels
of the CPU take no part.
"""

import pytest
import torch
from guards import guarded
from test_chains import CHAINS, RING, TRAIN, drawn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tensorbed as tb
from tensorbed import indexing
from tensorbed.backends import graphs, native, triton
from tensorbed.backends.triton import chains
from tensorbed.backends.triton.chains import Table, compute

# Operators whose outputs' sizes depend on values, or that hand a value to Python.
WAITING = {
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_numpy", "argwhere", "masked_select", "equal",
    "bincount", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2", "allclose",
}  # fmt: skip


class NoWaits(TorchDispatchMode):
    """Refuses operators for which the host would wait."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        self.seen.add(name)
        assert name not in WAITING, f"{name} waits for the device"
        if name.startswith("repeat_interleave"):
            assert (kwargs or {}).get("output_size") is not None, "repeat_interleave waits for the sum of repeats"
        if name in ("index", "index_put", "index_put_"):
            masks = [at for at in args[1] if at is not None and at.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} by a mask waits for the number of places"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(indexing, "CHECKED_BY_DEVICE", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(native, "available", False)

    def refuse(tensor):
        raise AssertionError("tolist waits for the device")

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)


def test_the_mode_sees_a_wait():
    for wait in (lambda t: int(t.sum()), lambda t: t.nonzero(), lambda t: t[t > 1], torch.unique):
        with pytest.raises(AssertionError, match="waits"), NoWaits():
            wait(torch.arange(4))


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_the_operators_bodies(chain):
    """Of rows and of bags, forward and backward, as graphs call them and as they are called eagerly."""
    cores, ids = drawn(chain, 12, torch.float32)
    held, bounds, weights = [core.detach() for core in cores], torch.tensor([0, 4, 4, 11]), torch.ones(12)
    for pooling in (graphs.ROWS, (bounds, weights, False, 2), (bounds, None, True, -1)):
        told = (chain.packed(), "triton", *pooling)
        with NoWaits() as mode:
            out = graphs.chain_op._init_fn(ids, held, *told)
            made = graphs.chain_backward_op._init_fn(torch.ones_like(out), ids, held, *told)
        assert {"sort", "cumsum", "_assert_async"} <= mode.seen
        assert [one.shape for one in made][: len(held)] == [core.shape for core in held]


def test_several_tables():
    tables, leaves = [], []
    for at, chain in enumerate((TRAIN, RING, TRAIN)):
        cores, ids = drawn(chain, 8, torch.float32, seed=at)
        leaves += cores
        tables.append(Table(chain, cores, ids, torch.tensor([0, 3, 8]), mean=at == 1))
    with NoWaits() as mode:
        grads = torch.autograd.grad(compute(tables).sum(), leaves)
    assert {"sort", "cumsum"} <= mode.seen
    assert all(grad.shape == leaf.shape and grad.any() for grad, leaf in zip(grads, leaves, strict=True))


OFFSETS = [0, 3, 3, 7]
LAYERS = {  # made in a test, where the kernels run
    "lookup": lambda: (tb.Embedding(60, 8, tb.TensorTrain(rank=3), padding_idx=1, impl="triton"), ()),
    "by frequency": lambda: (tb.Embedding(60, 8, tb.LowRank(rank=3), scale_grad_by_freq=True, impl="triton"), ()),
    "bags": lambda: (
        tb.EmbeddingBag(60, 8, tb.TensorRing(rank=2), padding_idx=1, impl="triton"),
        (torch.tensor(OFFSETS),),
    ),
    "largest": lambda: (
        tb.EmbeddingBag(60, 8, tb.TensorTrain(rank=3), mode="max", impl="triton"),
        (torch.tensor(OFFSETS),),
    ),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_training_step_of_a_layer(make):
    layer, more = make()
    index = torch.tensor([3, 59, 1, 3, 0, 7, 7, 12])
    with NoWaits():
        layer(index, *more).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)


@pytest.mark.parametrize("jagged", [False, True], ids=["one id", "bags"])
def test_a_training_step_of_a_collection(jagged):
    sizes = {"C1": 60, "C2": 500, "C3": 97}
    fields = tb.EmbeddingBagCollection.from_sizes(sizes, 8, tb.TensorTrain(rank=2), impl="triton")
    ids = torch.tensor([[3, 499, 96], [0, 7, 7]])
    given = {name: (ids.T[at].repeat(2), torch.tensor([0, 1])) for at, name in enumerate(sizes)} if jagged else ids
    with NoWaits():
        fields(given)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in fields.parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "one table"])
@pytest.mark.parametrize("format", [tb.TensorTrain(rank=3), tb.LowRank(rank=3)], ids=["train", "low rank"])
def test_a_training_step_of_an_embedding_and_a_head(format, tied):
    embedding = tb.Embedding(60, 8, format, impl="triton")
    head = tb.Head.tied_to(embedding, impl="triton") if tied else tb.Head(8, 60, format, impl="triton")
    parameters = list(nn.ModuleList([embedding, head]).parameters())
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    index = torch.tensor([3, 59, 1, 3, 0, 7, 7, 12])
    with NoWaits() as mode:
        head.loss(embedding(index[:-1]), index[1:]).backward()
        optimizer.step()
    assert {"sort", "cumsum", "_assert_async"} <= mode.seen
    assert all(p.grad.any() for p in parameters)


@pytest.mark.parametrize("pieces", [2, 7])
def test_a_step_in_pieces(pieces, monkeypatch):
    monkeypatch.setattr(chains, "most_rows", lambda chain, asked: -(-8 // pieces))
    layer, more = LAYERS["bags"]()
    with NoWaits():
        layer(torch.tensor([3, 59, 1, 3, 0, 7, 7, 12]), *more).square().sum().backward()
    assert all(p.grad.any() for p in layer.parameters())


@pytest.mark.skipif(triton.interpreted, reason="graphs of CUDA are captured on a GPU")
def test_a_training_step_is_captured_into_a_graph():
    layer, _ = LAYERS["lookup"]()
    index = torch.tensor([3, 59, 1, 3, 0, 7])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer.zero_grad(set_to_none=True)
            layer(index).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        layer(index).square().sum().backward()
    captured = [p.grad for p in layer.parameters() if p.requires_grad]
    index.copy_(torch.tensor([8, 8, 1, 30, 31, 2]))
    graph.replay()
    made = [grad.clone() for grad in captured]
    layer.zero_grad(set_to_none=True)
    layer(index).square().sum().backward()
    assert all(torch.equal(p.grad, one) for p, one in zip(layer.parameters(), made, strict=False))


def test_guards_hold_in_a_layer_too(monkeypatch):
    layer, more = LAYERS["bags"]()
    with guarded(monkeypatch):
        layer(torch.tensor([3, 59, 1, 3, 0, 7, 7, 12]), *more).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())
