"""Book-Crossing: what is liked, in which split, by which numbers."""

import csv
import gzip
import hashlib
from collections import Counter

import pytest
import small_files as tiny

pytest.importorskip("accelerate")
pytest.importorskip("ibis")
pytest.importorskip("torchmetrics")

from experiments.lab.errors import ExperimentError
from experiments.lab.rows import Bench, configured, row_names
from experiments.lab.settings import How
from experiments.lab.task import find
from experiments.lab.training import train
from experiments.tasks.click_through.books import FEATURES, load

TASK = find("click_through")


@pytest.fixture
def books(tmp_path):
    tiny.book_crossing(tmp_path / "data")
    return tmp_path / "data"


def expected(folder, least):
    """By plain counting, a dictionary a table."""

    def table(name):
        with gzip.open(folder / "book-crossing" / f"{name}.csv.gz", "rt") as file:
            return list(csv.DictReader(file))

    known = {book["isbn"]: (book["author"], book["publisher"], book["year"]) for book in table("books")}
    splits = {"train": [], "validation": [], "test": []}
    for rating in table("ratings"):
        digest = hashlib.md5(f"{rating['user_id']},{rating['isbn']}".encode()).hexdigest()
        tenth = int(digest[:8], 16) / 2**32
        split = "test" if tenth < 0.1 else "validation" if tenth < 0.2 else "train"
        if rating["rating"] != "0":
            values = (rating["user_id"], rating["isbn"], *known.get(rating["isbn"], ("", "", "")))
            splits[split].append((digest, int(rating["rating"]) >= 8, values))
    counts = [Counter(values[k] for _, _, values in splits["train"]) for k in range(5)]
    ranked = [sorted((v for v in c if c[v] >= least), key=lambda v, c=c: (-c[v], v)) for c in counts]
    codes = [{value: 1 + k for k, value in enumerate(values)} for values in ranked]
    numbers = {
        split: [
            (liked, *(c.get(v, 0) for c, v in zip(codes, values, strict=True))) for _, liked, values in sorted(rows)
        ]
        for split, rows in splits.items()
    }
    unseen = {
        split: [sum(row[2][k] not in counts[k] for row in rows) / len(rows) for k in range(5)]
        for split, rows in splits.items()
    }
    return numbers, unseen


@pytest.mark.parametrize("least", [1, 12])
def test_explicit_ratings_are_numbered_and_split_by_reader_and_book(books, least):
    data = load(books, least)
    numbers, unseen = expected(books, least)
    for split, rows in numbers.items():
        batch = data.splits[split]
        assert [(bool(y), *x) for y, x in zip(batch["labels"], batch["ids"].tolist(), strict=True)] == rows
    assert {split: list(shares.values()) for split, shares in data.unseen.items()} == {
        split: pytest.approx(unseen[split]) for split in ("validation", "test")
    }
    largest = [max(row[k] for row in numbers["train"]) for k in range(1, 6)]
    assert list(data.tables) == list(FEATURES)
    assert list(data.tables.values()) == [1 + most for most in largest]


def test_a_row_is_trained_and_tells_what_is_unseen(books, tmp_path):
    options = {"hidden": 8, "batch": 32, "validations": 2, "full_up_to": 10, "dim": 4, "ratio": 2.0}
    row = configured(TASK, "book-crossing-tt50", options)
    record = train(TASK, row, How(data=books, out=tmp_path, results=tmp_path))
    assert len(record["epochs"]) == 6
    assert 0 < record["test_logloss"] < 1
    assert set(record["unseen"]) == {"validation", "test"}
    assert record["tables"]["user"] == 41


def test_every_row_of_the_sweep_is_configured(tmp_path):
    runs = Bench(TASK, tmp_path).plan.runs
    assert {f"{dataset}-{row}".lower() for dataset, row, _ in runs} == {
        name for name in row_names(TASK) if name.startswith(("book", "criteo-sample", "criteo-coded"))
    }
    for dataset, row, _ in runs:
        assert configured(TASK, f"{dataset}-{row}", {}).row == row


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: [*lines[:7], b"1,2", *lines[7:]], r"Line: 8"),
        (lambda lines: [*lines[:7], b"1,2,three", *lines[7:]], r"Line: 8"),
    ],
)
def test_bad_lines_are_named(books, change, told):
    tiny.change_lines(books / "book-crossing" / "ratings.csv.gz", change)
    with pytest.raises(ExperimentError, match=told):
        load(books, 1)


def test_missing_and_cut_files_are_named(books, tmp_path):
    path = books / "book-crossing" / "books.csv.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ExperimentError, match=r"book-crossing: .*GZIP.*Copy it anew"):
        load(books, 1)
    path.unlink()
    with pytest.raises(ExperimentError, match=r"books.csv.gz does not exist; --data takes a folder with all of book-c"):
        load(books, 1)
