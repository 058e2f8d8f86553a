"""The layers' own surface: arguments, errors, shorthands, cores."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorbed as tb
from tensorbed import functional

NAMED = [tb.TTEmbedding, tb.TTEmbeddingBag]


@pytest.mark.parametrize("layer", NAMED)
def test_shorthands(layer):
    made = layer(1000, 24)
    assert (made.num_embeddings, made.embedding_dim, made.padding_idx) == (1000, 24, None)
    assert layer(1000, 24, 3).structure.numel < made.structure.numel
    by_ratio = layer(1000, 24, ratio=5)
    assert by_ratio.compression_ratio >= 5
    assert isinstance(made, tb.EmbeddingBag if "Bag" in layer.__name__ else tb.Embedding)
    with pytest.raises(ValueError, match="rank and ratio both set the size"):
        layer(1000, 24, 3, ratio=5)
    with pytest.raises(TypeError, match="nonsense"):
        layer(1000, 24, nonsense=1)


@pytest.mark.parametrize("layer", NAMED)
def test_chains_by_shape_order_and_ranks(layer):
    made = layer(100, 24, 2, shape=((4, 5, 6), (2, 3, 4)))
    assert [tuple(c.shape[1:3]) for c in made.cores] == [(4, 2), (5, 3), (6, 4)]
    assert len(layer(1000, 16, 2, order=4).cores) == 4
    made = layer(100, 24, ranks=(3, 4))
    assert [c.shape[0] for c in made.cores] == [1, 3, 4]
    with pytest.raises(ValueError, match=r"ranks=\(3,\) for Tensor.* of order 3: give"):
        layer(100, 24, ranks=(3,))
    with pytest.raises(ValueError, match=r"ranks\[1\]=0 for Tensor.*: ranks are positive"):
        layer(100, 24, ranks=(3, 0, 2))
    with pytest.raises(ValueError, match=r"rank=0 for Tensor.*: ranks are positive; use ratio="):
        layer(100, 24, 0)
    with pytest.raises(ValueError, match="holds 24750 rows"):
        layer(25000, 256, shape=((25, 30, 33), (4, 8, 8)))
    with pytest.raises(ValueError, match="order=1"):
        layer(100, 24, order=1)


@pytest.mark.parametrize("format", [tb.TensorTrain, tb.TensorRing])
def test_cores_are_the_paper_s_and_can_be_written_in_place(format):
    made = tb.Embedding(100, 24, format(rank=2, shape=((4, 5, 6), (2, 3, 4))))
    joint = made.cores[0].shape[0]
    assert [tuple(c.shape) for c in made.cores] == [(joint, 4, 2, 2), (2, 5, 3, 2), (2, 6, 4, joint)]
    written = [torch.randn(c.shape) for c in made.cores]
    for core, values in zip(made.cores, written, strict=True):
        core.data.copy_(values)
    table = torch.einsum("aixb,bjyc,ckza->ijkxyz", *written).reshape(120, 24)[:100]
    torch.testing.assert_close(made.weight, table)
    torch.testing.assert_close(made(torch.arange(100)), table)
    assert [name for name, _ in made.named_parameters()] == ["core_0", "core_1", "core_2"]


def test_structures_without_cores_say_so():
    assert not hasattr(tb.Embedding(100, 8, tb.LowRank(rank=2)), "cores")
    assert not hasattr(tb.Embedding(100, 8, tb.Dense()), "cores")


@pytest.mark.parametrize("layer", NAMED)
def test_unsupported_arguments_are_refused_by_name(layer):
    for options, message in (
        ({"max_norm": 1.0}, "max_norm=1.0 is not supported"),
        ({"sparse": True}, "sparse=True is not supported"),
        ({"padding_idx": 1000}, r"padding_idx=1000 is not a row of a table of 1000 \(valid: -1000 to 999\)"),
        ({"impl": "magic"}, "choose one of"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(1000, 24, **options)
        if "impl" not in options:
            with pytest.raises(ValueError, match=message):
                layer.from_pretrained(torch.randn(1000, 24), rank=2, **options)
    with pytest.raises(TypeError, match="padding_idx must be an int"):
        layer(1000, 24, padding_idx=1.0)
    with pytest.raises(TypeError, match="dtype="):
        layer(1000, 24, dtype=torch.int32)


FITTED = [
    *((layer, {"rank": 2}) for layer in (*NAMED, tb.TTHead)),
    *((layer, {"format": tb.TensorTrain(rank=2)}) for layer in (tb.Embedding, tb.EmbeddingBag, tb.Head)),
]
NO_BOOLS = [1, 0, None, "no", torch.tensor(True), tb.TensorTrain(rank=2)]


@pytest.mark.parametrize(("layer", "size"), FITTED)
@pytest.mark.parametrize("given", NO_BOOLS, ids=repr)
def test_freeze_is_true_or_false(layer, size, given):
    with pytest.raises(TypeError, match=rf"freeze must be True or False, got {re.escape(repr(given))}"):
        layer.from_pretrained(torch.randn(12, 8), freeze=given, **size)


@pytest.mark.parametrize("name", ["Embedding", "EmbeddingBag", "Head"])
def test_a_format_given_to_a_shorthand_is_refused_with_the_layer_that_takes_one(name):
    shorthand, format = getattr(tb, f"TT{name}"), tb.TensorTrain(rank=2)
    with pytest.raises(TypeError, match=rf"TT{name}\.from_pretrained\(table, rank=16\)") as refused:
        shorthand.from_pretrained(torch.randn(12, 8), format)
    assert f"tb.{name}.from_pretrained(table, format)" in str(refused.value)
    with pytest.raises(TypeError, match="freeze must be True or False, got 16"):
        shorthand.from_pretrained(torch.randn(12, 8), 16)


@pytest.mark.parametrize("given", NO_BOOLS, ids=repr)
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("scale_grad_by_freq", lambda flag: tb.TTEmbedding(12, 8, 2, scale_grad_by_freq=flag)),
        ("scale_grad_by_freq", lambda flag: tb.TTEmbeddingBag(12, 8, 2, scale_grad_by_freq=flag)),
        (
            "scale_grad_by_freq",
            lambda flag: tb.TTEmbedding.from_pretrained(torch.randn(12, 8), rank=2, scale_grad_by_freq=flag),
        ),
        ("sparse", lambda flag: tb.TTEmbedding(12, 8, 2, sparse=flag)),
        ("include_last_offset", lambda flag: tb.TTEmbeddingBag(12, 8, 2, include_last_offset=flag)),
        (
            "include_last_offset",
            lambda flag: tb.TTEmbeddingBag.from_pretrained(torch.randn(12, 8), rank=2, include_last_offset=flag),
        ),
        ("bias", lambda flag: tb.Head(8, 12, tb.Dense(), flag)),
        ("bias", lambda flag: tb.TTHead(8, 12, 2, bias=flag)),
        ("bias", lambda flag: tb.Head.tied_to(tb.TTEmbedding(12, 8, 2), flag)),
        ("bias", lambda flag: tb.TTHead.tied_to(tb.TTEmbedding(12, 8, 2), flag)),
        ("bias", lambda flag: tb.embedding_and_head(12, 8, tb.Dense(), bias=flag)),
        ("tied", lambda flag: tb.embedding_and_head(12, 8, tb.Dense(), tied=flag)),
        ("training", lambda flag: tb.Head(8, 12, tb.Dense()).explain(3, training=flag)),
        ("fit", lambda flag: tb.compress_(nn.Sequential(nn.Embedding(12, 8)), tb.Dense(), min_rows=1, fit=flag)),
        ("include_heads", lambda flag: tb.compress_(nn.Sequential(), tb.Dense(), include_heads=flag)),
        ("include_heads", lambda flag: tb.plan(nn.Sequential(nn.Embedding(12, 8)), ratio=2, include_heads=flag)),
        ("rotate", lambda flag: tb.ProductQuantized(rotate=flag)),
    ],
)
def test_what_is_true_or_false_is_nothing_else(name, use, given):
    """As torch's own layers refuse it, some only in forward: a string, "no" or "untie", would mean yes."""
    with pytest.raises(TypeError, match=rf"{name} must be True or False, got {re.escape(repr(given))}"):
        use(given)


def test_bad_sizes_and_formats():
    for bad, message in (((0, 8), "num_embeddings=0"), ((8, -1), "embedding_dim=-1")):
        with pytest.raises(ValueError, match=message):
            tb.Embedding(*bad, tb.Dense())
    with pytest.raises(TypeError, match=r"format must be a format such as TensorTrain\(\)"):
        tb.Embedding(10, 8, tb.TensorTrain)
    with pytest.raises(TypeError, match="format must be a format"):
        tb.Embedding(10, 8, "tt")
    with pytest.raises(ValueError, match="needs a table to measure the error on"):
        tb.Embedding(10, 8, tb.TensorTrain(rel_error=0.1))
    with pytest.raises(ValueError, match=r"ratio=1e\+09 for TensorTrain: at rank 1 this table of 1000 x 24"):
        tb.TTEmbedding(1000, 24, ratio=1e9)
    for bad in (0, -3, float("nan")):
        with pytest.raises(ValueError, match="ratio="):
            tb.TensorTrain(ratio=bad)


def test_explicit_ranks_are_kept_and_noted():
    shape = ((5, 5, 5, 5, 6, 8), (2, 2, 2, 2, 4, 4))
    layer = tb.TTEmbedding(25000, 256, 16, shape=shape)
    assert [c.shape[0] for c in layer.cores] == [1, 16, 16, 16, 16, 16]
    assert "ranks=(16, 16, 16, 16, 16) (at most (10, 16, 16, 16, 16) useful)" in repr(layer)
    assert "useful" not in repr(tb.TTEmbedding(25000, 256, 8, shape=shape))
    assert "rank=9 (at most 7 useful)" in repr(tb.Embedding(31, 7, tb.LowRank(rank=9)))


def test_repr_reads_well():
    layer = tb.TTEmbedding(25000, 256, 16, shape=((25, 30, 40), (4, 8, 8)))
    assert repr(layer) == (
        "TTEmbedding(25000, 256, tensor_train, shape=(25, 30, 40) x (4, 8, 8), ranks=(16, 16), "
        "parameters=68,160, ratio=93.9)"
    )
    bag = tb.EmbeddingBag(1000, 64, tb.LowRank(rank=4), mode="sum", padding_idx=-1, include_last_offset=True)
    assert repr(bag) == (
        "EmbeddingBag(1000, 64, low_rank, rank=4, padding_idx=999, parameters=4,320, ratio=14.81, "
        'mode="sum", include_last_offset=True)'
    )
    assert repr(tb.Embedding(10, 4, tb.Dense())) == "Embedding(10, 4, dense, parameters=40, ratio=1)"


@pytest.mark.without_kernels
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(3, dtype=torch.int64),), ValueError, "1-D indices need offsets"),
        ((torch.zeros(2, 2, dtype=torch.int64), torch.tensor([0])), ValueError, "leave offsets=None"),
        ((torch.zeros(2, 2, 2, dtype=torch.int64),), ValueError, r"shape \(2, 2, 2\)"),
        ((torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2])), ValueError, "offsets begins with 1"),
        ((torch.zeros(3, dtype=torch.int64), torch.tensor([0, 2, 1])), ValueError, r"must not fall .*\[0, 2, 1, 3\]"),
        ((torch.zeros(3, dtype=torch.int64), torch.tensor([0, 4])), ValueError, "within the 3 indices"),
        ((torch.zeros(3, dtype=torch.int64), torch.tensor([[0]])), ValueError, "one number a bag"),
        (
            (torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64, device="meta")),
            ValueError,
            r"offsets are on meta and indices on cpu: move the offsets, .*offsets\.to\(index\.device\)",
        ),
        ((torch.zeros(3, dtype=torch.int64), torch.tensor([0.0])), TypeError, "offsets must be int32 or int64"),
        ((torch.zeros(3), torch.tensor([0])), TypeError, "index must be int32 or int64, got float32"),
        ((torch.tensor([0, 50]), torch.tensor([0])), IndexError, "index 50 is out of range"),
        (([1, 2], torch.tensor([0])), TypeError, "must be a tensor, got list"),
    ],
)
def test_bad_bags(arguments, error, message):
    for impl in ("auto", "reference"):
        layer = tb.TTEmbeddingBag(50, 8, 2, mode="sum", impl=impl)
        with pytest.raises(error, match=message):
            layer(*arguments)


@pytest.mark.without_kernels
def test_bad_bag_weights_and_modes():
    index, offsets = torch.zeros(3, dtype=torch.int64), torch.tensor([0])
    with pytest.raises(ValueError, match='per_sample_weights needs mode="sum"'):
        tb.TTEmbeddingBag(50, 8, 2, mode="mean")(index, offsets, torch.ones(3))
    layer = tb.TTEmbeddingBag(50, 8, 2, mode="sum")
    with pytest.raises(ValueError, match=r"per_sample_weights has shape \(2,\)"):
        layer(index, offsets, torch.ones(2))
    with pytest.raises(TypeError, match=r"per_sample_weights is .*float64"):
        layer(index, offsets, torch.ones(3).double())
    with pytest.raises(ValueError, match='mode=\'median\': choose one of "sum", "mean", "max"'):
        tb.TTEmbeddingBag(50, 8, 2, mode="median")
    with pytest.raises(ValueError, match='scale_grad_by_freq=True does not go with mode="max"'):
        tb.TTEmbeddingBag(50, 8, 2, mode="max", scale_grad_by_freq=True)


def test_numpy_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")
    layer = tb.TTEmbedding(
        numpy.int64(100), numpy.int32(24), shape=numpy.array([[4, 5, 6], [2, 3, 4]]), padding_idx=numpy.int64(-1)
    )
    assert (layer.num_embeddings, layer.padding_idx) == (100, 99)
    assert tb.TensorTrain(ranks=numpy.array([3, 4])) == tb.TensorTrain(ranks=[3, 4])
    assert tb.LowRank(ratio=numpy.float32(4)).ratio == 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tb.TensorTrain(shape=5), ValueError, "give the row factors and the column factors"),
        (lambda: tb.TensorTrain(shape=(25, 30, 40)), ValueError, "give the row factors and the column factors"),
        (lambda: tb.TensorTrain(ranks=5), TypeError, "give a list"),
        (lambda: tb.TensorTrain(rank=True), TypeError, "rank must be an int"),
        (lambda: tb.TensorTrain(rank=2.0), TypeError, "rank must be an int"),
        (lambda: tb.TensorTrain(order=4, shape=((4, 5, 6), (2, 3, 4))), ValueError, "order=4"),
        (lambda: tb.TTEmbedding(1000, 24, 16, ratio=5), ValueError, "rank and ratio both set the size"),
        (lambda: tb.TTEmbedding(1000, 24, 16, ranks=(2, 3)), ValueError, "rank and ranks both set the size"),
        (lambda: tb.TTEmbedding(1000, 24, dtype="float32"), TypeError, "dtype='float32'"),
        (lambda: tb.TTEmbedding(1000, 24, dtype=torch.float8_e4m3fn), TypeError, "bfloat16, float16 or float64"),
        (lambda: tb.TTEmbedding(10, 8, shape=((2**32, 2**32), (2, 4))), ValueError, "counted in int64"),
        (lambda: tb.suggest_shape(1000, 64, 65), ValueError, "at most"),
    ],
)
def test_bad_formats(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_formats_show_what_was_said():
    assert repr(tb.TensorTrain(rank=8)) == "TensorTrain(rank=8)"
    assert repr(tb.TensorRing(ratio=50.0, order=4)) == "TensorRing(ratio=50.0, order=4)"
    assert repr(tb.LowRank()) == "LowRank(rank=16)"


def test_functional_refuses_other_tensors():
    layer = tb.TTEmbedding(64, 64, 4, shape=((4, 4, 4), (4, 4, 4)))
    as_in_the_paper = {f"core_{k}": core for k, core in enumerate(layer.cores)}
    with pytest.raises(ValueError, match=r"core_0 has shape \(1, 4, 4, 4\); tensor_train keeps it as \(4, 1, 4, 4\)"):
        functional.lookup(layer.structure, as_in_the_paper, torch.tensor([0]))
    with pytest.raises(ValueError, match="core_0 is missing"):
        functional.lookup(layer.structure, {}, torch.tensor([0]))
    with pytest.raises(TypeError, match="x must be a tensor"):
        functional.project(layer.structure, layer.params(), [1.0])
    with pytest.raises(ValueError, match="its last size must be the table's 64 columns"):
        functional.project(layer.structure, layer.params(), torch.ones(3))
    with pytest.raises(IndexError, match="rows 3 to 65 are not a block"):
        functional.project(layer.structure, layer.params(), torch.ones(64), 3, 65)


def test_project_makes_a_block_of_rows_at_a_time(monkeypatch):
    monkeypatch.setattr("tensorbed.backends.scores.scoring._BLOCK", 40)
    layer = tb.TTEmbedding(100, 16, 3)
    x = torch.randn(5, 16)
    made = functional.project(layer.structure, layer.params(), x)
    torch.testing.assert_close(made, x @ layer.weight.T)


def test_warnings_point_at_the_user_s_line():
    with pytest.warns(UserWarning, match="embedding_dim=22 does not split") as caught:
        tb.TTEmbedding(1000, 22, 2)
    assert caught[0].filename == __file__


def test_an_error_leaves_nothing_half_done():
    layer = tb.TTEmbedding(50, 8, 2)
    before = copy.deepcopy(layer.state_dict())
    for bad in (torch.tensor([50]), torch.tensor([0.5]), torch.tensor([-1])):
        with pytest.raises((IndexError, TypeError)):
            layer(bad)
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("layer", NAMED)
def test_trains_to_a_target(layer):
    torch.manual_seed(0)
    bag = isinstance(layer(10, 8), tb.EmbeddingBag)
    made = layer(40, 8, 4, std=0.5)
    index = torch.arange(40)
    target = layer(40, 8, 4, std=0.5).weight.detach()
    optimiser = torch.optim.Adam(made.parameters(), lr=0.02)
    losses = []
    for _ in range(300):
        optimiser.zero_grad()
        out = made(index[:, None]) if bag else made(index)
        loss = (out - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


def test_inside_a_model_moved_and_cast():
    model = nn.Sequential(tb.TTEmbedding(100, 16, 4, padding_idx=0), nn.Linear(16, 2))
    index = torch.randint(0, 100, (3, 5))
    expected = model(index)
    double = copy.deepcopy(model).double()
    torch.testing.assert_close(double(index).float(), expected)
    assert double[0].compression_ratio == pytest.approx(model[0].compression_ratio)
    assert model.bfloat16()(index).dtype == torch.bfloat16
    assert set(model.state_dict()) == {"0.core_0", "0.core_1", "0.core_2", "0.padding_row", "1.weight", "1.bias"}


def test_frozen_layers_build_no_graph():
    layer = tb.TTEmbedding.from_pretrained(torch.randn(50, 8), rank=2)
    assert not layer(torch.tensor([1, 2])).requires_grad


def test_no_grad_gives_the_same_rows():
    layer = tb.TTEmbedding(500, 16, 4)
    index = torch.randint(0, 500, (64,))
    with torch.no_grad():
        plain = layer(index)
    assert torch.equal(plain, layer(index).detach())


def test_rows_at_the_padding_index_do_not_reach_the_cores():
    layer = tb.TTEmbedding(50, 8, 2, padding_idx=3)
    layer(torch.tensor([3, 3])).sum().backward()
    assert all(p.grad.count_nonzero() == 0 for p in layer.parameters())
    with torch.no_grad():
        layer.padding_row.fill_(2.0)
    assert layer(torch.tensor([3])).tolist() == [[2.0] * 8]


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("use", [torch.square, torch.neg], ids=["curved", "straight"])
def test_backward_twice_needs_the_reference(impl, use):
    """Also where the incoming gradient is a constant: the cores multiply each other."""
    layer = tb.TTEmbedding(50, 8, 2, impl=impl)
    out = use(layer(torch.tensor([1, 2]))).sum()
    (grad,) = torch.autograd.grad(out, [layer.core_0], create_graph=True)
    with pytest.raises(RuntimeError, match='use impl="reference"'):
        grad.sum().backward(retain_graph=True)
    for core in (layer.core_0, layer.core_1):
        with pytest.raises(RuntimeError, match='use impl="reference"'):
            torch.autograd.grad(grad.sum(), core, retain_graph=True)


@pytest.mark.parametrize(("make", "impl"), [(tb.TTEmbedding, "auto"), (tb.TTEmbedding, "torch"), (tb.TTHead, "auto")])
def test_gradients_that_are_kept_for_a_second_derivative_are_those_of_any_backward(make, impl):
    """Checkpointed, where what was saved is unpacked once, and written to, as penalties are scaled in place."""
    layer, targets = make(50, 50, 2, impl=impl), torch.tensor([1, 2])
    use = layer if make is tb.TTEmbedding else lambda index: layer.loss(torch.ones(2, 50), index)
    expected = torch.autograd.grad(use(targets).sum(), list(layer.parameters()))
    again = checkpoint(use, targets, use_reentrant=False).sum()
    for gradient, first in zip(
        torch.autograd.grad(again, list(layer.parameters()), create_graph=True), expected, strict=True
    ):
        torch.testing.assert_close(gradient.detach(), first)
        torch.testing.assert_close(gradient.mul_(2).detach(), 2 * first)


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_batched_gradients_need_the_reference(impl):
    layer = tb.TTEmbedding(50, 8, 2, impl=impl)
    rows = layer(torch.tensor([1, 2]))
    several = torch.randn(3, *rows.shape)
    with pytest.raises(RuntimeError, match='not batched this way; use impl="reference"'):
        torch.autograd.grad(rows, layer.core_0, several, is_grads_batched=True)
    layer.impl = "reference"
    rows = layer(torch.tensor([1, 2]))
    (batched,) = torch.autograd.grad(rows, layer.core_0, several, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched[1], torch.autograd.grad(rows, layer.core_0, several[1])[0])


def test_what_is_settled_at_birth_is_not_changed_later():
    """A padding row is stored: with another one, what was saved could not be loaded."""
    layer = tb.TTEmbedding(50, 8, 2, padding_idx=3)
    layer.padding_idx = 3
    layer.padding_idx = -47
    with pytest.raises(TypeError, match="padding_idx must be an int, got True"):
        layer.padding_idx = True
    for changed in (4, None):
        with pytest.raises(AttributeError, match=f"padding_idx of TTEmbedding is 3 and cannot be changed to {changed}"):
            layer.padding_idx = changed
    with pytest.raises(AttributeError, match="cannot be changed to 0: it is settled when"):
        tb.TTEmbeddingBag(50, 8, 2).padding_idx = 0
    with pytest.raises(ValueError, match=r"max_norm=1\.0 is not supported"):
        layer.max_norm = 1.0
    with pytest.raises(ValueError, match="sparse=True is not supported"):
        layer.sparse = True
    with pytest.raises(ValueError, match="padding_idx=50 is not a row of a table of 50"):
        layer.padding_idx = 50
    assert (layer.padding_idx, layer.max_norm, layer.sparse) == (3, None, False)


@pytest.mark.parametrize(
    "hook", [lambda weight: weight.register_hook(torch.zeros_like), lambda weight: weight.retain_grad()]
)
def test_hooks_of_a_table_that_is_made_anew_are_refused(hook):
    layer = tb.TTEmbedding(50, 8, 2)
    with pytest.raises(RuntimeError, match=r"made from core_0, core_1, core_2 for each use.*hook those"):
        hook(layer.weight)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_functions_take_padding_as_layers_do(impl):
    layer = tb.TTEmbedding(50, 8, 2)
    structure, params, index = layer.structure, layer.params(), torch.tensor([49, 1])
    rows = tb.functional.lookup(structure, params, index, impl=impl, padding_idx=-1)
    assert rows[0].count_nonzero() == 0
    torch.testing.assert_close(rows[1], layer(index)[1])
    pooled = tb.functional.bags(structure, params, tb.functional.Pooling("sum", padding_idx=-1, impl=impl), index[None])
    torch.testing.assert_close(pooled[0], rows[1])
    with pytest.raises(ValueError, match="padding_idx=1000 is not a row of a table of 50"):
        tb.functional.lookup(structure, params, index, impl=impl, padding_idx=1000)
    with pytest.raises(ValueError, match=r"padding_row has shape \(1,\); \(8,\) is needed"):
        tb.functional.lookup(structure, params, index, impl=impl, padding_idx=1, padding_row=torch.ones(1))
    with pytest.raises(TypeError, match="pooling must be a Pooling"):
        tb.functional.bags(structure, params, "sum", index[None])
