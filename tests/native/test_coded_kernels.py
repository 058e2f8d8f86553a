"""Tables of codes by the kernels of every instruction set: rows, scores and sums against plain PyTorch."""

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.structures.formats import Budget
from tensorbed.testing import assert_near, largest_allocation
from tensorbed.vocabulary.tiling import Task, choose

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import isas, kernels_of, on_threads

every_isa = pytest.mark.parametrize("isa", isas())
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
GUARD = 12345.0

# Odd and even columns, groups that divide them and that do not, every width of a part that has a loop of its own.
TABLES = {
    "8 bits": (tb.QuantizedRows(), 700, 130),
    "8 bits, one column": (tb.QuantizedRows(), 5, 1),
    "8 bits, groups of 7": (tb.QuantizedRows(group=7), 333, 65),
    "4 bits": (tb.QuantizedRows(bits=4), 700, 384),
    "4 bits, odd columns": (tb.QuantizedRows(bits=4, group=1000), 77, 33),
    "4 bits, a last group of one": (tb.QuantizedRows(bits=4), 77, 33),
    "4 bits, groups of 5": (tb.QuantizedRows(bits=4, group=5), 60, 13),
    "parts of 1": (tb.ProductQuantized(parts=67), 300, 67),
    "parts of 2": (tb.ProductQuantized(parts=33), 700, 66),
    "parts of 4": (tb.ProductQuantized(parts=3), 97, 12),
    "parts of 8": (tb.ProductQuantized(parts=2), 300, 16),
    "parts of 13": (tb.ProductQuantized(parts=1), 300, 13),
    "rotated": (tb.ProductQuantized(parts=6, rotate=True), 300, 12),
}
every_table = pytest.mark.parametrize("name", TABLES)


def drawn(name, dtype=torch.float32):
    """A structure and tensors of every code and step that there can be."""
    format, rows, cols = TABLES[name]
    structure, generator, p = format.bind(Budget(rows, cols)), torch.Generator().manual_seed(0), {}
    for spec in structure.tensors():
        if spec.dtype is None:
            p[spec.name] = torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(dtype)
            continue
        low, high = (0, getattr(structure, "words", 256)) if spec.dtype == torch.uint8 else (-128, 128)
        p[spec.name] = torch.randint(low, high, spec.shape, generator=generator).to(spec.dtype)
    return structure, p


def indices(structure, count=500):
    index = torch.randint(0, structure.rows, (count,), generator=torch.Generator().manual_seed(1))
    index[:2] = torch.tensor([0, structure.rows - 1])
    return index


@every_isa
@every_dtype
@every_table
def test_rows_are_those_of_plain_pytorch(isa, dtype, name):
    structure, p = drawn(name, dtype)
    with kernels_of(isa):
        for index in (indices(structure), indices(structure)[::3], indices(structure, 2)):
            made, plain = structure.lookup(p, index, "native"), structure.take(p, index)
            if "rotation" in p:
                assert_near(made, plain)
            else:
                assert torch.equal(made, plain)
                assert torch.equal(made.signbit(), plain.signbit())


def scores(structure, p, start, stop, x, way):
    """By one way, into cells that have others around them."""
    (found,) = [scoring for scoring in structure.scorings() if scoring.name == way]
    tensors = [p[spec.name] for spec in structure.tensors()]
    opened = found.open(tensors, x.dtype, False)
    cells = torch.full((stop - start + 2, x.shape[0]), GUARD, dtype=x.dtype)
    opened.open(start, stop)
    opened.write(opened.vectors(x, grad=False), cells[1:-1])
    assert torch.equal(cells[[0, -1]], torch.full_like(cells[[0, -1]], GUARD))
    return cells[1:-1]


def ways(name):
    return ("codes", "tables", "compiled tables") if isinstance(TABLES[name][0], tb.ProductQuantized) else ("codes",)


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@every_table
def test_scores_are_products_with_the_rows(isa, dtype, name):
    structure, p = drawn(name, dtype)
    exact = {n: t.double() if t.is_floating_point() else t for n, t in p.items()}
    for n in (1, 2, 3, 8, 15, 16, 17, 33, 64, 130):
        x = torch.randn(n, structure.cols, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)
        for start, stop in ((0, structure.rows), (structure.rows // 3, structure.rows - 1), (2, 3), (4, 4)):
            expected = structure.full(exact)[start:stop] @ x.double().T
            for way in ways(name):
                with kernels_of(isa):
                    assert_near(scores(structure, p, start, stop, x, way), expected.to(dtype))


@every_isa
@pytest.mark.parametrize("name", ["8 bits", "4 bits", "parts of 2"])
def test_threads_change_no_bit(isa, name):
    structure, p = drawn(name)
    index = indices(structure, 3000)
    for n in (1, 5, 40):
        x, found = torch.randn(n, structure.cols, generator=torch.Generator().manual_seed(n)), []
        for count in (1, 2, 3, 4):
            with kernels_of(isa), on_threads(count):
                made = [scores(structure, p, 0, structure.rows, x, way) for way in ways(name)]
                found.append([structure.lookup(p, index, "native"), *made])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["8 bits", "4 bits, groups of 5", "parts of 2", "rotated"])
@every_dtype
def test_gradients_are_those_of_plain_pytorch(name, dtype):
    structure, p = drawn(name, dtype)
    leaves = [t.requires_grad_() for t in p.values() if t.is_floating_point()]
    index = indices(structure)
    made, plain = structure.lookup(p, index, "native"), structure.lookup(p, index, "reference")
    grad = torch.randn(made.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    found, expected = torch.autograd.grad(made, leaves, grad), torch.autograd.grad(plain, leaves, grad)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)
    (once,) = torch.autograd.grad(structure.lookup(p, index, "native").sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match='use impl="reference"'):
        once.sum().backward()


def test_heads_take_the_codes_for_scores_and_not_for_training():
    head = tb.Head.from_pretrained(drawn_table(3000, 64), tb.QuantizedRows(bits=4))
    assert head.explain(1).path == "codes, once"
    assert head.explain(32).path == "codes, once"
    assert not any("codes" in name for name in head.explain(32, training=True).considered)
    x = torch.randn(3, 64)
    assert_near(head(x), x @ head.weight.T)
    assert torch.equal(head.topk(x, 9).indices, torch.topk(x @ head.weight.T, 9).indices)
    assert (
        tb.Embedding.from_pretrained(drawn_table(50, 8), tb.QuantizedRows()).explain(torch.arange(4)).path == "native"
    )


def drawn_table(rows, cols):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


def test_without_kernels_there_is_no_such_way(monkeypatch):
    structure, _ = drawn("4 bits")
    choose.cache_clear()
    monkeypatch.setattr(native, "available", False)
    assert choose(Task(structure, 1, 2**24, whole=True)).scoring.name == "rows"
    choose.cache_clear()


@pytest.mark.parametrize("name", ["8 bits", "parts of 2"])
def test_tensors_that_the_kernels_do_not_know_go_the_plain_way(name):
    structure, p = drawn(name)
    index, x = indices(structure), torch.randn(3, structure.cols)
    strided = {**p, "codes": p["codes"].T.contiguous().T}
    assert not structure.as_codes(strided).known()
    assert torch.equal(structure.lookup(strided, index, "auto"), structure.take(p, index))
    assert_near(scores(structure, strided, 0, structure.rows, x, "codes"), structure.full(p) @ x.T)
    with pytest.raises(ValueError, match='use impl="auto"'):
        structure.lookup(strided, index, "native")


def test_codes_that_name_no_entry_are_not_read():
    """Codebooks of fewer entries than a byte can name, as a damaged file may have them."""
    structure, p = drawn("parts of 4")
    intact, x = p["codes"].clone(), torch.randn(3, structure.cols)
    for part in range(structure.parts):
        p["codes"].copy_(intact)
        p["codes"][5, part] = structure.words
        for impl in ("auto", "native"):
            with pytest.raises(IndexError, match="a code names entry 97 of codebooks of 97"):
                structure.lookup(p, torch.tensor([5]), impl)
            assert torch.equal(structure.lookup(p, torch.tensor([4, 6]), impl), structure.take(p, torch.tensor([4, 6])))
        for way in ways("parts of 4"):
            with pytest.raises(IndexError, match="a code names entry 97 of codebooks of 97"):
                scores(structure, p, 0, structure.rows, x, way)


def test_what_was_checked_is_what_is_used():
    """Rows are written over the very indices they were asked by, as another thread could write there."""
    structure, p = drawn("8 bits")
    p["codes"][0], p["scale"][0] = 0, 1  # a row whose bytes, read as indices, are all 0
    wanted = torch.tensor([0, 5, 699, 7])
    expected = structure.take(p, wanted)
    for threads in (1, 3):
        out = torch.empty(4, structure.cols)
        index = out.view(-1).view(torch.int64)[:4].copy_(wanted)
        structure.as_codes(p).handle().rows(0, index.data_ptr(), 4, out.data_ptr(), threads)
        assert torch.equal(out, expected)


def test_codes_that_change_after_they_were_looked_at_are_not_read():
    structure, p = drawn("parts of 4")
    handle, out = structure.as_codes(p).handle(), torch.zeros(structure.rows, structure.cols)
    tables = torch.randn(structure.parts * structure.words, 1)
    index = torch.arange(structure.rows)
    p["codes"][5] = 255
    for call in (
        lambda: handle.rows(0, index.data_ptr(), structure.rows, out.data_ptr(), 2),
        lambda: handle.scores(0, tables.data_ptr(), 1, out.data_ptr(), 2),
        lambda: handle.sums(0, tables.data_ptr(), 1, out.data_ptr(), 2),
    ):
        with pytest.raises(IndexError, match="a code names entry 255 of codebooks of 97"):
            call()


@pytest.mark.parametrize("name", ["8 bits, groups of 7", "parts of 2"])
def test_freed_memory_is_not_read(name):
    for freed in drawn(name)[1]:
        structure, p = drawn(name)
        p[freed].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="storage was freed"):
            structure.lookup(p, torch.tensor([0]), "auto")


@pytest.mark.parametrize("name", ["4 bits", "parts of 2"])
def test_scores_without_kernels_make_some_rows_at_a_time(name, monkeypatch):
    structure, p = drawn(name)
    x = torch.randn(3, structure.cols)
    (way,) = [scoring for scoring in structure.scorings() if scoring.name == "codes"]
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr("tensorbed.backends.scores.codes._ROWS", 100 * structure.cols)
    out = torch.empty(structure.rows, 3)
    with largest_allocation() as most:
        opened = way.open([p[spec.name] for spec in structure.tensors()], torch.float32, False)
        opened.open(0, structure.rows)
        opened.write(opened.vectors(x, grad=False), out)
    assert most() <= max(200 * structure.cols, *(t.numel() for t in p.values()))
    assert_near(out, structure.full(p) @ x.T)


def test_the_kernels_refuse_what_lies_outside():
    structure, p = drawn("8 bits")
    handle, out = structure.as_codes(p).handle(), torch.zeros(structure.rows, structure.cols)
    for bad in (-1, structure.rows, 2**40):
        index = torch.tensor([0, bad])
        with pytest.raises(IndexError, match=f"index {bad} is out of range for a table of 700 rows"):
            handle.rows(0, index.data_ptr(), 2, out.data_ptr(), 1)
    with pytest.raises(ValueError, match="float32 or float64"):
        handle.sums(2, out.data_ptr(), 1, out.data_ptr(), 1)
    with pytest.raises(ValueError, match="8 or 4 bits"):
        native.module.Coded.quantized(5, 4, 0, 3, 0, 4, 0)
    with pytest.raises(ValueError, match="divide the columns"):
        native.module.Coded.product(5, 7, 0, 2, 0, 256)
