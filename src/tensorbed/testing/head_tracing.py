"""Compiled and exported heads compute what eager ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.testing.heads import dense_loss, make_head, vectors
from tensorbed.testing.layers import _leaves
from tensorbed.testing.samples import Draw, Sample, assert_all_near, assert_near, on, one_of_each
from tensorbed.testing.tracing import Traced


class HeadTracing(Traced):
    """Inherit with ``samples`` set."""

    @on(one_of_each)
    def test_compiled_loss(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample, dtype=torch.float32)
        for reduction in ("mean", "none"):

            def loss(h: Tensor, target: Tensor, reduction: str = reduction) -> Tensor:
                return head.loss(h, target, reduction=reduction, label_smoothing=0.1)

            compiled = self.compiled(loss, sample)
            for n in (6, 9):
                h, target = vectors(draw, n, dtype=torch.float32)
                made = compiled(h, target)
                expected = dense_loss(head, h, target, reduction=reduction, label_smoothing=0.1)
                assert_near(made, expected)
                if draw.differentiable:
                    leaves = [h, *_leaves(head)]
                    assert_all_near(
                        torch.autograd.grad(made.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)
                    )
            with pytest.raises(IndexError, match="out of range"):
                compiled(h, torch.full_like(target, sample.rows))

    @on(one_of_each)
    def test_compiled_loss_of_every_term(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample, dtype=torch.float32)
        weight = torch.rand(sample.rows) + 0.1
        said: dict[str, Any] = {"class_weight": weight, "softcap": 2.0, "z_loss": 0.1, "ignore_index": 3}

        def loss(h: Tensor, target: Tensor) -> Tensor:
            return head.loss(h, target, **said)

        compiled: Any = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
        h, target = vectors(draw, 7, dtype=torch.float32)
        target = target.clamp_min(0)
        made, expected = compiled(h, target), dense_loss(head, h, target, **said)
        assert_near(made, expected)
        assert_near(torch.autograd.grad(made, h)[0], torch.autograd.grad(expected, h)[0])

    @on(one_of_each)
    def test_compiled_logits_and_topk(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample, dtype=torch.float32)
        h, _ = vectors(draw, 5, dtype=torch.float32)
        made, expected = self.compiled(head, sample)(h), F.linear(h, head.weight, head.bias)
        assert_near(made, expected)
        leaves = [h, *_leaves(head)] if draw.differentiable else [h]
        grad = draw.normal(*made.shape, dtype=torch.float32)
        assert_all_near(torch.autograd.grad(made, leaves, grad), torch.autograd.grad(expected, leaves, grad))
        k = min(3, sample.rows)

        def topk(x: Tensor) -> Any:
            return head.topk(x, k)

        best: Any = torch.compile(topk, fullgraph=True, backend="aot_eager")
        assert torch.equal(best(h).indices, torch.topk(expected, k).indices)

    @on(one_of_each)
    def test_exported_logits(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample, dtype=torch.float32)
        h = vectors(draw, 3, dtype=torch.float32)[0].detach()
        exported = torch.export.export(head, (h,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        assert_near(exported.module()(h), F.linear(h, head.weight, head.bias).detach())
