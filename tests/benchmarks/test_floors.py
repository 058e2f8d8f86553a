from dataclasses import replace

import pytest
from made_up import result, timed

from benchmarks.floors import judge
from benchmarks.memory import Extra
from benchmarks.peers import AUTO, DENSE, GATHER, NATIVE, TENSORLY, TORCH
from benchmarks.tables import choice_sheet, floors_sheet, summary_sheet
from benchmarks.workloads import WORKLOADS, Table, Workload

LM = WORKLOADS["LM r16 shuffled"]


def floors(judged, about):
    return [floor for floor in judge([judged]) if about in floor.about]


@pytest.mark.parametrize(("name", "least"), [("LM r192", 10.0), ("IMDB TT3", 10.0), ("TT-Rec", 10.0), ("CTR", 3.0)])
def test_tensorly_is_to_be_beaten(name, least):
    for taken, verdict in ((1.0, "met"), (1.1, "missed")):
        times = {AUTO: timed(1, taken, 1), TENSORLY: timed(1, least, 1)}
        (floor,) = floors(result(WORKLOADS[name], times), TENSORLY)
        assert floor.verdict == verdict
        assert floor.asked == least


def test_one_row_against_tensorly_is_reported_only():
    assert not floors(result(WORKLOADS["one row"], {AUTO: timed(1, 1, 1), TENSORLY: timed(1, 1, 1)}), TENSORLY)


def test_plain_torch_is_to_be_beaten_where_asked():
    times = {AUTO: timed(1, 1, 1), TORCH: timed(1, 2.9, 1)}
    (floor,) = floors(result(LM, times), TORCH)
    assert floor.verdict == "missed"
    assert not floors(result(WORKLOADS["LM r96"], times), TORCH)


def test_efficiency_is_limit_over_measured():
    forward, both = floors(result(LM, {AUTO: timed(2, 5, 6)}, limit=(1.0, 1.0)), "efficiency")
    assert (forward.reached, forward.verdict) == (0.5, "met")
    assert (both.reached, both.verdict) == (0.2, "missed")
    assert not floors(result(WORKLOADS["CTR"], {AUTO: timed(2, 5, 6)}), "efficiency")


def test_training_is_to_be_faster_than_a_dense_table_with_many_rows():
    times = {AUTO: timed(1, 1, 2), DENSE: timed(1, 1, 3)}
    (floor,) = floors(result(LM, times), "training step")
    assert floor.reached == 1.5
    small = Workload("small", (Table(24_999, (25, 25, 40), (2, 2, 2), 2),), 8)
    assert not floors(result(small, times), "training step")


def test_one_row_is_judged_with_and_without_gradients():
    times = {AUTO: timed(4, 1, 1, tracked=6), DENSE: timed(1, 1, 1)}
    without, tracked = floors(result(WORKLOADS["one row"], times), "lookup in")
    assert (without.reached, without.verdict) == (4.0, "met")
    assert (tracked.reached, tracked.verdict) == (6.0, "missed")


def test_memory_is_bounded_by_rows_and_cores():
    bound = 3 * 4 * (4096 * 512 + LM.core_numbers) + 8 * 10**6
    for size, verdict in ((bound, "met"), (bound + 1, "missed")):
        (floor,) = floors(result(LM, {AUTO: timed(1, 1, 1)}, {AUTO: Extra(size, "made up")}), "extra memory")
        assert floor.verdict == verdict


def test_auto_is_to_be_near_the_best_it_may_choose():
    times = {AUTO: timed(1, 1.3, 1), NATIVE: timed(1, 1.5, 1), GATHER: timed(0.9, 1, 1), TENSORLY: timed(1, 0.1, 1)}
    judged = result(LM, times)
    assert [floor.verdict for floor in floors(judged, "best of ours")] == ["met", "missed"]
    assert GATHER in choice_sheet([judged]).rows[0]


def test_what_was_not_measured_is_not_judged():
    found = judge([result(LM, {})])
    assert {floor.verdict for floor in found} == {"not run"}
    assert "0 of 0 met" in floors_sheet(found).title
    assert {replace(floor, reached=floor.asked).verdict for floor in found} == {"met"}
    assert {row[-1] for row in summary_sheet(found).rows} == {"not run"}


def test_the_summary_names_the_worst():
    names = ("LM r16", "NMT", "TT-Rec")
    results = [
        result(WORKLOADS[name], {AUTO: timed(taken, 1, 1)}) for name, taken in zip(names, (2, 10, 4), strict=True)
    ]
    row = next(row for row in summary_sheet(judge(results)).rows if row[0] == "efficiency, forward")
    assert row == ("efficiency, forward", "NMT", "1 of 3", ">= 0.35", "0.10", "missed")
