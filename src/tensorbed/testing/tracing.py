"""Compiled and exported layers and heads compute what eager ones do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.nn import Embedding, EmbeddingBag
from tensorbed.testing.heads import dense_loss, drawn_terms, make_head, vectors
from tensorbed.testing.samples import (
    Conformance,
    Draw,
    Sample,
    assert_near,
    assert_same,
    leaves_of,
    make,
    on,
    one_of_each,
    spread,
)

_DYNAMIC = torch.export.Dim.DYNAMIC


class Traced(Conformance):
    """Compiles for tests, ``by_inductor`` the structures of these kinds; ``None`` is all of them.

    Others stop before code is generated, which takes seconds for each layer and is the same for equal graphs.
    """

    by_inductor: ClassVar[Collection[str] | None] = None

    def compiled(self, function: Callable[..., Any], sample: Sample) -> Any:
        """Without a break in its graph."""
        inductor = self.by_inductor is None or sample.structure.kind in self.by_inductor
        return torch.compile(function, fullgraph=True, backend="inductor" if inductor else "aot_eager")

    @pytest.fixture(autouse=True)
    def compile_afresh(self) -> None:
        """Every test compiles the same few lines of code for another layer, more often than the compiler allows."""
        torch.compiler.reset()


class TracingLaws(Traced):
    """``torch.compile``, ``torch.export`` and ONNX; inherit with ``samples`` set."""

    @on(one_of_each)
    def test_compiled_lookup(self, sample: Sample, draw: Draw) -> None:
        layer = make(sample, padding_idx=1, dtype=torch.float32)
        compiled = self.compiled(layer, sample)
        for shape in ((3, 4), (5, 6)):
            index = draw.index(*shape)
            assert_same(compiled(index), layer(index), leaves_of(layer), draw)
        with pytest.raises(IndexError, match=f"index {sample.rows} is out of range"):
            compiled(torch.full((3, 4), sample.rows))

    @on(one_of_each)
    def test_compiled_bag(self, sample: Sample, draw: Draw) -> None:
        layer = make(sample, EmbeddingBag, padding_idx=1, mode="mean", dtype=torch.float32)
        compiled, offsets = self.compiled(layer, sample), torch.tensor([0, 2, 2, 5])
        for n in (7, 12):
            index = draw.index(n)
            assert_same(compiled(index, offsets), layer(index, offsets), leaves_of(layer), draw)
        with pytest.raises(IndexError, match="index -1 is out of range"):
            compiled(torch.full((7,), -1), offsets)

    @on(one_of_each)
    def test_a_fresh_layer_compiles_whichever_way(self, sample: Sample, impl: str, draw: Draw) -> None:
        """Nothing that an eager call would have filled in is missing."""
        index = draw.index(3, 4)
        compiled: Any = torch.compile(make(sample, impl=impl), fullgraph=True, backend="aot_eager")
        assert_near(compiled(index), make(sample, impl=impl)(index))

    @on(one_of_each)
    def test_compiled_bags_check_their_offsets(self, sample: Sample, draw: Draw) -> None:
        compiled: Any = torch.compile(make(sample, EmbeddingBag), fullgraph=True, backend="aot_eager")
        with pytest.raises(ValueError, match="the first bag begins at 0"):
            compiled(draw.index(5), torch.tensor([2, 4]))

    @on(one_of_each)
    def test_exported_lookup(self, sample: Sample, draw: Draw) -> None:
        layer = make(sample, padding_idx=-1)
        exported = torch.export.export(layer, (draw.index(3, 4),), dynamic_shapes=({0: _DYNAMIC, 1: _DYNAMIC},))
        run = exported.module()
        for shape in ((3, 4), (7, 2)):
            index = draw.index(*shape)
            assert_near(run(index), layer(index))
        # An exported graph cannot raise: it clamps, here to the padding row.
        assert_near(run(torch.full((3, 4), sample.rows + 5)), layer(torch.full((3, 4), sample.rows - 1)))

    @on(one_of_each)
    def test_exported_bag(self, sample: Sample, draw: Draw) -> None:
        layer = make(sample, EmbeddingBag, padding_idx=1)
        arguments = (draw.index(9), torch.tensor([0, 4, 4]))
        exported = torch.export.export(layer, arguments, dynamic_shapes=({0: _DYNAMIC}, {0: _DYNAMIC}))
        for n, offsets in ((9, [0, 4, 4]), (5, [0, 1, 3, 3, 5])):
            index = draw.index(n)
            assert_near(exported.module()(index, torch.tensor(offsets)), layer(index, torch.tensor(offsets)))

    @on(one_of_each)
    @pytest.mark.filterwarnings("ignore")
    def test_onnx(self, sample: Sample, draw: Draw, tmp_path: Any) -> None:
        layer = make(sample, padding_idx=1, dtype=torch.float32).eval()
        self._assert_same_in_onnx(layer, [(draw.index(3, 4),), (draw.index(6, 2),)], tmp_path)

    # What pools rows is the same for all structures.
    @on(lambda samples: one_of_each(samples)[:1])
    @spread(("mode", "padding_idx"), [("sum", None), ("mean", 1), ("max", 1)])
    @pytest.mark.filterwarnings("ignore")
    def test_bags_in_onnx(self, sample: Sample, draw: Draw, mode: str, padding_idx: int | None, tmp_path: Any) -> None:
        bag = make(sample, EmbeddingBag, mode=mode, padding_idx=padding_idx, dtype=torch.float32).eval()
        calls: list[tuple[Tensor, ...]] = [(draw.index(3, 4),), (draw.index(6, 2),)]
        if mode != "sum":
            calls = [(draw.index(9), torch.tensor([0, 4, 4])), (draw.index(5), torch.tensor([0, 1, 3, 3]))]
        self._assert_same_in_onnx(bag, calls, tmp_path)

    @staticmethod
    def _assert_same_in_onnx(layer: Embedding | EmbeddingBag, calls: Sequence[tuple[Tensor, ...]], folder: Any) -> None:
        runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
        path = str(folder / "layer.onnx")
        shapes = tuple(dict.fromkeys(range(t.dim()), _DYNAMIC) for t in calls[0])
        torch.onnx.export(layer, calls[0], path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        for call in calls:
            fed = {name: t.numpy() for name, t in zip(names, call, strict=True)}
            (out,) = session.run(None, fed)
            assert_near(torch.from_numpy(out), layer(*call).detach())


class HeadTracing(Traced):
    """Losses, logits and choices of heads; inherit with ``samples`` set."""

    @on(one_of_each)
    def test_compiled_loss(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample, torch.float32)
        for reduction in ("mean", "none"):

            def loss(h: Tensor, target: Tensor, reduction: str = reduction) -> Tensor:
                return head.loss(h, target, reduction=reduction, label_smoothing=0.1)

            compiled = self.compiled(loss, sample)
            for n in (6, 9):
                h, target = vectors(draw, n, dtype=torch.float32)
                expected = dense_loss(head, h, target, reduction=reduction, label_smoothing=0.1)
                assert_same(compiled(h, target), expected, [h, *leaves_of(head)], draw)
            with pytest.raises(IndexError, match="out of range"):
                compiled(h, torch.full_like(target, sample.rows))

    @on(one_of_each)
    def test_compiled_loss_of_every_term(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample, torch.float32)
        said = {**drawn_terms(draw, "everything", torch.float32), "ignore_index": 3}

        def loss(h: Tensor, target: Tensor) -> Tensor:
            return head.loss(h, target, **said)

        compiled: Any = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
        h, target = vectors(draw, 7, dtype=torch.float32)
        target = target.clamp_min(0)
        assert_same(compiled(h, target), dense_loss(head, h, target, **said), [h, *leaves_of(head)], draw)

    @on(one_of_each)
    def test_compiled_logits_and_topk(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample, torch.float32)
        h, _ = vectors(draw, 5, dtype=torch.float32)
        expected, k = F.linear(h, head.weight, head.bias), min(3, sample.rows)
        assert_same(self.compiled(head, sample)(h), expected, [h, *leaves_of(head)], draw)

        def topk(x: Tensor) -> Any:
            return head.topk(x, k)

        best: Any = torch.compile(topk, fullgraph=True, backend="aot_eager")
        assert torch.equal(best(h).indices, torch.topk(expected, k).indices)

    @on(one_of_each)
    def test_exported_logits(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample, torch.float32)
        h = vectors(draw, 3, dtype=torch.float32)[0].detach()
        exported = torch.export.export(head, (h,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        assert_near(exported.module()(h), F.linear(h, head.weight, head.bias).detach())
