"""Fits weighed by how a table is used."""

import pytest
import torch
from torch import nn

import tensorbed as tb
from tensorbed.structures import Use
from tensorbed.testing.samples import most_held

FORMATS = [
    tb.QuantizedRows(bits=8),
    tb.QuantizedRows(bits=8, group=16),
    tb.QuantizedRows(bits=4),
    tb.QuantizedRows(bits=4, group=11),  # groups that do not divide the columns
    tb.QuantizedRows(bits=4, group=48),
    tb.ProductQuantized(parts=12),
    tb.LowRank(rank=8),
    tb.HotRows(),
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(count=2000, cols=48):
    """Hidden vectors with a few large directions, as language models have them."""
    sizes = torch.logspace(1.5, -1, cols)
    return normal(count, cols, seed=1) * sizes @ torch.linalg.qr(normal(cols, cols, seed=2)).Q + 3


def used(cols=48, rows=600):
    h = vectors(cols=cols).double()
    return Use(torch.arange(rows, 0, -1).double() ** 3, h.T @ h / len(h))


def weighed(layer, table, use):
    """The squared error that the use sees."""
    error = (layer.weight.detach() - table).double()
    return float(((error @ use.moment) * error).sum())


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_errors_are_smaller_where_they_are_met(format):
    table, use = normal(600, 48), used()
    plain = tb.Embedding.from_pretrained(table, format)
    fitted = tb.Embedding.from_pretrained(table, format, use=Use(moment=use.moment))
    assert weighed(fitted, table, use) < 0.5 * weighed(plain, table, use)
    assert fitted.fit_error < 1.7 * plain.fit_error
    assert fitted.compression_ratio == plain.compression_ratio


@pytest.mark.parametrize("format", [tb.ProductQuantized(parts=12), tb.ProductQuantized(parts=12, rotate=True)], ids=str)
@pytest.mark.parametrize("bare", [False, True])
def test_rows_that_are_used_are_nearer(format, bare):
    table, counts = normal(600, 48), used().counts
    errors = []
    for use in (None, Use(counts, None if bare else used().moment)):
        made = tb.Embedding.from_pretrained(table, format, use=use)
        errors.append(float((counts[:, None] * (made.weight - table).double().square()).sum()))
    assert not bare or errors[1] < 0.9 * errors[0]
    assert errors[1] < 2 * errors[0]


def test_low_rank_keeps_rows_that_are_used():
    table, counts = normal(600, 48), torch.zeros(600)
    counts[300:308] = 1e9
    made = tb.Embedding.from_pretrained(table, tb.LowRank(rank=8), use=Use(counts))
    assert float((made.weight - table)[300:308].norm() / table[300:308].norm()) < 1e-3


def test_bounds_on_the_error_hold_whatever_the_use():
    table = normal(600, 48) * torch.logspace(0, -3, 48)
    assert tb.Embedding.from_pretrained(table, tb.LowRank(rel_error=0.1), use=used()).fit_error <= 0.1


def test_formats_that_cannot_weigh_fit_as_always():
    table = normal(600, 48)
    for format in (tb.TensorTrain(rank=4), tb.Dense()):
        plain, fitted = (tb.Embedding.from_pretrained(table, format, use=use) for use in (None, used()))
        assert torch.equal(plain.weight, fitted.weight)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("use", [None, used()], ids=["plain", "used"])
def test_fits_are_the_same_each_time(format, use):
    one, other = (tb.Embedding.from_pretrained(normal(600, 48), format, use=use) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.params().values(), other.params().values(), strict=True))


@pytest.mark.parametrize("format", [FORMATS[0], FORMATS[2], FORMATS[5], tb.LowRank(ratio=8), tb.HotRows()], ids=str)
@pytest.mark.parametrize("known", [False, True])
def test_fits_hold_less_than_three_tables(format, known):
    table = normal(40_000, 48).bfloat16()
    use = used(rows=40_000) if known else None
    with most_held() as held:
        tb.Embedding.from_pretrained(table, format, use=use)
    assert held() < 3 * 4 * table.numel()


def test_directions_without_vectors_and_tables_of_zeros():
    flat = Use(moment=torch.zeros(48, 48))
    for format in FORMATS:
        plain = tb.Embedding.from_pretrained(normal(300, 48), format)
        assert tb.Embedding.from_pretrained(normal(300, 48), format, use=flat).fit_error < 1.05 * plain.fit_error
        assert tb.Embedding.from_pretrained(torch.zeros(300, 48), format, use=used(rows=300)).fit_error == 0


@pytest.mark.parametrize("use", [Use(torch.ones(5)), Use(moment=torch.ones(3, 3)), Use(torch.full((600,), torch.nan))])
def test_uses_of_other_tables_are_refused(use):
    with pytest.raises(ValueError, match="of a table of 600 x 48 must be finite, of shape"):
        tb.Embedding.from_pretrained(normal(600, 48), tb.QuantizedRows(), use=use)


def test_hot_rows_are_those_most_looked_up():
    table, counts = normal(600, 48), torch.zeros(600)
    counts[[5, 77, 599]] = 1
    made = tb.Embedding.from_pretrained(table, tb.HotRows(share=3 / 600, hot=tb.Dense()), use=Use(counts))
    assert made.places.tolist() == [5, 77, 599]
    assert torch.equal(made(torch.tensor([599, 5, 77])), table[[599, 5, 77]])
    first = tb.Embedding.from_pretrained(table, tb.HotRows(share=3 / 600, hot=tb.Dense()))
    assert first.places.tolist() == [0, 1, 2]
    assert torch.equal(first(torch.arange(3)), table[:3])


def test_hot_rows_refuse_what_they_cannot_divide():
    for share in (0, 1, -1):
        with pytest.raises(ValueError, match="share="):
            tb.HotRows(share=share)
    with pytest.raises(TypeError, match="hot must be a format"):
        tb.HotRows(hot=8)
    with pytest.raises(ValueError, match="two or more"):
        tb.Embedding.from_pretrained(normal(1, 8), tb.HotRows())


class Language(nn.Module):
    """A tied model of the smallest kind."""

    def __init__(self, rows=3000, cols=16):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(rows, cols), nn.Linear(cols, rows, bias=False)
        self.out.weight = self.words.weight
        self.drop = nn.Dropout(0.5)

    def forward(self, index):
        return self.out(self.drop(self.words(index)).cumsum(1))


def hooks(model):
    return [key for m in model.modules() for key, value in vars(m).items() if "hooks" in key and value]


def test_calibrating_records_rows_and_vectors_and_leaves_nothing_behind(monkeypatch):
    seen = []
    fit = tb.QuantizedRows.fit_to_use
    monkeypatch.setattr(
        tb.QuantizedRows, "fit_to_use", lambda self, t, b, use: seen.append(use) or fit(self, t, b, use)
    )
    model, index = Language(), torch.tensor([[1, 2, 2], [2999, 1, 1]])
    model.words.eval()
    table = model.words.weight.detach().clone()
    tb.compress_(model, tb.QuantizedRows(bits=4), calibrate=lambda m: (m(index), m(input_of(m, index))))
    (use,) = seen
    assert {i: int(c) for i, c in enumerate(use.counts) if c} == {1: 6, 2: 4, 2999: 2}
    h = table[index].cumsum(1).reshape(-1, 16).double()
    assert torch.allclose(use.moment, h.T @ h / len(h))
    assert not hooks(model)
    assert model.training
    assert model.drop.training
    assert not model.words.training


def input_of(model, index):
    assert not model.training
    assert not torch.is_grad_enabled()
    return index.to(torch.int32)


def test_an_error_while_calibrating_leaves_the_model_as_it_was():
    model = Language()
    modules = [type(m) for m in model.modules()]

    def fails(m):
        m(torch.tensor([[1]]))
        raise RuntimeError("no more text")

    with pytest.raises(RuntimeError, match="no more text"):
        tb.compress_(model, tb.QuantizedRows(), calibrate=fails)
    assert not hooks(model)
    assert model.training
    assert [type(m) for m in model.modules()] == modules


@pytest.mark.parametrize("tied", ["keep", "untie"])
def test_calibrated_models_are_nearer_to_what_they_were(tied):
    index = torch.randint(0, 3000, (8, 50), generator=torch.Generator().manual_seed(3))
    errors = []
    for calibrate in (None, lambda m: m(index)):
        model = Language().eval()
        before = model(index).detach()
        tb.compress_(model, tb.QuantizedRows(bits=4, group=8), tied=tied, calibrate=calibrate)
        hidden = Language().eval()
        exact = hidden.words(index).cumsum(1)
        errors.append(float((model.out(exact) - before).square().mean().detach()))
    assert errors[1] < 0.9 * errors[0]


def test_bags_and_keywords_are_recorded():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(3000, 16)

        def forward(self, index, offsets):
            return self.bag(offsets=offsets, input=index)

    model, index, offsets = Bags(), torch.tensor([7, 2999, 7]), torch.tensor([0, 1])
    table = model.bag.weight.detach().clone()
    tb.compress_(model, tb.HotRows(share=2 / 3000, hot=tb.Dense()), calibrate=lambda m: m(index, offsets))
    assert model.bag.places.tolist() == [7, 2999]
    assert torch.allclose(model(index, offsets)[0], table[7])


def test_a_table_that_only_stands_for_another_need_not_run():
    torch.manual_seed(0)
    model = nn.ModuleDict({"shared": nn.Embedding(3000, 8), "words": nn.Embedding(3000, 8), "out": nn.Linear(8, 3000)})
    model["words"].weight = model["out"].weight = model["shared"].weight
    index = torch.tensor([7, 2999, 7])
    with pytest.raises(ValueError, match="calibrate did not run out"):
        tb.compress_(model, tb.HotRows(), calibrate=lambda m: m["words"](index))
    tb.compress_(model, tb.HotRows(share=2 / 3000), calibrate=lambda m: m["out"](m["words"](index)))
    assert model["words"].places.tolist() == [7, 2999]


def test_calibrations_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match="calibrate did not run words, out"):
        tb.compress_(Language(), tb.QuantizedRows(), calibrate=lambda m: None)
    with pytest.raises(ValueError, match="for fit=True"):
        tb.compress_(Language(), tb.TensorTrain(rank=2), fit=False, calibrate=lambda m: None)
    with pytest.raises(ValueError, match="a function that runs the model"):
        tb.compress_(Language(), tb.QuantizedRows(), calibrate=7)
