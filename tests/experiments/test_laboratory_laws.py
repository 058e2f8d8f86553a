"""The laboratory stands outside the library and is read by people."""

import ast
import re
import sys
from pathlib import Path

import pytest

import tensorbed
from experiments.lab import formats, training
from experiments.lab.errors import ExperimentError
from experiments.lab.processes import accelerator_of
from experiments.lab.rows import Bench
from experiments.lab.speed import speeds
from experiments.lab.task import find, task_folders
from experiments.lab.watching import Display

TASK = find("source_code")
SOURCE = Path(__file__).parents[2] / "experiments"
FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_public_names_of_the_library_are_used(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "tensorbed"
        elif isinstance(node, ast.Import):
            assert all(name.name == "tensorbed" for name in node.names if name.name.startswith("tensorbed"))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tb":
            assert node.attr in tensorbed.__all__


LAB = [*sorted((SOURCE / "lab").rglob("*")), SOURCE / "__main__.py"]


def test_the_laboratory_knows_no_task():
    """No task is imported, and none of their names, datasets and rows is a word of its files."""
    rows = [run for name in task_folders() for run in Bench(find(name), Path()).plan.runs]
    words = {*task_folders(), *(dataset for dataset, _, _ in rows), *(row for _, row, _ in rows)}
    words -= {*formats.known(), "python"}  # rows may have the name of their format, and Python is the language
    for path in (path for path in LAB if path.suffix in (".py", ".html")):
        text = path.read_text()
        assert not re.search(r"from experiments\.tasks\.|import experiments\.tasks\.", text), path
        assert not words & set(re.findall(r"[\w-]+", text)), path


def test_files_have_one_subject():
    assert all(len(path.read_text().splitlines()) <= 400 for path in FILES)


def test_fewer_processes_than_started_are_an_error(monkeypatch):
    class Alone:
        num_processes = 1

        def __init__(self, **options):
            pass

    monkeypatch.setattr("accelerate.Accelerator", Alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ExperimentError, match="2 processes were started, accelerate uses 1; start them with torchrun"):
        accelerator_of("fp32")


def test_accelerate_launch_that_starts_one_process_of_several_is_an_error(monkeypatch):
    """What it sets on a machine without GPU: an address to meet at, but no number of processes."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ExperimentError, match=r"several processes were asked for and one was started.*torchrun"):
        accelerator_of("fp32")


def test_tensorboard_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ExperimentError, match=r"--tensorboard needs .* pip install '\.\[experiments\]'"):
        Display(TASK, ["run"], 3, logs=tmp_path)


def test_scalars_go_to_tensorboard(monkeypatch, tmp_path):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    module = type(sys)("tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with Display(TASK, ["run"], 3, logs=tmp_path) as display:
        display.lines[0].stepped(1, 0.5, 100.0)
        display.lines[0].validated(1, {"train_loss": 0.5, "val_perplexity": 40.0})
    assert written == [
        ("train/loss", 0.5, 1),
        ("train/tokens_per_second", 100.0, 1),
        ("epoch/train_loss", 0.5, 1),
        ("epoch/val_perplexity", 40.0, 1),
        "closed",
    ]


def test_only_the_first_process_speaks(capsys):
    for main in (True, False):
        with Display(TASK, ["run"], 3, main=main) as display:
            display.lines[0].started(2)
            display.lines[0].validated(3, {"train_loss": 0.25, "val_perplexity": 40.0})
    assert capsys.readouterr().out == "run  step 3 of 3  loss 0.2500  perplexity 40.0  0 s left\n"


def test_speeds_are_of_the_same_batches(sources, monkeypatch):
    seen = []
    real = training.Training.step
    monkeypatch.setattr(
        training.Training, "step", lambda run, batch: (seen.append((run.settings.row, batch)), real(run, batch))[1]
    )
    full, low = speeds(TASK, ["python-full", "python-low_rank"], 2, sources)
    assert [row for row, _ in seen] == ["full", "low_rank"] * 3
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(seen[::2], seen[1::2], strict=True))
    assert (full.row, low.row, full.relative) == ("full", "low_rank", 1.0)
    assert min(full.per_second, low.per_second, low.per_processor_second, low.relative) > 0
