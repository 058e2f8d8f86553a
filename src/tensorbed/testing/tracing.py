"""Compiled and exported layers and heads compute what eager ones do."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.nn import Embedding, EmbeddingBag, Head
from tensorbed.testing.heads import dense_loss, drawn_terms, vectors
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


class HeadTracing(Traced):
    """Losses, logits and choices of heads; inherit with ``samples`` set."""

    @on(one_of_each)
    def test_compiled_loss(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head, dtype=torch.float32)
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
        head = make(sample, Head, dtype=torch.float32)
        said = {**drawn_terms(draw, "everything", torch.float32), "ignore_index": 3}

        def loss(h: Tensor, target: Tensor) -> Tensor:
            return head.loss(h, target, **said)

        compiled: Any = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
        h, target = vectors(draw, 7, dtype=torch.float32)
        target = target.clamp_min(0)
        assert_same(compiled(h, target), dense_loss(head, h, target, **said), [h, *leaves_of(head)], draw)

    @on(one_of_each)
    def test_compiled_logits_and_topk(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head, dtype=torch.float32)
        h, _ = vectors(draw, 5, dtype=torch.float32)
        expected, k = F.linear(h, head.weight, head.bias), min(3, sample.rows)
        assert_same(self.compiled(head, sample)(h), expected, [h, *leaves_of(head)], draw)

        def topk(x: Tensor) -> Any:
            return head.topk(x, k)

        best: Any = torch.compile(topk, fullgraph=True, backend="aot_eager")
        assert torch.equal(best(h).indices, torch.topk(expected, k).indices)

    @on(one_of_each)
    def test_exported_logits(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head, dtype=torch.float32)
        h = vectors(draw, 3, dtype=torch.float32)[0].detach()
        exported = torch.export.export(head, (h,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        assert_near(exported.module()(h), F.linear(h, head.weight, head.bias).detach())
