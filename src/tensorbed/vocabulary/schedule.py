"""How scores of many vectors over all rows are walked through: by which way, in which tiles, within how much memory.

Three walks. ``once`` goes through the rows in blocks and keeps nothing. ``twice`` does so again for the gradients and
computes the scores anew. ``groups`` keeps the scores of a group of vectors over all rows and makes their gradients at
once; blocks of rows made for the gradients of one group serve the scores of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tensorbed.contraction.projection import Way
from tensorbed.structures import Structure

ONCE, TWICE, GROUPS = "once", "twice", "groups"

_SHARE = 3  # by default a third of what all scores would take ...
_LEAST, _MOST = 2**14, 2**28  # ... but at least and at most so many numbers
FOR_SCORES = 2**24  # numbers that scores asked for themselves may always take, 64 MiB
_TILE = 2**20  # scores of a tile that caches hold while the softmax reads them
_ROWS = 2**22  # numbers of a block of rows: many enough that the gradients of the cores, added per block, weigh little
_ALIGNED = 16
_ENOUGH = 128  # columns at which products are as fast as they become
_STORE = 24  # multiply-adds that writing a number made for all vectors is worth
_NARROW = 32  # vectors of which a product takes twice as long for each as one of many
_COPY = 8  # multiply-adds that writing and reading one intermediate number is worth


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

    def __str__(self) -> str:
        passes = {ONCE: "scores once", TWICE: "scores twice", GROUPS: "gradients with the scores"}[self.walk]
        return f"by {self.way.name}, {passes}, tiles of {self.group:,} vectors x {self.height:,} rows"


def numbers_allowed(memory_budget: int | None, tokens: int, rows: int, itemsize: int, *, least: int = _LEAST) -> int:
    """What a budget in bytes holds; by default a third of all scores, within bounds."""
    if memory_budget is not None:
        return max(1, memory_budget // itemsize)
    return min(max(tokens * rows // _SHARE, least), _MOST)


@lru_cache(maxsize=4096)
def choose(structure: Structure, tokens: int, numbers: int, *, trains: bool, at_once: bool) -> Schedule:
    """The schedule of least counted cost.

    ``trains``: gradients will follow; ``at_once``: they may be made with the scores, as for a sum or mean they can be.
    """
    return min(considered(structure, tokens, numbers, trains=trains, at_once=at_once), key=lambda s: s.cost)


def considered(structure: Structure, tokens: int, numbers: int, *, trains: bool, at_once: bool) -> Iterator[Schedule]:
    """Every way of the structure with every walk that is possible."""
    for way in structure.ways():
        if not trains:
            yield _tiled(structure, way, ONCE, tokens, numbers)
            continue
        yield _tiled(structure, way, TWICE, tokens, numbers)
        if at_once:
            yield _grouped(structure, way, tokens, numbers, keeps=False)
            if way.kept:
                yield _grouped(structure, way, tokens, numbers, keeps=True)


def _tiled(structure: Structure, way: Way, walk: str, tokens: int, numbers: int) -> Schedule:
    """All vectors by some rows, if they are not too many for that."""
    height = _height(structure, way, tokens, numbers)
    each = height + 2 * way.kept * height // structure.rows
    group = _group(tokens, numbers - _fixed(structure, way, height), each, _most(structure, way) // height)
    count = -(-tokens // group) if tokens else 0
    passes = 1 if walk == ONCE else 4
    makings = count * passes if way.by_block else min(passes, 3)
    products = tokens * passes * way.multiply_adds
    cost = makings * _making(way) + _narrow(group) * products + tokens * passes * _COPY * way.kept
    held = _fixed(structure, way, height) + group * each
    counted = (held, makings * way.making + products, cost)
    return Schedule(way, walk, tokens, structure.rows, group, height, False, *counted)


def _grouped(structure: Structure, way: Way, tokens: int, numbers: int, *, keeps: bool) -> Schedule:
    """Some vectors by all rows, their scores kept."""
    width = numbers // structure.rows if way.by_block else _ENOUGH
    height = _height(structure, way, max(1, min(tokens, width)), numbers)
    scratch = 2 * way.kept * height // structure.rows
    each = structure.rows + (way.kept + scratch // 2 if keeps else scratch)
    # Larger groups spare making rows again, and nothing else.
    most = _most(structure, way) // height if way.by_block else min(_ENOUGH, _most(structure, way) // height)
    group = _group(tokens, numbers - _fixed(structure, way, height), each, most)
    count = -(-tokens // group) if tokens else 0
    makings = (count + 1) + 2 * count if way.by_block else 3
    products = tokens * (3 * way.multiply_adds + (0 if keeps else way.spared))
    cost = makings * _making(way) + _narrow(group) * products + 3 * tokens * _COPY * way.kept
    held = _fixed(structure, way, height) + group * each
    counted = (held, makings * way.making + products, cost)
    return Schedule(way, GROUPS, tokens, structure.rows, group, height, keeps, *counted)


def _height(structure: Structure, way: Way, group: int, numbers: int) -> int:
    """Rows of a block: a tile that caches hold, or a block of rows worth making."""
    if way.by_block:
        # No block comes near the whole table.
        most = min(min(_ROWS, numbers // 8) // structure.cols, -(-structure.rows // 8))
    else:
        cached = _TILE * structure.rows // (structure.rows + way.kept)
        most = min(max(cached // max(1, group), 512), min(numbers, _most(structure, way)) // max(1, group))
    return min(structure.rows, max(way.step, most // way.step * way.step))


def _fixed(structure: Structure, way: Way, height: int) -> int:
    """Numbers held whatever the group: a block of rows, its gradient and what they come from, or merged cores."""
    return 3 * height * structure.cols if way.by_block else 2 * way.making_numbers


def _making(way: Way) -> int:
    """What is made for all rows: its multiply-adds, and writing it."""
    return way.making + _STORE * way.making_numbers


def _narrow(group: int) -> float:
    """How many times dearer products of few vectors are."""
    return 1 + _NARROW / max(group, _NARROW)


def _most(structure: Structure, way: Way) -> int:
    """Scores of a tile, with what they leave, which is no more than half a table."""
    return max(_LEAST, structure.rows * structure.cols // 2 * structure.rows // (structure.rows + way.kept))


def _group(tokens: int, numbers: int, each: int, most: int) -> int:
    """Vectors at a time: groups of nearly equal size, of whole vectors of a processor's registers."""
    most = max(1, min(tokens, most, numbers // max(1, each)))
    equal = -(-tokens // -(-tokens // most)) if tokens else 1
    rounded = -(-equal // _ALIGNED) * _ALIGNED
    return rounded if rounded <= most else most // _ALIGNED * _ALIGNED or equal
