"""``tensorbed compress`` looks at where it shall write before it fits anything, and tells a full disk in a line."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import transformers
from commands import SMALL, make_folders, refused, run
from safetensors import SafetensorError

import tensorbed as tb
from tensorbed.compress.finding import found_tables
from tensorbed.integrations.transformers import compressing
from tensorbed.integrations.transformers.folders import load_model, opened

Disk = namedtuple("Disk", "total used free")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders that no test changes."""
    return make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture
def no_fit(monkeypatch):
    """Whatever comes to a fit fails."""
    monkeypatch.delattr(compressing, "compress_")
    monkeypatch.delattr(compressing, "plan")


@pytest.mark.usefixtures("no_fit")
def test_a_folder_that_cannot_be_written_to_is_told_before_the_fit(made, tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def failing(path, *args, **options):
        if path.parent == tmp_path:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", failing)
    said = refused("compress", made / "bert", tmp_path / "out", *SMALL)
    assert f"{tmp_path} cannot be written to (Read-only file system), and out would be in it" in said


@pytest.mark.usefixtures("no_fit")
def test_a_name_that_is_too_long_is_told_before_the_fit(made, tmp_path):
    assert "cannot be written to (File name too long)" in refused(
        "compress", made / "bert", tmp_path / ("x" * 250), *SMALL
    )


def test_trying_leaves_nothing(made, tmp_path):
    compressing.check_target(tmp_path / "out", made / "bert", force=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("no_fit")
@pytest.mark.parametrize("options", [("--format", "int8"), ("--format", "pq", "--ratio", "2"), ("--budget", "20kB")])
def test_a_disk_without_room_is_told_before_the_fit(made, tmp_path, monkeypatch, options):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(10**9, 10**9, 10_000))
    said = refused("compress", made / "llama", tmp_path / "out", *SMALL, *options)
    assert f"{tmp_path / 'out'} will take about 0.0 MB, and its disk has 0.0 MB left" in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("format", "ratio", "where"),
    [
        (tb.QuantizedRows(bits=4), None, {}),
        (tb.HotRows(), None, {"tied": "untie"}),
        (tb.LowRank(ratio=4), 4, {}),
        (tb.TensorTrain(ratio=4), 4, {"include_heads": False, "tied": "untie"}),
        (None, 3, {}),
    ],
)
def test_the_expected_size_is_that_of_the_result(made, tmp_path, format, ratio, where):
    where = {"min_rows": 100, "skip": (), "tied": "keep", "include_heads": True, **where}
    model, _ = load_model(opened(made / "llama"))
    weights, _ = found_tables(model, format or tb.Dense(), **where)
    before, after = compressing.expected_size(model, weights, format, {"ratio": ratio, "budget": None, **where})
    done = compressing.compress_folder(made / "llama", tmp_path / "out", format, ratio=ratio, **where)
    header = 6000  # names and checksums, which a small file has many of
    slack = 1.0 if format is not None else 0.5  # a plan may find something that is smaller than it has to be
    assert slack * after <= done.disk_after <= after + header
    assert before == done.report.bytes_before - 64  # without buffers that no file has


def test_there_is_room_for_what_takes_all_that_is_left(made, tmp_path, monkeypatch):
    needed, check_space = [], compressing.check_space
    monkeypatch.setattr(compressing, "check_space", lambda out, bytes: needed.append(bytes))
    run("compress", made / "bert", tmp_path / "first", "--format", "int8", *SMALL)
    written = sum(path.stat().st_size for path in (tmp_path / "first").rglob("*") if path.is_file())
    assert needed[0] == pytest.approx(written, rel=0.1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, needed[0]))
    check_space(tmp_path / "second", needed[0])
    with pytest.raises(OSError, match="free some space"):
        check_space(tmp_path / "second", needed[0] + 1)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "model.safetensors"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_is_full_all_the_same_is_a_line(made, tmp_path, monkeypatch, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    said = refused("compress", made / "bert", tmp_path / "out", "--format", "int8", *SMALL)
    assert f"{tmp_path / 'out'} cannot be written, and nothing of it is left: " in said
    assert "No space left on device" in said
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("no_fit")
def test_a_file_in_place_of_its_folder(made, tmp_path):
    file = made / "bert" / "model.safetensors"
    assert f"{file} is a file; give the folder that it is in" in refused("compress", file, tmp_path / "out")


def test_a_budget_that_all_tables_keep_is_refused_with_their_size(made, tmp_path):
    said = refused("compress", made / "bert", tmp_path / "out", "--budget", "1MB", *SMALL)
    assert "all tables may stay as they are, they take 0.0 MB and 1.0 MB are allowed; ask for less" in said


def test_a_skipped_name_that_nothing_has_is_refused(made, tmp_path):
    for command in (
        ("compress", made / "llama", tmp_path / "out", "--format", "int8"),
        ("plan", made / "llama", "--ratio", "2"),
    ):
        said = refused(*command, *SMALL, "--skip", "lm_haed")
        assert said == "tensorbed: --skip lm_haed: no table or head matches; the model has model.embed_tokens, lm_head."
    assert not (tmp_path / "out").exists()


def test_errors_speak_of_options(made, tmp_path):
    for command in (
        ("plan", made / "bert", "--ratio", "900"),
        ("compress", made / "bert", tmp_path / "out", "--budget", "9B"),
    ):
        said = refused(*command, *SMALL)
        assert said.endswith("Ask for no smaller tables.")
    said = refused("compress", made / "llama", tmp_path / "out", "--format", "int8", *SMALL, "--no-heads")
    assert said.endswith("skip model.embed_tokens too, or break the tie with --untie.")
