import torch

import tensorbed as tb
from benchmarks import quantized
from tensorbed.backends import native


def test_both_sides_compute_the_same():
    for make in quantized.FORMATS.values():
        pair = quantized.drawn(300, 64, make(64))
        for name, call in quantized.calls_of(*pair).items():
            with quantized.kernels(False):
                assert not native.available
                plain = call()
            found = call()
            plain, found = (one.values if isinstance(one, tuple) else one for one in (plain, found))
            torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-3, msg=name)


def test_kernels_are_as_they_were_afterwards():
    before = native.available
    with quantized.kernels(False):
        head = quantized.drawn(300, 64, tb.QuantizedRows())[1]
        assert head.explain(1).path == "rows, once"
    assert native.available == before


def test_every_call_has_a_line(monkeypatch):
    monkeypatch.setattr(quantized, "SIZES", {"tiny": (300, 64)})
    monkeypatch.setattr(quantized, "_BURST", 0.0)
    lines = list(quantized.rows_of("tiny", rounds=1))
    assert len(lines) == 4 * len(quantized.FORMATS)
    assert all(float(number) >= 0 for line in lines for number in line[2:])
