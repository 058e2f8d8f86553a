r"""Cross-entropy from tiles of scores that are seen one after the other: what is added up, and the gradient of a tile.

For vector ``t`` with target ``y``, class weights ``w``, smoothing ``e`` and ``C`` classes,

.. math:: \ell_t = (1-e)\, w_y (\mathrm{lse}_t - s_{yt}) + \tfrac{e}{C} \sum_c w_c (\mathrm{lse}_t - s_{ct})
          + z\, \mathrm{lse}_t^2, \qquad \frac{\partial \ell_t}{\partial s_{ct}} = a_t p_{ct} - b_t w_c - g_t [c = y].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tensorbed.backends import native
from tensorbed.backends.triton import serving


@dataclass(frozen=True)
class Terms:
    """What the loss is made of besides the scores.

    Shape:
        - class_weight: ``(classes,)`` or ``None``
    """

    classes: int
    label_smoothing: float
    class_weight: Tensor | None
    z_loss: float

    @property
    def all_weights(self) -> Tensor | float:
        return float(self.classes) if self.class_weight is None else self.class_weight.sum()

    def target_weights(self, target: Tensor) -> Tensor | float:  # (n,) -> (n,)
        """``w_y``, or 1 where all are. On a device a target may be none of the classes, and has any weight then."""
        if self.class_weight is None:
            return 1.0
        return self.class_weight[target if target.is_cpu else target.clamp(0, self.classes - 1)]

    def divisors(
        self, target: Tensor, reduction: str, counted: Tensor | None = None
    ) -> tuple[Tensor | float, Tensor | float]:  # (n,), (n,) -> (), ()
        """What a mean divides by: the weights of the targets, and for the z-loss how many are ``counted``."""
        if reduction != "mean":
            return 1.0, 1.0
        weights = self.target_weights(target)
        count = float(target.shape[0]) if counted is None else counted.sum()
        if not isinstance(weights, Tensor):
            return count, count
        weights = weights.sum() if counted is None else torch.where(counted, weights, 0).sum()
        if self.label_smoothing:
            # Targets of no weight have a loss by smoothing, but no mean: nan as in torch, not infinity.
            weights = torch.where(weights == 0, math.nan, weights)
        return weights, count


class Sums:
    """Running sums of one group of vectors, tile after tile; then losses, then gradients of the same tiles.

    Shape:
        - target: ``(n,)``, int64
        - tiles: ``(stop - start, n)``
    """

    def __init__(
        self, terms: Terms, target: Tensor, starts: list[int], dtype: torch.dtype, by_triton: bool = False
    ) -> None:
        self.terms, self.weights, self.by_triton = terms, terms.target_weights(target), by_triton
        self.target = target
        self.spans: dict[int, tuple[int, int]] | None = None  # one tile has the targets of all
        if len(starts) > 1 and not by_triton:  # those kernels compare, so that nobody waits for the device
            self.ordered, self.order = target.sort()  # by block, found once
            ends = torch.tensor([*starts, terms.classes], device=target.device)
            self.spans = dict(zip(starts, pairwise(torch.searchsorted(self.ordered, ends).tolist()), strict=True))
        self.total = torch.zeros_like(target, dtype=dtype)
        self.most = torch.full_like(self.total, -math.inf)
        self.picked = torch.zeros_like(self.total)
        self.all_scores = torch.zeros_like(self.total) if terms.label_smoothing else None

    def absorb(self, tile: Tensor, start: int) -> None:
        """Add one tile."""
        if self.by_triton:
            weight, totals = self._class_weights(start, tile), (self.most, self.total, self.picked, self.all_scores)
            serving.softmax().absorb(tile, start, self.target, *totals, weight)
            return
        absorb(tile, self.most, self.total)
        if self.spans is None:
            self.picked = tile.gather(0, self.target[None])[0].to(self.picked.dtype)
        else:
            rows, columns = self._targets(start)
            self.picked[columns] = tile[rows, columns].to(self.picked.dtype)
        if self.all_scores is not None:
            weight = self._class_weights(start, tile)
            self.all_scores += tile.sum(0, dtype=self.total.dtype) if weight is None else weight @ tile.to(weight.dtype)

    def _targets(self, start: int) -> tuple[Tensor, Tensor]:
        """Where in the block that begins here the targets are: rows of the tile and columns."""
        if self.spans is None:
            return self.target, torch.arange(self.target.shape[0], device=self.target.device)
        at = slice(*self.spans[start])
        return self.ordered[at] - start, self.order[at]

    def _class_weights(self, start: int, tile: Tensor) -> Tensor | None:
        weight = self.terms.class_weight
        return None if weight is None else weight[start : start + tile.shape[0]]

    def losses(self, lse: Tensor) -> tuple[Tensor, Tensor | None]:  # -> (n,), (n,)
        """Cross-entropy and z-loss of each vector, if there is one."""
        terms, e = self.terms, self.terms.label_smoothing
        loss = (1 - e) * self.weights * (lse - self.picked)
        if self.all_scores is not None:
            loss = loss + e / terms.classes * (terms.all_weights * lse - self.all_scores)
        return loss, terms.z_loss * lse.square() if terms.z_loss else None

    def turn_back(self, lse: Tensor, scale: Tensor, z_scale: Tensor) -> None:
        """From here on gradients of tiles, each vector's losses multiplied by these: ``(n,)``."""
        terms, e = self.terms, self.terms.label_smoothing
        self.lse, self.g = lse, (1 - e) * scale * self.weights
        self.b = scale * (e / terms.classes) if e else None
        self.a = self.g if self.b is None else self.g + self.b * terms.all_weights
        if terms.z_loss:
            self.a = self.a + z_scale * (2 * terms.z_loss) * lse

    def differentiate(self, tile: Tensor, start: int) -> None:
        """Turn a tile of scores into their gradient, in place: the formula above with its ``a``, ``b`` and ``g``."""
        if self.by_triton:
            weight = self._class_weights(start, tile)
            serving.softmax().differentiate(tile, start, self.target, self.lse, self.a, self.b, self.g, weight)
            return
        weight, (rows, columns) = self._class_weights(start, tile), self._targets(start)
        scores = tile[rows, columns].to(self.lse.dtype)
        probabilities(tile, self.lse, self.a, self.b, weight)
        if tile.dtype == self.lse.dtype:
            tile[rows, columns] -= self.g[columns]
            return
        # In half precision the probability of a likely target would be rounded to that of a sure one, and its gradient
        # to none: those are computed anew, and rounded last.
        smooth = None if self.b is None else self.b[columns] * (1 if weight is None else weight[rows])
        probabilities(scores[None], self.lse[columns], self.a[columns], smooth, None)
        tile[rows, columns] = (scores - self.g[columns]).to(tile.dtype)


def absorb(tile: Tensor, most: Tensor, total: Tensor) -> None:  # (rows, n), (n,), (n,)
    """Online log-sum-exp of each column: ``most`` is the largest so far, ``total`` the sum of ``exp(score - most)``."""
    if _is_native(tile):
        assert native.module is not None
        native.module.absorb(*_place(tile), most.data_ptr(), total.data_ptr(), torch.get_num_threads())
        return
    high = torch.maximum(most, tile.amax(0))
    safe = torch.where(high == -math.inf, 0, high)  # nothing but -inf so far
    total.mul_((most - safe).exp_()).add_((tile - safe).exp_().sum(0))
    most.copy_(high)


def probabilities(tile: Tensor, lse: Tensor, scale: Tensor, smooth: Tensor | None, weight: Tensor | None) -> None:
    """``tile = scale * exp(tile - lse) - smooth * weight`` in place; 0 where ``scale`` is, whatever the scores are.

    Shape:
        - lse, scale, smooth: ``(n,)``
        - weight: ``(rows,)``
    """
    if _is_native(tile):
        assert native.module is not None
        native.module.probabilities(
            *_place(tile),
            *(0 if one is None else one.data_ptr() for one in (lse, scale, smooth, weight)),
            torch.get_num_threads(),
        )
        return
    wide = tile.to(lse.dtype)  # half precision is rounded once, at the end
    wide.sub_(lse).exp_().mul_(scale).masked_fill_(scale == 0, 0)
    if smooth is not None:
        wide.sub_(smooth if weight is None else weight[:, None] * smooth)
    tile.copy_(wide)


def _is_native(tile: Tensor) -> bool:
    kernels = native.available and tile.dtype in (torch.float32, torch.bfloat16)
    return kernels and tile.is_cpu and type(tile) is Tensor


def _place(tile: Tensor) -> tuple[int, ...]:
    """A tile as the kernels take it."""
    return native.TYPES[tile.dtype], tile.data_ptr(), *tile.shape, tile.stride(0)
