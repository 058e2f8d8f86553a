"""K-means of points in few dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 2**18  # distances computed at once, which stay in the cache
_AMONG = 8  # points for each centre that the first ones are drawn from
_SAMPLE = 32  # points for each centre in the first half of the sweeps


def k_means(
    points: Tensor, count: int, sweeps: int, seed: int = 0, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from centres far apart; clusters that lose all of their points take the farthest ones.

    The first half of the sweeps goes over a sample, the rest over all points.

    Shape:
        - points: ``(n, d)`` float32
        - weight: ``(n,)``, how much each counts; all alike if left out
        - output: ``(n,)`` int64, the cluster of each, and ``(count, d)``, their centres
    """
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randperm(points.shape[0], generator=generator).to(points.device)
    centres = _far_apart(points[mixed[: _AMONG * count]], count, generator)
    some = mixed[: _SAMPLE * count]
    if len(some) < len(mixed):
        centres = _lloyd(points[some], centres, sweeps // 2, None if weight is None else weight[some])
        sweeps -= sweeps // 2
    centres = _lloyd(points, centres, sweeps, weight)
    return _nearest(points, centres), centres


def _lloyd(points: Tensor, centres: Tensor, sweeps: int, weight: Tensor | None) -> Tensor:
    count = centres.shape[0]
    pulling = points if weight is None else points * weight[:, None]
    for sweep in range(sweeps):
        nearest = _nearest(points, centres)
        sums = torch.zeros_like(centres).index_add_(0, nearest, pulling)
        sizes = torch.bincount(nearest, weight, minlength=count).to(sums.dtype)
        empty = (sizes == 0).nonzero()[:, 0]
        moved = torch.where(sizes[:, None] > 0, sums / sizes.where(sizes > 0, 1)[:, None], centres)
        if len(empty):
            distance = (points - centres[nearest]).square().sum(1)
            moved[empty] = points[torch.topk(distance, len(empty)).indices]
        elif sweep and bool(torch.equal(moved, centres)):
            break
        centres = moved
    return centres


def _far_apart(some: Tensor, count: int, generator: torch.Generator) -> Tensor:  # -> (count, d)
    """k-means++: each next one drawn by its squared distance to those before."""
    centres = torch.empty(count, some.shape[1], dtype=some.dtype, device=some.device)
    centres[0] = some[0]
    distance = (some - some[0]).square().sum(1)
    drawn = torch.rand(count, generator=generator).tolist()
    for k in range(1, count):
        total = distance.cumsum(0)
        place = torch.searchsorted(total, total[-1] * drawn[k]).clamp_max(some.shape[0] - 1)
        centres[k] = some[place]
        distance = torch.minimum(distance, (some - centres[k]).square().sum(1))
    return centres


def _nearest(points: Tensor, centres: Tensor) -> Tensor:  # -> (n,)
    """The nearest centre of each point, or one that is as near to some five digits.

    Least values are found many times faster than their places, so the lowest bits of each distance name its centre.
    """
    count = centres.shape[0]
    if centres.shape[1] == 1:  # the centres in order, and halfway between them where one gives way to the next
        line, order = centres[:, 0].sort()
        return order[torch.bucketize(points[:, 0].contiguous(), (line[1:] + line[:-1]) / 2)]
    names = torch.arange(count, dtype=torch.int32, device=points.device)
    mask = (1 << (count - 1).bit_length()) - 1
    half, turned = centres.square().sum(1) / 2, centres.T.contiguous()
    height = max(1, _BLOCK // count)
    places = torch.empty(points.shape[0], dtype=torch.int64, device=points.device)
    for start in range(0, points.shape[0], height):
        block = points[start : start + height]
        # |x - c|^2 / 2 without |x|^2, which is the same for every centre.
        distance = torch.addmm(half, block, turned, alpha=-1)
        distance.view(torch.int32).bitwise_and_(~mask).bitwise_or_(names)
        places[start : start + height] = distance.amin(1).view(torch.int32) & mask
    return places
