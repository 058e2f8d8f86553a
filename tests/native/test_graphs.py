"""The kernels in graphs, and where a graph cannot hold them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.backends.chain import Chain
from tensorbed.backends.graphs import ROWS, chain_backward_op, chain_op
from tensorbed.backends.native import chains as compiled
from tensorbed.testing import assert_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

INDEX = torch.tensor([3, 99, 3, 0, 42])
OFFSETS = torch.tensor([0, 2, 2])


@pytest.fixture(autouse=True)
def compile_afresh():
    torch.compiler.reset()


def operators_in(layer, *arguments):
    """Names of tensorbed's operators in the graph that torch.compile makes of a layer, and what it computes."""
    found = set()

    def backend(graph, _):
        found.update(str(node.target) for node in graph.graph.nodes if "tensorbed" in str(node.target))
        return graph.forward

    return found, torch.compile(layer, fullgraph=True, backend=backend)(*arguments)


@pytest.mark.parametrize("impl", ["auto", "native", "torch"])
@pytest.mark.parametrize("format", [tb.TensorTrain(rank=3), tb.TensorRing(rank=3)], ids=repr)
def test_compiled_lookups_are_the_operator(format, impl):
    layer = tb.Embedding(100, 24, format, impl=impl)
    found, out = operators_in(layer, INDEX)
    assert found == {"tensorbed.chain_rows.default"}
    assert_near(out, layer(INDEX))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("format", [tb.TensorTrain(rank=3), tb.TensorRing(rank=3), tb.LowRank(rank=3)], ids=repr)
def test_compiled_bags_are_pooled_by_the_operator(format, mode):
    layer = tb.EmbeddingBag(100, 24, format, mode=mode, padding_idx=3)
    found, out = operators_in(layer, INDEX, OFFSETS)
    assert found == {"tensorbed.check_bounds.default", "tensorbed.chain_rows.default"}
    assert_near(out, layer(INDEX, OFFSETS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_compiled_layers_in_every_precision(dtype):
    layer = tb.TTEmbedding(100, 24, rank=3, dtype=dtype)
    bag = tb.TTEmbeddingBag(100, 24, rank=3, dtype=dtype)
    assert_near(torch.compile(layer, fullgraph=True, backend="aot_eager")(INDEX), layer(INDEX))
    out = torch.compile(bag, fullgraph=True, backend="aot_eager")(INDEX, OFFSETS)
    assert_near(out, bag(INDEX, OFFSETS))


def test_compiled_bags_may_be_none():
    layer = tb.TTEmbeddingBag(100, 24, rank=3)
    none = torch.empty(0, dtype=torch.int64)
    assert torch.compile(layer, fullgraph=True, backend="aot_eager")(INDEX, none).shape == (0, 24)


# torch.jit.trace is deprecated, which torch says by one class or another, or not at all.
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_recorded_calls_take_the_path_that_can_be_recorded(impl):
    """What is written down call by call must not be an empty tensor that a kernel filled behind its back."""
    layer = tb.TTEmbedding(100, 24, rank=3, impl=impl)
    other = torch.tensor([7, 7, 1, 98, 5])
    traced = torch.jit.trace(layer, INDEX, check_trace=False)
    assert_near(traced(other), layer(other))
    params = {name: p.detach() for name, p in layer.named_parameters()}
    graph = make_fx(lambda p, i: torch.func.functional_call(layer, p, (i,)))(params, INDEX)
    assert_near(graph(params, other), layer(other).detach())


CHAIN = Chain(50, (4, 13), (2, 3), (1, 4, 1))


def cores(dtype=torch.float32):
    return [torch.randn(CHAIN.core_shape(k)).to(dtype) for k in range(2)]


def test_operators_compute_half_precision_in_single():
    half = cores(torch.float16)
    index = torch.tensor([3, 49, 0])
    made = chain_op(index, half, CHAIN.packed(), "native", *ROWS)
    assert_near(made, chain_op(index, [c.double() for c in half], CHAIN.packed(), "native", *ROWS).half())
    (one, other) = chain_backward_op(made, index, half, CHAIN.packed(), "native", *ROWS)
    assert one.dtype == other.dtype == torch.float16


def test_operators_refuse_what_the_kernels_would_misread():
    mixed = [cores()[0], cores()[1].double()]
    index, bounds = torch.tensor([3, 49, 0]), torch.tensor([0, 2, 3])
    with pytest.raises(ValueError, match="one dtype on the CPU, here float32, got a Tensor of float64"):
        chain_op(index, mixed, CHAIN.packed(), "native", *ROWS)
    weights = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="got a Tensor of float64"):
        chain_op(index, cores(), CHAIN.packed(), "native", bounds, weights, False, -1)
    with pytest.raises(ValueError, match=r"weights of shape \(2,\) for 3 ids"):
        chain_op(index, cores(), CHAIN.packed(), "native", bounds, torch.ones(2), False, -1)
    with pytest.raises(ValueError, match="gradient is"):
        chain_backward_op(torch.ones(1, 6), index, cores(), CHAIN.packed(), "native", bounds, None, False, -1)
    tables = [compiled.Table(CHAIN, cores(), index), compiled.Table(CHAIN, cores(), index[:2])]
    with pytest.raises(ValueError, match="a table gives 2 rows, the first one 3"):
        compiled.compute(tables)
    with pytest.raises(ValueError, match="1 cores for a chain of 2"):
        compiled.Planned([compiled.Table(CHAIN, cores()[:1], index)])


def test_a_collection_of_tables_converted_apart_is_computed_apart():
    layers = {name: tb.TTEmbeddingBag(100, 8, rank=3, mode="sum") for name in "ab"}
    collection = tb.EmbeddingBagCollection(layers)
    collection.tables["b"].double()
    ids = torch.tensor([[3, 7], [99, 0]])
    values, _ = collection(ids)
    assert_near(values, torch.cat([layers["a"](ids[:, :1]), layers["b"](ids[:, 1:])], 1))


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_padding_row_of_another_dtype_is_cast_to_the_parameters(impl):
    """As FSDP's mixed precision leaves it: parameters cast, buffers not."""
    layer = tb.TTEmbedding(100, 24, rank=3, padding_idx=3, dtype=torch.bfloat16, impl=impl)
    layer.padding_row = torch.full((24,), 1.5)
    out = layer(INDEX)
    assert out.dtype == torch.bfloat16
    assert out[0].tolist() == [1.5] * 24


@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.double])
def test_layers_converted_before_backward_are_refused(change):
    layer = tb.TTEmbedding(100, 24, rank=3)
    out = layer(INDEX)
    change(layer)
    with pytest.raises(RuntimeError, match="Convert layers before forward"):
        out.sum().backward()


def test_cores_cut_short_after_forward_are_refused():
    layer = tb.TTEmbedding(100, 24, rank=3)
    out = layer(INDEX)
    layer.core_0.data = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"a core is now float32 of shape \(1,\)"):
        out.sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to("meta"), lambda t: t):
        other = tb.TTEmbedding(100, 24, rank=3)(INDEX)
    with pytest.raises(RuntimeError, match="on meta"):
        other.sum().backward()


def test_cores_without_memory_are_refused():
    layer = tb.TTEmbedding(100, 24, rank=3)
    for parameter in layer.parameters():
        parameter.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        layer(INDEX)


def test_weights_without_a_gradient_are_not_given_one_and_negated_ones_are_read_right():
    layer = tb.TTEmbeddingBag(100, 24, rank=3, mode="sum")
    weights = torch.randn(5)
    for given in (weights, torch._neg_view(weights)):
        plain = given.clone().requires_grad_()
        out = layer(INDEX, OFFSETS, given)
        assert_near(out, layer(INDEX, OFFSETS, plain))
        made = torch.autograd.grad(out.sum(), list(layer.parameters()))
        wanted = torch.autograd.grad(layer(INDEX, OFFSETS, plain).sum(), [*layer.parameters(), plain])
        for one, other in zip(made, wanted, strict=False):
            assert_near(one, other)


def test_a_kept_loss_does_not_keep_the_plan():
    layer = tb.TTEmbedding(100, 24, rank=3)
    out = layer(INDEX)
    node, loss = out.grad_fn, out.sum()
    loss.backward(retain_graph=True)
    assert node.call is not None
    loss.backward()
    assert node.call is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
