"""Tables of codes by the kernels for GPUs, in the interpreter: rows, their gradients, scores and sums."""

import pytest
import torch
from drawing import integers, normal

import tensorbed as tb
from tensorbed.backends import triton
from tensorbed.structures.formats import Budget

if triton.reason:
    pytest.skip(triton.reason, allow_module_level=True)

from tensorbed.backends.triton import codes

pytestmark = pytest.mark.tiles_as_they_are
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)

# Odd and even columns, groups that divide them and that do not, parts of several widths, codebooks of few entries.
TABLES = {
    "8 bits": (tb.QuantizedRows(), 70, 130),
    "8 bits, one column": (tb.QuantizedRows(), 5, 1),
    "8 bits, groups of 7": (tb.QuantizedRows(group=7), 33, 65),
    "4 bits": (tb.QuantizedRows(bits=4), 70, 96),
    "4 bits, odd columns": (tb.QuantizedRows(bits=4, group=1000), 77, 33),
    "4 bits, a last group of one": (tb.QuantizedRows(bits=4), 77, 33),
    "parts of 1": (tb.ProductQuantized(parts=67), 300, 67),
    "parts of 2": (tb.ProductQuantized(parts=33), 90, 66),
    "parts of 13": (tb.ProductQuantized(parts=1), 300, 13),
    "rotated": (tb.ProductQuantized(parts=6, rotate=True), 300, 12),
}
every_table = pytest.mark.parametrize("name", TABLES)


def drawn(guards, name, dtype=torch.float32, grad=False):
    """A structure, and tensors of every code and step that there can be, between guards."""
    format, rows, cols = TABLES[name]
    structure, p = format.bind(Budget(rows, cols)), {}
    for seed, spec in enumerate(structure.tensors()):
        if spec.dtype is None:
            p[spec.name] = guards.copy(normal(*spec.shape, seed=seed, dtype=dtype).requires_grad_(grad))
            continue
        low, high = (0, getattr(structure, "words", 256)) if spec.dtype == torch.uint8 else (-128, 128)
        p[spec.name] = guards.copy(integers(low, high, spec.shape, seed=seed, dtype=spec.dtype))
    return structure, p


def indices(guards, structure, count=40):
    index = integers(0, structure.rows, (count,), seed=1)
    index[:2] = torch.tensor([0, structure.rows - 1])
    return guards.copy(index)


@every_dtype
@every_table
def test_rows_are_those_of_plain_pytorch(guards, dtype, name):
    structure, p = drawn(guards, name, dtype)
    for index in (indices(guards, structure), indices(guards, structure)[::3], indices(guards, structure, 2)):
        made, plain = codes.rows(structure.made_of(p), index), structure.rows_of(p, index)
        assert made.dtype == dtype
        if "rotation" in p:
            torch.testing.assert_close(made, plain)
        else:
            assert torch.equal(made, plain)


@every_dtype
@every_table
def test_gradients_are_those_of_plain_pytorch(guards, dtype, name):
    structure, p = drawn(guards, name, dtype, grad=True)
    index = indices(guards, structure)
    leaves = [tensor for tensor in p.values() if tensor.requires_grad]
    weights = normal(40, structure.cols, seed=2, dtype=dtype)
    made = torch.autograd.grad(codes.rows(structure.made_of(p), index), leaves, weights)
    exact = {n: t.detach().double().requires_grad_() if t.is_floating_point() else t for n, t in p.items()}
    wide = [tensor for tensor in exact.values() if tensor.requires_grad]
    wanted = torch.autograd.grad(structure.take(exact, index), wide, weights.double())
    for one, other in zip(made, wanted, strict=True):
        assert one.dtype == dtype
        size = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=4 * torch.finfo(dtype).eps, atol=2e-6 * size)


@every_table
def test_indices_outside_the_table_are_masked(guards, name, monkeypatch):
    """Besides the error that comes when the device gets to it."""
    monkeypatch.setattr(torch, "_assert_async", lambda *told: None)
    structure, p = drawn(guards, name)
    index = guards.copy(torch.tensor([0, structure.rows, -1, 2**40, 1]))
    rows = codes.rows(structure.made_of(p), index)
    assert (rows[1:4] == 0).all()
    torch.testing.assert_close(rows[[0, 4]], structure.take(p, torch.tensor([0, 1])))


def test_codes_that_name_no_entry_are_masked(guards):
    structure, p = drawn(guards, "parts of 2")
    p["codes"][3] = structure.words
    assert (codes.rows(structure.made_of(p), guards.copy(torch.tensor([3]))) == 0).all()
    x = guards.copy(torch.ones(structure.cols, 2))
    out = guards.empty((structure.rows, 2), torch.float32, x.device)
    codes.scores(structure.as_codes(p), x, out)
    assert (out[3] == 0).all()
    tables = guards.copy(torch.ones(structure.parts * structure.words, 2))
    codes.sums(structure.as_codes(p), tables, out)
    assert (out[3] == 0).all()
    assert (out[4] == structure.parts).all()


@every_dtype
@every_table
def test_scores_are_products_with_the_rows(guards, dtype, name):
    structure, p = drawn(guards, name, dtype)
    exact = {n: t.double() if t.is_floating_point() else t for n, t in p.items()}
    coded = structure.as_codes(p)
    table = getattr(structure, "unrotated", None) or structure
    for n, (start, stop) in ((1, (0, structure.rows)), (5, (1, structure.rows - 1)), (40, (2, 3)), (3, (4, 4))):
        x = guards.copy(normal(structure.cols, n, seed=n, dtype=dtype))
        rows = table.full(exact)[start:stop]
        # Numbers are multiplied in the dtype of the vectors, sums are single.
        wanted, size = rows @ x.double(), rows.abs() @ x.double().abs()
        out = guards.empty((stop - start, n), dtype, x.device)
        codes.scores(coded.part(start, stop), x, out)
        assert ((out.double() - wanted).abs() <= (1.5 * torch.finfo(dtype).eps + 2e-6) * size + 1e-7).all()


@every_dtype
@pytest.mark.parametrize("name", ["parts of 1", "parts of 2", "parts of 13"])
def test_sums_are_those_of_the_entries_named(guards, dtype, name):
    structure, p = drawn(guards, name, dtype)
    for n in (1, 20, 70):
        tables = normal(structure.parts, structure.words, n, seed=n, dtype=dtype)
        out = guards.empty((structure.rows, n), dtype, tables.device)
        codes.sums(structure.as_codes(p), guards.copy(tables.flatten(0, 1)), out)
        every = [tables[m].double()[p["codes"][:, m].long()] for m in range(structure.parts)]
        wanted, size = sum(every), sum(entry.abs() for entry in every)
        assert ((out.double() - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + 1e-6 * size).all()
