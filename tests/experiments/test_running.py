"""From options to a line of results: what is begun, gone on with, refused, written."""

import math

import pytest
from laboratory import losses, results, try_point

pytest.importorskip("accelerate")

from experiments.lab.checkpoints import NAME
from experiments.lab.errors import Diverged, ExperimentError
from experiments.lab.run import run
from experiments.lab.training import How, Training
from experiments.tasks.sentiment import task


@pytest.fixture
def started(row, data, tmp_path):
    """Start the tiny row as the command does."""

    def start(config=None, *, options=None, out="out", resume=False, **when):
        how = How(data=data, out=tmp_path / out, resume=resume, checkpoint_steps=1)
        return run(str(config or row()), options or {}, how, tmp_path / out, **when)

    return start


class KillError(Exception):
    pass


@pytest.fixture
def cut(started, monkeypatch):
    """A run that is gone in its second epoch."""

    def step(self, batch):
        if self.state.epoch == 1:
            raise KillError
        return real(self, batch)

    real = Training.step

    def start(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(Training, "step", step)
            with pytest.raises(KillError):
                started(*arguments, **options)

    return start


def test_a_stopped_run_is_neither_overwritten_nor_resumed_unasked(started, cut, tmp_path):
    started(out="whole")
    cut()
    with pytest.raises(ExperimentError, match=r"checkpoint.pt is of a run that was stopped: --resume .*, --restart"):
        started()
    started(resume=True)
    cut(out="anew")
    started(out="anew", restart=True)
    (whole,), (resumed,), (anew,) = (results(tmp_path / out) for out in ("whole", "out", "anew"))
    assert losses(resumed) == losses(anew) == losses(whole)
    assert not list(tmp_path.rglob(NAME))


def test_what_came_of_it_is_told_and_where_it_was_written(started, tmp_path):
    told = started()
    (record,) = results(tmp_path / "out")
    assert told == (
        f"sst5 tiny seed 0: test accuracy {record['test_accuracy']:.4f}, validation {record['val_accuracy']:.4f}, "
        f"ratio 3; a line was added to {tmp_path / 'out' / task.RESULTS_FILE}"
    )
    assert "test accuracy" not in started(search=True)


def test_a_smoke_run_leaves_the_checkpoint_of_the_real_one_alone(started, cut, tmp_path):
    cut()
    (kept,) = tmp_path.rglob(NAME)
    before = kept.read_bytes()
    started(smoke=True)
    assert kept.read_bytes() == before


def test_a_run_goes_on_with_the_rate_it_began_with_though_a_search_has_ended_since(started, cut, tmp_path):
    cut()
    for point in task.GRIDS["sst5"]:
        try_point(tmp_path / "out", "sst5", "tensor_train", point, 0.4)
    started(resume=True)
    (record,) = results(tmp_path / "out")
    assert (record["settings"]["lr"], record["settings"]["std"]) == (1e-3, None)


@pytest.mark.parametrize("damage", ["another configuration", "half a file"])
def test_a_sweep_begins_anew_where_the_checkpoint_is_of_no_use(row, started, cut, tmp_path, damage):
    cut(row(dropout=0.25) if damage == "another configuration" else row())
    (checkpoint,) = tmp_path.rglob(NAME)
    if damage == "half a file":
        checkpoint.write_bytes(checkpoint.read_bytes()[:500])
    started(row(), resume_if_possible=True)
    assert len(results(tmp_path / "out")[0]["epochs"]) == 3


def test_two_runs_do_not_share_a_folder(started, tmp_path, monkeypatch):
    def second(self, batch):
        with pytest.raises(ExperimentError, match="is in use by a run that has not ended"):
            started()
        raise KillError

    monkeypatch.setattr(Training, "gradients", second)
    with pytest.raises(KillError):
        started()


@pytest.mark.parametrize("option", ["--out", "--results"])
def test_a_place_that_cannot_be_written_to_is_known_before_data_is_read(row, tmp_path, option):
    file = tmp_path / "file"
    file.write_text("")
    places = {"--out": tmp_path / "out", "--results": tmp_path / "results", option: file}
    with pytest.raises(
        ExperimentError, match=rf"{option} .*file.* cannot be written to: (Not a directory|File exists)"
    ):
        run(str(row()), {}, How(data=tmp_path / "nowhere", out=places["--out"]), places["--results"])


def test_sharding_needs_several_processes(row, data, tmp_path):
    with pytest.raises(ExperimentError, match="--fsdp shards a model over several processes; start them with torchrun"):
        run(str(row()), {}, How(data=data, out=tmp_path, fsdp=True), tmp_path)


def test_a_point_of_the_grid_that_diverges_was_tried_and_is_the_worst(started, tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "gradients", lambda self, batch: math.nan)
    with pytest.raises(Diverged):
        started()
    assert not (tmp_path / "out" / task.RESULTS_FILE).exists()
    started(search=True, options={"lr": 0.5})
    (line,) = results(tmp_path / "out", task.SEARCH_FILE)
    assert (line["val_accuracy"], line["settings"]["lr"]) == (0.0, 0.5)
    assert "smaller --lr" in line["diverged"]


def test_a_search_does_not_look_at_the_test_set_and_a_smoke_run_leaves_the_results_alone(data, tmp_path):
    options = {"seed": 0, "precision": "fp32"}
    for search in (True, False):
        how = How(data=data, out=tmp_path / "out")
        run("imdb-tt3", options, how, None, smoke=True, search=search, resume_if_possible=True)
    (tried,), (record,) = results(tmp_path / "out", task.SEARCH_FILE), results(tmp_path / "out")
    assert tried["test_accuracy"] is None
    assert record["test_accuracy"] is not None
    assert record["ratio"] == pytest.approx(441, abs=1)
    assert not list((tmp_path / "out").rglob(NAME))
