import pytest
import torch

import tensorbed as tb
from benchmarks import composed, fit


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(composed, "LOOKUPS", 40)
    monkeypatch.setattr(composed, "VECTORS", (1, 3))
    monkeypatch.setattr(composed, "fastest", lambda call: [call(), 1.0][1])


def test_every_call_has_a_line_with_its_parts(tiny):
    for make, parts in ((composed.hot_rows, 2), (composed.dense_head, 1)):
        lines = composed.lines(make(300, 64), rounds=1)
        assert lines
        for _, whole, beside, ratio in lines:
            assert beside.count("1.00") == parts
            assert float(ratio) == pytest.approx(float(whole) / parts, abs=0.01)


def test_the_parts_of_hot_rows_look_up_the_same_rows(tiny):
    whole, parts = composed.hot_rows(300, 64)["40 lookups"]
    assert whole().shape[0] == sum(part().shape[0] for part in parts) == 40


def test_heads_in_bands_have_a_line_and_a_peak(tiny, monkeypatch):
    monkeypatch.setattr(composed, "BANDS_VECTORS", 5)
    ((name, whole, beside, _),) = composed.lines(composed.bands_head(300, 64), rounds=1)
    assert (name, whole, beside) == ("loss of 5 and backward", "1.00", "1.00")
    assert composed.peak_of(tb.Bands(), 300, 64).bytes >= 0


def test_both_sides_of_a_dense_head_compute_the_same(monkeypatch):
    shown = []
    monkeypatch.setattr(composed, "VECTORS", (3,))
    monkeypatch.setattr(composed, "_off", lambda call: lambda: shown.append(call()))
    for whole, parts in composed.dense_head(300, 64).values():
        whole()
        parts[0]()
    for ours, theirs in zip(shown[::2], shown[1::2], strict=True):
        ours, theirs = (one.values if isinstance(one, tuple) else one for one in (ours, theirs))
        torch.testing.assert_close(ours, theirs)


def test_orders_are_compared_at_the_same_ratio():
    table = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    columns, plain, permuted = fit.orders(table, ratios=(4,))
    assert columns == ("seconds", "relative error", "ratio")
    assert [line[0] for line in (plain, permuted)] == [
        "TensorTrain(ratio=4)",
        "Permuted(TensorTrain(ratio=4), order='clusters')",
    ]
    assert min(float(line[-1]) for line in (plain, permuted)) >= 4
