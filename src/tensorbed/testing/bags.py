"""Parity of bags with ``torch.nn.EmbeddingBag`` loaded with the same table."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from tensorbed.nn import EmbeddingBag
from tensorbed.testing.layers import _leaves, _made, _through_table
from tensorbed.testing.samples import (
    Conformance,
    Draw,
    Sample,
    assert_all_near,
    assert_near,
    assert_rounded_once,
    assert_writes_are_noticed,
    chains,
    on,
    one_of_each,
    spread,
)


class BagParity(Conformance):
    """``tb.EmbeddingBag`` against ``torch.nn.EmbeddingBag``; inherit with ``samples`` set."""

    @spread(("mode", "padding_idx"), list(product(["sum", "mean", "max"], [None, 2, -1])))
    def test_bag_values_and_gradients(
        self, sample: Sample, impl: str, draw: Draw, mode: str, padding_idx: int | None
    ) -> None:
        layer = _made(sample, EmbeddingBag, mode=mode, padding_idx=padding_idx, impl=impl)
        twin = self._twin(layer)
        index = draw.index(12)
        index[4:7], index[11] = 2, sample.rows - 1
        offsets = torch.tensor([0, 3, 3, 4, 7, 12])  # empty bags inside and at the end, one of padding only
        for arguments in ((index, offsets), (index.reshape(3, 4), None), (index.int(), offsets.int())):
            self._compare(layer, twin, draw, *arguments)

    @on(one_of_each)
    def test_last_offset(self, sample: Sample, impl: str, draw: Draw) -> None:
        layer = _made(sample, EmbeddingBag, mode="mean", include_last_offset=True, impl=impl)
        self._compare(layer, self._twin(layer), draw, draw.index(9), torch.tensor([0, 2, 5, 9]))

    @on(one_of_each)
    @spread("mode", ["sum", "mean", "max"])
    def test_indices_beyond_the_last_bag_are_in_none(self, sample: Sample, impl: str, draw: Draw, mode: str) -> None:
        index, offsets = draw.index(9), torch.tensor([0, 2, 4])
        layer = _made(sample, EmbeddingBag, mode=mode, include_last_offset=True, impl=impl, padding_idx=1)
        # The oracle has them cut off: torch's own CPU kernels count them into the last bag (as of 2.13).
        twin = self._twin(layer)
        out, expected = layer(index, offsets), twin(index[:4], offsets)
        assert_near(out, expected)
        with pytest.raises(IndexError, match="out of range"):
            layer(index.index_fill(0, torch.tensor([8]), sample.rows), offsets)
        if draw.differentiable:
            grad = draw.normal(*out.shape)
            (table_grad,) = torch.autograd.grad(expected, [twin.weight], grad)
            assert_all_near(torch.autograd.grad(out, _leaves(layer), grad), _through_table(layer, table_grad))

    @on(one_of_each)
    def test_per_sample_weights(self, sample: Sample, impl: str, draw: Draw) -> None:
        layer = _made(sample, EmbeddingBag, mode="sum", impl=impl, padding_idx=1)
        weights = draw.normal(9).requires_grad_()
        index = draw.index(9)
        index[3] = 1
        self._compare(layer, self._twin(layer), draw, index, torch.tensor([0, 4]), weights)
        square = draw.normal(3, 3).requires_grad_()
        self._compare(layer, self._twin(layer), draw, index.reshape(3, 3), None, square)

    @on(one_of_each)
    def test_writes_before_a_bag_s_backward_are_noticed(self, sample: Sample, impl: str, draw: Draw) -> None:
        if not draw.differentiable:
            pytest.skip(f"{draw.structure.kind} declares that it has no gradient")
        index, offsets, weights = draw.index(12), torch.tensor([0, 3, 3, 7, 12]), draw.normal(12).requires_grad_()
        index[4] = 1
        layer = _made(sample, EmbeddingBag, mode="sum", padding_idx=1, include_last_offset=True, impl=impl)
        leaves = [*_leaves(layer), weights]
        written = [index, offsets, weights, layer.padding_row, *layer.params().values()]
        assert_writes_are_noticed(partial(layer, index, offsets, weights), leaves, written)

    @on(one_of_each)
    def test_scale_by_frequency(self, sample: Sample, impl: str, draw: Draw) -> None:
        layer = _made(sample, EmbeddingBag, mode="sum", impl=impl, scale_grad_by_freq=True)
        index = draw.index(9)
        index[4:7] = 2
        offsets, grad = torch.tensor([0, 5]), draw.normal(2, sample.cols)
        # The oracle is arithmetic: torch's own CPU kernel divides by the counts of other rows (as of 2.13).
        twin = nn.EmbeddingBag.from_pretrained(layer.weight.detach().clone(), freeze=False, mode="sum")
        twin(index, offsets).backward(grad)
        assert twin.weight.grad is not None
        times = torch.bincount(index, minlength=sample.rows).clamp_min(1)[:, None]
        out = layer(index, offsets)
        assert_near(out, twin(index, offsets))
        if draw.differentiable:
            made = torch.autograd.grad(out, _leaves(layer), grad)
            assert_all_near(made, _through_table(layer, twin.weight.grad / times))

    @on(one_of_each)
    @spread("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_bags_in_every_precision(self, sample: Sample, impl: str, draw: Draw, dtype: torch.dtype) -> None:
        # Bags of more members than half precisions can count to.
        index, offsets = draw.index(3012), torch.tensor([0, 5, 5, 12])
        index[12:] = index[0]
        for mode in ("mean", "max"):
            layer = _made(sample, EmbeddingBag, mode=mode, impl=impl)
            exact = layer(index, offsets)
            grad = draw.normal(*exact.shape)
            wanted = torch.autograd.grad(exact, _leaves(layer), grad) if draw.differentiable else ()
            out = layer.to(dtype)(index, offsets)
            # Adding up n numbers one by one is off by n / 2 units at the worst.
            assert_near(out, exact.detach().to(dtype), units=1500 if dtype == torch.float32 else 8)
            if draw.differentiable and mode == "mean":
                made = torch.autograd.grad(out, _leaves(layer), grad.to(dtype))
                expected = [g.to(dtype) for g in wanted]
                assert_all_near(made, expected, units=1500 if dtype == torch.float32 else 16)

    @on(chains)
    @spread(("dtype", "bag"), list(product([torch.bfloat16, torch.float16], ["sum", "mean", "sum by frequency"])))
    def test_the_reference_rounds_bags_once(self, sample: Sample, draw: Draw, dtype: torch.dtype, bag: str) -> None:
        """Against float64 on the same tensors, as the kernels do: not each row before, nor its gradient."""
        options = {"mode": bag.split()[0], "scale_grad_by_freq": "frequency" in bag}
        layer = _made(sample, EmbeddingBag, impl="reference", **options).to(dtype)
        exact = copy.deepcopy(layer).double()
        index, offsets = draw.index(60), torch.tensor([0, 5, 5, 12])
        out, expected = layer(index, offsets), exact(index, offsets)
        assert_rounded_once(out, expected)
        grad = draw.normal(*out.shape, dtype=dtype)
        wanted = torch.autograd.grad(expected, _leaves(exact), grad.double())
        for made, one in zip(torch.autograd.grad(out, _leaves(layer), grad), wanted, strict=True):
            assert_rounded_once(made, one)

    @on(one_of_each)
    def test_no_indices(self, sample: Sample, impl: str) -> None:
        layer = _made(sample, EmbeddingBag, impl=impl)
        empty = torch.empty(0, dtype=torch.int64)
        assert layer(empty, torch.tensor([0, 0])).tolist() == [[0.0] * sample.cols] * 2
        assert layer(empty, empty).shape == (0, sample.cols)
        assert layer(empty.reshape(3, 0)).tolist() == [[0.0] * sample.cols] * 3

    @on(one_of_each)
    @spread("frozen", [False, True])
    def test_weights_of_no_indices_have_gradients(self, sample: Sample, impl: str, frozen: bool) -> None:
        layer = _made(sample, EmbeddingBag, mode="sum", impl=impl).requires_grad_(not frozen)
        twin = self._twin(layer).requires_grad_(not frozen)
        empty = torch.empty(0, dtype=torch.int64)
        for index, offsets in ((empty, torch.tensor([0, 0])), (empty, empty), (empty.reshape(0, 3), None)):
            for module in (layer, twin):
                weights = torch.ones(index.shape, dtype=torch.float64, requires_grad=True)
                module(index, offsets, weights).sum().backward()
                assert weights.grad is not None
                assert weights.grad.shape == index.shape

    @staticmethod
    def _twin(layer: EmbeddingBag) -> nn.EmbeddingBag:
        return nn.EmbeddingBag.from_pretrained(
            layer.weight.detach().clone(),
            freeze=False,
            mode=layer.mode,
            padding_idx=layer.padding_idx,
            include_last_offset=layer.include_last_offset,
        )

    @staticmethod
    def _compare(
        layer: EmbeddingBag,
        twin: nn.EmbeddingBag,
        draw: Draw,
        index: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None = None,
    ) -> None:
        out, expected = layer(index, offsets, weights), twin(index, offsets, weights)
        assert_near(out, expected)
        # Numbers that were rounded are often equal, and of equal largest ones any may have the gradient.
        ties = layer.mode == "max" and hasattr(draw.structure, "packed")
        if not draw.differentiable or ties:
            return
        grad = draw.normal(*out.shape)
        extra = [] if weights is None else [weights]
        made = torch.autograd.grad(out, [*_leaves(layer), *extra], grad)
        table_grad, *extra_grad = torch.autograd.grad(expected, [twin.weight, *extra], grad)
        assert_all_near(made, [*_through_table(layer, table_grad), *extra_grad])
