"""Fits to tables of very large and very small numbers, and under a default device that is not the table's."""

import math

import pytest
import torch
from torch import nn

import tensorbed as tb
from tensorbed.cli.inspection import inspect
from tensorbed.decompose.powers import far_exponent, frobenius, shifted
from tensorbed.fitting import fit_table, relative_error
from tensorbed.structures import Use
from tensorbed.structures.formats import Budget, OutOfRangeError

ROWS, COLS = 24, 12
FORMATS = [
    tb.Dense(),
    tb.LowRank(rank=3),
    tb.LowRank(rel_error=0.3),
    tb.TensorTrain(rank=3),
    tb.TensorTrain(rank=2, shape=((2, 3, 5), (2, 2, 3))),  # with padding, which is filled
    tb.TensorTrain(rel_error=0.3),
    tb.TensorRing(rank=2),
    tb.TensorRing(rel_error=0.3),
    tb.QuantizedRows(bits=8),
    tb.QuantizedRows(bits=4, group=4),
    tb.ProductQuantized(parts=3, sweeps=2),
    tb.ProductQuantized(parts=3, sweeps=2, rotate=True),
    tb.HotRows(),
    tb.HotRows(hot=tb.LowRank(rank=1), rest=tb.ProductQuantized(parts=3, sweeps=2)),
    tb.StraightThrough(bits=8),
    tb.StraightThrough(bits=4, group=4),
]
FEW = [tb.QuantizedRows(bits=4), tb.ProductQuantized(parts=2, sweeps=2), tb.LowRank(ratio=2), tb.TensorTrain(ratio=8)]


def drawn(dtype=torch.float32, kind="normal"):
    table = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-2, 2)
    if kind == "equal":
        table = torch.ones_like(table)
    elif kind == "one huge row":
        table[1:] *= 2.0**-20
    return (table / 4).to(dtype)


def used():
    vectors = torch.randn(100, COLS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Use(torch.arange(ROWS).double(), vectors.T @ vectors / 100)


def table_of(layer, exponent=0):
    return shifted(layer.weight.detach().double(), -exponent)


def distance(one, other):
    return float((one - other).norm() / other.norm())


def refused_or_fitted(table, format):
    """The layer, or why there is none; any other error comes through."""
    try:
        return tb.Embedding.from_pretrained(table, format)
    except OutOfRangeError as error:
        return str(error)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
@pytest.mark.parametrize(
    ("kind", "dtype", "exponent"),
    [
        ("normal", torch.float32, -120),
        ("normal", torch.float32, 123),  # 1e37
        ("normal", torch.float64, -1000),
        ("normal", torch.float64, 664),  # 1e200
        ("equal", torch.float64, 1020),
        ("one huge row", torch.float64, -664),
    ],
    ids=str,
)
def test_a_fit_is_as_good_at_any_scale(format, kind, dtype, exponent):
    table = drawn(dtype, kind)
    expected = tb.Embedding.from_pretrained(table, format).fit_error
    made = tb.Embedding.from_pretrained(shifted(table, exponent), format)
    error = distance(table_of(made, exponent), table.double())
    # A power that does not divide into the tensors that share it rounds them otherwise.
    rounding = 32 * torch.finfo(dtype).eps
    assert error <= expected * 1.001 + rounding
    assert made.fit_error == pytest.approx(error, rel=1e-6, abs=rounding)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_a_fit_to_use_is_as_good_at_any_scale(format):
    use = used()
    for dtype, exponent in ((torch.float32, 123), (torch.float64, -664)):
        table = drawn(dtype)
        expected = tb.Embedding.from_pretrained(table, format, use=use).fit_error
        met = Use(use.counts, shifted(use.moment, math.copysign(900, exponent)))
        made = tb.Embedding.from_pretrained(shifted(table, exponent), format, use=met)
        assert distance(table_of(made, exponent), table.double()) <= expected * 1.001 + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_what_a_dtype_cannot_hold_is_refused_in_words(dtype):
    """Never an error of the linear algebra, an infinity, or a fit worse than that of the same table at 1."""
    info = torch.finfo(dtype)
    ends = math.frexp(info.tiny * info.eps)[1] + 3, math.frexp(info.max)[1]  # three bits are left; all are taken
    for exponent, sentence in zip(ends, ("lose digits in", "does not fit into"), strict=True):
        table = shifted(drawn(torch.float64) * 1.99, exponent).to(dtype)
        near = shifted(table.double(), -exponent)
        for format in FORMATS:
            found = refused_or_fitted(table, format)
            if isinstance(found, str):
                assert f"{sentence} {dtype}" in found
                assert ("no dtype is wider" if dtype == torch.float64 else "give a wider dtype=") in found
                assert not isinstance(format, tb.Dense)
            else:
                expected = tb.Embedding.from_pretrained(near, format).fit_error
                assert distance(table_of(found, exponent), near) <= expected * 1.02 + 8 * info.eps, format


def test_a_fit_that_would_lose_its_digits_tells_what_is_possible():
    table = shifted(drawn(), -144)
    with pytest.raises(ValueError, match=r"go up to 2\.\d+e-44, and the relative error would be .* where 0\.\d+ is"):
        tb.Embedding.from_pretrained(table, tb.LowRank(rel_error=0.3))


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_a_wider_dtype_holds_what_was_refused(format):
    for exponent in (-145, 128):
        table = shifted(drawn(torch.float64) * 1.99, exponent).float()
        near = shifted(table.double(), -exponent)
        made = tb.Embedding.from_pretrained(table, format, dtype=torch.float64)
        expected = tb.Embedding.from_pretrained(near, format).fit_error
        assert distance(table_of(made, exponent), near) <= expected * 1.01 + 1e-6


def test_a_small_part_keeps_its_digits_beside_a_large_one():
    table = drawn()
    table[:, :4] *= 2.0**120
    made = tb.Embedding.from_pretrained(table, tb.ProductQuantized(parts=3))
    assert distance(table_of(made)[:, 4:], table[:, 4:].double()) < 1e-6


def test_hot_rows_and_others_have_a_scale_each():
    table = drawn(torch.float64)
    table[:1], table[1:] = shifted(table[:1], 600), shifted(table[1:], -600)
    made = tb.Embedding.from_pretrained(table, tb.HotRows(hot=tb.Dense(), rest=tb.LowRank(rank=12)))
    assert distance(table_of(made, -600)[1:], shifted(table[1:], 600)) < 1e-12


def test_a_padding_row_that_the_dtype_cannot_hold_is_refused():
    """Of rank 1 both rows are fitted by something between them, which is shorter."""
    table = torch.zeros(ROWS, COLS)
    angle = torch.tensor(0.7)
    table[5, 0], table[6, 0], table[6, 1] = 65600, 65600 * angle.cos(), 65600 * angle.sin()
    assert tb.Embedding.from_pretrained(table, tb.LowRank(rank=1), dtype=torch.float16).weight.isfinite().all()
    with pytest.raises(ValueError, match=r"padding_row does not fit into torch\.float16, .* up to 6\.56e\+04"):
        tb.Embedding.from_pretrained(table, tb.LowRank(rank=1), padding_idx=5, dtype=torch.float16)


def test_norms_of_any_scale():
    for exponent in (-1070, -600, 0, 600, 1021):
        assert frobenius(shifted(torch.full((3, 3), 2.0).double(), exponent)) == shifted(6.0, exponent)
    assert frobenius(torch.zeros(3, 3)) == frobenius(torch.zeros(0, 3)) == 0.0
    assert frobenius(torch.full((4,), 2.0**1023, dtype=torch.float64)) == math.inf  # which no float is
    assert far_exponent(torch.tensor([1e-9, -1e9])) == 0
    table, structure = torch.full((4, 2), 1.7e308, dtype=torch.float64), tb.Dense().bind(Budget(4, 2))
    assert relative_error(table, structure, {"table": table / 2}) == 0.5
    assert relative_error(shifted(table, -2090), structure, {"table": table * 0}) == 1.0


@pytest.mark.parametrize("format", [tb.LowRank(rank=3), tb.QuantizedRows(bits=4), tb.ProductQuantized(parts=3)])
def test_uses_that_cannot_be_are_refused(format):
    moment = used().moment
    crossed = moment.clone()
    crossed[0, 1] = crossed[1, 0] = 100.0
    for bad in (crossed, moment - 3 * torch.eye(COLS)):
        with pytest.raises(ValueError, match=r"moment is no mean of h h\^T"):
            tb.Embedding.from_pretrained(drawn(), format, use=Use(moment=bad))
    for bad in (-1.0, 1e300):
        counts = used().counts.index_fill(0, torch.tensor([3]), bad)
        with pytest.raises(ValueError, match=r"counts go from .*: rows are looked up 0 to 2\*\*63 times"):
            tb.Embedding.from_pretrained(drawn(), format, use=Use(counts))


def test_rows_are_weighed_in_half_precision_as_in_single():
    """Weights that float16 takes for none, and products with the metric beyond what it holds."""
    counts = torch.ones(ROWS).double().index_fill(0, torch.tensor([0]), 1e12)
    table, use = drawn(torch.float16) * 60_000, Use(counts, used().moment)
    single, half = (tb.Embedding.from_pretrained(t, tb.LowRank(rank=3), use=use) for t in (table.float(), table))
    assert half.fit_error == pytest.approx(single.fit_error, rel=1e-2)


class Model(nn.Module):
    def __init__(self, exponent=0, dtype=torch.float32, rows=300):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        words = torch.randn(rows, 8, generator=generator, dtype=torch.float64).clamp(-2, 2) / 4
        self.words = nn.Embedding.from_pretrained(shifted(words, exponent).to(dtype))
        scores = torch.randn(rows, 8, generator=generator)
        self.scores = nn.Linear(8, rows, bias=False, dtype=dtype)
        self.scores.weight.data.copy_(scores)

    def forward(self, index):
        return self.scores(self.words(index))


def test_plans_do_not_depend_on_the_scale():
    expected = tb.plan(Model(), ratio=2, formats=FEW, min_rows=300)
    for exponent in (-120, 110):
        model = Model(exponent)
        plan = tb.plan(model, ratio=2, formats=FEW, min_rows=300)
        assert dict(plan) == dict(expected)
        errors = [[option.error for option in one.options["words"]] for one in (plan, expected)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-3)
        assert tb.compress_(model, plan).entries[0].error == pytest.approx(plan.chosen["words"].error, rel=1e-3)


def test_a_plan_leaves_out_what_the_dtype_cannot_hold():
    model, formats = Model(16, torch.float16), [tb.TensorTrain(rank=8), tb.QuantizedRows(bits=8)]
    model.words.weight.data[:150] *= 1.95
    plan = tb.plan(model, ratio=1.5, formats=formats, include_heads=False, min_rows=300)
    assert [type(option.format) for option in plan.options["words"]] == [tb.Dense, tb.QuantizedRows]
    with pytest.raises(ValueError, match=r"TensorTrain\(rank=8\) is none of them: words: .* does not fit into torch"):
        tb.plan(model, ratio=1.5, formats=formats[:1], include_heads=False, min_rows=300)
    with pytest.raises(ValueError, match=r"words: .* does not fit into torch\.float16"):
        tb.compress_(model, formats[0], include_heads=False, min_rows=300)
    assert type(model.words) is nn.Embedding


def test_the_scale_of_a_table_is_told_at_any_scale():
    expected, found = (inspect(Model(exponent, torch.float64, rows=2000)).layers[0] for exponent in (0, 700))
    assert found.std == pytest.approx(shifted(expected.std, 700))
    assert found.spectrum == pytest.approx(expected.spectrum)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_fits_do_not_depend_on_the_default_device(format):
    table = drawn()
    for use in (None, Use(moment=used().moment)):
        expected = fit_table(table, format, use=use)
        with torch.device("meta"):
            found = fit_table(table, format, use=use)
            layer = tb.Embedding.from_pretrained(table, format, use=use, padding_idx=1)
        assert found.error == expected.error
        assert all(torch.equal(found.params[name], tensor) for name, tensor in expected.params.items())
        assert all(tensor.is_cpu for tensor in layer.state_dict().values())


def test_whole_models_do_not_depend_on_the_default_device():
    index = torch.arange(30).view(3, 10)
    formats = {"words": tb.LowRank(rank=4), "scores": tb.ProductQuantized(parts=4, sweeps=2)}
    told, outputs = [], []
    for model, device in ((Model(), "cpu"), (Model(), "meta")):
        torch.set_default_device(device)
        try:
            plan = tb.plan(model, ratio=2, formats=FEW, min_rows=300)
            report = tb.compress_(model, formats, calibrate=lambda model: model(index))
            spectra = [layer.spectrum for layer in inspect(model).layers]
        finally:
            torch.set_default_device(None)
        told.append((str(plan), [entry.error for entry in report.entries], spectra))
        outputs.append(model(index))
    assert told[0] == told[1]
    assert torch.equal(*outputs)


def test_gradients_of_codebooks_do_not_depend_on_the_default_device():
    layer = tb.Embedding.from_pretrained(drawn(), tb.ProductQuantized(parts=3))
    codes, index, grad = layer.structure.as_codes(layer.params()), torch.tensor([3, 5, 3]), torch.ones(3, COLS)
    with torch.device("meta"):
        found = codes.gradient(index, grad)
    assert torch.equal(found, codes.gradient(index, grad))
    assert found.sum() == grad.sum()


def test_layers_made_on_the_meta_device_on_purpose_stay_there():
    with torch.device("meta"):
        layer = tb.Embedding(ROWS, COLS, tb.TensorTrain(rank=3), padding_idx=0)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
