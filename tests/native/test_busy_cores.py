"""Calls that are helped as where other processes keep the cores busy: by threads that sleep, and that may not come."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import native

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import CHAINS, by_kernels, draw_cores, draw_grad, draw_ids, on_threads

from tensorbed import _native

if not _native.openmp:
    pytest.skip("compiled without OpenMP", allow_module_level=True)

MANY = 3_000  # enough ids that handing them on alone is worth several threads
LARGE = {name: chain for name, chain in CHAINS.items() if chain.cols >= 13}
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")


@contextmanager
def busy_cores():
    _native.expect_busy_cores(600)
    try:
        yield
    finally:
        _native.expect_busy_cores(0)


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("chain", LARGE.values(), ids=LARGE.keys())
def test_busy_cores_change_no_bit(chain, threads):
    cores, ids, grad = draw_cores(chain), draw_ids(chain, MANY), draw_grad(MANY, chain.cols)
    with on_threads(threads):
        wanted_rows, wanted = by_kernels(chain, cores, ids, grad)
        with busy_cores():
            for _ in range(5):  # who takes which share differs
                rows, grads = by_kernels(chain, cores, ids, grad)
                assert torch.equal(rows, wanted_rows)
                assert all(torch.equal(one, other) for one, other in zip(grads, wanted, strict=True))


def test_tables_of_codes_and_collections_are_the_same_beside_busy_cores():
    torch.manual_seed(0)
    table = torch.randn(4_000, 64)
    coded = [tb.Embedding.from_pretrained(table, format) for format in (tb.QuantizedRows(), tb.QuantizedRows(bits=4))]
    bags = [tb.EmbeddingBag(3_000, 32, tb.TensorTrain(rank=rank), mode="sum") for rank in (2, 8, 5)]
    layers = tb.EmbeddingBagCollection({f"table {k}": bag for k, bag in enumerate(bags)})
    ids = torch.randint(0, 3_000, (4_000, 3))
    with on_threads(3):
        wanted = [*(layer(ids) for layer in coded), layers(ids).values]
        with busy_cores():
            made = [*(layer(ids) for layer in coded), layers(ids).values]
    assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))


def test_what_one_share_refuses_is_raised_and_the_next_call_works():
    torch.manual_seed(0)
    layer = tb.Embedding.from_pretrained(torch.randn(200, 64), tb.ProductQuantized(parts=8))
    ids = torch.arange(4_000) % 199
    ids[-1] = 199
    with on_threads(4), busy_cores():
        wanted = layer(ids)
        good = int(layer.codes[199, 0])
        layer.codes[199, 0] = 250
        with pytest.raises(IndexError, match="a code names entry 250 of codebooks of 200"):
            layer(ids)
        layer.codes[199, 0] = good
        assert torch.equal(layer(ids), wanted)


def test_python_threads_get_what_one_thread_gets():
    """The helpers are with one caller at a time; the others do without."""
    torch.manual_seed(0)
    layer = tb.Embedding(10_000, 48, tb.TensorTrain(rank=8), std=1.0)
    batches = [torch.randint(0, 10_000, (2_000,)) for _ in range(40)]
    with on_threads(2), busy_cores(), torch.no_grad():
        wanted = [layer(ids) for ids in batches]
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(layer, batches))
    assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))


SETUP = """
import os, torch, tensorbed as tb
from tensorbed import _native
torch.set_num_threads(3)
torch.manual_seed(0)
layer = tb.Embedding(5_000, 48, tb.TensorTrain(rank=8)).requires_grad_(False)
ids = torch.randint(0, 5_000, (2_000,))
_native.expect_busy_cores(600)
"""


def printed(code):
    ran = subprocess.run([sys.executable, "-c", SETUP + code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@linux
def test_helpers_are_made_once_and_are_one_fewer_than_the_threads():
    code = """
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
layer(ids)
after = threads()
for _ in range(20):
    layer(ids)
print(after - before, threads() - after)
"""
    assert printed(code) == "2 0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_does_without_the_helpers_of_its_parent():
    code = """
wanted = bytes(layer(ids).numpy())
child = os.fork()
if child == 0:
    os._exit(0 if bytes(layer(ids).numpy()) == wanted else 1)
print(os.waitpid(child, 0)[1])
"""
    assert printed(code) == "0"
