"""Lookups beside busy processes: who is busy and when, what is timed, and the table."""

import os
import subprocess
import sys

import pytest
import torch
from made_up import ROWS

pytest.importorskip("rich")

from benchmarks import busy
from benchmarks.busy import alternated, calls_of, main, mean, parse
from benchmarks.neighbours import busy_cores
from benchmarks.peers import AUTO, DENSE, PEERS
from provenance import ROOT

BY_NAME = {peer.name: peer for peer in PEERS}
linux = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked at in /proc")


def command_of(process):
    with open(f"/proc/{process}/cmdline", "rb") as file:
        return file.read()


def gone(process):
    return not os.path.exists(f"/proc/{process}")


@linux
def test_every_core_has_a_neighbour_as_long_as_the_block_lasts():
    with busy_cores() as neighbours:
        assert len(neighbours) == os.cpu_count()
        assert all(b"getppid" in command_of(process) for process in neighbours)
    assert all(gone(process) for process in neighbours)


@linux
def test_neighbours_are_gone_after_an_error():
    with pytest.raises(ZeroDivisionError), busy_cores() as neighbours:
        _ = 1 / 0
    assert all(gone(process) for process in neighbours)


def test_neighbours_end_with_a_process_that_was_killed():
    code = """
import os
from benchmarks.neighbours import busy_cores
with busy_cores() as neighbours:
    os.abort()
"""
    # Their errors would go into this pipe too: it is read until the last of them has ended.
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120)
    assert ran.returncode != 0


def test_turns_alternate_and_medians_are_returned(monkeypatch):
    turns = []
    times = iter([1.0, 5.0, 100.0, 4.0, 2.0, 300.0])

    def turn(call, seconds):
        turns.append(bool(beside))
        return next(times)

    beside = []

    class Neighbours:
        def __enter__(self):
            beside.append(1)

        def __exit__(self, *error):
            beside.clear()

    monkeypatch.setattr(busy, "busy_cores", Neighbours)
    monkeypatch.setattr(busy, "mean", turn)
    assert alternated(lambda: None, 3, 0.1) == (2.0, 5.0)
    assert turns == [False, True] * 3


def test_a_turn_has_a_call_however_short_it_is():
    calls = []
    assert mean(lambda: calls.append(1), 0.0) > 0
    assert len(calls) == 1


@pytest.mark.parametrize("name", [AUTO, DENSE])
def test_what_is_timed_is_forward_and_backward(name, monkeypatch):
    made = []
    build = busy.build
    monkeypatch.setattr(busy, "build", lambda *given: made.append(build(*given)) or made[-1])
    calls = calls_of(ROWS, BY_NAME[name])
    (layer,) = made
    calls["forward"]()
    assert all(parameter.grad is None for parameter in layer.parameters())
    calls["forward+backward"]()
    once = [parameter.grad.clone() for parameter in layer.parameters()]
    calls["forward+backward"]()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(layer.parameters(), once, strict=True))


def test_the_table_has_the_factor_of_both(monkeypatch, capsys):
    monkeypatch.setitem(busy.WORKLOADS, "LM r16", ROWS)
    threads = torch.get_num_threads()
    try:
        assert main(["--workload", "LM r16", "--rounds", "1", "--seconds", "0.01", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    for name in (AUTO, DENSE):
        assert [line.split()[-4] for line in shown.splitlines() if name in line] == ["forward", "forward+backward"]


@pytest.mark.parametrize("given", [["--rounds", "0"], ["--threads", "0"], ["--workload", "none"]])
def test_what_makes_no_sense_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        parse(given)
    assert given[1] in capsys.readouterr().err
