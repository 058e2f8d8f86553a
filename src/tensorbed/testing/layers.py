"""Lookups and bags beside ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` over the same table; in graphs, too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
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
    Traced,
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
    def test_copies_and_pickles(self, sample: Sample, draw: Draw) -> None:
        layer, index = make(sample, padding_idx=1), draw.index(8)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(index), layer(index))

    @on(one_of_each)
    @spread("dtype", [torch.float32, torch.bfloat16])
    def test_autocast_leaves_the_parameters_dtype(
        self, sample: Sample, impl: str, draw: Draw, dtype: torch.dtype
    ) -> None:
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
        rounds = sample.structure.packs
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
    def test_second_derivatives_of_rows_are_refused_or_right(self, sample: Sample, impl: str, draw: Draw) -> None:
        """Also where only what was saved for the first ones leads from them to the parameters."""
        layer, plain = make(sample, impl=impl), make(sample, impl="reference")
        index = draw.index(6)

        def penalties(module: nn.Module) -> list[Tensor]:
            leaves = leaves_of(module)
            first = torch.autograd.grad(module(index).square().sum(), leaves, create_graph=True)
            return list(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves))

        refusal = ""
        try:
            assert_all_near(penalties(layer), penalties(plain))
        except RuntimeError as error:
            refusal = str(error)
        assert not refusal or 'use impl="reference"' in refusal or "is not implemented" in refusal

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
        ties = mode == "max" and sample.structure.packs
        leaves = [] if ties else leaves_of(layer)
        for call in calls:
            assert_same(layer(*call), as_torch(layer, *call), leaves, draw)
        if mode == "sum":
            weights = draw.normal(12).requires_grad_()
            for call in ((index, offsets, weights), (index.reshape(3, 4), None, weights.reshape(3, 4))):
                assert_same(layer(*call), as_torch(layer, *call), [weights, *leaves], draw)

    @on(choices.trained, one_of_each)
    def test_writes_before_a_bag_s_backward_are_noticed(self, sample: Sample, impl: str, draw: Draw) -> None:
        index, offsets, weights = draw.index(12), torch.tensor([0, 3, 3, 7, 12]), draw.normal(12).requires_grad_()
        index[4] = 1
        layer = make(sample, EmbeddingBag, mode="sum", padding_idx=1, include_last_offset=True, impl=impl)
        leaves = [*leaves_of(layer), weights]
        written = [index, offsets, weights, layer.padding_row, *layer.params().values()]
        assert_writes_are_noticed(partial(layer, index, offsets, weights), leaves, written)

    @on(one_of_each)
    @spread("dtype", [torch.float32, *HALF])
    def test_bags_in_every_precision(self, sample: Sample, impl: str, draw: Draw, dtype: torch.dtype) -> None:
        # Bags of more members than half precisions can count to.
        index, offsets = draw.index(3012), torch.tensor([0, 5, 5, 12])
        index[12:] = index[0]
        for mode in ("mean", "max"):
            layer = make(sample, EmbeddingBag, dtype=torch.float64, mode=mode, impl=impl)
            leaves, exact = leaves_of(layer), layer(index, offsets)
            grad = draw.normal(*exact.shape, dtype=torch.float64)
            wanted = [g.to(dtype) for g in torch.autograd.grad(exact, leaves, grad)] if leaves else []
            out = layer.to(dtype)(index, offsets)
            # Adding up n numbers one by one is off by n / 2 units at the worst.
            assert_near(out, exact.detach().to(dtype), units=1500 if dtype == torch.float32 else 8)
            if leaves and mode == "mean":
                made = torch.autograd.grad(out, leaves_of(layer), grad.to(dtype))
                assert_all_near(made, wanted, units=1500 if dtype == torch.float32 else 16)

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
            weights = torch.ones(index.shape, dtype=sample.dtype, requires_grad=True)
            out = layer(index, offsets, weights)
            bags = len(index if offsets is None else offsets)
            assert torch.equal(out, torch.zeros(bags, sample.cols, dtype=sample.dtype))
            assert torch.equal(means(index, offsets), out)
            out.sum().backward()
            assert weights.grad is not None
            assert weights.grad.shape == index.shape


# A layer, its options, and the arguments of a call of some size.
USES: dict[str, tuple[type[Any], dict[str, Any], Callable[[Draw, int], tuple[Tensor, ...]]]] = {
    "lookup": (Embedding, {"padding_idx": 1}, lambda draw, n: (draw.index(n, 4),)),
    "bags": (EmbeddingBag, {"padding_idx": 1}, lambda draw, n: (draw.index(3 * n), torch.tensor([0, 2, 2, 5]))),
    "sums": (EmbeddingBag, {"mode": "sum"}, lambda draw, n: (draw.index(n, 4),)),
    "largest": (EmbeddingBag, {"mode": "max", "padding_idx": 1}, lambda draw, n: (draw.index(n), torch.arange(n - 1))),
}


class TracingLaws(Traced):
    """``torch.compile``, ``torch.export`` and ONNX; inherit with ``samples`` set."""

    @on(one_of_each)
    @spread("use", ["lookup", "bags"])
    def test_compiled_layers(self, sample: Sample, draw: Draw, use: str) -> None:
        kind, options, arguments = USES[use]
        layer = make(sample, kind, dtype=torch.float32, **options)
        compiled = self.compiled(layer, sample)
        for n in (3, 5):
            call = arguments(draw, n)
            assert_same(compiled(*call), layer(*call), leaves_of(layer), draw)
        for bad in (sample.rows, -1):
            with pytest.raises(IndexError, match=f"index {bad} is out of range"):
                compiled(torch.full_like(call[0], bad), *call[1:])
        if use == "bags":
            with pytest.raises(ValueError, match="the first bag begins at 0"):
                compiled(call[0], call[1] + 1)

    @on(one_of_each)
    def test_a_fresh_layer_compiles_whichever_way(self, sample: Sample, impl: str, draw: Draw) -> None:
        """Nothing that an eager call would have filled in is missing."""
        index = draw.index(3, 4)
        compiled: Any = torch.compile(make(sample, impl=impl), fullgraph=True, backend="aot_eager")
        assert_near(compiled(index), make(sample, impl=impl)(index))

    @on(one_of_each)
    @spread("use", ["lookup", "bags"])
    def test_exported_layers(self, sample: Sample, draw: Draw, use: str) -> None:
        kind, options, arguments = USES[use]
        layer = make(sample, kind, **options)
        call = arguments(draw, 3)
        run = torch.export.export(layer, call, dynamic_shapes=_dynamic(call)).module()
        for other in (call, arguments(draw, 7)):
            assert_near(run(*other), layer(*other))
        # An exported graph cannot raise: it clamps.
        beyond, last = (torch.full_like(call[0], row) for row in (sample.rows + 5, sample.rows - 1))
        assert_near(run(beyond, *call[1:]), layer(last, *call[1:]))

    @on(one_of_each)
    @pytest.mark.filterwarnings("ignore")
    def test_onnx(self, sample: Sample, draw: Draw, tmp_path: Any) -> None:
        self._assert_same_in_onnx("lookup", sample, draw, tmp_path)

    # What pools rows is the same for all structures.
    @on(lambda samples: one_of_each(samples)[:1])
    @spread("use", ["bags", "sums", "largest"])
    @pytest.mark.filterwarnings("ignore")
    def test_bags_in_onnx(self, sample: Sample, draw: Draw, use: str, tmp_path: Any) -> None:
        self._assert_same_in_onnx(use, sample, draw, tmp_path)

    @staticmethod
    def _assert_same_in_onnx(use: str, sample: Sample, draw: Draw, folder: Any) -> None:
        runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
        kind, options, arguments = USES[use]
        layer = make(sample, kind, dtype=torch.float32, **options).eval()
        calls, path = [arguments(draw, 3), arguments(draw, 6)], str(folder / "layer.onnx")
        torch.onnx.export(layer, calls[0], path, dynamo=True, dynamic_shapes=_dynamic(calls[0]), verbose=False)
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        for call in calls:
            (out,) = session.run(None, {name: t.numpy() for name, t in zip(names, call, strict=True)})
            assert_near(torch.from_numpy(out), layer(*call).detach())


def _dynamic(call: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    """Every size of every argument may be another."""
    return tuple(dict.fromkeys(range(t.dim()), torch.export.Dim.DYNAMIC) for t in call)
