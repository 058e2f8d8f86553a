"""Laws of the head beyond its values: memory, graphs, transforms, precision contexts, what autograd is told."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

import tensorbed as tb
from tensorbed.testing.heads import dense_loss, make_head, vectors
from tensorbed.testing.layers import _leaves
from tensorbed.testing.samples import (
    Conformance,
    Draw,
    Sample,
    assert_near,
    assert_writes_are_noticed,
    largest_allocation,
    most_held,
    on,
    one_of_each,
    small,
    smallest_of_each,
    spread,
)
from tensorbed.vocabulary.tiling import Task, choose, considered


class HeadLimits(Conformance):
    """Inherit with ``samples`` set."""

    @on(small)
    @spread("reduction", ["mean", "none"])
    def test_the_loss_allocates_neither_table_nor_logits(self, sample: Sample, draw: Draw, reduction: str) -> None:
        head = make_head(sample, dtype=torch.float32)
        tokens = 4 * sample.cols
        h, target = vectors(draw, tokens, dtype=torch.float32)
        with largest_allocation() as most:
            loss = head.loss(h, target, reduction=reduction)
            loss.sum().backward() if draw.differentiable else None
        table, logits = sample.rows * sample.cols, sample.rows * tokens
        given = max(h.numel(), *(t.numel() for t in head.params().values()))
        assert most() < max(min(table, logits), given + 1)

    @on(small)
    @spread(("reduction", "budget"), list(product(["mean", "none"], [2**18, 2**20, 2**22])))
    def test_a_memory_budget_is_kept(self, sample: Sample, draw: Draw, reduction: str, budget: int) -> None:
        """Where any way fits into it, what is held at once does, besides what is given and returned."""
        head = make_head(sample, dtype=torch.float32, memory_budget=budget)
        h, target = vectors(draw, 400, dtype=torch.float32)
        trains = {"trains": draw.differentiable or h.requires_grad, "at_once": reduction == "mean"}
        task = Task.of(head.structure, 400, 4, budget, **trains)
        allowed = budget if choose(task).numbers <= task.numbers else 4 * min(s.numbers for s in considered(task))
        with most_held() as held:
            head.loss(h, target, reduction=reduction).sum().backward()
        given = 4 * sum(t.numel() for t in (h, *head.parameters()))
        # Gradients, the same once more on their way out, and vectors of one number a token or class.
        assert held() <= 1.1 * allowed + 3 * given + 16 * 8 * (400 + sample.rows)

    @on(smallest_of_each)
    def test_any_memory_budget_gives_the_same(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample)
        h, target = vectors(draw, 50)
        expected = dense_loss(head, h, target)
        for budget in (1, 4096, 2**16, 2**30):
            head.memory_budget = budget
            assert_near(head.loss(h, target), expected)
        with pytest.raises(ValueError, match="memory_budget=0"):
            tb.linear_cross_entropy(h, head, target, memory_budget=0)

    @on(one_of_each)
    def test_writes_before_a_head_s_backward_are_noticed(self, sample: Sample, draw: Draw) -> None:
        if not draw.differentiable:
            pytest.skip(f"{draw.structure.kind} declares that it has no gradient")
        h, target = vectors(draw, 7)
        weight = draw.normal(sample.rows).abs()
        head = make_head(sample)
        assert head.bias is not None
        leaves, written = [h, *_leaves(head)], [h, target, weight, head.bias, *head.params().values()]
        for head.impl in ("auto", "reference"):
            for reduction in ("mean", "none"):
                loss = partial(head.loss, h, target, reduction=reduction, class_weight=weight, label_smoothing=0.1)
                assert_writes_are_noticed(loss, leaves, written)
            assert_writes_are_noticed(partial(head, h), leaves, written)

    @on(one_of_each)
    def test_transforms_follow_the_plain_loss(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample)
        h, target = vectors(draw, 4)
        each = torch.func.vmap(lambda x, y: head.loss(x, y, ignore_index=-1, reduction="sum"))
        target = target.clamp_min(0)
        assert_near(each(h, target), dense_loss(head, h, target, reduction="none"))
        made = torch.func.grad(lambda x: head.loss(x, target))(h)
        (expected,) = torch.autograd.grad(dense_loss(head, h, target), h)
        assert_near(made, expected)

    @on(one_of_each)
    def test_autocast(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample, dtype=torch.float32)
        h, target = vectors(draw, 8, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = head(h), head.loss(h.bfloat16(), target)
        assert logits.dtype == torch.bfloat16
        assert loss.dtype == torch.float32
        assert_near(loss, dense_loss(head, h.bfloat16().float(), target))

    @on(one_of_each)
    def test_what_backward_reads_may_not_be_written_to(self, sample: Sample, draw: Draw) -> None:
        for change in ("target", "class_weight", "h"):
            head = make_head(sample)
            h, target = vectors(draw, 6)
            target = target.clamp_min(0)  # without those ignored, of which a copy would be made
            weight = torch.rand(sample.rows, dtype=torch.float64) + 0.1
            x = h * 1
            loss = head.loss(x, target, class_weight=weight, reduction="none")
            with torch.no_grad():
                {"target": target, "class_weight": weight, "h": x}[change].zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.sum().backward()

    @on(one_of_each)
    def test_second_derivatives_are_refused_or_right(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample)
        h, target = vectors(draw, 3)
        for made in (head.loss(h, target, z_loss=0.1), head(h).sum()):
            (grad,) = torch.autograd.grad(made, h, create_graph=True)
            with pytest.raises(RuntimeError, match='use impl="reference"'):
                grad.sum().backward()
        head.impl = "reference"
        (grad,) = torch.autograd.grad(head.loss(h, target), h, create_graph=True)
        (expected,) = torch.autograd.grad(dense_loss(head, h, target), h, create_graph=True)
        assert_near(torch.autograd.grad(grad.square().sum(), h)[0], torch.autograd.grad(expected.square().sum(), h)[0])

    @on(one_of_each)
    def test_backward_twice(self, sample: Sample, draw: Draw) -> None:
        for reduction, smoothing in (("mean", 0.1), ("mean", 0.0), ("none", 0.0)):
            head = make_head(sample)
            h, target = vectors(draw, 6)
            loss = head.loss(h, target, reduction=reduction, label_smoothing=smoothing).sum()
            (first,) = torch.autograd.grad(loss, h, retain_graph=True)
            assert torch.equal(first, torch.autograd.grad(loss, h)[0])
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(loss, h)
