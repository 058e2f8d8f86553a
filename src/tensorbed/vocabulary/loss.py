"""The cross-entropy of vectors against all rows of a table, without the table and without the logits; and the logits.

Passes over tiles of scores run with gradients off; autograd is told at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.triton import serving
from tensorbed.checks import require_int, require_number
from tensorbed.dispatch import differentiable_once, full_precision
from tensorbed.structures import Structure
from tensorbed.vocabulary.scorer import Group, Scorer, Vocabulary
from tensorbed.vocabulary.softmax import Sums, Terms
from tensorbed.vocabulary.tiling import GROUPS


@dataclass(frozen=True)
class Options:
    """How the loss is formed; what every call says besides its tensors. What makes no sense is refused."""

    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    z_loss: float = 0.0
    softcap: float | None = None
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f'reduction={self.reduction!r}: choose one of "mean", "sum", "none".')
        require_number(self.label_smoothing, "label_smoothing", low=0, high=1, inclusive=True)
        require_number(self.z_loss, "z_loss", low=0, inclusive=True)
        if self.softcap is not None:
            require_number(self.softcap, "softcap", low=0)
        ignored = self.ignore_index
        # What torch.compile takes for a symbol is an int already.
        checked = 0 if ignored is None or torch.compiler.is_compiling() else require_int(ignored, "ignore_index")
        if not -(2**63) <= checked < 2**63:
            raise ValueError(f"ignore_index={ignored}: targets are int64, which it does not fit into.")
        check_budget(self.memory_budget)


def check_budget(memory_budget: int | None) -> None:
    """A positive number of bytes, or none."""
    if memory_budget is not None and not 1 <= require_int(memory_budget, "memory_budget") < 2**63:
        raise ValueError(f"memory_budget={memory_budget}: a number of bytes, at least 1; leave None for the default.")


@dataclass(frozen=True)
class Asked:
    """One call: vectors ``(n, cols)``, what they are scored against, and checked targets ``(n,)`` of a loss.

    Without targets the scores themselves are asked for, ``(n, rows)``.
    """

    vocabulary: Vocabulary
    x: Tensor
    target: Tensor | None
    class_weight: Tensor | None
    options: Options

    @property
    def structure(self) -> Structure:
        return self.vocabulary.structure

    @property
    def trains(self) -> bool:
        return self.x.requires_grad or self.vocabulary.trains


def computed(asked: Asked) -> Tensor:
    """The loss or the scores, differentiable in the vectors, the bias and the tensors."""
    vocabulary = asked.vocabulary
    if torch.is_grad_enabled() and asked.trains:
        inputs = (asked.x, vocabulary.bias, *vocabulary.tensors)
        out: Tensor = _Computed.apply(asked, *inputs)  # type: ignore[no-untyped-call]
        return out
    return evaluate(replace(asked, x=asked.x.detach(), vocabulary=vocabulary.detached()))[0]


@torch.no_grad()
def evaluate(asked: Asked) -> tuple[Tensor, Tensor | None, list[Tensor | None] | None]:
    """The loss, the log-sum-exp of each vector, and :func:`differentiate` where doing it now is cheaper; or scores."""
    with full_precision(asked.x):
        if asked.target is None:
            return _scores(asked), None, None
        passes = _Passes(asked, asked.target)
        at_once = passes.scorer.tiling.passes == GROUPS
        passes.in_groups() if at_once else passes.forward()
        return passes.reduced(), passes.of_all(passes.lse), passes.gradients() if at_once else None


@torch.no_grad()
def differentiate(asked: Asked, lse: Tensor | None, grad: Tensor) -> list[Tensor | None]:
    """Gradients of the vectors, the bias and the tensors, where they were not made before or are there no more."""
    with full_precision(asked.x):
        if asked.target is None or lse is None:
            return _gradients_of_scores(asked, grad)
        passes = _Passes(asked, asked.target)
        passes.backward(lse, grad)
        return passes.gradients()


def _scores(asked: Asked) -> Tensor:
    """Scores ``(n, rows)`` in the dtype of the vectors."""
    x, budget = asked.x, asked.options.memory_budget
    scorer = Scorer(asked.vocabulary.detached(), x.detach(), budget, trains=asked.trains, whole=True)
    order, out = scorer.scores.order, x.new_empty(x.shape[0], asked.structure.rows)
    in_place = scorer.scores.any_layout and order is None and out.dtype == scorer.scores.dtype
    buffer = None if in_place else scorer.buffer()
    for group in scorer.groups():
        if buffer is None:
            for start, stop in scorer.each_block():
                scorer.write(group, out[group.at, start:stop].T)
            continue
        for start, tile in scorer.tiles(group, buffer, by_vector=True):
            rows = slice(start, start + tile.shape[0])
            out[group.at, rows if order is None else order[rows]] = tile.T.to(out.dtype)
    return out


def _gradients_of_scores(asked: Asked, grad: Tensor) -> list[Tensor | None]:
    """Gradients of the vectors, the bias and the tensors for those of the scores, ``(n, rows)``."""
    scorer = Scorer(asked.vocabulary, asked.x, asked.options.memory_budget, trains=True, whole=True)
    order, dtype = scorer.scores.order, scorer.scores.dtype
    copies = not scorer.scores.any_layout or scorer.padding is not None
    for group in scorer.groups():
        for start, stop in scorer.each_block():
            rows = slice(start, stop)
            tile = grad[group.at, rows if order is None else order[rows]].T
            layout = torch.contiguous_format if copies else torch.preserve_format
            scorer.backward(group, tile.to(dtype, copy=copies, memory_format=layout))
        scorer.finish(group)
    return scorer.gradients()


class _Passes:
    """The passes of one loss over tiles of scores, by the cheapest way.

    Ignored vectors are not even scored, unless finding them would wait for a device: there they count nothing.

    Shape:
        - kept: ``(n,)``, which vectors are not ignored; ``None`` where none is
        - counted: ``(n,)``, whether each vector is not ignored; ``None`` where those are left out
        - target: ``(n,)``, in the order in which rows are scored
        - loss, z_loss, lse: ``(n,)``, of each vector
    """

    def __init__(self, asked: Asked, target: Tensor) -> None:
        options, weight, x, self.asked = asked.options, asked.class_weight, asked.x, asked
        counts = None if options.ignore_index is None else target != options.ignore_index
        self.by_triton = serving.serves(asked.vocabulary.impl, x) and asked.vocabulary.dtype(x) == torch.float32
        self.counted = counts if self.by_triton else None
        left_out = counts is not None and not self.by_triton and not bool(counts.all())
        self.kept = counts.nonzero()[:, 0] if counts is not None and left_out else None
        if self.kept is not None:
            x, target = x.detach()[self.kept].requires_grad_(x.requires_grad), target[self.kept]
        said = {"trains": asked.trains, "at_once": options.reduction != "none"}
        self.scorer = scorer = Scorer(asked.vocabulary, x, options.memory_budget, options.softcap, **said)
        if weight is not None:
            weight = scorer.in_order(weight.detach().to(scorer.x.dtype)).contiguous()
        self.target = scorer.position(target if self.counted is None else torch.where(self.counted, target, 0))
        self.terms = Terms(asked.structure.rows, options.label_smoothing, weight, options.z_loss)
        self.divisors = self.terms.divisors(self.target, options.reduction, self.counted)
        self.loss, self.lse = (scorer.x.new_empty(scorer.x.shape[0]) for _ in range(2))
        self.z_loss = torch.empty_like(self.lse) if options.z_loss else None

    def forward(self) -> None:
        """Every tile once, none kept."""
        buffer = self.scorer.buffer()
        for group in self.scorer.groups():
            sums = self._sums(group)
            for start, tile in self.scorer.tiles(group, buffer):
                sums.absorb(self.scorer.cap_(tile), start)
            self._settle(group, sums)

    def backward(self, lse: Tensor, grad: Tensor) -> None:
        """Every tile once more, and its gradients."""
        if self.kept is not None:
            lse, grad = lse[self.kept], grad[self.kept] if grad.dim() else grad
        buffer, scales = self.scorer.buffer(), [grad.to(lse.dtype) * scale for scale in self._scales()]
        for group in self.scorer.groups():
            sums = self._sums(group)
            sums.turn_back(lse[group.at], *(scale[group.at] for scale in scales))
            for _, tile in self.scorer.tiles(group, buffer):
                self._go_back(group, sums, tile)
            self.scorer.finish(group)

    def in_groups(self) -> None:
        """Scores of a group over all rows, then their gradients while the next group's scores take their place."""
        scorer, scales = self.scorer, self._scales()
        buffers = {start: scorer.room(stop - start) for start, stop in scorer.blocks}
        before: tuple[Group, Sums] | None = None
        for group in chain(scorer.groups(), [None]):
            now = None if group is None else (group, self._sums(group))
            for start, _ in scorer.each_block():
                if before is not None:
                    self._go_back(*before, scorer.tile(before[0], buffers[start]))
                if now is not None:
                    tile = scorer.tile(now[0], buffers[start])
                    scorer.write(now[0], tile)
                    now[1].absorb(tile if scorer.softcap is None else scorer.cap_(tile.clone()), start)
            if before is not None:
                scorer.finish(before[0])
            if now is not None:
                now[1].turn_back(self._settle(*now), *(scale[now[0].at] for scale in scales))
            before = now

    def _scales(self) -> list[Tensor]:
        """One over what each vector's loss and z-loss are divided by; 0 for those that are ignored."""
        scales = [self.scorer.x.new_ones(self.target.shape[0]) / divisor for divisor in self.divisors]
        return scales if self.counted is None else [torch.where(self.counted, scale, 0) for scale in scales]

    def _sums(self, group: Group) -> Sums:
        starts = [start for start, _ in self.scorer.blocks]
        return Sums(self.terms, self.target[group.at], starts, self.scorer.x.dtype, self.by_triton)

    def _settle(self, group: Group, sums: Sums) -> Tensor:
        """The group's sums are complete."""
        lse = self.lse[group.at] = sums.most + sums.total.log()
        loss, z_loss = sums.losses(lse)
        self.loss[group.at] = self._of_counted(loss, group)
        if self.z_loss is not None and z_loss is not None:
            self.z_loss[group.at] = self._of_counted(z_loss, group)
        return lse

    def _of_counted(self, loss: Tensor, group: Group) -> Tensor:  # (n,) -> (n,)
        return loss if self.counted is None else torch.where(self.counted[group.at], loss, 0)

    def _go_back(self, group: Group, sums: Sums, tile: Tensor) -> None:
        """From a tile of scores to its gradients."""
        slope = self.scorer.slope(tile)
        sums.differentiate(self.scorer.cap_(tile), self.scorer.scores.start)
        if slope is not None:
            tile *= slope
        self.scorer.backward(group, tile)

    def reduced(self) -> Tensor:
        """The loss, or that of each vector."""
        if self.asked.options.reduction == "none":
            return self.of_all(self.loss if self.z_loss is None else self.loss + self.z_loss)
        loss = self.loss.sum() / self.divisors[0]
        return loss if self.z_loss is None else loss + self.z_loss.sum() / self.divisors[1]

    def gradients(self) -> list[Tensor | None]:
        """Of the vectors, the bias and the tensors."""
        of_x, *others = self.scorer.gradients()
        return [None if of_x is None else self.of_all(of_x), *others]

    def of_all(self, of_kept: Tensor) -> Tensor:  # (kept, *) -> (n, *)
        """With zeros for the vectors that are ignored."""
        if self.kept is None:
            return of_kept
        return of_kept.new_zeros(self.asked.x.shape[0], *of_kept.shape[1:]).index_copy_(0, self.kept, of_kept)


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asked: Asked, *inputs: Tensor | None) -> Tensor:
        (out, lse, ctx.grads), v = evaluate(asked), asked.vocabulary
        ctx.options, ctx.structure, ctx.padding_idx, ctx.impl = asked.options, v.structure, v.padding_idx, v.impl
        # Every tensor is saved by autograd, which notices when one is written to before backward.
        ctx.save_for_backward(lse, asked.target, asked.class_weight, v.padding_row, *inputs)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        lse, target, class_weight, padding_row, *inputs = saved
        # Scaled where they are, those of a dense table are as large as it; if asked for again, they are made again.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            x, bias, *tensors = inputs
            vocabulary = Vocabulary(ctx.structure, tuple(tensors), bias, ctx.padding_idx, padding_row, ctx.impl)
            grads = differentiate(Asked(vocabulary, x, target, class_weight, ctx.options), lse, grad)
        elif not (grad.is_cpu and float(grad) == 1):
            grads = [None if one is None else one.mul_(grad) for one in grads]
        return None, *in_dtypes(grads, inputs)


def in_dtypes(grads: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients in the dtypes of what they are of."""
    pairs = zip(grads, inputs, strict=True)
    return [grad if grad is None or of is None else grad.to(of.dtype) for grad, of in pairs]
