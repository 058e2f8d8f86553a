"""Laws of the vocabulary head over any structure: scores, losses, choices, against a dense twin."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.nn import Head
from tensorbed.structures import Format, Structure
from tensorbed.structures.formats import Budget
from tensorbed.testing.laws import needs_true_gradient
from tensorbed.testing.layers import _leaves
from tensorbed.testing.samples import (
    Conformance,
    Draw,
    Sample,
    assert_all_near,
    assert_near,
    assert_rounded_once,
    on,
    one_of_each,
    spread,
)
from tensorbed.vocabulary.tiling import GROUPS, Task, Tiling, considered

# Each a set of keyword arguments of the loss; weights of classes are drawn where it says so.
TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2},
    "ignoring a class": {"ignore_index": 1},
    "weighted": {"class_weight": True},
    "weighted and smoothed": {"class_weight": True, "label_smoothing": 0.1, "reduction": "sum"},
    "soft cap": {"softcap": 1.5},
    "z-loss": {"z_loss": 0.3},
    "everything": {"class_weight": True, "label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.05},
    "everything, each": {
        "class_weight": True,
        "label_smoothing": 0.1,
        "softcap": 2.0,
        "z_loss": 0.05,
        "reduction": "none",
    },
}


def make_head(sample: Sample, bias: bool = True, dtype: torch.dtype = torch.float64, **options: Any) -> Head:
    """A head whose table has entries of size 1, and a drawn bias."""
    if sample.structure.can_initialise:
        torch.manual_seed(0)
        head = Head(sample.cols, sample.rows, sample.format, bias, std=1.0, dtype=torch.float64, **options)
        if head.bias is not None:
            with torch.no_grad():
                head.bias.copy_(Draw(sample, seed=0).normal(sample.rows))
    else:
        head = copy.deepcopy(_fitted_head(sample, bias, tuple(options.items())))
    return head.to(dtype)


@cache
def _fitted_head(sample: Sample, bias: bool, options: tuple[tuple[str, Any], ...]) -> Head:
    draw = Draw(sample, seed=0)
    table, drawn = draw.normal(sample.rows, sample.cols), draw.normal(sample.rows)
    freeze = not draw.differentiable
    return Head.from_pretrained(table, sample.format, freeze, bias=drawn if bias else None, **dict(options))


def dense_loss(head: Head, h: Tensor, target: Tensor, **terms: Any) -> Tensor:
    """The same loss from all logits of the table itself."""
    logits: Tensor = h @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    softcap, z_loss = terms.pop("softcap", None), terms.pop("z_loss", 0.0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weight = terms.pop("class_weight", None)
    flat = logits.reshape(-1, head.num_classes)
    loss: Tensor = F.cross_entropy(flat, target.reshape(-1), weight, **terms)
    counted = target.reshape(-1) != terms.get("ignore_index", -100)
    z: Tensor = z_loss * torch.where(counted, torch.logsumexp(flat, -1).square(), 0)
    reduction = terms.get("reduction", "mean")
    each = loss + z if reduction == "none" else loss + (z.sum() if reduction == "sum" else z.sum() / counted.sum())
    return each.reshape(target.shape) if reduction == "none" else each


def vectors(draw: Draw, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Hidden vectors that give scores of size 1, and targets, some of them ignored."""
    h = draw.normal(*shape, draw.sample.cols) / draw.sample.cols**0.5
    target = draw.index(*shape)
    if target.numel() > 4:
        target.view(-1)[3:5] = torch.tensor([-100, min(1, draw.sample.rows - 1)])
    return h.to(dtype).requires_grad_(), target


class HeadLaws(Conformance):
    """Inherit with ``samples`` set."""

    @staticmethod
    def terms(draw: Draw, name: str, dtype: torch.dtype) -> dict[str, Any]:
        said = dict(TERMS[name])
        if said.pop("class_weight", False):
            said["class_weight"] = (draw.normal(draw.sample.rows).abs() + 0.1).to(dtype)
        return said

    @spread(("terms", "dtype"), list(product(TERMS, [torch.float64, torch.float32])))
    def test_the_loss_is_that_of_all_logits(self, sample: Sample, draw: Draw, terms: str, dtype: torch.dtype) -> None:
        # Single precision goes through the compiled softmax.
        head = make_head(sample, dtype == torch.float32, dtype)
        h, target = vectors(draw, 3, 5, dtype=dtype)
        said = self.terms(draw, terms, dtype)
        if said.get("ignore_index") is not None:
            target = target.clamp_min(0)
        made, expected = head.loss(h, target, **said), dense_loss(head, h, target, **said)
        assert_near(made, expected)
        if draw.differentiable:
            leaves = [h, *_leaves(head)]
            grad = draw.normal(*made.shape, dtype=dtype)
            assert_all_near(torch.autograd.grad(made, leaves, grad), torch.autograd.grad(expected, leaves, grad))

    def test_every_way_and_all_passes(self, sample: Sample, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever is chosen, in tiles that do not divide the table or the batch, comes to the same."""
        head = make_head(sample)
        h, target = vectors(draw, 13)
        for reduction in ("mean", "none"):
            expected = dense_loss(head, h, target, reduction=reduction)
            grad = draw.normal(*expected.shape)
            leaves = [h, *_leaves(head)] if draw.differentiable else [h]
            gradients = torch.autograd.grad(expected, leaves, grad)
            for tiling in self.tilings(head.structure, 13, reduction):
                monkeypatch.setattr("tensorbed.vocabulary.loss.choose", lambda *_, t=tiling, **__: t)
                made = head.loss(h, target, reduction=reduction)
                assert_near(made, expected)
                assert_all_near(torch.autograd.grad(made, leaves, grad), gradients)

    @staticmethod
    def tilings(structure: Structure, tokens: int, reduction: str) -> list[Tiling]:
        found = []
        task = Task(structure, tokens, 2**14, trains=True, at_once=reduction != "none")
        for tiling in considered(task):
            step = tiling.scoring.cost.step
            height = min(structure.rows, step * max(1, structure.rows // (3 * step) + 1))
            found += [replace(tiling, group=5, height=height), replace(tiling, group=tokens, height=height)]
        assert any(tiling.passes == GROUPS for tiling in found) == (reduction != "none")
        return found

    @on(one_of_each)
    def test_gradcheck_of_the_loss(self, sample: Sample, draw: Draw) -> None:
        needs_true_gradient(draw)
        head = make_head(sample)
        h, target = vectors(draw, 4)
        names = [name for name, _ in head.named_parameters()]

        def loss(h: Tensor, *tensors: Tensor) -> Any:
            given = dict(zip(names, tensors, strict=True))
            return torch.func.functional_call(head, given, (h, target), {"label_smoothing": 0.1, "z_loss": 0.01})

        leaves = [h, *(p.detach().requires_grad_() for p in head.parameters())]
        assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)

    def test_logits_are_a_linear_layers(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample)
        for shape in ((), (1,), (7,), (2, 3), (0,), (2, 0, 3)):
            h, _ = vectors(draw, *shape)
            made, expected = head(h), F.linear(h, head.weight, head.bias)
            assert_near(made, expected)
            if draw.differentiable and made.numel():
                leaves = [h, *_leaves(head)]
                grad = draw.normal(*made.shape)
                assert_all_near(torch.autograd.grad(made, leaves, grad), torch.autograd.grad(expected, leaves, grad))

    @on(one_of_each)
    def test_empty_batches_and_batches_all_ignored(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample)
        for shape in ((0,), (3, 0)):
            h, target = vectors(draw, *shape)
            assert torch.isnan(head.loss(h, target))
            assert float(head.loss(h, target, reduction="sum").detach()) == 0
            assert head.loss(h, target, reduction="none").shape == shape
            head.loss(h, target, reduction="sum").backward()
            assert h.grad is not None
        h, target = vectors(draw, 6)
        target.fill_(-100)
        for reduction in ("mean", "sum"):
            made, expected = head.loss(h, target, reduction=reduction), dense_loss(head, h, target, reduction=reduction)
            assert torch.equal(made.isnan(), expected.isnan())
            (grad,) = torch.autograd.grad(made, h)
            assert torch.count_nonzero(grad) == 0
        assert torch.count_nonzero(head.loss(h, target, reduction="none")) == 0

    @on(one_of_each)
    def test_targets_out_of_range_raise(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample)
        h, target = vectors(draw, 4)
        for bad in (sample.rows, -1, 2**40):
            target[2] = bad
            with pytest.raises(IndexError, match=rf"target {bad} is out of range for {sample.rows} classes"):
                head.loss(h, target)
            with pytest.raises(IndexError, match=rf"target {bad} is out of range"):
                head.log_prob(h, target)
        target[2] = -100
        with pytest.raises(IndexError, match="target -100 is out of range"):
            head.log_prob(h, target)

    def test_log_probabilities_sum_to_one(self, sample: Sample, draw: Draw) -> None:
        """Over the real classes alone: padded rows take no probability."""
        head = make_head(sample)
        h, _ = vectors(draw, 1)
        every = torch.arange(sample.rows)
        made = head.log_prob(h.expand(sample.rows, -1), every)
        assert_near(made, F.log_softmax(head(h), -1)[0])
        assert float(made.detach().exp().sum()) == pytest.approx(1, rel=1e-12)

    def test_topk(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample)
        for shape in ((), (3,), (2, 9)):
            h, _ = vectors(draw, *shape)
            for k in (1, min(5, sample.rows), sample.rows):
                values, indices = head.topk(h, k)
                expected = torch.topk(F.linear(h, head.weight, head.bias), k)
                assert_near(values, expected.values)
                assert torch.equal(indices, expected.indices)
        for bad in (0, sample.rows + 1):
            with pytest.raises(ValueError, match=f"k={bad}: there are {sample.rows} classes"):
                head.topk(h, bad)

    @on(one_of_each)
    def test_samples_follow_the_probabilities(self, sample: Sample, draw: Draw) -> None:
        head = make_head(sample)
        h, _ = vectors(draw, 1)
        n, generator = 4000, torch.Generator().manual_seed(0)
        many = h.detach().expand(n, -1)
        kinds: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"top_k": min(3, sample.rows)}, {"softcap": 0.5}]
        for options in kinds:
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
                spread = (n * share * (1 - share)).clamp_min(0).sqrt() * 5 + 1
                assert bool(((count - n * share).abs() <= spread).all())
        assert torch.equal(head.sample(many[:3], temperature=0), head.topk(many[:3], 1).indices[:, 0])

    @spread("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_no_less_exact_than_the_dense_loss(self, sample: Sample, draw: Draw, dtype: torch.dtype) -> None:
        """Against float64 on the same rounded numbers, loss and gradient of the vectors."""
        head = make_head(sample, dtype=dtype)
        exact = make_head(sample, dtype=dtype).double()
        h, target = vectors(draw, 64, dtype=dtype)
        wide = h.detach().double().requires_grad_()
        true = exact.loss(wide, target)
        (true_grad,) = torch.autograd.grad(true, wide)
        made = head.loss(h, target)
        (grad,) = torch.autograd.grad(made, h)
        assert made.dtype == grad.dtype == dtype
        table = exact.weight.detach().to(dtype)
        bias = None if head.bias is None else head.bias.detach()
        dense = F.cross_entropy(F.linear(h, table, bias), target)
        (dense_grad,) = torch.autograd.grad(dense, h)
        unit = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
        assert abs(float(made.detach() - true.detach())) <= max(
            abs(float(dense.detach() - true.detach())), unit * abs(float(true.detach()))
        )
        distance = [float(torch.linalg.vector_norm(g.double() - true_grad)) for g in (grad, dense_grad)]
        few = 8 if dtype == torch.float32 else 1
        assert distance[0] <= max(distance[1], few * unit * float(torch.linalg.vector_norm(true_grad)))
        if draw.differentiable and dtype != torch.float32:
            # Of the tensors too: computed in single precision and rounded once.
            made, true = head.loss(h, target), exact.loss(wide, target)
            pairs = zip(_leaves(head), _leaves(exact), strict=True)
            for leaf, exact_leaf in pairs:
                (one,) = torch.autograd.grad(made, leaf, retain_graph=True)
                (other,) = torch.autograd.grad(true, exact_leaf, retain_graph=True)
                assert_near(one, other.to(dtype), units=1)

    @spread("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_scores_are_rounded_once(self, sample: Sample, draw: Draw, dtype: torch.dtype) -> None:
        """Against float64 on the same numbers, by every way: scores and the loss."""
        head = make_head(sample, dtype=dtype)
        exact = (head.packed() if hasattr(sample.structure, "packed") else make_head(sample, dtype=dtype)).double()
        h, target = vectors(draw, 9, dtype=dtype)
        wide = h.detach().double()
        keeps_the_table = sample.structure.row_multiply_adds == 0
        for head.impl in ("auto", "reference"):
            if keeps_the_table and head.impl == "reference":
                continue  # as torch.nn.Linear's: scores are rounded before they are used
            assert_rounded_once(head(h), exact(wide))
            for reduction in ("mean", "none"):
                made = head.loss(h, target, reduction=reduction)
                assert_rounded_once(made, exact.loss(wide, target, reduction=reduction))

    @on(one_of_each)
    def test_frozen_parts_get_no_gradient(self, sample: Sample, draw: Draw) -> None:
        if not draw.differentiable:
            pytest.skip(f"{draw.structure.kind} declares that it has no gradient")
        for frozen in ("h", *dict(make_head(sample).named_parameters())):
            for reduction in ("mean", "none"):
                head = make_head(sample)
                h, target = vectors(draw, 6)
                leaves = {"h": h, **dict(head.named_parameters())}
                leaves.pop(frozen).requires_grad_(False)
                made = head.loss(h, target, reduction=reduction).sum()
                expected = dense_loss(head, h, target, reduction=reduction).sum()
                wanted = list(leaves.values())
                assert_all_near(torch.autograd.grad(made, wanted), torch.autograd.grad(expected, wanted))
                assert_near(head(h), F.linear(h, head.weight, head.bias))

    def test_one_class(self, sample: Sample, draw: Draw) -> None:
        try:
            single = Sample(_unshaped(sample.format), 1, sample.cols)
            single.format.bind(Budget(1, sample.cols))
        except ValueError as reason:
            pytest.skip(f"no such table: {reason}")
        head = make_head(single)
        h, target = vectors(Draw(single, 0), 3)
        target.zero_()
        assert_near(head.loss(h, target), torch.zeros((), dtype=torch.float64), units=1e6)
        assert torch.equal(head.topk(h, 1).indices, torch.zeros(3, 1, dtype=torch.int64))
        assert torch.equal(head.sample(h), torch.zeros(3, dtype=torch.int64))


def _unshaped(format: Format) -> Format:
    """The format without a shape that was meant for another table."""
    return replace(format, shape=None) if getattr(format, "shape", None) is not None else format  # type: ignore[type-var]
