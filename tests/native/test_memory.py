"""Peak memory of forward and backward, kernels included: no dispatch mode sees what they allocate."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tensorbed.backends import native

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)
if not Path("/proc/self/clear_refs").exists():
    pytest.skip("reads the peak from /proc", allow_module_level=True)

# Forward and backward of one batch in a process of its own, after one that does not count.
CHILD = """
import ctypes, json, sys
import torch, tensorbed as tb

rows, cols, format, dtype, n, bag = json.loads(sys.argv[1])
kind, options = format
torch.set_num_threads(2)
torch.manual_seed(0)
made = tb.EmbeddingBag if bag else tb.Embedding
extra = {"mode": "sum"} if bag else {}
layer = made(rows, cols, getattr(tb, kind)(**options), dtype=getattr(torch, dtype), **extra)
index = torch.randint(0, rows, (n // bag, bag) if bag else (n,))
gradient = torch.randn(n // bag if bag else n, cols, dtype=layer.core_0.dtype)
layer(index).backward(gradient)  # threads, and code that is loaded when it is first needed
layer.zero_grad(set_to_none=True)
ctypes.CDLL("libc.so.6").malloc_trim(0)
status = lambda name: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(name)) * 1024
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
layer(index).backward(gradient)
print(json.dumps({"extra": status("VmHWM") - before, "cores": sum(p.nbytes for p in layer.parameters())}))
"""

CASES = {
    "train in bfloat16": (267_735, 512, ("TensorTrain", {"rank": 96}), "bfloat16", 4_096, 0),
    "ring in bags": (1_000_000, 64, ("TensorRing", {"rank": 32, "order": 4}), "float32", 64_000, 20),
}
# The same law of other sizes, in processes of seconds each.
MORE_CASES = {
    "train": (267_735, 256, ("TensorTrain", {"rank": 32}), "float32", 8_192, 0),
    "train of order 5": (267_735, 256, ("TensorTrain", {"rank": 64, "order": 5}), "float32", 4_096, 0),
    "ring": (1_000_000, 64, ("TensorRing", {"rank": 32, "order": 4}), "float32", 64_000, 0),
    "bags": (11_000_000, 64, ("TensorTrain", {"rank": 32}), "float32", 100_000, 20),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in MORE_CASES.items()),
    ],
)
def test_forward_and_backward_hold_little_beside_the_rows_and_the_cores(case):
    _, cols, _, dtype, n, _ = case
    command = [sys.executable, "-c", CHILD, json.dumps(case)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    unpooled = n * cols * (2 if dtype == "bfloat16" else 4)
    assert found["extra"] <= 3 * unpooled + 3 * found["cores"] + 8e6, f"{found['extra'] / 1e6:.1f} MB"
