"""Python source files as a stream of word numbers: found, tokenised, counted and split, each file read once."""

from __future__ import annotations

import os
import re
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from experiments.lab.batches import lanes_of
from experiments.lab.errors import ExperimentError
from experiments.lab.words import choose_words, log_frequencies, numbering, places

EVERY = 20  # one file in this many is for validation
VALIDATION_LANES = 16
VALIDATION_TOKENS = 8192

# Tests and bundled programs are not the library; encodings and pydoc_data hold generated tables and prose.
SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    | {"encodings", "pydoc_data"}
)
# Written when Python is built, with the paths of the machine in it: different everywhere.
MACHINE_MADE = "_sysconfigdata"

TOKEN = re.compile(
    r"""[^\W\d]\w*                    # identifiers, keywords, words of comments
      | \d[\w.]*                      # numbers
      | \n[ \t]*                      # the end of a line with the indent of the next
      | [-+*/%&|^=<>!:@]= | \*\* | // | -> | \.\.\.
      | [^\w\s]                       # any other operator, quote or bracket
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Corpus:
    """Words, most frequent first after ``<unk>``, and the two streams of their numbers."""

    words: tuple[str, ...]
    train: Tensor  # (tokens,)
    valid: Tensor  # (tokens,)
    files: int

    def log_frequencies(self) -> Tensor:  # -> (words,)
        return log_frequencies(self.train, len(self.words))

    def validation(self) -> Tensor:  # -> (VALIDATION_LANES, length)
        """What is read side by side in validation: of equal parts of the stream only their beginning."""
        lanes = lanes_of(self.valid, VALIDATION_LANES, "validation")
        return lanes[:, : VALIDATION_TOKENS // VALIDATION_LANES + 1]

    def sizes(self) -> dict[str, list[int]]:
        return {"train": [len(self.train)], "validation": [len(self.valid)], "words": [len(self.words)]}


def tokenize(text: str) -> list[str]:
    """Words, numbers, operators and line ends of a source; spaces within a line are dropped."""
    return TOKEN.findall(text)


def source_files(root: Path) -> list[Path]:
    """The ``.py`` files below a folder in the order of their paths, without what is skipped."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]  # os.walk does not enter what is taken out
        found += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(MACHINE_MADE)]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def read_corpus(root: Path, size: int) -> Corpus:
    """Read, tokenise and split a folder of sources; the words are chosen on the training files only."""
    if not root.is_dir():
        raise ExperimentError(f"{root} is not a folder; give one that holds .py files.")
    files = source_files(root)
    if len(files) < 2:
        raise ExperimentError(
            f"{root} holds {len(files) or 'no'} .py file{'s' * (not files)} (folders such as test and site-packages "
            "are skipped); at least 2 are needed, one of them for validation."
        )
    numbers, streams = numbering(), []
    for path in track(files, "reading sources", transient=True, disable=not sys.stdout.isatty()):
        tokens = tokenize(path.read_text(encoding="utf-8", errors="ignore"))
        streams.append(array("q", [numbers[token] for token in tokens]))
    valid = _joined(streams[::EVERY])
    train = _joined(stream for k, stream in enumerate(streams) if k % EVERY)

    counts = torch.bincount(train, minlength=len(numbers)).tolist()
    words = choose_words({word: counts[number] for word, number in numbers.items() if counts[number]}, size)
    rank = torch.tensor(places(numbers, words))
    return Corpus(words, rank[train], rank[valid], len(files))


def _joined(streams: Iterable[array[int]]) -> Tensor:  # -> (tokens,)
    return torch.tensor(array("q", chain.from_iterable(streams)), dtype=torch.int64)
