from math import log

import pytest
import torch
from made_up import BAGS, ROWS, SEVERAL, TINY

import tensorbed as tb
from benchmarks.workloads import SHUFFLED, UNIFORM, WORKLOADS, Workload, shuffled, zipf


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("rows", [1, 2, 1000, 2**17, 2**17 + 1, 10_131_227])
def test_ids_follow_zipf(rows):
    ids = zipf(rows, 200_000, generator())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < rows
    harmonic = torch.arange(1, rows + 1, dtype=torch.float64).reciprocal().cumsum(0)
    for bound in {1, 1 + rows // 1000, 1 + rows // 10, rows}:
        expected = float(harmonic[bound - 1] / harmonic[-1])
        # Five standard deviations of a share of 200,000.
        assert abs(float((ids < bound).double().mean()) - expected) < 5 * 0.5 / 200_000**0.5


def test_a_billion_rows_are_drawn_without_a_number_for_each():
    ids = zipf(10**9, 100_000, generator())
    expected = (log(10**5) + 0.5772) / (log(10**9) + 0.5772)
    assert abs(float((ids < 10**5).double().mean()) - expected) < 0.01
    assert int(ids.max()) > 10**8


@pytest.mark.parametrize("rows", [60, 5000, 10**9])
def test_shuffling_renames_rows(rows):
    named = shuffled(torch.tensor([0, 3, 3, 59, 0]), rows, generator())
    assert named[0] == named[4]
    assert named[1] == named[2]
    assert named.unique().numel() == 3
    assert int(named.max()) < rows


def test_ids_are_the_same_every_time_and_shaped_as_asked():
    assert ROWS.ids.shape == (64,)
    assert BAGS.ids.shape == (8, 3)
    assert SEVERAL.ids.shape == (16, 3)
    assert torch.equal(Workload("again", SEVERAL.tables, 16).ids, SEVERAL.ids)
    assert torch.equal(SEVERAL.table_ids(1), SEVERAL.ids[:, 1])


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda workload: workload.name)
def test_tables_are_those_the_library_makes(workload):
    for table in workload.tables:
        made = tb.TTEmbedding(table.rows, table.cols, table.rank, shape=table.shape, device="meta").structure
        assert made.ranks == table.ranks
        assert made.numel == table.core_numbers


def test_the_workloads_asked_for_are_there():
    twice = {"LM r16", "LM r96", "LM r192", "NMT", "IMDB TT1", "IMDB TT3", "CTR"}
    assert set(WORKLOADS) == twice | {f"{name} shuffled" for name in twice} | {"TT-Rec", "one row"}
    assert all((workload.order == SHUFFLED) == name.endswith("shuffled") for name, workload in WORKLOADS.items())
    assert WORKLOADS["TT-Rec"].order == UNIFORM
    assert max(table.rows for table in WORKLOADS["CTR"].tables) == 10_131_227
    assert WORKLOADS["one row"].tokens == 1


def test_sizes_are_counted():
    assert TINY.slice_numbers == (8, 32, 12)
    assert TINY.core_numbers == 3 * 8 + 4 * 32 + 5 * 12
    assert BAGS.unpooled_numbers == 8 * 3 * 12
