"""English to German: the model against transformers' own, its rows and the paper's sizes."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from translators import FULL, SOURCE, TARGET, TASK, TRAIN, model_of, settings

from experiments.lab.errors import ExperimentError
from experiments.lab.report.summary import summarise
from experiments.lab.rows import Bench, configured, plan, row_names
from experiments.lab.task import tables
from experiments.tasks.translation.model import END, PAD, Translator


@pytest.mark.parametrize("table", [FULL, TRAIN], ids=["full", "tt"])
@pytest.mark.parametrize("training", [False, True])
def test_the_loss_is_that_of_the_logits_of_transformers_and_no_logits_are_made(table, training, monkeypatch):
    model = model_of(**table).train(training)
    source = torch.where(SOURCE == PAD, END, SOURCE)
    before = torch.tensor([[END, 11, 12, END, END], [END, 13, END, END, END], [END, 14, 15, 16, 17]])
    logits = model.marian(input_ids=source, attention_mask=SOURCE != PAD, decoder_input_ids=before).logits
    smoothing = 0.1 if training else 0.0
    expected = F.cross_entropy(
        logits.flatten(0, 1), TARGET.flatten(), ignore_index=PAD, label_smoothing=smoothing, reduction="sum"
    )
    monkeypatch.setattr(type(model.marian), "forward", None)  # which would make them
    torch.testing.assert_close(model(SOURCE, TARGET), expected, rtol=1e-5, atol=1e-5)


def test_dropout_is_where_marian_has_its_own(monkeypatch):
    def shifted(x, p, training=True, inplace=False):
        return x + p if training else x  # drops nothing: the same wherever it is

    monkeypatch.setattr(F, "dropout", shifted)
    monkeypatch.setattr("experiments.tasks.translation.model.dropout", shifted)
    ours, theirs, without = model_of(layers=2, dropout=0.3), model_of(layers=2), model_of(layers=2)
    for layer in theirs.marian.modules():
        if hasattr(layer, "dropout") and "Attention" not in type(layer).__name__:  # of attentions is none
            layer.dropout = 0.3
    assert ours.marian.config.attention_dropout == ours.marian.config.activation_dropout == 0
    for training in (True, False):
        mine, expected, plain = (model.train(training)(SOURCE, TARGET).item() for model in (ours, theirs, without))
        assert mine == pytest.approx(expected, rel=1e-6)
        assert (mine != pytest.approx(plain, rel=1e-4)) == training


def test_what_layers_add_is_born_smaller_than_what_they_are_added_to():
    model = model_of(layers=2, dim=64, heads=2, inner=128)
    deviations = {name: float(p.detach().std()) * 64**0.5 for name, p in model.named_parameters() if p.dim() == 2}
    adding = {name for name in deviations if name.endswith(("out_proj.weight", "fc2.weight"))}
    assert len(adding) == 2 * (2 + 3)
    for name, deviation in deviations.items():
        if "embed_positions" not in name:
            assert deviation == pytest.approx(0.5 if name in adding else 1, rel=0.05), name


def test_plain_and_fused_attention_agree(monkeypatch):
    def figures(has_accelerator):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
        model = model_of(layers=2)
        assert model.marian.config._attn_implementation == ("sdpa" if has_accelerator else "eager")
        loss = model(SOURCE, TARGET)
        loss.backward()
        with torch.no_grad():
            written = model(SOURCE, beams=3)
        return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None], written

    torch.testing.assert_close(figures(False), figures(True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("table", [FULL, TRAIN], ids=["full", "tt"])
def test_padding_changes_neither_loss_nor_gradients_nor_translations(table):
    model = model_of(**table)

    def losses_and_gradients(*pairs):
        model.zero_grad()
        loss = sum(model(*pair) for pair in pairs)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    rows = zip(SOURCE, TARGET, strict=True)
    alone = [(source[source != PAD][None], target[target != PAD][None]) for source, target in rows]
    wider = (F.pad(SOURCE, (0, 3), value=PAD), F.pad(TARGET, (0, 2), value=PAD))
    expected = losses_and_gradients(*alone)
    torch.testing.assert_close(losses_and_gradients((SOURCE, TARGET)), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses_and_gradients(wider), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for together, (source, _) in zip(model(SOURCE, beams=3).tolist(), alone, strict=True):
            single = model(source, beams=3)[0].tolist()
            shorter = min(len(together), len(single))  # one beside longer sources may grow longer
            assert together[:shorter] == single[:shorter]


TABLES = (".shared.", ".embed_tokens.", ".lm_head.")


def test_rows_differ_in_their_table_alone():
    def body(**table):
        tensors = model_of(**table).state_dict()
        return {name: tensor for name, tensor in tensors.items() if not any(table in name for table in TABLES)}

    expected = body(**FULL)
    assert {"marian.final_logits_bias", "marian.model.encoder.embed_positions.weight"} < expected.keys()
    for table in (TRAIN, {"format": "lr", "ratio": 2.0}, {"format": "bands", "ratio": 2.0}):
        torch.testing.assert_close(body(**table), expected, rtol=0, atol=0)


# Millions of parameters and ratios in the paper's table; its trains are two, ours is one of their size.
PAPER = {
    "full": (210, 1.0),
    "LR1": (179, 15.5),
    "LR2": (178, 31.0),
    "LR3": (177, 62.0),
    "TT1": (179, 15.3),
    "TT2": (178, 26.8),
    "TT3": (177, 58.5),
}


def on_meta(chosen):
    with torch.device("meta"):
        return Translator(chosen, chosen.vocabulary)


@pytest.mark.parametrize("row", PAPER)
def test_the_paper_has_so_many_parameters(row):
    model = on_meta(configured(TASK, f"wmt14-{row}", {}))
    millions, ratio = PAPER[row]
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert TASK.ratio(model) == pytest.approx(ratio, rel=0.015)


@pytest.mark.parametrize("row", [name for name in row_names(TASK) if name.startswith("multi30k")])
def test_a_ratio_is_that_of_the_full_table_to_all_stored_numbers(row):
    chosen = configured(TASK, row, {})
    model = on_meta(chosen)
    full = sum(p.numel() for p in on_meta(configured(TASK, "multi30k-full", {})).parameters())
    stored = chosen.vocabulary * chosen.dim - (full - sum(p.numel() for p in model.parameters()))
    if "rounded" in row:  # four numbers of 8 bits take the room of one; scales come on top
        assert 0.98 < TASK.ratio(model) / (4 * chosen.vocabulary * chosen.dim / stored) < 1
    else:
        assert TASK.ratio(model) == pytest.approx(chosen.vocabulary * chosen.dim / stored)
    assert len(tables(model)) == 1
    asked = float("".join(filter(str.isdigit, chosen.row)) or 1)
    assert asked <= TASK.ratio(model) < 1.06 * asked


def test_every_row_can_be_made_and_every_row_of_the_small_size_is_run():
    for row in row_names(TASK):
        TASK.check_tables(configured(TASK, row, {}))
    planned = {f"{dataset}-{row}".lower() for dataset, row, _ in plan(TASK).runs}
    assert planned == {name for name in row_names(TASK) if name.startswith("multi30k")}


def test_rows_of_the_papers_size_stand_beside_the_papers_figures(tmp_path):
    """No sweep runs them, and their dataset has one test set."""
    bench = Bench(TASK, tmp_path)

    def line(row):
        chosen = configured(TASK, f"wmt14-{row}", {})
        absent = {f"{split}_BLEU": None for split in TASK.tests[1:]}
        figures = {"ratio": 15.3, "total_parameters": 1, "overhead": 0.0, "test_BLEU": 27.0, "val_BLEU": 25.0}
        return {**chosen.as_line("translation"), **figures, **absent, "epochs": [{"val_BLEU": 25.0}]}

    lines = [line("full"), line("tt1")]
    entries = summarise(bench, bench.in_tables(lines)).tables["wmt14"]
    assert [(entry.row, entry.mean, entry.paper, dict(entry.more)) for entry in entries] == [
        ("full", 27.0, 28.84, {}),
        ("TT1", 27.0, 28.53, {}),
    ]
    lines[1]["test_BLEU"] = None
    with pytest.raises(ExperimentError, match=r"wmt14 TT1 seed 0\): test_BLEU missing or wrong"):
        summarise(bench, lines)


def test_a_run_has_its_epochs_of_batches_and_decays_weights_of_the_body_alone(multi30k):
    row = settings(steps=None, epochs=3)
    data = TASK.load(row, multi30k)
    batches = TASK.batches(row, data)
    assert batches.ends[-1] == 3 * len(data.splits["train"].batches(row.batch))
    model = TASK.model(settings(**TRAIN), data)
    decayed, kept = TASK.parameters(row, model)
    assert "weight_decay" not in decayed
    assert kept["weight_decay"] == 0
    names = {id(param): name for name, param in model.named_parameters()}
    assert {names[id(param)].rpartition(".")[2] for param in decayed["params"]} == {"weight"}
    assert not any("norm" in names[id(param)] or "core" in names[id(param)] for param in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names)
