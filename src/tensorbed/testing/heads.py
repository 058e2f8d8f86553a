"""Laws of the head over any structure: scores, losses, choices against a dense twin, memory, autograd and graphs."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.nn import Head
from tensorbed.structures import Structure
from tensorbed.testing import samples as choices
from tensorbed.testing.layers import HALF
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
    largest_allocation,
    leaves_of,
    make,
    most_held,
    on,
    one_of_each,
    spread,
)
from tensorbed.vocabulary.tiling import GROUPS, Task, Tiling, choose, considered


class _Vectors(Tensor):
    """Vectors that are not plain tensors: what is computed of them is computed by the library's operators."""


_EVERYTHING = {"class_weight": True, "label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.05}
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
    "everything": _EVERYTHING,
    "everything, each": {**_EVERYTHING, "reduction": "none"},
}


def drawn_terms(draw: Draw, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of :data:`TERMS`."""
    said = dict(TERMS[name])
    if said.pop("class_weight", False):
        said["class_weight"] = (draw.normal(draw.sample.rows).abs() + 0.1).to(dtype)
    return said


def dense_loss(head: Head, h: Tensor, target: Tensor, **terms: Any) -> Tensor:
    """The same loss from all logits of the table itself, in double precision.

    In single, torch's own gradients of a soft cap are off by a hundred units where scores are near it.
    """
    logits: Tensor = h.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    softcap, z_loss, weight = terms.pop("softcap", None), terms.pop("z_loss", 0.0), terms.pop("class_weight", None)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat, target_of = logits.reshape(-1, head.num_classes), target.reshape(-1)
    loss: Tensor = F.cross_entropy(flat, target_of, None if weight is None else weight.double(), **terms)
    counted = target_of != terms.get("ignore_index", -100)
    z: Tensor = z_loss * torch.where(counted, torch.logsumexp(flat, -1).square(), 0)
    reduction = terms.get("reduction", "mean")
    if reduction == "none":
        return (loss + z).reshape(target.shape).to(h.dtype)
    return (loss + (z.sum() if reduction == "sum" else z.sum() / counted.sum())).to(h.dtype)


def vectors(draw: Draw, *shape: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Hidden vectors that give scores of size 1, and targets, some of them ignored."""
    h = draw.normal(*shape, draw.sample.cols) / draw.sample.cols**0.5
    target = draw.index(*shape)
    if target.numel() > 4:
        target.view(-1)[3:5] = torch.tensor([-100, min(1, draw.sample.rows - 1)])
    return h.to(dtype or draw.sample.dtype).requires_grad_(), target


class HeadLaws(Conformance):
    """Values and gradients; inherit with ``samples`` set."""

    @spread(("terms", "dtype"), list(product(TERMS, [torch.float64, torch.float32])))
    def test_the_loss_is_that_of_all_logits(self, sample: Sample, draw: Draw, terms: str, dtype: torch.dtype) -> None:
        head = make(sample, Head, dtype=dtype)
        if dtype == torch.float64:  # single precision goes through the compiled softmax
            head.bias = None
        h, target = vectors(draw, 3, 5, dtype=dtype)
        said = drawn_terms(draw, terms, dtype)
        target = target.clamp_min(0) if "ignore_index" in said else target
        made, expected = head.loss(h, target, **said), dense_loss(head, h, target, **said)
        assert_same(made, expected, [h, *leaves_of(head)], draw)

    def test_every_way_and_all_passes(self, sample: Sample, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever is chosen, in tiles that do not divide the table or the batch, comes to the same."""
        head = make(sample, Head)
        h, target = vectors(draw, 13)
        for reduction in ("mean", "none"):
            expected = partial(dense_loss, head, h, target, reduction=reduction)
            for tiling in self._tilings(head.structure, 13, reduction):
                monkeypatch.setattr("tensorbed.vocabulary.scorer.choose", lambda *_, t=tiling, **__: t)
                made = head.loss(h, target, reduction=reduction)
                assert_same(made, expected(), [h, *leaves_of(head)], draw)

    @staticmethod
    def _tilings(structure: Structure, tokens: int, reduction: str) -> list[Tiling]:
        found = []
        task = Task(structure, tokens, 2**14, trains=True, at_once=reduction != "none")
        for tiling in considered(task):
            step = tiling.scoring.cost.step
            height = min(structure.rows, step * max(1, structure.rows // (3 * step) + 1))
            found += [replace(tiling, group=5, height=height), replace(tiling, group=tokens, height=height)]
        assert any(tiling.passes == GROUPS for tiling in found) == (reduction != "none")
        return found

    def test_logits_are_a_linear_layers(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head)
        for shape in ((), (1,), (7,), (2, 3), (0,), (2, 0, 3)):
            h, _ = vectors(draw, *shape)
            made, expected = head(h), F.linear(h, head.weight, head.bias)
            assert_same(made, expected, [h, *leaves_of(head)] if made.numel() else [], draw)

    @on(one_of_each)
    def test_empty_batches_and_batches_all_ignored(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head)
        for shape, reduction in product(((0,), (3, 0), (6,)), ("mean", "sum", "none")):
            h, target = vectors(draw, *shape)
            target.fill_(-100)
            made, expected = head.loss(h, target, reduction=reduction), dense_loss(head, h, target, reduction=reduction)
            assert torch.equal(made.isnan(), expected.isnan())
            assert bool(made.isnan().all()) if reduction == "mean" else torch.count_nonzero(made) == 0
            (grad,) = torch.autograd.grad(made.sum(), h)
            assert torch.count_nonzero(grad) == 0

    def test_log_probabilities_sum_to_one(self, sample: Sample, draw: Draw) -> None:
        """Over the real classes alone: padded rows take no probability."""
        head = make(sample, Head)
        h, _ = vectors(draw, 1)
        made = head.log_prob(h.expand(sample.rows, -1), torch.arange(sample.rows))
        assert_near(made, F.log_softmax(head(h), -1)[0])
        exact = max(1e-12, 32 * torch.finfo(made.dtype).eps)
        assert float(made.detach().double().exp().sum()) == pytest.approx(1, rel=exact)

    def test_topk(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head)
        for shape in ((), (3,), (2, 9)):
            h, _ = vectors(draw, *shape)
            for k in (1, min(5, sample.rows), sample.rows):
                values, indices = head.topk(h, k)
                scores = F.linear(h, head.weight, head.bias)
                expected = torch.topk(scores, k)
                assert_near(values, expected.values)
                assert_near(scores.gather(-1, indices), expected.values)
                assert all(len(set(row)) == k for row in indices.reshape(-1, k).tolist())
                if scores.dtype == torch.float64:  # else rounding decides which of two scores comes first
                    assert torch.equal(indices, expected.indices)
        for bad in (0, sample.rows + 1):
            with pytest.raises(ValueError, match=f"k={bad}: there are {sample.rows} classes"):
                head.topk(h, bad)

    @spread("dtype", HALF)
    def test_half_precision_scores_are_rounded_once(self, sample: Sample, draw: Draw, dtype: torch.dtype) -> None:
        """Against float64 on the same numbers, by every way: scores, the loss and its gradients."""
        head = make(sample, Head, dtype=dtype)
        twin = copy.deepcopy(head).double()
        rounds = sample.structure.packs
        exact = head.packed().double() if rounds else twin
        h, target = vectors(draw, 64, dtype=dtype)
        wide = h.detach().double().requires_grad_()
        grads = torch.autograd.grad(head.loss(h, target), [h, *leaves_of(head)])
        wanted = torch.autograd.grad(twin.loss(wide, target), [wide, *leaves_of(twin)])
        # A twin that rounds has scales of more digits: each tensor that it reads may differ by a unit.
        units = len(sample.structure.tensors()) if rounds else 1
        assert_all_near(grads, [grad.to(dtype) for grad in wanted], units=units)
        # Where the table is kept, the reference rounds scores before they are used, as torch.nn.Linear does.
        for head.impl in ("auto", "reference") if sample.structure.row_multiply_adds != 0 else ("auto",):
            assert_rounded_once(head(h), exact(wide))
            for reduction in ("mean", "none"):
                made = head.loss(h, target, reduction=reduction)
                assert_rounded_once(made, exact.loss(wide, target, reduction=reduction))

    @on(choices.trained, one_of_each)
    def test_frozen_parts_get_no_gradient(self, sample: Sample, draw: Draw) -> None:
        for frozen, reduction in product(("h", *dict(make(sample, Head).named_parameters())), ("mean", "none")):
            head = make(sample, Head)
            h, target = vectors(draw, 6)
            leaves = {"h": h, **dict(head.named_parameters())}
            leaves.pop(frozen).requires_grad_(False)
            made, expected = head.loss(h, target, reduction=reduction), dense_loss(head, h, target, reduction=reduction)
            assert_same(made, expected, list(leaves.values()), draw)
            assert_near(head(h), F.linear(h, head.weight, head.bias))

    def test_one_class(self, sample: Sample, draw: Draw) -> None:
        format: Any = sample.format
        try:  # without a shape that was meant for another table
            single = Sample(replace(format, shape=None) if getattr(format, "shape", None) else format, 1, sample.cols)
            head = make(single, Head)
        except ValueError as reason:
            pytest.skip(f"no such table: {reason}")
        h, target = vectors(Draw(single, 0), 3)
        target.zero_()
        assert_near(head.loss(h, target), torch.zeros((), dtype=torch.float64), units=1e6)
        assert torch.equal(head.topk(h, 1).indices, torch.zeros(3, 1, dtype=torch.int64))
        assert torch.equal(head.sample(h), torch.zeros(3, dtype=torch.int64))


class HeadLimits(Conformance):
    """Beyond values: memory, transforms, precision contexts, what autograd is told; inherit with ``samples`` set."""

    @on(choices.small)
    @spread("reduction", ["mean", "none"])
    def test_the_loss_allocates_neither_table_nor_logits(self, sample: Sample, draw: Draw, reduction: str) -> None:
        head = make(sample, Head, dtype=torch.float32)
        tokens = 4 * sample.cols
        h, target = vectors(draw, tokens, dtype=torch.float32)
        with largest_allocation() as most:
            head.loss(h, target, reduction=reduction).sum().backward()
        table, logits = sample.rows * sample.cols, sample.rows * tokens
        given = max(h.numel(), *(t.numel() for t in head.params().values()))
        assert most() < max(min(table, logits), given + 1)

    @on(choices.small)
    @spread(("reduction", "budget"), list(product(["mean", "none"], [2**18, 2**20, 2**22])))
    def test_a_memory_budget_is_kept(self, sample: Sample, draw: Draw, reduction: str, budget: int) -> None:
        """Where any way fits into it, what is held at once does, besides what is given and returned."""
        head = make(sample, Head, dtype=torch.float32, memory_budget=budget)
        h, target = vectors(draw, 400, dtype=torch.float32)
        task = Task.of(head.structure, 400, 4, budget, trains=True, at_once=reduction == "mean")
        allowed = budget if choose(task).numbers <= task.numbers else 4 * min(s.numbers for s in considered(task))
        with most_held() as held:
            head.loss(h, target, reduction=reduction).sum().backward()
        given = 4 * sum(t.numel() for t in (h, *head.parameters()))
        # Gradients, the same once more on their way out, and vectors of one number a token or class.
        assert held() <= 1.1 * allowed + 3 * given + 16 * 8 * (400 + sample.rows)

    @on(choices.smallest_of_each)
    def test_any_memory_budget_gives_the_same(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head)
        h, target = vectors(draw, 50)
        expected = dense_loss(head, h, target)
        for head.memory_budget in (1, 4096, 2**16, 2**30):
            assert_near(head.loss(h, target), expected)

    @on(choices.trained, one_of_each)
    def test_writes_before_a_head_s_backward_are_noticed(self, sample: Sample, draw: Draw) -> None:
        h, target = vectors(draw, 7)
        weight = draw.normal(sample.rows).abs()
        head = make(sample, Head)
        leaves = [h, *leaves_of(head)]
        written: list[Any] = [h, target, weight, head.bias, *head.params().values()]
        for head.impl in ("auto", "reference"):
            for reduction in ("mean", "none"):
                loss = partial(head.loss, h, target, reduction=reduction, class_weight=weight, label_smoothing=0.1)
                assert_writes_are_noticed(loss, leaves, written)
            assert_writes_are_noticed(partial(head, h), leaves, written)

    @on(one_of_each)
    def test_transforms_follow_the_plain_loss(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head)
        h, target = vectors(draw, 4)
        each = torch.func.vmap(lambda x, y: head.loss(x, y, ignore_index=-1, reduction="sum"))
        target = target.clamp_min(0)
        assert_near(each(h, target), dense_loss(head, h, target, reduction="none"))
        made = torch.func.grad(lambda x: head.loss(x, target))(h)
        (expected,) = torch.autograd.grad(dense_loss(head, h, target), h)
        assert_near(made, expected)

    @on(one_of_each)
    def test_autocast_of_heads(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head, dtype=torch.float32)
        h, target = vectors(draw, 8, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = head(h), head.loss(h, target)
        assert logits.dtype == torch.bfloat16
        assert loss.dtype == torch.float32
        # As a linear layer's, products are of bfloat16 and their sums are not.
        expected = dense_loss(head, h, target)
        leaves = [h, *leaves_of(head)]
        grads, wanted = (torch.autograd.grad(of, leaves) for of in (loss, expected))
        eps = torch.finfo(torch.bfloat16).eps
        reach = (h.abs() @ head.weight.abs().T).detach().max()
        assert float((loss - expected).detach().abs()) <= 4 * eps * float(reach)
        for grad, exact in zip(grads, wanted, strict=True):
            assert float((grad - exact).norm()) <= 8 * eps * float(exact.norm())

    @on(one_of_each)
    def test_second_derivatives_are_refused_or_right(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head)
        h, target = vectors(draw, 3)
        for made in (head.loss(h, target, z_loss=0.1), head(h).sum()):
            (grad,) = torch.autograd.grad(made, h, create_graph=True)
            with pytest.raises(RuntimeError, match='use impl="reference"'):
                grad.sum().backward(retain_graph=True)
            for leaf in leaves_of(head):
                with pytest.raises(RuntimeError, match='use impl="reference"'):
                    torch.autograd.grad(grad.sum(), leaf, retain_graph=True)
        for leaf in (h, *leaves_of(head)):
            expected = _second(dense_loss(head, h, target), h, leaf)
            try:
                second = _second(head.loss(h.as_subclass(_Vectors), target), h, leaf)
            except RuntimeError as error:
                if 'use impl="reference"' not in str(error):
                    raise
            else:
                assert_near(second, expected)
        head.impl = "reference"
        assert_near(_second(head.loss(h, target), h, h), _second(dense_loss(head, h, target), h, h))


def _second(loss: Tensor, h: Tensor, leaf: Tensor) -> Tensor:
    """The derivative by a leaf of the squared gradient of the vectors."""
    (grad,) = torch.autograd.grad(loss, h, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), leaf)[0]


class HeadTracing(Traced):
    """Losses, logits and choices of heads; inherit with ``samples`` set."""

    @on(one_of_each)
    @spread("reduction", ["mean", "none"])
    def test_compiled_loss(self, sample: Sample, draw: Draw, reduction: str) -> None:
        head, said = make(sample, Head, dtype=torch.float32), {"reduction": reduction, "label_smoothing": 0.1}
        compiled = self.compiled(partial(head.loss, **said), sample)
        for n in (6, 9):
            h, target = vectors(draw, n, dtype=torch.float32)
            assert_same(compiled(h, target), dense_loss(head, h, target, **said), [h, *leaves_of(head)], draw)
        with pytest.raises(IndexError, match="out of range"):
            compiled(h, torch.full_like(target, sample.rows))

    @on(one_of_each)
    def test_compiled_loss_of_every_term(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head, dtype=torch.float32)
        said = {**drawn_terms(draw, "everything", torch.float32), "ignore_index": 3}
        compiled: Any = torch.compile(partial(head.loss, **said), fullgraph=True, dynamic=True, backend="aot_eager")
        h, target = vectors(draw, 7, dtype=torch.float32)
        target = target.clamp_min(0)
        assert_same(compiled(h, target), dense_loss(head, h, target, **said), [h, *leaves_of(head)], draw)

    @on(one_of_each)
    def test_compiled_logits_and_topk(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head, dtype=torch.float32)
        h, _ = vectors(draw, 5, dtype=torch.float32)
        expected, k = F.linear(h, head.weight, head.bias), min(3, sample.rows)
        assert_same(self.compiled(head, sample)(h), expected, [h, *leaves_of(head)], draw)
        best: Any = torch.compile(partial(head.topk, k=k), fullgraph=True, backend="aot_eager")
        assert torch.equal(best(h).indices, torch.topk(expected, k).indices)

    @on(one_of_each)
    def test_exported_logits(self, sample: Sample, draw: Draw) -> None:
        head = make(sample, Head, dtype=torch.float32)
        h = vectors(draw, 3, dtype=torch.float32)[0].detach()
        exported = torch.export.export(head, (h,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        assert_near(exported.module()(h), F.linear(h, head.weight, head.bias).detach())
