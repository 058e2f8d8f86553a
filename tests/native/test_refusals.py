"""What the kernels refuse, before any memory is touched."""

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.backends.chain import Chain
from tensorbed.backends.native.chains import Table, compute
from tensorbed.functional import lookup

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import CHAINS, by_kernels, draw_cores, draw_grad, draw_ids, exact, on_threads

from tensorbed import _native

BAD = [1_000, 1_001, -1, -1_000, 2**31, 2**32, 2**32 + 3, 2**40, 2**63 - 1, -(2**31), -(2**63)]
SENTINEL = 12345.0


def message(index, rows=1_000):
    hint = "; negative indices do not wrap around" if index < 0 else ""
    return f"index {index} is out of range for a table of {rows} rows (valid: 0 to {rows - 1}){hint}."


def formats():
    return (tb.TensorTrain(rank=3), tb.TensorRing(rank=2), tb.LowRank(rank=3))


@pytest.mark.parametrize("index", BAD)
@pytest.mark.parametrize("n", [1, 5, 3_000])
def test_layers_refuse_an_id_outside_the_table_and_work_on(index, n):
    for format in formats():
        torch.manual_seed(0)
        layer = tb.Embedding(1_000, 24, format)
        good = torch.arange(n) % 1_000
        expected = layer(good)
        bad = good.clone()
        bad[n // 2] = index
        for impl in ("auto", "native"):
            layer.impl = impl
            with pytest.raises(IndexError) as refusal:
                layer(bad)
            assert str(refusal.value) == message(index)
        assert torch.equal(layer(good), expected)


@pytest.mark.parametrize("index", BAD)
def test_bags_refuse_an_id_outside_the_table_also_in_no_bag(index):
    for mode in ("sum", "mean"):
        layer = tb.EmbeddingBag(1_000, 24, tb.TensorTrain(rank=3), mode=mode, include_last_offset=True)
        ids = torch.arange(50)
        expected = layer(ids, torch.tensor([0, 20, 40]))
        for at in (0, 30, 49):  # the last is beyond the last offset
            with pytest.raises(IndexError) as refusal:
                layer(ids.index_fill(0, torch.tensor([at]), index), torch.tensor([0, 20, 40]))
            assert str(refusal.value) == message(index)
        assert torch.equal(layer(ids, torch.tensor([0, 20, 40])), expected)


@pytest.mark.parametrize("index", BAD)
def test_collections_name_the_table_that_refuses(index):
    tables = {
        name: tb.EmbeddingBag(1_000, 8, format, mode="sum") for name, format in zip("abc", formats(), strict=True)
    }
    layers = tb.EmbeddingBagCollection(tables)
    ids = torch.arange(90).reshape(30, 3)
    expected = layers(ids).values
    for given in (ids.index_fill(1, torch.tensor([1]), index), {"a": ids, "b": ids * 0 + index, "c": ids}):
        with pytest.raises(IndexError) as refusal:
            layers(given)
        assert str(refusal.value) == "b: " + message(index)
    assert torch.equal(layers(ids).values, expected)


def test_gradients_of_a_refused_call_are_nobody_s():
    layer = tb.Embedding(1_000, 24, tb.TensorTrain(rank=3))
    layer(torch.tensor([3, 4])).sum().backward()
    before = [p.grad.clone() for p in layer.parameters()]
    with pytest.raises(IndexError):
        layer(torch.tensor([3, 1_000])).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(layer.parameters(), before, strict=True))


class Raw:
    """A call by addresses, with more memory around the output than belongs to it."""

    def __init__(self, chain, dtype=torch.float64, gap=3):
        self.chain, self.cores = chain, [core.detach() for core in draw_cores(chain, dtype)]
        self.handle = _native.Chain(chain.rows, chain.row_factors, chain.col_factors, chain.ranks)
        self.type = [torch.float32, torch.float64, torch.bfloat16].index(dtype)
        self.dtype, self.gap, self.held = dtype, gap, []

    def asked(self, ids, bounds=None, skip=-1, mean=False):
        self.held += [ids, bounds]  # addresses keep nothing alive
        where = (self.handle, ids.data_ptr(), ids.shape[0], ids.stride(0), skip)
        if bounds is None:
            return _native.Asked(*where, 0, -1, 0, mean)
        return _native.Asked(*where, bounds.data_ptr(), bounds.shape[0] - 1, 0, mean)

    def out(self, rows):
        return torch.full((rows + 2, self.chain.cols + self.gap), SENTINEL, dtype=self.dtype)

    def write(self, out, asked, threads=1):
        """Into the middle of ``out``."""
        batch = _native.Batch(self.type, [asked], threads)
        batch.forward(
            [core.data_ptr() for core in self.cores], [out[1:].data_ptr()], [out.stride(0)], [0], True, threads
        )
        return batch


def test_ids_and_offsets_are_read_once():
    """What is written to them after they were planned with, by another thread for instance, is nobody's concern."""
    raw = Raw(Chain(1_000, (10, 10, 10), (2, 3, 2), (1, 3, 4, 1)))
    ids, bounds = torch.arange(200), torch.tensor([0, 100, 100, 200])
    expected, out = raw.out(3), raw.out(3)
    raw.write(expected, raw.asked(ids, bounds))
    batch = _native.Batch(raw.type, [raw.asked(ids, bounds)], 1)
    ids.fill_(2**40)
    bounds.copy_(torch.tensor([0, -(2**40), 2**40, 7]))
    batch.forward([core.data_ptr() for core in raw.cores], [out[1:].data_ptr()], [out.stride(0)], [0], True, 1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("index", BAD)
def test_nothing_is_written_before_every_id_is_known_to_be_good(index):
    raw = Raw(Chain(1_000, (10, 10, 10), (2, 3, 2), (1, 3, 4, 1)))
    ids = torch.arange(200)
    ids[199] = index
    for bounds in (None, torch.tensor([0, 100, 200])):
        out = raw.out(200)
        with pytest.raises(IndexError) as refusal:
            raw.write(out, raw.asked(ids, bounds))
        assert str(refusal.value) == message(index)
        assert (out == SENTINEL).all()
    # The padding row is no excuse for an id outside the table.
    with pytest.raises(IndexError):
        raw.write(raw.out(200), raw.asked(ids, skip=index))


@pytest.mark.parametrize("threads", [1, 4])
def test_one_bad_table_of_many_refuses_the_call(threads):
    raw = Raw(Chain(1_000, (10, 10, 10), (2, 3, 2), (1, 3, 4, 1)))
    ids = torch.arange(200)
    asked = [raw.asked(ids) for _ in range(9)]
    asked[4] = raw.asked(ids + 900)
    with pytest.raises(IndexError, match="index 1000 is out of range for a table of 1000 rows"):
        _native.Batch(1, asked, threads)


@pytest.mark.parametrize(
    "bounds",
    [[1, 200], [0, 199], [0, 201], [0, 150, 100, 200], [-1, 200], [0, -5, 200], [0, 2**40, 200], [0], [200], [0, 0]],
    ids=str,
)
@pytest.mark.parametrize("mean", [True, False])
def test_offsets_that_are_no_bags_are_refused_by_the_kernels_themselves(bounds, mean):
    raw = Raw(CHAINS["train, order 4"])
    out = raw.out(200)
    with pytest.raises(ValueError, match=r"offsets must begin at 0, must not fall and must end with the indices"):
        raw.write(out, raw.asked(torch.arange(200), torch.tensor(bounds), mean=mean))
    assert (out == SENTINEL).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CHAINS)
def test_nothing_is_written_beside_the_rows(dtype, name):
    """Nor between them, where another table's columns stand; and every number of them is."""
    raw = Raw(CHAINS[name], dtype)
    ids = draw_ids(raw.chain, 500)
    skip = int(ids[0])
    for count in (1, 3):
        for bounds in (None, torch.tensor([0, 0, 100, 100, 500, 500])):
            rows = 500 if bounds is None else 5
            out = raw.out(rows)
            raw.write(out, raw.asked(ids, bounds, skip=skip), count)
            inside = torch.zeros_like(out, dtype=torch.bool)
            inside[1:-1, : raw.chain.cols] = True
            assert (out[~inside] == SENTINEL).all()
            assert (out[inside] != SENTINEL).all()


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_are_written_whole_and_nothing_beside_them(name):
    raw = Raw(CHAINS[name])
    chain, ids = raw.chain, draw_ids(raw.chain, 300)
    room = [torch.full((core.numel() + 16,), SENTINEL, dtype=torch.float64) for core in raw.cores]
    grad = draw_grad(300, chain.cols + 2)
    out = raw.out(300)
    for count in (1, 3):
        batch = raw.write(out, raw.asked(ids), count)
        addresses = [core.data_ptr() for core in raw.cores]
        batch.backward(addresses, [grad.data_ptr()], [grad.stride(0)], [one[8:].data_ptr() for one in room], [0], count)
        for one, wanted in zip(room, exact(chain, raw.cores, ids, grad[:, : chain.cols])[1], strict=True):
            assert (one[:8] == SENTINEL).all()
            assert (one[-8:] == SENTINEL).all()
            torch.testing.assert_close(one[8:-8], wanted.reshape(-1))


def test_cores_of_other_shapes_are_refused():
    chain = CHAINS["train, order 3"]
    cores, ids = draw_cores(chain), torch.arange(5)
    for k in range(3):
        for wrong in (cores[k][:-1], cores[k][..., None], cores[k].transpose(0, 2), cores[k].reshape(-1)):
            with pytest.raises(ValueError, match="a core has shape"):
                compute([Table(chain, [*cores[:k], wrong, *cores[k + 1 :]], ids)])
    for some in (cores[:2], [*cores, cores[0]]):
        with pytest.raises(ValueError, match="cores for a chain of"):
            compute([Table(chain, some, ids)])
    with pytest.raises(ValueError, match="padding_row has shape"):
        compute([Table(chain, cores, ids, 3, torch.zeros(chain.cols - 1, dtype=torch.float64))])


def test_parameters_of_other_shapes_are_refused_by_name():
    for format in formats():
        layer = tb.Embedding(1_000, 24, format)
        for name, tensor in layer.params().items():
            with pytest.raises(ValueError, match=rf"{name} has shape .*; {layer.structure.kind} keeps it as"):
                lookup(layer.structure, {**layer.params(), name: tensor[:-1]}, torch.arange(4))


def test_other_dtypes_and_mixtures_go_another_way_or_are_refused():
    layer = tb.Embedding(1_000, 24, tb.TensorTrain(rank=3))
    params = {name: p.detach() for name, p in layer.params().items()}
    mixed = {**params, "core_1": params["core_1"].double()}
    with pytest.raises(ValueError, match='impl="native" computes on the CPU, with plain tensors of one dtype'):
        lookup(layer.structure, mixed, torch.arange(4), impl="native")


def test_an_instruction_set_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no kernels for abacus here"):
        _native.use("abacus")
    assert _native.use(_native.isa) == _native.isa


def test_a_refusal_on_many_threads_leaves_the_pool_in_order():
    chain = CHAINS["train, order 3"]
    cores, ids, grad = draw_cores(chain), draw_ids(chain, 3_000), draw_grad(3_000, chain.cols)
    with on_threads(4):
        before = by_kernels(chain, cores, ids, grad)
        for index in (25_000, -1, 2**40):
            with pytest.raises(IndexError):
                compute([Table(chain, cores, torch.cat([ids, torch.tensor([index])]))])
        after = by_kernels(chain, cores, ids, grad)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(one, other) for one, other in zip(before[1], after[1], strict=True))
