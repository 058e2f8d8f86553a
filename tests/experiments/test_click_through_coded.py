"""Criteo's sample whose values are numbers already."""

import gzip
import random

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("ibis")
pytest.importorskip("torchmetrics")

from experiments.lab.errors import ExperimentError
from experiments.lab.rows import configured
from experiments.lab.settings import How
from experiments.lab.task import find
from experiments.lab.training import train
from experiments.tasks.click_through.coded import FILES, load

TASK = find("click_through")


def drawn(count, seed, most=50):
    draw = random.Random(seed)
    return [[draw.randint(0, 1), *(draw.randint(0, most) for _ in range(39))] for _ in range(count)]


def pack(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode()))


@pytest.fixture
def sample(tmp_path):
    rows = {"train": drawn(100, 1), "test": drawn(60, 2, most=70)}
    for split, name in FILES.items():
        pack(tmp_path / "criteo" / name, rows[split])
    return tmp_path, rows


def test_rows_are_those_of_the_files_and_the_last_tenth_validates(sample):
    folder, rows = sample
    data = load(folder)
    expected = {"train": rows["train"][:90], "validation": rows["train"][90:], "test": rows["test"]}
    for split, of in expected.items():
        batch = data.splits[split]
        read = zip(batch["labels"].tolist(), batch["ids"].tolist(), strict=True)
        assert [[int(label), *ids] for label, ids in read] == of
    both = [*rows["train"], *rows["test"]]
    assert list(data.tables.values()) == [1 + max(row[k] for row in both) for k in range(1, 40)]
    seen = {row[1] for row in expected["train"]}
    assert data.unseen["test"]["I1"] == pytest.approx(sum(row[1] not in seen for row in rows["test"]) / 60)


def test_the_sample_trains(sample, tmp_path):
    row = configured(
        TASK, "criteo-coded-tt1", {"full_up_to": 30, "hidden": 8, "rank": 2, "epochs": 1, "validations": 1}
    )
    record = train(TASK, row, How(data=sample[0], out=tmp_path / "out", results=tmp_path))
    assert record["tokens"] == 90
    assert record["unseen"]["test"]["I1"] >= 0


def test_lines_of_another_form_are_refused(sample):
    folder, rows = sample
    path = folder / "criteo" / FILES["test"]
    for changed, told in (
        ([row[:-1] for row in rows["test"]], "is not of 40 columns"),
        ([[2, *row[1:]] for row in rows["test"]], "a label of 0 or 1"),
        ([["x", *row[1:]] for row in rows["test"]], "could not convert"),
    ):
        pack(path, changed)
        with pytest.raises(ExperimentError, match=told):
            load(folder)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ExperimentError, match="Copy it anew"):
        load(folder)
    path.unlink()
    with pytest.raises(ExperimentError, match="does not exist; --data takes a folder with criteo/deeplight"):
        load(folder)
