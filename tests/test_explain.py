"""What a layer says it would do, against counts made with Python's own sets."""

import json

import pytest
import torch
from samples import SAMPLES

import tensorbed as tb
from tensorbed import functional
from tensorbed.backends import native
from tensorbed.backends import torch as shared
from tensorbed.backends.native import chains as compiled
from tensorbed.structures import Explanation, Structure
from tensorbed.testing import largest_allocation

pytestmark = pytest.mark.without_kernels

SHAPE = ((4, 5, 6), (2, 3, 4))


def train(layer=tb.Embedding, **options):
    return layer(110, 24, tb.TensorTrain(ranks=(3, 7), shape=SHAPE), **options)


def ring(layer=tb.Embedding, **options):
    return layer(110, 24, tb.TensorRing(ranks=(2, 3, 7), shape=SHAPE), **options)


def drawn(n, rows=110, seed=0):
    return torch.randint(0, rows, (n,), generator=torch.Generator().manual_seed(seed))


def prefix_counts(index):
    """Distinct (i_1), (i_1, i_2), (i_1, i_2, i_3) for SHAPE, by sets of digits."""
    digits = {(i // 30, i // 6 % 5, i % 6) for i in index.tolist()}
    return tuple(len({d[:k] for d in digits}) for k in (1, 2, 3))


def level_costs(ranks):
    """Multiply-adds of one product with the second and with the third core, from the cores' shapes in the paper.

    Left of core k stands a (R_0 J_1 ... J_{k-1}, R_{k-1}) matrix; the third product also closes a ring.
    """
    joint, r1, r2 = ranks
    return joint * 2 * r1 * (3 * r2), (2 * 3) * (joint * r2) * 4


CHAINS = [(train, (1, 3, 7)), (ring, (2, 3, 7))]


@pytest.mark.parametrize(("make", "ranks"), CHAINS)
@pytest.mark.parametrize("n", [1, 7, 60, 3000])
def test_counts_are_those_of_sets_of_digits(make, ranks, n):
    index = drawn(n)
    second, third = level_costs(ranks)
    _, pairs, rows = prefix_counts(index)
    told = make(impl="torch").explain(index)
    assert told.indices == n
    assert told.unique_rows == len(set(index.tolist()))
    assert told.prefixes == prefix_counts(index)
    assert told.multiply_adds_plain == n * (second + third)
    assert told.multiply_adds == pairs * second + rows * third
    assert (told.path, told.why) == ("torch", 'as asked by impl="torch"')
    reference = make(impl="reference").explain(index)
    assert reference.multiply_adds == reference.multiply_adds_plain == n * (second + third)
    assert reference.path == "reference"


@pytest.mark.parametrize(("make", "_ranks"), CHAINS)
@pytest.mark.parametrize("n", [1, 60, 5000, 100_000])
def test_the_path_is_the_one_taken(make, _ranks, n, monkeypatch):
    """Watched where the work begins: what explain names is what is called."""
    taken = []
    begin = compiled.Planned.__init__
    monkeypatch.setattr(compiled.Planned, "__init__", lambda *args: [taken.append("native"), begin(*args)][-1])
    find = shared.find_prefixes
    monkeypatch.setattr(shared, "find_prefixes", lambda *args: [taken.append("torch"), find(*args)][-1])
    for layer, arguments in (
        (make(), (drawn(n),)),
        (make(impl="torch"), (drawn(n),)),
        (make(tb.EmbeddingBag), (drawn(n), torch.tensor([0]))),
    ):
        told = layer.explain(*arguments)
        assert taken == []
        layer(*arguments)
        assert taken == [told.path]
        taken.clear()


def test_without_kernels_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(native, "available", False)
    told = train().explain(drawn(5))
    assert (told.path, told.why) == ("torch", "there are no compiled kernels")


def test_low_rank_dense_and_others():
    index = torch.tensor([3, 3, 9, 0])
    low = tb.Embedding(10, 6, tb.LowRank(rank=2)).explain(index)
    assert (low.indices, low.unique_rows, low.prefixes) == (4, 3, ())
    assert low.multiply_adds_plain == 4 * 2 * 6
    assert (low.path, low.multiply_adds) == ("native" if native.available else "torch", 3 * 2 * 6)
    dense = tb.Embedding(10, 6, tb.Dense()).explain(index)
    assert (dense.multiply_adds_plain, dense.multiply_adds, dense.unique_rows) == (0, 0, 3)
    bags = tb.EmbeddingBag(10, 6, tb.LowRank(rank=2)).explain(index, torch.tensor([0, 2]))
    assert (bags.indices, bags.multiply_adds_plain, bags.multiply_adds) == (4, 4 * 2 * 6, 3 * 2 * 6)


@pytest.mark.parametrize("sample", [s for samples in SAMPLES.values() for s in samples], ids=str)
def test_every_structure_explains_every_way(sample):
    index = drawn(200, rows=sample.rows)
    for impl in sample.structure.impls:
        told = functional.explain(sample.structure, index, impl=impl)
        assert told.kind == sample.structure.kind
        assert (told.indices, told.unique_rows) == (200, len(set(index.tolist())))
        assert told.path in sample.structure.impls or type(sample.structure).eager_rows is not Structure.eager_rows
        assert told.path == impl or impl == "auto"
        assert told.multiply_adds_plain == 200 * sample.structure.row_multiply_adds


def test_hot_rows_say_what_their_parts_use():
    table, index = torch.randn(40, 8), drawn(20, rows=40)
    by_codes = "native" if native.available else "reference"
    layer = tb.Embedding.from_pretrained(table, tb.HotRows())
    assert layer.explain(index).path == by_codes
    layer.impl = "reference"
    assert layer.explain(index).path == "reference"
    mixed = tb.Embedding.from_pretrained(table, tb.HotRows(hot=tb.Dense()))
    assert mixed.explain(index).path == ("reference and native" if native.available else "reference")
    assert mixed.explain(index[:0]).why == "there is nothing to compute"


def test_structures_that_do_not_count_say_so(monkeypatch):
    layer = tb.EmbeddingBag(10, 6, tb.LowRank(rank=2))
    monkeypatch.setattr(type(layer.structure), "row_multiply_adds", None)
    told = layer.explain(torch.tensor([[3, 3, 9]]))
    assert told.multiply_adds is None
    assert told.multiply_adds_plain is None
    assert str(told).count("not counted") == 2
    together = tb.EmbeddingBagCollection({"a": layer, "b": tb.EmbeddingBag(3, 2, tb.Dense())})
    assert together.explain(torch.tensor([[3, 1]])).multiply_adds is None


def test_bags_count_what_is_in_them():
    layer = train(tb.EmbeddingBag, mode="sum", include_last_offset=True, impl="torch")
    index = drawn(50)
    second, third = level_costs((1, 3, 7))
    told = layer.explain(index, torch.tensor([0, 10, 40]), torch.ones(50))
    assert told.indices == 40
    assert told.prefixes == prefix_counts(index[:40])
    assert told.multiply_adds_plain == 40 * (second + third)
    assert told.multiply_adds == told.prefixes[1] * second + told.prefixes[2] * third
    square = train(tb.EmbeddingBag).explain(index.reshape(5, 10))
    assert (square.indices, square.unique_rows) == (50, len(set(index.tolist())))
    # The reference looks up index by index, also in bags.
    plain = train(tb.EmbeddingBag, impl="reference").explain(index.reshape(5, 10))
    assert plain.multiply_adds == plain.multiply_adds_plain == 50 * (second + third)


@pytest.mark.parametrize("make", [train, ring])
def test_nothing_to_explain(make):
    told = make().explain(torch.empty(0, 3, dtype=torch.int64))
    assert (told.indices, told.unique_rows, told.prefixes) == (0, 0, (0, 0, 0))
    assert (told.multiply_adds_plain, told.multiply_adds) == (0, 0)
    assert (told.path, told.why) == ("reference", "there is nothing to compute")
    assert "x fewer" not in str(told)
    assert make(tb.EmbeddingBag).explain(torch.empty(2, 0, dtype=torch.int64)).indices == 0


def test_shapes_dtypes_and_gradients_do_not_matter():
    index = drawn(60)
    told = train().explain(index)
    assert train().explain(index.reshape(3, 4, 5).int()) == told
    frozen = train().requires_grad_(False)
    assert frozen.explain(index) == told
    assert train(dtype=torch.float64, padding_idx=0).explain(index) == told
    assert functional.explain(frozen.structure, index) == told


def test_no_row_is_computed():
    index = drawn(3000, rows=100_000)
    for layer, arguments in (
        (tb.TTEmbedding(100_000, 256, 16), (index,)),
        (tb.Embedding(100_000, 256, tb.TensorRing(rank=4)), (index,)),
        (tb.Embedding(100_000, 256, tb.LowRank(rank=4)), (index,)),
        (tb.TTEmbeddingBag(100_000, 256, 16), (index, torch.arange(3000))),
        (tb.EmbeddingBagCollection({"a": tb.TTEmbeddingBag(100_000, 256, 16)}), (index[:, None],)),
    ):
        with largest_allocation() as most:
            layer.explain(*arguments)
        assert 0 < most() <= 3001


def test_tables_without_tensors_are_explained():
    """Sizes are enough: what a table of a billion rows would do can be asked before there is one."""
    layer = tb.TTEmbedding(10**9, 64, 32, device="meta")
    assert layer.explain(torch.tensor([0, 10**9 - 1])).unique_rows == 2


# Printing


def test_it_reads_well():
    told = Explanation(
        kind="tensor_train",
        description="25,000 x 256, ranks=(16, 16)",
        indices=40_000,
        unique_rows=25_000,
        prefixes=(21, 625, 25_000),
        multiply_adds_plain=491_520_000,
        multiply_adds=210_080_000,
        path="torch",
        why="there are no compiled kernels",
    )
    assert str(told).splitlines() == [
        "tensor_train, 25,000 x 256, ranks=(16, 16)",
        "  indices                             40,000",
        "  unique rows                         25,000  1.6x fewer",
        "  prefixes of 1                           21  1,190x fewer",
        "  prefixes of 2                          625  40x fewer",
        "  multiply-adds, each by itself  491,520,000",
        "  multiply-adds, as computed     210,080,000  2.3x fewer",
        "  path                           torch: there are no compiled kernels",
    ]
    assert repr(told) == str(told)
    made = str(train().explain(drawn(60)))
    assert made.startswith("tensor_train, 110 x 24, shape=(4, 5, 6) x (2, 3, 4), ranks=(3, 7)\n  indices ")


def test_dense_reads_well():
    told = tb.Embedding(1000, 6, tb.Dense()).explain(torch.tensor([1, 1]))
    assert str(told).splitlines()[0] == "dense, 1,000 x 6"
    assert str(told).splitlines()[-1].endswith("  reference: what auto takes for every batch")


def test_as_a_dictionary():
    told = train().explain(drawn(60))
    given = json.loads(json.dumps(told.to_dict()))
    assert given["path"] == told.path
    assert Explanation(**{**given, "prefixes": tuple(given["prefixes"])}) == told


# Collections


def collection(**options):
    return tb.EmbeddingBagCollection(
        {"one": train(tb.EmbeddingBag, **options), "two": tb.EmbeddingBag(9, 4, tb.Dense(), mode="sum")}
    )


def test_collections_hold_one_a_table_and_totals():
    fields = collection(impl="torch")
    ids = torch.stack([drawn(40), drawn(40, rows=9)], 1)
    told = fields.explain(ids)
    assert list(told) == list(told.tables) == ["one", "two"]
    for k, name in enumerate(told.tables):
        assert told[name] == fields.tables[name].explain(ids[:, k : k + 1])
    assert told.indices == 80
    assert told.unique_rows == len(set(ids[:, 0].tolist())) + len(set(ids[:, 1].tolist()))
    assert told.multiply_adds == told["one"].multiply_adds
    assert told.multiply_adds_plain == told["one"].multiply_adds_plain
    bags = {"one": (ids[:, 0], torch.arange(40)), "two": ids[:, 1:]}
    assert fields.explain(bags) == told
    given = json.loads(json.dumps(told.to_dict()))
    assert given["total"]["indices"] == 80
    assert given["tables"]["two"]["kind"] == "dense"


def test_collections_read_well():
    ids = torch.tensor([[0, 1], [1, 1], [1, 8], [109, 0]])
    assert str(collection(impl="torch").explain(ids)).splitlines() == [
        "table  structure     indices  unique rows  multiply-adds  as computed  change      path",
        "one    tensor_train        4            3          1,176          756  1.6x fewer  torch",
        "two    dense               4            3              0            0              reference",
        "total                      8            6          1,176          756  1.6x fewer",
    ]


# Refusals


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (torch.tensor([110]), IndexError, "index 110 is out of range for a table of 110 rows"),
        (torch.tensor([-1]), IndexError, "index -1 is out of range"),
        (torch.tensor([0.5]), TypeError, "index must be int32 or int64, got float32"),
        ([1], TypeError, "index must be a tensor, got list"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), ValueError, "explain counts the indices themselves"),
    ],
)
def test_bad_indices(index, error, message):
    with pytest.raises(error, match=message):
        train().explain(index)
    with pytest.raises(error, match=message):
        train(tb.EmbeddingBag).explain(index[:, None] if isinstance(index, torch.Tensor) else index)


def test_bad_calls():
    with pytest.raises(ValueError, match="1-D indices need offsets"):
        train(tb.EmbeddingBag).explain(drawn(3))
    with pytest.raises(ValueError, match="impl='magic' for tensor_train: choose one of"):
        functional.explain(train().structure, drawn(3), impl="magic")
    with pytest.raises(IndexError, match="two: index 9 is out of range"):
        collection().explain(torch.tensor([[0, 9]]))
