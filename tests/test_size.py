"""Compressing goes table by table: what is held beside the model is a few times one table, however many there are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorbed as tb
from tensorbed.testing.samples import most_held

FORMATS = {
    "quantized_rows": tb.QuantizedRows(),
    "quantized_rows, 4 bits": tb.QuantizedRows(bits=4),
    "product_quantized": tb.ProductQuantized(parts=2, sweeps=1),
    "low_rank": tb.LowRank(ratio=8),
    "tensor_train": tb.TensorTrain(ratio=8),
}
ROWS, COLS = 10_000, 32


def held(count, format, dtype, use):
    """The most bytes held at once beside a model of so many tables, and what it becomes."""
    torch.manual_seed(0)
    tables = {f"t{k}": nn.Embedding(ROWS, COLS, dtype=dtype) for k in range(count)}
    model = nn.ModuleDict(tables)
    with most_held() as most:
        made = use(model, format)
    return most(), made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_three_more_tables_take_no_more_than_what_they_become(format, dtype):
    one, report = held(1, format, dtype, tb.compress_)
    four, _ = held(4, format, dtype, tb.compress_)
    assert four <= one + 3 * report.entries[0].bytes_after + 2**16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planning_takes_no_more_for_more_tables(dtype):
    def plan(model, format):
        return tb.plan(model, ratio=1, formats=[tb.QuantizedRows(), tb.LowRank(ratio=4), tb.TensorTrain(ratio=8)])

    one, _ = held(1, None, dtype, plan)
    assert held(3, None, dtype, plan)[0] <= one + 2**16


@pytest.mark.parametrize("ratio", [2, 4, 16])
@pytest.mark.parametrize("kind", [tb.LowRank, tb.TensorTrain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fit_holds_less_than_three_tables(kind, ratio, dtype):
    """And some blocks in float64."""
    torch.manual_seed(0)
    table = torch.randn(150_000, 64, dtype=dtype)
    with most_held() as most:
        tb.Embedding.from_pretrained(table, kind(ratio=ratio))
    assert most() <= 3 * 4 * table.numel() + 2**25


# A model of two gigabytes in a process of its own, after a small one that does not count.
CHILD = """
import ctypes, json, sys
import torch, tensorbed as tb
from torch import nn

format, dtype, count = json.loads(sys.argv[1])
kind, options = format
torch.set_num_threads(2)
torch.manual_seed(0)
format, dtype = getattr(tb, kind)(**options), getattr(torch, dtype)

def table(rows):
    made = nn.Embedding(rows, 256, dtype=dtype, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for part in made.weight.split(2**14):
            part.copy_(torch.randn(part.shape))
    return made

tb.compress_(nn.ModuleDict({"small": table(4_000)}), format)
model = nn.ModuleDict({f"t{k}": table(1_000_000) for k in range(count)})
ctypes.CDLL("libc.so.6").malloc_trim(0)
status = lambda name: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(name)) * 1024
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
report = tb.compress_(model, format)
print(json.dumps({"extra": status("VmHWM") - before, "model": report.bytes_before, "ratio": report.ratio}))
"""
LARGE = {
    "quantized_rows": ("QuantizedRows", {}),
    "product_quantized": ("ProductQuantized", {"parts": 8, "sweeps": 1}),
    "low_rank": ("LowRank", {"ratio": 4}),
    "tensor_train": ("TensorTrain", {"ratio": 8}),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize(("dtype", "count"), [("bfloat16", 4), ("float32", 2)])
@pytest.mark.parametrize("format", LARGE.values(), ids=list(LARGE))
def test_two_gigabytes_are_compressed_beside_three_times_the_largest_table(format, dtype, count):
    command = [sys.executable, "-c", CHILD, json.dumps([format, dtype, count])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["model"] > 2e9
    largest = 1_000_000 * 256 * 4
    assert found["extra"] < 3 * largest, f"{found['extra'] / largest:.2f} times the largest table"
