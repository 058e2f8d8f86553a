"""A task is a folder: found by its name, whole or refused, and all it needs to be run, swept, reported and ranked."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev

import pytest
from laboratory import ENVIRONMENT, results, run
from typer.testing import CliRunner

pytest.importorskip("accelerate")

import experiments.tasks
import tensorbed as tb
from experiments.__main__ import app
from experiments.lab import formats
from experiments.lab.errors import ExperimentError
from experiments.lab.league import Standings, largest_ratio, league_of, split
from experiments.lab.metrics import Metric
from experiments.lab.records import append, read
from experiments.lab.report.summary import summarise
from experiments.lab.report.tables import tables_report
from experiments.lab.rows import Bench, configured, plan
from experiments.lab.sweep import Cell, Sweep
from experiments.lab.task import find

OURS = Path(__file__).parent / "tasks"
FULL = "full"


@pytest.fixture
def parity(monkeypatch):
    """A task that lies elsewhere."""
    monkeypatch.setattr(experiments.tasks, "__path__", [*experiments.tasks.__path__, str(OURS)])
    monkeypatch.setitem(ENVIRONMENT, "EXPERIMENT_TASKS", str(OURS))
    return find("parity")


def invoke(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.exception
    return done.output


def test_a_new_task_is_a_folder_of_fewer_than_150_lines(parity):
    files = [path for path in parity.folder.rglob("*") if path.suffix in (".py", ".toml")]
    assert sum(len(path.read_text().splitlines()) for path in files) < 150


def test_a_new_task_is_trained_swept_and_reported_without_a_change_elsewhere(parity, tmp_path):
    places = ("--out", tmp_path / "out", "--results", tmp_path)
    told = invoke("parity", "--config", "sums-tt", *places)
    (line,) = results(tmp_path, "parity.jsonl")
    assert f"sums TT seed 0: pairs error {line['pairs_error']:.4f}, pairs confidence" in told
    figures = {f"{split}_{name}" for split in ("val", "pairs", "triples") for name in ("error", "confidence")}
    assert {*figures, "largest_weight"} <= set(line)
    code, _, said = run("sweep", "parity", *places)
    assert code == 0, said
    assert [line["row"] for line in results(tmp_path, "parity.jsonl")] == ["TT", "full"]  # that one was there
    invoke("report", "parity", "--results", tmp_path)
    text = (tmp_path / "parity.md").read_text()
    heading = next(line for line in text.splitlines() if line.startswith("| row"))
    assert "| ours | to our full | pairs confidence | triples error | triples confidence | validation |" in heading
    assert "paper" not in heading
    assert "lower error and higher confidence are better" in (tmp_path / "parity.html").read_text()


def tabled(task, row, seed, **figures):
    settings = configured(task, f"sums-{row}", {"seed": seed})
    measured = {f"{split}_{metric.name}": 0.5 for split in (*task.tests, "val") for metric in task.metrics}
    return {
        **measured, **figures, "dataset": "sums", "row": settings.row, "seed": seed, "format": settings.format,
        "ratio": 1 if row == "full" else 9, "total_parameters": 100, "overhead": 0.01, "epochs": [{"val_error": 0.5}],
        "settings": settings.as_record(),
    }  # fmt: skip


def test_every_metric_has_a_picture_against_size(parity, tmp_path):
    sure = [0.61, 0.63, 0.71]
    lines = [tabled(parity, "tt", seed, pairs_confidence=value) for seed, value in enumerate(sure)]
    summary = summarise(Bench(parity, tmp_path), [*lines, tabled(parity, "full", 0, pairs_confidence=0.9)])
    (selects, other), entry = parity.metrics, summary.entry("sums", "TT")
    point = summary.point(entry, other)
    assert (point.test, point.row, point.ratio) == (tuple(sure), "TT", 9)
    assert point.deviation == pytest.approx(stdev(sure))
    assert summary.point(entry, selects) is entry
    text, page = tables_report(summary)
    assert re.findall("<b>([^<]*) against size</b>", page) == ["Pairs error", "Pairs confidence"]
    assert "tables 9 times smaller have a pairs confidence of 0.65, the full table has 0.90." in page.lower()
    assert "pictures, one for each metric, further right is smaller, and lower error and higher confidence are" in page
    assert "| 0.65 |" in text


def test_a_line_without_one_of_the_metrics_is_named(parity, tmp_path):
    wrong = tabled(parity, "tt", 0, pairs_confidence=None)
    with pytest.raises(ExperimentError, match=r"\(sums TT seed 0\): pairs_confidence missing or wrong"):
        summarise(Bench(parity, tmp_path), [wrong])


def test_the_help_names_every_task_and_command(parity):
    told = invoke("--help")
    assert all(f" {name} " in told for name in ("parity", "sentiment", "source-code", "sweep", "league", "report"))


def test_options_and_their_help_come_from_the_settings_of_the_task(parity):
    told = invoke("parity", "--help")
    for said in ("--examples", "sums to train on", "--vocabulary", "--ratio", "sums"):
        assert said in told
    assert "--examples" not in invoke("source-code", "--help")


def test_options_of_a_cell_are_typed_as_the_command_takes_them(sentiment, tmp_path):
    cell = Cell("sst5-tt1", {"phrases": True, "train_limit": 9, "std": None, "lr": 0.5, "seed": 3}, "league")
    typed = ["--phrases", "--train-limit", "9", "--lr", "0.5", "--seed", "3"]
    assert cell.arguments() == ["--config", "sst5-tt1", "--kind", "league", *typed]
    assert cell.name == "league-sst5-tt1-True-9-glorot-0.5-3"
    done = CliRunner().invoke(
        app, ["sentiment", *cell.arguments(), "--data", "nowhere", "--out", str(tmp_path), "--results", str(tmp_path)]
    )
    assert "--data nowhere: there is no such folder" in str(done.exception)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("task.py", "there is no .*task.py"),
        ("report.toml", "there is no .*report.toml"),
        ("configs/defaults.toml", "there is no .*defaults.toml"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(tmp_path, monkeypatch, part, said):
    shutil.copytree(OURS / "parity", tmp_path / "less")
    (tmp_path / "less" / part).unlink()
    monkeypatch.setattr(experiments.tasks, "__path__", [str(tmp_path)])
    with pytest.raises(ExperimentError, match=f"the task less lacks a part: {said}"):
        find("less")


@pytest.mark.parametrize(
    ("name", "file", "before", "after", "said"),
    [
        ("less_one", "task.py", "TASK = Parity()", "", ".*task.py has no TASK"),
        ("less_two", "task.py", "def loss(", "def lost(", ".*abstract.*loss"),
        ("less_three", "task.py", "metrics = (", "measures = (", "its TASK has no metrics"),
        ("less_four", "report.toml", "lead =", "load =", "there is no lead in .*report.toml"),
    ],
)
def test_a_task_that_lacks_a_part_is_refused(tmp_path, monkeypatch, name, file, before, after, said):
    shutil.copytree(OURS / "parity", tmp_path / name)
    path = tmp_path / name / file
    path.write_text(path.read_text().replace(before, after))
    monkeypatch.setattr(experiments.tasks, "__path__", [str(tmp_path)])
    with pytest.raises(ExperimentError, match=f"the task {name} lacks a part: {said}"):
        find(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[leauge]", r'sweep.toml: unknown key "leauge": did you mean "league"'),
        ('[[runs]]\nrows = ["full"]', r"sweep.toml, \[\[runs\]\]: dataset is missing"),
        ("[search.sums]\nrows = {}", r"sweep.toml, \[search.sums\]: grid is missing"),
        ("[search.sums]\nrows = {}\ngrid = {lrr = [1.0]}", r'\[search.sums\]: unknown key "lrr": did you mean "lr"'),
        ("[league]\nbudget = 3", r'\[league\]: unknown key "budget": did you mean "budgets"'),
    ],
)
def test_a_plan_that_cannot_be_is_refused(parity, tmp_path, monkeypatch, text, said):
    (tmp_path / "sweep.toml").write_text(text)
    monkeypatch.setattr(type(parity), "configs", tmp_path)
    with pytest.raises(ExperimentError, match=said):
        plan(parity)


def test_an_unknown_task_is_refused_with_the_nearest():
    with pytest.raises(ExperimentError, match='unknown task "sorce-code": did you mean "source_code"'):
        find("sorce-code")
    for arguments in (["sentimnet"], ["sweep", "sentimnet"], ["league", "sentimnet"], ["speed", "sentimnet"]):
        done = CliRunner().invoke(app, arguments)
        assert 'did you mean "sentiment"' in str(done.exception)


def test_a_metric_has_a_direction_and_a_way_to_print():
    loss, accuracy = Metric("loss", higher=False, digits=1, unit="%"), Metric("accuracy")
    assert (loss.best([3.0, 1.0, 1.0, 2.0], float), accuracy.best([3.0, 1.0], float)) == (1.0, 3.0)
    assert loss.better(1.0, 2.0)
    assert not accuracy.better(1.0, 1.0)
    assert accuracy.better(0.0, None)
    assert (loss.told(90.0, 100.0), accuracy.told(0.42, 0.40)) == ("10.0 % below", "2.0 points above")
    assert (loss.written(12.34), accuracy.written(0.4), loss.written(loss.worst)) == ("12.3", "0.400", "diverged")
    assert Metric("bleu", unit="BLEU", digits=1).told(30.5, 30.0) == "0.5 BLEU above"


# The league


def test_the_league_has_every_format_that_can_be_trained_at_the_bytes_that_are_asked_for(source_code, tmp_path):
    league = league_of(Bench(source_code, tmp_path), None, None, None)
    assert {"low_rank", "tensor_train", "tensor_ring"} <= set(league.formats)
    assert "product_quantized" not in league.formats  # cannot be drawn
    assert "straight_through" not in league.formats  # has no ratio
    assert league.budgets == (8, 30, 100, 300)
    cells = {(cell.options.get("format", FULL), cell.options.get("ratio")) for cell in league.cells()}
    assert (FULL, None) in cells
    assert ("tensor_train", 300.0) in cells
    assert ("low_rank", 8.0) in cells


def test_the_largest_ratio_is_that_of_the_smallest_table(source_code, tmp_path):
    """Of rank 1: a row and a column for low rank."""
    settings = Bench(source_code, tmp_path).settle("python-full", {"format": "lr", "ratio": 4.0})
    found = largest_ratio(source_code, settings)
    assert found == pytest.approx(10_000 * 96 / (10_000 + 96), rel=1e-3)


def test_a_league_is_run_gone_on_with_and_reported(parity, tmp_path):
    places = ("--out", tmp_path / "out", "--results", tmp_path)
    asked = ("--formats", "lr,tt(order=2)", "--budgets", "3,8")
    code, _, said = run("league", "parity", *asked, *places)
    assert code == 0, said
    lines = results(tmp_path, "parity_league.jsonl")
    empty = [line for line in lines if "largest_ratio" in line]
    assert [line["row"] for line in empty] == ["low_rank-ratio=8.0"]
    rows = ["full", "low_rank-ratio=3.0", "tensor_train_order=2-ratio=3.0", "tensor_train_order=2-ratio=8.0"]
    lines = [line for line in lines if line not in empty]
    assert [line["row"] for line in lines] == rows
    assert all(line["ratio"] >= line["settings"]["ratio"] for line in lines[1:])
    bench = Bench(parity, tmp_path)
    league = league_of(bench, "lr,tt(order=2)", "3,8", 1)
    assert Sweep(parity, results=tmp_path, out=tmp_path / "out").missing(league.cells()) == []
    invoke("report", "parity", "--results", tmp_path)
    text = (tmp_path / "parity_league.md").read_text()
    assert f"| low\u00a0rank | {parity.metrics[0].written(lines[1]['pairs_error'])} | at\u00a0most\u00a07.111 |" in text
    page = (tmp_path / "parity_league.html").read_text()
    assert page.count("<svg") == 1
    assert "3 times smaller: " in page


def line_of(bench, seed, error, **options):
    """A line as a cell of the league leaves it."""
    settings = bench.settle("sums-full", {**options, "seed": seed})
    figures = {"pairs_error": error, "val_error": error, "ratio": options.get("ratio", 1.0)}
    append(bench.file("league"), {"settings": settings.as_record(), **figures})


def test_the_best_of_each_budget_is_named_beside_the_full_table(parity, tmp_path):
    bench = Bench(parity, tmp_path)
    line_of(bench, 0, 0.5)
    line_of(bench, 0, 0.1, format="lr", ratio=2.0)
    line_of(bench, 0, 0.3, format="tt", ratio=2.0)
    line_of(bench, 1, 0.2, format="tt", ratio=2.0)
    found = Standings(bench)
    assert found.seen() == [
        "The full table has a pairs error of 0.500 (1 seed).",
        # The other had one seed, which may be chance.
        "2 times smaller: tensor train is best of 2, 0.250 ± 0.071 (2 seeds), 25.0 points below the full table's; "
        "then low rank, 0.100 (1 seed).",
    ]
    assert found.rows()[2] == ("tensor train", "0.250 ± 0.071")
    assert len(read(bench.file("league"))) == 4


def test_the_full_table_and_the_best_of_each_budget_have_more_seeds(parity, tmp_path):
    bench = Bench(parity, tmp_path)
    league = league_of(bench, "lr,tt,tr", "2,4", 3)
    assert [cell.options for cell in league.cells()].count({"seed": 0}) == 1
    assert len(league.cells()) == 7
    line_of(bench, 0, 0.5)
    for name, errors in {"low_rank": (0.3, 0.1), "tensor_train": (0.2, 0.2), "tensor_ring": (0.1, 0.3)}.items():
        for budget, error in zip((2.0, 4.0), errors, strict=True):
            line_of(bench, 0, error, format=name, ratio=budget)
    best = [("tensor_ring", 2.0), ("tensor_train", 2.0), ("low_rank", 4.0), ("tensor_train", 4.0)]
    sized = [{}, *({"format": name, "ratio": budget} for name, budget in best)]
    wanted = [{**options, "seed": seed} for seed in (1, 2) for options in sized]
    assert [cell.options for cell in league.finals()] == wanted
    line_of(bench, 1, 0.9, format="tensor_ring", ratio=2.0)  # what they say does not change who has them
    assert [cell.options for cell in league.finals()] == wanted


def test_a_run_that_diverged_is_named_and_not_drawn(parity, tmp_path):
    bench = Bench(parity, tmp_path)
    line_of(bench, 0, 0.5)
    settings = bench.settle("sums-full", {"format": "tt", "ratio": 2.0})
    append(bench.file("league"), {"settings": settings.as_record(), "val_error": 1e12, "diverged": "the loss is nan"})
    found = Standings(bench)
    assert found.rows()[1] == ("tensor train", "diverged")
    assert set(found.points) == {("full", 1.0)}
    assert "<svg" in found.report()[1]


@pytest.fixture
def doubled(monkeypatch):
    """A format as others may write one: it holds another, and tells how it is made of a ratio."""
    known = dict(tb.structures.Format.known)

    @dataclass(frozen=True, kw_only=True)
    class HeldTwice(tb.structures.Format):
        """Twice the rank of another: half as many times smaller."""

        format: tb.structures.Format

        def bind(self, budget):
            return tb.LowRank(rank=2 * self.format.bind(budget).rank).bind(budget)

        def fit(self, table, budget):
            raise NotImplementedError

        @classmethod
        def spellings(cls):
            spelling = tb.LowRank.spellings()["lr"]
            return {"held": spelling._replace(format=lambda ratio: cls(format=tb.LowRank(ratio=2 * ratio)))}

    monkeypatch.setattr(tb.structures.Format, "known", {**known, "HeldTwice": HeldTwice})
    formats.canonical.cache_clear()
    yield
    formats.canonical.cache_clear()


def test_the_ratio_of_a_format_that_holds_another_is_the_whole_tables(doubled, source_code):
    def settings(ratio):
        return configured(source_code, "python-full", {"format": "held_twice(format=lr)", "ratio": ratio})

    one_rank = 10_000 + 96
    for ratio in (3.0, 8.0, 20.0):
        structure = tb.Embedding(10_000, 96, settings(ratio).table_format(10_000, 96), device="meta").structure
        assert structure.numel * ratio <= 10_000 * 96 < (structure.numel + 2 * one_rank) * ratio
    with pytest.raises(ExperimentError, match="ratio="):
        source_code.check_tables(settings(60.0))
    assert largest_ratio(source_code, settings(60.0), 60.0) == pytest.approx(10_000 * 96 / one_rank / 2, rel=1e-3)


def test_a_league_has_what_formats_say_can_be_made_of_a_ratio(doubled, source_code, tmp_path):
    bench = Bench(source_code, tmp_path)
    every = league_of(bench, None, "8", None).formats
    assert "held" in every
    assert "held_twice" not in every  # by itself it has no ratio
    named = league_of(bench, "held,held_twice(format=lr)", "8", None).formats
    assert named == ("held", "held_twice(format=low_rank)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budgets", "8,many"), "--budgets 8,many: numbers are needed"),
        (("--budgets", "1"), "--budgets 1: how many times smaller tables are to be, above 1"),
        (("--formats", "tt,straight_through"), 'format "straight_through" has no ratio'),
        (("--formats", "product_quantized"), "cannot be drawn at random"),
        (("--formats", "tensor_tain"), 'unknown format "tensor_tain": did you mean "tensor_train"'),
    ],
)
def test_a_league_of_what_cannot_be_is_refused(arguments, said):
    done = CliRunner().invoke(app, ["league", "source_code", *arguments])
    assert said in str(done.exception)


def test_formats_are_parted_at_commas_outside_of_brackets():
    assert split("tt(order=4, rank=2), lr,,") == ["tt(order=4, rank=2)", "lr"]
    assert formats.canonical("TT(order = 4)") == "tensor_train(order=4)"
