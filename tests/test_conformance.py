"""Every law, for every registered structure."""

import pytest
from samples import SAMPLES

from tensorbed.backends import native
from tensorbed.structures import registered
from tensorbed.structures.chain import ChainMatrix
from tensorbed.testing import (
    BagParity,
    EmbeddingParity,
    HeadLaws,
    HeadLimits,
    HeadTracing,
    StructureLaws,
    TracingLaws,
)


class TestLaws(StructureLaws):
    samples = tuple(s for group in SAMPLES.values() for s in group)


class TestEmbedding(EmbeddingParity):
    samples = TestLaws.samples


class TestEmbeddingBag(BagParity):
    samples = TestLaws.samples


class TestHead(HeadLaws, HeadLimits):
    samples = TestLaws.samples


class TestTracing(TracingLaws, HeadTracing):
    # The one whose rows, bags and scores are operators of our own first.
    samples = (SAMPLES["tensor_train"][0], *TestLaws.samples)
    by_inductor = ("tensor_train",) if native.available else ()


@pytest.mark.slow
class TestInductor(TracingLaws, HeadTracing):
    samples = tuple(s for s in TestLaws.samples if s.structure.kind != "tensor_train")


def test_every_structure_has_samples():
    assert {kind: [s.structure.kind for s in group] for kind, group in SAMPLES.items()} == {
        kind: [kind] * len(SAMPLES.get(kind, ())) for kind in registered()
    }
    assert all(SAMPLES.values())


def keeps_the_table(structure):
    return structure.numel >= structure.rows * structure.cols and all(s.trainable for s in structure.tensors())


@pytest.mark.parametrize("kind", [k for k, group in SAMPLES.items() if not keeps_the_table(group[0].structure)])
def test_every_structure_has_a_sample_small_enough_for_the_memory_law(kind):
    assert any(sample.is_small for sample in SAMPLES[kind])


def test_no_law_hides_another():
    laws = (StructureLaws, EmbeddingParity, BagParity, HeadLaws, HeadLimits, HeadTracing, TracingLaws)
    names = [n for c in laws for n in vars(c) if n.startswith("test")]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", [k for k, group in SAMPLES.items() if issubclass(registered()[k], ChainMatrix)])
def test_chains_are_sampled_at_every_order(kind):
    assert {len(s.structure.row_factors) for s in SAMPLES[kind]} == {2, 3, 4, 5, 6}
