import re
from dataclasses import asdict
from xml.etree import ElementTree

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")

from experiments.errors import ExperimentError
from experiments.records import append, read
from experiments.report import summarise, write_markdown, write_page
from experiments.report.summary import findings
from experiments.sentiment import task
from experiments.settings import configured


def record(dataset, row, seed, test, validation=0.4):
    settings = configured(task.CONFIGS, f"{dataset}-{row}", {})
    return {
        "dataset": dataset, "row": row, "seed": seed, "format": settings.format, "ratio": 1 if row == "full" else 99.6,
        "total_parameters": 850_000, "test_accuracy": test, "val_accuracy": validation, "tokens_per_second": 20_000.0,
        "overhead": 0.01, "epochs": [{"val_accuracy": 0.3}, {"val_accuracy": validation}],
        "settings": asdict(settings),
    }  # fmt: skip


RUNS = [
    record("sst5", "TT1", 1, 0.42, 0.41),
    record("sst5", "full", 0, 0.40),
    record("sst5", "TT1", 0, 0.40, 0.41),
    record("sst5", "TT2", 0, 0.45, 0.39),
    record("imdb", "full", 0, 0.86),
    record("imdb", "TR6", 0, 0.85),
]


def test_our_column_stands_beside_the_papers_with_mean_and_deviation(tmp_path):
    write_markdown(summarise(RUNS, [], task.PAPER), tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| T")}
    assert rows["| TT1"][1:10] == (
        ["(24,25,30) x (4,8,8)", "16", "100", "0.85M", "0.415", "0.410 ± 0.014", "+1.0", "0.410", "2"]
    )
    assert rows["| TR6"][5:8] == ["0.890", "0.850", "-1.0"]
    assert text.index("| full") < text.index("| TT1") < text.index("## IMDB") < text.index("| TR6")


def test_the_best_row_is_chosen_on_validation_not_on_test():
    said = findings(summarise(RUNS, [], task.PAPER))
    assert (
        "TT1 at ratio 100, has test accuracy 0.410, 1.0 points above the full table's 0.400 (2 seeds, full 1)"
        in said[0]
    )


def test_a_run_done_twice_counts_once_and_the_later_one():
    again = record("sst5", "full", 0, 0.5)
    assert summarise([*RUNS, again], [], task.PAPER).entry("sst5", "full").test == (0.5,)


def test_padded_rows_stand_beside_the_tables_with_the_papers_number_of_their_row(tmp_path):
    padded = [record("sst5", "full-padded", 0, 0.37, 0.99), record("sst5", "TT1-padded", 0, 0.39, 0.99)]
    summary = summarise([*RUNS, *padded], [], task.PAPER)
    assert [entry.row for entry in summary.tables["sst5"]] == ["full", "TT1", "TT2"]
    assert [(entry.row, entry.paper) for entry in summary.padded["sst5"]] == (
        [("TT1-padded", 0.415), ("full-padded", 0.374)]
    )
    assert "the tensor-train row that is best on validation, TT1 at" in findings(summary)[0]
    assert any("full-padded" in said and "3.0 points below full without padding" in said for said in findings(summary))
    write_page(summary, tmp_path / "page.html")
    assert "SST-5, padded" in (tmp_path / "page.html").read_text()


def test_the_laboratorys_own_share_of_the_time_is_told():
    assert (
        "took 1.0 % of the training time (median over rows; 1.0 % in" in findings(summarise(RUNS, [], task.PAPER))[-1]
    )


def test_the_page_needs_nothing_from_elsewhere_and_its_pictures_are_whole(tmp_path):
    write_page(summarise(RUNS, [], task.PAPER), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"<script|<link|<img|src=|@import|url\((?!#)", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 4
    assert all(ElementTree.fromstring(picture) is not None for picture in pictures)
    assert "0.410 ± 0.014" in page
    assert "$" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)


def test_the_search_is_told(tmp_path):
    tried = [{**record("sst5", "TT1", 0, None), "settings": {"lr": lr, "std": std}} for lr, std in task.GRID]
    write_markdown(summarise(RUNS, tried, task.PAPER), tmp_path / "report.md")
    assert "| SST-5 | tensor_train | Glorot | 0.400 | 0.400 |" in (tmp_path / "report.md").read_text()


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


def test_no_results_say_what_to_run_and_foreign_lines_are_refused():
    with pytest.raises(ExperimentError, match="sweep sentiment --table first"):
        summarise([], [], task.PAPER)
    with pytest.raises(ExperimentError, match="result line 1 has no dataset"):
        summarise([{"row": "full"}], [], task.PAPER)
