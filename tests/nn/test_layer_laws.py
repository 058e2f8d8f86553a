"""What layers do over any structure, and no structure can break: their states, options, refusals and pooling."""

import copy
import io
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from others import Coded, Scaled
from samples import SAMPLES

from tensorbed.backends.chain import ChainOfCores
from tensorbed.nn import Embedding, EmbeddingBag, Head
from tensorbed.testing import Sample
from tensorbed.testing.heads import vectors
from tensorbed.testing.layers import HALF, as_torch, assert_gradients_rounded_once
from tensorbed.testing.samples import (
    Conformance,
    assert_rounded_once,
    assert_same,
    leaves_of,
    make,
    on,
    one_of_each,
    spread,
    those,
)

EVERY = tuple(sample for group in SAMPLES.values() for sample in group)
OTHERS = (Sample(Scaled(), 300, 5), Sample(Scaled(), 12, 1), Sample(Coded(), 700, 60))


class TestEmbedding(Conformance):
    samples = (*EVERY, *OTHERS)

    @on(one_of_each)
    def test_the_padding_row_and_fitted_tables(self, sample):
        layer = make(sample, padding_idx=1)
        if sample.structure.can_initialise:
            assert layer(torch.tensor([1])).count_nonzero() == 0
            assert layer.weight[1].count_nonzero() == 0
        assert torch.equal(layer(torch.tensor([1]))[0], layer.weight[1])
        assert (layer.weight[[0, 2]].abs().sum(1) > 0).all()
        table = layer.weight.detach().clone()
        table[1] = torch.arange(sample.cols)
        if not sample.format.can_fit:
            with pytest.raises(ValueError, match="cannot be fitted to a table"):
                Embedding.from_pretrained(table, sample.format)
            return
        thawed = Embedding.from_pretrained(table, sample.format, freeze=False)
        assert all(p.requires_grad for p in thawed.parameters())
        fitted = Embedding.from_pretrained(table, sample.format, padding_idx=1)
        assert not any(p.requires_grad for p in fitted.parameters())
        assert fitted.fit_error is not None
        assert torch.equal(fitted(torch.tensor([1, 1]))[0], table[1])
        assert torch.equal(fitted.weight[1], table[1])
        stored = fitted.structure.bytes(torch.float64) + sample.cols * 8
        assert fitted.compression_ratio == pytest.approx(table.nbytes / stored)

    @on(one_of_each)
    def test_state(self, sample, draw):
        layer = make(sample, padding_idx=3)
        state = layer.state_dict()
        assert set(state) == {*(spec.name for spec in layer.structure.tensors()), "padding_row"}
        index = draw.index(8)
        expected = layer(index)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        other = make(sample, padding_idx=3)
        with torch.no_grad():
            for tensor in other.params().values():
                tensor.zero_()
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(other(index), expected)
        with pytest.raises(RuntimeError, match=r"Embedding\.from_pretrained"):  # a dense checkpoint, and the way out
            other.load_state_dict({"weight": torch.zeros(sample.rows, sample.cols)})
        assert torch.equal(other(index), expected)

    @on(one_of_each)
    def test_repr_shows_the_sizes(self, sample):
        layer = make(sample)
        shown = repr(layer)
        for part in (f"{sample.rows}, {sample.cols}", layer.structure.kind, f"parameters={layer.structure.numel:,}"):
            assert part in shown


class TestEmbeddingBag(Conformance):
    samples = (*EVERY, *OTHERS)

    @on(one_of_each)
    @spread("mode", ["sum", "mean", "max"])
    def test_last_offset(self, sample, impl, draw, mode):
        layer = make(sample, EmbeddingBag, mode=mode, include_last_offset=True, impl=impl, padding_idx=1)
        leaves = [] if mode == "max" and sample.structure.packs else leaves_of(layer)
        index = draw.index(9)
        # Indices beyond the last bag are in none; torch's own CPU kernels count them into the last (as of 2.13).
        for offsets in (torch.tensor([0, 2, 5, 9]), torch.tensor([0, 2, 4])):
            expected = as_torch(layer, index[: offsets[-1]], offsets)
            assert_same(layer(index, offsets), expected, leaves, draw)
        with pytest.raises(IndexError, match="out of range"):
            layer(index.index_fill(0, torch.tensor([8]), sample.rows), offsets)

    @on(one_of_each)
    def test_scale_by_frequency(self, sample, impl, draw):
        layer = make(sample, EmbeddingBag, mode="sum", impl=impl, scale_grad_by_freq=True)
        index, offsets = draw.index(9), torch.tensor([0, 5])
        index[4:7] = 2
        # The oracle is arithmetic: torch's own CPU kernel divides by the counts of other rows (as of 2.13).
        times = torch.bincount(index, minlength=sample.rows).clamp_min(1)[:, None]
        table = layer.weight / times + (layer.weight - layer.weight / times).detach()
        expected = F.embedding_bag(index, table, offsets, mode="sum")
        assert_same(layer(index, offsets), expected, leaves_of(layer), draw)

    @on(those(lambda sample: sample.structure.making is ChainOfCores))  # which the compiled kernels pool
    @spread(("dtype", "bag"), list(product(HALF, ["sum", "mean", "sum by frequency"])))
    def test_the_reference_rounds_bags_once(self, sample, draw, dtype, bag):
        """Against float64 on the same tensors, as the kernels do: not each row before, nor its gradient."""
        options = {"mode": bag.split()[0], "scale_grad_by_freq": "frequency" in bag}
        layer = make(sample, EmbeddingBag, impl="reference", dtype=dtype, **options)
        exact = copy.deepcopy(layer).double()
        index, offsets = draw.index(60), torch.tensor([0, 5, 5, 12])
        out, expected = layer(index, offsets), exact(index, offsets)
        assert_rounded_once(out, expected)
        assert_gradients_rounded_once(out, layer, expected, exact)


class TestHead(Conformance):
    samples = (*EVERY, *OTHERS)

    @on(one_of_each)
    def test_targets_out_of_range_raise(self, sample, draw):
        head = make(sample, Head)
        h, target = vectors(draw, 4)
        for bad in (sample.rows, -1, 2**40, -100):
            target[2] = bad
            if bad != -100:
                with pytest.raises(IndexError, match=rf"target {bad} is out of range for {sample.rows} classes"):
                    head.loss(h, target)
            with pytest.raises(IndexError, match=rf"target {bad} is out of range"):
                head.log_prob(h, target)

    @on(one_of_each)
    def test_samples_follow_the_probabilities(self, sample, draw):
        head = make(sample, Head)
        h, _ = vectors(draw, 1)
        n, generator = 4000, torch.Generator().manual_seed(0)
        many = h.detach().expand(n, -1)
        for options in ({}, {"temperature": 0.5}, {"top_k": min(3, sample.rows)}, {"softcap": 0.5}):
            drawn = head.sample(many, generator=generator, **options)
            scores = F.linear(h, head.weight, head.bias)[0].detach()
            cap = options.get("softcap")
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            if "top_k" in options:
                kept = torch.topk(scores, options["top_k"])
                scores = torch.full_like(scores, -torch.inf).index_copy(0, kept.indices, kept.values)
            chance = torch.softmax(scores / options.get("temperature", 1.0), -1)
            counts = torch.bincount(drawn, minlength=sample.rows)
            # The ten likeliest classes, and all others as one: five standard deviations at a fixed seed.
            best = torch.topk(chance, min(10, sample.rows)).indices
            for share, count in [(chance[best], counts[best]), (1 - chance[best].sum(), n - counts[best].sum())]:
                allowed = (n * share * (1 - share)).clamp_min(0).sqrt() * 5 + 1
                assert bool(((count - n * share).abs() <= allowed).all())
        assert torch.equal(head.sample(many[:3], temperature=0), head.topk(many[:3], 1).indices[:, 0])

    @on(one_of_each)
    def test_backward_twice(self, sample, draw):
        for reduction, smoothing in (("mean", 0.1), ("mean", 0.0), ("none", 0.0)):
            head = make(sample, Head)
            h, target = vectors(draw, 6)
            loss = head.loss(h, target, reduction=reduction, label_smoothing=smoothing).sum()
            (first,) = torch.autograd.grad(loss, h, retain_graph=True)
            assert torch.equal(first, torch.autograd.grad(loss, h)[0])
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(loss, h)
