"""The curve of training steps by rows of a table: what is timed, what is gone on with, and what is asked."""

import json

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks.click_through import __main__ as command
from benchmarks.click_through.contestants import CONTESTANTS, DIM, FULL, HASHED, SPARSE, TORCHREC, TRAIN
from benchmarks.click_through.steps import Case, Model, Point, Tables, drawn, measured
from benchmarks.peers import CannotRunError
from experiments.tasks.click_through.criteo import FEATURES
from experiments.tasks.click_through.synthetic import Synthetic

TINY = {"hidden": 4, "batch": 6}


@pytest.fixture(params=list(CONTESTANTS))
def name(request):
    if request.param == TORCHREC:
        pytest.importorskip("torchrec")
    return request.param


def point(milliseconds=1.0):
    return Point(milliseconds, 2.0, 3.0, 4, 5, 6)


def test_a_step_moves_the_rows_of_its_ids_and_no_others(name):
    case = Case(name, 3000, **TINY)
    (given, labels), *_ = drawn(case, CONTESTANTS[name])
    tables = Tables(CONTESTANTS[name], case.rows)
    before = tables.module(given).detach().clone()
    assert before.shape == (case.batch, len(FEATURES) * DIM)
    tables.step(given, torch.ones(case.batch, len(FEATURES) * DIM))
    assert tables.module(given).sum() < before.sum()  # whose gradient it was
    body = Model(tables, case.hidden)
    body.step(given, labels)
    if name in (FULL, SPARSE):
        first = next(tables.module.parameters()).detach()
        asked = torch.from_numpy(Synthetic.of_size(case.rows).rows(case.batch, 0, 0)[1])[:, 0]
        others = torch.ones(len(first), dtype=torch.bool).index_fill_(0, asked, value=False)
        assert (first[others] == 0.01).all()


def test_full_tables_need_memory_for_every_row_and_others_do_not():
    small, large = (Synthetic.of_size(rows).tables for rows in (10**5, 10**9))
    for name, numbers in ((FULL, 4 * DIM), (SPARSE, 3 * DIM), (TORCHREC, DIM + 1)):
        assert CONTESTANTS[name].needs(large) == 4 * numbers * sum(large.values())
        with pytest.raises(CannotRunError, match=r"needs .* GB"):
            measured(Case(name, 10**9, **TINY), 0.0)
    for name in (HASHED, TRAIN):
        assert CONTESTANTS[name].needs(large) == CONTESTANTS[name].needs(small)


def test_what_was_measured_is_not_measured_again(tmp_path, monkeypatch, capsys):
    asked = []

    def in_this_process(function, arguments, threads, patience):
        asked.append(arguments[0])
        return "no time" if arguments[0].implementation == SPARSE else function(*arguments)

    monkeypatch.setattr(command, "in_fresh_process", in_this_process)
    names = (TRAIN, FULL, SPARSE)
    options = ["--rows", "30", "3000", "--hidden", "4", "--batch", "6", "--seconds", "0", "--out", str(tmp_path)]
    command.main([*options, "--implementation", *names])
    assert {(case.implementation, case.rows) for case in asked} == {
        (name, rows) for name in names for rows in (30, 3000)
    }
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert all(line["rows_per_second"] == pytest.approx(6000 / line["step_ms"]) for line in lines if "step_ms" in line)
    assert lines[0]["parameters"] == (13 * 100 + 26 * 30) * DIM
    assert (tmp_path / "scale.png").stat().st_size > 1000
    told = capsys.readouterr().out
    assert "not run: nn.EmbeddingBag sparse, 30 rows: no time" in told
    asked.clear()
    command.main([*options, "--implementation", *names])
    assert {case.implementation for case in asked} == {SPARSE}  # which had only a reason
    asked.clear()
    command.main([*options, "--implementation", TRAIN, "--anew"])
    assert {case.implementation for case in asked} == {TRAIN}


def test_numbers_to_reach_are_those_of_the_tables():
    points = {
        Case(TRAIN, 10**6): point(3.0),
        Case(SPARSE, 10**6): point(2.5),
        Case(TORCHREC, 10**6): point(2.0),
        Case(TRAIN, 10**7): point(4.0),
        Case(SPARSE, 10**7): "needs about 50.0 GB",
        Case(TRAIN, 10**9): point(6.0),
    }
    asked = command.floors(points)
    assert [(floor.asked, floor.reached, floor.met) for floor in asked] == [
        (1.5, pytest.approx(1.2), True),
        (1.0, pytest.approx(1.5), False),
        (1.3, pytest.approx(1.5), False),
    ]
