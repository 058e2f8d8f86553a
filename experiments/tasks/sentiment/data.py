"""SST-5 and IMDB, from packed files in a folder or, where none is given, from the public originals."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from experiments.lab.batches import Batch, by_length
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.files import check_folder, fetched, gzip_lines
from experiments.lab.words import UNKNOWN, choose_words, numbering, places
from experiments.tasks.sentiment.model import PAD, SentimentSettings
from experiments.tasks.sentiment.trees import parse

CLASSES = {"sst5": 5, "imdb": 2}
SPLITS = ("train", "validation", "test")
SST_FILES = {"train": "train", "validation": "dev", "test": "test"}
SST_ORIGINAL = "zip://trees/{}.txt::https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip"
IMDB_ORIGINAL = "stanfordnlp/imdb"
HELD_OUT = 10  # one training review of IMDB in this many is for validation

# Words with their apostrophes, and each other sign by itself; case is kept.
WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")

Labelled = tuple[Sequence[str], int]  # tokens, or a string of them, and the label
T = TypeVar("T")


@dataclass(frozen=True)
class Data:
    """The three splits as word numbers, in groups of equal length."""

    splits: dict[str, tuple[Batch, ...]]
    words: tuple[str, ...]
    classes: int

    def sizes(self) -> dict[str, list[int]]:
        return {
            split: [sum(group.rows for group in groups), sum(group.numbers for group in groups)]
            for split, groups in self.splits.items()
        }


def load(settings: SentimentSettings, folder: Path | None) -> Data:
    """Read, number and group a dataset; the words are those of the training texts, most frequent first."""
    readers: dict[str, Callable[[Path | None, bool], dict[str, list[Labelled]]]] = {"sst5": sst5, "imdb": imdb}
    if settings.dataset not in readers:
        raise unknown("dataset", settings.dataset, readers)
    check_folder(folder)
    read = readers[settings.dataset](folder, settings.phrases)
    numbers, counts = numbering(), Counter[int]()
    raw: dict[str, list[tuple[array[int], int]]] = {}
    for split in SPLITS:
        raw[split] = []
        for text, label in spread(read.pop(split), settings.examples):
            tokens = tokenize(text) if isinstance(text, str) else text
            numbered = array("q", [numbers[token] for token in tokens])
            if split == "train":
                counts.update(numbered)
            if numbered:
                raw[split].append((numbered[-settings.max_tokens :] if settings.max_tokens else numbered, label))
    names = list(numbers)
    chosen = choose_words({names[k]: count for k, count in counts.items()}, settings.vocabulary, ("<pad>", UNKNOWN))
    rank = places(names, chosen)
    if empty := [split for split in SPLITS if not raw[split]]:
        raise ExperimentError(f"{settings.dataset}: there are no texts for {', '.join(empty)}; copy the files anew.")
    raw["train"] = spread(raw["train"], settings.train_limit)
    splits = {
        split: by_length(
            [padded([rank[word] for word in text], settings.pad_to) for text, _ in texts],
            [label for _, label in texts],
        )
        for split, texts in raw.items()
    }
    return Data(splits, chosen, CLASSES[settings.dataset])


def padded(text: list[int], length: int | None) -> list[int]:
    """The text with padding at its end up to a length, if one is asked for."""
    return text + [PAD] * ((length or 0) - len(text))


def spread(examples: list[T], limit: int | None) -> list[T]:
    """All, or ``limit`` spread evenly over them: files may be sorted by label."""
    count = len(examples) if limit is None else min(limit, len(examples))
    return [examples[k * len(examples) // count] for k in range(count)]


def sst5(folder: Path | None, phrases: bool) -> dict[str, list[Labelled]]:
    """The official splits: the sentences at the roots of the trees; for training also all phrases, if asked."""
    if folder is not None:
        lines = {split: gzip_lines(folder / "sst5" / f"{name}.txt.gz") for split, name in SST_FILES.items()}
    else:
        files = {split: SST_ORIGINAL.format(name) for split, name in SST_FILES.items()}
        lines = {
            split: enumerate((record["text"] for record in fetched("text", split, data_files=files)), 1)
            for split in SST_FILES
        }
    return {
        split: list(labelled_trees(numbered, f"{SST_FILES[split]}.txt", phrases and split == "train"))
        for split, numbered in lines.items()
    }


def labelled_trees(lines: Iterable[tuple[int, str]], name: str, phrases: bool) -> Iterator[Labelled]:
    """Tokens and label of each tree's root, or of all its nodes."""
    for number, line in lines:
        if line.strip():
            nodes = parse(line, f"{name}, line {number}")
            yield from nodes if phrases else nodes[-1:]


def imdb(folder: Path | None, phrases: bool) -> dict[str, list[Labelled]]:
    """Official test half; of the training half the last tenth of each class is for validation.

    Neighbouring reviews are of one film: a tenth in one piece shares few films with the rest, as the test half does.
    """
    if phrases:
        raise ExperimentError("phrases are nodes of trees, which imdb has not; use --phrases with sst5.")
    if folder is not None:
        halves = {half: reviews(folder / "imdb" / f"{half}.jsonl.gz") for half in ("train", "test")}
    else:
        halves = {half: original_reviews(half) for half in ("train", "test")}
    of_class: defaultdict[int, list[Labelled]] = defaultdict(list)
    for example in halves["train"]:
        of_class[example[1]].append(example)
    kept = {label: len(examples) - len(examples) // HELD_OUT for label, examples in of_class.items()}
    return {
        "train": [example for label, examples in of_class.items() for example in examples[: kept[label]]],
        "validation": [example for label, examples in of_class.items() for example in examples[kept[label] :]],
        "test": list(halves["test"]),
    }


def reviews(path: Path) -> Iterator[Labelled]:
    """Text and label of each line of a file of JSON objects."""
    for number, line in gzip_lines(path):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ExperimentError(f"{where}: not a JSON object ({error}).") from None
        yield review(record, where)


def original_reviews(half: str) -> Iterator[Labelled]:
    """Text and label of each review of the public original."""
    for number, record in enumerate(fetched(IMDB_ORIGINAL, half), 1):
        yield review(record, f"{IMDB_ORIGINAL}, {half} {number}")


def review(record: Any, where: str) -> Labelled:
    """Text and label of one review."""
    text, label = (record.get("text"), record.get("label")) if isinstance(record, dict) else (None, None)
    if not isinstance(text, str) or type(label) is not int or label not in (0, 1):
        raise ExperimentError(f'{where}: expected {{"text": a string, "label": 0 or 1}}, got {str(record)[:80]}.')
    return text, label


def tokenize(text: str) -> list[str]:
    """Words and signs; line breaks of HTML are spaces."""
    return WORD.findall(text.replace("<br />", " "))
