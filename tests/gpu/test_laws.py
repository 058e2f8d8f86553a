"""The laws of the conformance suite for the kernels of GPUs, in single precision; double goes to PyTorch."""

from dataclasses import replace

import pytest
import torch
from samples import SAMPLES

from tensorbed.backends import triton
from tensorbed.backends.chain import ChainOfCores
from tensorbed.backends.triton import launching
from tensorbed.backends.triton.launching import Tiles
from tensorbed.structures import registered
from tensorbed.testing import BagParity, EmbeddingParity, StructureLaws, TracingLaws

CHAINS = [kind for kind in SAMPLES if registered()[kind].making is ChainOfCores]
SINGLE = tuple(replace(sample, dtype=torch.float32) for kind in CHAINS for sample in SAMPLES[kind])
BACKEND = ("triton",)


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch):
    """The interpreter takes milliseconds for each program, whatever its size; tiles as they are have their own tests."""
    if triton.interpreted:
        monkeypatch.setattr(launching, "tiles", lambda rank, dtype: Tiles(1024, 128, 128, 4, 1))


@pytest.mark.slow
class TestLaws(StructureLaws):
    samples, impls = SINGLE, BACKEND


@pytest.mark.slow
class TestEmbedding(EmbeddingParity):
    samples, impls = SINGLE, BACKEND


@pytest.mark.slow
class TestEmbeddingBag(BagParity):
    samples, impls = SINGLE, BACKEND


@pytest.mark.slow
class TestTracing(TracingLaws):
    samples, impls = SINGLE, BACKEND


def test_the_chains_are_those_that_there_are():
    assert set(CHAINS) == {"tensor_train", "tensor_ring", "low_rank"}
