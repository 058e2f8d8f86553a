"""K-means of points in few dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 2**22  # distances computed at once
_AMONG = 8  # points for each centre that the first ones are drawn from


def k_means(points: Tensor, count: int, sweeps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from centres far apart; clusters that lose all of their points take the farthest ones.

    Shape:
        - points: ``(n, d)``
        - output: ``(n,)`` int64, the cluster of each, and ``(count, d)``, their centres
    """
    generator = torch.Generator().manual_seed(seed)
    centres = _far_apart(points, count, generator)
    for sweep in range(sweeps):
        nearest, distance = _nearest(points, centres)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        sizes = torch.bincount(nearest, minlength=count)
        empty = (sizes == 0).nonzero()[:, 0]
        moved = torch.where(sizes[:, None] > 0, sums / sizes.clamp_min(1)[:, None].to(sums.dtype), centres)
        if len(empty):
            moved[empty] = points[torch.topk(distance, len(empty)).indices]
        elif sweep and bool(torch.equal(moved, centres)):
            break
        centres = moved
    return _nearest(points, centres)[0], centres


def _far_apart(points: Tensor, count: int, generator: torch.Generator) -> Tensor:  # -> (count, d)
    """k-means++ among some of the points: each next one drawn by its squared distance to those before."""
    some = points[torch.randperm(points.shape[0], generator=generator)[: _AMONG * count].to(points.device)]
    centres = torch.empty(count, points.shape[1], dtype=points.dtype, device=points.device)
    centres[0] = some[0]
    distance = (some - some[0]).square().sum(1)
    drawn = torch.rand(count, generator=generator).tolist()
    for k in range(1, count):
        total = distance.cumsum(0)
        place = torch.searchsorted(total, total[-1] * drawn[k]).clamp_max(some.shape[0] - 1)
        centres[k] = some[place]
        distance = torch.minimum(distance, (some - centres[k]).square().sum(1))
    return centres


def _nearest(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:  # -> (n,), (n,)
    """The nearest centre of each point, and how far it is, squared."""
    height = max(1, _BLOCK // centres.shape[0])
    half = centres.square().sum(1) / 2
    places, values = [], []
    for start in range(0, points.shape[0], height):
        block = points[start : start + height]
        # |x - c|^2 / 2 without |x|^2, which is the same for every centre.
        least = torch.addmm(half, block, centres.T, alpha=-1).min(1)
        places.append(least.indices)
        values.append(2 * least.values + block.square().sum(1))
    return torch.cat(places), torch.cat(values)
