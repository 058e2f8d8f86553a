"""Tables made of tables of codes: the kernels locate each index in its part and decode all rows in one call."""

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import coded, native
from tensorbed.backends.parts import located_by_ends, located_by_places
from tensorbed.structures.formats import Budget

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import isas, kernels_of, on_threads

GUARD = 12345.0
ROWS, COLS = 700, 66
INT8, INT4 = tb.QuantizedRows(bits=8), tb.QuantizedRows(bits=4, group=7)
PRODUCT = tb.ProductQuantized(parts=33)
FORMATS = {
    "hot rows": tb.HotRows(share=0.2, hot=INT8, rest=INT4),
    "hot product rows": tb.HotRows(share=0.9, hot=PRODUCT, rest=INT8),
    "bands": tb.Bands(((1, INT8), (300, PRODUCT), (301, INT4), (None, INT8))),
    "one band": tb.Bands(((None, INT4),)),
    "permuted hot rows": tb.Permuted(tb.HotRows(hot=INT8, rest=INT4), order=[(11 * i + 3) % ROWS for i in range(ROWS)]),
}
every_format = pytest.mark.parametrize("name", FORMATS)


def drawn(name, dtype=torch.float32):
    """A structure, and tensors of every code that there can be; hot rows stand anywhere."""
    format, generator = FORMATS[name], torch.Generator().manual_seed(0)
    structure = format.bind(Budget(ROWS, COLS))
    p = {}
    for spec in structure.tensors():
        if spec.dtype is None:
            p[spec.name] = torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(dtype)
        elif spec.dtype.itemsize == 1:
            low, high = (0, 256) if spec.dtype == torch.uint8 else (-128, 128)
            p[spec.name] = torch.randint(low, high, spec.shape, generator=generator).to(spec.dtype)
        else:
            places = torch.randperm(ROWS, generator=generator)[: spec.shape[0]]
            p[spec.name] = places.to(spec.dtype) if len(places) == ROWS else places.sort().values
    return structure, p


def indices(count):
    index = torch.randint(0, ROWS, (count,), generator=torch.Generator().manual_seed(1))
    index[: min(count, 2)] = torch.tensor([0, ROWS - 1])[:count]
    return index


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@every_format
def test_rows_are_those_of_plain_pytorch(isa, dtype, name):
    structure, p = drawn(name, dtype)
    with kernels_of(isa):
        for index in (indices(3000), indices(3000)[::3], indices(2), indices(1), indices(0)):
            assert torch.equal(structure.eager_rows(p, index), structure.rows_of(p, index))


@every_format
def test_threads_change_no_bit(name):
    structure, p = drawn(name)
    expected = structure.rows_of(p, indices(3000))
    for count in (1, 2, 3, 4):
        with on_threads(count):
            assert torch.equal(structure.eager_rows(p, indices(3000)), expected)


@pytest.mark.parametrize("name", ["hot rows", "hot product rows", "bands"])
def test_parts_of_codes_take_one_call(name, monkeypatch):
    """Parts are asked one after the other only for gradients, or where one of them is no table of codes."""
    structure, p = drawn(name)
    expected = structure.rows_of(p, indices(500))
    calls = []
    monkeypatch.setattr(coded, "_made", lambda *given, made=coded._made: calls.append(1) or made(*given))
    assert torch.equal(structure.eager_rows(p, indices(500)), expected)
    assert not calls
    trained = {key: t.clone().requires_grad_() if t.is_floating_point() else t for key, t in p.items()}
    rows = structure.eager_rows(trained, indices(500))
    assert rows.requires_grad
    assert torch.equal(rows, expected)
    assert calls


@pytest.mark.parametrize("bad", [-1, ROWS, 2**62, -(2**63)])
@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize("name", ["hot rows", "bands"])
def test_indices_outside_the_table_are_refused(name, count, bad):
    structure, p = drawn(name)
    index = indices(count)
    index[count // 2] = bad
    with pytest.raises(IndexError, match=rf"index {bad} .* table of {ROWS} rows \(valid: 0 to {ROWS - 1}\)"):
        structure.eager_rows(p, index)


def handles(name):
    structure, p = drawn(name)
    return [part.made_of(own).handle() for part, own in structure.with_tensors(p)], (structure, p)


def test_rows_stay_within_the_output():
    parts, (structure, p) = handles("bands")
    index = indices(1000)
    cells = torch.full((1002, COLS), GUARD)
    located = native.module.Located.by_ends(index.data_ptr(), 1000, structure.ends)
    located.rows(0, parts, cells[1:].data_ptr(), 2)
    assert torch.equal(cells[1:-1], structure.rows_of(p, index))
    assert bool((cells[[0, -1]] == GUARD).all())


def test_rows_that_a_part_does_not_have_are_not_read():
    """Ends and places that do not belong to the parts, as damaged tensors may say; nothing is written."""
    parts, _ = handles("hot rows")  # 140 and 560 rows
    cells, index = torch.full((ROWS, COLS), GUARD), torch.arange(ROWS)
    twice = torch.zeros(140, dtype=torch.int64)  # one hot row, named again and again
    for located, rows in (
        (located_by_ends(index, (141, ROWS)), 140),
        (located_by_ends(index, (100, ROWS)), 560),
        (located_by_places(index, twice, ROWS), 560),
        (located_by_places(index[-1:], twice + ROWS, ROWS), 560),
        (located_by_places(index[:1], twice - 5, ROWS), 560),
    ):
        with pytest.raises(IndexError, match=rf"out of range for a table of {rows} rows"):
            located._rows.rows(0, parts, cells.data_ptr(), 2)
    with pytest.raises(ValueError, match="one table of codes is needed for each part"):
        located_by_ends(index, (ROWS,))._rows.rows(0, parts, cells.data_ptr(), 2)
    wide = native.module.Coded.quantized(560, COLS + 1, 0, 8, 0, COLS + 1, 0)
    with pytest.raises(ValueError, match="all parts must have the same number of columns"):
        located_by_ends(index, (140, ROWS))._rows.rows(0, [parts[0], wide], cells.data_ptr(), 2)
    assert bool((cells == GUARD).all())
