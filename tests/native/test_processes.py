"""Calls from workers of a DataLoader, and from an interpreter that leaves the kernels out."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.testing import assert_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import on_threads
from worker_datasets import Collated, Refused, Rows, Trained

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def made(kind=tb.Embedding, **options):
    torch.manual_seed(0)
    return kind(5_000, 48, tb.TensorTrain(rank=8), std=1.0, **options)


def collection():
    torch.manual_seed(0)
    formats = (tb.TensorTrain(rank=4), tb.TensorRing(rank=2), tb.LowRank(rank=3))
    return tb.EmbeddingBagCollection(
        {name: tb.EmbeddingBag(5_000, 16, format, mode="sum") for name, format in zip("abc", formats, strict=True)}
    )


def batches(*shape):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 5_000, shape, generator=generator) for _ in range(6)]


def load(dataset, context="fork", **options):
    # A call that hangs in a worker is an error and not the end of the test run.
    options = {"batch_size": None, "num_workers": 2, "timeout": 120, **options}
    return list(DataLoader(dataset, multiprocessing_context=context, **options))


@forks
@pytest.mark.parametrize("threads", [1, 2])
def test_forked_workers_look_up_what_their_parent_does(threads):
    """Also when the parent's pool of threads is awake, which no worker inherits; and the parent goes on with it."""
    layer, ids = made(), batches(2_000)
    with on_threads(threads):
        expected = [layer(one).detach() for one in ids]
        found = load(Rows(layer, ids))
        after = [layer(one).detach() for one in ids]
    for before, rows, again in zip(expected, found, after, strict=True):
        assert torch.equal(rows, before)
        assert torch.equal(again, before)


@forks
def test_forked_workers_pool_bags_and_call_collections():
    bag, layers = made(tb.EmbeddingBag, mode="mean"), collection()

    class Values(Rows):
        def __getitem__(self, k):
            return super().__getitem__(k).values

    with on_threads(2):
        for given, found in zip(batches(300, 10), load(Rows(bag, batches(300, 10))), strict=True):
            assert torch.equal(found, bag(given))
        for given, found in zip(batches(2_000, 3), load(Values(layers, batches(2_000, 3))), strict=True):
            assert torch.equal(found, layers(given).values)


@forks
def test_forked_workers_make_gradients():
    layer, ids = made(), batches(2_000)
    with on_threads(2):
        (wanted, *_) = torch.autograd.grad(layer(ids[0]).square().sum(), list(layer.parameters()))
        found = load(Trained(layer, ids))
        assert_near(found[0], wanted)
        layer(ids[0]).square().sum().backward()
    assert_near(next(iter(layer.parameters())).grad, wanted)


@forks
def test_workers_may_look_up_where_they_collate():
    dataset = Collated(made(), batches(100))
    found = load(dataset, batch_size=3, collate_fn=dataset.collate)
    expected = dataset.layer(torch.stack(dataset.batches))
    assert torch.equal(torch.cat(found), expected)


def test_spawned_workers_look_up_what_their_parent_does():
    layer, ids = made(), batches(500)
    for found, given in zip(load(Rows(layer, ids), "spawn"), ids, strict=True):
        assert torch.equal(found, layer(given))


@forks
def test_an_id_outside_the_table_is_an_error_in_a_worker_too():
    layer, ids = made(), batches(50)
    ids[3][7] = 5_000
    found = load(Refused(layer, ids))
    assert found.pop(3) == "index 5000 is out of range for a table of 5000 rows (valid: 0 to 4999)."
    assert found == [""] * 5
    assert layer(ids[0]).shape == (50, 48)


CALLS = """
import sys
import torch
import tensorbed as tb


def calls():
    found = {}
    ids = torch.randint(0, 3_000, (12, 7), generator=torch.Generator().manual_seed(5))
    formats = {"train": tb.TensorTrain(rank=5), "ring": tb.TensorRing(rank=3), "low rank": tb.LowRank(rank=4)}
    for name, format in formats.items():
        torch.manual_seed(0)
        layer = tb.Embedding(3_000, 48, format, padding_idx=3, std=1.0, dtype=torch.float64)
        bag = tb.EmbeddingBag(3_000, 48, format, mode="sum", std=1.0, dtype=torch.float64)
        layers = tb.EmbeddingBagCollection({"a": bag, "b": tb.EmbeddingBag(3_000, 8, format, dtype=torch.float64)})
        weights = torch.linspace(-1, 1, 84, dtype=torch.float64).reshape(12, 7).requires_grad_()
        outs = {
            "rows": layer(ids),
            "bags": bag(ids, per_sample_weights=weights),
            "collection": layers({"a": ids, "b": ids.T.reshape(12, 7)}).values,
        }
        for what, out in outs.items():
            tensors = [*layer.parameters(), *layers.parameters(), weights]
            grads = torch.autograd.grad(out.square().sum(), tensors, allow_unused=True)
            found[name, what] = [out.detach(), *[grad for grad in grads if grad is not None]]
    return found
"""


def test_without_kernels_the_numbers_are_the_same(tmp_path):
    kept = tmp_path / "calls.pt"
    code = (
        f"{CALLS}\ntorch.set_num_threads(1)\nassert not tb.backends.native.available\ntorch.save(calls(), sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(kept)], check=True, env={**os.environ, "TENSORBED_NATIVE": "0"}, timeout=300
    )
    plain, here = torch.load(kept), {}
    exec(CALLS, here)
    found = here["calls"]()
    assert found.keys() == plain.keys()
    for key, tensors in found.items():
        assert len(tensors) > 2
        for one, other in zip(tensors, plain[key], strict=True):
            assert_near(one, other)
