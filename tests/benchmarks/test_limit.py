import itertools
from math import prod

import pytest
import torch
from made_up import TINY

from benchmarks.limit import Machine, Work, both_work, forward_work, limit, measure_machine, multiply_adds
from benchmarks.workloads import Table, Workload


def counted(table, ids):
    """Multiply-adds of every plan, by listing what each product is made of."""
    padded = list(itertools.product(*map(range, table.row_factors)))
    asked = {padded[i] for i in ids.tolist()}
    for rows, reachable in ((asked, asked), (set(padded[: table.rows]), set(padded))):
        for cut in range(1, table.order):
            total = len(rows) * table.cols * table.ranks[cut]
            for k in range(2, cut + 1):
                shape = (
                    prod(table.col_factors[: k - 1]),
                    table.ranks[k - 1],
                    table.col_factors[k - 1] * table.ranks[k],
                )
                total += len({row[:k] for row in reachable}) * prod(shape)
            for k in range(cut, table.order - 1):
                shape = (table.ranks[k] * table.col_factors[k], table.ranks[k + 1], prod(table.col_factors[k + 1 :]))
                total += len({row[k:] for row in reachable}) * prod(shape)
            yield total


TABLES = (Table(12, (3, 4), (2, 5), 3), TINY, Table(100, (3, 3, 3, 4), (2, 3, 1, 2), 2))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"order {table.order}")
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_the_cheapest_plan_counts(table, count):
    ids = torch.randint(table.rows, (count,), generator=torch.Generator().manual_seed(0))
    assert multiply_adds(table, ids) == min(counted(table, ids))


def test_one_row_by_hand():
    # (2 x 4) @ (4 x 8), then (4 x 4) @ (4 x 3); from the right (8 x 4) @ (4 x 3), then (2 x 4) @ (4 x 6).
    assert multiply_adds(TINY, torch.tensor([7])) == min(2 * 4 * 8 + 4 * 4 * 3, 8 * 4 * 3 + 2 * 4 * 6)


def test_bytes_by_hand():
    ids = torch.tensor([0, 0, 1, 5])  # digits (0,0,0), (0,0,1), (0,1,0): 1, 2 and 2 slices of 8, 32 and 12 numbers
    touched = 4 * (8 + 2 * 32 + 2 * 12)
    forward, both = forward_work(TINY, ids, outputs=2), both_work(TINY, ids, outputs=2)
    assert forward.bytes == 4 * 8 + touched + 2 * 12 * 4
    assert both.bytes == forward.bytes + 2 * 12 * 4 + touched + 4 * TINY.core_numbers
    assert both.flops == 3 * forward.flops == 6 * multiply_adds(TINY, ids)


def test_the_slower_of_computing_and_moving_is_the_limit():
    machine = Machine(flops=1000.0, bandwidth=500.0)
    assert Work(flops=2000, bytes=10).milliseconds(machine) == 2000.0
    assert Work(flops=10, bytes=3000).milliseconds(machine) == 6000.0


def test_tables_add_up():
    machine = Machine(1e9, 1e9)
    workload = Workload("two", (TINY, TINY), 16)
    found = limit(workload, machine)
    parts = [forward_work(TINY, workload.table_ids(k), 16) for k in range(2)]
    assert found.forward == parts[0] + parts[1]
    assert found.both_ms > found.forward_ms == found.forward.milliseconds(machine)


def test_the_machine_is_measured():
    machine = measure_machine(sides=(32,), copied=2**12, repeats=1)
    assert machine.flops > 0
    assert machine.bandwidth > 0
