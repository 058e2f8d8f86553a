"""Raw rows of clicks become numbers: by frequency, split in order of time, whole or not at all."""

import gzip
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import small_files as tiny

pytest.importorskip("ibis")
pytest.importorskip("pyarrow.parquet")

from experiments.lab.errors import ExperimentError
from experiments.tasks.click_through.criteo import BINS, FEATURES, is_good, number_in_bins, values
from experiments.tasks.click_through.engines import DuckDB, numbered_name
from experiments.tasks.click_through.prepare import BAD_ROWS, Preparation
from experiments.tasks.click_through.prepared import Prepared, map_files

ROWS = tiny.criteo_rows()


def write(path, rows, end="\n"):
    content = "".join(row + end for row in rows).encode("latin-1")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def prepare(raw, out, **options):
    return Preparation(str(raw), out, **options).run()


def contents(prepared, split):
    """Rows as they lie in the file, label first."""
    return [tuple(row.values()) for row in prepared.file(split).read().to_pylist()]


def expected(rows, least=2, modulo=None, shares=(0.1, 0.1), bins="squared-log", sizes=None):
    """By plain counting, row after row; ``sizes`` are those of validation and test."""
    parted = [row.split("\t") for row in rows]
    valued = [(int(label), values(fields, bins)) for label, *fields in parted]
    sizes = sizes or [round(share * len(rows)) for share in shares]
    train = len(rows) - sum(sizes)
    codes = []
    for place in range(len(FEATURES)):
        counts = Counter(fields[place] for _, fields in valued[:train])
        ranked = sorted((v for v, seen in counts.items() if seen >= least), key=lambda v: (-counts[v], v))
        codes.append({value: 1 + (k % modulo if modulo else k) for k, value in enumerate(ranked)})
    coded = [(label, *(of.get(v, 0) for of, v in zip(codes, fields, strict=True))) for label, fields in valued]
    return coded[:train], coded[train : train + sizes[0]], coded[train + sizes[0] :]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("criteo")
    return prepare(write(folder / "raw.txt", ROWS), folder / "out")


def test_rows_are_numbered_by_frequency_in_training_and_split_in_order(prepared):
    for split, rows in zip(("train", "validation", "test"), expected(ROWS), strict=True):
        assert contents(prepared, split) == rows
    assert any(0 in row[1:] for row in contents(prepared, "test"))
    assert prepared.rows == {"train": 480, "validation": 60, "test": 60}


def test_tables_have_a_row_for_every_number(prepared):
    columns = np.array([row for split in ("train", "validation", "test") for row in contents(prepared, split)])[:, 1:]
    assert (columns.max(0) < list(prepared.tables.values())).all()
    assert (columns[:480].max(0) + 1 == list(prepared.tables.values())).all()


def test_maps_are_sorted_arrays(prepared):
    for feature in ("I5", "C1", "C26"):
        known, codes = (np.load(path, mmap_mode="r") for path in map_files(prepared.folder, feature))
        assert (known[:-1] < known[1:]).all()
        assert sorted(codes) == list(range(1, prepared.tables[feature]))


def test_options_and_many_files_packed_and_not(tmp_path):
    write(tmp_path / "day_0.txt", ROWS[:250], end="\r\n")
    write(tmp_path / "day_1.txt.gz", ROWS[250:])
    options = {"least": 1, "modulo": 7, "shares": (0.2, 0.05), "bins": "none"}
    prepared = prepare(tmp_path / "day_*", tmp_path / "out", **options)
    for split, rows in zip(("train", "validation", "test"), expected(ROWS, **options), strict=True):
        assert contents(prepared, split) == rows
    assert max(prepared.tables.values()) == 8


def test_files_are_taken_in_the_order_of_the_numbers_in_their_names(tmp_path):
    for day in range(12):
        write(tmp_path / f"day_{day}.txt", ROWS[50 * day : 50 * day + 50])
    prepared = prepare(tmp_path / "day_*", tmp_path / "out")
    for split, rows in zip(("train", "validation", "test"), expected(ROWS), strict=True):
        assert contents(prepared, split) == rows
    names = ["b1/day_2", "a10/day_1", "a9/day_10", "a9/day_9.gz", "a9/day_09", "a9/day"]
    ordered = ["a9/day", "a9/day_09", "a9/day_9.gz", "a9/day_10", "a10/day_1", "b1/day_2"]
    assert sorted(names, key=numbered_name) == ordered


def test_rows_are_split_by_the_time_they_end_with_and_those_of_one_time_stay_together(tmp_path):
    rows, times = tiny.timed(ROWS)
    prepared = prepare(write(tmp_path / "raw.txt", rows), tmp_path / "out", time=True)
    order = sorted(range(len(rows)), key=lambda line: (times[line], line))

    def end(size):
        """After the last row of the time that the row before has."""
        return size + sum(times[line] == times[order[size - 1]] for line in order[size:])

    train, seen = end(480), end(540)
    assert 480 < train < 540 < seen < 600  # times are shared across both bounds
    parts = expected([ROWS[line] for line in order], sizes=[seen - train, 600 - seen])
    for split, part in zip(("train", "validation", "test"), parts, strict=True):
        assert contents(prepared, split) == part
    assert prepared.options["time"] is True


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ([5] * 20, "1 different times are too few.*none are left for validation and test"),
        ([1] * 18 + [2] * 2, "2 different times are too few.*none are left for validation; give rows of more times"),
        ([1] * 17 + [2] * 3, "none are left for test"),
    ],
)
def test_too_few_times_to_split_by_are_refused(tmp_path, times, told):
    raw = write(tmp_path / "raw.txt", [f"{row}\t{time}" for row, time in zip(ROWS, times, strict=False)])
    with pytest.raises(ExperimentError, match=told):
        prepare(raw, tmp_path / "out", time=True)
    assert not (tmp_path / "out").exists()


def test_times_that_are_missing_or_no_whole_numbers_are_refused(tmp_path):
    for end, told in (
        ("", "40 fields; 41 are needed, tabs between: a label, 13 numbers, 26 categories, a time"),
        ("\t", "the time is ''; a whole number of at most 18 digits, such as seconds, is needed"),
        ("\t2014-01-01", "the time is '2014-01-01'"),
        ("\t1234567890123456789", "the time is '1234567890123456789'"),
    ):
        raw = write(tmp_path / "raw.txt", [f"{ROWS[0]}\t-123456789012345678", ROWS[1] + end])
        with pytest.raises(ExperimentError, match=f"raw.txt, line 2: {told}"):
            prepare(raw, tmp_path / "out", time=True)
    raw = write(tmp_path / "raw.txt", [f"{row}\t1" for row in ROWS])
    with pytest.raises(ExperimentError, match="line 1: 41 fields; 40 are needed"):
        prepare(raw, tmp_path / "out")


@pytest.mark.parametrize("engine", ["duckdb", "spark"])
@pytest.mark.parametrize("address", ["s3://bucket/day_*", "hdfs://host:9000/raw.txt", "file:///raw.txt"])
def test_addresses_of_storage_are_refused(tmp_path, monkeypatch, engine, address):
    monkeypatch.chdir(tmp_path)
    raw = write(tmp_path / "raw.txt", ROWS)
    for given, out in ((address, Path("out")), (str(raw), Path(address))):
        with pytest.raises(
            ExperimentError, match=r":/.* is an address, not a path.*Mount the storage and give its path"
        ):
            Preparation(given, out, engine=engine).run()
    assert [path.name for path in tmp_path.iterdir()] == ["raw.txt"]


def test_bins_are_floors_of_squared_logarithms_and_small_numbers_stay_apart():
    for number in (*range(-5, 3000), 10**6, 10**10 - 1):
        binned = int(number_in_bins(str(number), BINS[0]))
        assert binned == (number if number <= 2 else 2 + math.floor(math.log(number) ** 2))
        assert (binned > 2) == (number > 2)
        assert number_in_bins(str(number), "none") == str(number)


def changed(row, place, field):
    fields = row.split("\t")
    return "\t".join([*fields[:place], field, *fields[place + 1 :]])


BAD = {
    ROWS[5] + "\t": "41 fields; 40 are needed, tabs between",
    ROWS[5].rsplit("\t", 1)[0]: "39 fields; 40 are needed",
    "": "1 fields; 40 are needed",
    ROWS[5].replace("\t", ","): "1 fields; 40 are needed.*It has 39 of ',': put tabs",
    changed(ROWS[5], 0, "2"): "the label is '2'; it must be 0 or 1",
    changed(ROWS[5], 3, "1.5"): r"I3 is '1.5'; a whole number of at most 10 digits, or nothing",
    changed(ROWS[5], 18, "zz\xff\x1b[2J"): r"C5 is 'zz\\xff\\x1b\[2J'; 1 to 8 hexadecimal digits",
    changed(ROWS[5], 39, "123456789"): "C26 is '123456789'",
}


def test_a_bad_row_is_refused_with_file_and_line_and_a_reason(tmp_path):
    assert all(map(is_good, ROWS))
    for number, (row, told) in enumerate(BAD.items()):
        before = ROWS[: number % 2]
        raw = write(tmp_path / "rows.txt", [*before, row, *ROWS[:30]])
        with pytest.raises(ExperimentError, match=rf"rows.txt, line {len(before) + 1}: {told}.*--on-bad-row skip"):
            prepare(raw, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.txt"]


def test_bad_rows_are_skipped_counted_and_named(tmp_path, capfd):
    bad = [*BAD, *BAD]
    write(tmp_path / "a.txt", ROWS[:300])
    write(tmp_path / "b.txt.gz", [bad[0], *ROWS[300:400], *bad[1:], *ROWS[400:]])
    prepared = prepare(tmp_path / "*.txt*", tmp_path / "out", skips_bad_rows=True)
    for split, rows in zip(("train", "validation", "test"), expected(ROWS), strict=True):
        assert contents(prepared, split) == rows
    lines = [1, *range(102, 102 + len(bad) - 1)]
    listed = (tmp_path / "out" / BAD_ROWS).read_text().splitlines()
    assert [line.split(": ")[0] for line in listed] == [f"{tmp_path / 'b.txt.gz'}, line {number}" for number in lines]
    told = capfd.readouterr().err
    assert f"{len(bad)} bad rows were skipped" in told
    assert "\x1b[2J" not in told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "rows.txt.* is empty"),
        (gzip.compress(b""), "rows.txt.gz is empty"),
        (gzip.compress("\n".join(ROWS).encode())[:-900], "cut short|Unexpected end of GZIP"),
        (b"a,b\nc,d\n", "no row is good.*line 1: 1 fields"),
    ],
    ids=["empty", "empty gzip", "cut gzip", "commas"],  # gzip writes the time, which would be in a name
)
def test_files_without_rows_are_refused(tmp_path, content, told):
    path = tmp_path / ("rows.txt.gz" if content[:1] == b"\x1f" else "rows.txt")
    path.write_bytes(content)
    with pytest.raises(ExperimentError, match=told):
        prepare(path, tmp_path / "out", skips_bad_rows=True)
    assert not (tmp_path / "out").exists()


def test_folders_that_are_there_and_files_that_are_not_are_refused(prepared, tmp_path):
    with pytest.raises(ExperimentError, match="is there already; give another folder"):
        prepare("raw.txt", prepared.folder)
    with pytest.raises(ExperimentError, match=r"none\*: there is no such file; a file or a glob"):
        prepare(tmp_path / "none*", tmp_path / "out")


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.0, 0.1), (0.1, 0.0), (-0.1, 0.1), (0.1, math.nan)])
def test_shares_that_leave_a_split_empty_are_refused(tmp_path, shares):
    raw = write(tmp_path / "raw.txt", ROWS)
    with pytest.raises(ExperimentError, match="shares above 0, and below 1 in all"):
        prepare(raw, tmp_path / "out", shares=shares)


@pytest.mark.parametrize(
    ("rows", "shares", "empty"),
    [(4, (0.1, 0.1), "validation and test"), (2, (0.4, 0.4), "train"), (10, (0.2, 0.01), "test")],
)
def test_rows_that_are_too_few_for_every_split_are_refused(tmp_path, rows, shares, empty):
    raw = write(tmp_path / "raw.txt", ROWS[:rows])
    told = f"{rows} rows are too few for --validation {shares[0]} and --test {shares[1]}: none are left for {empty}"
    with pytest.raises(ExperimentError, match=told):
        prepare(raw, tmp_path / "out", shares=shares)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("memory", ["lots", "3", "3 bytes?"])
def test_memory_of_another_form_is_refused(tmp_path, memory):
    raw = write(tmp_path / "raw.txt", ROWS)
    with pytest.raises(ExperimentError, match=rf"--memory {re.escape(memory)}: a number and a unit .* such as 3GB"):
        prepare(raw, tmp_path / "out", memory=memory)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.txt"]


def test_a_line_that_is_too_long_to_read_is_named_with_the_reason(tmp_path):
    write(tmp_path / "day_1.txt", ROWS[:5])
    write(tmp_path / "day_2.txt", [*ROWS[:5], "a" * 2_000_001, *ROWS])
    with pytest.raises(ExperimentError, match=r"Line: 6; Maximum line size .* exceeded.*day_2.txt") as refused:
        prepare(tmp_path / "day_*", tmp_path / "out", skips_bad_rows=True)
    assert "aaa" not in str(refused.value)


def test_an_interrupted_preparation_leaves_nothing_and_starts_again(prepared, tmp_path, monkeypatch):
    raw = write(tmp_path / "raw.txt", ROWS)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DuckDB, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(raw, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["raw.txt"]
    killed = tmp_path / ".out.new"  # a kill leaves this behind
    (killed / "work").mkdir(parents=True)
    (killed / "train.parquet").write_bytes(b"half")
    again = prepare(raw, tmp_path / "out")
    assert contents(again, "train") == contents(prepared, "train")
    assert again.maps == prepared.maps
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw.txt"]


def test_a_folder_that_is_not_whole_is_refused(prepared, tmp_path):
    with pytest.raises(ExperimentError, match=r"was not prepared: there is no .*prepared.json"):
        Prepared.open(tmp_path)
    for path in prepared.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / "test.parquet").read_bytes()
    (tmp_path / "test.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExperimentError, match=r"test.parquet is missing, damaged or cut short"):
        Prepared.open(tmp_path)
    (tmp_path / "test.parquet").write_bytes((tmp_path / "train.parquet").read_bytes())
    with pytest.raises(ExperimentError, match=r"test.parquet has 480 rows, and 60 were written"):
        Prepared.open(tmp_path)
    (tmp_path / "prepared.json").write_text((tmp_path / "prepared.json").read_text().replace('"test"', '"tests"'))
    with pytest.raises(ExperimentError, match=r"prepared.json is damaged: KeyError\('test'\)"):
        Prepared.open(tmp_path)
    (tmp_path / "prepared.json").write_text("{")
    with pytest.raises(ExperimentError, match=r"prepared.json is damaged"):
        Prepared.open(tmp_path)
