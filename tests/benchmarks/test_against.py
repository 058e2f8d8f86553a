"""Another commit's build beside the checkout's: ratios and marks of made-up times, refusals, nothing left behind."""

import json
import os
import select
import signal
import subprocess
import tempfile
from types import SimpleNamespace

import pytest
import torch
from made_up import BAGS, ROWS, SEVERAL

pytest.importorskip("rich")

import tensorbed as tb
from benchmarks.against import __main__ as command
from benchmarks.against import rounds, worker
from benchmarks.against.builds import Build, Ended, install, python_with, run, temporary_folder, worktree
from benchmarks.against.cases import (
    BOTH,
    CASES,
    FORWARD,
    STEP,
    TOPK,
    TRACKED,
    Case,
    chosen,
    head_times,
    layer_of,
    lookup_times,
)
from benchmarks.against.ratios import AGAIN, CONTESTANTS, NEW, OLD, Compared, Comparison
from benchmarks.against.refusal import RefusalError
from benchmarks.against.rounds import Answer, ask_worker, compared
from benchmarks.heads import HEADS, TT_16, HeadWorkload
from benchmarks.timing import Times
from benchmarks.workloads import Workload
from provenance import ROOT

in_a_repository = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="commits are of a repository")


def made(old, new, again):
    return Comparison("LM r16", FORWARD, {OLD: old, NEW: new, AGAIN: again})


def quiet(text):
    """A progress bar that nobody sees."""


# Ratios


def test_ratio_and_noise_are_of_medians():
    # One round in which something else ran changes neither.
    found = made([2.0, 90.0, 2.0], [3.0, 3.0, 1.0], [2.2, 2.2, 70.0])
    assert found.ratio == 1.5
    assert found.noise == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("new", "again", "slower"),
    [
        (1.04, 1.0, False),
        (1.05, 1.0, False),  # exceeds, not reaches
        (1.06, 1.0, True),
        (1.06, 1.04, False),
        (1.10, 1.04, True),
        (1.06, 0.96, False),  # the first of the two was the slow one: as much noise
        (1.10, 0.96, True),
        (0.50, 1.0, False),
        (1.90, 2.0, False),
    ],
)
def test_slower_is_what_exceeds_the_noise(new, again, slower):
    assert made([1.0], [new], [again]).slower is slower


def test_a_record_has_every_time():
    record = made([1.0, 2.0], [4.0, 5.0], [1.0, 2.0]).record()
    assert json.loads(json.dumps(record)) == record
    assert (record["old_ms"], record["new_ms"], record["old_again_ms"]) == ([1.0, 2.0], [4.0, 5.0], [1.0, 2.0])
    assert record["new_over_old"] == 3.0
    assert record["old_again_over_old"] == 1.0
    assert record["slower"] is True
    assert record["rounds"] == 2


# Rounds


def test_every_contestant_has_a_turn_in_every_round():
    asked, told = [], []

    def ask(contestant, workload):
        asked.append(contestant)
        return Answer({FORWARD: float(len(asked)), BOTH: 1.0}, kernels=contestant != NEW)

    found = compared("LM r16", 4, ask, told.append)
    turns = [asked[k : k + 3] for k in range(0, 12, 3)]
    assert all(sorted(turn) == sorted(CONTESTANTS) for turn in turns)
    assert [comparison.call for comparison in found.comparisons] == [FORWARD, BOTH]
    expected = {name: [k + 1.0 for k, other in enumerate(asked) if other == name] for name in CONTESTANTS}
    assert found.comparisons[0].times == expected
    assert found.without_kernels == {NEW}
    assert len(told) == 12


def test_one_that_cannot_run_is_not_asked_again():
    asked = []

    def ask(contestant, workload):
        asked.append(contestant)
        return Answer(reason="this build has no tb.Head") if contestant == OLD else Answer({STEP: 1.0})

    found = compared("head dense", 9, ask, quiet)
    assert found.reason == "old: this build has no tb.Head"
    assert not found.comparisons
    assert asked.count(OLD) == 1
    assert len(asked) <= 3
    assert found.records() == [{"kind": "against", "workload": "head dense", "reason": found.reason}]


def test_the_sheet_marks_and_explains():
    slow, same = made([1.0], [2.0], [1.0]), made([1.0], [1.0], [1.0])
    found = [
        Compared("LM r16", [slow, same], without_kernels=frozenset([OLD, AGAIN])),
        Compared("CTR", reason="old: this build has no tb.EmbeddingBagCollection"),
    ]
    shown = command.sheet(found, "aaa", "bbb", 9)
    assert [row[-1] for row in shown.rows] == ["slower", "", "not run"]
    assert shown.rows[0][2:6] == ("1.00", "2.00", "2.000", "1.000")
    assert {len(row) for row in shown.rows} == {len(shown.columns)}
    assert "not run: CTR, old: this build has no tb.EmbeddingBagCollection" in shown.notes
    assert "old: without compiled kernels" in shown.notes
    assert "new: without compiled kernels" not in shown.notes


# Cases


@pytest.mark.parametrize("workload", [ROWS, BAGS, SEVERAL], ids=lambda workload: workload.name)
def test_layers_give_what_workloads_ask_for(workload):
    assert layer_of(workload)(workload.ids).shape == (workload.batch, workload.cols)
    assert set(lookup_times(workload, budget=0.0)) == {FORWARD, BOTH}


def test_short_calls_are_timed_in_grad_mode_too():
    assert set(lookup_times(Workload("one", ROWS.tables, 1, calls=2), budget=0.0)) == {FORWARD, TRACKED, BOTH}


def test_heads_are_timed():
    (peer,) = [peer for peer in HEADS if peer.name == TT_16]
    tiny = HeadWorkload(classes=50, row_factors=(3, 4, 5), col_factors=(2, 2, 3), tokens=4, k=3)
    found = head_times(peer, tiny, budget=0.0)
    assert set(found) == {STEP, TOPK}
    assert all(len(times.rounds) >= 3 and min(times.rounds) > 0 for times in found.values())


def test_cases_need_public_names():
    assert {name for case in CASES.values() for name in case.needs} <= set(tb.__all__)
    assert CASES["CTR"].needs == ("EmbeddingBagCollection", "EmbeddingBag", "TensorTrain")
    assert CASES["head low rank 16"].needs == ("Head", "LowRank")


def test_shuffled_ids_are_run_by_name_only():
    by_default = [case.name for case in chosen(None)]
    assert {"LM r16", "TT-Rec", "CTR", "one row", "head dense", "head TT rank 96"} <= set(by_default)
    assert not [name for name in by_default if name.endswith("shuffled")]
    assert [case.name for case in chosen(["NMT shuffled", "lm R16", "NMT shuffled"])] == ["NMT shuffled", "LM r16"]


# The worker


def test_modules_of_another_build_are_found(tmp_path):
    own = SimpleNamespace(__file__=str(tmp_path / "tensorbed" / "__init__.py"))
    other = SimpleNamespace(__file__="/elsewhere/tensorbed/nn.py")
    similar = SimpleNamespace(__file__="/elsewhere/tensorbed_other.py")
    modules = {"tensorbed": own, "tensorbed.nn": other, "tensorbed_other": similar, "tensorbed.x": SimpleNamespace()}
    assert worker.foreign_files(modules, tmp_path) == ["/elsewhere/tensorbed/nn.py"]


def test_a_worker_refuses_another_build(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        worker.main(["one row", "--build", str(tmp_path), "--budget", "0"])
    assert ended.value.code == worker.WRONG_BUILD
    said = capsys.readouterr()
    assert "and not from the build in" in said.err
    assert said.out == ""


def test_a_worker_says_why_not():
    def fails(budget):
        raise RuntimeError("no memory\nat all")

    assert worker.answer(Case("a", "", ("Ring",), fails), 0.0) == {"reason": "this build has no tb.Ring"}
    assert worker.answer(Case("a", "", (), fails), 0.0) == {"reason": "RuntimeError: no memory"}
    timed = worker.answer(Case("a", "", (), lambda budget: {FORWARD: Times((3.0, budget))}), 2.0)
    assert timed["times"][FORWARD]["min"] == 2.0


def test_processes_import_the_build_and_no_checkout(tmp_path):
    (tmp_path / "tensorbed").mkdir()
    (tmp_path / "tensorbed" / "__init__.py").write_text("")
    python, environment = python_with(Build("made", tmp_path))
    code = "import sys, tensorbed, benchmarks; print(tensorbed.__file__, benchmarks.__file__, sys.path, sep='\\n')"
    done = run([*python, "-c", code], {**environment, "PYTHONDONTWRITEBYTECODE": "1"})
    file, harness, path = done.output.splitlines()
    assert file == str(tmp_path / "tensorbed" / "__init__.py")
    assert harness == str(ROOT / "benchmarks" / "__init__.py")
    assert repr(str(ROOT / "src")) not in path


def answered(monkeypatch, code, output="", errors=""):
    monkeypatch.setattr(rounds, "run", lambda *given: Ended(code, output, errors))
    return ask_worker(Build("abc", ROOT), "one row", 0.0)


def test_what_processes_say_is_understood(monkeypatch):
    line = {"kernels": True, "times": {FORWARD: {"min": 1.5, "median": 2.0}}}
    assert answered(monkeypatch, 0, f"noise\n{json.dumps(line)}\n") == Answer({FORWARD: 1.5})
    refused = json.dumps({"kernels": False, "reason": "this build has no tb.Head"})
    assert answered(monkeypatch, 0, refused) == Answer({}, False, "this build has no tb.Head")
    assert answered(monkeypatch, 1, errors="Traceback\nImportError: no x\n").reason == "ImportError: no x"
    assert answered(monkeypatch, -9).reason == "it ended with exit code -9 and said nothing"
    with pytest.raises(RefusalError, match="A process of abc could not be used: tensorbed was imported from"):
        answered(monkeypatch, worker.WRONG_BUILD, errors="tensorbed was imported from /x and not from /y.\n")


# The command


def refused(arguments, capsys):
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.endswith(".\n")
    assert len(said.splitlines()) == 1
    return said


@in_a_repository
@pytest.mark.parametrize("commit", ["no-such-commit", "HEAD:README.md", "0" * 40])
def test_an_unknown_commit_is_refused(commit, capsys):
    assert f'"{commit}" is no commit of this repository' in refused([commit], capsys)


@in_a_repository
def test_the_nearest_workload_is_named(capsys):
    assert 'no workload "lm 16"; the nearest is "LM r16"' in refused(["HEAD", "--only", "lm 16"], capsys)
    assert 'the nearest is "' in refused(["HEAD", "--only", "?"], capsys)


@in_a_repository
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_built(tmp_path, capsys):
    said = refused(["HEAD", "--json", str(tmp_path / "none" / "lines")], capsys)
    assert "cannot be written: No such file or directory" in said


@pytest.mark.parametrize("arguments", [[], ["HEAD", "--rounds", "0"], ["HEAD", "--rounds", "few"]])
def test_arguments_without_sense_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        command.parse(arguments)
    assert ended.value.code == 2
    assert "COMMIT is missing" in (said := capsys.readouterr().err) or "at least one" in said


def test_options_are_understood():
    options = command.parse(["HEAD~1", "--only", "LM r16", "--only", "CTR"])
    assert (options.commit, options.rounds, options.only) == ("HEAD~1", 9, ["LM r16", "CTR"])


def test_workloads_are_listed(capsys):
    assert command.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in CASES)


# Builds


@pytest.fixture
def worktrees(monkeypatch, tmp_path):
    """How many there are in a temporary folder of this test alone: others may run beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def count():
        listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
        return listed.stdout.count(f"{tmp_path}/tensorbed-against-")

    return count


def test_a_build_that_fails_shows_its_last_lines(tmp_path):
    with pytest.raises(RefusalError, match=r"(?s)^Building abc failed with exit code 1; it said last:\n.*project"):
        install(tmp_path, "abc", tmp_path / "built")


@in_a_repository
@pytest.mark.parametrize("error", [RefusalError, KeyboardInterrupt, SystemExit])
def test_the_worktree_is_removed_whatever_happens(error, worktrees):
    folders = []

    def build():
        with temporary_folder() as folder, worktree("HEAD", folder / "worktree") as source:
            folders.append(folder)
            assert (source / "pyproject.toml").exists()
            (source / "made").write_text("by a build")
            assert worktrees() == 1
            raise error

    with pytest.raises(error):
        build()
    assert worktrees() == 0
    assert not folders[0].exists()


def test_a_signal_ends_by_way_of_cleaning_up():
    with pytest.raises(SystemExit) as ended, temporary_folder() as folder:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not folder.exists()
    assert signal.getsignal(signal.SIGTERM) is not None


def test_children_of_a_process_that_is_interrupted_end_with_it(monkeypatch):
    ends = []

    def interrupted(process, **given):
        assert process.stdout.readline() == "started\n"
        ends.append(os.dup(process.stdout.fileno()))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["sh", "-c", "sleep 600 & echo started; wait"], os.environ)
    # The end of the pipe is there to be read when nobody is left who holds it.
    assert select.select(ends, [], [], 60)[0] == ends
    assert os.read(ends[0], 1) == b""
    os.close(ends[0])


@in_a_repository
@pytest.mark.slow
def test_a_commit_against_itself(monkeypatch, tmp_path, capsys, worktrees):
    monkeypatch.setenv("TENSORBED_NATIVE", "0")  # compiling takes minutes, and is the same command
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    lines = tmp_path / "lines.jsonl"
    assert command.main(["HEAD", "--rounds", "1", "--only", "one row", "--json", str(lines)]) == 0
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["call"] for record in records] == [FORWARD, TRACKED, BOTH]
    for record in records:
        assert min(record["old_ms"] + record["new_ms"] + record["old_again_ms"]) > 0
        assert record["reason"] is None
    assert "new: without compiled kernels" in capsys.readouterr().out
    assert worktrees() == 0
