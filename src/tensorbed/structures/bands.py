"""Consecutive bands of rows, each in a format of its own: the adaptive embedding of the literature, and any other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from tensorbed.backends.parts import Located, located_by_ends
from tensorbed.checks import require_number, require_positive
from tensorbed.structures.base import Params, Structure
from tensorbed.structures.dense import Dense
from tensorbed.structures.formats import Budget, Fit, Format, Use, largest, require_format, some_rows, written
from tensorbed.structures.low_rank import LowRank
from tensorbed.structures.parts import ComposedMatrix, constants_of_parts, fit_part, joined
from tensorbed.structures.registry import register, text_of

_SHARES = (0.075, 0.15, 0.75, 1.0)  # of the rows, where the default bands end
_FACTOR = 4  # by which their dimensions fall from band to band


@register("bands")
@dataclass(frozen=True)
class BandsMatrix(ComposedMatrix):
    """The first rows are those of a first structure, those after it of a second, and so on.

    Shape:
        - band_0_*, band_1_*, ...: the tensors of the structures
    """

    noun = "bands"
    refuses_rows = True

    band_texts: tuple[str, ...]
    ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compose({f"band_{k}": text for k, text in enumerate(self.band_texts)})
        self.hold(ends=tuple(accumulate(part.rows for part in self.parts)))

    def masked(self, p: Params, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:  # (n,) -> (n,), (n,)
        for part, end in zip(self.parts, self.ends, strict=True):
            ids = index - (end - part.rows)
            yield ids >= 0, ids.clamp(0, part.rows - 1)

    def located(self, p: Params, index: Tensor) -> Located:  # (n,)
        return located_by_ends(index, self.ends)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        return torch.cat([part.full(tensors) for part, tensors in self.with_tensors(p)])

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        """The last band grows; of fewer rows bands that begin beyond them are left out."""
        kept: list[Fit] = []
        left = rows
        for part, tensors in self.with_tensors(p):
            last = left <= part.rows or len(kept) == len(self.parts) - 1
            kept.append(Fit(*part.resized(tensors, left)) if last else Fit(part, tensors))
            left -= part.rows
            if last:
                break
        return self.with_parts(rows, [], kept)

    @classmethod
    def of_texts(cls, rows: int, cols: int, *texts: str) -> Self:
        return cls(rows, cols, texts)


@dataclass(frozen=True, repr=False)
class Bands(Format):
    r"""Consecutive bands of rows, each in a format of its own: frequent rows have many numbers, rare ones few.

    Rows are taken to be ordered by frequency, the most frequent first. Row ``i`` of band ``k``, which begins at row
    ``b_k``, is row ``i - b_k`` of that band's table.

    ``tb.Bands()`` is the adaptive embedding (Grave et al., 2017; Baevski and Auli, 2019): four bands that end at 7.5,
    15, 75 and 100 % of the rows, band ``k`` of ``cols / 4**k`` numbers a row and a linear map to all columns,
    ``U_k @ V_k.T``; a band for which that would take more numbers than its rows has the rows themselves.

    Args:
        bands: where each band ends, ``None`` for the end of the table, and its format.
        ratio: moves the dimensions of the default bands, all by one factor: the largest ones at which the dense table
            takes at least this many times the stored bytes.

    Example::

        >>> layer = tb.Embedding(25_000, 256, tb.Bands(((2000, tb.Dense()), (None, tb.TensorTrain(rank=16)))))
        >>> layer.structure.describe()
        '2000 rows dense, 23000 rows tensor_train shape=(36, 18, 36) x (8, 4, 8), ranks=(16, 16)'
        >>> round(tb.Embedding(25_000, 256, tb.Bands()).compression_ratio, 1)
        7.2
    """

    bands: Any = None  # tuple[tuple[int | None, Format], ...] once checked
    _: KW_ONLY
    ratio: float | None = None

    spelling = ("bands", "bands of rows, rarer ones of fewer dimensions, which wants training after")

    def __post_init__(self) -> None:
        if self.ratio is not None:
            require_number(self.ratio, "ratio", low=0)
        if self.bands is None:
            return
        if self.ratio is not None:
            raise ValueError(f"ratio={self.ratio} moves the default bands; say the sizes of your own in their formats.")
        object.__setattr__(self, "bands", _checked(self.bands))

    __repr__ = written

    @property
    def can_fit(self) -> bool:
        return self.bands is None or all(format.can_fit for _, format in self.bands)

    @property
    def weighs_use(self) -> bool:
        return self.bands is None or any(format.weighs_use for _, format in self.bands)

    def bind(self, budget: Budget) -> BandsMatrix:
        if self.bands is not None:
            return self._bound(budget, self._in(budget))
        widths = partial(self._of_width, budget)
        if self.ratio is None:
            return widths(budget.cols)
        return largest(self, range(1, budget.cols + 1), widths, budget, self.ratio, "with bands of 1 dimension")

    def constants(self, structure: Structure) -> dict[str, Tensor]:
        assert isinstance(structure, BandsMatrix)
        return constants_of_parts(structure, self._formats(structure))

    def _of_width(self, budget: Budget, width: int) -> BandsMatrix:
        return self._bound(budget, _default_bands(budget, width))

    def _in(self, budget: Budget) -> list[tuple[int, Format]]:
        """The bands of a table of this size, given or settled."""
        if self.bands is None:
            # What bind settled, as formats.
            bound = self.bind(budget)
            return list(zip(bound.ends, self._formats(bound), strict=True))
        rows, last = budget.rows, self.bands[-1][0]
        for end, _ in self.bands[:-1]:
            if end >= rows:
                raise ValueError(
                    f"a band ends at row {end} and others follow it, but the table has {rows} rows; let bands before "
                    f"the last end below {rows}, or leave out those that the table does not reach."
                )
        if last not in (None, rows):
            raise ValueError(f"the last band ends at row {last} of {rows}; let it end at None, the end of the table.")
        return [(rows if end is None else end, format) for end, format in self.bands]

    def _formats(self, structure: BandsMatrix) -> list[Format]:
        """Those of the bands of a table that was bound."""
        if self.bands is None:
            return [_format_of(part) for part in structure.parts]
        return [format for _, format in self.bands]

    @staticmethod
    def _budgets(budget: Budget, bands: Sequence[tuple[int, Format]]) -> list[Budget]:
        heights = [end - begin for begin, end in pairwise([0, *(end for end, _ in bands)])]
        # What is stored besides counts against the last band, as the largest.
        return [replace(budget, rows=h, reserved=0) for h in heights[:-1]] + [replace(budget, rows=heights[-1])]

    def _bound(self, budget: Budget, bands: Sequence[tuple[int, Format]]) -> BandsMatrix:
        pairs = zip(bands, self._budgets(budget, bands), strict=True)
        return BandsMatrix.of_texts(
            budget.rows, budget.cols, *(text_of(format.bind(own)) for (_, format), own in pairs)
        )

    def sample(self, table: Tensor, structure: Structure) -> tuple[Tensor, Format]:
        """The same share of the rows of each band, in the format that it has in the whole table."""
        assert isinstance(structure, BandsMatrix)
        some = some_rows(table, self.sample_rows)
        if some.shape[0] == table.shape[0]:
            return table, self
        ends = [*_ends_among(some.shape[0], structure.ends)[:-1], None]
        bands = zip(ends, self._formats(structure), structure.parts, strict=True)
        return some, Bands(tuple((end, format.sized_as(part)) for end, format, part in bands))

    def fit(self, table: Tensor, budget: Budget) -> Fit:
        """Each band by its own format."""
        return self.fit_to_use(table, budget, Use())

    def fit_to_use(self, table: Tensor, budget: Budget, use: Use) -> Fit:
        """Each band by its own format and its own rows' use."""
        bands = self._in(budget)
        fits = []
        for (end, format), own in zip(bands, self._budgets(budget, bands), strict=True):
            fits.append(fit_part(format, table, slice(end - own.rows, end), own, use))
        return joined(partial(BandsMatrix.of_texts, budget.rows, budget.cols), [], fits)


def _ends_among(some: int, ends: Sequence[int]) -> list[int]:
    """Where bands end among some rows that are spread over the whole table; each band has one at least."""
    found: list[int] = []
    for k, end in enumerate(ends):
        least, most = (found[-1] if found else 0) + 1, some - (len(ends) - 1 - k)
        found.append(min(max(least, end * some // ends[-1]), most))
    return found


def _default_bands(budget: Budget, width: int) -> list[tuple[int, Format]]:
    """Of this width and then of falling ones; tables of few rows have fewer bands."""
    rows, cols, begin = budget.rows, budget.cols, 0
    bands: list[tuple[int, Format]] = []
    for k, share in enumerate(_SHARES):
        end = round(share * rows)
        if end == begin:
            continue
        rank = max(1, width // _FACTOR**k)
        smaller = (end - begin + cols) * rank < (end - begin) * cols
        bands.append((end, LowRank(rank=rank) if smaller else Dense()))
        begin = end
    return bands


def _format_of(part: Structure) -> Format:
    """The format of a default band."""
    rank = getattr(part, "rank", None)
    return Dense() if rank is None else LowRank(rank=rank)


def _checked(bands: object) -> tuple[tuple[int | None, Format], ...]:
    """Pairs of an end and a format, the ends ascending, only the last one ``None``."""
    if not isinstance(bands, Sequence) or not bands or isinstance(bands, str):
        raise TypeError(f"bands={bands!r}: give pairs of an end and a format, ((2000, tb.Dense()), (None, ...)).")
    found: list[tuple[int | None, Format]] = []
    before = 0
    for k, band in enumerate(bands):
        if not isinstance(band, Sequence) or len(band) != 2:
            raise TypeError(f"band {k} is {band!r}: give a pair of its end and its format, (2000, tb.Dense()).")
        end, format = band
        require_format(format, f"the format of band {k}")
        if end is None and k < len(bands) - 1:
            raise ValueError(f"band {k} ends at None, the end of the table, and others follow it; say where it ends.")
        if end is not None and require_positive(end, f"the end of band {k}") <= before:
            raise ValueError(f"band {k} ends at row {end}, the one before at {before}; ends must ascend.")
        before = before if end is None else int(end)
        found.append((None if end is None else before, format))
    return tuple(found)
