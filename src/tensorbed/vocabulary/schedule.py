"""How scores of many vectors over all rows are walked through: by which way, in which tiles, within how much memory.

Three walks. ``once`` goes through the rows in blocks and keeps nothing. ``twice`` does so again for the gradients and
computes the scores anew. ``groups`` keeps the scores of a group of vectors over all rows and makes their gradients at
once; blocks of rows made for the gradients of one group serve the scores of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tensorbed.backends.scores.projection import Way
from tensorbed.structures import Structure

ONCE, TWICE, GROUPS = "once", "twice", "groups"

_SHARE = 3  # by default a third of what all scores would take ...
_LEAST, _MOST = 2**22, 2**28  # ... but at least and at most so many numbers, ...
_OWN = 4  # ... and at least so many times those of the structure itself, as an optimiser's state takes
_FOR_SCORES = 2**24  # numbers that scores asked for themselves may always take
_TINY = 2**14  # numbers below which a tensor as large as the table or all scores does not matter
_TILE = 2**20  # scores of a tile, with what they leave, that caches hold while the softmax reads them
_ROWS = 2**22  # numbers of a block of rows: enough that the gradients of the cores, added for each, weigh little
_FEWEST = 16  # rows of a block, however little memory there is
_ALIGNED = 16  # vectors: products of other numbers of columns are up to a fifth slower
_ENOUGH = 128  # vectors at which products are as fast as they become

# In multiply-adds of a large product. Measured on x86-64 CPUs: the order of the ways' times is that of their costs for
# vocabularies of 10,000 and 267,735, ranks 8 to 96 and 1 to 2,048 vectors.
_STORE = 24  # writing a number made for all vectors
_COPY = 8  # writing and reading one made for one vector
_NARROW = 32  # vectors, and fewer, of which a product takes twice as long for each
_CALLS = 2**20  # the calls that one tile takes


@dataclass(frozen=True)
class Schedule:
    """A way and the tiles in which it is walked.

    Attributes:
        group: vectors at a time.
        height: rows at a time.
        keeps: whether what the scores were made from is kept for the gradients too.
        numbers: held at once, about.
        multiply_adds: of all products.
        cost: counted, in multiply-adds.
    """

    way: Way
    walk: str
    tokens: int
    rows: int
    group: int
    height: int
    keeps: bool
    numbers: int
    multiply_adds: int
    cost: float

    def groups(self) -> list[slice]:
        """The vectors in groups, the first one the largest."""
        return [slice(a, min(a + self.group, self.tokens)) for a in range(0, self.tokens, self.group)]

    def blocks(self) -> list[tuple[int, int]]:
        """The rows in blocks, the first one the largest."""
        return [(a, min(a + self.height, self.rows)) for a in range(0, self.rows, self.height)]


@dataclass(frozen=True)
class Task:
    """What is to be scored, and within how many numbers.

    Attributes:
        trains: gradients follow.
        at_once: they may be made with the scores, as for a sum or mean they can be.
        whole: all scores are asked for themselves, so that a tile may hold them.
    """

    structure: Structure
    tokens: int
    numbers: int
    trains: bool = False
    at_once: bool = False
    whole: bool = False

    @classmethod
    def of(
        cls,
        structure: Structure,
        tokens: int,
        itemsize: int,
        memory_budget: int | None,
        *,
        trains: bool = False,
        at_once: bool = False,
        whole: bool = False,
    ) -> Task:
        """With what a budget in bytes holds; by default a third of all scores, within bounds."""
        numbers = _default(structure, tokens, whole) if memory_budget is None else max(1, memory_budget // itemsize)
        return cls(structure, tokens, numbers, trains, at_once and trains, whole)

    @property
    def largest(self) -> int:
        """Numbers that one tensor may have: less than the table and than all scores, unless those are tiny."""
        structure = self.structure
        table, scores = structure.rows * structure.cols, structure.rows * self.tokens
        return max(_TINY, (table if self.whole else min(table, scores)) // 2)


def _default(structure: Structure, tokens: int, whole: bool) -> int:
    own = _OWN * structure.numel if 4 * structure.numel <= structure.rows * structure.cols else 0
    least = max(_FOR_SCORES if whole else _LEAST, own)
    return min(max(tokens * structure.rows // _SHARE, least), max(_MOST, own))


@lru_cache(maxsize=4096)
def choose(task: Task) -> Schedule:
    """The schedule of least counted cost among those within the memory allowed, or the one that takes least."""
    found = list(considered(task))
    fitting = [one for one in found if one.numbers <= task.numbers]
    return min(fitting, key=lambda s: s.cost) if fitting else min(found, key=lambda s: s.numbers)


def considered(task: Task) -> Iterator[Schedule]:
    """Every way of the structure with every walk that is possible."""
    for way in task.structure.ways():
        if not task.trains:
            yield _tiled(task, way, ONCE)
        if not task.trains or not way.trains:
            continue
        yield _tiled(task, way, TWICE)
        if task.at_once:
            yield _grouped(task, way, keeps=False)
            if way.kept:
                yield _grouped(task, way, keeps=True)


def _tiled(task: Task, way: Way, walk: str) -> Schedule:
    """All vectors by some rows, if they are not too many for that."""
    rows, least = task.structure.rows, _height(task, way, task.tokens)
    left = _left(way, rows, 2)
    group = _group(task, way, least, left * least)
    height = max(least, _height(task, way, group))
    passes = 1 if walk == ONCE else 4
    tiles = -(-task.tokens // group) * -(-rows // height)
    makings = passes * -(-task.tokens // group) if way.by_block else min(passes, 3)
    products = task.tokens * passes * way.multiply_adds
    held = _fixed(task, way, height) + int(group * height * left)
    return _counted(task, way, walk, group, height, False, held, makings, products, passes, tiles)


def _grouped(task: Task, way: Way, *, keeps: bool) -> Schedule:
    """Some vectors by all rows, their scores kept."""
    rows, least = task.structure.rows, _height(task, way, _ENOUGH)
    each = rows * _left(way, rows, 1) if keeps else rows
    scratch = _left(way, rows, 1 if keeps else 2) - 1
    # Larger groups spare making rows again, and nothing else. Half of the vectors at most: all would be all scores.
    most = max(1, -(-task.tokens // 2)) if way.by_block else min(_ENOUGH, max(1, -(-task.tokens // 2)))
    group = min(most, _group(task, way, least, each + scratch * least))
    height = _height(task, way, group)
    count = -(-task.tokens // group)
    makings = (count + 1) + 2 * count if way.by_block else 3
    products = task.tokens * (3 * way.multiply_adds + (0 if keeps else way.spared))
    held = _fixed(task, way, height) + int(group * (each + scratch * height))
    tiles = 2 * count * -(-rows // height)
    return _counted(task, way, GROUPS, group, height, keeps, held, makings, products, 3, tiles)


def _counted(
    task: Task,
    way: Way,
    walk: str,
    group: int,
    height: int,
    keeps: bool,
    held: int,
    makings: int,
    products: int,
    passes: int,
    tiles: int,
) -> Schedule:
    made = makings * (way.making + _STORE * way.making_numbers)
    narrow = 1 + _NARROW / max(group, _NARROW)
    cost = made + narrow * products + task.tokens * passes * _COPY * way.kept + tiles * _CALLS
    multiply_adds = makings * way.making + products
    return Schedule(way, walk, task.tokens, task.structure.rows, group, height, keeps, held, multiply_adds, cost)


def _left(way: Way, rows: int, copies: int) -> float:
    """Numbers to hold for one score: itself, and what it leaves behind, so many times."""
    return 1 + copies * way.kept / rows


def _height(task: Task, way: Way, group: int) -> int:
    """Rows of a block: a tile that caches hold, or a block of rows worth making."""
    structure, group = task.structure, max(1, group)
    largest = int(task.largest / _left(way, structure.rows, 1))
    if way.by_block:
        most = max(_FEWEST, min(_ROWS, task.numbers // 8, task.largest) // structure.cols)
        most = min(most, -(-structure.rows // 4), max(_FEWEST, largest // group))
    else:
        cached = max(int(_TILE / _left(way, structure.rows, 1)) // group, 512)
        most = min(cached, max(1, min(task.numbers, largest) // group))
    return min(structure.rows, max(way.step, most // way.step * way.step))


def _fixed(task: Task, way: Way, height: int) -> int:
    """Numbers held whatever the group: a block of rows, its gradient and what they come from, or merged cores."""
    copies = 3 if task.trains else 1
    return copies * (height * task.structure.cols if way.by_block else way.making_numbers)


def _group(task: Task, way: Way, height: int, each: float) -> int:
    """Vectors at a time within the memory left: groups of nearly equal size, of whole registers of a processor."""
    tile = int(task.largest / _left(way, task.structure.rows, 1)) // height
    left = int((task.numbers - _fixed(task, way, height)) / max(1.0, each))
    most = max(1, min(task.tokens, tile, left))
    equal = -(-task.tokens // -(-task.tokens // most)) if task.tokens else 1
    rounded = -(-equal // _ALIGNED) * _ALIGNED
    return rounded if rounded <= most else most // _ALIGNED * _ALIGNED or equal
