"""The kernels that make a plan: what indices are sorted by, and what is known of each prefix, written once for it.

Several tables are planned in one launch. A *cell* is one core of one table; its sizes are a row of ``cells``, numbered
``level * tables + table``. :mod:`.plan` says what the arrays of a plan are.
"""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

# The fields of a cell, in the order of `plan.Cell`.
FIELDS = tl.constexpr(19)
FACTOR = tl.constexpr(0)
BELOW = tl.constexpr(1)
WIDTH = tl.constexpr(2)
RANK = tl.constexpr(3)
INNER = tl.constexpr(4)
OUTER = tl.constexpr(5)
RANK_STRIDE = tl.constexpr(6)
OUTER_STRIDE = tl.constexpr(7)
SLICE = tl.constexpr(8)
MADE = tl.constexpr(9)
GRADIENT = tl.constexpr(10)
PARTIAL = tl.constexpr(11)
SLOT = tl.constexpr(12)
GROUP = tl.constexpr(13)
POSITION = tl.constexpr(14)
KEY = tl.constexpr(15)
COLUMN = tl.constexpr(16)
TABLE_ROWS = tl.constexpr(17)
SKIPPED = tl.constexpr(18)
BEYOND = tl.constexpr(2**62)
# Numbers of a call that no kernel is compiled for: else a batch of another size would wait for the compiler.
SIZES = ("total", "tables", "levels", "level", "bags", "columns")


@triton.jit
def field(cells, cell, NAME: tl.constexpr):
    return tl.load(cells + cell * FIELDS + NAME)


@triton.jit
def table_of(cells, first_cell, tables, at, NAME: tl.constexpr, TABLES: tl.constexpr):
    """Which table something is of: the last one whose field is not beyond it. TABLES is a power of 2."""
    table = tl.arange(0, TABLES)
    first = tl.load(cells + (first_cell + table) * FIELDS + NAME, mask=table < tables, other=BEYOND)
    return tl.sum((first <= at).to(tl.int32)) - 1


@triton.jit
def tables_of(cells, tables, at, NAME: tl.constexpr, TABLES: tl.constexpr):
    """The same of each number of ``at``."""
    table = tl.arange(0, TABLES)
    first = tl.load(cells + table * FIELDS + NAME, mask=table < tables, other=BEYOND)
    return tl.sum((first[None, :] <= at[:, None]).to(tl.int32), axis=1) - 1


@triton.jit(do_not_specialize=SIZES)
def make_keys(cells, ids, keys, valid, kept, total, tables, TABLES: tl.constexpr, BLOCK: tl.constexpr):
    """What indices are sorted by, a table after the other; which are of their table, and which of these take part.

    An index outside its table is that of the first row from here on, and takes no part: no kernel reads beside tensors.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    cell = tables_of(cells, tables, at, POSITION, TABLES)
    index = tl.load(ids + at, mask=inside, other=0)
    known = (index >= 0) & (index < tl.load(cells + cell * FIELDS + TABLE_ROWS))
    tl.store(keys + at, tl.load(cells + cell * FIELDS + KEY) + tl.where(known, index, 0), mask=inside)
    tl.store(valid + at, known.to(tl.uint8), mask=inside)
    takes_part = known & (index != tl.load(cells + cell * FIELDS + SKIPPED))
    tl.store(kept + at, takes_part.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def mark_prefixes(cells, keys, marks, total, tables, TABLES: tl.constexpr, BLOCK: tl.constexpr):
    """At which sorted positions a new prefix begins, for each level."""
    level = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    table = tables_of(cells, tables, at, POSITION, TABLES)
    cell = level * tables + table
    begins = at == tl.load(cells + cell * FIELDS + POSITION)
    key, below = tl.load(cells + cell * FIELDS + KEY), tl.load(cells + cell * FIELDS + BELOW)
    value = (tl.load(keys + at, mask=inside, other=0) - key) // below
    before = (tl.load(keys + at - 1, mask=inside & (at > 0), other=0) - key) // below
    tl.store(marks + level * total + at, (begins | (value != before)).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def scatter_plan(
    cells, keys, order, marks, counts, parents, groups, first_children, end_children, places, total, tables, levels,
    TABLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What is known of each prefix, written once for it; and of each index, where its row is."""
    level = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    table = tables_of(cells, tables, at, POSITION, TABLES)
    cell = level * tables + table
    start = tl.load(cells + cell * FIELDS + POSITION)
    # The position after the table's last is where the next table begins, or the end.
    next_table = tl.load(cells + (cell + 1) * FIELDS + POSITION, mask=table + 1 < tables, other=0)
    end = tl.where(table + 1 < tables, next_table, total)
    here = counts + level * total
    local = tl.load(here + at, mask=inside, other=0) - tl.load(here + start, mask=inside, other=0)
    slot = tl.load(cells + cell * FIELDS + SLOT) + local
    first = inside & (tl.load(marks + level * total + at, mask=inside, other=0) != 0)
    followed = inside & (at + 1 < end)
    last = inside & (~followed | (tl.load(marks + level * total + at + 1, mask=followed, other=0) != 0))
    key, below = tl.load(cells + cell * FIELDS + KEY), tl.load(cells + cell * FIELDS + BELOW)
    value = (tl.load(keys + at, mask=inside, other=0) - key) // below
    child = at
    if level + 1 < levels:
        beneath = here + total
        child = tl.load(beneath + at, mask=inside, other=0) - tl.load(beneath + start, mask=inside, other=0)
    else:
        tl.store(places + tl.load(order + at, mask=inside, other=0), local, mask=inside)
    tl.store(first_children + slot, child, mask=first)
    tl.store(end_children + slot, child + 1, mask=last)
    parent = value
    factor = tl.load(cells + cell * FIELDS + FACTOR)
    if level == 1:
        parent = value // factor  # a left product of the second core is a slice of the first
    if level > 1:
        above = here - total
        parent = tl.load(above + at, mask=inside, other=0) - tl.load(above + start, mask=inside, other=0)
    tl.store(parents + slot, parent, mask=first)
    if level > 0:
        group = tl.load(cells + cell * FIELDS + GROUP) + value % factor
        tl.store(groups + slot, group, mask=first)
