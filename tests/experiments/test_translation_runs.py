"""English to German: training, scores, and what is done with a trained model."""

import json
import math
import re
import types

import pytest
import small_files as tiny
import torch
import torch.nn.functional as F
from laboratory import assert_two_processes_trained_as_one, in_two_processes, killed, needs_gloo
from typer.testing import CliRunner

pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from translators import FULL, SIZE, TASK, TRAIN, settings

from experiments.__main__ import app
from experiments.lab.errors import ExperimentError
from experiments.lab.metrics import Evaluation
from experiments.lab.rows import configured
from experiments.lab.settings import How
from experiments.lab.training import Training
from experiments.lab.training import train as train_task
from experiments.tasks.translation import commands
from experiments.tasks.translation.bleu import bleu, signature
from experiments.tasks.translation.model import END, PAD, Translator
from experiments.tasks.translation.tokens import trained_tokenizer


@pytest.fixture
def how(multi30k, tmp_path):
    return lambda **options: How(**{"data": multi30k, "out": tmp_path / "out", **options})


def train(row, how):
    return train_task(TASK, row, how)


@pytest.fixture
def knowing(multi30k, how):
    """A run whose model writes each target for its source, and by how many beams it was asked to."""
    pytest.importorskip("sacrebleu")
    trainer = Training(TASK, settings(), how(), TASK.load(settings(), multi30k))
    pairs, asked = trainer.data.splits["validation"], set()
    known = {tuple(row): number for number, row in enumerate(pairs.batch(torch.arange(12))["source"].tolist())}
    longest = pairs.source.lengths.max()

    def write(source, beams):
        asked.add(beams)
        wide = F.pad(source, (0, longest - source.shape[1]), value=PAD)
        numbers = torch.tensor([known[tuple(row)] for row in wide.tolist()])
        return pairs.target.take(numbers).clamp(min=END)

    trainer.plain.translated = write
    return trainer, pairs, asked


def test_bleu_is_of_all_sentences_in_their_order(knowing):
    """Whatever the order of the batches."""
    trainer, pairs, asked = knowing
    assert bleu(["a b c d e"] * 2, ["a b c d e"] * 2) == pytest.approx(100)
    assert signature().startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    figures = trainer.evaluate("validation")
    assert figures["BLEU"] == pytest.approx(bleu(pairs.references, pairs.references))
    with torch.no_grad():
        whole = pairs.batch(torch.arange(12))
        expected = trainer.plain.eval()(whole["source"], whole["target"]).item() / len(pairs.target.tokens)
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)
    assert asked == {settings().validation_beam} == {1}
    assert trainer.evaluate("newstest") == {}


def test_two_processes_score_all_sentences_together(knowing, monkeypatch):
    """The second one tells what it has before the first one does."""
    trainer, pairs, _ = knowing
    expected = trainer.evaluate("validation")
    sums, written = [], []

    def summed(mine, _):
        sums.append(mine)
        return sum(sums)

    def gathered(mine):
        written.insert(0, mine)
        return [pair for of_process in written for pair in of_process]

    monkeypatch.setattr("accelerate.utils.gather_object", gathered)
    monkeypatch.setattr("experiments.tasks.translation.bleu.bleu", lambda texts, _: texts)
    for process in (1, 0):
        place = types.SimpleNamespace(process_index=process, num_processes=2, device=torch.device("cpu"), reduce=summed)
        with torch.no_grad():
            figures = TASK.evaluate(Evaluation(trainer.plain, settings(), place), trainer.data, "validation")
    assert figures == {"loss": pytest.approx(expected["loss"], rel=1e-5), "BLEU": list(pairs.references)}
    assert all(written)


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


def test_a_run_learns_tells_and_leaves_a_model_that_translates(capsys, trained_model, monkeypatch):
    record, folder = trained_model
    assert f"BLEU is that of SacreBLEU, {signature()}" in capsys.readouterr().out
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
    assert translate("\ufeffthe big man sees\r\n").stdout.splitlines() == [lines[2]]  # as some systems write texts
    of_nothing = translate("")
    assert (of_nothing.exit_code, of_nothing.stdout) == (0, "")
    assert "standard input, line 2: not UTF-8" in str(translate(b"a\n\xff\n").exception)
    assert "standard input, line 2: a sentence of" in str(translate("a\n" + tiny.LONG).exception)

    with monkeypatch.context() as closed:
        closed.setattr("sys.stdin", None)
        with pytest.raises(ExperimentError, match="standard input is closed"):
            commands.translate(folder)
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_by_frequency_are_in_the_precision_of_the_validation(precision, multi30k, tmp_path, monkeypatch):
    seen, real = [], Translator.loss

    def loss(model, *given, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        return real(model, *given, **options)

    monkeypatch.setattr(Translator, "loss", loss)
    translated_by_untrained(tmp_path, precision=precision)
    options = ["--checkpoint", str(tmp_path), "--data", str(multi30k)]
    done = CliRunner().invoke(app, ["translation", "by-frequency", *options])
    assert done.exit_code == 0, done.exception
    assert set(seen) == {precision == "bf16"}


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
    with pytest.raises(ExperimentError, match=r"was made with other data: train .*; vocabulary \[280, \d+\], now \["):
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
