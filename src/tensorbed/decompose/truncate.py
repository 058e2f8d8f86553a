"""Low-rank factors of a large matrix, in float64, with little memory beside it: the best, or within a hair of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.decompose.powers import frobenius
from tensorbed.progress import track


@dataclass(frozen=True)
class Truncated:
    """``matrix ~ left @ right``.

    Shape:
        - left: ``(m, r)`` with orthonormal columns; where that was not asked for, they may be orthogonal only
        - right: ``(r, n)`` with orthogonal rows, whose norms are the singular values; else they may be orthonormal
        - lost: Frobenius norm of what was cut off
    """

    left: Tensor
    right: Tensor
    lost: float


# A matrix with both sides longer than this is not decomposed whole where a part of its rank will do.
_LONG = 1024
_BLOCK = 2**21  # numbers taken in float64 at once
_CHEAP = 2**22  # a matrix of no more numbers has factors in float64, a larger one in its own precision
_MEASURABLE = 1e-6  # of a matrix's norm: a smaller difference of norms is rounding
# Of directions by block Lanczos.
_MISSING = 1e-4  # how much the directions may lack, of what the best ones hold and of what those leave, by a bound
_LEAST = {torch.float32: 1e-3, torch.float64: 1e-10}  # of what is held: less that is left does not ask for more
_FEW = 8  # a share of the short side: up to it Krylov spaces are cheaper than all eigenvectors
_WIDTH = 16  # directions added at once, and a quarter of those asked for
_RESOLVED = 1e-4  # of the largest squared singular value: what is smaller, single precision may not tell apart
_SMALL = 2**24  # a matrix of no more numbers is converted once, a larger one block by block in every pass
_CACHED = 2**18  # numbers of the matrix taken at once, which stay in the cache for a second product


def truncate(
    matrix: Tensor,
    *,
    rank: int | None = None,
    bound: float | None = None,
    label: str = "fitting",
    orthonormal: bool = True,
) -> Truncated:
    """Cut to a rank, or to the smallest rank that loses at most ``bound`` in Frobenius norm."""
    short = min(matrix.shape)
    if short <= _LONG or (rank is not None and rank > short // 4):
        return _exactly(matrix, rank, bound, label, orthonormal)
    if rank is not None:
        return _leading(matrix, rank, label)
    assert bound is not None
    # Look for the bound among a few directions first, then among more.
    guess = _LONG // 8
    while guess <= short // 4 and bound > _MEASURABLE * frobenius(matrix):
        found = _leading(matrix, guess, label)
        if found.lost <= bound:
            rank, lost = _cut(torch.linalg.vector_norm(found.right, dim=1), None, bound, found.lost)
            return Truncated(found.left[:, :rank], found.right[:rank], lost)
        guess *= 2
    return _exactly(matrix, rank, bound, label, orthonormal)


def _leading(matrix: Tensor, rank: int, label: str) -> Truncated:
    """The leading factors of a matrix long on both sides, by directions of its short side."""
    long = matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix  # (long side, short side)
    directions = _leading_directions(long, rank, f"{label}: singular vectors")
    # A step in float64 from either side makes good what directions found in single precision lack.
    there = torch.linalg.qr(_multiply(long, directions, label)).Q
    back = _multiply(long.T, there, label)
    if long is matrix:
        found = _exactly(back.T, rank, None, label)
        left, right = there @ found.left, found.right
    else:
        basis, triangle = torch.linalg.qr(back)
        u, s, vh = torch.linalg.svd(triangle)
        left, right = basis @ u, s[:, None] * (vh @ there.T)
    return Truncated(left, right, math.sqrt(max(0.0, frobenius(matrix) ** 2 - frobenius(right) ** 2)))


def _exactly(matrix: Tensor, rank: int | None, bound: float | None, label: str, orthonormal: bool = True) -> Truncated:
    """By all singular values.

    They come from a triangular factor gathered block by block, as exact as a full decomposition and without its
    workspace: beside the matrix only blocks and the two factors are held.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    long = matrix.T if wide else matrix  # (long side, short side)
    _, s, vh = torch.linalg.svd(_triangular(long, label))
    rank, lost = _cut(s, rank, bound)
    short = vh[:rank].T.clone()  # (short side, r): orthonormal
    kept = torch.float64 if matrix.numel() <= _CHEAP else torch.promote_types(matrix.dtype, torch.float32)
    if wide:
        # Written as it is read by the next cut, which would have to copy a transposed one.
        right = short.new_empty(rank, long.shape[0], dtype=kept)
        _multiply(long, short, label, out=right.T)
        return Truncated(short, right, lost)
    if not orthonormal:
        return Truncated(_multiply(long, short, label, dtype=kept), short.T, lost)
    # Orthonormalise the long factor itself: dividing by small singular values would not give it.
    left, right = torch.linalg.qr(_multiply(long, short, label))
    return Truncated(left, right @ short.T, lost)


def _triangular(long: Tensor, label: str) -> Tensor:  # (m, n) -> (min(m, n), n)
    """``R`` of a QR decomposition, from one block of rows after the other."""
    height = max(2048, 4 * long.shape[1])
    r = long.new_empty(0, long.shape[1], dtype=torch.float64)
    for block in _blocks(long, torch.float64, f"{label}: singular values", height):
        r = torch.linalg.qr(torch.cat([r, block]), mode="r").R
    return r


def _multiply(
    long: Tensor, short: Tensor, label: str, *, dtype: torch.dtype = torch.float64, out: Tensor | None = None
) -> Tensor:  # (m, n), (n, r) float64 -> (m, r)
    """Summed in float64, whatever the product is kept in."""
    out = short.new_empty(long.shape[0], short.shape[1], dtype=dtype) if out is None else out
    height = max(256, _BLOCK // max(long.shape[1], short.shape[1]))
    for start in track(range(0, long.shape[0], height), f"{label}: factors"):
        out[start : start + height] = long[start : start + height].to(torch.float64) @ short
    return out


def _cut(s: Tensor, rank: int | None, bound: float | None, lost: float = 0.0) -> tuple[int, float]:
    """Rank to keep and the norm of the rest, for singular values in descending order where so much is lost already."""
    squares = torch.cat([s.square(), s.new_tensor([lost**2])])
    tail = squares.flip(0).cumsum(0).flip(0).sqrt()  # tail[r]: lost when r are kept
    if rank is None:
        assert bound is not None
        rank = int((tail > bound).sum())
    rank = max(1, min(rank, s.shape[0]))
    return rank, float(tail[rank])


def _leading_directions(long: Tensor, rank: int, label: str) -> Tensor:  # (m, n), m >= n -> (n, rank) float64
    """Orthonormal columns that hold as much of the matrix as any ``rank`` directions do, but for :data:`_MISSING`."""
    search = _all_directions if rank > long.shape[1] // _FEW else _lanczos
    single = long.float() if long.numel() <= _SMALL else long
    values, directions = search(single, rank, torch.float32, label)
    if not _resolved(values):
        _, directions = search(long, rank, torch.float64, label)
    return directions.double()


def _resolved(values: Tensor) -> bool:
    return float(values[-1]) > _RESOLVED * float(values[0])


def _all_directions(long: Tensor, rank: int, dtype: torch.dtype, label: str) -> tuple[Tensor, Tensor]:
    # (m, n) -> (rank,), (n, rank)
    gram = torch.zeros(long.shape[1], long.shape[1], dtype=dtype, device=long.device)
    for block in _blocks(long, dtype, label):
        gram.addmm_(block.T, block)
    values, directions = torch.linalg.eigh(gram)
    return values.flip(0)[:rank], directions.flip(1)[:, :rank]


def _lanczos(long: Tensor, rank: int, dtype: torch.dtype, label: str) -> tuple[Tensor, Tensor]:
    # (m, n) -> (rank,), (n, rank)
    """Block Lanczos for ``A.T @ A`` with full reorthogonalisation, from a fixed random start.

    Unlike powers of the matrix, a Krylov space tells singular values that lie close together apart.
    """
    n, width = long.shape[1], _WIDTH + rank // 4
    generator = torch.Generator(long.device).manual_seed(0)
    start = torch.randn(n, width, dtype=dtype, device=long.device, generator=generator)
    added = torch.linalg.qr(start).Q
    basis = added.new_empty(0, n)  # (k, n), orthonormal rows, taller by need
    reduced = added.new_zeros(0, 0)  # basis @ A.T @ A @ basis.T
    squares = sum(float(torch.linalg.vector_norm(block)) ** 2 for block in _blocks(long, dtype, label))
    size, next_check, last_check = 0, rank + 3 * width, None
    while True:
        if size + width > basis.shape[0]:
            more = min(n, 2 * size + 8 * width) - basis.shape[0]
            basis, reduced = F.pad(basis, (0, 0, 0, more)), F.pad(reduced, (0, more, 0, more))
        basis[size : size + width] = added.T
        size += width
        image = torch.zeros_like(added)  # A.T @ A @ added
        for block in _blocks(long, dtype, label):
            image.addmm_(block.T, block @ added)
        image, overlap = _apart(image, basis[:size])
        reduced[:size, size - width : size] = overlap
        reduced[size - width : size, :size] = overlap.T
        added, coupling = _orthonormal(image, basis[:size], scale=float(overlap.abs().amax()))
        full = size + width > n
        if full or size >= next_check:
            values, vectors = torch.linalg.eigh(reduced[:size, :size])
            values, vectors = values.flip(0), vectors.flip(1)
            missing = _missing(values, coupling @ vectors[-width:, :rank], rank, squares)
            if full or missing <= _MISSING or (dtype == torch.float32 and not _resolved(values[:rank])):
                return values[:rank], basis[:size].T @ vectors[:, :rank]
            next_check, last_check = _next_check(size, missing, last_check), (size, missing)


def _apart(vectors: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:  # (n, w), (k, n) -> (n, w), (k, w)
    """The vectors without what lies in the basis, and what did. Twice: once leaves rounding of a large overlap."""
    first = basis @ vectors
    vectors = vectors.addmm(basis.T, first, alpha=-1)
    second = basis @ vectors
    return vectors.addmm_(basis.T, second, alpha=-1), first + second


def _orthonormal(image: Tensor, basis: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    # (n, w), (k, n) -> (n, w), (w, w)
    added, coupling = torch.linalg.qr(image)
    if float(coupling.diagonal().abs().amin()) <= 1e-4 * scale:
        # Where the space is used up, as in matrices of low rank, rounding is left, which is not orthogonal to anything.
        added = torch.linalg.qr(_apart(added, basis)[0]).Q
    return added, coupling


def _next_check(size: int, missing: float, last: tuple[int, float] | None) -> int:
    """At what size to look at the Ritz values again, which costs as much as several steps."""
    expected = size * 5 // 4
    if last is not None and missing < last[1]:
        pace = (math.log(last[1]) - math.log(missing)) / (size - last[0])
        # What is missing falls faster and faster: by the pace so far one would go about twice as far as needed.
        expected = size + math.ceil((math.log(missing) - math.log(_MISSING)) / (2 * pace))
    return min(expected, size * 3 // 2)


def _missing(values: Tensor, residuals: Tensor, rank: int, squares: float) -> float:
    """A bound on what the Ritz vectors lack of the best directions' squared norm, in proportion to it and to the rest.

    A Ritz value with residual ``r``, at a distance ``d`` from the first one that is left out, grows by at most the
    shift of the 2 x 2 matrix ``((0, r), (r, -d))``.
    """
    least, values = _LEAST[values.dtype], values.double()
    distance = values[:rank] - values[rank]
    length = torch.linalg.vector_norm(residuals.double(), dim=0)
    shift = ((distance.square() + 4 * length.square()).sqrt() - distance) / 2
    held = float(values[:rank].sum())
    left = min(held, max(squares - held, least * held))
    return float(shift.sum()) / left if left > 0 else 0.0


def _blocks(long: Tensor, dtype: torch.dtype, label: str, height: int = 0) -> Iterator[Tensor]:
    """Rows, so many at once or as many as stay in the cache."""
    # Rows of a transposed matrix lie apart: more of them at once are read in longer pieces.
    height = height or max(1024 if long.stride(0) == 1 else 64, _CACHED // long.shape[1])
    for start in track(range(0, long.shape[0], height), label):
        yield long[start : start + height].to(dtype)
