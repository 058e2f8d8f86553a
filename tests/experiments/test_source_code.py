"""The demo: a corpus determined by the files, four models that differ in two tables only, a page that stands alone."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import demo.__main__
import experiments.tasks.source_code.model
import tensorbed as tb
from demo.__main__ import FORMATS, main, run_all, written
from demo.training import Lanes, Run, Settings, pace, perplexity, take_step, train, windows
from experiments.tasks.source_code.corpus import UNKNOWN, Corpus, choose_words, read_corpus, source_files, tokenize
from experiments.tasks.source_code.model import LanguageModel
from experiments.tasks.source_code.page import Row, seen
from tensorbed.structures.dense import DenseMatrix

SOURCE = '''def area(width, height=1):
    """How much there is."""
    total = width * height ** 2
    if total >= 10 and width != height:
        return total // 2

    return {"area": total, "wide": width}  # of size %d
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files, two of them for validation, and others that are no part of a corpus."""
    root = tmp_path / "sources"
    root.mkdir()
    for k in range(40):
        (root / f"file_{k:02}.py").write_text(SOURCE * 6 + f"only_in_{k:02} = {k}\n")
    for skipped in ("test/test_area.py", "site-packages/other.py", "_sysconfigdata_here.py", "notes.txt"):
        path = root / skipped
        path.parent.mkdir(exist_ok=True)
        path.write_text("skipped = 1\n")
    return root


@pytest.fixture
def corpus(folder: Path) -> Corpus:
    return read_corpus(folder, 50)


class Silent:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def started(self) -> None:
        pass

    def stepped(self, step: int, loss: float) -> None:
        self.losses.append(loss)

    def validated(self, step: int, perplexity: float) -> None:
        pass


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


def test_models_differ_in_the_tables_only(corpus):
    models = [LanguageModel(corpus.log_frequencies(), 8, format, seed=3) for format in FORMATS.values()]
    bodies = [model.body() for model in models]
    assert any(name.startswith("recurrent.") for name in bodies[0])
    assert torch.equal(bodies[0]["head.bias"], corpus.log_frequencies())
    for body in bodies[1:]:
        assert body.keys() == bodies[0].keys()
        assert all(torch.equal(body[name], tensor) for name, tensor in bodies[0].items())


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_both_ends_have_the_format_and_are_born_with_their_spread(format, corpus):
    model = LanguageModel(corpus.log_frequencies(), 8, format, seed=3)
    assert model.embedding.structure == model.head.structure == tb.Embedding(len(corpus.words), 8, format).structure
    for end, std in (
        (model.embedding, experiments.tasks.source_code.model.EMBEDDING_STD),
        (model.head, experiments.tasks.source_code.model.HEAD_STD),
    ):
        assert end.weight.square().mean().sqrt().item() == pytest.approx(std, rel=1e-3)


def test_the_four_models_see_the_same_batches(corpus, monkeypatch):
    seen: list[torch.Tensor] = []
    hidden, loss = LanguageModel.hidden, tb.Head.loss
    monkeypatch.setattr(LanguageModel, "hidden", lambda self, w, *state: seen.append(w) or hidden(self, w, *state))
    monkeypatch.setattr(tb.Head, "loss", lambda self, h, target: seen.append(target) or loss(self, h, target))
    lanes, settings, heard = Lanes.of(corpus, 4), Settings(steps=3, seed=1), []
    for format in FORMATS.values():
        seen.clear()
        train(LanguageModel(corpus.log_frequencies(), 8, format, 1), lanes, settings, Silent())
        heard.append(list(seen))
    for other in heard[1:]:
        assert len(other) == len(heard[0]) == 2 * (3 + 3)  # steps and validations
        assert all(torch.equal(a, b) for a, b in zip(other, heard[0], strict=True))


def test_windows_follow_each_other_and_begin_again():
    lanes = torch.arange(200).view(2, 100).T  # 99 words have a successor: three windows of 32
    found = list(windows(lanes, 4))
    for words, following in found:
        assert torch.equal(following, words + 1)
    assert [words[0, 0].item() for words, _ in found] == [0, 32, 64, 0]


def test_pace_rises_then_falls():
    shares = [pace(step, 100) for step in range(100)]
    top = shares.index(max(shares))
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert shares[top:] == sorted(shares[top:], reverse=True)
    assert min(shares) > 0
    assert max(shares) <= 1


# Loss and perplexity


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_step_has_the_cross_entropy_over_all_words_and_moves_everything(format, corpus):
    model = LanguageModel(corpus.log_frequencies(), 8, format, 0)
    words, following = next(windows(Lanes.of(corpus, 4).train, 1))
    logits = F.linear(model.hidden(words)[0], model.head.weight, model.head.bias)
    expected = F.cross_entropy(logits.flatten(0, 1), following.flatten()).item()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss, _ = take_step(model, torch.optim.SGD(model.parameters(), lr=1.0), words, following, None)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_perplexity_of_a_model_that_knows_frequencies_only_is_theirs(corpus):
    model = LanguageModel(corpus.log_frequencies(), 8, tb.Dense(), 0)
    nn.init.zeros_(model.head.table)
    lanes = Lanes.of(corpus, 4).valid
    expected = (-corpus.log_frequencies()[lanes[1:]].mean()).exp().item()
    assert perplexity(model, lanes) == pytest.approx(expected, rel=1e-5)


def test_training_learns_and_repeats_itself(corpus):
    lanes, settings = Lanes.of(corpus, 4), Settings(steps=40)
    watches = [Silent(), Silent()]
    runs = [train(LanguageModel(corpus.log_frequencies(), 8, tb.TensorTrain(), 0), lanes, settings, w) for w in watches]
    assert runs[0].curve == runs[1].curve
    assert watches[0].losses == watches[1].losses
    assert [step for step, _ in runs[0].curve] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert runs[0].perplexity < runs[0].curve[0][1]


def test_results_do_not_depend_on_the_number_of_cores(corpus):
    lanes, settings, curves = Lanes.of(corpus, 4), Settings(steps=8, dim=8), []
    for cores in (1, 3):
        torch.set_num_threads(cores)
        try:
            rows = run_all(settings, corpus, lanes, Console(quiet=True))
            assert torch.get_num_threads() == cores
        finally:
            torch.set_num_threads(1)
        curves.append([row.run.curve for row in rows])
    assert curves[0] == curves[1]


def test_an_error_in_one_training_ends_the_others(corpus, monkeypatch):
    lanes, steps = Lanes.of(corpus, 4), 10_000_000  # hours, if they were taken
    trained = demo.__main__.train

    def fail_on_dense(model, *rest):
        if isinstance(model.embedding.structure, DenseMatrix):
            raise ZeroDivisionError
        return trained(model, *rest)

    monkeypatch.setattr(demo.__main__, "train", fail_on_dense)
    with pytest.raises(ZeroDivisionError):
        run_all(Settings(steps=steps, dim=8), corpus, lanes, Console(quiet=True))


# From the command line to the page


def test_formats_are_shown_as_they_are_written():
    for format in FORMATS.values():
        assert eval(written(format), {"tb": tb}) == format


@pytest.fixture
def small_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    out = tmp_path / "made" / "here"
    arguments = ["--steps", "4", "--vocab", "60", "--dim", "8", "--batch", "4", "--seed", "7"]
    main([*arguments, "--corpus", str(folder), "--out", str(out)])
    return out, capsys.readouterr().out


def test_json_tells_all_four_tables_and_how_to_repeat_them(small_run):
    results = json.loads((small_run[0] / "demo.json").read_text())
    assert results["settings"] == {"steps": 4, "vocab": 60, "dim": 8, "batch": 4, "seed": 7}
    assert results["versions"]["tensorbed"] == tb.__version__
    assert [row["name"] for row in results["tables"]] == list(FORMATS)
    words = results["corpus"]["words"]
    for row, format in zip(results["tables"], FORMATS.values(), strict=True):
        ends = tb.embedding_and_head(words, 8, format)
        assert row["parameters"] == sum(p.numel() for end in ends for p in end.parameters())
        assert row["ratio"] == pytest.approx(2 * ends.ratio)
        assert row["curve"][-1] == [4, row["perplexity"]]
        assert 1 < row["perplexity"] < 10 * words
        assert row["seconds"] > 0
    # LSTM and narrowing, each with its biases, and the head's.
    body = 4 * 16 * (8 + 16 + 2) + (16 + 1) * 8 + words
    assert {row["model_parameters"] - row["parameters"] for row in results["tables"]} == {body}


def test_page_shows_all_four_rows_and_stands_alone(small_run):
    page = (small_run[0] / "demo.html").read_text()
    results = json.loads((small_run[0] / "demo.json").read_text())
    body = re.search(r"<tbody>(.*)</tbody>", page, re.DOTALL).group(1)
    rows = re.findall(r"<tr>.*?</tr>", body)
    for row, told in zip(rows, results["tables"], strict=True):
        sizes = (f"{told['parameters']:,}", f"{told['ratio']:,.1f}", f"{told['model_parameters']:,}")
        for text in (told["name"], told["format"], *sizes, f"{told['perplexity']:.1f}"):
            assert f">{text}<" in row
    headings = re.findall(r"<th[^>]*>(.*?)</th>", re.search(r"<thead>(.*)</thead>", page).group(1))
    assert headings[:3] == ["tables", "times smaller", "validation perplexity"]  # as far as a phone shows
    full, *smaller = results["tables"]
    said = re.search(r"<p>(With full tables .*?)</p>", page).group(1)
    assert f"the perplexity at the end is {full['perplexity']:.1f}; lower is better." in said
    for told in smaller:
        assert f"{told['name']} {told['perplexity']:.1f} (tables {told['ratio']:,.1f} times smaller, " in said
    assert page.index(said) < page.index("<table>")
    assert page.count("<svg") == 2
    assert "--steps 4 --vocab 60 --dim 8 --batch 4 --seed 7 --corpus sources" in page
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
        return Row(name, "", "", 1000, 51.5, 2000, Run([(1, perplexity)], 1.0))

    assert seen([row("full", 100.0), row("worse", 110.0), row("level", 98.0)]) == (
        "With full tables the perplexity at the end is 100.0; lower is better. With compressed ones it is: "
        "worse 110.0 (tables 51.5 times smaller, 10.0% higher); "
        "level 98.0 (tables 51.5 times smaller, 2.0% lower, which may be chance)."
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
    for name in FORMATS:
        assert sum(line.startswith(name) and " of 4 " in line for line in lines) == 4
    for format in FORMATS.values():
        assert sum(written(format) in line for line in lines) == 1
    assert lines[-1] == f"page: {out / 'demo.html'}"
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps: 0 is not a whole number of at least 1"),
        (["--steps", "-3"], "--steps: -3 is not a whole number of at least 1"),
        (["--batch", "many"], "--batch: many is not a whole number of at least 1"),
        (["--vocab", "1"], "--vocab: 1 is not a whole number of at least 2"),
        (["--seed", "1.5"], "--seed: 1.5 is not a whole number"),
        (["--corpus", "nowhere"], "nowhere is not a folder; give one that holds .py files"),
        (["--corpus", "empty"], "empty holds no .py files"),
        (["--corpus", "single"], "single holds 1 .py file "),
        (["--corpus", "short"], "3 tokens for validation, too few"),
        (["--corpus", "sources", "--batch", "99999999"], "a --batch of at most"),
        (["--corpus", "sources", "--out", "sources/file_00.py"], "File exists: 'sources/file_00.py'"),
    ],
)
def test_bad_arguments_are_explained_and_nothing_is_written(arguments, said, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    for name, files in (("empty", 0), ("single", 1), ("short", 2)):
        Path(name).mkdir()
        for k in range(files):
            Path(name, f"{k}.py").write_text("a = 1")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("out").exists()
