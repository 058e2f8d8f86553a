"""The model of clicks, its rows from Parquet, and runs of the task."""

import itertools
import math
import os

import pytest
import small_files as tiny
import torch
from laboratory import assert_two_processes_trained_as_one, in_two_processes, killed, needs_gloo
from laboratory import run as run_command

pytest.importorskip("accelerate")
pytest.importorskip("ibis")
pytest.importorskip("torchmetrics")

import pyarrow.parquet as pq

import tensorbed as tb
from benchmarks.workloads import CRITEO
from experiments.lab.errors import ExperimentError
from experiments.lab.rows import configured, row_names
from experiments.lab.settings import How
from experiments.lab.task import find
from experiments.lab.training import train
from experiments.tasks.click_through.model import ClickModel, ClickThroughSettings, format_of
from experiments.tasks.click_through.prepare import Preparation
from experiments.tasks.click_through.prepared import Prepared, map_files, parquet_file
from experiments.tasks.click_through.scoring import (
    Scorer,
    blocks_of_lines,
    checked_row,
    has_label,
)
from experiments.tasks.click_through.task import area_under_curve

TASK = find("click_through")
SIZES = {"user": 5000, "book": 3000, "year": 30}


def settings(**options):
    return ClickThroughSettings(**{"dataset": "criteo", "row": "tiny", "dim": 8, "hidden": 8, **options})


def parameters(module):
    return sum(tensor.numel() for tensor in module.parameters())


# The model


@pytest.mark.parametrize(("hidden", "body"), [(1024, 3_789_825), (128, 129_665)])
@pytest.mark.parametrize("order", [3, 4])
def test_the_paper_has_so_many_parameters_as_far_as_it_tells(hidden, body, order):
    """Its layers and threshold are known, and the values of 26 features; those of the 13 numbers are not."""
    rank = 16 if hidden == 1024 else 2
    hashed = {f"C{k}": min(rows, 100_000) for k, rows in enumerate(CRITEO)} | {f"I{k}": 100 for k in range(13)}
    trains = settings(dim=16, hidden=hidden, format=f"tensor_train(order={order})", rank=rank)
    with torch.device("meta"):
        full = ClickModel(settings(dim=16, hidden=hidden), hashed)
        small = ClickModel(trains, hashed)
    assert parameters(full.body) == parameters(small.body) == body == 624 * hidden + 3 * hidden**2 + 5 * hidden + 1
    assert parameters(full) == body + 16 * sum(hashed.values())
    large = [rows for rows in hashed.values() if rows > 2000]
    cores = [tb.TTEmbeddingBag(rows, 16, rank=rank, order=order, device="meta") for rows in large]
    kept = 16 * sum(rows for rows in hashed.values() if rows <= 2000)
    assert parameters(small) == body + kept + sum(map(parameters, cores))
    # The paper's own totals are larger, by tables that it does not tell the sizes of.
    assert parameters(full) < 41.2e6 - (3_789_825 - body)
    assert parameters(small) < {1024: 4.5e6, 128: 0.53e6}[hidden]


def test_only_large_tables_have_the_format_of_the_row():
    row = settings(format="tensor_train", rank=2)
    assert format_of(row, 2000) == tb.Dense()
    assert format_of(row, 2001) == tb.TensorTrain(rank=2)
    model = ClickModel(row, SIZES)
    kinds = [type(layer.structure).__name__ for layer in model.features.tables.values()]
    assert kinds == ["TensorTrainMatrix", "TensorTrainMatrix", "DenseMatrix"]


def test_a_ratio_that_a_small_table_cannot_have_is_the_most_it_can():
    row = settings(dim=16, format="quotient_remainder", ratio=200.0)
    for rows, most in ((2001, 22.23), (16_807, 64.64), (340_556, 200.1)):
        ratio = tb.EmbeddingBag(rows, 16, format_of(row, rows), device="meta").compression_ratio
        assert most / 1.02 <= ratio <= most * 1.001


@pytest.mark.parametrize("interaction", [False, True])
def test_scores_are_those_of_layers_over_rows_side_by_side(interaction):
    model = ClickModel(settings(format="tensor_train", rank=2, interaction=interaction), SIZES)
    ids = torch.stack([torch.randint(rows, (7,)) for rows in SIZES.values()], 1)
    rows = [layer(ids[:, [k]]) for k, layer in enumerate(model.features.tables.values())]
    pairs = [(rows[i] * rows[j]).sum(1, keepdim=True) for i in range(3) for j in range(i + 1, 3)]
    hidden = torch.cat([*rows, *(pairs if interaction else [])], 1)
    linear = [layer for layer in model.body if isinstance(layer, torch.nn.Linear)]
    assert len(linear) == 5
    for layer in linear[:-1]:
        hidden = (hidden @ layer.weight.T + layer.bias).clamp_min(0)
    expected = hidden @ linear[-1].weight[0] + linear[-1].bias
    torch.testing.assert_close(model(ids), expected)


# Rows from Parquet


@pytest.fixture(scope="module")
def criteo(tmp_path_factory):
    """Prepared rows, 480 for training in groups of 64."""
    folder = tmp_path_factory.mktemp("clicks")
    (folder / "raw.txt").write_text("\n".join(tiny.criteo_rows()))
    prepared = Preparation(str(folder / "raw.txt"), folder / "out", least=1).run()
    rows = prepared.file("train").read()  # DuckDB has at least 2,048 in a group
    pq.write_table(rows, parquet_file(folder / "out", "train"), row_group_size=64)
    return prepared


def listed(batches):
    return [tuple(row) for batch in batches for row in torch.cat([batch["labels"][:, None], batch["ids"]], 1).tolist()]


def test_every_row_comes_once_an_epoch_in_another_order_each_time(criteo):
    source = criteo.training(settings(batch=50, epochs=3, window=3))
    batches = list(source.batches())
    assert [batch.rows for batch in batches] == ([50] * 9 + [30]) * 3
    assert source.ends == tuple(range(1, 31))
    of_file = listed(criteo.in_order(settings(batch=37), "train"))
    epochs = [listed(batches[10 * k : 10 * k + 10]) for k in range(3)]
    assert all(sorted(epoch) == sorted(of_file) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, of_file]}) == 4
    read = criteo.file("train").read().to_pylist()
    assert of_file == [tuple(map(float, row.values())) for row in read]


@pytest.mark.parametrize(("window", "most"), [(1, None), (3, None), (3, 200), (100, None)])
def test_a_stream_goes_on_from_any_step(criteo, window, most):
    options = settings(batch=50, epochs=2, window=window, rows=most)
    whole = [listed([batch]) for batch in criteo.training(options).batches()]
    assert sum(map(len, whole)) == 2 * (most or 480)
    for start in range(len(whole)):
        rest = criteo.training(options).batches(start)
        assert [listed([batch]) for batch in rest] == whole[start:]


def test_windows_before_a_step_are_not_read(criteo, monkeypatch):
    source = criteo.training(settings(batch=64, epochs=1, window=2))
    asked = []
    real = type(source).read
    monkeypatch.setattr(
        type(source), "read", lambda self, groups, draw: asked.append(groups) or real(self, groups, draw)
    )
    assert len(list(source.batches(5))) == 3
    assert list(map(len, asked)) == [2, 2]


# The task


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order():
    scores, labels = torch.randn(60).round(decimals=1), (torch.rand(60) < 0.4).float()
    clicked, not_clicked = scores[labels == 1][:, None], scores[labels == 0]
    share = (clicked > not_clicked).double() + 0.5 * (clicked == not_clicked)
    assert area_under_curve(scores, labels) == pytest.approx(share.mean().item())


def tiny_run(criteo, tmp_path, **options):
    row = settings(**{"format": "tensor_train", "rank": 2, "full_up_to": 30, "batch": 32, "lr": 0.01, **options})
    how = How(data=criteo.folder, out=tmp_path / "out", results=tmp_path, checkpoint_steps=1)
    return row, how


def test_a_model_learns_what_is_planted(criteo, tmp_path):
    record = train(TASK, *tiny_run(criteo, tmp_path, validations=2, patience=None))
    assert [epoch["step"] for epoch in record["epochs"]] == [8, 15, 22, 30, 38, 45]
    assert record["epochs"][-1]["train_loss"] < record["epochs"][0]["train_loss"]
    assert 0.5 < record["test_AUC"] <= 1
    assert record["val_logloss"] == min(epoch["val_logloss"] for epoch in record["epochs"])
    assert record["tokens"] == 3 * 480
    assert record["rows"] == {"train": 480, "validation": 60, "test": 60}
    assert math.prod(record["shape"][0]) >= max(criteo.tables.values())
    assert record["table_bytes"] < 4 * 8 * sum(criteo.tables.values())


def test_a_killed_run_goes_on_bit_for_bit(criteo, tmp_path, monkeypatch):
    row, how = tiny_run(criteo, tmp_path, epochs=2, validations=2)
    whole = train(TASK, row, How(data=criteo.folder, out=tmp_path / "whole", results=tmp_path))
    with killed(monkeypatch, lambda _, made: made == 11):
        train(TASK, row, how)
    again = train(TASK, row, How(**{**vars(how), "resume": True}))
    for key in ("train_loss", "val_logloss", "val_AUC", "gradient_norm"):
        assert [epoch[key] for epoch in again["epochs"]] == [epoch[key] for epoch in whole["epochs"]]
    assert again["test_logloss"] == whole["test_logloss"]


@needs_gloo
@pytest.mark.slow
def test_two_processes_train_as_one_does(criteo, tmp_path):
    row, how = tiny_run(criteo, tmp_path, epochs=2, validations=2)
    changed = (
        "dataset",
        "row",
        "dim",
        "hidden",
        "format",
        "rank",
        "full_up_to",
        "batch",
        "lr",
        "epochs",
        "validations",
    )
    config = tiny.row(tmp_path / "row.toml", "", **{name: getattr(row, name) for name in changed})
    one = train(TASK, configured(TASK, str(config), {}), how)
    two = in_two_processes("click-through", config, criteo.folder, tmp_path / "two", "--accumulate", "2")
    assert_two_processes_trained_as_one(two, one)
    for name in ("test_logloss", "test_AUC"):
        assert two[name] == pytest.approx(one[name], rel=1e-3)


def test_a_sample_lies_beside_other_small_sets(criteo, tmp_path):
    (tmp_path / "criteo-sample").symlink_to(criteo.folder, target_is_directory=True)
    assert TASK.load(settings(dataset="criteo-sample"), tmp_path).tables == criteo.tables
    with pytest.raises(ExperimentError, match=r"criteo-sample was not prepared"):
        TASK.load(settings(dataset="criteo-sample"), criteo.folder)


def test_data_that_is_missing_or_damaged_is_named(criteo, tmp_path):
    with pytest.raises(ExperimentError, match="criteo is not fetched; give the folder that holds it with --data"):
        TASK.load(settings(), None)
    with pytest.raises(ExperimentError, match="was not prepared"):
        TASK.load(settings(), tmp_path)
    for path in criteo.folder.iterdir():
        content = path.read_bytes()
        if path.name == "train.parquet":  # what tells of the row groups is at the end
            content = content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :]
        (tmp_path / path.name).write_bytes(content)
    damaged = Prepared.open(tmp_path)
    with pytest.raises(ExperimentError, match=r"train.parquet is damaged or cut short"):
        list(damaged.training(settings()).batches())


# Scoring


@pytest.fixture(scope="module")
def kept_model(criteo, tmp_path_factory):
    """The folder of a trained model."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp("model")
    row = settings(format="tensor_train", rank=2, full_up_to=30, batch=32, epochs=1, validations=1, lr=0.01)
    train(TASK, row, How(data=criteo.folder, out=folder, results=folder, keep_model=True))
    return folder / "click_through" / "criteo-tiny-0"


def test_values_have_the_numbers_of_their_maps_and_others_that_of_unseen_ones(criteo, kept_model):
    scorer = Scorer(kept_model, criteo.folder)
    rows = [row.encode() for row in tiny.criteo_rows()]
    in_files = [
        row[1:] for split in ("train", "validation", "test") for row in listed(criteo.in_order(settings(), split))
    ]
    assert scorer.ids(rows).tolist() == [list(map(int, row)) for row in in_files]
    without_labels = [row.split(b"\t", 1)[1] for row in rows[:3]]
    assert scorer.ids(without_labels, labelled=False).tolist() == scorer.ids(rows[:3]).tolist()
    fields = rows[0].split(b"\t")
    strange = b"\t".join([b"0", b"1234567890", *fields[2:14], b"0", fields[14][:4], b"fffffffe", *fields[17:]])
    assert [scorer.ids([strange])[0, k] for k in (0, 13, 14, 15)] == [0, 0, 0, 0]


def spoiled(row):
    """A good row and others that differ from it in a few bytes; most are bad."""
    fields = row.split(b"\t")
    for at, more in itertools.product(
        (0, 1, 13, 14, len(fields) - 1), (b"\0", b"\r", b" ", b"-", b"g", b"1234567", b"\xff", b"\t")
    ):
        for field in (fields[at] + more, more + fields[at], more):
            yield b"\t".join([*fields[:at], field, *fields[at + 1 :]])
    yield from (row, row + b"\r\r", row.replace(b"\t", b"\x01", 1), row.replace(b"\t", b"", 1), b"")


def refusal(call, *arguments):
    """What an error says, or nothing."""
    try:
        call(*arguments)
    except ExperimentError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("labelled", [True, False])
def test_lines_are_good_or_bad_together_as_they_are_alone(criteo, kept_model, labelled):
    scorer = Scorer(kept_model, criteo.folder)
    good = [row.encode().split(b"\t", not labelled)[-1] for row in tiny.criteo_rows()[:9]]
    scorer.ids(good, labelled=labelled)  # their fields are at hand
    lines = list(spoiled(good[4]))
    alone = [refusal(checked_row, line, 17, labelled) for line in lines]
    assert [refusal(scorer.ids, [*good, line, *good], 8, labelled) for line in lines] == alone
    accepted = [line for line, told in zip(lines, alone, strict=True) if not told]
    assert 9 < len(accepted) < len(lines) // 2
    together = scorer.ids(accepted, 2, labelled)
    assert together.tolist() == [scorer.ids([line], 2, labelled)[0].tolist() for line in accepted]


def test_one_call_at_a_time_uses_what_a_scorer_keeps(criteo, kept_model, monkeypatch):
    """Threads that wrote to the same memory got wrong scores."""
    scorer, held = Scorer(kept_model, criteo.folder), []
    for keeper, name in ((scorer, "served"), (scorer.at_hand, "find"), (scorer.at_hand, "keep")):
        real = getattr(keeper, name)

        def watched(*given, real=real):
            held.append(scorer.lock.locked())
            return real(*given)

        monkeypatch.setattr(keeper, name, watched)
    rows = [row.encode() for row in tiny.criteo_rows()[:3]]
    scorer.scores(rows[:2])
    scorer.ids(rows)
    assert held == [True] * 5
    with pytest.raises(ExperimentError):
        scorer.scores([b"bad"])
    assert not scorer.lock.locked()


def test_scoring_needs_the_maps_and_no_rows(criteo, kept_model, tmp_path):
    rows = [row.encode() for row in tiny.criteo_rows()[:5]]
    expected = Scorer(kept_model, criteo.folder).scores(rows)
    for path in criteo.folder.iterdir():
        if path.suffix != ".parquet":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert not list(tmp_path.glob("*.parquet"))
    assert Scorer(kept_model, tmp_path).scores(rows) == expected
    with pytest.raises(ExperimentError, match=r"train.parquet is missing, damaged or cut short"):
        Prepared.open(tmp_path)


def test_raw_rows_are_scored_from_standard_input(criteo, kept_model):
    rows = tiny.criteo_rows()[:50]
    scorer = Scorer(kept_model, criteo.folder)
    arguments = ("click-through", "score", "--checkpoint", kept_model, "--data", criteo.folder, "--batch", 7)
    without_labels = [row.split("\t", 1)[1] for row in rows]
    ids = next(criteo.in_order(settings(batch=50), "train"))["ids"]
    expected = scorer.model(ids).sigmoid().tolist()
    for lines in (rows, without_labels):
        code, out, err = run_command(*arguments, input="\n".join(lines))
        assert (code, err) == (0, "")
        assert list(map(float, out.split())) == pytest.approx(expected, abs=1e-5)
    code, out, err = run_command(*arguments, input="\n".join([*without_labels[:20], rows[0]]))
    assert (code, len(out.split())) == (2, 20)
    assert err == (
        "error: standard input, line 21: 40 fields; line 1 has 39, without a label, and all lines must be alike.\n"
    )


def test_rows_have_labels_where_the_first_line_has_one():
    row = tiny.criteo_rows()[0].encode()
    without_label, one_field_less = row.split(b"\t", 1)[1], row.rsplit(b"\t", 1)[0]
    assert has_label(row)
    assert not has_label(without_label)
    assert checked_row(row + b"\r", 2) == row.decode()
    assert checked_row(without_label, 2, labelled=False) == without_label.decode()
    for line, fields in ((one_field_less, 39), (without_label, 39), (row + b"\t1", 41)):
        with pytest.raises(ExperimentError, match=f"line 2: {fields} fields; line 1 has 40, with a label"):
            checked_row(line, 2)
    for line, fields in ((row, 40), (without_label.rsplit(b"\t", 1)[0], 38)):
        with pytest.raises(ExperimentError, match=f"line 2: {fields} fields; line 1 has 39, without a label"):
            checked_row(line, 2, labelled=False)
    with pytest.raises(ExperimentError, match="line 1: 41 fields; 40 are needed, tabs between: a label"):
        checked_row(row + b"\t1", 1, has_label(row + b"\t1"))
    with pytest.raises(ExperimentError, match="line 3: I1 is 'x'; a whole number"):
        checked_row(b"x" + without_label[without_label.index(b"\t") :], 3, labelled=False)


def test_maps_of_another_data_set_are_refused(criteo, kept_model, tmp_path):
    (tmp_path / "raw.txt").write_text("\n".join(tiny.criteo_rows(seed=9)))
    other = Preparation(str(tmp_path / "raw.txt"), tmp_path / "out", least=1).run()
    with pytest.raises(ExperimentError, match="has the maps of another data set than"):
        Scorer(kept_model, other.folder)


def test_maps_that_are_not_those_that_were_written_are_refused(criteo, kept_model, tmp_path):
    for path in criteo.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (c1, _), (c2, codes) = (map_files(tmp_path, feature) for feature in ("C1", "C2"))
    whole = {path: path.read_bytes() for path in (c1, c2, codes)}
    c1.write_bytes(whole[c2])
    c2.write_bytes(whole[c1])
    with pytest.raises(ExperimentError, match=r"are not those that were written.*copy the --data of the run anew"):
        Scorer(kept_model, tmp_path)
    c1.write_bytes(whole[c1])
    c2.write_bytes(whole[c2])
    Scorer(kept_model, tmp_path)
    for size in (len(whole[codes]) - 1, 100, 3, 0):
        codes.write_bytes(whole[codes][:size])
        with pytest.raises(ExperimentError, match=r"C2.codes.npy is missing, damaged or cut short: "):
            Scorer(kept_model, tmp_path)
    codes.unlink()
    with pytest.raises(ExperimentError, match=r"C2.codes.npy is missing, damaged or cut short: "):
        Scorer(kept_model, tmp_path)


def test_lines_come_as_they_are_there():
    into, out = os.pipe()
    blocks = blocks_of_lines(into)
    os.write(out, b"a\nb\nc")
    assert next(blocks) == [b"a", b"b"]
    os.write(out, b"d\n")
    assert next(blocks) == [b"cd"]
    os.write(out, b"last")
    os.close(out)
    assert list(blocks) == [[b"last"]]
    os.close(into)


def test_rows_are_configured_and_commands_are_there():
    for name in row_names(TASK):
        assert configured(TASK, name, {}).row.lower() == name.split("-", 2)[-1]
    code, out, _ = run_command("click-through", "prepare", "--help")
    assert code == 0
    assert "--on-bad-row" in out
