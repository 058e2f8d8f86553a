"""What bands, hot rows and permuted tables are made of, what they refuse, and how indices are split between parts."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.backends.parts import located_by_ends, located_by_places
from tensorbed.compress.resizing import resized
from tensorbed.structures.formats import Budget, Use

LR = tb.LowRank(rank=2)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_default_bands_are_the_adaptive_embedding():
    budget = Budget(267_735, 512)
    bound = tb.Bands().bind(budget)
    assert bound.ends == (20_080, 40_160, 200_801, 267_735)
    assert [part.kind for part in bound.parts] == ["dense", "low_rank", "low_rank", "low_rank"]
    assert [part.rank for part in bound.parts[1:]] == [128, 32, 8]
    assert budget.ratio(bound) == pytest.approx(7.4, abs=0.05)
    for ratio in (8, 20, 100):
        assert ratio <= budget.ratio(tb.Bands(ratio=ratio).bind(budget)) < 1.2 * ratio
    assert [part.rows for part in tb.Bands().bind(Budget(1, 8)).parts] == [1]


def test_each_band_is_fitted_by_its_own_format():
    table = normal(50, 12)
    made = tb.Embedding.from_pretrained(table, tb.Bands(((10, tb.Dense()), (None, LR))))
    assert torch.equal(made.weight[:10].clone(), table[:10])
    alone = tb.Embedding.from_pretrained(table[10:], LR)
    torch.testing.assert_close(made.weight[10:].clone(), alone.weight.clone())


@pytest.mark.parametrize(
    ("bands", "error", "says"),
    [
        ((), TypeError, "pairs of an end and a format"),
        ((tb.Dense(),), TypeError, "band 0 is Dense"),
        (((5, 8),), TypeError, "the format of band 0 must be a format"),
        (((0, LR), (None, LR)), ValueError, "the end of band 0=0: must be at least 1"),
        (((2.5, LR), (None, LR)), TypeError, "the end of band 0 must be an int"),
        (((5, LR), (5, LR), (None, LR)), ValueError, "band 1 ends at row 5, the one before at 5; ends must ascend"),
        (((None, LR), (9, LR)), ValueError, "band 0 ends at None"),
    ],
)
def test_bands_that_are_none(bands, error, says):
    with pytest.raises(error, match=says):
        tb.Bands(bands)


def test_bands_that_do_not_fit_the_table():
    with pytest.raises(ValueError, match="ends at row 60 and others follow it, but the table has 50 rows"):
        tb.Embedding(50, 12, tb.Bands(((60, LR), (None, LR))))
    with pytest.raises(ValueError, match="the last band ends at row 40 of 50; let it end at None"):
        tb.Embedding(50, 12, tb.Bands(((10, LR), (40, LR))))
    with pytest.raises(ValueError, match="ratio=3 moves the default bands"):
        tb.Bands(((None, LR),), ratio=3)
    with pytest.raises(ValueError, match=r"with bands of 1 dimension .* times smaller, the most it can be"):
        tb.Embedding(50, 12, tb.Bands(ratio=500))


@pytest.mark.parametrize(
    ("order", "error", "says"),
    [
        ("sorted", ValueError, "order='sorted': give a permutation"),
        ([0, 1, 3], ValueError, "order holds 3; a permutation of 3 rows holds 0 to 2"),
        ([0, 1, -1], ValueError, "order holds -1"),
        ([2, 1, 2], ValueError, "order holds 2 more than once"),
        ([0.0, 1.0], TypeError, "whole numbers, got torch.float32"),
        ([[0, 1]], TypeError, "shape \\(1, 2\\)"),
        (object(), TypeError, "a permutation of the rows, got object"),
    ],
)
def test_orders_that_are_none(order, error, says):
    with pytest.raises(error, match=says):
        tb.Permuted(LR, order=order)


def test_orders_that_do_not_fit():
    with pytest.raises(ValueError, match="order names 3 rows of 50"):
        tb.Embedding(50, 12, tb.Permuted(LR, order=[2, 0, 1]))
    with pytest.raises(ValueError, match='order="clusters" orders the rows of a trained table'):
        tb.Embedding(50, 12, tb.Permuted(LR))
    with pytest.raises(TypeError, match="format must be a format"):
        tb.Permuted(8)
    with pytest.raises(ValueError, match=r"4294967296 rows cannot be permuted: .* int32"):
        tb.Permuted(tb.TensorTrain(rank=2)).bind(Budget(2**32, 8))


def test_a_damaged_order_is_not_loaded(tmp_path):
    layer = tb.Embedding(50, 12, tb.Permuted(LR, order=torch.randperm(50)))
    tb.save(layer, tmp_path / "good.safetensors")
    assert torch.equal(tb.load(tmp_path / "good.safetensors").weight.clone(), layer.weight.clone())
    layer.places[3] = layer.places[4]
    tb.save(layer, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="more than once"):
        tb.load(tmp_path / "bad.safetensors")


def test_a_given_order_is_that_of_the_formats_rows():
    table, order = normal(50, 12), torch.randperm(50, generator=torch.Generator().manual_seed(1))
    made = tb.Embedding.from_pretrained(table, tb.Permuted(LR, order=order))
    alone = tb.Embedding.from_pretrained(table[order], LR)
    torch.testing.assert_close(made.weight[order].clone(), alone.weight.clone())
    assert made.structure.bytes(torch.float64) == alone.structure.bytes(torch.float64) + 4 * 50


def test_clusters_find_the_order_of_a_train():
    """A train whose rows were shuffled is fitted nearly as badly as noise; ordered by clusters, better."""
    table = normal(8, 1, 16).repeat_interleave(32, 0).reshape(256, 16) + 0.1 * normal(256, 16)
    shuffled = table[torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    train = tb.TensorTrain(rank=4, shape=((8, 8, 4), (4, 2, 2)))
    plain, ordered = (tb.Embedding.from_pretrained(shuffled, f).fit_error for f in (train, tb.Permuted(train)))
    assert ordered < 0.8 * plain


@pytest.mark.without_kernels
@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_indices_are_located_by_part(count):
    rows, generator = 1000, torch.Generator().manual_seed(0)
    index = torch.randint(0, rows, (count,), generator=generator)
    ends = (10, 11, 600, rows)
    for k, (ids, at) in enumerate(located_by_ends(index, ends).split()):
        first = 0 if k == 0 else ends[k - 1]
        expected = [(i, row - first) for i, row in enumerate(index.tolist()) if first <= row < ends[k]]
        assert list(zip(at.tolist(), ids.tolist(), strict=True)) == expected
    places = torch.randperm(rows, generator=generator)[:100].sort().values
    listed = places.tolist(), [row for row in range(rows) if row not in set(places.tolist())]
    for members, (ids, at) in zip(listed, located_by_places(index, places, rows).split(), strict=True):
        expected = [(i, members.index(row)) for i, row in enumerate(index.tolist()) if row in members]
        assert list(zip(at.tolist(), ids.tolist(), strict=True)) == expected


@pytest.mark.skipif(not native.available, reason="is about the kernels")
def test_the_kernels_split_no_row_that_is_not_there():
    with pytest.raises(IndexError, match=r"1000 .*1000 rows"):
        located_by_ends(torch.tensor([3, 1000]), (10, 1000))
    with pytest.raises(IndexError, match=r"-1 .*1000 rows"):
        located_by_places(torch.tensor([3, -1]), torch.tensor([5]), 1000)
    with pytest.raises(ValueError, match="places must be rows"):
        located_by_places(torch.arange(1000), torch.tensor([5, 2000]), 1000)


def test_hot_rows_of_formats_that_are_drawn_are_drawn():
    layer = tb.Embedding(60, 12, tb.HotRows(hot=tb.Dense(), rest=LR), std=0.5)
    assert layer.places.tolist() == [0, 1, 2]
    assert float(layer.weight.square().mean().sqrt()) == pytest.approx(0.5, rel=1e-4)


ORDER = [(7 * row + 3) % 60 for row in range(60)]
NESTED = [
    tb.Permuted(tb.Permuted(LR, order=ORDER), order=ORDER[::-1]),
    tb.Permuted(tb.HotRows(hot=tb.Dense(), rest=LR), order=ORDER),
    tb.HotRows(share=0.5, hot=tb.Permuted(LR, order=[2, 0, 1, *range(3, 30)]), rest=LR),
    tb.StraightThrough(tb.Permuted(LR, order=ORDER)),
    tb.Bands(((30, tb.HotRows(hot=tb.Dense(), rest=LR)), (None, LR))),
]


@pytest.mark.parametrize("format", NESTED, ids=str)
def test_compositions_of_compositions_are_drawn_and_scored(format):
    head = tb.Head(12, 60, format, dtype=torch.float64, std=0.5)
    assert float(head.weight.square().mean().sqrt()) == pytest.approx(0.5, rel=1e-2)
    h = normal(7, 12)
    logits = h @ head.weight.clone().T
    torch.testing.assert_close(head(h), logits)
    torch.testing.assert_close(head.topk(h, 5).indices, logits.topk(5).indices)
    target = torch.arange(7) * 8
    torch.testing.assert_close(head.loss(h, target), torch.nn.functional.cross_entropy(logits, target))


def test_hot_rows_in_bands_are_scored_as_they_were_fitted():
    """Their places are by use, so that the rows of one band are scored in another order than the table's."""
    table, counts = normal(60, 12), torch.arange(60)
    format = tb.Bands(((40, tb.HotRows(share=0.5, hot=tb.Dense(), rest=LR)), (None, LR)))
    found = format.fit_to_use(table, Budget(60, 12, torch.float64), Use(counts))
    places = found.params["band_0_places"]
    assert places.tolist() == list(range(20, 40))
    h, full = normal(5, 12), found.structure.full(found.params)
    way = found.structure.scorings()[0].open([found.params[s.name] for s in found.structure.tensors()], h.dtype, False)
    made = torch.empty(60, 5, dtype=h.dtype)
    vectors = way.vectors(h, grad=False)
    for start, stop in way.blocks(60):
        way.open(start, stop)
        out = torch.empty(stop - start, 5, dtype=h.dtype)
        way.write(vectors, out)
        made[way.order[start:stop]] = out
        way.close()
    torch.testing.assert_close(made, full @ h.T)


@pytest.mark.parametrize("rows", [20_000, 1_000_000])
def test_narrow_bands_are_sampled(rows):
    """However few of some thousand rows are theirs."""
    bands = tb.Bands(((2000, tb.Dense()), (2050, LR), (rows - 2, tb.LowRank(ratio=2)), (rows - 1, LR), (None, LR)))
    structure = bands.bind(Budget(rows, 4))
    some, format = bands.sample(torch.zeros(rows, 4), structure)
    assert some.shape[0] == 8192
    assert [part.kind for part in format.bind(Budget(8192, 4)).parts] == [part.kind for part in structure.parts]


def test_codes_are_not_drawn_however_they_are_held():
    with pytest.raises(ValueError, match="cannot be drawn at random"):
        tb.Embedding(60, 12, tb.StraightThrough(tb.QuantizedRows()))


def test_a_resized_order_outlives_another_draw():
    layer = resized(tb.Embedding(60, 12, tb.Permuted(LR, order=ORDER)), 70)
    before = layer.places.clone()
    layer.reset_parameters()
    assert torch.equal(layer.places, before)


DRAWN = [
    tb.Permuted(tb.Hashed(buckets=8), ORDER),
    tb.Permuted(tb.Permuted(LR, ORDER), ORDER),
    tb.Permuted(tb.Bands(((10, tb.StraightThrough(tb.Hashed(buckets=8))), (None, LR))), ORDER),
    tb.Permuted(tb.HotRows(hot=tb.Dense(), rest=LR), ORDER),
    tb.Bands(((30, tb.HotRows(hot=tb.Dense(), rest=LR)), (None, tb.Permuted(LR, list(range(30))[::-1])))),
    tb.HotRows(share=0.5, hot=tb.Permuted(LR, list(range(30))[::-1]), rest=tb.Hashed(buckets=8, hashes=2)),
    tb.StraightThrough(tb.Permuted(tb.TensorTrain(rank=2), ORDER)),
    tb.StraightThrough(tb.HotRows(hot=tb.Dense(), rest=LR), bits=4),
]


@pytest.mark.parametrize("format", DRAWN, ids=repr)
def test_formats_within_formats_are_drawn_with_the_constants_of_each(format):
    """Memory that nobody wrote is no order of rows; here it holds what is none."""
    for where in ("cpu", "meta"):
        with torch.device(where):
            layer = tb.Embedding(60, 12, format)
        if where == "meta":
            layer.to_empty(device="cpu")
            for buffer in layer.buffers():
                buffer.fill_(-1)
            layer.reset_parameters()
        table = layer.weight.detach().clone()
        layer.structure.check_values(layer.params())
        assert float(table.square().mean().sqrt()) == pytest.approx(0.3, rel=0.05)
        torch.testing.assert_close(layer(torch.arange(60)), table)


def test_an_order_within_a_band_is_that_of_its_rows():
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    layer = tb.Embedding(50, 12, tb.Bands(((20, LR), (None, tb.Permuted(tb.Dense(), order)))))
    assert torch.equal(layer(20 + order), layer.params()["band_1_part_table"])


@pytest.mark.parametrize(
    "format",
    [
        tb.Bands(((10, LR), (None, tb.NonlinearTrain(rank=2)))),
        tb.HotRows(rest=tb.DeepHash(hashes=3, hidden=2)),
        tb.Permuted(tb.NonlinearTrain(rank=2)),
        tb.StraightThrough(tb.NonlinearTrain(rank=2)),
    ],
    ids=repr,
)
def test_what_holds_a_format_that_cannot_be_fitted_cannot_be_either(format):
    assert not format.can_fit
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding(60, 12)})
    with pytest.raises(ValueError, match=r"cannot be fitted to a table: draw it .*fit=False"):
        tb.compress_(model, format, min_rows=1, calibrate=lambda model: pytest.fail("was run"))


@pytest.mark.parametrize(
    "format",
    [
        tb.Permuted(tb.StraightThrough(), ORDER),
        tb.Bands(((20, tb.Dense()), (40, tb.StraightThrough(LR)), (None, tb.StraightThrough(bits=4)))),
        tb.HotRows(share=0.5, hot=tb.StraightThrough(), rest=tb.StraightThrough(tb.TensorTrain(rank=2), bits=4)),
        tb.Permuted(tb.Bands(((20, tb.StraightThrough(tb.Hashed(buckets=8))), (None, LR))), ORDER),
    ],
    ids=repr,
)
def test_parts_that_are_trained_for_their_codes_are_packed(format, tmp_path):
    torch.manual_seed(0)
    layer, head = tb.Embedding(60, 64, format, padding_idx=3), tb.Head(64, 60, format).requires_grad_(False)
    stored, index, hidden = layer.packed(), torch.arange(60), torch.randn(5, 64)
    assert torch.equal(stored(index), layer(index))
    assert torch.equal(head.packed()(hidden), head(hidden))
    assert stored.structure.kind == layer.structure.kind
    assert stored.compression_ratio > layer.compression_ratio
    tb.save(stored, tmp_path / "stored.safetensors")
    assert torch.equal(tb.load(tmp_path / "stored.safetensors")(index), layer(index))


def test_what_has_no_part_to_pack_says_so():
    with pytest.raises(ValueError, match="a bands is trained as it is stored: there is nothing to pack"):
        tb.Embedding(60, 12, tb.Bands()).packed()


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


INT8 = tb.QuantizedRows()
LARGE = {  # a format, and how often equal rows are looked for in a large batch of its rows
    "bands": (tb.Bands(((20, tb.Dense()), (None, LR))), 1),
    "rounded": (tb.StraightThrough(), 1),
    "bands of rounded rows": (tb.Bands(((20, tb.StraightThrough()), (None, tb.StraightThrough(bits=4)))), 1),
    "bands of codes": (tb.Bands(((20, INT8), (None, INT8))), 0 if native.available else 1),
}


@pytest.mark.parametrize("name", LARGE)
def test_equal_rows_of_a_large_batch_are_looked_for_once(name):
    """Not by each part again, nor for bags, which look themselves, nor where the kernels write all rows at once."""
    format, times = LARGE[name]
    table, index = normal(60, 512).float(), torch.arange(4800) % 60
    embedding = tb.Embedding.from_pretrained(table, format)
    with Operators() as ran:
        rows = embedding(index)
    assert ran.names.count("_unique2") == times
    torch.testing.assert_close(rows, embedding.weight[index])
    wide = normal(4800, 512).float()
    bag = tb.EmbeddingBag.from_pretrained(wide, format, mode="sum")
    with Operators() as ran:
        bag(torch.arange(4800).view(-1, 2))
    assert ran.names.count("_unique2") == 1


def test_no_gradient_is_gathered_for_frozen_parts():
    layer = tb.Embedding(60, 12, tb.Bands(((20, tb.Dense()), (40, tb.Dense()), (None, tb.Dense()))))
    layer.band_0_table.requires_grad_(False)
    rows = layer(torch.arange(60))
    with Operators() as ran:
        rows.backward(normal(60, 12).float())
    assert ran.names.count("index_select") == 2
    torch.testing.assert_close(layer.band_2_table.grad, normal(60, 12).float()[40:])


# Compositions in compositions, and formats around them.
NESTED = {
    "bands, permuted": tb.Permuted(
        tb.Bands(((20, tb.Dense()), (None, tb.LowRank(rank=2)))), order=[(7 * row + 3) % 60 for row in range(60)]
    ),
    "bands, rounded": tb.StraightThrough(tb.Bands(((20, tb.Dense()), (None, tb.TensorTrain(rank=2))))),
    "hot rows of trains": tb.HotRows(share=0.3, hot=tb.TensorTrain(rank=4), rest=tb.TensorTrain(rank=2)),
    "bands of rounded rows": tb.Bands(
        ((20, tb.StraightThrough(bits=4)), (None, tb.StraightThrough(tb.LowRank(rank=3))))
    ),
    "permuted, rounded": tb.StraightThrough(tb.Permuted(tb.LowRank(rank=3), order=[59 - row for row in range(60)])),
}


@pytest.mark.parametrize("format", NESTED.values(), ids=list(NESTED))
def test_nested_formats_in_graphs(format):
    torch.manual_seed(0)
    layer, head = tb.Embedding(60, 8, format, padding_idx=1), tb.Head(8, 60, format)
    index, x, target = torch.randint(60, (5, 7)), torch.randn(9, 8), torch.randint(60, (9,))
    expected = F.embedding(index, layer.weight, padding_idx=1)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, list(layer.parameters()), grad)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (layer(index), compiled(index)):
        torch.testing.assert_close(rows, expected)
        torch.testing.assert_close(torch.autograd.grad(rows, list(layer.parameters()), grad), wanted)
    torch.testing.assert_close(torch.export.export(layer, (index,)).module()(index), expected)
    loss = F.cross_entropy(F.linear(x, head.weight, head.bias), target)
    wanted = torch.autograd.grad(loss, list(head.parameters()))
    for made in (head.loss(x, target), torch.compile(head.loss, fullgraph=True, backend="aot_eager")(x, target)):
        torch.testing.assert_close(made, loss)
        torch.testing.assert_close(torch.autograd.grad(made, list(head.parameters())), wanted)
    if layer.structure.packs:
        assert torch.equal(layer.packed()(index), layer(index))
