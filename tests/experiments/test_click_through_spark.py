"""The same preparation by Spark: rows equal to DuckDB's as sets, the same maps. ``make test-spark`` runs it."""

import numpy as np
import pytest
import small_files as tiny

pytest.importorskip("ibis")
pytest.importorskip("pyspark")

from experiments.lab.errors import ExperimentError
from experiments.tasks.click_through.prepare import BAD_ROWS, Preparation
from experiments.tasks.click_through.prepared import SPLITS, map_files

pytestmark = pytest.mark.spark
ROWS = tiny.criteo_rows(200)


@pytest.fixture(autouse=True)
def small_session(monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")


def write_days(folder):
    """Ten files of equal size, so that tenths of files are tenths of rows; one bad row in each."""
    folder.mkdir()
    for day in range(10):
        rows = [*ROWS[20 * day : 20 * day + 20], "bad"]
        (folder / f"day_{day}.txt").write_text("\n".join(rows) + "\n")
    return str(folder / "*.txt")


def test_spark_and_duckdb_give_the_same_rows_and_maps(tmp_path):
    raw = write_days(tmp_path / "raw")
    options = {"skips_bad_rows": True, "least": 2, "modulo": 40}
    by_duckdb, by_spark = (
        Preparation(raw, tmp_path / engine, engine=engine, **options).run() for engine in ("duckdb", "spark")
    )
    assert by_spark.rows == by_duckdb.rows == {"train": 160, "validation": 20, "test": 20}
    assert by_spark.tables == by_duckdb.tables
    for split in SPLITS:
        one, other = (
            sorted(tuple(row.values()) for row in prepared.file(split).read().to_pylist())
            for prepared in (by_duckdb, by_spark)
        )
        assert one == other
    for feature in by_spark.tables:
        for one, other in zip(*(map_files(tmp_path / e, feature) for e in ("duckdb", "spark")), strict=True):
            assert np.array_equal(np.load(one), np.load(other))
    bad = [(tmp_path / engine / BAD_ROWS).read_text() for engine in ("duckdb", "spark")]
    assert bad[0] == bad[1]
    assert by_spark.maps == by_duckdb.maps


def test_too_few_files_to_split_are_refused(tmp_path):
    (tmp_path / "raw.txt").write_text("\n".join(ROWS))
    with pytest.raises(ExperimentError, match="Spark splits by files, and 1 are too few"):
        Preparation(str(tmp_path / "raw.txt"), tmp_path / "out", engine="spark").run()
    assert not (tmp_path / "out").exists()
