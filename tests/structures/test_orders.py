"""The order of a permuted table: held once, kept when the table is drawn anew, and refused where it is none."""

import copy
import pickle

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.backends.native import chains

LR, ORDER = tb.LowRank(rank=2), torch.arange(20).flip(0)


def shuffled_layer(seed, kind=tb.Embedding, **options):
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(seed))
    sizes = (4, 10_000) if kind is tb.Head else (10_000, 4)
    return kind(*sizes, tb.Permuted(tb.LowRank(rank=1), order=order), **options)


def loaded(layer, assign):
    layer.load_state_dict(shuffled_layer(1).state_dict(), assign=assign)
    return layer


def tied(layer, source):
    layer.share(source)
    return layer


def drawn(layer):
    """In memory that nobody wrote."""
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    return layer


REPLACED = {  # what may happen to the tensors of a layer, and whose order it has then
    "born": (lambda layer: layer, 0),
    "born on meta": (lambda layer: drawn(shuffled_layer(0, device="meta")), 0),
    "copied": (copy.deepcopy, 0),
    "loaded": (lambda layer: loaded(layer, assign=False), 1),
    "assigned": (lambda layer: loaded(layer, assign=True), 1),
    "assigned to meta": (lambda layer: loaded(shuffled_layer(0, device="meta"), assign=True), 1),
    "moved": (lambda layer: layer._apply(torch.clone), 0),
    "emptied": (drawn, 0),
    "sent to meta": (lambda layer: drawn(layer.to("meta")), 0),
    "tied": (lambda layer: tied(layer, shuffled_layer(1)), 1),
    "tied to meta": (lambda layer: drawn(tied(layer, shuffled_layer(1, device="meta"))), 1),
}


@pytest.mark.parametrize("replaced", REPLACED)
def test_an_order_is_held_once(replaced):
    """In the buffer, wherever that came from; a table drawn anew has it still."""
    replace, seed = REPLACED[replaced]
    layer, expected = replace(shuffled_layer(0)), shuffled_layer(seed).places
    for _ in range(2):
        assert len(pickle.dumps(layer)) < 1.2 * layer.structure.bytes(torch.float32)
        assert torch.equal(layer.places, expected)
        layer.reset_parameters()


def test_a_tied_head_drawn_anew_leaves_the_order_of_its_table():
    embedding, head = shuffled_layer(0), shuffled_layer(1, tb.Head)
    head.share(embedding)
    head.reset_parameters()
    assert head.places is embedding.places
    assert torch.equal(embedding.places, shuffled_layer(0).places)


@pytest.mark.parametrize("nested", [False, True])
def test_states_whose_order_is_no_permutation_are_refused(nested):
    permuted = tb.Permuted(tb.LowRank(rank=2), order=torch.randperm(20))
    layer = (
        tb.Embedding(40, 6, tb.Bands(((20, permuted), (None, tb.Dense())))) if nested else tb.Embedding(20, 6, permuted)
    )
    name = "band_0_places" if nested else "places"
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    state = {key: torch.ones_like(tensor) for key, tensor in before.items()}
    with pytest.raises(RuntimeError, match="places holds 1 more than once; a permutation holds each row once"):
        layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="places holds 1 more than once"):
        torch.nn.Sequential(layer).load_state_dict({f"0.{name}": state[name]}, strict=False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())
    layer.load_state_dict({**state, name: before[name].flip(0).long()})
    assert torch.equal(getattr(layer, name), before[name].flip(0))


@pytest.mark.parametrize("format", [tb.Permuted(LR, ORDER), tb.StraightThrough(tb.Permuted(LR, ORDER))], ids=repr)
def test_an_order_is_checked_whatever_holds_the_other_tensors(format):
    """They may be on the meta device, or sharded."""
    layer = tb.Embedding(20, 6, format, device="meta")
    with pytest.raises(RuntimeError, match="places holds 0 more than once"):
        layer.load_state_dict({"places": torch.zeros(20, dtype=torch.int32)}, strict=False, assign=True)
    assert layer.places.is_meta
    layer.load_state_dict({"places": ORDER.int()}, strict=False, assign=True)
    assert torch.equal(layer.places, ORDER)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("assign", [False, True])
def test_an_order_of_floats_is_refused(device, assign):
    layer = tb.Embedding(20, 6, tb.Permuted(LR, ORDER), device=device)
    with pytest.raises(RuntimeError, match=r"places is torch.float32, and holds whole numbers: give it as torch.int32"):
        layer.load_state_dict({"places": ORDER + 0.5}, strict=False, assign=assign)
    assert layer.places.dtype == torch.int32


@pytest.mark.skipif(not native.available, reason="there are no compiled kernels")
@pytest.mark.parametrize("by_name", [False, True])
def test_permuted_tables_of_a_collection_take_one_call_of_the_kernels(by_name, monkeypatch):
    """And say of an id outside which table and which bound it is."""
    sizes = {"a": 20, "b": 30, "c": 50}
    tables = {
        name: tb.EmbeddingBag(rows, 6, tb.Permuted(LR, torch.randperm(rows)), mode="sum", padding_idx=1)
        for name, rows in sizes.items()
    }
    fields, calls = tb.EmbeddingBagCollection(tables), []
    monkeypatch.setattr(chains, "compute", lambda *given, made=chains.compute: calls.append(1) or made(*given))
    ids = torch.arange(20)[:, None].expand(20, 3)
    _, split = fields({name: ids[:, [k]] for k, name in enumerate(sizes)} if by_name else ids)
    assert len(calls) == 1
    assert split["a"][1].count_nonzero() == 0
    for name, rows in split.items():
        torch.testing.assert_close(rows, tables[name].weight[:20])
    outside = {"a": ids[:, [0]], "b": ids[:, [1]] + 11, "c": ids[:, [2]]}
    with pytest.raises(IndexError, match=r"b: index 30 .* table of 30 rows \(valid: 0 to 29\)"):
        fields(outside if by_name else torch.cat(list(outside.values()), 1))
    assert len(calls) == 1


@pytest.mark.parametrize("format", [LR, tb.Dense(), tb.QuantizedRows()], ids=repr)
def test_an_order_damaged_in_memory_reads_nothing_outside(format):
    layer = tb.Embedding.from_pretrained(torch.randn(20, 6), tb.Permuted(format, ORDER))
    layer.places[3] = 2**30
    for index in (torch.arange(20), torch.tensor([3])):
        with pytest.raises(IndexError, match="1073741824"):
            layer(index)
