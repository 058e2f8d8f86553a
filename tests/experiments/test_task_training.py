import errno
import json
import math
import sys
from dataclasses import replace

import pytest
import small_files
import torch
from laboratory import KillError, killed, losses

pytest.importorskip("accelerate")

from experiments.lab import files
from experiments.lab.batches import Batch, lanes_of
from experiments.lab.checkpoints import CONTENT, Checkpoints
from experiments.lab.errors import Diverged, ExperimentError
from experiments.lab.optimisers import SCHEDULES, pace
from experiments.lab.records import about
from experiments.lab.rows import configured
from experiments.lab.task import find
from experiments.lab.training import How, Training
from experiments.lab.training import train as train_task
from experiments.tasks.sentiment.model import Classifier

TASK = find("source_code")  # the smallest
FIELDS = """
    task dataset row seed format shape ranks table_parameters total_parameters ratio val_perplexity val_loss
    epochs selected_epoch seconds tokens_per_second overhead peak_memory_bytes settings versions machine commit time
"""


@pytest.fixture
def settings(row):
    return lambda **options: configured(TASK, str(row()), options)


@pytest.fixture
def how(sources, tmp_path):
    return lambda **options: How(**{"data": sources, "out": tmp_path / "out", **options})


def train(settings, how):
    return train_task(TASK, settings, how)


def checkpoints(settings, how):
    return Checkpoints.of(TASK.name, settings, how)


def test_a_run_tells_everything(settings, how):
    record = train(settings(), how())
    assert set(FIELDS.split()) <= set(record)
    json.dumps(record)
    rows, cols = record["shape"]
    stored = sum(
        2 * i * j * (2 if 0 < k < len(rows) - 1 else 1) for k, (i, j) in enumerate(zip(rows, cols, strict=True))
    )
    words = len(TASK.load(settings(), how().data).words)
    assert record["table_parameters"] == 2 * stored  # both ends
    assert record["ratio"] == pytest.approx(words * 8 / stored)
    assert record["val_perplexity"] == record["epochs"][-1]["val_perplexity"]
    assert [epoch["step"] for epoch in record["epochs"]] == [8, 16, 24]
    assert record["tokens"] == 24 * 4 * 4
    assert 0 <= record["overhead"] < 1


def test_a_rank_that_a_ratio_has_settled_is_told(settings, how):
    record = train(replace(settings(), format="low_rank", rank=None, ratio=4.0, shape=None), how())
    (rows,), (cols,) = record["shape"]
    (rank,) = record["ranks"]
    assert record["table_parameters"] == 2 * rank * (rows + cols)  # both ends


def test_what_a_record_tells_of_the_machine_names_nobody(tmp_path):
    import platform

    told = json.dumps(about())
    assert platform.node() not in told
    assert "/" not in json.dumps(about()["machine"])


def test_the_paper_has_so_many_parameters(sentiment):
    """7.19M in all with the full table, 0.81M with TT3."""
    for name, millions in (("imdb-full", 7.19), ("imdb-tt3", 0.81), ("sst5-full", 5.19), ("sst5-tt1", 0.85)):
        row = configured(sentiment, name, {})
        with torch.device("meta"):
            total = sum(p.numel() for p in Classifier(row, 2).parameters())
        assert total / 1e6 == pytest.approx(millions, abs=0.0101)


def test_the_padding_row_is_zero_or_trained(sentiment):
    for name, zero in (("sst5-full", True), ("sst5-full-zero-padded", True), ("sst5-full-padded", False)):
        model = Classifier(configured(sentiment, name, {}), 5)
        model(torch.tensor([[0, 3]])).sum().backward()
        assert bool((model.embedding(torch.tensor(0)) == 0).all()) is zero
        table = next(p for p in model.embedding.parameters() if p.shape == (17_200, 256))
        assert bool((table.grad[0] == 0).all()) is zero


def test_the_same_seed_gives_the_same_numbers_and_another_others(settings, how):
    one = losses(train(settings(seed=1), how()))
    assert one == losses(train(settings(seed=1), how()))
    assert one != losses(train(settings(seed=2), how()))


@pytest.mark.parametrize(("steps", "precision"), [(1, "fp32"), (7, "fp32"), (8, "bf16"), (19, "bf16")])
def test_a_killed_run_goes_on_bit_for_bit(settings, how, tmp_path, monkeypatch, steps, precision):
    row = settings(precision=precision)
    whole = losses(train(row, how(out=tmp_path / "whole")))
    with killed(monkeypatch, lambda _, made: made == steps):
        train(row, how(checkpoint_steps=1))
    assert losses(train(row, how(resume=True))) == whole


def test_a_run_killed_after_its_last_epoch_does_not_train_another(settings, how, monkeypatch):
    row = settings(validations=6, patience=2)
    scores = iter([5.0, 6.0, 7.0, 1.0, 1.0, 1.0])

    def killed(self, run):
        raise KillError

    with monkeypatch.context() as patch:
        patch.setattr(type(TASK), "selects", True)
        with monkeypatch.context() as inner:
            inner.setattr(Training, "evaluate", lambda self, split: {"perplexity": next(scores)})
            inner.setattr(type(TASK), "after", killed)
            with pytest.raises(KillError):
                train(row, how())
        patch.setattr(type(TASK), "after", lambda self, run: {"decoded": sorted(run.best) == sorted(run.model_state())})
        record = train(row, how(resume=True))
    assert [epoch["val_perplexity"] for epoch in record["epochs"]] == [5.0, 6.0, 7.0]
    assert record["selected_epoch"] == 1
    assert record["decoded"] is True


def test_time_and_commits_of_all_starts_are_kept(settings, how, monkeypatch):
    with killed(monkeypatch, lambda _, made: made == 5):
        train(settings(), how(checkpoint_steps=1))
    saved = checkpoints(settings(), how()).read()["state"]
    assert 0 < saved["seconds"] <= saved["total"]
    monkeypatch.setattr("experiments.lab.records.commit", lambda: "another")
    record = train(settings(), how(resume=True))
    assert record["seconds"] > record["train_seconds"] > saved["seconds"]
    assert record["commits"] == [saved["commits"][0], "another"]


def test_gradients_of_pieces_are_those_of_the_batch(settings, how):
    """Compared as they are: what Adam makes of them would hide a factor."""
    lanes = TASK.load(settings(), how().data)

    def gradients(pieces):
        run = Training(TASK, settings(), how(accumulate=pieces), lanes)
        loss = run.gradients(next(run.source.batches(0)))
        return loss, [p.grad for p in run.plain.parameters()]

    for pieces in (3, 100):
        torch.testing.assert_close(gradients(pieces), gradients(1), rtol=1e-5, atol=1e-7)


def test_training_stops_when_validation_has_not_improved(settings, how, monkeypatch):
    """By the direction of its metric."""
    scores = iter([5.0, 3.0, 4.0, 3.0, 1.0])
    monkeypatch.setattr(type(TASK), "selects", True)
    monkeypatch.setattr(Training, "evaluate", lambda self, split: {"perplexity": next(scores)})
    record = train(settings(validations=6, patience=2), how(kind="search"))
    assert [epoch["val_perplexity"] for epoch in record["epochs"]] == [5.0, 3.0, 4.0, 3.0]
    assert record["selected_epoch"] == 2
    assert record["val_perplexity"] == 3.0


def test_every_test_set_is_used_once_with_the_selected_model(settings, how, monkeypatch):
    seen, scores = [], iter([5.0, 1.0, 3.0, 7.0, 8.0])

    def evaluate(self, split):
        seen.append((split, self.plain.narrow.weight.detach().clone()))
        return {"perplexity": next(scores), "other": 0.5}

    monkeypatch.setattr(Training, "evaluate", evaluate)
    monkeypatch.setattr(type(TASK), "selects", True)
    monkeypatch.setattr(type(TASK), "tests", ("near", "far"))
    record = train(settings(), how())
    assert [split for split, _ in seen] == ["validation", "validation", "validation", "near", "far"]
    assert all(torch.equal(weight, seen[1][1]) for _, weight in seen[3:])
    assert [record[f"{split}_perplexity"] for split in ("val", "near", "far")] == [1.0, 7.0, 8.0]
    assert record["far_other"] == 0.5


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_checkpoint(settings, how, monkeypatch):
    real = Training.step
    monkeypatch.setattr(Training, "step", lambda self, b: math.nan if self.state.step == 3 else real(self, b))
    with pytest.raises(Diverged, match=r"gradient is nan in step 4 of stage 1.*smaller --lr.*last good checkpoint"):
        train(settings(), how(checkpoint_steps=2))
    monkeypatch.setattr(Training, "step", real)
    run = Training(TASK, settings(), how(), TASK.load(settings(), how().data))
    run.restore(checkpoints(settings(), how()))
    assert run.state.step == 2


def test_a_gradient_that_is_no_number_spoils_no_weight_and_no_checkpoint(settings, how, monkeypatch):
    real = Training.gradients

    def gradients(self, batch):
        loss = real(self, batch)
        if self.state.step == 3:
            self.plain.narrow.weight.grad[0, 0] = math.inf
        return loss

    monkeypatch.setattr(Training, "gradients", gradients)
    with pytest.raises(Diverged, match="step 4 of stage 1"):
        train(settings(), how(checkpoint_steps=1))
    saved = checkpoints(settings(), how()).load()
    assert saved["state"]["step"] == 3
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())


def test_a_full_disk_stops_the_run_and_keeps_the_last_good_checkpoint(settings, how, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, {"seed": 0})
    checkpoints.save({**dict.fromkeys(CONTENT), "number": 1})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ExperimentError, match=r"the disk is full. The last good checkpoint"):
        checkpoints.save({**dict.fromkeys(CONTENT), "number": 2})
    assert checkpoints.load()["number"] == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["checkpoint.pt"]


def test_a_checkpoint_of_something_else_is_refused_before_training(settings, how, tmp_path, monkeypatch):
    with pytest.raises(ExperimentError, match="there is no checkpoint"):
        train(settings(), how(resume=True))
    with killed(monkeypatch, lambda _, made: made == 5):
        train(settings(), how(checkpoint_steps=1))
    with pytest.raises(ExperimentError, match=r"is of another configuration: lr 0.01 \(now 0.5\)\. Give the same"):
        train(settings(lr=0.5), how(resume=True))
    with pytest.raises(ExperimentError, match=r"is of another configuration: fsdp False \(now True\)"):
        checkpoints(settings(), how(fsdp=True)).load()
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ExperimentError, match=r"processes 1 \(now 2\)"):
            checkpoints(settings(), how()).load()
    fewer = tmp_path / "fewer"
    small_files.sources(fewer)
    (fewer / "file_07.py").unlink()
    with pytest.raises(ExperimentError, match=r"made with other data: train \[\d+\], now \[\d+\]. Give"):
        train(settings(), how(resume=True, data=fewer))
    path = checkpoints(settings(), how()).path
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ExperimentError, match="is damaged"):
        train(settings(), how(resume=True))


class Stream:
    """A source whose place is more than the number of steps: what it gives next hangs on what it gave before."""

    def __init__(self, lanes):
        self.lanes, self.place, self.ends = lanes, 0, (6, 12)

    def batches(self, start):
        for _ in range(start, 12):
            self.place = (7 * self.place + 3) % 50
            words = self.lanes[:, self.place : self.place + 5]
            yield Batch({"words": words[:, :-1], "following": words[:, 1:]})

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("steps", [1, 6, 10])
def test_a_stream_goes_on_where_it_was(settings, how, tmp_path, monkeypatch, steps):
    monkeypatch.setattr(type(TASK), "batches", lambda self, settings, data: Stream(lanes_of(data.train, 4, "training")))
    whole = losses(train(settings(), how(out=tmp_path / "whole")))
    with killed(monkeypatch, lambda _, made: made == steps):
        train(settings(), how(checkpoint_steps=1))
    assert losses(train(settings(), how(resume=True))) == whole


def test_freed_memory_is_kept(settings, how, monkeypatch):
    asked = []
    monkeypatch.setattr("experiments.lab.training.keep_freed_memory", lambda: asked.append(True))
    train(settings(), how())
    assert asked


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_stay_between_nothing_and_all(schedule):
    for warm_up in (0.0, 0.1):
        shares = [pace(schedule, step, 50, warm_up) for step in range(50)]
        assert all(0 <= share <= 1 for share in shares)
        assert shares[0] > 0
        assert not warm_up or shares[0] < shares[4]


@pytest.mark.parametrize(
    ("schedule", "falling"),
    [
        ("inverse_sqrt", lambda step: (10 / (step + 1)) ** 0.5),
        ("cosine", lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 100)),
        ("linear", lambda step: 1 - step / 100),
    ],
)
def test_rates_rise_in_a_line_and_fall_by_their_schedule(schedule, falling):
    shares = [pace(schedule, step, 100, 0.1) for step in range(100)]
    assert shares[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert shares[10:] == pytest.approx([falling(step) for step in range(10, 100)])


def test_optimisers_go_by_name(settings, how, monkeypatch):
    lanes = TASK.load(settings(), how().data)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    for name, kind in kinds.items():
        run = Training(TASK, settings(optimizer=name, weight_decay=0.1), how(), lanes)
        assert type(run.optimizer.optimizer) is kind
        assert run.optimizer.param_groups[0]["weight_decay"] == 0.1
    parted = [[p] for p in Training(TASK, settings(), how(), lanes).plain.parameters()][:2]
    groups = [{"params": parted[0], "weight_decay": 0.0}, {"params": parted[1]}]
    with monkeypatch.context() as patch:
        patch.setattr(type(TASK), "parameters", lambda self, settings, model: groups)
        run = Training(TASK, settings(weight_decay=0.1), how(), lanes)
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.0, 0.1]
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ExperimentError, match="novograd needs pip install pytorch-optimizer"):
        Training(TASK, settings(optimizer="novograd"), how(), lanes)


def test_novograd_trains_and_goes_on_bit_for_bit(settings, how, tmp_path, monkeypatch):
    pytest.importorskip("pytorch_optimizer")
    row = settings(optimizer="novograd", weight_decay=0.01, lr=0.02)
    whole = train(row, how(out=tmp_path / "whole"))
    first, *_, last = whole["epochs"]
    assert last["val_perplexity"] < first["val_perplexity"]
    with killed(monkeypatch, lambda _, made: made == 7):
        train(row, how(checkpoint_steps=1))
    assert losses(train(row, how(resume=True))) == losses(whole)
