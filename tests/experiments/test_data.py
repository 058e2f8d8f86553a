import gzip
import json
import sys
import types
from dataclasses import replace

import pytest
import small_files as tiny
import torch

pytest.importorskip("accelerate")

from experiments.lab.batches import Batch, Epochs, Windows, by_length, evenly
from experiments.lab.errors import ExperimentError
from experiments.lab.files import gzip_lines
from experiments.lab.words import choose_words
from experiments.tasks.sentiment.data import load, tokenize, tree_nodes
from experiments.tasks.sentiment.model import SentimentSettings

SST = SentimentSettings(dataset="sst5", row="tiny", vocabulary=20)
IMDB = SentimentSettings(dataset="imdb", row="tiny", vocabulary=20)


def texts(data, split):
    """Every text of a split as words, with its label."""
    return [
        (tuple(data.words[k] for k in row), label)
        for group in data.splits[split]
        for row, label in zip(group["tokens"].tolist(), group["labels"].tolist(), strict=True)
    ]


def unpacked(path):
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def test_a_tree_gives_all_its_nodes_and_the_sentence_last():
    nodes = tree_nodes("(3 (2 It) (4 (2 works) (1 .)))", "here")
    assert nodes == [(["It"], 2), (["works"], 2), (["."], 1), (["works", "."], 4), (["It", "works", "."], 3)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("(3 (2 It) (4 good)", "left open"),
        ("(3 (2 It)) good)", "after its end"),
        ("(7 It)", "not a label from 0 to 4"),
        ("It works", "not with an open bracket"),
        ("(3 )", "without words"),
        ("(", "not a label"),
    ],
)
def test_a_malformed_tree_names_its_line(data, line, reason):
    good = tiny.tree(["a", "b"], 1)
    tiny.pack(data / "sst5" / "dev.txt.gz", [good, good, line])
    with pytest.raises(ExperimentError, match=rf"dev.txt, line 3: malformed tree, .*{reason}"):
        load(SST, data)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"text": "a", "label": true}',
        '{"text": "a"',
        '{"text": "a", "label": 2}',
        '{"label": 1}',
        "[]",
        "null",
    ],
)
def test_a_malformed_review_names_its_line(data, line):
    good = json.dumps({"text": "a film", "label": 0})
    tiny.pack(data / "imdb" / "test.jsonl.gz", [good, line])
    with pytest.raises(ExperimentError, match=r"test.jsonl.gz, line 2: (not a JSON object|expected)"):
        load(IMDB, data)


def test_blank_lines_and_byte_order_marks_are_passed_over(data):
    good = json.dumps({"text": "a film", "label": 0})
    tiny.pack(data / "imdb" / "test.jsonl.gz", ["\ufeff" + good, "", good])
    assert len(texts(load(IMDB, data), "test")) == 2
    tiny.pack(data / "sst5" / "test.txt.gz", ["\ufeff" + tiny.tree(["a", "b"], 1), "", tiny.tree(["a", "b"], 1)])
    assert len(texts(load(SST, data), "test")) == 2


def test_a_byte_that_is_wrong_for_damage_is_told_from_one_that_is_not(data):
    path = data / "sst5" / "train.txt.gz"
    packed = bytearray(gzip.compress(b"\xff" * 10, compresslevel=0))
    path.write_bytes(packed)
    with pytest.raises(ExperimentError, match=r"train.txt.gz, line 1: not UTF-8; convert"):
        load(SST, data)
    packed[-12] ^= 1  # among the ten
    path.write_bytes(packed)
    with pytest.raises(ExperimentError, match=r"train.txt.gz is damaged or cut short after line 0.*Copy it anew"):
        load(SST, data)


def test_a_truncated_file_is_refused(data):
    path = data / "sst5" / "train.txt.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ExperimentError, match=r"train.txt.gz is damaged or cut short after line \d+.*Copy it anew"):
        load(SST, data)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(ExperimentError, match=r"train.txt.gz is damaged"):
        load(SST, data)


def test_a_byte_that_is_not_utf_8_names_its_own_line(tmp_path):
    path = tmp_path / "text.gz"
    lines = [b"a line"] * 1000
    lines[699] = b"caf\xe9"
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    with pytest.raises(ExperimentError, match=r"text.gz, line 700: not UTF-8"):
        list(gzip_lines(path))
    path.write_bytes(gzip.compress("\ufeffa\u2028b\r\nc".encode()))
    assert list(gzip_lines(path)) == [(1, "a\u2028b\n"), (2, "c")]


@pytest.mark.parametrize("name", ["train", "dev", "test"])
def test_a_split_without_texts_is_refused(data, name):
    tiny.pack(data / "sst5" / f"{name}.txt.gz", ["", "  "])
    with pytest.raises(ExperimentError, match=rf"sst5: there are no texts for {name.replace('dev', 'validation')}"):
        load(SST, data)


def test_missing_folders_and_files_are_named(data, tmp_path):
    with pytest.raises(ExperimentError, match="there is no such folder"):
        load(SST, tmp_path / "nowhere")
    (data / "sst5" / "test.txt.gz").unlink()
    with pytest.raises(ExperimentError, match=r"test.txt.gz does not exist"):
        load(SST, data)


def test_words_are_cased_by_frequency_in_training_alone(data):
    found = load(SST, data)
    assert found.words[:2] == ("<pad>", "<unk>")
    assert {"It", "it"} <= set(found.words)
    counts = {"b": 2, "a": 2, "<unk>": 9, "c": 3, "d": 1}
    assert choose_words(counts, 5, ("<pad>", "<unk>")) == ("<pad>", "<unk>", "c", "a", "b")
    with gzip.open(data / "sst5" / "test.txt.gz", "wt") as file:
        file.write("(0 (2 unseen) (2 film))\n")
    assert texts(load(SST, data), "test") == [(("<unk>", "film"), 0)]


def test_reviews_keep_their_last_tokens_and_line_breaks_are_spaces(data):
    assert tokenize("I don't.<br /><br />It\u2019s") == ["I", "don't", ".", "It\u2019s"]
    found = load(SentimentSettings(dataset="imdb", row="tiny", vocabulary=20, max_tokens=3), data)
    assert {len(text) for text, _ in texts(found, "train")} <= {2, 3}
    assert all(text[-1] == "end" for text, _ in texts(found, "train"))


def test_padding_is_at_the_end_and_only_where_it_is_asked_for(data):
    plain, padded = (texts(load(replace(SST, pad_to=length), data), "train") for length in (None, 9))
    assert {len(text) for text, _ in padded} == {9}
    assert sorted((text[: len(text) - text.count("<pad>")], label) for text, label in padded) == sorted(plain)
    assert not any("<pad>" in text for text, _ in plain)


def test_the_last_tenth_of_each_class_is_for_validation(data):
    found = load(IMDB, data)
    counts = {s: [label for _, label in texts(found, s)] for s in ("train", "validation", "test")}
    assert {s: (labels.count(0), labels.count(1)) for s, labels in counts.items()} == {
        "train": (27, 27),
        "validation": (3, 3),
        "test": (10, 10),
    }


def test_phrases_train_on_every_node_and_test_on_sentences(data):
    sentences, phrases = (
        load(SST, data),
        load(SentimentSettings(dataset="sst5", row="tiny", vocabulary=20, phrases=True), data),
    )
    assert len(texts(phrases, "train")) == sum(2 * len(text) - 1 for text, _ in texts(sentences, "train"))
    assert texts(phrases, "test") == texts(sentences, "test")
    with pytest.raises(ExperimentError, match="imdb has not"):
        load(SentimentSettings(dataset="imdb", row="tiny", vocabulary=20, phrases=True), data)


def test_the_originals_are_fetched_by_datasets_and_read_as_files_are(data, monkeypatch):
    """A stand-in with the records the public originals have; the addresses asked for are checked."""
    asked = []

    def load_dataset(name, split, data_files=None):
        asked.append((name, split, data_files and data_files[split]))
        if name == "text":
            inner = data_files[split].split("::")[0].removeprefix("zip://trees/")
            return [{"text": line} for line in unpacked(data / "sst5" / f"{inner}.gz")]
        lines = unpacked(data / "imdb" / f"{split}.jsonl.gz")
        return [{key: json.loads(line)[key] for key in ("text", "label")} for line in lines]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for settings in (SST, IMDB):
        for split in ("train", "validation", "test"):
            assert texts(load(settings, None), split) == texts(load(settings, data), split)
    original = "https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip"
    assert ("text", "validation", f"zip://trees/dev.txt::{original}") in asked
    assert ("stanfordnlp/imdb", "test", None) in asked


def test_an_original_out_of_reach_is_named_with_another_way(monkeypatch):
    def load_dataset(name, split, data_files=None):
        raise ConnectionError("no such host\nand more")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for settings, address in ((SST, "trainDevTestTrees_PTB.zip"), (IMDB, "stanfordnlp/imdb")):
        with pytest.raises(ExperimentError, match=rf"{address} could not be fetched: .*: no such host Give .*--data"):
            load(settings, None)


def test_without_datasets_the_way_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExperimentError, match=r"pip install '\.\[experiments\]'.*--data"):
        load(SST, None)


def some_batches(seed=3, size=4):
    lengths = [2] * 9 + [3] * 4 + [7]
    return Epochs(by_length([[k] * n for k, n in enumerate(lengths)], list(range(14))), size, seed)


def test_an_epoch_holds_every_text_once_in_batches_of_one_length():
    batches = list(some_batches().epoch(0))
    assert sorted(label for batch in batches for label in batch["labels"].tolist()) == list(range(14))
    assert sorted(len(batch["labels"]) for batch in batches) == [1, 1, 4, 4, 4]
    assert len(batches) == len(some_batches())
    assert all((batch["tokens"] == batch["labels"][:, None]).all() for batch in batches)


def test_the_order_depends_on_seed_and_epoch_and_goes_on_from_any_batch():
    def order(seed, epoch, start=0):
        return [batch["labels"].tolist() for batch in some_batches(seed).epoch(epoch, start)]

    assert order(3, 1) == order(3, 1)
    assert order(3, 1)[2:] == order(3, 1, start=2)
    assert order(3, 1) != order(3, 2)
    assert order(3, 1) != order(4, 1)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_hold_every_text_once_and_none_is_empty(parts):
    batch = Batch({"tokens": torch.arange(8).view(4, 2), "labels": torch.arange(4)})
    pieces = [batch.part(k, parts) for k in range(parts)]
    assert sorted(counting(pieces)) == [0, 1, 2, 3]
    assert all(piece.rows for piece in pieces)
    pieces_of_pieces = [piece.part(k, 3) for piece in pieces for k in range(3)]
    assert sorted(counting(pieces_of_pieces)) == [0, 1, 2, 3]
    assert all(piece.rows for piece in pieces_of_pieces)


def counting(pieces):
    """The labels of texts that do not merely stand in."""
    return [label for piece in pieces for label in piece["labels"].tolist() if piece.weight]


def test_windows_follow_each_other_and_begin_again_and_go_on_from_any_step():
    lanes = torch.arange(200).view(2, 100)  # 99 words have a successor: three windows of 32
    found = list(Windows(lanes, 32, [2, 4]).batches(0))
    assert all(torch.equal(batch["following"], batch["words"] + 1) for batch in found)
    assert [batch["words"][0, 0].item() for batch in found] == [0, 32, 64, 0]
    later = list(Windows(lanes, 32, [2, 4]).batches(3))
    assert [batch["words"].tolist() for batch in later] == [found[3]["words"].tolist()]


def test_epochs_go_on_from_any_step():
    batches = Epochs(some_batches().groups, 4, seed=3, epochs=3)
    assert batches.ends == (5, 10, 15)
    every = [batch["labels"].tolist() for batch in batches.batches(0)]
    assert [batch["labels"].tolist() for batch in batches.batches(7)] == every[7:]
    assert len(every) == 15
    assert Epochs(batches.groups, 4, epochs=2, validations=2).ends == (2, 5, 8, 10)


def test_validations_are_spread_over_the_steps():
    assert evenly(1000, 8) == (125, 250, 375, 500, 625, 750, 875, 1000)
    assert evenly(3, 8) == (1, 2, 3)
