"""Random rows of Criteo's shape: their law, their planted model, and what is made of them."""

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("ibis")
pytest.importorskip("torchmetrics")

from benchmarks.workloads import CRITEO
from experiments.lab.errors import ExperimentError
from experiments.lab.rows import configured
from experiments.lab.settings import How
from experiments.lab.task import find
from experiments.lab.training import train
from experiments.tasks.click_through import commands, synthetic
from experiments.tasks.click_through.criteo import FEATURES, is_good
from experiments.tasks.click_through.prepare import Preparation
from experiments.tasks.click_through.synthetic import Synthetic, hexadecimal, uniform_hash, write_raw, zipf

TASK = find("click_through")


@pytest.mark.parametrize("size", [1, 7, 10_131_227, 10**9])
def test_ids_follow_the_law_of_zipf(size):
    ids = zipf((np.arange(200_000) + 0.5) / 200_000, size)
    assert ids.min() == 0
    assert ids.max() < size
    edges = np.arange(1, min(size, 50) + 2, dtype=np.float64) ** -0.1  # the integral of x^-1.1, but for a factor
    shares = (edges[:-1] - edges[1:]) / (1 - (size + 1.0) ** -0.1)
    counts = np.bincount(ids[ids < len(shares)], minlength=len(shares)) / 200_000
    np.testing.assert_allclose(counts, shares, atol=1e-4)


def test_hashes_are_spread_evenly_and_texts_differ():
    hashes = uniform_hash(np.arange(100_000))
    assert abs(hashes.mean()) < 0.01
    assert abs((hashes**2).mean() - 1 / 3) < 0.01
    numbers = np.arange(0, 2**32, 104_729)
    texts = hexadecimal(numbers)
    assert len(set(texts)) == len(numbers)
    assert texts[3] == f"{3 * 104_729 * 2654435761 % 2**32:08x}"


def test_the_same_key_gives_the_same_rows_and_clicks_follow_the_planted_model():
    data = Synthetic.of_size()
    assert list(data.tables) == list(FEATURES)
    assert tuple(data.tables.values())[13:] == CRITEO
    labels, ids = data.rows(20_000, 1, 2)
    again = data.rows(20_000, 1, 2)
    assert np.array_equal(labels, again[0])
    assert np.array_equal(ids, again[1])
    assert not np.array_equal(ids, data.rows(20_000, 1, 3)[1])
    likely = sum(uniform_hash(ids[:, k] * 39 + k) for k in range(39)) > 0
    assert labels[likely].mean() > labels[~likely].mean() + 0.1


def test_raw_rows_are_of_the_format_and_can_be_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "BLOCK", 300)
    commands.generate(tmp_path / "raw.txt", 700, values=50, seed=4)
    lines = (tmp_path / "raw.txt").read_text().splitlines()
    assert len(lines) == 700
    assert all(map(is_good, lines))
    assert any("\t\t" in line for line in lines)
    with pytest.raises(ExperimentError, match="is there already; give another file"):
        commands.generate(tmp_path / "raw.txt", 700, values=50, seed=4)
    prepared = Preparation(str(tmp_path / "raw.txt"), tmp_path / "out", least=1).run()
    assert sum(prepared.rows.values()) == 700
    assert max(prepared.tables.values()) <= 52  # and a missing one, and one for the unseen


def test_more_values_than_there_are_texts_are_refused(tmp_path):
    most = synthetic.MOST_VALUES
    assert most * len(FEATURES) <= 2**32 < (most + 1) * len(FEATURES)
    with pytest.raises(ExperimentError, match=r"--values 110,127,367: at most 110,127,366"):
        commands.generate(tmp_path / "raw.txt", 10, values=most + 1, seed=0)
    assert list(tmp_path.iterdir()) == []
    commands.generate(tmp_path / "raw.txt", 10, values=most, seed=0)


def test_an_interrupted_file_is_not_left_behind(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic, "raw_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_raw(tmp_path / "raw.txt", 10, 0, Synthetic.of_size(5))
    assert list(tmp_path.iterdir()) == []


def test_tables_of_a_billion_rows_are_trained_without_a_file(tmp_path):
    options = {"values": 10**9, "rows": 64, "batch": 16, "hidden": 8, "rank": 2}
    record = train(TASK, configured(TASK, "synthetic-tt", options), How(out=tmp_path, results=tmp_path))
    assert record["tables"]["C26"] == 10**9
    assert record["tokens"] == 64
    assert record["stored_ratio"] > 10_000


def test_batches_follow_from_their_step():
    data, row = Synthetic.of_size(100), configured(TASK, "synthetic-tt", {"values": 100, "rows": 50, "batch": 10})
    source = data.training(row)
    whole = list(source.batches(0))
    assert len(whole) == len(source) == 5
    for start in range(5):
        for batch, other in zip(source.batches(start), whole[start:], strict=True):
            assert torch.equal(batch["ids"], other["ids"])
    assert not torch.equal(next(data.in_order(row, "test"))["ids"], whole[0]["ids"])
