import io
import itertools
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from laboratory import ROOT, results, tried_line, try_point
from rich.console import Console

pytest.importorskip("accelerate")

from experiments.lab import sweep as sweep_module
from experiments.lab.errors import ExperimentError, Stopped
from experiments.lab.metrics import Metric
from experiments.lab.records import append
from experiments.lab.rows import Bench, Plan, Search, plan
from experiments.lab.sweep import Cell, Sweep
from experiments.lab.task import find

TASK = find("sentiment")
PLAN = Bench(TASK, Path()).plan


@pytest.fixture
def started(monkeypatch):
    """Every process that would be started, ended at once with the code given for it."""
    commands, codes = [], {}

    class Process:
        def __init__(self, command, **options):
            assert Path(options["cwd"]) == ROOT
            assert options["process_group"] == 0
            assert options["env"]["LD_PRELOAD"] == "fast.so"
            commands.append(command)
            self.code = codes.get(command[command.index("--config") + 1], 0)
            self.returncode = None

        def wait(self, timeout=None):
            self.returncode = self.code() if callable(self.code) else self.code

        def poll(self):
            return self.returncode

        def terminate(self):
            codes["terminated"].append(self)

    codes["terminated"] = []
    monkeypatch.setattr(sweep_module, "jemalloc", lambda: {"LD_PRELOAD": "fast.so"})
    monkeypatch.setattr(sweep_module.subprocess, "Popen", Process)
    return commands, codes


def made(tmp_path, **options):
    return Sweep(TASK, results=tmp_path, out=tmp_path / "out", console=Console(quiet=True), **options)


def rows(commands):
    return [(c[c.index("--config") + 1], c[c.index("--seed") + 1]) for c in commands if "--kind" not in c]


def test_every_row_is_run_and_the_search_of_a_set_comes_before_its_rows(tmp_path, started):
    commands, _ = started
    assert made(tmp_path).run(seeds=1) == []
    assert rows(commands) == [(f"{d}-{row}", "0") for d, row, seed in PLAN.runs if seed == 0]
    kinds = [(c[c.index("--config") + 1].split("-")[0], "--kind" in c) for c in commands]
    imdb, sst5 = [("imdb", True)] * 4 * 4, [("sst5", True)] * 4 * 8 * 3
    imdb_again = imdb  # nothing was written here, so it is still missing
    assert kinds == imdb + [("imdb", False)] * 8 + sst5 + [("sst5", False)] * 17 + imdb_again + [("imdb", False)] * 2
    assert all(c[0] == sys.executable for c in commands)


def test_what_has_a_result_is_left_out(bench, tmp_path, started):
    commands, _ = started
    done = [(d, row, seed) for d, row, seed in PLAN.runs][:-2]
    for dataset, search in PLAN.searches.items():
        for format, point in itertools.product(search.rows, search.points):
            try_point(bench, dataset, format, point, 0.4)
    for dataset, row, seed in done:
        settings = bench.settle(f"{dataset}-{row}", {"seed": seed})
        append(bench.file(), {"settings": settings.as_record()})
    made(tmp_path, jobs=2).run()
    assert sorted(rows(commands)) == [("imdb-TR4", "0"), ("imdb-TR5", "0")]
    assert len(commands) == 2


def test_a_result_is_known_for_one_after_a_search_that_was_lost(bench, tmp_path, started, monkeypatch):
    """Its rate is the one the search finds: before it, the result seems to be of other settings."""
    commands, _ = started
    monkeypatch.setattr(Bench, "plan", replace(PLAN, runs=(("sst5", "TT1", 0), ("sst5", "TT1", 1))))
    search = PLAN.search("sst5")
    best = search.points[-1]

    def lines():
        for format, point, seed in itertools.product(search.rows, search.points, range(3)):
            yield tried_line(bench, "sst5", format, point, 0.5 if point == best else 0.4, seed)

    for line in lines():
        append(bench.file("search"), line)
    settings = bench.settle("sst5-TT1", {"seed": 0})
    append(bench.file(), {"settings": settings.as_record()})
    bench.file("search").unlink()
    found = lines()
    real = Sweep.start

    def start(sweep, cell):
        if cell.kind:
            append(bench.file("search"), next(found))
        return real(sweep, cell)

    monkeypatch.setattr(Sweep, "start", start)
    assert made(tmp_path).run() == []
    assert rows(commands) == [("sst5-TT1", "1")]


def test_a_row_that_two_blocks_name_is_run_once_and_its_further_seeds_after_the_other_rows():
    runs = Bench(find("language_model"), Path()).plan.runs
    rows = ["full", "TT40", "LR40", "TT8", "LR8", "bands8", "hashed40", "TT40_two", "rounded40"]
    seeds = [(row, seed) for seed in (1, 2) for row in ("full", "TT40")]
    assert runs == tuple(("wikitext-2", row, seed) for row, seed in [*((row, 0) for row in rows), *seeds])


def test_formats_that_share_a_row_of_the_search_share_what_it_finds(bench, tmp_path, started, monkeypatch):
    commands, _ = started
    search = replace(PLAN.search("sst5"), rows={"tensor_train": "TT1", "tensor_ring": "TT1"})
    plan = replace(PLAN, runs=(("sst5", "TR1", 0),), searches={"sst5": search})
    monkeypatch.setattr(Bench, "plan", plan)
    made(tmp_path).run()
    assert len(commands) == len(search.points) * search.seeds + 1  # the points of the row once, and the run
    best = search.points[-1]
    for point in search.points:
        try_point(bench, "sst5", "tensor_train", point, 0.5 if point == best else 0.4)
    assert bench.best("sst5", "tensor_ring") == bench.best("sst5", "tensor_train") == search.options_of(best)


@pytest.mark.parametrize(
    ("peak", "tried"), [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [1, 2, 3]), (3, [2, 3, 4]), (5, [2, 3, 4, 5])]
)
def test_a_search_that_climbs_tries_the_middle_and_then_neighbours_of_the_best(peak, tried):
    search, scores, higher = Search(("lr",), tuple((rate,) for rate in range(6)), climbs=True), {}, Metric("BLEU")
    while points := search.untried(scores, higher):
        scores |= {point: -abs(point[0] - peak) for point in points}
    assert sorted(rate for (rate,) in scores) == tried
    assert search.best(scores, higher) == (peak,)


def test_a_sweep_goes_on_with_where_a_search_climbs_to(tmp_path, started, monkeypatch):
    commands, _ = started
    bench, real = Bench(TASK, tmp_path), Sweep.start
    points = tuple((rate,) for rate in (1e-4, 1e-3, 1e-2, 1e-1))
    search = Search(("lr",), points, rows={"tensor_train": "TT1"}, climbs=True)
    monkeypatch.setattr(Bench, "plan", Plan((("sst5", "TT1", 0),), {"sst5": search}, {}))

    def start(sweep, cell):
        if cell.kind:
            rate = cell.options["lr"]
            try_point(bench, "sst5", "tensor_train", (rate,), rate)  # the higher, the better
        return real(sweep, cell)

    monkeypatch.setattr(Sweep, "start", start)
    assert made(tmp_path).run() == []
    rates = [command[command.index("--lr") + 1] for command in commands if "--kind" in command]
    assert rates == ["0.001", "0.01", "0.1"]
    assert rows(commands) == [("sst5-TT1", "0")]
    assert bench.best("sst5", "tensor_train") == {"lr": 0.1}


def test_a_search_by_loss_takes_the_lowest_whatever_the_metric_says(bench, monkeypatch):
    """And one that diverged, which tells no accuracy that means anything, is the worst."""
    points = tuple((rate,) for rate in (1e-4, 1e-3, 1e-2, 1e-1))
    search = Search(("lr",), points, rows={"tensor_train": "TT1"}, climbs=True, by_loss=True)
    monkeypatch.setattr(Bench, "plan", Plan((), {"sst5": search}, {}))

    def tried(point, loss, accuracy):
        append(bench.file("search"), tried_line(bench, "sst5", "tensor_train", point, accuracy) | {"val_loss": loss})

    tried(points[1], 1.2, 0.3)
    tried(points[2], 1.5, 0.9)
    assert bench.untried("sst5", "tensor_train") == [points[0]]
    assert bench.best("sst5", "tensor_train") is None
    tried(points[0], bench.search_metric("sst5").worst, 1.0)
    assert bench.best("sst5", "tensor_train") == {"lr": 1e-3}
    assert bench.points("sst5", "tensor_train") == {points[0]: 1e12, points[1]: 1.2, points[2]: 1.5}


def test_points_that_lack_what_a_search_compares_are_an_error_and_not_untried_for_ever(bench, monkeypatch):
    """Rows were trained with rates that nobody had compared."""
    search = Search(("lr",), ((1e-3,), (1e-2,)), rows={"tensor_train": "TT1"}, by_loss=True)
    monkeypatch.setattr(Bench, "plan", Plan((), {"sst5": search}, {}))
    append(bench.file("search"), tried_line(bench, "sst5", "tensor_train", search.points[0], 0.3))
    with pytest.raises(ExperimentError, match=r"_search.jsonl: TT1-lr0.001 has no val_loss, by which .* set by_loss"):
        bench.untried("sst5", "tensor_train")


def test_a_point_with_more_changed_than_the_grid_has_a_name_of_its_own(bench):
    point = {"lr": 0.002, "seed": 0}
    assert bench.settle("sst5-TT1", point, search=True).row == "TT1-lr0.002-stdglorot"
    assert bench.settle("sst5-TT1", {**point, "rank": 5}, search=True).row == "TT1-rank=5-lr0.002-stdglorot"


@pytest.mark.parametrize("grid", ["{ lr = [1e-3] }", '{ lr = [1e-3, 1e-2], std = ["glorot", 1.0] }'])
def test_only_a_grid_of_one_name_is_climbed(grid, tmp_path, monkeypatch):
    (tmp_path / "sweep.toml").write_text(f"[search.sst5]\ngrid = {grid}\nrows = {{}}\nclimbs = true\n")
    (tmp_path / "defaults.toml").write_text("[sst5]\n")
    monkeypatch.setattr(type(TASK), "configs", tmp_path)
    with pytest.raises(ExperimentError, match=r"climbs takes two values or more of one name, not \d points of lr"):
        plan(TASK)


def test_a_result_of_another_configuration_is_no_result(bench, tmp_path, started):
    commands, _ = started
    for dataset, row, seed in PLAN.runs:
        settings = bench.settle(f"{dataset}-{row}", {"seed": seed}, tiny=True)
        other = replace(settings, batch=9) if (row, seed) == ("TT2", 0) else settings
        append(bench.file(), {"settings": other.as_record()})
    made(tmp_path, smoke=True).run()
    assert rows(commands) == [("imdb-TT2", "0"), ("sst5-TT2", "0")]


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, started):
    commands, codes = started
    codes["sst5-TT2"] = 2
    assert made(tmp_path, smoke=True).run(seeds=1) == ["sst5-TT2-0"]
    assert len(rows(commands)) == len(commands) == 27


def test_rows_wait_for_a_whole_search(tmp_path, started):
    commands, codes = started
    codes["sst5-full"] = 2
    failed = made(tmp_path).run(seeds=1)
    assert [name.split("-")[0] for name in failed] == ["search"] * 8 * 3
    assert {row.split("-")[0] for row, _ in rows(commands)} == {"imdb"}


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_ended_passes_it_on_and_starts_nothing_more(tmp_path, started, kind):
    commands, codes = started

    def wait():
        if codes["terminated"]:
            return 130
        # To another thread: nothing wakes the main one, as when a signal comes just before it begins to wait.
        thread = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), kind))
        thread.start()
        thread.join()
        raise subprocess.TimeoutExpired("a run", 0)

    codes["imdb-TT3"] = wait
    before = signal.getsignal(kind)
    with pytest.raises(Stopped, match="the same command goes on"):
        made(tmp_path, smoke=True).run(seeds=1)
    assert rows(commands) == [("imdb-full", "0"), ("imdb-TT3", "0")]
    assert len(codes["terminated"]) == 1
    assert signal.getsignal(kind) is before


def test_a_sweep_tells_of_each_run_how_many_there_are_and_how_long_they_will_take(tmp_path, started):
    told = io.StringIO()
    sweep = Sweep(TASK, results=tmp_path, out=tmp_path / "out", console=Console(file=told, width=200), jobs=2)
    assert sweep.do([Cell("sst5-full", {"seed": seed}) for seed in range(3)]) == []
    ends = [line.split("  ")[-1] for line in told.getvalue().splitlines()]
    assert ends == ["1 of 3, 0 min left", "2 of 3, 0 min left", "3 of 3, 0 min left"]


def test_a_sweep_runs_its_rows_as_processes_and_leaves_them_out_the_next_time(sources, tmp_path, monkeypatch):
    runs = tuple(("python", "low_rank", seed) for seed in (0, 1))
    monkeypatch.setattr(Bench, "plan", Plan(runs, {}, {}))
    places = {"data": sources, "results": tmp_path, "out": tmp_path / "out"}
    sweep = Sweep(find("source_code"), **places, jobs=2, smoke=True, console=Console(quiet=True))
    assert sweep.run() == [], (tmp_path / "out/logs/source_code-python-low_rank-0.log").read_text()
    lines = sorted((line["row"], line["seed"]) for line in results(tmp_path))
    assert lines == [("low_rank-smoke", 0), ("low_rank-smoke", 1)]
    assert sweep.run() == []
    assert len(results(tmp_path)) == 2
