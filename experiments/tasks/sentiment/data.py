"""SST-5 and IMDB, from packed files in a folder or, where none is given, from the public originals."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from experiments.lab.batches import Batch, by_length
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.files import check_folder, fetched, gzip_lines
from experiments.lab.words import UNKNOWN, choose_words, numbering, places
from experiments.tasks.sentiment.model import PAD, SentimentSettings

CLASSES = {"sst5": 5, "imdb": 2}
SPLITS = ("train", "validation", "test")
SST_FILES = {"train": "train", "validation": "dev", "test": "test"}
TREE_SIGN = re.compile(r"[()]|[^\s()]+")
TREE_LABELS = ("0", "1", "2", "3", "4")
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
            [[rank[word] for word in text] + [PAD] * ((settings.pad_to or 0) - len(text)) for text, _ in texts],
            [label for _, label in texts],
        )
        for split, texts in raw.items()
    }
    return Data(splits, chosen, CLASSES[settings.dataset])


def spread(examples: list[T], limit: int | None) -> list[T]:
    """All, or ``limit`` spread evenly over them: files may be sorted by label."""
    count = len(examples) if limit is None else min(limit, len(examples))
    return [examples[k * len(examples) // count] for k in range(count)]


def sst5(folder: Path | None, phrases: bool) -> dict[str, list[Labelled]]:
    """The official splits: the sentences at the roots of the trees; for training also all phrases, if asked."""
    originals = {split: SST_ORIGINAL.format(name) for split, name in SST_FILES.items()}
    read = {}
    for split, name in SST_FILES.items():
        if folder is not None:
            lines = gzip_lines(folder / "sst5" / f"{name}.txt.gz")
        else:
            lines = enumerate((record["text"] for record in fetched("text", split, data_files=originals)), 1)
        trees = (tree_nodes(line, f"{name}.txt, line {number}") for number, line in lines if line.strip())
        read[split] = [node for nodes in trees for node in (nodes if phrases and split == "train" else nodes[-1:])]
    return read


def tree_nodes(line: str, where: str) -> list[Labelled]:
    """Tokens and label of every node of ``(3 (2 It) (4 works))``, children before parents: the last is the sentence."""
    nodes: list[Labelled] = []
    leaves: list[str] = []
    opened: list[tuple[int, int]] = []  # label and first leaf of each open node
    signs = iter(TREE_SIGN.findall(line))
    for sign in signs:
        if nodes and not opened:
            raise ExperimentError(f"{where}: malformed tree, {sign!r} stands after its end.")
        if sign == "(":
            label = next(signs, "nothing")
            if label not in TREE_LABELS:
                raise ExperimentError(
                    f"{where}: malformed tree, a node begins with {label!r}, not a label from 0 to 4."
                )
            opened.append((int(label), len(leaves)))
        elif not opened:
            raise ExperimentError(f"{where}: malformed tree, it begins with {sign!r}, not with an open bracket.")
        elif sign == ")":
            root, first = opened.pop()
            if first == len(leaves):
                raise ExperimentError(f"{where}: malformed tree, a node without words.")
            nodes.append((leaves[first:], root))
        else:
            leaves.append(sign)
    if opened or not nodes:
        raise ExperimentError(f"{where}: malformed tree, {len(opened) or 'no'} brackets are left open.")
    return nodes


def imdb(folder: Path | None, phrases: bool) -> dict[str, list[Labelled]]:
    """Official test half; of the training half the last tenth of each class is for validation.

    Neighbouring reviews are of one film: a tenth in one piece shares few films with the rest, as the test half does.
    """
    if phrases:
        raise ExperimentError("phrases are nodes of trees, which imdb has not; use --phrases with sst5.")
    of_class: defaultdict[int, list[Labelled]] = defaultdict(list)
    for example in reviews(folder, "train"):
        of_class[example[1]].append(example)
    read: dict[str, list[Labelled]] = {"train": [], "validation": [], "test": list(reviews(folder, "test"))}
    for examples in of_class.values():
        kept = len(examples) - len(examples) // HELD_OUT
        read["train"] += examples[:kept]
        read["validation"] += examples[kept:]
    return read


def reviews(folder: Path | None, half: str) -> Iterator[Labelled]:
    """Text and label of each review, from lines of JSON objects or from the public original."""
    lines: Iterator[tuple[int, Any]]
    if folder is not None:
        packed = gzip_lines(folder / "imdb" / f"{half}.jsonl.gz")
        lines, place = ((number, line) for number, line in packed if line.strip()), f"{half}.jsonl.gz, line"
    else:
        lines, place = enumerate(fetched(IMDB_ORIGINAL, half), 1), f"{IMDB_ORIGINAL}, {half}"
    for number, line in lines:
        try:
            record = json.loads(line) if isinstance(line, str) else line
        except (ValueError, RecursionError) as error:
            raise ExperimentError(f"{place} {number}: not a JSON object ({error}).") from None
        text, label = (record.get("text"), record.get("label")) if isinstance(record, dict) else (None, None)
        if not isinstance(text, str) or type(label) is not int or label not in (0, 1):
            expected = 'expected {"text": a string, "label": 0 or 1}'
            raise ExperimentError(f"{place} {number}: {expected}, got {str(record)[:80]}.")
        yield text, label


def tokenize(text: str) -> list[str]:
    """Words and signs; line breaks of HTML are spaces."""
    return WORD.findall(text.replace("<br />", " "))
