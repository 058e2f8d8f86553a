import errno
import math
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from laboratory import tried_line, try_point
from typer.testing import CliRunner

pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from experiments.__main__ import app
from experiments.lab import records
from experiments.lab.errors import ExperimentError
from experiments.lab.records import append, read
from experiments.lab.report.plots import draw_curve, looks, ticks
from experiments.lab.report.summary import summarise as summarised
from experiments.lab.report.tables import curves, findings, findings_beside, how_to_read, pace, row_names, tables_report
from experiments.lab.rows import Bench, configured
from experiments.lab.task import find
from pages import unbroken

TASK = find("sentiment")


def summarise(lines, results=Path("nowhere")):
    return summarised(Bench(TASK, results), lines)


def markdown(summary):
    return tables_report(summary)[0]


def html(summary):
    return tables_report(summary)[1]


def record(dataset, row, seed, test, validation=0.4):
    settings = configured(TASK, f"{dataset}-{row}", {"seed": seed})
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
    text = markdown(summarise(RUNS))
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| T")}
    assert rows["| TT1"][1:9] == ["100", unbroken("0.410 ± 0.014"), "+1.0", "0.415", "0.410", "2", "0.85M", "16"]
    assert rows["| TT1"][-1] == unbroken("(24,25,30) x (4,8,8)") + " |"
    assert rows["| TR6"][1:5] == ["100", "0.850", "-1.0", "0.890"]
    assert text.index("| full") < text.index("| TT1") < text.index("## IMDB") < text.index("| TR6")


def test_what_is_seen_is_said_before_the_tables():
    summary = summarise(RUNS)
    said = findings(summary)
    assert said[0] == (
        "SST-5: tables 100 times smaller have a test accuracy of 0.410 to 0.450, the full table has 0.400. From seed "
        "to seed the accuracy of a row deviates by 1.4 points."
    )
    assert said[2] == (
        "IMDB: tables 100 times smaller have a test accuracy of 0.850, the full table has 0.860. Every row was trained "
        "once."
    )
    for text, table in ((markdown(summary), "| TT1 |"), (unescape(html(summary)), "<tbody>")):
        assert all(0 < text.index(sentence) < text.index(table) for sentence in said)


def test_the_best_row_is_chosen_on_validation_not_on_test():
    assert findings(summarise(RUNS))[1] == (
        "SST-5: of the tensor trains TT1, 100 times smaller, is best on validation; its test accuracy is 0.410, "
        "1.0 points above the full table's (2 seeds, full 1)."
    )


def test_rows_of_about_one_size_are_put_in_order(monkeypatch):
    monkeypatch.setitem(TASK.texts, "sizes", [10, 90])
    larger = {**record("sst5", "LR3", 0, 0.48), "ratio": 50.0}
    orders = [
        sentence
        for sentence in findings(summarise([*RUNS, record("sst5", "TR1", 0, 0.43), larger]))
        if "about" in sentence
    ]
    assert orders == [
        "SST-5: about 90 times smaller, TT2 has the best test accuracy, 0.450 (1 seed), before TR1 (2.0 points below "
        "it, 1 seed) and TT1 (4.0 points below it, 2 seeds)."
    ]


def test_published_figures_of_other_data_stand_beside_ours_by_format_and_size(monkeypatch):
    monkeypatch.setitem(TASK.texts, "sizes", [100])
    rows = {"imdb": {"tensor_train": {"93": "TT1"}}}
    monkeypatch.setitem(TASK.texts, "published", {"about": "Of reviews.", "rows": rows})
    text = markdown(summarise([run for run in RUNS if run["dataset"] == "sst5" and run["row"] != "TT2"]))
    lines = text[text.index("## Beside published figures") : text.index("## How")].replace("\xa0", " ").splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")] == [
        ["format", "times smaller, about", "SST-5, ours", "IMDB"],
        ["---", "---:", "---:", "---:"],
        ["full", "1", "0.400", "0.886"],
        ["tensor train", "93", "", "-1.5"],
        ["tensor train", "100", "+1.0", ""],
    ]
    assert "* Of reviews." in lines


def test_the_names_of_rows_are_explained_where_they_are_first_seen():
    summary = summarise([*RUNS, record("sst5", "LR3", 0, 0.4)])
    names = dict(row_names(summary))
    assert list(names) == ["full", "LR3", "TT1, TT2", "TR6"]
    assert names["TT1, TT2"] == "tensor trains, the table as a chain of small cores: 3 and 4 of them, rank 16."
    assert names["TR6"] == "tensor rings, chains whose ends are joined: 6 cores, rank 8."
    assert names["LR3"].startswith("low rank, the table as the product of two thin matrices: rank 3.")
    text, page = markdown(summary), html(summary)
    assert all(0 < text.index(f"* **{name}**: {what}") < text.index("| TT1 |") for name, what in names.items())
    assert all(
        0 < page.index(f"<dt>{name}</dt><dd>{what}</dd>") < page.index("<tbody>") for name, what in names.items()
    )
    assert "TT1<small>tensor train</small></th>" in page


def with_curve(row, seed, *accuracies):
    made = record("sst5", row, seed, 0.4)
    return {**made, "epochs": [{"val_accuracy": accuracy} for accuracy in accuracies]}


def test_a_seed_that_stopped_keeps_its_last_value_in_the_curve():
    runs = [with_curve("TT1", 0, 0.2, 0.3), with_curve("TT1", 1, 0.3, 0.4, 0.5, 0.6)]
    entry = summarise(runs).entry("sst5", "TT1")
    assert entry.mean_curve == pytest.approx([0.25, 0.35, 0.4, 0.45])  # not 0.6 at the end, where one seed is left
    assert entry.early_stops == (2,)
    assert entry.best_stages(TASK.metrics[0]) == [2, 4]


def test_the_picture_of_curves_marks_where_seeds_stopped():
    runs = [with_curve("TT1", 0, 0.2, 0.3), with_curve("TT1", 1, 0.3, 0.4, 0.5, 0.6), with_curve("full", 0, 0.3, 0.2)]
    summary = summarise(runs)
    entries = summary.tables["sst5"]
    figure = Figure()
    axes = figure.add_subplot()
    for series in curves(entries, looks(summary.formats)):
        draw_curve(axes, series)
    full, full_stops, train, train_stops = axes.lines
    assert list(full.get_xdata()) == [1, 2]
    assert len(full_stops.get_xdata()) == 0
    assert list(train.get_ydata()) == pytest.approx([0.25, 0.35, 0.4, 0.45])
    assert (list(train_stops.get_xdata()), list(train_stops.get_ydata())) == ([2], pytest.approx([0.35]))
    assert train_stops.get_marker() == "o"
    assert "A dot is where a seed stopped before the others; its last value stays in the mean." in how_to_read(
        summary, entries
    )
    assert (
        pace(summary, "tensor_train", entries)
        == "the tensor trains are at their best after 3 epochs, the full table after 1 epoch."
    )


@pytest.mark.parametrize(
    ("sizes", "places"), [((60, 1_500), [100, 300, 1000]), ((15, 60), [20, 30, 50]), ((18, 47), [20, 25, 30, 40])]
)
def test_the_scale_of_sizes_has_three_numbers_at_least_however_few_sizes_there_are(sizes, places):
    assert ticks(*sizes) == places


def test_pictures_of_rows_that_were_trained_once_say_nothing_of_seeds():
    summary = summarise(RUNS)
    assert "seed" not in how_to_read(summary, summary.tables["imdb"])


def test_a_run_done_twice_counts_once_and_the_later_one():
    again = record("sst5", "full", 0, 0.5)
    assert summarise([*RUNS, again]).entry("sst5", "full").test == (0.5,)


def test_padded_rows_stand_beside_the_tables_with_the_papers_number_of_their_row():
    padded = [record("sst5", "full-padded", 0, 0.37, 0.99), record("sst5", "TT1-padded", 0, 0.39, 0.99)]
    summary = summarise([*RUNS, *padded])
    assert [entry.row for entry in summary.tables["sst5"]] == ["full", "TT1", "TT2"]
    assert [(entry.row, entry.paper) for entry in summary.beside["sst5"]] == (
        [("full-padded", 0.374), ("TT1-padded", 0.415)]
    )
    assert "of the tensor trains TT1, 100 times smaller, is best on validation" in findings(summary)[1]
    assert "full-padded" in findings_beside(summary, "sst5")[0]
    assert "3.0 points below full." in findings_beside(summary, "sst5")[0]
    assert "SST-5, beside the table" in html(summary)


def test_long_rows_stand_beside_the_tables_after_one_another():
    long = [record("sst5", row, 0, 0.37) for row in ("TT1-long", "full-long", "full-padded")]
    summary = summarise([*RUNS, *long])
    assert [entry.row for entry in summary.beside["sst5"]] == ["full-long", "TT1-long", "full-padded"]
    said = findings_beside(summary, "sst5")
    assert "full-long, at most 16 epochs, stopped when 4 have not improved, has 0.370" in said[0]
    for text in (markdown(summary), html(summary)):
        assert text.index("beside the table") < text.index(said[0]) < text.index(said[-1])


def test_bytes_of_the_tables_are_told_where_a_task_records_them():
    line = record("sst5", "TT1", 0, 0.41)
    assert "kB" not in markdown(summarise([line]))
    told = markdown(summarise([{**line, "table_bytes": 123_456}]))
    heading, cells = (next(row for row in told.splitlines() if row.startswith(of)) for of in ("| row", "| TT1"))
    place = heading.split("|").index(" tables, kB ")
    assert cells.split("|")[place] == " 123 "


def test_the_laboratorys_own_share_of_the_time_is_told():
    assert "took 1.0 % of the training time (median over rows; 1.0 % in" in markdown(summarise(RUNS))


def test_only_runs_of_the_rows_as_they_are_configured_stand_in_the_tables(bench):
    lines = [
        record("sst5", "TT1", 0, 0.42),
        record("sst5", "TT1", 1, 0.43),
        {**record("sst5", "TT2", 0, 0.99), "settings": {**record("sst5", "TT2", 0, 0.99)["settings"], "batch": 5}},
        {**record("sst5", "TT1", 0, 0.99), "settings": {**record("sst5", "TT1", 0, 0.99)["settings"], "row": "mine"}},
        {"row": "TT1"},
    ]
    assert bench.in_tables(lines) == lines[:2]
    faster = record("sst5", "TT1", 2, 0.44)
    faster["settings"]["lr"] = 0.5  # found by a later search: the seeds before it do not belong to it
    assert bench.in_tables([*lines, faster]) == [faster]


def test_of_runs_with_several_rates_those_of_the_rate_that_was_found_stand_in_the_tables(bench):
    points = bench.plan.search("sst5").points
    found, left = points[1], points[2]
    for point in points:
        try_point(bench, "sst5", "tensor_train", point, 0.5 if point == found else 0.4)

    def line(row, point, seed):
        made = record("sst5", row, seed, 0.4)
        made["settings"] |= {"lr": point[0], "std": point[1]}
        return made

    of_found = [line("TT1", found, seed) for seed in range(2)]
    later = line("TT1", left, 0)  # of a search that found something else, or by hand
    alone = line("TT2", left, 0)
    assert bench.in_tables([*of_found, later, alone]) == [*of_found, alone]


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
        summarise([wrong])


def test_a_run_outside_a_repository_is_reported():
    assert "commit unknown" in html(summarise([{**line, "commit": None, "commits": [None]} for line in RUNS]))


def test_the_page_needs_nothing_from_elsewhere_and_its_pictures_are_whole():
    page = html(summarise(RUNS))
    assert not re.search(r"<script|<link|<img|src=|@import|url\((?!#)", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 4  # of each dataset its sizes, and the curves of its only compressed format
    assert all(ElementTree.fromstring(picture) is not None for picture in pictures)
    assert "0.410 ± 0.014" in page
    assert "$" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)


def test_of_a_sample_that_is_too_small_nothing_is_concluded(monkeypatch):
    monkeypatch.setitem(TASK.texts, "samples", {"imdb": ["These rows say nothing."]})
    slow = [{**line, "overhead": 0.5} if line["dataset"] == "imdb" else line for line in RUNS]
    summary = summarise(slow)
    text, page = tables_report(summary)
    assert not any("IMDB" in sentence for sentence in findings(summary))
    assert text.index("## IMDB") < text.index("* These rows say nothing.") < text.index("| TR6 |")
    assert len(re.findall("<svg", page)) == 2  # of the other set
    assert "1.0 % in the worst" in text
    alone = markdown(summarise([line for line in slow if line["dataset"] == "imdb"]))
    assert "50.0 % in the worst" in alone


def test_the_text_in_pictures_is_legible_on_a_phone():
    shown = 390 - 2 * 16 - 2 * 9  # pixels across, less what the page and its figures keep at the sides
    for picture in re.findall(r"<svg.*?</svg>", html(summarise(RUNS)), re.DOTALL):
        width = float(re.search(r'viewBox="0 0 ([\d.]+) ', picture).group(1))
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", picture)]
        assert min(sizes) * shown / width > 9


def test_the_search_is_told(bench, tmp_path):
    for number, point in enumerate(bench.plan.search("sst5").points):
        try_point(bench, "sst5", "tensor_train", point, *(0.4 + number / 100 + seed / 1000 for seed in range(3)))
    append(bench.file("search"), {"format": "tensor_ring"})  # what is no point is passed over
    told = markdown(summarise(RUNS, tmp_path))
    assert f"| SST-5 | {unbroken('tensor train')} | Glorot | 0.401 | 0.411 | 0.421 | 0.431 |" in told
    assert f"| SST-5 | {unbroken('tensor train')} | 1 | 0.441 | 0.451 | 0.461 | 0.471 |" in told
    assert f"| {unbroken('tensor ring')} |" not in told
    assert "SST-5: best is lr 0.01 with std 1 for tensor train." in told


def test_a_search_that_has_not_ended_names_no_best(bench, tmp_path):
    points = bench.plan.search("sst5").points
    for format, tried in (("tensor_train", points), ("low_rank", points[1:])):
        for point in tried:
            try_point(bench, "sst5", format, point, 0.4, 0.4, 0.4)
    told = markdown(summarise(RUNS, tmp_path))
    assert "SST-5: best is lr 0.0007 with std Glorot for tensor train; the search has not ended for low rank." in told


def test_a_search_by_loss_is_told_by_its_losses(bench, tmp_path, monkeypatch):
    search = replace(bench.plan.search("sst5"), seeds=1, by_loss=True)
    monkeypatch.setattr(Bench, "plan", replace(bench.plan, searches={"sst5": search}))
    for number, point in enumerate(search.points):
        line = tried_line(bench, "sst5", "tensor_train", point, 0.4 + number / 100)
        append(bench.file("search"), line | {"val_loss": 1.5 + number / 10})
    told = markdown(summarise(RUNS, tmp_path))
    assert f"| SST-5 | {unbroken('tensor train')} | Glorot | 1.50 | 1.60 | 1.70 | 1.80 |" in told
    assert "SST-5: best by loss is lr 0.0007 with std Glorot for tensor train." in told


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


def test_the_command_writes_both_reports_or_says_what_the_lines_are(bench, tmp_path):
    runner = CliRunner()
    told = runner.invoke(app, ["report", "--results", str(tmp_path)])
    assert isinstance(told.exception, ExperimentError)
    append(bench.file(), {"row": "mine"})
    told = runner.invoke(app, ["report", "--results", str(tmp_path)])
    assert "sentiment.jsonl has no runs to report; 1 lines are no runs of the tables" in str(told.exception)
    assert "experiments sweep sentiment makes them" in str(told.exception)
    for line in RUNS:
        append(bench.file(), line)
    told = runner.invoke(app, ["report", "--results", str(tmp_path)])
    assert told.exit_code == 0
    assert "from 6 runs; 1 lines are no runs" in told.output.replace("\n", " ")
    assert {"sentiment.md", "sentiment.html"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("task", ["sentiment", "click_through"])
def test_the_committed_report_is_what_the_committed_lines_say(tmp_path, task):
    for name in (f"{task}.jsonl", f"{task}_search.jsonl"):
        shutil.copy(records.RESULTS / name, tmp_path)
    assert CliRunner().invoke(app, ["report", "--results", str(tmp_path)]).exit_code == 0
    for name in (f"{task}.md", f"{task}.html"):
        assert (tmp_path / name).read_bytes() == (records.RESULTS / name).read_bytes()


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
