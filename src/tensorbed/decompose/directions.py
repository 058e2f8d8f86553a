"""Leading right singular vectors of a matrix long on both sides: block Lanczos, or all where that is cheaper."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.progress import track

_MISSING = 1e-4  # how much the directions may lack, of what the best ones hold and of what those leave, by a bound
_LEAST = {torch.float32: 1e-3, torch.float64: 1e-10}  # of what is held: less that is left does not ask for more
_FEW = 8  # a share of the short side: up to it Krylov spaces are cheaper than all eigenvectors
_WIDTH = 16  # directions added at once, and a quarter of those asked for
_RESOLVED = 1e-4  # of the largest squared singular value: what is smaller, single precision may not tell apart
_SMALL = 2**24  # a matrix of no more numbers is converted once, a larger one block by block in every pass
_BLOCK = 2**18  # numbers of the matrix taken at once, which stay in the cache for a second product


def leading_directions(long: Tensor, rank: int, label: str) -> Tensor:  # (m, n), m >= n -> (n, rank) float64
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
        image, overlap = _apart(_gram_times(long, added, label), basis[:size])
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


def _gram_times(long: Tensor, vectors: Tensor, label: str) -> Tensor:  # (m, n), (n, w) -> A.T @ A @ vectors
    image = torch.zeros_like(vectors)
    for block in _blocks(long, vectors.dtype, label):
        image.addmm_(block.T, block @ vectors)
    return image


def _blocks(long: Tensor, dtype: torch.dtype, label: str) -> Iterator[Tensor]:
    # Rows of a transposed matrix lie apart: more of them at once are read in longer pieces.
    height = max(1024 if long.stride(0) == 1 else 64, _BLOCK // long.shape[1])
    for start in track(range(0, long.shape[0], height), label):
        yield long[start : start + height].to(dtype)
