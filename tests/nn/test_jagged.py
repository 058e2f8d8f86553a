"""Batches as TorchRec has them: bags of all keys, one after another."""

from itertools import accumulate

import pytest
import torch

import tensorbed as tb

SIZES = {"user": 50, "item": 300, "place": 7}


class Bags:
    """The methods of TorchRec's ``KeyedJaggedTensor`` that are used, over plain lists."""

    def __init__(self, keys, values, lengths, weights=None):
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def weights_or_none(self):
        return self._weights

    def offsets(self):
        return torch.tensor([0, *accumulate(self._lengths.tolist())])

    def stride_per_key(self):
        return [len(self._lengths) // len(self._keys)] * len(self._keys)

    def offset_per_key(self):
        every = self.stride_per_key()[0]
        return self.offsets()[::every].tolist()


def bags_of_torchrec(keys, values, lengths, weights=None):
    jagged_tensor = pytest.importorskip("torchrec.sparse.jagged_tensor")
    return jagged_tensor.KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, weights=weights)


@pytest.fixture(params=[Bags, bags_of_torchrec], ids=["plain", "torchrec"])
def bags(request):
    return request.param


def collection(**options):
    torch.manual_seed(0)
    return tb.EmbeddingBagCollection.from_sizes(SIZES, 8, tb.TensorTrain(rank=4), dense_below=20, **options)


def drawn(keys, batch=5):
    """Values, lengths and weights of each key, some bags empty."""
    torch.manual_seed(1)
    lengths = torch.tensor([0, 3, 1, 2, 4] * len(keys))[: batch * len(keys)]
    of_key = lengths.view(len(keys), batch).sum(1).tolist()
    values = [torch.randint(SIZES.get(key, 9), (count,)) for key, count in zip(keys, of_key, strict=True)]
    return torch.cat(values), lengths, torch.rand(int(lengths.sum()))


@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("keys", [["user", "item", "place"], ["place", "other", "user", "item"]], ids=["own", "more"])
def test_jagged_bags_are_those_by_name(bags, keys, weighted, include_last_offset):
    layers = collection(include_last_offset=include_last_offset)
    values, lengths, weights = drawn(keys)
    pooled = layers(bags(keys, values, lengths, weights if weighted else None))
    rows = []
    for name in layers.names:  # every row by itself, and their sums
        at = keys.index(name) * 5
        ends = [0, *accumulate(lengths.tolist())]
        for bag in range(at, at + 5):
            mine = slice(ends[bag], ends[bag + 1])
            table = layers.tables[name].weight.to_dense()[values[mine]]
            rows.append((table * (weights[mine, None] if weighted else 1)).sum(0))
    expected = torch.stack(rows).view(3, 5, 8)
    torch.testing.assert_close(pooled.values(), expected.transpose(0, 1).reshape(5, 24))
    for k, name in enumerate(layers.names):
        torch.testing.assert_close(pooled[name], expected[k])


def test_what_comes_back_has_the_methods_of_a_keyed_tensor():
    pooled = collection()(Bags(list(SIZES), *drawn(list(SIZES))[:2]))
    assert pooled.keys() == list(SIZES)
    assert pooled.length_per_key() == [8, 8, 8]
    assert pooled.offset_per_key() == [0, 8, 16, 24]
    assert pooled.key_dim() == 1
    assert pooled.device() == torch.device("cpu")
    assert all(torch.equal(rows, pooled[name]) for name, rows in pooled.to_dict().items())
    pooled.values().sum().backward()


def test_what_consumes_keyed_tensors_of_torchrec_takes_it():
    jagged_tensor = pytest.importorskip("torchrec.sparse.jagged_tensor")
    pooled = collection()(bags_of_torchrec(list(SIZES), *drawn(list(SIZES))[:2]))
    theirs = jagged_tensor.KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values())
    for name in ("keys", "length_per_key", "offset_per_key", "key_dim", "device"):
        assert getattr(theirs, name)() == getattr(pooled, name)()
    groups = [["place"], ["user", "item"]]
    for one, other in zip(
        jagged_tensor.KeyedTensor.regroup([pooled], groups),
        jagged_tensor.KeyedTensor.regroup([theirs], groups),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_keys_that_are_missing_are_named():
    keys = ["user", "place"]
    with pytest.raises(ValueError, match=r"no ids for item. The tables are user, item, place"):
        collection()(Bags(keys, *drawn(keys)[:2]))


def test_explain_counts_jagged_bags():
    layers = collection()
    keys = list(SIZES)
    values, lengths, _ = drawn(keys)
    told = layers.explain(Bags(keys, values, lengths))
    ends = [0, *accumulate(lengths.view(3, 5).sum(1).tolist())]
    named = {key: (values[ends[k] : ends[k + 1]], lengths.view(3, 5)[k]) for k, key in enumerate(keys)}
    by_name = {key: (ids, own.cumsum(0) - own) for key, (ids, own) in named.items()}
    assert str(told) == str(layers.explain(by_name))
