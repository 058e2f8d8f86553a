"""Tensor rings: TR-SVD (Zhao et al. 2016) for a start, then alternating least squares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tensorbed.decompose.train import balanced, cut_in_turn, left_of
from tensorbed.decompose.truncate import truncate
from tensorbed.progress import track

_ENOUGH = 1e-3  # a sweep that lowers the error by less than this fraction is the last
_MOST_UNKNOWNS = 4096  # of one row of a core: the normal equations are this large squared
_CHUNK = 2**22  # numbers in one partial contraction


def tr_svd(
    tensor: Tensor, ranks: Sequence[int] | None = None, bound: float | None = None
) -> list[Tensor]:  # (n_1, ..., n_N) -> cores (R_{k-1}, n_k, R_k), R_0 = R_N
    """Split the first unfolding's rank into ``R_0 R_1``, then cut as in a train, the joint carried along at the end."""
    sizes, label = list(tensor.shape), "fitting a tensor ring"
    share, both = bound and bound / math.sqrt(len(sizes) - 1), math.prod(ranks[:2]) if ranks else None
    first = truncate(tensor.reshape(sizes[0], -1), rank=both, bound=share, label=f"{label}, first cut")
    # As equal as they go where only their product is known.
    joint = ranks[0] if ranks else math.isqrt(first.left.shape[1])
    rank = ranks[1] if ranks else -(-first.left.shape[1] // joint)
    left, right = _widen(first.left, first.right, joint * rank)
    merged = [rank * sizes[1], *sizes[2:]]
    merged[-1] *= joint
    rest = right.reshape(joint, rank, -1).permute(1, 2, 0).reshape(merged)  # (R_1 n_2, n_3, ..., n_N R_0)
    train = cut_in_turn(rest, ranks and ranks[2:], bound and left_of(bound, first.lost), label)
    cores = [left.reshape(sizes[0], joint, rank).transpose(0, 1)]
    for k, bond in enumerate(ranks[2 : len(sizes)] if ranks else ()):
        left, right = _widen(train[k].flatten(0, 1), train[k + 1].flatten(1), bond)
        train[k : k + 2] = left.view(-1, merged[k], bond), right.view(bond, merged[k + 1], -1)
    for n, core in zip(sizes[1:], train, strict=True):
        cores.append(core.reshape(cores[-1].shape[2], n, -1))
    return balanced(cores)


def _widen(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Fill up to ``rank`` components: noise on the left against zeros on the right, for the sweeps to use."""
    missing = rank - left.shape[1]
    if missing <= 0:
        return left, right
    generator = torch.Generator(left.device).manual_seed(0)
    noise = torch.randn(left.shape[0], missing, dtype=left.dtype, device=left.device, generator=generator)
    filled = torch.cat([left, noise / left.shape[0] ** 0.5], 1)
    return filled, torch.cat([right, right.new_zeros(missing, right.shape[1])])


def improve(tensor: Tensor, cores: Sequence[Tensor], sweeps: int = 20) -> list[Tensor]:
    """Alternating least squares: each core in turn the best for the others. What comes back is never worse."""
    # The products with the tensor dominate; single precision is enough for them where the tensor is large.
    dtype = torch.float64 if tensor.numel() <= 2**22 else torch.promote_types(tensor.dtype, torch.float32)
    tensor = tensor.to(dtype)
    cores = [core.double() for core in cores]
    best, error = cores, _distance(tensor, cores)
    if any(core.shape[0] * core.shape[2] > _MOST_UNKNOWNS for core in cores):
        return balanced(best)
    for _ in track(range(sweeps), "fitting a tensor ring, sweeps"):
        for k in range(len(cores)):
            solved = _solve(_gram(cores, k), _seen_by(tensor, cores, k))
            cores = [*cores[:k], solved, *cores[k + 1 :]]
        now = _distance(tensor, cores)
        if not now < error:
            break
        best, improved = cores, error - now
        error = now
        if improved < _ENOUGH * error:
            break
    return balanced(best)


def _distance(tensor: Tensor, cores: Sequence[Tensor]) -> float:
    """``||tensor - ring||_F``, by differences and not by norms, a few slices of the first mode at a time."""
    sizes = tensor.shape
    joint = cores[0].shape[0]
    height = max(1, _CHUNK // (math.prod(sizes[1:-1]) * max(sizes[-1], joint * cores[-1].shape[0])))
    total = 0.0
    for start in range(0, sizes[0], height):
        part = tensor[start : start + height]
        made = cores[0][:, start : start + height].reshape(-1, cores[0].shape[2]).to(tensor.dtype)
        for core in cores[1:-1]:
            left, n, right = core.shape
            made = (made @ core.to(tensor.dtype).reshape(left, n * right)).reshape(-1, right)
        # (R_0, entries, R_{N-1}) against the last core (R_{N-1}, n_N, R_0): sum over both bonds at once.
        left, n, _ = cores[-1].shape
        made = made.reshape(joint, -1, left).transpose(0, 1).reshape(-1, joint * left)
        last = cores[-1].to(tensor.dtype).permute(2, 0, 1).reshape(joint * left, n)
        total += float((part.reshape(-1, n) - made @ last).double().square().sum())
    return math.sqrt(total)


def _seen_by(tensor: Tensor, cores: Sequence[Tensor], k: int) -> Tensor:  # -> (R_{k-1}, n_k, R_k)
    """The tensor contracted with every core but the k-th, from the far side of the ring, in chunks of mode k."""
    order = len(cores)
    others = [cores[(k + step) % order].to(tensor.dtype) for step in range(1, order)]
    turned = tensor.permute([(k + step) % order for step in range(order)])
    left, right = cores[k].shape[0], cores[k].shape[2]
    most = tensor.numel() // tensor.shape[k] // turned.shape[-1] * others[-1].shape[0] * left
    height = max(1, _CHUNK // most)
    parts = []
    for start in range(0, turned.shape[0], height):
        chunk = turned[start : start + height]
        c = chunk.shape[0]
        # (c, n_{k+1}, ..., n_{k-1}) -> one trailing pair of bonds, absorbing a core at a time.
        rank, n, joint = others[-1].shape
        state = chunk.reshape(-1, n) @ others[-1].transpose(0, 1).reshape(n, rank * joint)
        for core in reversed(others[:-1]):
            above, n, rank = core.shape
            state = state.reshape(-1, n * rank, joint)
            state = core.reshape(above, n * rank) @ state
        parts.append(state.reshape(c, right, left))
    return torch.cat(parts).permute(2, 0, 1).double()


def _gram(cores: Sequence[Tensor], k: int) -> Tensor:  # -> (R_{k-1} R_k, R_{k-1} R_k)
    """Inner products of the other cores' chain, entry by entry of its ``R_k x R_{k-1}`` matrix."""
    order = len(cores)
    total: Tensor | None = None
    for step in range(1, order):
        left, n, right = cores[(k + step) % order].shape
        flat = cores[(k + step) % order].transpose(0, 1).reshape(n, left * right)
        pair = (flat.T @ flat).reshape(left, right, left, right).transpose(1, 2).reshape(left**2, right**2)
        total = pair if total is None else total @ pair
    assert total is not None
    left, _, right = cores[k].shape
    # total[(r_k, r_k'), (r_{k-1}, r_{k-1}')] -> [(r_{k-1}, r_k), (r_{k-1}', r_k')]
    return total.reshape(right, right, left, left).permute(2, 0, 3, 1).reshape(left * right, left * right)


def _solve(gram: Tensor, seen: Tensor) -> Tensor:  # (R R', R R'), (R, n, R') -> (R, n, R')
    left, n, right = seen.shape
    # Bonds wider than the table needs make the equations singular; a trace of ridge keeps the smallest solution.
    ridge = 1e-12 * float(gram.diagonal().mean()) + torch.finfo(gram.dtype).tiny
    gram = gram + ridge * torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    sides = seen.transpose(0, 1).reshape(n, left * right)
    solved: Tensor = torch.linalg.solve(gram, sides.T).T
    return solved.reshape(n, left, right).transpose(0, 1)
