"""The kernels as a node of autograd's graph."""

import copy
import io
import pickle

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.testing import assert_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import draw_grad

FORMATS = {"train": tb.TensorTrain(rank=4), "ring": tb.TensorRing(rank=3, order=4), "low rank": tb.LowRank(rank=3)}
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
IDS = torch.randint(0, 999, (20, 6), generator=torch.Generator().manual_seed(0))


def made(format, kind=tb.Embedding, **options):
    torch.manual_seed(0)
    return kind(999, 36, format, **{"dtype": torch.float64, "std": 1.0, **options})


def reference(layer):
    """The same tensors by the plain path."""
    other = copy.deepcopy(layer)
    other.impl = "reference"
    return other


def gradients(layer, out, grad, **options):
    return torch.autograd.grad(out, list(layer.parameters()), grad, **options)


def assert_all_near(made, wanted):
    for one, other in zip(made, wanted, strict=True):
        assert_near(one, other)


@every_format
@pytest.mark.parametrize("strides", ["columns of a wider tensor", "rows far apart", "one row for all", "transposed"])
def test_a_gradient_is_read_whatever_its_strides(format, strides):
    layer = made(format)
    drawn = draw_grad(90, 120)
    grad = {
        "columns of a wider tensor": drawn[:20, 7:43],
        "rows far apart": drawn[::4][:20, :36],
        "one row for all": drawn[:1, :36].expand(20, 36),
        "transposed": drawn[:36, :20].T,
    }[strides]
    out = layer(IDS[:, 0])
    given = gradients(layer, out, grad, retain_graph=True)
    for gradient, wanted in zip(given, gradients(layer, out, grad.contiguous()), strict=True):
        assert torch.equal(gradient, wanted)


@every_format
@pytest.mark.parametrize("kind", [tb.Embedding, tb.EmbeddingBag])
def test_gradients_pass_the_numerical_check(format, kind):
    torch.manual_seed(0)
    layer = kind(29, 16, format, dtype=torch.float64, std=1.0)
    params = {name: p.detach().requires_grad_() for name, p in layer.params().items()}

    def rows(*tensors):
        return torch.func.functional_call(layer, dict(zip(params, tensors, strict=True)), (IDS[:2, :3] % 29,))

    assert torch.autograd.gradcheck(rows, tuple(params.values()))


@every_format
def test_a_graph_kept_gives_the_same_gradients_again(format):
    layer = made(format)
    out, grad = layer(IDS), draw_grad(120, 36).reshape(20, 6, 36)
    once = gradients(layer, out, grad, retain_graph=True)
    again = gradients(layer, out, grad)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(layer, out, grad)


@every_format
def test_gradients_of_several_uses_add_up(format):
    layer = made(format)
    plain = reference(layer)
    for one in (layer, plain):
        out = one(IDS)
        loss = out.square().sum() + (out[:5].sin() * one(IDS[:5])).sum() + one(IDS[3]).prod(0).sum()
        loss.backward()
        loss = one(IDS[7:]).cos().sum()
        loss.backward()
    assert_all_near([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])


@every_format
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(format, reentrant):
    layer, grad = made(format), draw_grad(120, 36).reshape(20, 6, 36)
    # A reentrant checkpoint looks for gradients among its arguments.
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def body(ids, scale):
        return layer(ids).sin() * scale

    out = checkpoint(body, IDS, scale, use_reentrant=reentrant)
    out.backward(grad)
    found = [p.grad for p in layer.parameters()]
    assert_all_near(found, gradients(layer, body(IDS, scale), grad))


@every_format
def test_a_core_changed_between_forward_and_backward_is_an_error(format):
    layer = made(format)
    for p in layer.parameters():
        out = layer(IDS)
        with torch.no_grad():
            p.mul_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    layer(IDS).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_weights_changed_between_forward_and_backward_are_an_error():
    layer = made(tb.TensorTrain(rank=4), tb.EmbeddingBag, mode="sum")
    weights = torch.rand(20, 6, dtype=torch.float64)
    out = layer(IDS, per_sample_weights=weights)
    weights.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@every_format
def test_ids_changed_between_forward_and_backward_change_nothing(format):
    """What was looked up is known by then."""
    layer, ids, grad = made(format), IDS.clone(), draw_grad(120, 36).reshape(20, 6, 36)
    out = layer(ids)
    ids.fill_(2**40)
    assert_all_near(gradients(layer, out, grad), gradients(layer, layer(IDS), grad))


@every_format
def test_the_output_may_be_changed_in_place(format):
    """Backward does not read the rows."""
    layer, grad = made(format), draw_grad(120, 36).reshape(20, 6, 36)
    assert_all_near(gradients(layer, layer(IDS).mul_(3.0), grad), gradients(layer, layer(IDS), 3.0 * grad))


@every_format
@pytest.mark.parametrize(
    "turned",
    [
        lambda g: g.transpose(0, 2).contiguous().transpose(0, 2),
        lambda g: torch.stack([g, g + 1], -1)[..., 0],
        lambda g: g[:1, :1].expand(20, 6, 36),
        lambda g: g[..., :1].expand(20, 6, 36),
        lambda g: torch.complex(torch.zeros_like(g), g).conj().imag,  # negated when it is read
        lambda g: torch.ones((), dtype=g.dtype).expand(20, 6, 36),
    ],
    ids=["permuted", "with a step", "one row", "one column", "lazily negated", "one number"],
)
def test_incoming_gradients_may_lie_in_memory_as_they_like(format, turned):
    layer = made(format)
    grad = turned(draw_grad(120, 36).reshape(20, 6, 36))
    assert_all_near(gradients(layer, layer(IDS), grad), gradients(layer, layer(IDS), grad.clone().resolve_neg() + 0.0))


@every_format
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_rows_without_a_graph_are_those_with_one(format, mode):
    for kind in (tb.Embedding, tb.EmbeddingBag):
        layer = made(format, kind)
        with mode():
            out = layer(IDS)
        assert not out.requires_grad
        assert torch.equal(out, layer(IDS))
        with torch.inference_mode():
            ids = IDS.clone()
        assert torch.equal(layer(ids), out)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_leaves_the_layer_s_dtype(format, dtype):
    for kind in (tb.Embedding, tb.EmbeddingBag):
        layer = made(format, kind, dtype=dtype)
        wanted = layer(IDS)
        grad = draw_grad(wanted.numel(), 1, dtype).reshape(wanted.shape)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(IDS)
            found = gradients(layer, out, grad)
        assert out.dtype == dtype
        assert torch.equal(out, wanted)
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(layer, wanted, grad), strict=True))


@every_format
def test_layers_are_copied_and_saved_after_use(format):
    for kind in (tb.Embedding, tb.EmbeddingBag):
        layer = made(format, kind)
        layer(IDS).sum().backward()
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        others = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False))
        for other in others:
            assert torch.equal(other(IDS), layer(IDS))
            other.zero_grad()
            other(IDS).sum().backward()
            assert_all_near([p.grad for p in other.parameters()], [p.grad for p in layer.parameters()])


@every_format
def test_second_derivatives_are_the_reference_s_and_refused_elsewhere(format):
    layer = made(format)
    plain = reference(layer)

    def penalty(one):
        first = torch.autograd.grad(one(IDS).square().sum(), list(one.parameters()), create_graph=True)
        return sum(grad.square().sum() for grad in first)

    with pytest.raises(RuntimeError, match='use impl="reference"'):
        penalty(layer).backward()
    penalty(plain).backward()
    assert all(p.grad.count_nonzero() > 0 for p in plain.parameters())


@every_format
@pytest.mark.parametrize("kind", [tb.Embedding, tb.EmbeddingBag])
@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_follows_the_tangents(format, kind, grad):
    """The kernels know none: what they are not asked for must not get lost silently."""
    layer = made(format, kind)
    params = {name: p.detach().requires_grad_(grad) for name, p in layer.params().items()}
    step, along = 1e-6, {name: draw_grad(p.numel(), 1).reshape(p.shape) for name, p in params.items()}

    def rows(tensors):
        return torch.func.functional_call(layer, tensors, (IDS,))

    with forward_ad.dual_level():
        dual = rows({name: forward_ad.make_dual(p, along[name]) for name, p in params.items()})
        tangent = forward_ad.unpack_dual(dual).tangent
    ahead, back = (rows({n: p.detach() + s * step * along[n] for n, p in params.items()}) for s in (1, -1))
    torch.testing.assert_close(tangent.detach(), (ahead - back) / (2 * step), rtol=1e-6, atol=1e-6)


@every_format
def test_only_what_is_used_gets_a_gradient(format):
    layer = made(format)
    layer(IDS)  # whose graph is dropped
    out = layer(IDS)
    out[:0].sum().backward()
    assert all(p.grad.count_nonzero() == 0 for p in layer.parameters())


def test_graphs_of_many_batches_at_once():
    """Each keeps a tape of its own: backward in another order than forward."""
    layer = made(tb.TensorTrain(rank=4))
    batches = [torch.randint(0, 999, (50,), generator=torch.Generator().manual_seed(k)) for k in range(6)]
    outs = [layer(ids) for ids in batches]
    grad = draw_grad(50, 36)
    for k in (3, 0, 5, 1, 4, 2):
        assert_all_near(gradients(layer, outs[k], grad), gradients(layer, layer(batches[k]), grad))
