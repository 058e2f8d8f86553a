"""What the number of threads may change, and what it may not; calls from several Python threads."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.backends.native.chains import Table, compute
from tensorbed.testing import assert_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import (
    CHAINS,
    by_kernels,
    draw_cores,
    draw_grad,
    draw_ids,
    every_isa_with,
    isas,
    kernels_of,
    on_threads,
)

from tensorbed import _native

if not _native.openmp:
    pytest.skip("compiled without OpenMP", allow_module_level=True)

every_isa = pytest.mark.parametrize("isa", isas())
DTYPES = [torch.float32, torch.float64, torch.bfloat16]

# Enough ids that handing them on alone is worth several threads, for every chain of more than a few columns.
MANY = 3_000
LARGE = {name: chain for name, chain in CHAINS.items() if chain.cols >= 13}


def gradients(out, tensors, seed=5):
    """Gradients for a drawn gradient of the output."""
    return torch.autograd.grad(out, tensors, draw_grad(*out.shape, dtype=out.dtype, seed=seed), retain_graph=True)


def assert_same_on_any_number_of_threads(isa, module, call):
    """Forward to the bit; backward to the bit when repeated, and near from one number to another."""
    found = []
    for count in (1, 2, 4):
        with kernels_of(isa), on_threads(count):
            out = call()
            once, again = (gradients(out, list(module.parameters())) for _ in range(2))
        found.append((out.detach(), once))
        assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    for out, grads in found[1:]:
        assert torch.equal(out, found[0][0])
        for one, other in zip(grads, found[0][1], strict=True):
            assert_near(one, other)


@every_isa_with(["chain"], {name: (chain,) for name, chain in LARGE.items()}, DTYPES)
def test_rows_are_the_same_on_any_number_of_threads(isa, dtype, chain):
    cores, ids = draw_cores(chain, dtype), draw_ids(chain, MANY)
    found = []
    for count in (1, 2, 4):
        with kernels_of(isa), on_threads(count), torch.no_grad():
            found.append(compute([Table(chain, cores, ids)]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@every_isa
@pytest.mark.parametrize("chain", LARGE.values(), ids=LARGE.keys())
def test_gradients_are_repeatable_and_do_not_depend_on_the_threads(isa, chain):
    """To the last bit at one number of threads; across numbers sums are cut elsewhere."""
    cores, ids = draw_cores(chain), draw_ids(chain, MANY)
    grad = draw_grad(MANY, chain.cols)
    with kernels_of(isa):
        _, alone = by_kernels(chain, cores, ids, grad)
        for count in (2, 3, 4):
            with on_threads(count):
                once, again = (by_kernels(chain, cores, ids, grad)[1] for _ in range(2))
            for one, other, wanted in zip(once, again, alone, strict=True):
                assert torch.equal(one, other)
                assert_near(one, wanted)


def test_gradients_may_be_made_on_another_number_of_threads_than_rows():
    chain = CHAINS["ring, order 4"]
    cores, ids = draw_cores(chain), draw_ids(chain, MANY)
    grad = draw_grad(MANY, chain.cols)
    _, wanted = by_kernels(chain, cores, ids, grad)
    for forward, backward in ((1, 4), (4, 1), (3, 2)):
        with on_threads(forward):
            rows = compute([Table(chain, cores, ids)])
        with on_threads(backward):
            made = torch.autograd.grad(rows, cores, grad)
        for one, other in zip(made, wanted, strict=True):
            assert_near(one, other)


def test_the_runtime_may_give_fewer_threads_than_asked_for():
    """Every share of the work is done all the same."""
    code = """
import torch, tensorbed as tb
torch.set_num_threads(1)
layer = tb.Embedding(1_000, 48, tb.TensorTrain(rank=9), dtype=torch.float64, std=1.0)
ids = torch.arange(5_000) * 7 % 1_000
found = []
for threads in (1, 3):
    torch.set_num_threads(threads)
    rows = layer(ids)
    found.append([rows.detach(), *torch.autograd.grad(rows.sin().sum(), list(layer.parameters()))])
assert torch.equal(found[0][0], found[1][0])
for one, other in zip(*found):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
print("the same")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_THREAD_LIMIT": "2"},
        timeout=300,
    )
    assert ran.stdout.strip() == "the same", ran.stderr


def bags_of(layer, *, seed=3, count=300, most=40):
    """Ids, offsets and weights of bags of 0 to ``most`` ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most, (count,), generator=generator)
    lengths[0] = 4 * most
    n = int(lengths.sum())
    ids = torch.randint(0, layer.num_embeddings, (n,), generator=generator)
    return ids, lengths.cumsum(0) - lengths, draw_grad(n, 1, layer._dtype)[:, 0]


FORMATS = {"train": tb.TensorTrain(rank=9), "ring": tb.TensorRing(rank=3), "low rank": tb.LowRank(rank=5)}


USES = {f"{name}-{mode}": (mode, format) for mode in ("sum", "mean", "weighted") for name, format in FORMATS.items()}


@every_isa_with(["mode", "format"], USES, DTYPES)
def test_bags_are_the_same_on_any_number_of_threads(isa, dtype, mode, format):
    torch.manual_seed(0)
    layer = tb.EmbeddingBag(
        5_000, 48, format, mode="sum" if mode == "weighted" else mode, padding_idx=7, dtype=dtype, std=1.0
    )
    ids, offsets, weights = bags_of(layer)
    given = (ids, offsets, weights if mode == "weighted" else None)
    assert_same_on_any_number_of_threads(isa, layer, lambda: layer(*given))


def collection():
    """Tables of every structure and of very different sizes: no two get the same share of the threads."""
    torch.manual_seed(0)
    options = {"mode": "sum", "std": 1.0}
    return tb.EmbeddingBagCollection(
        {
            "tiny": tb.EmbeddingBag(2, 5, tb.LowRank(rank=1), **options),
            "long": tb.EmbeddingBag(100_000, 48, tb.TensorTrain(rank=8), **options),
            "small": tb.EmbeddingBag(9, 3, tb.Dense(), **options),
            "ring": tb.EmbeddingBag(3_000, 60, tb.TensorRing(rank=4, order=4), padding_idx=3, **options),
            "matrix": tb.EmbeddingBag(700, 31, tb.LowRank(rank=6), **options),
            "deep": tb.EmbeddingBag(5_000, 32, tb.TensorTrain(rank=5, order=5), **options),
        }
    )


def batches():
    layers = collection()
    rows = [layer.num_embeddings for layer in layers.tables.values()]
    generator = torch.Generator().manual_seed(8)
    ids = torch.stack([torch.randint(0, n, (1_500,), generator=generator) for n in rows], 1)
    bags = {name: bags_of(layer)[:2] for name, layer in layers.tables.items()}
    return {"ids": ids, "bags": bags}


@every_isa
@pytest.mark.parametrize("given", ["ids", "bags"])
def test_collections_are_the_same_on_any_number_of_threads(isa, given):
    layers, batch = collection(), batches()[given]
    assert_same_on_any_number_of_threads(isa, layers, lambda: layers(batch).values)


@pytest.mark.parametrize("given", ["ids", "bags"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_collection_computes_what_its_tables_do(given, count):
    layers, batch = collection(), batches()[given]
    with on_threads(count):
        out, split = layers(batch)
        for k, (name, layer) in enumerate(layers.tables.items()):
            own = layer(batch[:, k : k + 1]) if given == "ids" else layer(*batch[name])
            assert torch.equal(split[name], own), name
            for one, other in zip(
                gradients(split[name], list(layer.parameters())), gradients(own, list(layer.parameters())), strict=True
            ):
                assert_near(one, other)
    assert out.shape == (split["tiny"].shape[0], 179)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shared", [True, False], ids=["the same layer", "different layers"])
def test_python_threads_get_what_one_thread_gets(shared, count):
    """Eight at once, each with batches of its own, forward and back."""
    torch.manual_seed(0)
    formats = [tb.TensorTrain(rank=8), tb.TensorRing(rank=3, order=4), tb.LowRank(rank=5), tb.TensorTrain(rank=2)]
    layers = [tb.Embedding(10_000, 48, format, std=1.0) for format in formats]
    jobs = []
    for k in range(24):
        ids = torch.randint(0, 10_000, (2_000 if k % 3 else 3,), generator=torch.Generator().manual_seed(k))
        jobs.append((layers[0 if shared else k % 4], ids))

    def work(job):
        layer, ids = job
        out = layer(ids)
        return out.detach(), gradients(out, list(layer.parameters()))

    with on_threads(count):
        serial = [work(job) for job in jobs]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(work, jobs))
    for (rows, grads), (wanted, wanted_grads) in zip(found, serial, strict=True):
        assert torch.equal(rows, wanted)
        for one, other in zip(grads, wanted_grads, strict=True):
            assert_near(one, other)


def test_an_error_in_one_python_thread_is_its_own():
    torch.manual_seed(0)
    layer = tb.Embedding(1_000, 48, tb.TensorTrain(rank=8))
    good, bad = torch.arange(1_000), torch.full((1_000,), 1_000)

    def work(ids):
        try:
            return layer(ids).detach()
        except IndexError as problem:
            return str(problem)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, [good, bad] * 16))
    assert all(torch.equal(rows, layer(good)) for rows in found[::2])
    assert set(found[1::2]) == {"index 1000 is out of range for a table of 1000 rows (valid: 0 to 999)."}


def test_ids_that_another_thread_writes_to_end_no_process():
    """Good and bad ids in turn while rows are computed: each call gives rows or refuses, and none ends the process."""
    code = """
import threading, torch, tensorbed as tb
torch.manual_seed(0)
table = torch.randn(200, 64)
formats = tb.QuantizedRows(), tb.QuantizedRows(bits=4), tb.ProductQuantized(parts=8), tb.TensorTrain(rank=4)
layers = [tb.Embedding.from_pretrained(table, format) for format in formats]
bags = tb.EmbeddingBag.from_pretrained(table, tb.TensorTrain(rank=4), mode="sum", include_last_offset=True)
codes = layers[2].codes
ids, offsets, over = torch.zeros(4_000, dtype=torch.int64), torch.arange(0, 4_001, 500), threading.Event()

def write():
    good = offsets.clone(), codes.clone()
    while not over.is_set():
        for step in (2**20, 0):
            ids.add_(step).clamp_(0, step)
            offsets[2:-1] = good[0][2:-1] - step
            codes[:] = 255 if step else good[1]

other = threading.Thread(target=write)
other.start()
counts = {"rows": 0, "refused": 0}
try:
    for _ in range(300):
        for call in (*(lambda layer=layer: layer(ids) for layer in layers), lambda: bags(ids, offsets)):
            try:
                call()
                counts["rows"] += 1
            except (IndexError, ValueError):
                counts["refused"] += 1
finally:
    over.set()
    other.join()
print(counts["rows"] + counts["refused"])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.stdout.strip() == "1500", (ran.returncode, ran.stderr[-2000:])
