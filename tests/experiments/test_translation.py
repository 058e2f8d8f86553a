"""English to German: the model against transformers' own, the paper's sizes, training and translations."""

import json
import math
import re

import pytest
import small_files as tiny
import torch
import torch.nn.functional as F
from laboratory import assert_two_processes_trained_as_one, in_two_processes, killed, needs_gloo
from typer.testing import CliRunner

pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from translators import FULL, SIZE, SOURCE, TARGET, TASK, TRAIN, model_of, settings

from experiments.__main__ import app
from experiments.lab.errors import ExperimentError
from experiments.lab.report.summary import summarise
from experiments.lab.rows import Bench, configured, plan, row_names
from experiments.lab.settings import How
from experiments.lab.task import tables
from experiments.lab.training import Training
from experiments.lab.training import train as train_task
from experiments.tasks.translation import commands
from experiments.tasks.translation.bleu import bleu, signature
from experiments.tasks.translation.model import END, PAD, Translator
from experiments.tasks.translation.tokens import trained_tokenizer


@pytest.fixture
def how(multi30k, tmp_path):
    return lambda **options: How(**{"data": multi30k, "out": tmp_path / "out", **options})


# Model


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


def test_rows_differ_in_their_table_alone():
    def body(**table):
        tensors = model_of(**table).state_dict()
        return {name: tensor for name, tensor in tensors.items() if ".layers." in name}

    expected = body(**FULL)
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


# Training


def train(row, how):
    return train_task(TASK, row, how)


def test_bleu_is_of_all_sentences_in_their_order(multi30k, how):
    """With a model that writes each target for its source, whatever the order of the batches."""
    pytest.importorskip("sacrebleu")
    assert bleu(["a b c d e"] * 2, ["a b c d e"] * 2) == pytest.approx(100)
    assert signature().startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    row = settings()
    trainer = Training(TASK, row, how(), TASK.load(row, multi30k))
    pairs = trainer.data.splits["validation"]
    known = {tuple(row): number for number, row in enumerate(pairs.batch(torch.arange(12))["source"].tolist())}
    longest = pairs.source.lengths.max()

    asked = set()

    def write(source, beams):
        asked.add(beams)
        wide = F.pad(source, (0, longest - source.shape[1]), value=PAD)
        numbers = torch.tensor([known[tuple(row)] for row in wide.tolist()])
        return pairs.target.take(numbers).clamp(min=END)

    trainer.plain.translated = write
    figures = trainer.evaluate("validation")
    assert figures["BLEU"] == pytest.approx(bleu(pairs.references, pairs.references))
    with torch.no_grad():
        whole = pairs.batch(torch.arange(12))
        expected = trainer.plain.eval()(whole["source"], whole["target"]).item() / len(pairs.target.tokens)
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)
    assert asked == {row.validation_beam} == {1}
    assert trainer.evaluate("newstest") == {}


def test_test_sets_are_translated_by_as_many_beams_as_the_row_says(multi30k, how, monkeypatch):
    pytest.importorskip("sacrebleu")
    trainer = Training(TASK, settings(beam=3), how(), TASK.load(settings(), multi30k))
    asked, real = set(), trainer.plain.translated
    monkeypatch.setattr(trainer.plain, "translated", lambda source, beams: asked.add(beams) or real(source, beams))
    trainer.evaluate("test")
    assert asked == {3}


@pytest.fixture
def trained_model(how):
    """A run with a train for its table that has learned some of its few words, and its folder."""
    pytest.importorskip("sacrebleu")
    row = settings(dim=32, heads=4, inner=64, steps=60, lr=0.01, schedule="constant", warm_up=0.1, batch=600, **TRAIN)
    record = train(row, how(keep_model=True))
    return record, how().out / "translation" / f"multi30k-{row.row}-0"


def test_a_run_learns_tells_and_leaves_a_model_that_translates(trained_model, monkeypatch):
    record, folder = trained_model
    json.dumps(record)
    assert record["val_loss"] < math.log(280) / 3  # of the tokens alone
    assert record["signature"] == signature()
    for split in TASK.tests:
        assert 1 < record[f"{split}_BLEU"] <= 100
    assert record["ratio"] == pytest.approx(280 * 32 / record["table_parameters"])

    def translate(text, *options):
        arguments = ["translation", "translate", "--checkpoint", str(folder), *options]
        return CliRunner().invoke(app, arguments, input=text)

    done = translate("a dog\n\nthe big man sees\n")
    assert done.exit_code == 0, done.exception
    lines = done.stdout.split("\n")
    assert len(lines) == 4
    assert lines[1] == lines[3] == ""
    assert "translating" in done.stderr
    assert re.search(r"3 lines in \d+\.\d s, [\d.,]+ a second", done.stderr)
    monkeypatch.setattr(commands, "_BLOCK", 2)  # lines of a later block are translated as those of the first one
    assert translate("a dog\n\nthe big man sees\na dog\n").stdout.split("\n") == [*lines[:3], lines[0], ""]
    asked, real = [], Translator.translated
    monkeypatch.setattr(
        Translator,
        "translated",
        lambda model, source, beams, left: asked.append(beams) or real(model, source, beams, left),
    )
    assert translate("the big man sees").stdout.splitlines() == [lines[2]]
    translate("the big man sees", "--beam", "2")
    assert asked == [4, 2]
    of_nothing = translate("")
    assert (of_nothing.exit_code, of_nothing.stdout) == (0, "")
    assert "standard input, line 2: not UTF-8" in str(translate(b"a\n\xff\n").exception)
    assert "standard input, line 2: a sentence of" in str(translate("a\n" + tiny.LONG).exception)

    content = torch.load(folder / "model.pt", weights_only=True)
    content["best"]["tokenizer"] = tensor_of(trained_tokenizer(["a dog"], 257))
    torch.save(content, folder / "model.pt")
    told = str(translate("a").exception)
    assert "has a tokeniser of another vocabulary: it knows 257 tokens, and the model's table has 280 rows" in told
    content["best"] = {}
    torch.save(content, folder / "model.pt")
    assert "has no model yet" in str(translate("a").exception)


def test_losses_by_frequency_are_those_of_the_validation(trained_model, multi30k):
    record, folder = trained_model

    def by_frequency(*folders):
        models = [f"--checkpoint={folder}" for folder in folders]
        return CliRunner().invoke(app, ["translation", "by-frequency", *models, "--data", str(multi30k)])

    done = by_frequency(folder, folder)
    assert done.exit_code == 0, done.exception
    lines = re.findall(r"([\d,]+) to ([\d,]+)\D+(\d+) %\D+([\d.]+)\D+([\d.]+)", done.stdout)
    *parts, whole = [[float(number.replace(",", "")) for number in line] for line in lines]
    assert [first - 1 for first, *_ in parts] == [0, *(end for _, end, *_ in parts[:-1])]
    assert sum(share for _, _, share, *_ in parts) == pytest.approx(100, abs=3)
    assert whole[2:] == [100, *[pytest.approx(record["val_loss"], abs=0.006)] * 2]
    assert sum(share * loss for _, _, share, loss, _ in parts) / 100 == pytest.approx(whole[3], abs=0.05)

    other = folder.parent / "other"
    other.mkdir()
    translated_by_untrained(other)
    assert "compare models of one dataset and vocabulary" in str(by_frequency(folder, other).exception)


def translated_by_untrained(folder, without="", wrong=(), **options):
    """What became of the command ``translate`` with a model that was drawn at random.

    It may lack a tensor, and may tell wrong settings.
    """
    words = trained_tokenizer(["a dog"], 280)
    row = settings(**FULL, **options)
    tensors = Translator(row, words.get_vocab_size(), words.to_str()).state_dict()
    kept = {name: tensor for name, tensor in tensors.items() if name != without}
    told = {"task": "translation", **row.as_record(), **dict(wrong)}
    torch.save({"settings": told, "best": kept}, folder / "model.pt")
    return CliRunner().invoke(app, ["translation", "translate", "--checkpoint", str(folder)], input="a dog")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lines_are_translated_in_the_precision_of_the_test_sets(precision, tmp_path, monkeypatch):
    seen, real = [], Translator.translated

    def translated(model, *given):
        seen.append(torch.is_autocast_enabled("cpu"))
        return real(model, *given)

    monkeypatch.setattr(Translator, "translated", translated)
    assert translated_by_untrained(tmp_path, precision=precision).exit_code == 0
    assert seen == [precision == "bf16"]


@pytest.mark.parametrize("name", ["marian.final_logits_bias", "marian.model.encoder.layers.0.fc1.weight"])
def test_a_model_that_lacks_a_tensor_is_refused_in_a_sentence(name, tmp_path):
    refused = translated_by_untrained(tmp_path, without=name).exception
    assert isinstance(refused, ExperimentError)
    assert f'is damaged: Missing key(s) in state_dict: "{name}". Train it anew' in str(refused)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"inner": 10**9}, " is damaged: size mismatch for marian"),
        ({"format": "tt", "rank": 10**6}, " is damaged: Missing key"),
        ({"format": "lr", "ratio": 1e9}, " is damaged: its settings describe no model: .*ratio=1e"),
        ({"layers": 10**9}, "layers=1000000000: it must be at least 1 and below 1000"),
    ],
)
def test_settings_of_another_size_than_the_tensors_are_refused_before_a_model_is_built(wrong, told, tmp_path):
    """One of rank 9,999 was built first, which took minutes and gigabytes."""
    refused = translated_by_untrained(tmp_path, wrong=wrong).exception
    assert isinstance(refused, ExperimentError)
    assert re.search(told, str(refused))


def test_a_ratio_that_the_tokens_of_the_texts_do_not_allow_is_refused_in_a_sentence(multi30k, how):
    row = settings(vocabulary=1000, dim=256, format="lr", ratio=190.0)
    TASK.check_tables(row)  # with 1,000 tokens it is allowed
    with pytest.raises(ExperimentError, match=r"multi30k full.*: ratio=190 .* table of 3\d\d x 256"):
        train(row, how())


def tensor_of(tokenizer):
    return torch.tensor(list(tokenizer.to_str().encode()), dtype=torch.uint8)


def test_a_killed_run_goes_on_bit_for_bit_and_only_with_its_own_vocabulary(how, multi30k, tmp_path, monkeypatch):
    pytest.importorskip("sacrebleu")
    row = settings(dropout=0.1, validations=1, **TRAIN)

    def figures(record):
        return [(epoch["train_loss"], epoch["val_loss"], epoch["val_BLEU"]) for epoch in record["epochs"]]

    whole = figures(train(row, how(out=tmp_path / "whole")))
    with killed(monkeypatch, lambda _, made: made == 4):
        train(row, how(checkpoint_steps=1))
    untouched = (multi30k / "multi30k" / "train.en.gz").read_bytes()
    tiny.change_lines(multi30k / "multi30k" / "train.en.gz", lambda lines: [line + b" zebra" for line in lines])
    with pytest.raises(ExperimentError, match=r"was made with other data: .*'vocabulary': \[280, .* now "):
        train(row, how(resume=True))
    (multi30k / "multi30k" / "train.en.gz").write_bytes(untouched)
    assert figures(train(row, how(resume=True))) == whole


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("more", [("--accumulate", "2"), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_two_processes_train_and_translate_as_one_does(multi30k, how, tmp_path, more):
    pytest.importorskip("sacrebleu")
    named = {"dataset": "multi30k", "row": "tiny", **TRAIN}
    config = tiny.row(tmp_path / "row.toml", "", **{**SIZE, **named})
    one = train(configured(TASK, str(config), {}), how())
    two = in_two_processes("translation", config, multi30k, tmp_path / "two", *more)
    assert_two_processes_trained_as_one(two, one)
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-4)
    assert two["test_BLEU"] == pytest.approx(one["test_BLEU"], abs=1e-6)
