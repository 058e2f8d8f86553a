"""From options to a line of results: what is begun, gone on with, refused, written."""

import math

import pytest
from laboratory import KillError, killed, losses, results, try_point

pytest.importorskip("accelerate")

from experiments.lab.checkpoints import MODEL, NAME, trained
from experiments.lab.errors import Diverged, ExperimentError
from experiments.lab.rows import Bench
from experiments.lab.task import find
from experiments.lab.training import How, Training, run

TASK = find("source_code")


@pytest.fixture
def started(row, sources, tmp_path):
    """Start the tiny row as the command does."""

    def start(config=None, *, task=TASK, data=sources, options=None, out="out", **more):
        how = How(data=data, out=tmp_path / out, results=tmp_path / out, checkpoint_steps=1, **more)
        return run(task, str(config or row()), options or {}, how)

    return start


@pytest.fixture
def cut(started, monkeypatch):
    """A run that is gone in its second epoch."""

    def start(*arguments, **options):
        with killed(monkeypatch, lambda run, _: run.state.epoch == 1):
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
        f"python tiny seed 0: validation {record['val_perplexity']:.2f}, ratio 6; "
        f"a line was added to {tmp_path / 'out' / 'source_code.jsonl'}"
    )


def test_a_smoke_run_leaves_the_checkpoint_of_the_real_one_alone(started, cut, tmp_path):
    cut()
    (kept,) = tmp_path.rglob(NAME)
    before = kept.read_bytes()
    started(smoke=True)
    assert kept.read_bytes() == before


def test_a_run_goes_on_with_the_rate_it_began_with_though_a_search_has_ended_since(
    sentiment, sentiment_row, data, started, cut, tmp_path
):
    bench, run = Bench(sentiment, tmp_path / "out"), {"task": sentiment, "data": data}
    cut(sentiment_row(), **run)
    for point in bench.plan.search("sst5").points:
        try_point(bench, "sst5", "tensor_train", point, 0.4)
    started(sentiment_row(), resume=True, **run)
    (record,) = results(tmp_path / "out", "sentiment.jsonl")
    assert (record["settings"]["lr"], record["settings"]["std"]) == (1e-3, None)


@pytest.mark.parametrize("damage", ["another configuration", "half a file"])
def test_a_sweep_begins_anew_where_the_checkpoint_is_of_no_use(row, started, cut, tmp_path, damage):
    cut(row(clip=0.25) if damage == "another configuration" else row())
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
        run(TASK, str(row()), {}, How(data=tmp_path / "nowhere", out=places["--out"], results=places["--results"]))


def test_sharding_needs_several_processes(row, sources, tmp_path):
    with pytest.raises(ExperimentError, match="--fsdp shards a model over several processes; start them with torchrun"):
        run(TASK, str(row()), {}, How(data=sources, out=tmp_path, results=tmp_path, fsdp=True))


def test_a_point_of_the_grid_that_diverges_was_tried_and_is_the_worst(started, tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "gradients", lambda self, batch: math.nan)
    with pytest.raises(Diverged):
        started()
    assert not (tmp_path / "out" / "source_code.jsonl").exists()
    started(kind="search", options={"lr": 0.5})
    (line,) = results(tmp_path / "out", "source_code_search.jsonl")
    assert (line["val_perplexity"], line["val_loss"], line["settings"]["lr"]) == (TASK.metrics[0].worst, 1e12, 0.5)
    assert TASK.metrics[0].written(line["val_perplexity"]) == "diverged"
    assert "smaller --lr" in line["diverged"]


def test_a_search_does_not_look_at_the_test_set_and_a_smoke_run_leaves_the_results_alone(sentiment, data, tmp_path):
    options = {"seed": 0, "precision": "fp32"}
    for kind in ("search", ""):
        how = How(data=data, out=tmp_path / "out", smoke=True, kind=kind, resume_if_possible=True)
        run(sentiment, "imdb-tt3", options, how)
    (tried,), (record,) = (results(tmp_path / "out", f"sentiment{kind}.jsonl") for kind in ("_search", ""))
    assert tried["test_accuracy"] is None
    assert record["test_accuracy"] is not None
    assert record["ratio"] == pytest.approx(441, abs=1)
    assert not list((tmp_path / "out").rglob(NAME))


def test_a_trained_model_is_kept_on_request_and_belongs_to_its_task(started, tmp_path):
    started(keep_model=True)
    (path,) = tmp_path.rglob(MODEL)
    settings, tensors = trained(path.parent, TASK.name, TASK.settings)
    assert settings.row == "tiny"
    lanes = TASK.load(settings, tmp_path / "sources")
    TASK.model(settings, lanes).load_state_dict(tensors)
    with pytest.raises(ExperimentError, match=r"model.pt is a model of the task source_code, not of other"):
        trained(path, "other", TASK.settings)
    whole = path.read_bytes()
    changed = bytearray(whole)
    largest = max(tensors.values(), key=lambda tensor: tensor.numel())
    changed[whole.index(largest.numpy().tobytes())] ^= 1  # which torch itself does not see
    for damaged in (changed, whole[:100]):
        path.write_bytes(damaged)
        with pytest.raises(ExperimentError, match=r"model.pt is damaged: .*--keep-model"):
            trained(path, TASK.name, TASK.settings)
    with pytest.raises(ExperimentError, match=r"there is no .*model.pt; a run with --keep-model leaves one"):
        trained(tmp_path, TASK.name, TASK.settings)


def test_a_checkpoint_of_another_task_is_refused(started, cut, tmp_path, sentiment, sentiment_row, data):
    cut(out="out")
    (path,) = tmp_path.rglob(NAME)
    foreign = tmp_path / "out" / "sentiment" / "sst5-tiny-0" / NAME
    foreign.parent.mkdir(parents=True)
    path.rename(foreign)
    with pytest.raises(ExperimentError, match=r"is of another configuration: task source_code \(now sentiment\)"):
        started(sentiment_row(), task=sentiment, data=data, resume=True)
