"""Kernels of tensorbed, compiled: what native/module.cpp binds. Memory is handed over as addresses."""

from collections.abc import Sequence

isas: tuple[str, ...]  # the instruction sets compiled, least first
isa: str  # the greatest of them that this processor runs
openmp: bool
nanobind: str  # its version

class Chain:
    """Sizes of a chain of cores."""

    def __init__(
        self, rows: int, row_factors: Sequence[int], col_factors: Sequence[int], ranks: Sequence[int], /
    ) -> None: ...

class Asked:
    """What is asked of one table; ``bounds`` 0 for a row an index, ``weights`` 0 for none, ``skip`` -1 for no row."""

    def __init__(
        self,
        chain: Chain,
        index: int,
        count: int,
        stride: int,
        skip: int,
        bounds: int,
        bags: int,
        weights: int,
        mean: bool,
        /,
    ) -> None: ...

class Batch:
    """The tables of one call, planned; ``type`` is 0 for float32, 1 for float64, 2 for bfloat16."""

    def __init__(self, type: int, asked: Sequence[Asked], threads: int, /) -> None: ...
    def forward(
        self,
        cores: Sequence[int],
        out: Sequence[int],
        out_row: Sequence[int],
        padding: Sequence[int],
        keep: bool,
        threads: int,
        /,
    ) -> None: ...
    def backward(
        self,
        cores: Sequence[int],
        grad: Sequence[int],
        grad_row: Sequence[int],
        core_grads: Sequence[int],
        scale_grads: Sequence[int],
        threads: int,
        /,
    ) -> None: ...

class Coded:
    """A table of codes: ``type`` 0 for float32, 1 for float64, and for rows 2 for bfloat16, is that of its floats.

    The threads change no bit of any result.
    """

    @staticmethod
    def quantized(rows: int, cols: int, codes: int, bits: int, steps: int, group: int, scale: int, /) -> Coded:
        """Codes of 8 or 4 bits; ``steps`` 0 for none."""

    @staticmethod
    def product(rows: int, cols: int, codes: int, parts: int, books: int, words: int, /) -> Coded:
        """Codes below ``words``, a byte for each part; ``IndexError`` where one that is used is not."""

    def rows(self, type: int, index: int, count: int, out: int, threads: int, /) -> None:
        """Rows of int64 indices, which are checked, into ``(count, cols)``."""

    def scores(self, type: int, x: int, n: int, out: int, threads: int, /) -> None:
        """All rows times vectors ``(cols, n)``, into ``(rows, n)``."""

    def sums(self, type: int, tables: int, n: int, out: int, threads: int, /) -> None:
        """Of product codes: sums of the rows they name in tables ``(parts * words, n)``, into ``(rows, n)``."""

def absorb(type: int, tile: int, rows: int, cols: int, stride: int, most: int, total: int, threads: int) -> None:
    """Take the rows of a tile into the running maximum and sum of exponentials of each of its columns.

    ``tile`` is float32 or bfloat16, number ``(v, t)`` at ``v * stride + t``; it is only read. ``most`` and ``total``
    are float32 of ``cols`` numbers, at first -inf and 0. After any number of tiles ``most[t] + log(total[t])`` is the
    logarithm of the sum of ``exp(x)`` over all rows. A NaN or +inf in a column makes its total NaN; -inf alone leaves
    -inf and 0. The threads change no bit of the result.
    """

def probabilities(
    type: int, tile: int, rows: int, cols: int, stride: int, lse: int, scale: int, shift: int, weight: int, threads: int
) -> None:
    """Write ``scale[t] * exp(x - lse[t]) - shift[t] * weight[v]`` in the place of each ``x`` of a tile.

    The tile is float32 or bfloat16, all else float32; ``lse``, ``scale`` and ``shift`` of ``cols`` numbers, ``weight``
    of ``rows``. ``shift`` 0 for no second term, ``weight`` 0 for ones. Where ``scale[t]`` is 0 so is the first term,
    even if the exponential is not finite. The threads change no bit of the result.
    """

class Located:
    """Int64 indices of a table that is made of parts, which are checked: which row of which part each of them is."""

    @staticmethod
    def by_ends(index: int, count: int, ends: Sequence[int], /) -> Located:
        """Parts that are bands of rows; they end at ``ends``."""

    @staticmethod
    def by_places(index: int, count: int, rows: int, places: int, hot: int, /) -> Located:
        """Two parts: the rows in ``places``, int64 of ``hot`` that ascend, and all others of ``rows``."""

    def split(self, ids: int, at: int, /) -> list[int]:
        """Write ``ids``, rows of the first part, then of the second and so on, and ``at``, where they stand in a batch.

        Both are int64 of ``count``; returns how many are of each part.
        """

    def rows(self, type: int, parts: Sequence[Coded], out: int, threads: int, /) -> None:
        """Rows of parts that are tables of codes, all of the same number of columns, into ``(count, cols)``."""

def expect_busy_cores(seconds: float) -> None: ...
def use(isa: str) -> str: ...
