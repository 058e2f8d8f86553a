"""Preparation and scoring as they are timed: by the commands that a user types, and nothing is left behind."""

import pytest

pytest.importorskip("duckdb")

from benchmarks.click_through import serving


def test_a_command_that_fails_ends_the_measurement(tmp_path, capfd):
    with pytest.raises(SystemExit, match=r"experiments click-through prepare failed"):
        serving.experiment("prepare", str(tmp_path / "no.tsv"), str(tmp_path / "data"))
    assert "no.tsv" in capfd.readouterr().err


@pytest.mark.slow
def test_all_numbers_are_told_and_no_file_is_left(tmp_path, capfd):
    serving.main(["--rows", "2000", "--out", str(tmp_path)])
    told = capfd.readouterr().out
    for number in ("rows/s", "GiB at the peak", "one row scored", "training's forward pass"):
        assert number in told
    assert list(tmp_path.iterdir()) == []
