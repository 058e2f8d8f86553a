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


def test_kept_files_are_taken_again(tmp_path, monkeypatch, capfd):
    asked = []

    def experiment(command, *arguments):
        asked.append(command)
        if command == "--config":
            run = tmp_path / "5-rows" / "criteo-tt1" / "click_through" / "run"
            run.mkdir(parents=True, exist_ok=True)
            if asked.count(command) > 1:  # the first one is stopped
                (run / "model.pt").touch()
        elif command == "generate":
            (tmp_path / "5-rows" / "raw.tsv").touch()
        else:
            (tmp_path / "5-rows" / "data").mkdir()
        return 1.0, 1

    monkeypatch.setattr(serving, "experiment", experiment)
    monkeypatch.setattr(serving, "Scorer", lambda checkpoint, data: None)
    monkeypatch.setattr(serving, "scoring", lambda scorer, lines: [serving.Floor("scored", "", 1, 1, True)])
    for preparations in (1, 0, 0):
        serving.main(["--rows", "5", "--keep", "--out", str(tmp_path)])
        assert capfd.readouterr().out.count("rows/s") == preparations
    assert asked == ["generate", "prepare", "--config", "--config"]
