"""Product quantisation: a row is a few entries of small codebooks, one byte each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from tensorbed.backends import coded, native
from tensorbed.backends.scores import codes as code_scores
from tensorbed.backends.scores.codes import LookupTables
from tensorbed.backends.scores.scoring import Cost, Scoring
from tensorbed.checks import require_bool, require_number, require_positive
from tensorbed.decompose.clusters import k_means
from tensorbed.decompose.feedback import feedback
from tensorbed.decompose.powers import far_exponent, shifted
from tensorbed.progress import track
from tensorbed.shapes import divisors_of
from tensorbed.structures.base import Params, Structure, TensorSpec, mean_row, with_rows
from tensorbed.structures.formats import Budget, Fit, Format, Use, largest, some_rows, written
from tensorbed.structures.registry import register

_WORDS = 256  # entries of a codebook: what a byte can name
_GATHER = 32  # multiply-adds that adding one entry is worth ...
_COMPILED_GATHER = 4  # ... and by the compiled kernels
_ROUNDS = 4  # of rotation and k-means
_SAMPLE_PARTS, _SAMPLE_POINTS = 16, 128  # parts, and points for each entry, that tell the error of a table


@register("product_quantized")
@dataclass(frozen=True)
class ProductQuantizedMatrix(Structure):
    r"""The columns in ``parts`` of equal width; each part of a row is one of up to 256 entries of that part's codebook.

    .. math:: E[i] = (B^{(1)}[c_{i1}], \dots, B^{(m)}[c_{im}])\, Q

    where the rotation :math:`Q` is left out unless asked for.

    Shape:
        - codes: ``(rows, parts)`` uint8
        - codebooks: ``(parts, words, cols / parts)``, trainable
        - rotation: ``(cols, cols)``, trainable, only if asked for
    """

    can_initialise = False
    fits_exactly = False
    making = coded.Product

    parts: int
    rotated: bool = False
    unrotated: Self | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts < 1 or self.cols % self.parts:
            raise ValueError(f"parts={self.parts} does not divide embedding_dim={self.cols}.")
        self.hold(unrotated=replace(self, rotated=False) if self.rotated else None)

    def check_values(self, p: Params) -> None:
        most = int(p["codes"].amax())
        if most >= self.words:
            raise ValueError(f"codes name entry {most} of codebooks of {self.words}.")

    @property
    def words(self) -> int:
        """Entries of a codebook."""
        return min(_WORDS, self.rows)

    def tensors(self) -> tuple[TensorSpec, ...]:
        codes = TensorSpec("codes", (self.rows, self.parts), torch.uint8, trainable=False)
        books = TensorSpec("codebooks", (self.parts, self.words, self.cols // self.parts))
        rotation = (TensorSpec("rotation", (self.cols, self.cols)),) if self.rotated else ()
        return codes, books, *rotation

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return self._made(p, p["codes"].index_select(0, index))

    def as_codes(self, p: Params) -> coded.Product:
        """The same before the rotation, for the compiled kernels."""
        return coded.Product(self.cols, p["codes"], p["codebooks"])

    def made_of(self, p: Params) -> coded.Product:
        return replace(self.as_codes(p), rotation=p["rotation"] if self.rotated else None)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return self._made(p, p["codes"])

    def _made(self, p: Params, codes: Tensor) -> Tensor:  # (n, parts) -> (n, cols)
        """One lookup in all codebooks laid end to end, then the rotation if there is one."""
        flat = p["codebooks"].reshape(self.parts * self.words, -1)
        rows = flat.index_select(0, self._entries(codes).reshape(-1)).reshape(codes.shape[0], self.cols)
        return rows @ p["rotation"] if self.rotated else rows

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        made = replace(self, rows=rows)
        if made.words < self.words:
            raise ValueError(f"a product quantised table of {self.words} entries a part cannot have {rows} rows.")
        row = mean_row(self, p)
        row = row @ p["rotation"].double().T if self.rotated else row
        parts = row.view(self.parts, 1, -1)
        nearest = torch.cdist(parts, p["codebooks"].double()).argmin(2).T  # (1, parts)
        empty = p["codebooks"].new_zeros(self.parts, made.words - self.words, self.cols // self.parts)
        books = torch.cat([p["codebooks"], empty], 1)
        return made, {**p, "codes": with_rows(p["codes"], rows, nearest), "codebooks": books}

    @property
    def row_multiply_adds(self) -> int:
        return self.cols * self.cols if self.rotated else self.cols

    def scorings(self) -> list[Scoring]:
        ways = [self.by_rows(self.rows * self.cols), self._by_tables("tables", _GATHER), *code_scores.scorings(self)]
        if native.available:
            ways.append(replace(self._by_tables("compiled tables", _COMPILED_GATHER), trains=False))
        return ways

    def _by_tables(self, name: str, gather: int) -> Scoring:
        adds = self.rows * self.parts * gather + self.words * self.row_multiply_adds
        return Scoring(name, Cost(multiply_adds=adds, turned=self.parts * self.words), partial(LookupTables, self))

    def entries_of(self, p: Params, start: int, stop: int) -> tuple[Tensor, None]:
        """Which entries of all codebooks, laid end to end, a block of rows is made of."""
        return self._entries(p["codes"][start:stop]), None

    def _entries(self, codes: Tensor) -> Tensor:  # (n, parts) -> (n, parts)
        return codes.long() + torch.arange(self.parts, device=codes.device) * self.words

    def turned(self, p: Params, x: Tensor) -> Tensor:  # (n, cols) -> (n, cols)
        return x @ p["rotation"].T if self.rotated else x

    def block(self, p: Params, start: int, stop: int, impl: str) -> Tensor:  # -> (stop - start, cols)
        """Before the rotation."""
        return Structure.block(self if self.unrotated is None else self.unrotated, p, start, stop, impl)

    def coded_block(self, p: Params, start: int, stop: int) -> coded.Product:
        """The same for the compiled kernels."""
        return self.as_codes(p).part(start, stop)

    def describe(self) -> str:
        return f"parts={self.parts} of {self.cols // self.parts}{', rotated' if self.rotated else ''}"


@dataclass(frozen=True, kw_only=True, repr=False)
class ProductQuantized(Format):
    """Product quantisation of a trained table: a byte for each part of a row names an entry of that part's codebook.

    Give ``parts`` or ``ratio``, or neither: then every two columns share a byte.

    Args:
        parts: how many bytes a row has; it divides ``embedding_dim``.
        ratio: the most parts at which the dense table takes at least this many times the stored bytes.
        rotate: whether to find a rotation of the columns in which the parts quantise better; it takes
            ``cols * cols`` more numbers.
        sweeps: how many passes k-means makes over all rows.

    Example::

        >>> layer = tb.Embedding.from_pretrained(torch.randn(4096, 64), tb.ProductQuantized(parts=32, sweeps=2))
        >>> layer.compression_ratio
        5.333333333333333
    """

    squares_numbers = True
    spelling = ("pq", "product quantisation")

    parts: int | None = None
    ratio: float | None = None
    rotate: bool = False
    sweeps: int = 20

    __repr__ = written

    def __post_init__(self) -> None:
        if self.parts is not None and self.ratio is not None:
            raise ValueError("ProductQuantized: parts and ratio both set the size; give one.")
        if self.parts is not None:
            require_positive(self.parts, "parts")
        if self.ratio is not None:
            require_number(self.ratio, "ratio", low=0)
        require_positive(self.sweeps, "sweeps")
        require_bool(self.rotate, "rotate")

    @classmethod
    def candidates(cls, ratio: float) -> list[ProductQuantized]:
        return [cls(ratio=each) for each in (6, 7, 10, 14, 25, *([ratio] if ratio > 1 else []))]

    @classmethod
    def without_training(cls) -> list[ProductQuantized]:
        return [cls(ratio=14)]

    def bind(self, budget: Budget) -> ProductQuantizedMatrix:
        divisors = divisors_of(budget.cols)

        def bound(parts: int) -> ProductQuantizedMatrix:
            return ProductQuantizedMatrix(budget.rows, budget.cols, parts, self.rotate)

        if self.ratio is not None:
            return largest(self, divisors, bound, budget, self.ratio, "with one byte a row")
        parts = self.parts or next(m for m in divisors[::-1] if 2 * m <= budget.cols or m == 1)
        if budget.cols % parts:
            allowed = ", ".join(map(str, divisors))
            raise ValueError(f"parts={parts} does not divide embedding_dim={budget.cols}; choose one of {allowed}.")
        return bound(parts)

    def sized_as(self, structure: Structure) -> ProductQuantized:
        assert isinstance(structure, ProductQuantizedMatrix)
        return replace(self, parts=structure.parts, ratio=None)

    def sample(self, table: Tensor, structure: Structure) -> tuple[Tensor, ProductQuantized]:
        """Of many parts a few, scaled to stand for all; of rows many, because codebooks come nearer to few."""
        rows, format = some_rows(table, _SAMPLE_POINTS * _WORDS), self.sized_as(structure)
        width = table.shape[1] // (format.parts or 1)
        parts, near = rows.split(width, dim=1), shifted(rows, -far_exponent(rows)).split(width, dim=1)
        squares = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in near]).square()
        if self.rotate or len(parts) <= _SAMPLE_PARTS or not float(squares.sum()):
            return rows, format
        scale = (_shares(squares, _SAMPLE_PARTS) / squares.where(squares > 0, 1)).sqrt()
        drawn = [part * size for part, size in zip(parts, (scale / scale.amax()).tolist(), strict=True) if size]
        return torch.cat(drawn, dim=1), replace(format, parts=len(drawn))

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """K-means on every part; with a rotation, alternating with the best one for the codes (Procrustes)."""
        return self.fit_to_use(table, budget, Use())

    def fit_to_use(self, table: Tensor, budget: Budget, use: Use) -> Fit:
        """K-means with rows weighed and errors of one part made good in those after it; with a rotation, rows only."""
        structure, use = self.bind(budget), Use(use.counts) if self.rotate else use
        table = table if table.dtype == torch.float64 else table.float()
        codes, books = _quantised(structure, table, self.sweeps, "quantising parts", use)
        found = {"codes": codes, "codebooks": books}
        for number in range(1, _ROUNDS + 1 if self.rotate else 1):
            left, _, right = torch.linalg.svd(replace(structure, rotated=False).full(found).T @ table)
            rotation = left @ right
            label = f"quantising parts, rotation {number} of {_ROUNDS}"
            codes, books = _quantised(structure, table @ rotation.T, self.sweeps, label, use)
            found = {"codes": codes, "codebooks": books, "rotation": rotation}
        return Fit(structure, found)

    def multiplied(self, params: Params) -> list[str]:
        """Codebooks alone: a rotation has no size."""
        return ["codebooks"]


def _shares(squares: Tensor, count: int) -> Tensor:  # (n,) -> (n,)
    """What squared norm each part stands for in a sample of at most ``count``: 0 for those that are not in it.

    Parts of more than their share stand for themselves, others are drawn in proportion to their squared norms.
    """
    loud = squares > squares.sum() / count * (1 + 1e-9)  # fewer than count, also as rounded
    count -= int(loud.sum())
    quiet, order = squares.where(~loud, 0).sort()
    reach = quiet.cumsum(0)
    marks = (torch.arange(count, device=squares.device) + 0.5) * (reach[-1] / count)
    times = torch.bincount(order[torch.searchsorted(reach, marks)], minlength=len(squares))
    return torch.where(loud, squares, times * (reach[-1] / count))


def _quantised(
    structure: ProductQuantizedMatrix, table: Tensor, sweeps: int, label: str, use: Use
) -> tuple[Tensor, Tensor]:
    width, weight = structure.cols // structure.parts, use.row_weights()
    feed = None if use.moment is None else feedback(use.moment).to(table.dtype)
    errors = None if feed is None else torch.empty_like(table, memory_format=torch.contiguous_format)
    codes = torch.empty(structure.rows, structure.parts, dtype=torch.uint8, device=table.device)
    books = torch.empty(structure.parts, structure.words, width, dtype=table.dtype, device=table.device)
    for m in track(range(structure.parts), label):
        begin, end = m * width, (m + 1) * width
        part = table[:, begin:end]
        if feed is None or errors is None:
            place, books[m] = _clustered(part, structure.words, sweeps, weight)
        else:
            part = part - errors[:, :begin] @ feed[:begin, begin:end]
            # In these coordinates the squared length of an error is what it costs after the parts to come made it good.
            seen = torch.linalg.solve_triangular(feed[begin:end, begin:end], part, upper=True, left=False)
            place, book = _clustered(seen, structure.words, sweeps, weight)
            errors[:, begin:end] = seen - book[place]
            books[m] = book @ feed[begin:end, begin:end]
        codes[:, m] = place
    return codes, books


def _clustered(part: Tensor, words: int, sweeps: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    # Distances are differences of squares: they want numbers around 0, of size 1.
    middle = part.mean(0)
    size = (part - middle).abs().amax().clamp_min(torch.finfo(part.dtype).tiny)
    place, book = k_means(((part - middle) / size).float().contiguous(), words, sweeps, weight=weight)
    return place, book.to(part.dtype) * size + middle
