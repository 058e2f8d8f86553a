"""Parity of lookups with ``torch.nn.Embedding`` loaded with the same table."""

from __future__ import annotations

import copy
import io
import pickle
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorbed.nn import Embedding, EmbeddingBag
from tensorbed.nn.table import StructuredTable
from tensorbed.testing.samples import (
    Conformance,
    Draw,
    Sample,
    assert_all_near,
    assert_near,
    assert_rounded_once,
    assert_writes_are_noticed,
    backends,
    largest_allocation,
    on,
    one_of_each,
    small,
    spread,
)


def _leaves(layer: nn.Module) -> list[Tensor]:
    return [p for p in layer.parameters() if p.requires_grad]


def _made(sample: Sample, kind: type[Any] = Embedding, **options: Any) -> Any:
    torch.manual_seed(0)
    if sample.structure.can_initialise:
        return kind(sample.rows, sample.cols, sample.format, std=1.0, dtype=torch.float64, **options)
    return copy.deepcopy(_fitted(sample, kind, tuple(options.items())))  # type: ignore[arg-type]


@cache
def _fitted(sample: Sample, kind: type[Any], options: tuple[tuple[str, Any], ...]) -> Any:
    table = Draw(sample, seed=0).normal(sample.rows, sample.cols)
    return kind.from_pretrained(table, sample.format, freeze=False, **dict(options))


def _through_table(layer: StructuredTable, table_grad: Tensor) -> list[Tensor]:
    """The parameters' gradients that a gradient of the dense twin's table stands for."""
    return list(torch.autograd.grad(layer.weight, _leaves(layer), table_grad))


class EmbeddingParity(Conformance):
    """``tb.Embedding`` against ``torch.nn.Embedding``; inherit with ``samples`` set."""

    @spread("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
    def test_values_and_gradients(self, sample: Sample, impl: str, draw: Draw, options: dict[str, Any]) -> None:
        layer = _made(sample, impl=impl, **options)
        twin = nn.Embedding.from_pretrained(layer.weight.detach().clone(), freeze=False, **options)
        index = draw.index(4, 6)
        index[1, :3] = 2
        index[2, :2] = sample.rows - 1
        assert layer.padding_idx == twin.padding_idx
        out = layer(index)
        assert_near(out, twin(index))
        if draw.differentiable:
            grad = draw.normal(*out.shape)
            out.backward(grad)
            twin(index).backward(grad)
            assert twin.weight.grad is not None
            expected = _through_table(layer, twin.weight.grad)
            assert_all_near([p.grad for p in _leaves(layer) if p.grad is not None], expected)

    @on(one_of_each)
    def test_the_padding_row(self, sample: Sample) -> None:
        layer = _made(sample, padding_idx=1)
        if sample.structure.can_initialise:
            assert layer(torch.tensor([1])).count_nonzero() == 0
            assert layer.weight[1].count_nonzero() == 0
        assert torch.equal(layer(torch.tensor([1]))[0], layer.weight[1])
        assert (layer.weight[[0, 2]].abs().sum(1) > 0).all()
        table = layer.weight.detach().clone()
        table[1] = torch.arange(sample.cols)
        fitted = Embedding.from_pretrained(table, sample.format, padding_idx=1)
        assert torch.equal(fitted(torch.tensor([1, 1]))[0], table[1])
        assert torch.equal(fitted.weight[1], table[1])
        dense_bytes = table.numel() * 8
        stored = fitted.structure.bytes(torch.float64) + sample.cols * 8
        assert fitted.compression_ratio == pytest.approx(dense_bytes / stored)

    @on(one_of_each)
    def test_from_pretrained_freezes_as_torch_does(self, sample: Sample) -> None:
        table = _made(sample).weight.detach()
        frozen = Embedding.from_pretrained(table, sample.format)
        assert frozen.fit_error is not None
        assert not any(p.requires_grad for p in frozen.parameters())
        if sample.structure.can_differentiate:
            thawed = Embedding.from_pretrained(table, sample.format, freeze=False)
            assert all(p.requires_grad for p in thawed.parameters())

    @on(small)
    def test_nothing_of_the_table_s_size_is_allocated(self, sample: Sample, draw: Draw) -> None:
        index = draw.index(2, 4)
        for impl in backends(sample.structure):
            layer = _made(sample, impl=impl, padding_idx=0)
            bag = _made(sample, EmbeddingBag, impl=impl)
            with largest_allocation() as most:
                out, pooled = layer(index), bag(index)
                if draw.differentiable:
                    (out.sum() + pooled.sum()).backward()
            assert most() < sample.rows * sample.cols / 2, f"{impl} allocated {most()} elements at once"
        with largest_allocation() as most:
            layer.weight.detach().clone()
        assert most() >= sample.rows * sample.cols / 2, "the watch does not see a table"

    @on(one_of_each)
    def test_state(self, sample: Sample, draw: Draw) -> None:
        layer = _made(sample, padding_idx=3)
        state = layer.state_dict()
        assert set(state) == {*(spec.name for spec in layer.structure.tensors()), "padding_row"}
        index = draw.index(8)
        expected = layer(index)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(index), expected)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        other = _made(sample, padding_idx=3)
        with torch.no_grad():
            for tensor in other.params().values():
                tensor.zero_()
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(other(index), expected)

    @on(one_of_each)
    def test_a_dense_checkpoint_is_refused_with_the_way_out(self, sample: Sample) -> None:
        layer = _made(sample)
        before = [p.clone() for p in layer.parameters()]
        with pytest.raises(RuntimeError, match=r"Embedding\.from_pretrained"):
            layer.load_state_dict({"weight": torch.zeros(sample.rows, sample.cols)})
        assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))

    @on(one_of_each)
    def test_meta_device_and_reset(self, sample: Sample) -> None:
        if not sample.structure.can_initialise:
            pytest.skip(f"{sample.structure.kind} declares that it cannot be drawn")
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
        layer = _made(sample, impl=impl).to(dtype)
        index = draw.index(6)
        expected = layer(index)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(index)
        assert out.dtype == dtype
        assert torch.equal(out, expected)

    @spread("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_rounded_once(self, sample: Sample, draw: Draw, dtype: torch.dtype) -> None:
        """Against float64 on the same tensors: the table, rows by every way, and the gradients of both."""
        layer = _made(sample).to(dtype)
        rounds = hasattr(sample.structure, "packed")
        exact = (layer.packed() if rounds else copy.deepcopy(layer)).double()
        index = draw.index(300)
        # What keeps the table adds the gradients of equal indices as torch.nn.Embedding does, in half precision.
        trains = draw.differentiable and not rounds and sample.structure.row_multiply_adds != 0
        pairs = [(layer.weight, exact.weight)]
        for layer.impl in backends(sample.structure):
            pairs.append((layer(index), exact(index)))
        for out, expected in pairs:
            assert_rounded_once(out, expected)
            grad = draw.normal(*out.shape, dtype=dtype)
            made = torch.autograd.grad(out, _leaves(layer), grad) if trains else ()
            wanted = torch.autograd.grad(expected, _leaves(exact), grad.double()) if trains else ()
            for one, other in zip(made, wanted, strict=True):
                assert_rounded_once(one, other)

    @on(one_of_each)
    def test_functional_call_and_func_grad(self, sample: Sample, impl: str, draw: Draw) -> None:
        layer = _made(sample, impl=impl)
        index = draw.index(5)
        params = {name: 2 * p.detach() for name, p in layer.named_parameters()}

        def loss(p: dict[str, Tensor]) -> Tensor:
            out: Tensor = torch.func.functional_call(layer, p, (index,))
            return out.square().sum()

        if not draw.differentiable:
            pytest.skip(f"{draw.structure.kind} declares that it has no gradient")
        made = torch.func.grad(loss)(params)
        leaves = {name: p.requires_grad_() for name, p in params.items()}
        expected = torch.autograd.grad(loss(leaves), list(leaves.values()))
        assert_all_near(list(made.values()), list(expected))

    @on(one_of_each)
    def test_transforms_nest(self, sample: Sample, impl: str, draw: Draw) -> None:
        if not draw.differentiable:
            pytest.skip(f"{draw.structure.kind} declares that it has no gradient")
        layer, plain = _made(sample, impl=impl), _made(sample, impl="reference")
        index = draw.index(3, 4)
        params = {name: p.detach() for name, p in layer.named_parameters()}

        def curvature(module: nn.Module) -> dict[str, Tensor]:
            def loss(p: dict[str, Tensor]) -> Tensor:
                out: Tensor = torch.func.functional_call(module, p, (index,))
                return out.pow(4).sum()

            def size(p: dict[str, Tensor]) -> Tensor:
                return torch.stack([g.square().sum() for g in torch.func.grad(loss)(p).values()]).sum()

            found: dict[str, Tensor] = torch.func.grad(size)(params)
            return found

        assert_all_near(list(curvature(layer).values()), list(curvature(plain).values()))
        assert_near(torch.func.vmap(layer)(index), layer(index))
        with pytest.raises(IndexError, match="out of range"):
            torch.func.vmap(layer)(index + sample.rows)

    @on(one_of_each)
    def test_writes_before_a_layer_s_backward_are_noticed(self, sample: Sample, draw: Draw) -> None:
        if not draw.differentiable:
            pytest.skip(f"{draw.structure.kind} declares that it has no gradient")
        index = draw.index(9)
        index[4] = 1
        layer = _made(sample, padding_idx=1)
        for layer.scale_grad_by_freq in (False, True):
            written = [index, layer.padding_row, *layer.params().values()]
            assert_writes_are_noticed(partial(layer, index), _leaves(layer), written)

    @on(one_of_each)
    def test_repr_shows_the_sizes(self, sample: Sample) -> None:
        layer = _made(sample)
        shown = repr(layer)
        for part in (f"{sample.rows}, {sample.cols}", layer.structure.kind, f"parameters={layer.structure.numel:,}"):
            assert part in shown
