"""K-means of points in few dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorbed.workers import Workers

_BLOCK = 2**18  # distances computed at once, which stay in the cache
_PIECE = 2**12  # points that one thread goes through by itself
_AMONG = 8  # points for each centre that the first ones are drawn from
_GROUPED = 2**14  # points halved at once
_STEPS = 8  # of the power method
_SAMPLE = 32  # points for each centre in the first half of the sweeps


def k_means(points: Tensor, count: int, sweeps: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from centres far apart; clusters that lose all of their points take the farthest ones.

    The first half of the sweeps goes over a sample, the rest over all points.

    Shape:
        - points: ``(n, d)`` float32
        - weight: ``(n,)``, how much each counts; all alike if left out
        - output: ``(n,)`` int64, the cluster of each, and ``(count, d)``, their centres
    """
    # Drawn on the CPU, whatever the default device: the same centres everywhere.
    generator = torch.Generator("cpu").manual_seed(0)
    mixed = torch.randperm(points.shape[0], generator=generator, device="cpu").to(points.device)
    centres = _far_apart(points[mixed[: _AMONG * count]], count, generator)
    some = mixed[: _SAMPLE * count]
    with Workers() as workers:
        if len(some) < len(mixed):
            sample = _Points(points[some], None if weight is None else weight[some], workers)
            centres = sample.lloyd(centres, sweeps // 2)
            sweeps -= sweeps // 2
        everything = _Points(points, weight, workers)
        centres = everything.lloyd(centres, sweeps)
        return torch.cat(everything.nearest(centres)), centres


def clustered(points: Tensor) -> Tensor:  # (n, d) -> (n,) int64
    """An order in which points that are alike stand side by side: halved along their main direction, then each half.

    The direction is found by a few steps of the power method, for all groups of a level at once.
    """
    rows, height = points.shape[0], 1
    while height < rows:
        height *= 2
    # Rows beyond the last stand for none; they are as good as means of their groups, and are dropped at the end.
    order = torch.arange(height, device=points.device)[None]
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(points.shape[1], generator=generator, device="cpu").to(points)
    while order.shape[1] > 2:
        along = torch.cat(
            [_along_main(points, group, start) for group in order.split(max(1, _GROUPED // order.shape[1]))]
        )
        order = order.gather(1, along.argsort(dim=1, stable=True)).view(2 * order.shape[0], -1)
    order = order.reshape(-1)
    return order[order < rows]


def _along_main(points: Tensor, groups: Tensor, start: Tensor) -> Tensor:  # (n, d), (g, m), (d,) -> (g, m)
    """How far each point of some groups lies along the main direction of its group."""
    real = (groups < points.shape[0])[..., None]
    own = torch.where(real, points[groups.clamp_max(points.shape[0] - 1)], 0)
    own = torch.where(real, own - own.sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1), 0)
    direction = start.expand(groups.shape[0], -1)[..., None]
    for _ in range(_STEPS):
        direction = torch.nn.functional.normalize(own.mT @ (own @ direction), dim=1)
    return (own @ direction)[..., 0]


class _Points:
    """Points in pieces of a fixed size, so that sums do not depend on the number of workers."""

    def __init__(self, points: Tensor, weight: Tensor | None, workers: Workers) -> None:
        self._workers = workers
        self._points = points.split(_PIECE)
        self._weights = [None] * len(self._points) if weight is None else list(weight.split(_PIECE))

    def lloyd(self, centres: Tensor, sweeps: int) -> Tensor:
        for sweep in range(sweeps):
            nearest = self.nearest(centres)
            sums, sizes = self._sums(nearest, centres)
            empty = (sizes == 0).nonzero()[:, 0]
            moved = torch.where(sizes[:, None] > 0, sums / sizes.where(sizes > 0, 1)[:, None], centres)
            if len(empty):  # they take the points that are farthest from their centres
                points = torch.cat(self._points)
                distances = (points - centres[torch.cat(nearest)]).square().sum(1)
                moved[empty] = points[torch.topk(distances, len(empty)).indices]
            elif sweep and bool(torch.equal(moved, centres)):
                break
            centres = moved
        return centres

    def nearest(self, centres: Tensor) -> list[Tensor]:
        return self._workers.map(lambda piece: _nearest(piece, centres), self._points)

    def _sums(self, nearest: Sequence[Tensor], centres: Tensor) -> tuple[Tensor, Tensor]:  # -> (count, d), (count,)
        count = centres.shape[0]

        def of_piece(piece: tuple[Tensor, Tensor | None, Tensor]) -> tuple[Tensor, Tensor]:
            points, weight, place = piece
            pulling = points if weight is None else points * weight[:, None]
            sums = torch.zeros_like(centres).index_add_(0, place, pulling)
            return sums, torch.bincount(place, weight, minlength=count).to(sums.dtype)

        pieces = self._workers.map(of_piece, zip(self._points, self._weights, nearest, strict=True))
        sums, sizes = (torch.stack(parts).sum(0) for parts in zip(*pieces, strict=True))
        return sums, sizes


def _far_apart(some: Tensor, count: int, generator: torch.Generator) -> Tensor:  # -> (count, d)
    """k-means++: each next one drawn by its squared distance to those before."""
    centres = torch.empty(count, some.shape[1], dtype=some.dtype, device=some.device)
    centres[0] = some[0]
    distance = (some - some[0]).square().sum(1)
    drawn = torch.rand(count, generator=generator, device="cpu").tolist()
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
