"""Many tables called as one."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import tensorbed as tb
from tensorbed.nn import Pooled
from tensorbed.testing import assert_near

SIZES = {"C1": 50, "C2": 7, "C3": 1000, "C4": 30}
DYNAMIC = torch.export.Dim.DYNAMIC


def mixed(**options):
    """Every structure, several dimensions and modes, in double precision."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "std": 1.0, **options}
    return tb.EmbeddingBagCollection(
        {
            "C1": tb.TTEmbeddingBag(50, 8, 3, mode="sum", **options),
            "C2": tb.EmbeddingBag(7, 4, tb.Dense(), mode="mean", padding_idx=2, **options),
            "C3": tb.EmbeddingBag(1000, 12, tb.TensorRing(rank=2), mode="mean", **options),
            "C4": tb.EmbeddingBag(30, 5, tb.LowRank(rank=2), mode="max", padding_idx=-1, **options),
        }
    )


def drawn_ids(batch, *, seed=1, sizes=SIZES):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(0, n, (batch,), generator=generator) for n in sizes.values()], 1)


def drawn_bags(batch, *, seed=2, sizes=SIZES):
    """Bags of 0 to 4 ids with their offsets, another number of ids for each table."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, rows in sizes.items():
        lengths = torch.randint(0, 5, (batch,), generator=generator)
        ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
        found[name] = (ids, lengths.cumsum(0) - lengths)
    return found


def twins(collection):
    return {
        name: nn.EmbeddingBag.from_pretrained(
            layer.weight.detach().clone(), freeze=False, mode=layer.mode, padding_idx=layer.padding_idx
        )
        for name, layer in collection.tables.items()
    }


def gradients(collection, out, seed=3):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, list(collection.parameters()), weights)


@pytest.mark.without_kernels
def test_ids_give_each_table_s_rows_and_gradients():
    collection, ids = mixed(), drawn_ids(9)
    values, split = collection(ids)
    expected = [layer(ids[:, k : k + 1]) for k, layer in enumerate(collection.tables.values())]
    assert torch.equal(values, torch.cat(expected, 1))
    assert list(split) == list(SIZES)
    for part, own in zip(split.values(), expected, strict=True):
        assert torch.equal(part, own)
    for made, wanted in zip(gradients(collection, values), gradients(collection, torch.cat(expected, 1)), strict=True):
        assert_near(made, wanted)


@pytest.mark.without_kernels
def test_columns_stand_in_the_order_of_the_tables_whatever_is_computed_together():
    formats = [tb.Dense(), tb.TensorTrain(rank=2), tb.TensorRing(rank=2), tb.Dense(), tb.Dense(), tb.LowRank(rank=2)]
    tables = {f"t{k}": tb.EmbeddingBag(900, 4 + 2 * k, format, std=1.0) for k, format in enumerate(formats)}
    collection, ids = tb.EmbeddingBagCollection(tables), drawn_ids(9, sizes=dict.fromkeys(tables, 900))
    values, _ = collection(ids)
    expected = torch.cat([layer(ids[:, k : k + 1]) for k, layer in enumerate(tables.values())], 1)
    assert torch.equal(values, expected)
    for gradient, wanted in zip(gradients(collection, values), gradients(collection, expected), strict=True):
        assert_near(gradient, wanted)


@pytest.mark.without_kernels
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_bags_agree_with_torch_in_values_and_gradients(impl):
    collection, bags = mixed(impl=impl), drawn_bags(6)
    values = collection(bags).values
    torch_layers = twins(collection)
    expected = torch.cat([torch_layers[name](*bags[name]) for name in SIZES], 1)
    assert_near(values, expected)
    grad = torch.randn(values.shape, dtype=torch.float64)
    table_grads = torch.autograd.grad(expected, [layer.weight for layer in torch_layers.values()], grad)
    wanted = []
    for layer, table_grad in zip(collection.tables.values(), table_grads, strict=True):
        wanted += torch.autograd.grad(layer.weight, list(layer.parameters()), table_grad)
    for one, other in zip(torch.autograd.grad(values, list(collection.parameters()), grad), wanted, strict=True):
        assert_near(one, other)
    # The split leads back to the same gradients.
    split = collection(bags).split
    total = sum((part * g).sum() for part, g in zip(split.values(), grad.split([8, 4, 12, 5], 1), strict=True))
    for one, other in zip(torch.autograd.grad(total, list(collection.parameters())), wanted, strict=True):
        assert_near(one, other)


@pytest.mark.without_kernels
def test_ways_to_give_ids_agree():
    collection, ids = mixed(), drawn_ids(5)
    expected = collection(ids).values
    by_name = {name: ids[:, k : k + 1] for k, name in enumerate(SIZES)}
    flat = {name: (ids[:, k], torch.arange(5)) for k, name in enumerate(SIZES)}
    for given in (by_name, flat, dict(reversed(flat.items())), {**by_name, "C1": flat["C1"], "C2": [*flat["C2"]]}):
        assert_near(collection(given).values, expected)
    assert_near(collection(ids.int()).values, expected)
    assert_near(collection(ids.T.contiguous().T).values, expected)


def test_the_split_is_views_of_the_values():
    values, split = mixed()(drawn_ids(3))
    assert isinstance(mixed()(drawn_ids(3)), Pooled)
    assert [part.shape for part in split.values()] == [(3, 8), (3, 4), (3, 12), (3, 5)]
    assert all(part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() for part in split.values())


@pytest.mark.without_kernels
def test_weights_and_last_offsets_are_each_layer_s_own():
    torch.manual_seed(0)
    collection = tb.EmbeddingBagCollection(
        {
            "a": tb.TTEmbeddingBag(50, 8, 3, mode="sum", include_last_offset=True),
            "b": tb.TTEmbeddingBag(40, 8, 2, mode="sum"),
        }
    )
    index, weights = torch.randint(0, 40, (7,)), torch.randn(7, requires_grad=True)
    given = {
        "a": (index, torch.tensor([0, 2, 7])),
        "b": (index, torch.tensor([0, 4]), weights),
    }
    values, split = collection(given)
    assert torch.equal(split["a"], collection.tables["a"](*given["a"]))
    assert torch.equal(split["b"], collection.tables["b"](*given["b"]))
    values.sum().backward()
    assert weights.grad.count_nonzero() == 7
    squares = {"a": index[:6].reshape(2, 3), "b": (index[:6].reshape(2, 3), None, weights[:6].reshape(2, 3))}
    assert torch.equal(collection(squares).split["b"], collection.tables["b"](*squares["b"]))


@pytest.mark.without_kernels
def test_gradients_are_scaled_by_frequency_within_a_table():
    collection, bags = mixed(), drawn_bags(6)
    layer = tb.TTEmbeddingBag(50, 8, 3, mode="sum", scale_grad_by_freq=True, dtype=torch.float64)
    collection.tables["C1"] = layer
    made = torch.autograd.grad(collection(bags).values.sum(), layer.core_0)
    assert_near(made[0], torch.autograd.grad(layer(*bags["C1"]).sum(), layer.core_0)[0])


@pytest.mark.without_kernels
def test_two_names_may_share_a_layer():
    torch.manual_seed(0)
    shared = tb.TTEmbeddingBag(1000, 8, 4, mode="sum")
    collection = tb.EmbeddingBagCollection(
        {"seen": shared, "bought": shared, "shop": tb.EmbeddingBag(5, 4, tb.Dense(), mode="sum")}
    )
    assert sum(p.numel() for p in collection.parameters()) == shared.structure.numel + 20
    assert collection.compression_ratio == pytest.approx((8000 + 20) / (shared.structure.numel + 20))
    assert f"parameters={shared.structure.numel + 20:,}" in collection.extra_repr()
    assert collection.embedding_dim == 20
    ids = torch.tensor([[3, 900, 4], [3, 3, 0]])
    values, split = collection(ids)
    assert torch.equal(split["bought"], shared(ids[:, 1:2]))
    (made,) = torch.autograd.grad(values[:, :16].sum(), [shared.core_0])
    expected = torch.autograd.grad(shared(ids[:, :2].reshape(-1, 1)).sum(), [shared.core_0])[0]
    assert_near(made, expected)
    for other in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))):
        assert other.tables["seen"] is other.tables["bought"]
        assert torch.equal(other(ids).values, values)


def test_sizes_names_and_ratio():
    collection = mixed()
    assert collection.names == ("C1", "C2", "C3", "C4")
    assert collection.dims == {"C1": 8, "C2": 4, "C3": 12, "C4": 5}
    assert collection.embedding_dim == 29
    stored = sum(p.numel() for p in collection.parameters()) + 4 + 5  # two padding rows
    assert collection.compression_ratio == pytest.approx((50 * 8 + 7 * 4 + 1000 * 12 + 30 * 5) / stored)
    assert collection.extra_repr() == (
        f"4 tables, embedding_dim=29, parameters={stored}, ratio={collection.compression_ratio:.4g}"
    )
    assert not hasattr(collection, "weight")


def test_state_dict_round_trip():
    collection, ids = mixed(), drawn_ids(4)
    state = collection.state_dict()
    assert {"tables.C1.core_0", "tables.C2.table", "tables.C2.padding_row", "tables.C4.v"} <= set(state)
    other = mixed()
    for p in other.parameters():
        p.data.normal_()
    assert not torch.equal(other(ids).values, collection(ids).values)
    other.load_state_dict(state)
    assert torch.equal(other(ids).values, collection(ids).values)
    with pytest.raises(RuntimeError, match=r'"tables.C1.weight" is a dense table of shape \(50, 8\)'):
        other.load_state_dict({**state, "tables.C1.weight": torch.zeros(50, 8)})


# Made from sizes


def test_small_fields_stay_dense_by_themselves():
    sizes = {"big": 100_000, "tiny": 4, "small": 60}
    collection = tb.EmbeddingBagCollection.from_sizes(sizes, 16, tb.TensorTrain(rank=16))
    kinds = {name: layer.structure.kind for name, layer in collection.tables.items()}
    assert kinds == {"big": "tensor_train", "tiny": "dense", "small": "dense"}
    assert all(layer.compression_ratio >= 1 for layer in collection.tables.values())
    assert {layer.mode for layer in collection.tables.values()} == {"sum"}
    # A ratio out of a small field's reach keeps it dense too; the large ones have it.
    collection = tb.EmbeddingBagCollection.from_sizes(sizes, 16, tb.TensorTrain(ratio=50), mode="mean")
    assert [layer.structure.kind for layer in collection.tables.values()] == ["tensor_train", "dense", "dense"]
    assert collection.tables["big"].compression_ratio >= 50


def test_dense_below_is_taken_at_its_word():
    sizes = {"big": 1000, "tiny": 4, "edge": 60}

    def kinds(dense_below):
        made = tb.EmbeddingBagCollection.from_sizes(sizes, 16, tb.TensorTrain(rank=2), dense_below=dense_below)
        return [layer.structure.kind for layer in made.tables.values()]

    assert kinds(60) == ["tensor_train", "dense", "tensor_train"]
    assert kinds(61) == ["tensor_train", "dense", "dense"]
    assert kinds(0) == ["tensor_train"] * 3
    assert kinds(10**9) == ["dense"] * 3


def test_options_go_to_every_table():
    collection = tb.EmbeddingBagCollection.from_sizes(
        {"a": 5000, "b": 3},
        8,
        tb.LowRank(rank=3),
        dtype=torch.float64,
        padding_idx=0,
        std=0.5,
        impl="reference",
        device="meta",
    )
    for layer in collection.tables.values():
        assert (layer.padding_idx, layer.std, layer.impl) == (0, 0.5, "reference")
    assert all(p.dtype == torch.float64 and p.is_meta for p in collection.parameters())
    assert [layer.structure.kind for layer in collection.tables.values()] == ["low_rank", "dense"]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (({"a": 0}, 8, tb.Dense()), {}, ValueError, "a: num_embeddings=0: must be at least 1"),
        (({"a": 9}, -8, tb.Dense()), {}, ValueError, "a: embedding_dim=-8"),
        (({"a": 9.5}, 8, tb.Dense()), {}, TypeError, "a: num_embeddings must be an int"),
        (([9], 8, tb.Dense()), {}, TypeError, "sizes must be a mapping such as .* got list"),
        (({}, 8, tb.Dense()), {}, ValueError, "tables is empty"),
        (({"a": 9}, 8, tb.TensorTrain), {}, TypeError, r"format must be a format such as TensorTrain\(\)"),
        (({"a": 9}, 8, tb.TensorTrain(rel_error=0.1)), {}, ValueError, "a: TensorTrain.* needs a table"),
        (({"a": 9}, 8, tb.Dense()), {"dense_below": -1}, ValueError, "dense_below=-1: a number of rows"),
        (({"a": 9}, 8, tb.Dense()), {"dense_below": 1.5}, TypeError, "dense_below must be an int"),
        (({"a": 9}, 8, tb.Dense()), {"mode": "median"}, ValueError, "a: mode='median'"),
        (({"a": 9}, 8, tb.Dense()), {"nonsense": 1}, TypeError, "a: .*nonsense"),
        (({"a": 9}, 8, tb.Dense()), {"dtype": "float32"}, TypeError, "a: dtype='float32'"),
        (({"a.b": 9}, 8, tb.Dense()), {}, ValueError, "'a.b' cannot name a table"),
    ],
)
def test_bad_sizes(arguments, options, error, message):
    with pytest.raises(error, match=message):
        tb.EmbeddingBagCollection.from_sizes(*arguments, **options)


# Refusals


def bag(**options):
    return tb.EmbeddingBag(9, 4, tb.Dense(), mode="sum", **options)


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        ([bag()], TypeError, "tables must be a mapping such as .*, got list"),
        ({}, ValueError, "tables is empty: give at least one"),
        ({"a.b": bag()}, ValueError, "'a.b' cannot name a table: state_dict keys are made of names and dots"),
        ({"": bag()}, ValueError, "'' cannot name a table"),
        ({"keys": bag()}, ValueError, "'keys' cannot name a table: .* has an attribute of that name; try 'keys_'"),
        ({"training": bag()}, ValueError, "'training' cannot name a table"),
        ({3: bag()}, TypeError, r"names are strings, got 3 \(int\)"),
        ({"a": nn.EmbeddingBag(9, 4)}, TypeError, r"a: give a tb.EmbeddingBag \(tb.EmbeddingBag.from_pretrained\("),
        ({"a": tb.Embedding(9, 4, tb.Dense())}, TypeError, "a: give a tb.EmbeddingBag, which takes one id a bag"),
        ({"a": None}, TypeError, "a: give a tb.EmbeddingBag, got NoneType"),
        (
            {"a": bag(), "b": bag(dtype=torch.float64)},
            ValueError,
            "need one dtype and device, got float32 on cpu: a; float64 on cpu: b",
        ),
        ({"a": bag(), "b": bag(device="meta")}, ValueError, "float32 on cpu: a; float32 on meta: b"),
    ],
)
def test_bad_tables(tables, error, message):
    with pytest.raises(error, match=message):
        tb.EmbeddingBagCollection(tables)


def changed(name, value):
    return {**drawn_bags(3), name: value}


IDS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.without_kernels
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (drawn_ids(3)[:, :3], ValueError, r"ids has shape \(3, 3\); \(B, 4\) is needed, .*: C1, C2, C3, C4"),
        (drawn_ids(3)[0], ValueError, r"ids has shape \(4,\)"),
        (drawn_ids(3).float(), TypeError, "ids must be int32 or int64, got float32"),
        ([1, 2], TypeError, r"give ids as a tensor \(B, 4\), as a mapping from names or as a Keyed"),
        ({k: v for k, v in drawn_bags(3).items() if k != "C2"}, ValueError, "no ids for C2. The tables are C1, C2"),
        ({**drawn_bags(3), "C9": IDS}, ValueError, "no table C9. The tables are C1"),
        ({"C9": IDS}, ValueError, "no ids for C1, C2, C3, C4; no table C9"),
        (changed("C3", IDS), ValueError, "C3: 1-D indices need offsets"),
        (changed("C3", None), TypeError, r"C3: give ids \(B, L\), \(ids, offsets\) or .*, got NoneType"),
        (changed("C3", (IDS,) * 4), TypeError, "C3: give .* got tuple of 4"),
        (changed("C3", (IDS, IDS.double())), TypeError, "C3: offsets must be int32 or int64"),
        (changed("C3", (IDS, torch.tensor([0, 2, 1]))), ValueError, "C3: offsets must not fall"),
        (changed("C3", (IDS, torch.arange(3), torch.ones(3))), ValueError, "C3: per_sample_weights needs mode="),
        (changed("C1", (IDS, torch.arange(2))), ValueError, "same number of bags, got 2 in C1; 3 in C2, C3, C4"),
        (changed("C3", (IDS + 1000, torch.arange(3))), IndexError, r"^C3: index 1000 is out of range .* 1000 rows"),
        (changed("C1", (IDS - 1, torch.arange(3))), IndexError, r"^C1: index -1 is out of range"),
        (drawn_ids(3).index_fill(1, torch.tensor([2]), 1000), IndexError, r"^C3: index 1000 .* table of 1000 rows"),
        (drawn_ids(3).index_fill(1, torch.tensor([1]), -5), IndexError, r"^C2: index -5 is out of range"),
    ],
)
def test_bad_inputs_are_refused_before_anything_is_computed(given, error, message, monkeypatch):
    collection = mixed()
    monkeypatch.setattr("tensorbed.nn.collection.pooled", lambda *_: pytest.fail("computed"))
    with pytest.raises(error, match=message):
        collection(given)


@pytest.mark.without_kernels
def test_all_work_is_handed_over_at_once(monkeypatch):
    """One call computes everything, given what is asked of every table: where one kernel call can take over."""
    seen = []

    def pooled(asked, world):
        seen.append(asked)
        return torch.arange(3.0 * 29).reshape(-1, 29)

    monkeypatch.setattr("tensorbed.nn.collection.pooled", pooled)
    collection, ids, bags = mixed(), drawn_ids(3), drawn_bags(3)
    values, split = collection(ids)
    assert torch.equal(split["C2"], values[:, 8:12])
    collection(bags)
    columns, by_name = seen
    for k, name in enumerate(SIZES):
        assert torch.equal(columns[k].ids, ids[:, k])
        assert columns[k].bounds is None  # bags of one id are rows
        assert torch.equal(by_name[k].ids, bags[name][0])
        assert torch.equal(by_name[k].bounds[:-1], bags[name][1])


def test_of_many_names_some_are_shown():
    collection = tb.EmbeddingBagCollection.from_sizes({f"C{k}": 3 for k in range(26)}, 2, tb.Dense())
    with pytest.raises(ValueError, match=r"C0, C1, C2, C3, C4, C5, \.\.\., C25\. Bags of several ids go by name"):
        collection(torch.zeros(3, 4, dtype=torch.int64))


# The worlds a layer lives in


@pytest.mark.without_kernels
def test_empty_batches():
    collection = mixed()
    values, split = collection(drawn_ids(0))
    assert values.shape == (0, 29)
    assert split["C3"].shape == (0, 12)
    none = torch.empty(0, dtype=torch.int64)
    assert collection(dict.fromkeys(SIZES, (none, none))).values.shape == (0, 29)
    empty_bags = collection(dict.fromkeys(SIZES, (none, torch.tensor([0, 0])))).values
    assert empty_bags.tolist() == [[0.0] * 29] * 2
    empty_bags.sum().backward()


def test_meta_device():
    collection = tb.EmbeddingBagCollection.from_sizes(SIZES, 8, tb.TensorTrain(rank=2), device="meta")
    out = collection(torch.zeros(6, 4, dtype=torch.int64, device="meta"))
    assert out.values.is_meta
    assert out.values.shape == (6, 32)


@pytest.mark.without_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_parameters_dtype(dtype):
    collection, ids = mixed(dtype=dtype), drawn_ids(4)
    expected = collection(ids).values
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = collection(ids).values
    assert out.dtype == dtype
    assert torch.equal(out, expected)


def test_transforms():
    collection, ids = mixed(), drawn_ids(4)
    params = {name: p.detach() for name, p in collection.named_parameters()}

    def loss(p):
        return torch.func.functional_call(collection, p, (ids,)).values.square().sum()

    made = torch.func.grad(loss)(params)
    expected = torch.autograd.grad(collection(ids).values.square().sum(), list(collection.parameters()))
    for one, other in zip(made.values(), expected, strict=True):
        assert_near(one, other)
    stacked = torch.stack([ids, drawn_ids(4, seed=7)])
    values = torch.func.vmap(lambda x: collection(x).values)(stacked)
    assert_near(values[1], collection(stacked[1]).values)
    with pytest.raises(IndexError, match=r"^C2: index 1007 is out of range"):
        torch.func.vmap(lambda x: collection(x).values)(stacked.index_fill(2, torch.tensor([1]), 1007))
    by_name = {name: stacked[:, :, k : k + 1] for k, name in enumerate(SIZES)}
    assert_near(torch.func.vmap(lambda x: collection(x).values)(by_name), values)
    with pytest.raises(IndexError, match=r"^C2: index 1007 is out of range"):
        torch.func.vmap(lambda x: collection(x).values)({**by_name, "C2": torch.full((2, 4, 1), 1007)})


@pytest.mark.without_kernels
def test_compiled():
    torch.compiler.reset()
    collection = mixed(dtype=torch.float32)
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    for batch in (4, 7):
        ids = drawn_ids(batch)
        made, expected = compiled(ids), collection(ids)
        assert_near(made.values, expected.values)
        assert list(made.split) == list(SIZES)
        assert_near(made.split["C4"], expected.split["C4"])
        for one, other in zip(gradients(collection, made.values), gradients(collection, expected.values), strict=True):
            assert_near(one, other)
    with pytest.raises(IndexError, match=r"^C3: index 1000 is out of range for a table of 1000 rows"):
        compiled(ids.index_fill(1, torch.tensor([2]), 1000))


def test_compiled_by_name():
    torch.compiler.reset()
    collection = mixed(dtype=torch.float32)
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    bags = drawn_bags(5)
    assert_near(compiled(bags).values, collection(bags).values)
    with pytest.raises(IndexError, match=r"^C1: index -3 is out of range"):
        compiled({**bags, "C1": (torch.full_like(bags["C1"][0], -3), bags["C1"][1])})


def test_compiled_by_inductor():
    torch.compiler.reset()
    collection, ids = mixed(dtype=torch.float32), drawn_ids(5)
    assert_near(torch.compile(collection, fullgraph=True)(ids).values, collection(ids).values)


def test_exported_saved_and_clamped():
    collection, ids = mixed(), drawn_ids(5)
    exported = torch.export.export(collection, (ids,), dynamic_shapes=({0: DYNAMIC},))
    kept = io.BytesIO()
    torch.export.save(exported, kept)
    kept.seek(0)
    run = torch.export.load(kept).module()
    for batch in (5, 11):
        made, expected = run(drawn_ids(batch)), collection(drawn_ids(batch))
        assert_near(made.values, expected.values)
        assert_near(made.split["C3"], expected.split["C3"])
    last = torch.tensor([[49, 6, 999, 29]] * 5)
    assert_near(run(last + 100).values, collection(last).values)


def test_exported_by_name():
    collection, bags = mixed(), drawn_bags(5)
    shapes = {name: ({0: DYNAMIC}, {0: DYNAMIC}) for name in bags}
    exported = torch.export.export(collection, (bags,), dynamic_shapes=(shapes,))
    for given in (bags, drawn_bags(8, seed=9)):
        assert_near(exported.module()(given).values, collection(given).values)


def test_copies_compute_the_same():
    collection, ids = mixed(), drawn_ids(4)
    for other in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))):
        assert torch.equal(other(ids).values, collection(ids).values)
        assert other.names == collection.names


def test_trains_as_part_of_a_model():
    torch.manual_seed(0)
    fields = tb.EmbeddingBagCollection.from_sizes(SIZES, 8, tb.TensorTrain(rank=4), std=0.5)
    head = nn.Linear(fields.embedding_dim, 1)
    ids, target = drawn_ids(64), torch.randn(64)
    optimiser = torch.optim.Adam([*fields.parameters(), *head.parameters()], lr=0.02)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = (head(fields(ids).values)[:, 0] - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
