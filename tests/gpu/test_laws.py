"""The laws of the conformance suite for the kernels of GPUs, in single precision; double goes to PyTorch."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from samples import SAMPLES

from tensorbed.backends.chain import ChainOfCores
from tensorbed.backends.coded import Coded
from tensorbed.structures import registered
from tensorbed.testing import BagParity, EmbeddingParity, HeadLaws, StructureLaws, TracingLaws, heads
from tensorbed.testing.samples import one_of_each

CHAINS = [kind for kind in SAMPLES if registered()[kind].making is ChainOfCores]
CODES = [kind for kind in SAMPLES if issubclass(registered()[kind].making or object, Coded)]
SINGLE = tuple(replace(sample, dtype=torch.float32) for kind in CHAINS + CODES for sample in SAMPLES[kind])
BACKEND = ("triton",)


class TestFirstSamples(StructureLaws, EmbeddingParity, BagParity, TracingLaws):
    """What continuous integration has time for: the rest of the suite is slow."""

    samples, impls = tuple(one_of_each(SINGLE)), BACKEND


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


@pytest.mark.slow
class TestHeads(HeadLaws):
    samples = SINGLE

    @pytest.fixture(autouse=True)
    def by_the_kernels(self, monkeypatch):
        monkeypatch.setattr(heads, "make", partial(heads.make, impl="triton"))


def test_the_tables_are_those_that_there_are():
    assert set(CHAINS) == {"tensor_train", "tensor_ring", "low_rank"}
    assert set(CODES) == {"quantized_rows", "product_quantized"}
