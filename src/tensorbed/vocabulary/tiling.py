"""In which tiles scores of many vectors over all rows are computed: by which way, how often, within how much memory.

Three passes. ``once`` goes through the rows in blocks and keeps nothing. ``twice`` does so again for the gradients and
computes the scores anew. ``groups`` keeps the scores of a group of vectors over all rows and makes their gradients at
once; blocks of rows made for the gradients of one group serve the scores of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tensorbed.backends.scores.scoring import Scoring
from tensorbed.structures import Structure

ONCE, TWICE, GROUPS = "once", "twice", "groups"
_TIMES = {ONCE: 1, TWICE: 4, GROUPS: 3}  # products of each vector with all rows

_SHARE = 3  # by default a third of what all scores would take ...
_LEAST, _MOST = 2**22, 2**28  # ... but at least and at most so many numbers, ...
_OWN = 4  # ... and at least so many times those of the structure itself, as an optimiser's state takes
_FOR_SCORES = 2**24  # numbers that scores asked for themselves may always take
_TINY = 2**14  # numbers below which a tensor as large as the table or all scores does not matter
_TILE = 2**20  # scores of a tile, with what they leave, that caches hold while the softmax reads them
_TILE_ON_DEVICE = 2**26  # the same for the kernels of a GPU, each launch of which takes microseconds however small
_ROWS = 2**22  # numbers of a block of rows: enough that the gradients of the cores, added for each, weigh little
_FEWEST = 16  # rows of a block, however little memory there is
_ALIGNED = 16  # vectors: products of other numbers of columns are up to a fifth slower
_FEW = 4  # times that all scores are fewer than the numbers of the structure, where they may be held at once
_ENOUGH, _ENOUGH_ON_DEVICE = 128, 1024  # vectors at which products are as fast as they become

# In multiply-adds of a large product. Measured on x86-64 CPUs: the order of the ways' times is that of their costs for
# vocabularies of 10,000 and 267,735, ranks 8 to 96 and 1 to 2,048 vectors.
_STORE = 24  # writing a number made for all vectors
_COPY = 8  # writing and reading one made for one vector
_NARROW = 32  # vectors, and fewer, of which a product takes twice as long for each
_CALLS = 2**20  # the calls that one tile takes
_ALIKE, _FAR_LESS = 1.03, 4  # so little more cost is worth holding so many times less: costs are counted, not measured


@dataclass(frozen=True)
class Tiling:
    """A way to score, its passes and its tiles.

    Attributes:
        group: vectors at a time.
        height: rows at a time.
        keeps: whether what the scores were made from is kept for the gradients too.
        numbers: held at once, about.
        multiply_adds: of all products.
        cost: counted, in multiply-adds.
    """

    scoring: Scoring
    passes: str
    tokens: int
    group: int
    height: int
    keeps: bool
    numbers: int
    multiply_adds: int
    cost: float

    @property
    def name(self) -> str:
        return f"{self.scoring.name}, {self.passes}{', all kept' if self.keeps else ''}"

    def groups(self) -> list[slice]:
        """The vectors in groups, the first one the largest."""
        return [slice(a, min(a + self.group, self.tokens)) for a in range(0, self.tokens, self.group)]


@dataclass(frozen=True)
class Task:
    """What is to be scored, and within how many numbers.

    Attributes:
        trains: gradients follow.
        at_once: they may be made with the scores, as for a sum or mean they can be.
        whole: all scores are asked for themselves, so that a tile may hold them.
        on_device: kernels of a GPU score them.
    """

    structure: Structure
    tokens: int
    numbers: int
    trains: bool = False
    at_once: bool = False
    whole: bool = False
    on_device: bool = False

    @classmethod
    def of(cls, structure: Structure, tokens: int, itemsize: int, memory_budget: int | None, **asked: bool) -> Task:
        """With what a budget in bytes holds; by default a third of all scores, within bounds."""
        own = _OWN * structure.numel if 4 * structure.numel <= structure.rows * structure.cols else 0
        least = max(_FOR_SCORES if asked.get("whole") else _LEAST, own)
        default = min(max(tokens * structure.rows // _SHARE, least), max(_MOST, own))
        numbers = default if memory_budget is None else max(1, memory_budget // itemsize)
        return cls(structure, tokens, numbers, **asked)

    @property
    def has_few_scores(self) -> bool:
        """Whether all scores matter little beside what the structure itself is kept in, and its gradients."""
        return _FEW * self.structure.rows * self.tokens <= self.structure.numel

    @property
    def largest(self) -> int:
        """Numbers that one tensor may have: less than the table and than all scores, unless those are few."""
        structure = self.structure
        table, scores = structure.rows * structure.cols, structure.rows * self.tokens
        return max(_TINY, (table if self.whole or self.has_few_scores else min(table, scores)) // 2)


@lru_cache(maxsize=4096)
def choose(task: Task) -> Tiling:
    """The tiling of least counted cost among those within the memory allowed, or the one that holds least.

    One of nearly the same cost that holds far less goes before.
    """
    tilings = list(considered(task))
    fitting = [tiling for tiling in tilings if tiling.numbers <= task.numbers]
    if not fitting:
        return min(tilings, key=lambda tiling: tiling.numbers)
    cheapest = min(fitting, key=lambda tiling: tiling.cost)
    alike = [tiling for tiling in fitting if tiling.cost <= _ALIKE * cheapest.cost]
    frugal = min(alike, key=lambda tiling: tiling.numbers)
    return frugal if _FAR_LESS * frugal.numbers <= cheapest.numbers else cheapest


def considered(task: Task) -> Iterator[Tiling]:
    """Every way of the structure with all passes that are possible."""
    for scoring in task.structure.scorings():
        if not task.trains:
            yield _Counting(task, scoring).tiled(ONCE)
        elif scoring.trains:
            yield _Counting(task, scoring).tiled(TWICE)
            if task.at_once:
                yield _Counting(task, scoring).grouped(keeps=False)
                if scoring.cost.kept:
                    yield _Counting(task, scoring).grouped(keeps=True)


class _Counting:
    """Sizes of tiles for one way, and what they come to."""

    def __init__(self, task: Task, scoring: Scoring) -> None:
        self.task, self.scoring, self.each = task, scoring, scoring.cost
        self.rows = task.structure.rows
        self.tile, self.enough = (_TILE_ON_DEVICE, _ENOUGH_ON_DEVICE) if task.on_device else (_TILE, _ENOUGH)
        self.row = max(task.structure.cols, self.each.made // self.rows)  # numbers that making one row writes

    def tiled(self, passes: str) -> Tiling:
        """All vectors by some rows, if they are not too many for that."""
        task, least, left = self.task, self._height(self.task.tokens), self._left(2)
        turned = (2 if task.trains else 1) * self.each.turned
        group = self._group(least, left * least + turned)
        height = max(least, self._height(group))
        products = task.tokens * _TIMES[passes] * self.each.multiply_adds
        return self._counted(passes, False, group, height, int(group * (height * left + turned)), products)

    def grouped(self, *, keeps: bool) -> Tiling:
        """Some vectors by all rows, their scores kept."""
        task, least = self.task, self._height(self.enough)
        each = 2 * self.each.turned + (self.rows * self._left(1) if keeps else self.rows)
        scratch = self._left(1 if keeps else 2) - 1
        # Larger groups spare making rows again, and nothing else. Half of the vectors at most: all would be all scores.
        most = max(1, task.tokens if task.has_few_scores else -(-task.tokens // 2))
        group = min(most if self.each.made else min(self.enough, most), self._group(least, each + scratch * least))
        height = self._height(group)
        products = task.tokens * (3 * self.each.multiply_adds + (0 if keeps else self.each.spared))
        return self._counted(GROUPS, keeps, group, height, int(group * (each + scratch * height)), products)

    def _counted(self, passes: str, keeps: bool, group: int, height: int, held: int, products: int) -> Tiling:
        tokens, each, times = self.task.tokens, self.each, _TIMES[passes]
        groups = -(-tokens // group)
        tiles = groups * -(-self.rows // height) * (2 if passes == GROUPS else 1)
        blocks, cores = times * groups + (passes == GROUPS), min(times, 3)  # how often rows are made, and cores merged
        making, made = blocks * each.making + cores * each.merging, blocks * each.made + cores * each.merged
        narrow = 1 + _NARROW / max(group, _NARROW)
        cost = making + _STORE * made + narrow * products + _COPY * tokens * times * each.kept + _CALLS * tiles
        numbers = self._fixed(height) + held
        return Tiling(self.scoring, passes, tokens, group, height, keeps, numbers, making + products, cost)

    def _left(self, copies: int) -> float:
        """Numbers to hold for one score: itself, and what it leaves behind, so many times."""
        return 1 + copies * self.each.kept / self.rows

    def _height(self, group: int) -> int:
        """Rows of a block: a tile that caches hold, or a block of rows worth making."""
        task, group, step = self.task, max(1, group), self.each.step
        largest = int(task.largest / self._left(1))
        if self.each.made:
            most = max(_FEWEST, min(_ROWS, task.numbers // 8, task.largest) // self.row)
            most = min(most, -(-self.rows // 4), max(_FEWEST, largest // group))
        else:
            cached = max(int(self.tile / self._left(1)) // group, 512)
            most = min(cached, max(1, min(task.numbers, largest) // group))
        return min(self.rows, max(step, most // step * step))

    def _fixed(self, height: int) -> int:
        """Numbers held whatever the group: a block of rows, its gradient and what they come from, or merged cores."""
        return (3 if self.task.trains else 1) * (self.each.merged + (height * self.row if self.each.made else 0))

    def _group(self, height: int, each: float) -> int:
        """Vectors at a time within the memory left: groups of nearly equal size, of whole registers of a processor."""
        tokens = self.task.tokens
        tile = int(self.task.largest / self._left(1)) // height
        left = int((self.task.numbers - self._fixed(height)) / max(1.0, each))
        most = max(1, min(tokens, tile, left))
        equal = -(-tokens // -(-tokens // most)) if tokens else 1
        rounded = -(-equal // _ALIGNED) * _ALIGNED
        return rounded if rounded <= most else most // _ALIGNED * _ALIGNED or equal
