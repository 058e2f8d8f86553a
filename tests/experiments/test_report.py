import errno
import math
import re
from xml.etree import ElementTree

import pytest
from laboratory import try_point
from typer.testing import CliRunner

pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")

from experiments import records
from experiments.__main__ import app
from experiments.errors import ExperimentError
from experiments.records import append, read
from experiments.report import html, markdown, summarise
from experiments.report.summary import findings
from experiments.sentiment import task
from experiments.settings import configured


def record(dataset, row, seed, test, validation=0.4):
    settings = configured(task.CONFIGS, f"{dataset}-{row}", {"seed": seed})
    return {
        "dataset": dataset, "row": row, "seed": seed, "format": settings.format, "ratio": 1 if row == "full" else 99.6,
        "total_parameters": 850_000, "test_accuracy": test, "val_accuracy": validation, "overhead": 0.01,
        "epochs": [{"val_accuracy": 0.3}, {"val_accuracy": validation}], "settings": settings.as_record(),
    }  # fmt: skip


RUNS = [
    record("sst5", "TT1", 1, 0.42, 0.41),
    record("sst5", "full", 0, 0.40),
    record("sst5", "TT1", 0, 0.40, 0.41),
    record("sst5", "TT2", 0, 0.45, 0.39),
    record("imdb", "full", 0, 0.86),
    record("imdb", "TR6", 0, 0.85),
]


def test_our_column_stands_beside_the_papers_with_mean_and_deviation():
    text = markdown(summarise(RUNS, {}, task.PAPER))
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| T")}
    assert rows["| TT1"][1:10] == (
        ["(24,25,30) x (4,8,8)", "16", "100", "0.85M", "0.415", "0.410 ± 0.014", "+1.0", "0.410", "2"]
    )
    assert rows["| TR6"][5:8] == ["0.890", "0.850", "-1.0"]
    assert text.index("| full") < text.index("| TT1") < text.index("## IMDB") < text.index("| TR6")


def test_the_best_row_is_chosen_on_validation_not_on_test():
    said = findings(summarise(RUNS, {}, task.PAPER))
    assert (
        "TT1 at ratio 100, has test accuracy 0.410, 1.0 points above the full table's 0.400 (2 seeds, full 1)"
        in said[0]
    )


def test_a_run_done_twice_counts_once_and_the_later_one():
    again = record("sst5", "full", 0, 0.5)
    assert summarise([*RUNS, again], {}, task.PAPER).entry("sst5", "full").test == (0.5,)


def test_padded_rows_stand_beside_the_tables_with_the_papers_number_of_their_row():
    padded = [record("sst5", "full-padded", 0, 0.37, 0.99), record("sst5", "TT1-padded", 0, 0.39, 0.99)]
    summary = summarise([*RUNS, *padded], {}, task.PAPER)
    assert [entry.row for entry in summary.tables["sst5"]] == ["full", "TT1", "TT2"]
    assert [(entry.row, entry.paper) for entry in summary.beside["sst5"]] == (
        [("full-padded", 0.374), ("TT1-padded", 0.415)]
    )
    assert "the tensor-train row that is best on validation, TT1 at" in findings(summary)[0]
    assert any("full-padded" in said and "3.0 points below full." in said for said in findings(summary))
    assert "SST-5, beside the table" in html(summary)


def test_long_rows_stand_beside_the_tables_after_one_another():
    long = [record("sst5", row, 0, 0.37) for row in ("TT1-long", "full-long", "full-padded")]
    summary = summarise([*RUNS, *long], {}, task.PAPER)
    assert [entry.row for entry in summary.beside["sst5"]] == ["full-long", "TT1-long", "full-padded"]
    assert any(
        "full-long, at most 16 epochs, stopped when 4 have not improved, has 0.370" in said
        for said in findings(summary)
    )


def test_the_laboratorys_own_share_of_the_time_is_told():
    assert (
        "took 1.0 % of the training time (median over rows; 1.0 % in" in findings(summarise(RUNS, {}, task.PAPER))[-1]
    )


def test_only_runs_of_the_rows_as_they_are_configured_stand_in_the_tables(tmp_path):
    lines = [
        record("sst5", "TT1", 0, 0.42),
        record("sst5", "TT1", 1, 0.43),
        {**record("sst5", "TT2", 0, 0.99), "settings": {**record("sst5", "TT2", 0, 0.99)["settings"], "batch": 5}},
        {**record("sst5", "TT1", 0, 0.99), "settings": {**record("sst5", "TT1", 0, 0.99)["settings"], "row": "mine"}},
        {"row": "TT1"},
    ]
    assert task.in_tables(lines, tmp_path) == lines[:2]
    faster = record("sst5", "TT1", 2, 0.44)
    faster["settings"]["lr"] = 0.5  # found by a later search: the seeds before it do not belong to it
    assert task.in_tables([*lines, faster], tmp_path) == [faster]


def test_of_runs_with_several_rates_those_of_the_rate_that_was_found_stand_in_the_tables(tmp_path):
    found, left = task.GRIDS["sst5"][1], task.GRIDS["sst5"][2]
    for point in task.GRIDS["sst5"]:
        try_point(tmp_path, "sst5", "tensor_train", point, 0.5 if point == found else 0.4)

    def line(row, point, seed):
        made = record("sst5", row, seed, 0.4)
        made["settings"] |= {"lr": point[0], "std": point[1]}
        return made

    of_found = [line("TT1", found, seed) for seed in range(2)]
    later = line("TT1", left, 0)  # of a search that found something else, or by hand
    alone = line("TT2", left, 0)
    assert task.in_tables([*of_found, later, alone], tmp_path) == [*of_found, alone]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("test_accuracy", None),
        ("test_accuracy", "0.5"),
        ("overhead", math.nan),
        ("epochs", 3),
        ("epochs", [{}]),
        ("seed", 7),
    ],
)
def test_a_line_with_wrong_figures_is_named(name, value):
    wrong = {**record("sst5", "TT1", 0, 0.42), name: value}
    with pytest.raises(ExperimentError, match=rf"run 1 of the tables \(sst5 TT1 seed 0\): {name} missing or wrong"):
        summarise([wrong], {}, task.PAPER)


def test_a_run_outside_a_repository_is_reported():
    assert "commit unknown" in html(
        summarise([{**line, "commit": None, "commits": [None]} for line in RUNS], {}, task.PAPER)
    )


def test_the_page_needs_nothing_from_elsewhere_and_its_pictures_are_whole():
    page = html(summarise(RUNS, {}, task.PAPER))
    assert not re.search(r"<script|<link|<img|src=|@import|url\((?!#)", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 4
    assert all(ElementTree.fromstring(picture) is not None for picture in pictures)
    assert "0.410 ± 0.014" in page
    assert "$" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)


def test_the_search_is_told(tmp_path):
    for number, point in enumerate(task.GRIDS["sst5"]):
        try_point(tmp_path, "sst5", "tensor_train", point, *(0.4 + number / 100 + seed / 1000 for seed in range(3)))
    append(tmp_path / task.SEARCH_FILE, {"format": "tensor_ring"})  # what is no point is passed over
    told = markdown(summarise(RUNS, task.grids(tmp_path), task.PAPER))
    assert "| SST-5 | tensor train | Glorot | 0.401 | 0.411 | 0.421 | 0.431 |" in told
    assert "| SST-5 | tensor train | 1 | 0.441 | 0.451 | 0.461 | 0.471 |" in told
    assert "tensor ring" not in told


def test_a_line_is_added_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"a": 1}')  # without its end
    append(path, {"a": 2})
    assert read(path) == [{"a": 1}, {"a": 2}]

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(ExperimentError, match=r'runs.jsonl could not be written: .*No space left.*\{"a": 3\}'):
        append(path, {"a": 3})
    assert read(path) == [{"a": 1}, {"a": 2}]


def test_lines_are_added_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    assert read(path) == []
    append(path, {"a": 1})
    append(path, {"a": 2})
    assert read(path) == [{"a": 1}, {"a": 2}]
    with path.open("a") as file:
        file.write('{"a": ')
    with pytest.raises(ExperimentError, match=r"runs.jsonl, line 3: not a JSON object"):
        read(path)


def test_no_results_say_what_to_run():
    with pytest.raises(ExperimentError, match="sweep sentiment --table makes them"):
        summarise([], {}, task.PAPER)


def test_the_command_writes_both_reports_or_says_what_the_lines_are(tmp_path):
    runner = CliRunner()
    told = runner.invoke(app, ["report", "--results", str(tmp_path)])
    assert isinstance(told.exception, ExperimentError)
    append(tmp_path / task.RESULTS_FILE, {"row": "mine"})
    told = runner.invoke(app, ["report", "--results", str(tmp_path)])
    assert "sentiment.jsonl has no runs to report; 1 lines are no runs of the tables" in str(told.exception)
    for line in RUNS:
        append(tmp_path / task.RESULTS_FILE, line)
    told = runner.invoke(app, ["report", "--results", str(tmp_path)])
    assert told.exit_code == 0
    assert "from 6 runs; 1 lines are no runs" in told.output.replace("\n", " ")
    assert {"sentiment.md", "sentiment.html"} <= {path.name for path in tmp_path.iterdir()}


def test_results_are_read_whoever_wrote_them(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes('\ufeff{"a": "\u2028"}\r\n\r\n{"a": 2}\n'.encode())
    assert read(path) == [{"a": "\u2028"}, {"a": 2}]
    path.write_bytes(b'{"a": 1}{"a": 2}\n')
    with pytest.raises(ExperimentError, match=r"runs.jsonl, line 1: .*Two lines in one: part them"):
        read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ExperimentError, match=r"runs.jsonl is not UTF-8"):
        read(path)
    with pytest.raises(ExperimentError, match=r"cannot be read: Is a directory"):
        read(tmp_path)
