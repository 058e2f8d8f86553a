"""Parity of lookups and bags with ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` over the same table."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorbed.nn import Embedding, EmbeddingBag
from tensorbed.testing import samples as choices
from tensorbed.testing.samples import (
    Conformance,
    Draw,
    Sample,
    assert_all_near,
    assert_near,
    assert_rounded_once,
    assert_same,
    assert_writes_are_noticed,
    backends,
    keeps_rows,
    largest_allocation,
    leaves_of,
    make,
    on,
    one_of_each,
    spread,
)

HALF = [torch.bfloat16, torch.float16]


def assert_gradients_rounded_once(out: Tensor, layer: nn.Module, exact_out: Tensor, exact: nn.Module) -> None:
    """Those of the layer's tensors, for the same gradient of what it and its twin in double precision gave."""
    grad = torch.linspace(-1, 1, out.numel()).to(out.dtype).view_as(out)
    wanted = torch.autograd.grad(exact_out, leaves_of(exact), grad.double())
    for one, other in zip(torch.autograd.grad(out, leaves_of(layer), grad), wanted, strict=True):
        assert_rounded_once(one, other)


class EmbeddingParity(Conformance):
    """``tb.Embedding`` against ``torch.nn.Embedding``; inherit with ``samples`` set."""

    @spread("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
    def test_values_and_gradients(self, sample: Sample, impl: str, draw: Draw, options: dict[str, Any]) -> None:
        layer = make(sample, impl=impl, **options)
        assert layer.padding_idx == nn.Embedding(sample.rows, 1, options.get("padding_idx")).padding_idx
        index = draw.index(4, 6)
        index[1, :3] = 2
        index[2, :2] = sample.rows - 1
        assert_same(layer(index), F.embedding(index, layer.weight, **options), leaves_of(layer), draw)

    @on(one_of_each)
    def test_the_padding_row_and_fitted_tables(self, sample: Sample) -> None:
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

    @on(choices.small)
    def test_nothing_of_the_table_s_size_is_allocated(self, sample: Sample, draw: Draw) -> None:
        index = draw.index(2, 4)
        for impl in backends(sample.structure):
            layer, bag = make(sample, impl=impl, padding_idx=0), make(sample, EmbeddingBag, impl=impl)
            with largest_allocation() as most:
                total = layer(index).sum() + bag(index).sum()
                if total.requires_grad:
                    total.backward()
            assert most() < sample.rows * sample.cols / 2, f"{impl} allocated {most()} elements at once"
        with largest_allocation() as most:
            layer.weight.detach().clone()
        assert most() >= sample.rows * sample.cols / 2, "the watch does not see a table"

    @on(one_of_each)
    def test_state(self, sample: Sample, draw: Draw) -> None:
        layer = make(sample, padding_idx=3)
        state = layer.state_dict()
        assert set(state) == {*(spec.name for spec in layer.structure.tensors()), "padding_row"}
        index = draw.index(8)
        expected = layer(index)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(index), expected)
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

    @on(choices.drawn, one_of_each)
    def test_meta_device_and_reset(self, sample: Sample) -> None:
        layer = Embedding(sample.rows, sample.cols, sample.format, std=0.5, device="meta", padding_idx=0)
        assert layer(torch.zeros(2, 3, dtype=torch.int64, device="meta")).shape == (2, 3, sample.cols)
        layer = layer.to_empty(device="cpu")
        layer.reset_parameters()
        with torch.no_grad():
            drawn = layer.structure.full(layer.params())
            assert float(drawn.square().mean().sqrt()) == pytest.approx(0.5, rel=1e-4)
            assert torch.equal(layer.weight[1:], drawn[1:])
            assert layer.weight[0].count_nonzero() == 0

    @on(one_of_each)
    @spread("dtype", [torch.float32, torch.bfloat16])
    def test_autocast_leaves_the_parameters_dtype(self, sample: Sample, impl: str, draw: Draw, dtype: Any) -> None:
        layer, index = make(sample, impl=impl, dtype=dtype), draw.index(6)
        expected = layer(index)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(index)
        assert out.dtype == dtype
        assert torch.equal(out, expected)

    @spread("dtype", HALF)
    def test_half_precision_is_rounded_once(self, sample: Sample, draw: Draw, dtype: torch.dtype) -> None:
        """Against float64 on the same tensors: the table, rows by every way, and the gradients of both."""
        layer = make(sample, dtype=dtype)
        rounds = hasattr(sample.structure, "packed")
        exact = (layer.packed() if rounds else copy.deepcopy(layer)).double()
        index = draw.index(300)
        pairs = [(layer.weight, exact.weight)]
        for layer.impl in backends(sample.structure):
            pairs.append((layer(index), exact(index)))
        for out, expected in pairs:
            assert_rounded_once(out, expected)
            # What keeps the table adds the gradients of equal indices as torch.nn.Embedding does, in half precision.
            if leaves_of(layer) and not rounds and not keeps_rows(sample.structure):
                assert_gradients_rounded_once(out, layer, expected, exact)

    @on(choices.trained, one_of_each)
    def test_transforms_nest(self, sample: Sample, impl: str, draw: Draw) -> None:
        layer, plain = make(sample, impl=impl), make(sample, impl="reference")
        index = draw.index(3, 4)
        params = {name: 2 * p.detach() for name, p in layer.named_parameters()}

        def loss(p: dict[str, Tensor], module: nn.Module) -> Tensor:
            out: Tensor = torch.func.functional_call(module, p, (index,))
            return out.pow(4).sum()

        def size(p: dict[str, Tensor], module: nn.Module) -> Tensor:
            return torch.stack([g.square().sum() for g in torch.func.grad(loss)(p, module).values()]).sum()

        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        expected = torch.autograd.grad(loss(leaves, layer), list(leaves.values()))
        assert_all_near(list(torch.func.grad(loss)(params, layer).values()), expected)
        curvature, plain_curvature = (torch.func.grad(size)(params, module) for module in (layer, plain))
        assert_all_near(list(curvature.values()), list(plain_curvature.values()))
        assert_near(torch.func.vmap(layer)(index), layer(index))
        with pytest.raises(IndexError, match="out of range"):
            torch.func.vmap(layer)(index + sample.rows)

    @on(choices.trained, one_of_each)
    @spread("dtype", [torch.float64, torch.float32])
    def test_writes_before_a_layer_s_backward_are_noticed(
        self, sample: Sample, impl: str, draw: Draw, dtype: torch.dtype
    ) -> None:
        layer, index = make(sample, impl=impl, dtype=dtype, padding_idx=1), draw.index(9)
        index[4] = 1
        for layer.scale_grad_by_freq in (False, True):
            written = [index, layer.padding_row, *layer.params().values()]
            assert_writes_are_noticed(partial(layer, index), leaves_of(layer), written)

    @on(one_of_each)
    def test_repr_shows_the_sizes(self, sample: Sample) -> None:
        layer = make(sample)
        shown = repr(layer)
        for part in (f"{sample.rows}, {sample.cols}", layer.structure.kind, f"parameters={layer.structure.numel:,}"):
            assert part in shown


def as_torch(layer: EmbeddingBag, index: Tensor, offsets: Tensor | None, weights: Tensor | None = None) -> Tensor:
    """The bags of ``torch.nn.EmbeddingBag`` over the layer's table."""
    said: Any = {"mode": layer.mode, "padding_idx": layer.padding_idx, "per_sample_weights": weights}
    return F.embedding_bag(index, layer.weight, offsets, include_last_offset=layer.include_last_offset, **said)


class BagParity(Conformance):
    """``tb.EmbeddingBag`` against ``torch.nn.EmbeddingBag``; inherit with ``samples`` set."""

    @spread(("mode", "padding_idx"), list(product(["sum", "mean", "max"], [None, 2, -1])))
    def test_bag_values_and_gradients(
        self, sample: Sample, impl: str, draw: Draw, mode: str, padding_idx: int | None
    ) -> None:
        layer = make(sample, EmbeddingBag, mode=mode, padding_idx=padding_idx, impl=impl)
        index = draw.index(12)
        index[4:7], index[11] = 2, sample.rows - 1
        offsets = torch.tensor([0, 3, 3, 4, 7, 12])  # empty bags inside and at the end, one of padding only
        calls: list[Sequence[Any]] = [(index, offsets), (index.reshape(3, 4), None), (index.int(), offsets.int())]
        # Numbers that were rounded are often equal, and of equal largest ones any may have the gradient.
        ties = mode == "max" and hasattr(sample.structure, "packed")
        leaves = [] if ties else leaves_of(layer)
        for call in calls:
            assert_same(layer(*call), as_torch(layer, *call), leaves, draw)
        if mode == "sum":
            weights = draw.normal(12).requires_grad_()
            for call in ((index, offsets, weights), (index.reshape(3, 4), None, weights.reshape(3, 4))):
                assert_same(layer(*call), as_torch(layer, *call), [weights, *leaves], draw)

    @on(one_of_each)
    @spread("mode", ["sum", "mean", "max"])
    def test_last_offset(self, sample: Sample, impl: str, draw: Draw, mode: str) -> None:
        layer = make(sample, EmbeddingBag, mode=mode, include_last_offset=True, impl=impl, padding_idx=1)
        leaves = [] if mode == "max" and hasattr(sample.structure, "packed") else leaves_of(layer)
        index = draw.index(9)
        # Indices beyond the last bag are in none; torch's own CPU kernels count them into the last (as of 2.13).
        for offsets in (torch.tensor([0, 2, 5, 9]), torch.tensor([0, 2, 4])):
            expected = as_torch(layer, index[: offsets[-1]], offsets)
            assert_same(layer(index, offsets), expected, leaves, draw)
        with pytest.raises(IndexError, match="out of range"):
            layer(index.index_fill(0, torch.tensor([8]), sample.rows), offsets)

    @on(choices.trained, one_of_each)
    def test_writes_before_a_bag_s_backward_are_noticed(self, sample: Sample, impl: str, draw: Draw) -> None:
        index, offsets, weights = draw.index(12), torch.tensor([0, 3, 3, 7, 12]), draw.normal(12).requires_grad_()
        index[4] = 1
        layer = make(sample, EmbeddingBag, mode="sum", padding_idx=1, include_last_offset=True, impl=impl)
        leaves = [*leaves_of(layer), weights]
        written = [index, offsets, weights, layer.padding_row, *layer.params().values()]
        assert_writes_are_noticed(partial(layer, index, offsets, weights), leaves, written)

    @on(one_of_each)
    def test_scale_by_frequency(self, sample: Sample, impl: str, draw: Draw) -> None:
        layer = make(sample, EmbeddingBag, mode="sum", impl=impl, scale_grad_by_freq=True)
        index, offsets = draw.index(9), torch.tensor([0, 5])
        index[4:7] = 2
        # The oracle is arithmetic: torch's own CPU kernel divides by the counts of other rows (as of 2.13).
        times = torch.bincount(index, minlength=sample.rows).clamp_min(1)[:, None]
        table = layer.weight / times + (layer.weight - layer.weight / times).detach()
        expected = F.embedding_bag(index, table, offsets, mode="sum")
        assert_same(layer(index, offsets), expected, leaves_of(layer), draw)

    @on(one_of_each)
    @spread("dtype", [torch.float32, *HALF])
    def test_bags_in_every_precision(self, sample: Sample, impl: str, draw: Draw, dtype: torch.dtype) -> None:
        # Bags of more members than half precisions can count to.
        index, offsets = draw.index(3012), torch.tensor([0, 5, 5, 12])
        index[12:] = index[0]
        for mode in ("mean", "max"):
            layer = make(sample, EmbeddingBag, mode=mode, impl=impl)
            leaves, exact = leaves_of(layer), layer(index, offsets)
            grad = draw.normal(*exact.shape)
            wanted = [g.to(dtype) for g in torch.autograd.grad(exact, leaves, grad)] if leaves else []
            out = layer.to(dtype)(index, offsets)
            # Adding up n numbers one by one is off by n / 2 units at the worst.
            assert_near(out, exact.detach().to(dtype), units=1500 if dtype == torch.float32 else 8)
            if leaves and mode == "mean":
                made = torch.autograd.grad(out, leaves_of(layer), grad.to(dtype))
                assert_all_near(made, wanted, units=1500 if dtype == torch.float32 else 16)

    @on(choices.chains)
    @spread(("dtype", "bag"), list(product(HALF, ["sum", "mean", "sum by frequency"])))
    def test_the_reference_rounds_bags_once(self, sample: Sample, draw: Draw, dtype: torch.dtype, bag: str) -> None:
        """Against float64 on the same tensors, as the kernels do: not each row before, nor its gradient."""
        options = {"mode": bag.split()[0], "scale_grad_by_freq": "frequency" in bag}
        layer = make(sample, EmbeddingBag, impl="reference", dtype=dtype, **options)
        exact = copy.deepcopy(layer).double()
        index, offsets = draw.index(60), torch.tensor([0, 5, 5, 12])
        out, expected = layer(index, offsets), exact(index, offsets)
        assert_rounded_once(out, expected)
        assert_gradients_rounded_once(out, layer, expected, exact)

    @on(one_of_each)
    @spread("frozen", [False, True])
    def test_no_indices(self, sample: Sample, impl: str, frozen: bool) -> None:
        layer = make(sample, EmbeddingBag, mode="sum", impl=impl).requires_grad_(not frozen)
        means = make(sample, EmbeddingBag, impl=impl)
        empty = torch.empty(0, dtype=torch.int64)
        calls: list[Sequence[Any]] = [
            (empty, torch.tensor([0, 0])),
            (empty, empty),
            (empty.reshape(0, 3), None),
            (empty.reshape(3, 0), None),
        ]
        for index, offsets in calls:
            weights = torch.ones(index.shape, dtype=torch.float64, requires_grad=True)
            out = layer(index, offsets, weights)
            assert torch.equal(out, torch.zeros(len(index if offsets is None else offsets), sample.cols).double())
            assert torch.equal(means(index, offsets), out)
            out.sum().backward()
            assert weights.grad is not None
            assert weights.grad.shape == index.shape
