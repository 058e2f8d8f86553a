"""Source code: a corpus determined by the files, models that differ in two tables only, a page that stands alone."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("accelerate")

import tensorbed as tb
from experiments.__main__ import app
from experiments.lab.batches import Windows, lanes_of
from experiments.lab.errors import ExperimentError
from experiments.lab.optimisers import pace
from experiments.lab.rows import configured
from experiments.lab.task import find
from experiments.lab.training import How, Training
from experiments.lab.words import UNKNOWN, choose_words
from experiments.tasks.source_code.corpus import read_corpus, source_files, tokenize
from experiments.tasks.source_code.demo import ROWS as DEMO
from experiments.tasks.source_code.demo import run_all, seen, written
from experiments.tasks.source_code.model import LanguageModel

TASK = find("source_code")
ROWS = [row.removeprefix("python-") for row in DEMO]


def settings(row="full", **options):
    return configured(TASK, f"python-{row}", {"dim": 8, "batch": 4, "vocabulary": 50, "steps": 8, **options})


@pytest.fixture
def folder(sources):
    return sources


@pytest.fixture
def corpus(folder):
    return read_corpus(folder, 50)


def model_of(row, corpus, seed=3):
    torch.manual_seed(seed)
    return LanguageModel(settings(row), corpus.log_frequencies())


# Corpus


@given(st.text())
def test_tokens_keep_every_character_that_is_not_space_and_every_line(text):
    joined = "".join(tokenize(text))
    assert "".join(joined.split()) == "".join(text.split())
    assert joined.count("\n") == text.count("\n")


@given(st.lists(st.from_regex(r"[ \t]*[a-z_]+", fullmatch=True)))
def test_tokens_keep_indents(lines):
    text = "".join("\n" + line for line in lines)
    assert "".join(tokenize(text)) == text


def test_tokens_are_words_numbers_operators_and_line_ends():
    found = tokenize("if x1 >= 0.5e3:\n    y **= -2  # größer")
    assert found == ["if", "x1", ">=", "0.5e3", ":", "\n    ", "y", "**", "=", "-", "2", "#", "größer"]


def test_files_are_in_order_and_tests_and_machine_made_ones_left_out(folder):
    assert [path.name for path in source_files(folder)] == [f"file_{k:02}.py" for k in range(40)]


def test_words_are_by_frequency_then_by_themselves():
    assert choose_words({"b": 2, "c": 2, "a": 1, "d": 7, "e": 1}, 5) == (UNKNOWN, "d", "b", "c", "a")


def test_words_of_a_corpus_descend_in_frequency(corpus):
    counts = torch.bincount(corpus.train, minlength=len(corpus.words)).tolist()[1:]
    assert len(set(corpus.words)) == len(corpus.words)
    for (one, n), (next_, m) in pairwise(zip(corpus.words[1:], counts, strict=True)):
        assert (-n, one) < (-m, next_)


def test_streams_spell_the_files_of_their_split(folder, corpus):
    files = source_files(folder)
    for stream, paths in (
        (corpus.valid, files[::20]),
        (corpus.train, [path for k, path in enumerate(files) if k % 20]),
    ):
        expected = [token for path in paths for token in tokenize(path.read_text())]
        known = set(corpus.words)
        assert [corpus.words[k] for k in stream] == [word if word in known else UNKNOWN for word in expected]


def test_words_seen_in_validation_only_are_unknown(folder):
    words = read_corpus(folder, 10_000).words
    assert "only_in_00" not in words
    assert "only_in_01" in words


def test_corpus_is_the_same_twice(folder, corpus):
    again = read_corpus(folder, 50)
    assert again.words == corpus.words
    assert torch.equal(again.train, corpus.train)
    assert torch.equal(again.valid, corpus.valid)


def test_every_file_is_read_once(folder, monkeypatch):
    read = []
    original = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: read.append(path) or original(path, **how))
    read_corpus(folder, 50)
    assert read == source_files(folder)


def test_bytes_that_are_not_utf8_are_passed_over(folder):
    (folder / "file_01.py").write_bytes(b"caf\xe9 = 1\n" * 1000)
    assert "caf" in read_corpus(folder, 50).words


# Models and batches


def without_tables(model):
    """Everything but the two tables; the head's bias is no part of its table."""
    tables = {f"{end}.{name}" for end in ("embedding", "head") for name in getattr(model, end).params()}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tables}


def test_models_differ_in_the_tables_only(corpus):
    bodies = [without_tables(model_of(row, corpus)) for row in ROWS]
    assert any(name.startswith("recurrent.") for name in bodies[0])
    assert torch.equal(bodies[0]["head.bias"], corpus.log_frequencies())
    for body in bodies[1:]:
        assert body.keys() == bodies[0].keys()
        assert all(torch.equal(body[name], tensor) for name, tensor in bodies[0].items())


@pytest.mark.parametrize("row", ROWS)
def test_both_ends_have_the_format_and_are_born_with_their_spread(row, corpus):
    model, told = model_of(row, corpus), settings(row)
    expected = tb.Embedding(len(corpus.words), 8, told.table_format(len(corpus.words), 8)).structure
    assert model.embedding.structure == model.head.structure == expected
    for end, std in ((model.embedding, told.std), (model.head, told.head_std)):
        assert end.weight.square().mean().sqrt().item() == pytest.approx(std, rel=1e-3)


def test_the_models_see_the_same_batches(corpus, monkeypatch):
    heard = {row: [] for row in ROWS}
    real = LanguageModel.forward
    for row in ROWS:
        listen = heard[row].append
        monkeypatch.setattr(
            LanguageModel, "forward", lambda self, *given, listen=listen: listen(given[:2]) or real(self, *given)
        )
        run_all(TASK, [settings(row, steps=3)], corpus)
    for other in heard.values():
        assert len(other) == 3 + 3  # steps and validations
        assert all(
            torch.equal(a, b) for x, y in zip(other, heard["full"], strict=True) for a, b in zip(x, y, strict=True)
        )


def test_pace_rises_then_falls():
    shares = [pace("cosine", step, 100, 0.1) for step in range(100)]
    top = shares.index(max(shares))
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert shares[top:] == sorted(shares[top:], reverse=True)
    assert min(shares) > 0
    assert max(shares) <= 1


# Loss and perplexity


@pytest.mark.parametrize("row", ROWS)
def test_a_step_has_the_cross_entropy_over_all_words_and_moves_everything(row, corpus):
    run = Training(TASK, settings(row, optimizer="sgd", lr=1.0, warm_up=0.0), How(), corpus)
    batch = next(run.source.batches(0))
    model = run.plain
    logits = F.linear(model.hidden(batch["words"].T)[0], model.head.weight, model.head.bias)
    expected = F.cross_entropy(logits.flatten(0, 1), batch["following"].T.flatten(), reduction="sum").item()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert run.step(batch) == pytest.approx(expected, rel=1e-5)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_state_goes_on_from_window_to_window_and_gradients_do_not(corpus):
    run = Training(TASK, settings(window=4), How(), corpus)
    batches = Windows(lanes_of(corpus.train, 4, "training"), 4, [2]).batches()
    run.step(next(batches))
    hidden, cell = run.carried[0]
    assert not hidden.requires_grad
    assert not cell.requires_grad
    assert hidden.abs().sum() > 0
    batch = next(batches)
    with torch.no_grad():
        fresh, _ = TASK.loss(run.model, batch, None)
        going_on, _ = TASK.loss(run.model, batch, (hidden, cell))
    assert fresh != going_on


def test_perplexity_of_a_model_that_knows_frequencies_only_is_theirs(corpus):
    run = Training(TASK, settings(), How(), corpus)
    nn.init.zeros_(run.plain.head.table)
    expected = (-corpus.log_frequencies()[corpus.validation()[:, 1:]].mean()).exp().item()
    assert run.evaluate("validation")["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_training_learns_and_repeats_itself(corpus):
    one, two = (run_all(TASK, [settings("tensor_train", steps=40)], corpus)[0]["epochs"] for _ in range(2))
    curve = [(stage["step"], stage["val_perplexity"], stage["train_loss"]) for stage in one]
    assert curve == [(stage["step"], stage["val_perplexity"], stage["train_loss"]) for stage in two]
    assert [step for step, _, _ in curve] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert curve[-1][1] < curve[0][1]


def test_results_do_not_depend_on_the_number_of_cores(corpus):
    curves = []
    for cores in (1, 3):
        torch.set_num_threads(cores)
        try:
            records = run_all(TASK, [settings(row) for row in ROWS], corpus)
            assert torch.get_num_threads() == cores
        finally:
            torch.set_num_threads(1)
        curves.append([[stage["val_perplexity"] for stage in record["epochs"]] for record in records])
    assert curves[0] == curves[1]


def test_an_error_in_one_training_ends_the_others(corpus, monkeypatch):
    real = Training.step

    def fail_on_full(self, batch):
        if self.settings.row == "full":
            raise ZeroDivisionError
        return real(self, batch)

    monkeypatch.setattr(Training, "step", fail_on_full)
    rows = [settings(row, steps=10_000_000) for row in ROWS]  # hours, if they were taken
    with pytest.raises(ZeroDivisionError):
        run_all(TASK, rows, corpus)


# From the command line to the page


def test_formats_are_shown_as_they_are_written():
    for row in ROWS:
        told = configured(TASK, f"python-{row}", {})
        shown = written({"format": told.format, "settings": told.as_record()})
        assert eval(shown, {"tb": tb}) == told.table_format(10_000, 96)


ARGUMENTS = ["--steps", "4", "--vocabulary", "60", "--dim", "8", "--batch", "4", "--seed", "7"]


@pytest.fixture
def small_run(folder, tmp_path):
    out = tmp_path / "made" / "here"
    done = CliRunner().invoke(app, ["source-code", "demo", *ARGUMENTS, "--data", str(folder), "--out", str(out)])
    assert done.exit_code == 0, done.exception
    return out, done.output


def test_json_tells_all_four_tables_and_how_to_repeat_them(small_run):
    results = json.loads((small_run[0] / "demo.json").read_text())
    asked = {"steps": 4, "vocabulary": 60, "dim": 8, "batch": 4, "seed": 7}
    assert asked.items() <= results["settings"].items()
    assert results["versions"]["tensorbed"] == tb.__version__
    assert [record["row"] for record in results["tables"]] == ROWS
    words = results["corpus"]["words"]
    for record in results["tables"]:
        format = configured(TASK, f"python-{record['row']}", {}).table_format(words, 8)
        ends = tb.embedding_and_head(words, 8, format)
        assert record["table_parameters"] == sum(p.numel() for end in ends for p in end.parameters())
        assert record["ratio"] == pytest.approx(2 * ends.ratio)
        assert record["epochs"][-1]["step"] == 4
        assert record["epochs"][-1]["val_perplexity"] == record["val_perplexity"]
        assert 1 < record["val_perplexity"] < 10 * words
        assert record["train_seconds"] > 0
    # LSTM and narrowing, each with its biases, and the head's.
    body = 4 * 16 * (8 + 16 + 2) + (16 + 1) * 8 + words
    assert {record["total_parameters"] - record["table_parameters"] for record in results["tables"]} == {body}


def test_page_shows_all_four_rows_and_stands_alone(small_run):
    page = (small_run[0] / "demo.html").read_text()
    results = json.loads((small_run[0] / "demo.json").read_text())
    body = re.search(r"<tbody>(.*)</tbody>", page, re.DOTALL).group(1)
    rows = re.findall(r"<tr>.*?</tr>", body)
    for row, told in zip(rows, results["tables"], strict=True):
        sizes = (f"{told['table_parameters']:,}", f"{told['ratio']:,.1f}", f"{told['total_parameters']:,}")
        for text in (told["row"].replace("_", " "), written(told), *sizes, f"{told['val_perplexity']:.1f}"):
            assert f">{text}<" in row
    headings = re.findall(r"<th[^>]*>(.*?)</th>", re.search(r"<thead>(.*)</thead>", page).group(1))
    assert headings[:3] == ["tables", "times smaller", "validation perplexity"]  # as far as a phone shows
    full, *smaller = results["tables"]
    said = re.search(r"<p>(With full tables .*?)</p>", page).group(1)
    assert f"the perplexity at the end is {full['val_perplexity']:.1f}; lower is better." in said
    for told in smaller:
        assert (
            f"{told['row'].replace('_', ' ')} {told['val_perplexity']:.1f} (tables {told['ratio']:,.1f} times smaller, "
            in said
        )
    assert page.index(said) < page.index("<table>")
    assert page.count("<svg") == 2
    assert "--steps 4 --vocabulary 60 --dim 8 --batch 4 --seed 7 --data sources" in page
    assert str(small_run[0].parent) not in page
    assert "seed 7" in page
    assert "$" not in page
    assert not re.search(r"https?:|//\w|<script|<link|<img|@import|\bsrc=", page)
    # What a reference points to is on the page, once.
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', page)) <= set(ids)


def test_what_is_seen_tells_chance_from_difference():
    def row(name, perplexity):
        return {"row": name, "ratio": 51.5, "val_perplexity": perplexity}

    assert seen([row("full", 100.0), row("worse", 110.0), row("on_a_level", 98.0)]) == (
        "With full tables the perplexity at the end is 100.0; lower is better. With compressed ones it is: "
        "worse 110.0 (tables 51.5 times smaller, 10.0% higher); "
        "on a level 98.0 (tables 51.5 times smaller, 2.0% lower, which may be chance)."
    )


def test_the_text_in_pictures_is_legible_on_a_phone(small_run):
    shown = 390 - 2 * 16 - 2 * 9  # pixels across, less what the page and its figures keep at the sides
    for picture in re.findall(r"<svg.*?</svg>", (small_run[0] / "demo.html").read_text(), re.DOTALL):
        width = float(re.search(r'viewBox="0 0 ([\d.]+) ', picture).group(1))
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", picture)]
        assert min(sizes) * shown / width > 9


def test_output_without_a_terminal_has_a_line_per_validation_the_table_and_the_path(small_run):
    out, shown = small_run
    lines = shown.splitlines()
    for row in ROWS:
        assert sum(line.startswith(row.replace("_", " ")) and " of 4 " in line for line in lines) == 4
        told = configured(TASK, f"python-{row}", {})
        assert sum(written({"format": told.format, "settings": told.as_record()}) in line for line in lines) == 1
    assert lines[-1] == f"page: {out / 'demo.html'}"
    assert "…" not in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "steps=0: it must be at least 1"),
        (["--vocabulary", "1"], "vocabulary=1: it must be at least 2"),
        (["--seed", "-1"], "seed=-1: it must be at least 0"),
        (["--data", "nowhere"], "nowhere is not a folder; give one that holds .py files"),
        (["--data", "empty"], "empty holds no .py files"),
        (["--data", "single"], "single holds 1 .py file "),
        (["--data", "short"], "3 tokens for validation, too few"),
        (["--data", "sources", "--batch", "99999999"], "a --batch of at most"),
        (
            ["--data", "sources", "--out", "sources/file_00.py"],
            "--out sources/file_00.py cannot be written to: File exists",
        ),
    ],
)
def test_bad_arguments_are_explained_and_nothing_is_written(arguments, said, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for name, files in (("empty", 0), ("single", 1), ("short", 2)):
        Path(name).mkdir()
        for k in range(files):
            Path(name, f"{k}.py").write_text("a = 1")
    done = CliRunner().invoke(app, ["source-code", "demo", *arguments])
    assert isinstance(done.exception, ExperimentError)
    assert said in str(done.exception)
    assert not Path("out").exists()
