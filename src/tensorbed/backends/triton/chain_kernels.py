"""The kernels of chains: products by groups of equal slices, and sums over what is side by side.

Several tables are computed in one launch: their sizes are in ``cells``, see :mod:`.plan_kernels`, and where their cores
are stands in ``addresses``. Whatever is added up is added by one program in one order: no kernel has atomic additions,
and the same numbers come out every time.
"""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

from tensorbed.backends.triton.plan_kernels import (
    COLUMN,
    FIELDS,
    GRADIENT,
    GROUP,
    INNER,
    MADE,
    OUTER,
    OUTER_STRIDE,
    PARTIAL,
    POSITION,
    RANK,
    RANK_STRIDE,
    SIZES,
    SLICE,
    SLOT,
    WIDTH,
    field,
    table_of,
    tables_of,
)
from tensorbed.backends.triton.rounding import rounded


@triton.jit
def _group_of(cells, tile_ends, tile_groups, level, tables):
    """The group that a program's tile is of and which of its tiles; a group of the next level where there is none."""
    first = field(cells, level * tables, GROUP)
    tile = tl.program_id(0) + tl.load(tile_ends + first - 1, mask=first > 0, other=0)
    group = tl.load(tile_groups + tile)
    begin = tl.load(tile_ends + group - 1, mask=group > 0, other=0)
    return group, tile, tile - begin


@triton.jit
def _sizes(cells, cell):
    """Width, rank, inner and outer of a cell, none of them beyond 32 bits: dividing by 64 takes many registers."""
    width, rank = field(cells, cell, WIDTH).to(tl.int32), field(cells, cell, RANK).to(tl.int32)
    return width, rank, field(cells, cell, INNER).to(tl.int32), field(cells, cell, OUTER).to(tl.int32)


@triton.jit
def _divided(begin, steps, size):
    """``begin + steps`` by ``size``, the whole number and the rest, of a 64-bit ``begin``."""
    behind = (begin % size).to(tl.int32) + steps
    return begin // size + behind // size, behind % size


@triton.jit
def _inner_offsets(inner, width, rank, rank_stride, RING: tl.constexpr):
    """Where the terms of a sum are in a left product and in a slice: closing a ring sums over the joint too."""
    of_left, of_slice = inner, inner * rank_stride
    if RING:
        joint = inner // rank
        of_left = joint * width * rank + inner % rank
        of_slice = (inner % rank) * rank_stride + joint
    return of_left, of_slice


@triton.jit(do_not_specialize=SIZES)
def extend(
    cells, addresses, slices, left, out, parents, order, group_starts, tile_ends, tile_groups, level, tables,
    TABLES: tl.constexpr, FIRST: tl.constexpr, RING: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Left products times the slices that extend them, those of one slice together: rows of a tile are theirs in turn.

    ``slices`` is any tensor of the cores' dtype: it says which numbers are at ``addresses``.
    """
    group, _, tile = _group_of(cells, tile_ends, tile_groups, level, tables)
    if group >= field(cells, (level + 1) * tables, GROUP):
        return
    table = table_of(cells, level * tables, tables, group, GROUP, TABLES)
    cell = level * tables + table
    above = cell - tables
    width, rank, inner, outer = _sizes(cells, cell)
    rank_stride = field(cells, cell, RANK_STRIDE).to(tl.int32)
    outer_stride = field(cells, cell, OUTER_STRIDE).to(tl.int32)
    pointer = slices.dtype
    own = tl.load(addresses + cell).to(pointer) + (group - field(cells, cell, GROUP)) * field(cells, cell, SLICE)
    if FIRST:
        left = tl.load(addresses + above).to(pointer)
        left_size = field(cells, above, SLICE)
    else:
        left += field(cells, above, MADE)
        left_size = width * inner
    start, end = tl.load(group_starts + group), tl.load(group_starts + group + 1)
    row = tl.arange(0, ROWS)
    row_in = row < (end - start) * width - tile * ROWS
    at, step = _divided(tile * ROWS, row, width)
    slot = tl.load(order + start + at, mask=row_in, other=0)
    parent = tl.load(parents + slot, mask=row_in, other=0)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    col_in = col < outer
    left_row = left + parent * left_size + step * rank
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for begin in range(0, inner, DEPTH):
        term = begin + tl.arange(0, DEPTH)
        term_in = term < inner
        of_left, of_slice = _inner_offsets(term, width, rank, rank_stride, RING)
        a = tl.load(left_row[:, None] + of_left[None, :], mask=row_in[:, None] & term_in[None, :], other=0.0)
        b = tl.load(
            own + of_slice[:, None] + (col * outer_stride)[None, :], mask=term_in[:, None] & col_in[None, :], other=0.0
        )
        if WIDEN or not FIRST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    made = slot - field(cells, cell, SLOT)
    made_row = out + field(cells, cell, MADE) + (made * width + step) * outer
    tl.store(made_row[:, None] + col[None, :], total, mask=row_in[:, None] & col_in[None, :])


@triton.jit(do_not_specialize=SIZES)
def slice_gradients(
    cells, addresses, slices, left, below, partial, parents, order, group_starts, tile_ends, tile_groups, level, tables,
    TABLES: tl.constexpr, FIRST: tl.constexpr, RING: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The part that a chunk of the rows of a group has in the gradient of its slice: left products, transposed, times
    the gradients ``below`` of what they were extended to."""
    group, chunk, tile = _group_of(cells, tile_ends, tile_groups, level, tables)
    if group >= field(cells, (level + 1) * tables, GROUP):
        return
    table = table_of(cells, level * tables, tables, group, GROUP, TABLES)
    cell = level * tables + table
    above = cell - tables
    width, rank, inner, outer = _sizes(cells, cell)
    across = tl.cdiv(outer, COLS)
    if tl.program_id(1) >= tl.cdiv(inner, ROWS) * across:
        return
    if FIRST:
        left = tl.load(addresses + above).to(slices.dtype)
        left_size = field(cells, above, SLICE)
    else:
        left += field(cells, above, MADE)
        left_size = width * inner
    below += field(cells, cell, MADE)
    start, end = tl.load(group_starts + group), tl.load(group_starts + group + 1)
    rows = (end - start) * width
    term = (tl.program_id(1) // across) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(1) % across) * COLS + tl.arange(0, COLS)
    term_in, col_in = term < inner, col < outer
    of_left, _ = _inner_offsets(term, width, rank, 1, RING)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for begin in range(tile * CHUNK, tl.minimum(rows, (tile + 1) * CHUNK), DEPTH):
        row = tl.arange(0, DEPTH)
        row_in = row < rows - begin
        at, step = _divided(begin, row, width)
        slot = tl.load(order + start + at, mask=row_in, other=0)
        parent = tl.load(parents + slot, mask=row_in, other=0)
        left_row = left + parent * left_size + step * rank
        made = below + ((slot - field(cells, cell, SLOT)) * width + step) * outer
        a = tl.load(left_row[None, :] + of_left[:, None], mask=term_in[:, None] & row_in[None, :], other=0.0)
        b = tl.load(made[:, None] + col[None, :], mask=row_in[:, None] & col_in[None, :], other=0.0)
        total = tl.dot(a.to(tl.float32), b, total, input_precision=PRECISION)
    # Chunks of a table are numbered from its first group on.
    first = field(cells, cell, GROUP)
    own = chunk - tl.load(tile_ends + first - 1, mask=first > 0, other=0)
    part = partial + field(cells, cell, PARTIAL) + own * inner * outer
    tl.store(part + term[:, None] * outer + col[None, :], total, mask=term_in[:, None] & col_in[None, :])


@triton.jit(do_not_specialize=SIZES)
def add_chunks(
    cells, partial, gradients, tile_ends, level, tables,
    TABLES: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of each slice its chunks, in their order."""
    group = field(cells, level * tables, GROUP) + tl.program_id(0)
    table = table_of(cells, level * tables, tables, group, GROUP, TABLES)
    cell = level * tables + table
    _, rank, inner, outer = _sizes(cells, cell)
    first = field(cells, cell, GROUP)
    table_begin = tl.load(tile_ends + first - 1, mask=first > 0, other=0)
    begin, end = tl.load(tile_ends + group - 1, mask=group > 0, other=0), tl.load(tile_ends + group)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner * outer
    source = partial + field(cells, cell, PARTIAL) + at
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for chunk in range(begin - table_begin, end - table_begin):
        total += tl.load(source + chunk * inner * outer, mask=inside, other=0.0)
    _, of_slice = _inner_offsets(at // outer, 1, rank, field(cells, cell, RANK_STRIDE).to(tl.int32), RING)
    place = of_slice + (at % outer) * field(cells, cell, OUTER_STRIDE).to(tl.int32)
    to = gradients + field(cells, cell, GRADIENT) + (group - first) * field(cells, cell, SLICE) + place
    tl.store(to, tl.load(to, mask=inside, other=0.0) + total, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def left_gradients(
    cells, addresses, slices, below, out, groups, first_children, end_children, parents, level, tables,
    TABLES: tl.constexpr, FIRST: tl.constexpr, RING: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Gradients of the left products that ``level`` extends: of each, one sum over all that it was extended to.

    Terms of the sum are the columns of one child after the other. With FIRST the products are slices of the first core,
    and the sum is added to what is known of their gradients.
    """
    slot = tl.program_id(0) + field(cells, (level - 1) * tables, SLOT)
    first, end = tl.load(first_children + slot), tl.load(end_children + slot)
    if first >= end:  # nothing is kept there
        return
    table = table_of(cells, (level - 1) * tables, tables, slot, SLOT, TABLES)
    cell = level * tables + table
    above = cell - tables
    width, rank, inner, outer = _sizes(cells, cell)
    across = tl.cdiv(inner, COLS)
    if tl.program_id(1) >= tl.cdiv(width, ROWS) * across:
        return
    rank_stride = field(cells, cell, RANK_STRIDE).to(tl.int32)
    outer_stride = field(cells, cell, OUTER_STRIDE).to(tl.int32)
    core = tl.load(addresses + cell).to(slices.dtype)
    row = (tl.program_id(1) // across) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(1) % across) * COLS + tl.arange(0, COLS)
    row_in, col_in = row < width, col < inner
    of_left, of_slice = _inner_offsets(col, width, rank, rank_stride, RING)
    below += field(cells, cell, MADE) + first * width * outer
    child_groups = groups + field(cells, cell, SLOT) + first
    terms = (end - first) * outer
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for begin in range(0, terms, DEPTH):
        term = tl.arange(0, DEPTH)
        term_in = term < terms - begin
        child, step = _divided(begin, term, outer)
        of_below = child * width * outer + step
        a = tl.load(
            below + of_below[None, :] + (row * outer)[:, None], mask=row_in[:, None] & term_in[None, :], other=0.0
        )
        digit = tl.load(child_groups + child, mask=term_in, other=0) - field(cells, cell, GROUP)
        own = core + digit * field(cells, cell, SLICE) + step * outer_stride
        b = tl.load(own[:, None] + of_slice[None, :], mask=term_in[:, None] & col_in[None, :], other=0.0)
        total = tl.dot(a, b.to(tl.float32), total, input_precision=PRECISION)
    if FIRST:
        out += field(cells, above, GRADIENT) + tl.load(parents + slot) * field(cells, above, SLICE)
    else:
        out += field(cells, above, MADE) + (slot - field(cells, above, SLOT)) * width * inner
    at = out + (row * rank)[:, None] + of_left[None, :]
    inside = row_in[:, None] & col_in[None, :]
    if FIRST:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def pool(
    cells, unique, places, scales, bounds, out, bags, columns, level, tables,
    POOLED: tl.constexpr, WIDEN: tl.constexpr, BAGS: tl.constexpr, MEMBERS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Unique rows, scaled and added up, into bags; or without bounds each index a bag of its own."""
    table = tl.program_id(1)
    cell = level * tables + table
    cols = field(cells, cell, WIDTH) * field(cells, cell, OUTER)
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    bag_in = bag < bags
    col = tl.program_id(2) * COLS + tl.arange(0, COLS)
    col_in = col < cols
    position = field(cells, cell, POSITION)
    start, end = bag, tl.where(bag_in, bag + 1, bag)
    if POOLED:
        own = bounds + table * (bags + 1) + bag
        start, end = tl.load(own, mask=bag_in, other=0), tl.load(own + 1, mask=bag_in, other=0)
    unique += field(cells, cell, MADE)
    total = tl.zeros((BAGS, COLS), dtype=tl.float32)
    longest = tl.max(end - start)
    for begin in range(0, longest, MEMBERS):
        member = start[:, None] + begin + tl.arange(0, MEMBERS)[None, :]
        member_in = member < end[:, None]
        scale = tl.load(scales + position + member, mask=member_in, other=0.0)
        kept = member_in & (scale != 0)
        place = tl.load(places + position + member, mask=kept, other=0)
        row = unique + place * cols
        numbers = tl.load(
            row[:, :, None] + col[None, None, :], mask=kept[:, :, None] & col_in[None, None, :], other=0.0
        )
        total += tl.sum(numbers * scale[:, :, None], axis=1)
    at = out + bag[:, None] * columns + field(cells, cell, COLUMN) + col[None, :]
    tl.store(at, rounded(total, out, WIDEN), mask=bag_in[:, None] & col_in[None, :])


@triton.jit(do_not_specialize=SIZES)
def row_gradients(
    cells, grad, scales, bags_of, order, first_children, end_children, out, columns, level, tables,
    TABLES: tl.constexpr, MEMBERS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Of each unique row: those of the bags it is in, scaled as it was, in the order of the indices."""
    slot = tl.program_id(0) + field(cells, level * tables, SLOT)
    first, end = tl.load(first_children + slot), tl.load(end_children + slot)
    if first >= end:
        return
    table = table_of(cells, level * tables, tables, slot, SLOT, TABLES)
    cell = level * tables + table
    cols = field(cells, cell, WIDTH) * field(cells, cell, OUTER)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    col_in = col < cols
    grad += field(cells, cell, COLUMN)
    total = tl.zeros((COLS,), dtype=tl.float32)
    for begin in range(first, end, MEMBERS):
        member = begin + tl.arange(0, MEMBERS)
        member_in = member < end
        position = tl.load(order + member, mask=member_in, other=0)
        scale = tl.load(scales + position, mask=member_in, other=0.0)
        kept = member_in & (scale != 0)
        row = grad + tl.load(bags_of + position, mask=kept, other=0) * columns
        numbers = tl.load(row[:, None] + col[None, :], mask=kept[:, None] & col_in[None, :], other=0.0)
        total += tl.sum(numbers.to(tl.float32) * scale[:, None], axis=0)
    at = out + field(cells, cell, MADE) + (slot - field(cells, cell, SLOT)) * cols + col
    tl.store(at, total, mask=col_in)


@triton.jit(do_not_specialize=SIZES)
def weight_gradients(
    cells, unique, grad, kept, places, bags_of, out, total, columns, level, tables,
    TABLES: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Of each weight: the product of its row with the gradient of its bag."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < total
    cell = level * tables + tables_of(cells, tables, position, POSITION, TABLES)
    cols = tl.load(cells + cell * FIELDS + WIDTH) * tl.load(cells + cell * FIELDS + OUTER)
    taken = inside & (tl.load(kept + position, mask=inside, other=0.0) != 0)
    place, bag = tl.load(places + position, mask=taken, other=0), tl.load(bags_of + position, mask=taken, other=0)
    row = unique + tl.load(cells + cell * FIELDS + MADE) + place * cols
    grad_row = grad + bag * columns + tl.load(cells + cell * FIELDS + COLUMN)
    product = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, tl.max(cols), COLS):
        col = begin + tl.arange(0, COLS)
        mask = taken[:, None] & (col[None, :] < cols[:, None])
        numbers = tl.load(row[:, None] + col[None, :], mask=mask, other=0.0)
        other = tl.load(grad_row[:, None] + col[None, :], mask=mask, other=0.0)
        product += tl.sum(numbers * other.to(tl.float32), axis=1)
    tl.store(out + position, product, mask=inside)
