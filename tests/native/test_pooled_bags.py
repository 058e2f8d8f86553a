"""Bags that the kernels pool themselves, against the plain path."""

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.backends.native import chains
from tensorbed.testing import assert_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import draw_grad, isas, kernels_of, on_threads

every_isa = pytest.mark.parametrize("isa", isas())

FORMATS = {
    "train": tb.TensorTrain(rank=9),
    "train, order 5": tb.TensorTrain(rank=3, order=5),
    "ring": tb.TensorRing(rank=3),
    "low rank": tb.LowRank(rank=5),
}
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())

# The first and the last bag empty, several in a row, one of a single id, one that is larger than all others.
LENGTHS = [0, 3, 0, 0, 1, 200, 7, 16, 0]


@pytest.fixture
def pooled_in_the_kernels(monkeypatch):
    """How many calls the kernels were handed: the reference would agree with itself too."""
    calls = []
    compute = chains.compute
    monkeypatch.setattr(chains, "compute", lambda tables, known: calls.append(tables) or compute(tables, known))
    return calls


def pair(format, rows=500, cols=32, **options):
    """A layer and the same by the reference."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "std": 1.0, "mode": "sum", **options}
    layer = tb.EmbeddingBag(rows, cols, format, **options)
    plain = tb.EmbeddingBag(rows, cols, format, impl="reference", **options)
    plain.load_state_dict(layer.state_dict())
    return layer, plain


def draw_bags(rows, lengths=LENGTHS, seed=4):
    lengths = torch.tensor(lengths)
    ids = torch.randint(0, rows, (int(lengths.sum()),), generator=torch.Generator().manual_seed(seed))
    return ids, lengths.cumsum(0) - lengths


def outcome(layer, ids, offsets, weights=None):
    """Bags, gradients of the parameters and, where there are any, of the weights."""
    weights = None if weights is None else weights.clone().requires_grad_()
    out = layer(ids, offsets, weights)
    tensors = [*layer.parameters(), *([] if weights is None else [weights])]
    return [out.detach(), *torch.autograd.grad(out, tensors, draw_grad(*out.shape, dtype=out.dtype))]


def assert_all_near(made, wanted, units=None):
    for one, other in zip(made, wanted, strict=True):
        assert_near(one, other, units=units)


@every_isa
@every_format
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 0, 499])
def test_bags_and_gradients_are_the_reference_s(isa, format, mode, padding_idx, pooled_in_the_kernels):
    layer, plain = pair(format, mode=mode, padding_idx=padding_idx)
    ids, offsets = draw_bags(500)
    ids[5:60:3] = 499
    ids[:2] = 0
    with kernels_of(isa):
        made = outcome(layer, ids, offsets)
    assert len(pooled_in_the_kernels) == 1
    assert_all_near(made, outcome(plain, ids, offsets))
    assert made[0][torch.tensor(LENGTHS) == 0].count_nonzero() == 0


@every_isa
@every_format
@pytest.mark.parametrize("padding_idx", [None, 499])
def test_weights_and_their_gradients_are_the_reference_s(isa, format, padding_idx, pooled_in_the_kernels):
    layer, plain = pair(format, padding_idx=padding_idx)
    ids, offsets = draw_bags(500)
    ids[5:60:3] = 499
    weights = draw_grad(ids.shape[0], 1)[:, 0]
    weights[::5] = 0
    with kernels_of(isa):
        made = outcome(layer, ids, offsets, weights)
    assert len(pooled_in_the_kernels) == 1
    assert_all_near(made, outcome(plain, ids, offsets, weights))
    if padding_idx is not None:
        assert made[-1][ids == padding_idx].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_format
def test_bags_in_every_precision(dtype, format):
    """Against float64 on the same numbers: pooling rounds once, not once an id."""
    layer, _ = pair(format, dtype=dtype)
    _, wide = pair(format)
    wide.load_state_dict(layer.state_dict())
    ids, offsets = draw_bags(500, [900, 0, 30])
    weights = draw_grad(930, 1, dtype)[:, 0]
    made, wanted = outcome(layer, ids, offsets, weights), outcome(wide, ids, offsets, weights.double())
    # float64's gradient of the output is that of the narrow dtype before its rounding: a unit more.
    assert_all_near(made, [one.to(dtype) for one in wanted], units=64 if dtype == torch.float32 else 4)


def test_weights_alone_may_have_gradients():
    layer, plain = pair(tb.TensorTrain(rank=4))
    layer.requires_grad_(False), plain.requires_grad_(False)
    ids, offsets = draw_bags(500)
    weights = draw_grad(ids.shape[0], 1)[:, 0]
    (made,), (wanted,) = (
        torch.autograd.grad(one(ids, offsets, given).square().sum(), given)
        for one in (layer, plain)
        for given in [weights.clone().requires_grad_()]
    )
    assert_near(made, wanted)


def test_bags_of_padding_alone_are_zero_and_give_no_gradient():
    for mode in ("sum", "mean"):
        layer, _ = pair(tb.TensorTrain(rank=4), mode=mode, padding_idx=3)
        out, *grads = outcome(layer, torch.full((50,), 3), torch.tensor([0, 0, 20]))
        assert out.shape == (3, 32)
        assert out.count_nonzero() == 0
        assert all(grad.count_nonzero() == 0 for grad in grads)


def test_bags_as_rows_of_a_matrix_and_by_last_offset():
    layer, plain = pair(tb.TensorRing(rank=3), mode="mean")
    ids = torch.randint(0, 500, (6, 11), generator=torch.Generator().manual_seed(0))
    assert_near(layer(ids), plain(ids))
    assert_near(layer(ids.T), plain(ids.T))
    assert_near(layer(ids.int()), plain(ids))
    layer.include_last_offset = plain.include_last_offset = True
    # Ids beyond the last offset are in no bag.
    offsets = torch.tensor([0, 4, 4, 30])
    assert_near(layer(ids.flatten(), offsets), plain(ids.flatten(), offsets))


@pytest.mark.parametrize("threads", [1, 4])
def test_one_huge_bag(threads):
    layer, plain = pair(tb.TensorTrain(rank=4), rows=2_000)
    ids, offsets = draw_bags(2_000, [0, 50_000, 0, 2])
    with on_threads(threads):
        made = outcome(layer, ids, offsets, torch.linspace(-1, 1, 50_002, dtype=torch.float64))
    assert_all_near(made, outcome(plain, ids, offsets, torch.linspace(-1, 1, 50_002, dtype=torch.float64)))


# Rows for bags are held 4 MiB at a time: batches whose unique rows are more are computed in several slabs.

WIDE = {
    "train": tb.TensorTrain(rank=3, shape=((15, 20, 20), (4, 16, 16))),
    "train, last core by digit": tb.TensorTrain(rank=2, shape=((30, 200), (2, 512))),
    "ring": tb.TensorRing(rank=2, shape=((15, 20, 20), (4, 16, 16))),
    "low rank": tb.LowRank(rank=2),
}


@every_isa
@pytest.mark.parametrize("mode", ["mean", "weighted"])
@pytest.mark.parametrize("format", WIDE.values(), ids=WIDE.keys())
@pytest.mark.parametrize("threads", [1, 3])
def test_slabs_of_a_batch_add_up(isa, mode, format, threads, pooled_in_the_kernels):
    layer, plain = pair(
        format, 6_000, 1024, mode="mean" if mode == "mean" else "sum", padding_idx=5, dtype=torch.float32
    )
    ids = torch.randperm(6_000, generator=torch.Generator().manual_seed(0))[:3_300]
    assert ids.shape[0] * 1024 * 4 > 3 * 2**22
    # Repetitions within bags and between them, whose rows lie in different slabs.
    ids = torch.cat([ids, ids[::7], torch.full((9,), 5), ids[:100]])
    offsets = torch.tensor([0, 0, 1, 2_900, 2_950, 2_950, 3_400])
    weights = draw_grad(ids.shape[0], 1, torch.float32)[:, 0] if mode == "weighted" else None
    with kernels_of(isa), on_threads(threads):
        made = outcome(layer, ids, offsets, weights)
    assert len(pooled_in_the_kernels) == 1
    assert_all_near(made, outcome(plain, ids, offsets, weights))


@pytest.mark.parametrize("format", WIDE.values(), ids=WIDE.keys())
def test_slabs_of_bfloat16_are_added_before_they_are_rounded(format):
    """Against float64: a bag rounded after each slab would be off by a unit a slab."""
    layer, _ = pair(format, 6_000, 1024, dtype=torch.bfloat16)
    _, wide = pair(format, 6_000, 1024)
    wide.load_state_dict(layer.state_dict())
    ids = torch.randperm(6_000, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 5_000, 5_000, 5_990])
    out, wanted = layer(ids, offsets).detach(), wide(ids, offsets).detach()
    assert_near(out, wanted.bfloat16(), units=0.25)
    grad = draw_grad(4, 1024, torch.bfloat16)
    for one, other in zip(
        torch.autograd.grad(layer(ids, offsets), list(layer.parameters()), grad),
        torch.autograd.grad(wide(ids, offsets), list(wide.parameters()), grad.double()),
        strict=True,
    ):
        assert_near(one, other.bfloat16(), units=0.25)


def test_tables_of_one_collection_may_have_other_numbers_of_slabs():
    torch.manual_seed(0)
    formats = {"many": WIDE["train"], "one": tb.TensorTrain(rank=2, shape=((15, 20, 20), (2, 2, 2)))}

    def made(impl):
        torch.manual_seed(0)
        return tb.EmbeddingBagCollection(
            {
                "one": tb.EmbeddingBag(6_000, 8, formats["one"], mode="sum", impl=impl, dtype=torch.float64),
                "many": tb.EmbeddingBag(6_000, 1024, formats["many"], mode="mean", impl=impl, dtype=torch.float64),
                "none": tb.EmbeddingBag(5, 4, tb.LowRank(rank=1), padding_idx=2, impl=impl, dtype=torch.float64),
                "more": tb.EmbeddingBag(6_000, 1024, WIDE["ring"], mode="sum", impl=impl, dtype=torch.float64),
            }
        )

    ids = torch.randperm(6_000)
    offsets = torch.tensor([0, 2_000, 2_000, 5_999])
    given = {
        "one": (ids, offsets),
        "many": (ids, offsets),
        "none": (torch.full((8,), 2), torch.arange(4)),
        "more": (ids[:2_500], offsets[:1].repeat(4)),
    }
    outcomes = []
    for layers in (made("auto"), made("reference")):
        out = layers(given).values
        outcomes.append([out.detach(), *torch.autograd.grad(out, list(layers.parameters()), draw_grad(*out.shape))])
    assert_all_near(*outcomes)
