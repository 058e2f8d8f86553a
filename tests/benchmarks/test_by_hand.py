import pytest
import torch

from benchmarks import by_hand
from benchmarks.workloads import Table, Workload

ONE = Workload("one", (Table.suggested(5000, 16, 4),), 40)
MANY = Workload("many", tuple(Table.suggested(rows, 8, 4) for rows in (3, 5000, 200_000)), 40)


@pytest.mark.parametrize("name", by_hand.CASES)
@pytest.mark.parametrize("workload", [ONE, MANY], ids=lambda workload: workload.name)
def test_both_sides_compute_the_same(name, workload):
    sides = [by_hand.calls(layer, workload) for layer in by_hand.layers_of(by_hand.CASES[name], workload)]
    ours, *theirs = (forward() for forward, _ in sides)
    assert theirs
    for by_hand_rows in theirs:
        torch.testing.assert_close(ours, by_hand_rows, rtol=1e-4, atol=1e-5)


def test_every_case_has_a_line_for_each_pass(monkeypatch):
    monkeypatch.setattr("benchmarks.composed.fastest", lambda call: [call(), 1.0][1])
    found = list(by_hand.lines(ONE, 1, list(by_hand.CASES)))
    assert [line[:2] for line in found] == [(n, p) for n in by_hand.CASES for p in ("forward", "and backward")]
    assert all(line[4] == "1.00" for line in found)
