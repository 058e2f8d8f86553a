"""Pairs of sentences: tokens, what data is read and refused, and batches of similar length."""

import random
import sys
import types

import pytest
import small_files as tiny
import torch

pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")

from experiments.lab.errors import ExperimentError
from experiments.lab.rows import configured
from experiments.lab.task import find
from experiments.tasks.translation.data import ByTokens, Pairs, Sentences, cleaned, decoded_at_once, load
from experiments.tasks.translation.model import END, PAD
from experiments.tasks.translation.tokens import encoded, in_one_line, sentence, tokenizer_of, trained_tokenizer

TASK = find("translation")


def settings(dataset="multi30k", **options):
    return configured(TASK, f"{dataset}-full", {"vocabulary": 280, "positions": 40, **options})


# Tokens


LINES = ["Ein großer Hund läuft.", "a dog runs, a dog  sleeps", "<end> of 'naïve' words", "日本 \u2028 end of sentence"]


def test_tokens_are_by_frequency_and_every_text_can_be_written_again():
    tokenizer = trained_tokenizer(LINES * 3, 300)
    for line in [*LINES, "never seen: žluťoučký 🐎"]:
        (numbers,) = encoded(tokenizer, [line])
        assert END not in numbers
        assert tokenizer.decode(numbers).strip() == line
        assert sentence(tokenizer, [*numbers, END, END, 7]) == line.strip()
    used = [number for line in encoded(tokenizer, LINES) for number in line]
    counts = torch.bincount(torch.tensor(used), minlength=tokenizer.get_vocab_size())
    assert counts[END] == 0
    assert (counts[END + 1 :].diff() <= 0).all()
    assert tokenizer.to_str() == trained_tokenizer(LINES * 3, 300).to_str()
    assert 257 < tokenizer.get_vocab_size() <= 300


def test_a_translation_is_scored_as_it_is_and_reaches_a_terminal_in_one_line_without_control_characters():
    tokenizer = trained_tokenizer(LINES, 257)
    text = "a\x1b[2J\nb\xadc"  # a soft hyphen is no sign that is printed, and parts no word
    (numbers,) = encoded(tokenizer, [text])
    assert sentence(tokenizer, numbers) == text
    assert in_one_line(text) == "a [2J bc"


# Data


def test_pairs_stay_together_and_references_are_the_texts(multi30k):
    corpus = load(settings(), multi30k)
    assert list(corpus.splits) == ["train", "validation", "test", "test2017", "test2018", "mscoco"]
    assert [len(pairs) for pairs in corpus.splits.values()] == [60, 12, 12, 6, 6, 6]
    pairs = corpus.splits["test"]
    batch = pairs.batch(torch.arange(12))
    for *sides, reference in zip(batch["source"].tolist(), batch["target"].tolist(), pairs.references, strict=True):
        english, german = (sentence(corpus.tokenizer, side) for side in sides)
        assert german == reference == " ".join(tiny.GERMAN[word] for word in english.split())
    assert corpus.splits["train"].references == ()
    assert len(load(settings(pairs=5), multi30k).splits["train"]) == 5


def test_other_texts_of_equal_size_are_other_data(multi30k):
    """Neither a run that goes on nor processes side by side may take one for the other."""
    before = load(settings(), multi30k).sizes()
    assert load(settings(), multi30k).sizes() == before
    tiny.change_lines(multi30k / "multi30k" / "train.de.gz", lambda lines: lines[::-1])
    after = load(settings(), multi30k).sizes()
    assert [sizes[:3] for sizes in after.values()] == [sizes[:3] for sizes in before.values()]
    assert [split for split in before if after[split] != before[split]] == ["train"]


def test_batches_that_are_translated_are_smaller_where_more_beams_need_caches():
    assert decoded_at_once(settings(batch=1000), 4) == 1000
    assert decoded_at_once(settings(batch=400_000), 4) == 16_384
    assert decoded_at_once(settings(batch=400_000), 64) == 1024


def test_tatoeba_is_parted_by_its_english_side(tmp_path):
    draw = random.Random(5)
    lines = [f"sentence {draw.randrange(2000)} a\tSatz {number}" for number in range(1500)]
    tiny.pack(tmp_path / "tatoeba" / "deu-eng.tsv.gz", lines)
    corpus = load(settings("tatoeba", format="full"), tmp_path)
    assert sum(map(len, corpus.splits.values())) == 1500
    sides = {}
    for split, pairs in corpus.splits.items():
        rows = pairs.batch(torch.arange(len(pairs)))["source"].tolist()
        sides[split] = {sentence(corpus.tokenizer, row) for row in rows}
        assert sides[split]
    assert sum(map(len, sides.values())) == len(set.union(*sides.values()))
    tiny.pack(tmp_path / "tatoeba" / "deu-eng.tsv.gz", [*lines, "one column"])
    with pytest.raises(ExperimentError, match=r"deu-eng.tsv.gz, line 1501: 1 columns; two are needed"):
        load(settings("tatoeba"), tmp_path)


def test_the_original_of_wmt14_is_fetched_and_cleaned_as_in_the_paper(monkeypatch):
    asked = []
    good = ("a dog runs", "ein Hund läuft")
    long = ("a " * 60, "ein " * 60)  # newstest2013 has sentences that cleaning leaves out of training
    pairs = [good, ("", "leer"), long, ("a b c d e f g h", "ein"), good]

    def load_dataset(path, split, name):
        asked.append((path, split, name))
        return [{"translation": {"en": en, "de": de}} for en, de in (pairs if split == "train" else [good, long])]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    corpus = load(settings("wmt14", length_ratio=2.5, batch=400, longest=40, positions=80), None)
    assert asked == [("wmt/wmt14", split, "de-en") for split in ("train", "validation", "test")]
    train = corpus.splits["train"]
    assert [sentence(corpus.tokenizer, row) for row in train.batch(torch.arange(2))["source"].tolist()] == [good[0]] * 2
    assert [len(corpus.splits[split]) for split in ("train", "validation", "test")] == [2, 2, 2]
    lengths = train.source.lengths.double(), train.target.lengths.double()
    assert (torch.maximum(*lengths) <= 2.5 * torch.minimum(*lengths)).all()


def test_cleaning_compares_sentences_without_their_ends():
    lengths = [(5, 2), (2, 5), (4, 1), (6, 2), (39, 39), (40, 39), (39, 40)]  # of 40 tokens one is the end
    sides = (Sentences.of([[5] * length for length in side]) for side in zip(*lengths, strict=True))
    kept = cleaned(Pairs(*sides), settings("wmt14", length_ratio=2.5, longest=40, positions=80))
    assert list(zip((kept.source.lengths - 1).tolist(), (kept.target.lengths - 1).tolist(), strict=True)) == [
        (5, 2),
        (2, 5),
        (39, 39),
    ]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("train.de", lambda lines: lines[:-2], r"train.en.gz has 60 lines, train.de.gz has 58 lines: line 59 of one"),
        ("val.en", lambda lines: [*lines, b"more"], r"val.en.gz has 13 lines, .*12 lines: line 13 of one has no tr"),
        ("train.de", lambda lines: [*lines[:4], b" ", *lines[5:]], r"multi30k train, line 5, de: an empty sentence"),
        ("test_2017_mscoco.en", lambda lines: [b"", *lines[1:]], r"test_2017_mscoco, line 1, en: an empty"),
        ("val.de", lambda lines: [*lines[:7], b"gr\xfcn", *lines[8:]], r"val.de.gz, line 8: not UTF-8"),
        ("train.en", lambda lines: [*lines[:9], tiny.LONG.encode(), *lines[10:]], r"train, line 10, en: a sentence of"),
        (
            "val.de",
            lambda lines: [tiny.LONG.encode(), *lines[1:]],
            r"val, line 1, de: .* the model has 40",
        ),
        (
            "train.de",
            lambda lines: [*lines[:2], b"x" * 1_001, *lines[3:]],
            r"train, line 3, de: a word of more than 1,000 l",
        ),
        ("train.en", lambda lines: [], r"train.en.gz has 0 lines, train.de.gz has 60"),
    ],
)
def test_bad_lines_are_named_before_training(multi30k, name, change, told):
    tiny.change_lines(multi30k / "multi30k" / f"{name}.gz", change)
    with pytest.raises(ExperimentError, match=told):
        load(settings(), multi30k)


def test_a_split_without_pairs_is_named(multi30k):
    for language in ("en", "de"):
        tiny.change_lines(multi30k / "multi30k" / f"val.{language}.gz", lambda _: [])
    with pytest.raises(ExperimentError, match=r"multi30k: there are no pairs for validation"):
        load(settings(), multi30k)


def test_missing_data_and_packages_are_named(multi30k, monkeypatch):
    with pytest.raises(ExperimentError, match=r"multi30k is not fetched; give the folder that holds multi30k/"):
        load(settings(), None)
    with pytest.raises(ExperimentError, match=r"wmt14.train.en.gz does not exist"):
        load(settings("wmt14"), multi30k)
    for package, module in {"tokenizers": "", "transformers": "", "sacrebleu": ".metrics"}.items():
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package + module, None)
            with pytest.raises(ExperimentError, match=rf"needs the package {package}: pip install '.\[experiments\]'"):
                TASK.load(settings(), multi30k)


def some_pairs(count=1000):
    """Of which both sides are of about the same length, as they are in most pairs."""
    draw = random.Random(6)
    lengths = [(length, length + draw.randint(0, 4)) for length in draw.choices(range(1, 16), k=count)]
    return Pairs(*(Sentences.of([[5] * length for length in side]) for side in zip(*lengths, strict=True)))


def test_batches_hold_every_pair_once_with_few_tokens_and_little_padding():
    pairs = some_pairs()
    for draw in (None, torch.Generator().manual_seed(1)):
        parts = pairs.batches(200, draw)
        assert sorted(torch.cat(parts).tolist()) == list(range(1000))
        batches = [pairs.batch(part) for part in parts]
        sides = [batch[side] for batch in batches for side in ("source", "target")]
        assert all(batch["source"].numel() + batch["target"].numel() <= 200 for batch in batches)
        assert sum(int((side == PAD).sum()) for side in sides) < 0.1 * sum(side.numel() for side in sides)
    (huge,) = Pairs(*[Sentences.of([[5] * 300])] * 2).batches(200)
    assert huge.tolist() == [0]  # a pair that is larger than a batch is one


def test_epochs_differ_and_go_on_from_any_step():
    source = ByTokens(some_pairs(), 200, 3, (50, 200))
    whole = [batch["number"].tolist() for batch in source.batches()]
    assert len(whole) == 200
    assert len(source.epoch(0)) < 200
    assert [batch["number"].tolist() for batch in source.batches(73)] == whole[73:]
    assert [batch["number"].tolist() for batch in source.batches(150)] == whole[150:]
    together = [{frozenset(numbers.tolist()) for numbers in source.epoch(epoch)} for epoch in (0, 1)]
    assert len(together[0] - together[1]) > len(together[0]) / 2  # other pairs together, not only another order
    assert ByTokens(some_pairs(), 200, 4, (1,)).epoch(0)[0].tolist() != whole[0]


def test_a_model_without_a_tokeniser_is_refused():
    tensors = {"tokenizer": torch.zeros(3, dtype=torch.uint8), "marian.final_logits_bias": torch.zeros(1, 280)}
    with pytest.raises(ExperimentError, match=r"here has no tokeniser: .* Train it anew"):
        tokenizer_of(tensors, "here")
