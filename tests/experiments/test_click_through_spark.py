"""The same preparation by Spark: rows equal to DuckDB's as sets, the same maps. ``make test-spark`` runs it."""

import gzip

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


def by_both(raw, tmp_path, **options):
    """What DuckDB and Spark prepare, the same as sets of rows."""
    by_duckdb, by_spark = (
        Preparation(raw, tmp_path / engine, engine=engine, **options).run() for engine in ("duckdb", "spark")
    )
    assert by_spark.rows == by_duckdb.rows
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
    assert by_spark.maps == by_duckdb.maps
    return by_spark


def test_spark_and_duckdb_give_the_same_rows_and_maps(tmp_path):
    raw = write_days(tmp_path / "raw")
    by_spark = by_both(raw, tmp_path, skips_bad_rows=True, least=2, modulo=40)
    assert by_spark.rows == {"train": 160, "validation": 20, "test": 20}
    bad = [(tmp_path / engine / BAD_ROWS).read_text() for engine in ("duckdb", "spark")]
    assert bad[0] == bad[1]


def test_one_file_is_split_by_the_times_of_its_rows(tmp_path):
    rows, times = tiny.timed(ROWS)
    (tmp_path / "raw.txt").write_text("\n".join(rows))
    by_spark = by_both(str(tmp_path / "raw.txt"), tmp_path, time=True)
    assert by_spark.rows["train"] >= 160
    assert len(set(times)) < 30


@pytest.mark.parametrize("damage", [lambda whole: whole[:-200], lambda whole: whole[:200] + bytes(50) + whole[250:]])
def test_a_damaged_gzip_file_is_named(tmp_path, damage):
    whole = gzip.compress("\n".join(ROWS).encode())
    (tmp_path / "day_0.gz").write_bytes(whole)
    (tmp_path / "day_1.gz").write_bytes(damage(whole))
    with pytest.raises(ExperimentError, match=r"day_1.gz is damaged or cut short: .*Copy it anew"):
        Preparation(str(tmp_path / "day_*.gz"), tmp_path / "out", engine="spark").run()
    assert not (tmp_path / "out").exists()


def test_too_few_files_to_split_are_refused(tmp_path):
    (tmp_path / "raw.txt").write_text("\n".join(ROWS))
    with pytest.raises(ExperimentError, match="Spark splits by files, and 1 are too few"):
        Preparation(str(tmp_path / "raw.txt"), tmp_path / "out", engine="spark").run()
    assert not (tmp_path / "out").exists()
