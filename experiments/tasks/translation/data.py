"""Sentences of English and their translations into German, as token numbers, and batches of similar length."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from experiments.lab.batches import Batch, epoch_generator
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.files import check_folder, fetched, gzip_lines
from experiments.lab.processes import first_process
from experiments.tasks.translation.model import END, PAD, TranslationSettings
from experiments.tasks.translation.tokens import encoded, trained_tokenizer

LANGUAGES = ("en", "de")  # from, and into
# Files of each dataset, by the split they are; each is two, .en.gz and .de.gz.
FILES = {
    "multi30k": {
        "train": "train",
        "validation": "val",
        "test": "test_2016_flickr",
        "test2017": "test_2017_flickr",
        "test2018": "test_2018_flickr",
        "mscoco": "test_2017_mscoco",
    },
    "tatoeba": {"train": "deu-eng.tsv", "validation": "deu-eng.tsv", "test": "deu-eng.tsv"},
    "wmt14": {"train": "train", "validation": "val", "test": "test"},
}
ORIGINAL = "wmt/wmt14"
_LONGEST_WORD = 1_000  # letters; to learn tokens from a word takes as long as the square of its length
_DECODED = 65_536  # some 2 GB of caches at the paper's size
Text = tuple[int, str, str]  # the number of its line, English, German


@dataclass(frozen=True)
class Sentences:
    """Token numbers of many sentences in one tensor, each with its end."""

    tokens: Tensor  # (tokens,) int32
    starts: Tensor  # (sentences,)
    lengths: Tensor  # (sentences,)

    @classmethod
    def of(cls, lines: Iterable[Sequence[int]]) -> Sentences:
        tokens, lengths = array("i"), array("q")  # hundreds of millions of them have to lie in memory, once
        for line in lines:
            tokens.extend(line)
            tokens.append(END)
            lengths.append(len(line) + 1)
        counted = tensor_of(lengths)
        return cls(tensor_of(tokens), counted.cumsum(0) - counted, counted)

    def subset(self, which: Tensor) -> Sentences:  # (some,) numbers, or (sentences,) truth values
        return Sentences(self.tokens, self.starts[which], self.lengths[which])

    def take(self, numbers: Tensor) -> Tensor:  # (rows,) -> (rows, longest)
        """Some of them, padded to the longest of them."""
        places = torch.arange(int(self.lengths[numbers].max()))
        there = places < self.lengths[numbers, None]
        rows = torch.full(there.shape, PAD)
        rows[there] = self.tokens[(self.starts[numbers, None] + places)[there]].long()
        return rows


def tensor_of(numbers: array[int]) -> Tensor:
    """The memory of the array itself: ``torch.tensor`` would make a Python object of every number."""
    dtype = {"i": torch.int32, "q": torch.int64}[numbers.typecode]
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


@dataclass(frozen=True)
class Pairs:
    """Sentences and their translations; those of all but the training pairs as texts, too."""

    source: Sentences
    target: Sentences
    references: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.source.lengths)

    def checksum(self) -> int:
        """Of all tokens, and of where sentences begin and end among them."""
        tensors = (each for side in (self.source, self.target) for each in (side.tokens, side.starts, side.lengths))
        return reduce(lambda sum, tensor: zlib.crc32(tensor.numpy().data, sum), tensors, 0)

    def batch(self, numbers: Tensor) -> Batch:
        sides = {"target": self.target.take(numbers), "source": self.source.take(numbers)}
        return Batch({**sides, "number": numbers})  # the first one's tokens are those that a run counts

    def batches(self, tokens: int, draw: torch.Generator | None = None) -> list[Tensor]:
        """Numbers of pairs that go together, with so many tokens at most, the padding of both sides counted.

        They are sorted by the length of the target, then by that of the source, which leaves hardly any padding. With
        ``draw`` pairs whose sources differ by less than two tokens are mixed, and batches come in a random order.
        """
        blurred = self.source.lengths.double()
        if draw is not None:
            blurred += 2 * torch.rand(len(self), generator=draw, dtype=torch.float64)
        order = (self.target.lengths * (2 + self.source.lengths.max()) + blurred).argsort(stable=True)
        cuts, begun, widest = [], 0, 0
        lengths = zip(self.target.lengths[order].tolist(), self.source.lengths[order].tolist(), strict=True)
        for place, (target, source) in enumerate(lengths):
            widest = max(widest, source)
            if place > begun and (place - begun + 1) * (target + widest) > tokens:
                cuts.append(place)
                begun, widest = place, source
        parts = list(order.tensor_split(cuts))
        turns = range(len(parts)) if draw is None else torch.randperm(len(parts), generator=draw).tolist()
        return [parts[turn] for turn in turns]


class ByTokens:
    """Batches of training pairs by their number of tokens, epoch after epoch, each in an order of its own."""

    def __init__(self, pairs: Pairs, tokens: int, seed: int, ends: Sequence[int]) -> None:
        self.pairs, self.tokens, self.seed, self.ends = pairs, tokens, seed, tuple(ends)

    def epoch(self, epoch: int) -> list[Tensor]:
        return self.pairs.batches(self.tokens, epoch_generator(self.seed, epoch))

    def batches(self, start: int = 0) -> Iterator[Batch]:
        epoch, done = 0, 0
        while done < self.ends[-1]:
            parts = self.epoch(epoch)
            for numbers in parts[max(0, start - done) : self.ends[-1] - done]:
                yield self.pairs.batch(numbers)
            epoch, done = epoch + 1, done + len(parts)


def decoded_at_once(settings: TranslationSettings, beams: int) -> int:
    """Tokens of a batch that is translated: as many as in training at most, and fewer where many beams have caches."""
    return min(settings.batch, _DECODED // beams)


@dataclass(frozen=True)
class Corpus:
    """The tokeniser of both languages, and the pairs of each split."""

    tokenizer: Any
    splits: dict[str, Pairs]

    def sizes(self) -> dict[str, list[int]]:
        """How much each split has, and the vocabulary; checksums tell other texts of equal size."""
        told = self.tokenizer.to_str().encode()
        counts = {
            split: [len(of), len(of.source.tokens), len(of.target.tokens), of.checksum()]
            for split, of in self.splits.items()
        }
        return {**counts, "vocabulary": [self.tokenizer.get_vocab_size(), zlib.crc32(told)]}


def load(settings: TranslationSettings, folder: Path | None) -> Corpus:
    """All splits, from a folder or from where they are public, with a tokeniser that knows the training pairs."""
    if settings.dataset not in FILES:
        raise unknown("dataset", settings.dataset, FILES)
    check_folder(folder)
    with Console(stderr=True, quiet=not first_process()).status("reading texts") as status:
        texts = {split: texts_of(settings, folder, split) for split in FILES[settings.dataset]}
        status.update("learning tokens")
        tokenizer = trained_tokenizer([text for pair in texts["train"] for text in pair[1:]], settings.vocabulary)
        status.update("numbering tokens")
        return Corpus(tokenizer, {split: numbered(settings, tokenizer, split, pairs) for split, pairs in texts.items()})


def texts_of(settings: TranslationSettings, folder: Path | None, split: str) -> list[Text]:
    """The pairs of a split, one at least; an empty side is refused, unless training pairs are cleaned."""
    name = FILES[settings.dataset][split]
    if folder is None:
        pairs = original(settings.dataset, split)
    elif settings.dataset == "tatoeba":
        pairs = columns(folder / settings.dataset / f"{name}.gz", split)
    else:
        pairs = parallel([folder / settings.dataset / f"{name}.{language}.gz" for language in LANGUAGES])
    stripped = [(number, english.strip(), german.strip()) for number, english, german in pairs]
    if split == "train" and settings.length_ratio is not None:
        stripped = [pair for pair in stripped if all(pair) and not any(map(has_long_word, pair[1:]))]
    if not stripped:
        raise ExperimentError(f"{settings.dataset}: there are no pairs for {split} in {name}; copy its files anew.")
    for number, *sides in stripped:
        for language, text in zip(LANGUAGES, sides, strict=True):
            if not text or has_long_word(text):
                what = f"a word of more than {_LONGEST_WORD:,} letters" if text else "an empty sentence"
                where = place(settings, split, language, number)
                raise ExperimentError(f"{where}: {what}; remove the line on both sides.")
    return stripped[: settings.pairs]


def has_long_word(text: str) -> bool:
    """Whether it is no sentence, but letters without end."""
    return len(text) > _LONGEST_WORD and max(map(len, text.split())) > _LONGEST_WORD


def place(settings: TranslationSettings, split: str, language: str, number: int) -> str:
    """Where a sentence stands, for people."""
    return f"{settings.dataset} {FILES[settings.dataset][split]}, line {number}, {language}"


def parallel(paths: Sequence[Path]) -> Iterator[Text]:
    """Two files, of which each line translates that of the other."""
    sides = [[line for _, line in gzip_lines(path)] for path in paths]
    if len(sides[0]) != len(sides[1]):
        first, second = (f"{path.name} has {len(side):,} lines" for path, side in zip(paths, sides, strict=True))
        raise ExperimentError(
            f"{first}, {second}: line {min(map(len, sides)) + 1} of one has no translation; copy both anew."
        )
    for number, (english, german) in enumerate(zip(*sides, strict=True), 1):
        yield number, english, german


def columns(path: Path, split: str) -> Iterator[Text]:
    """Pairs of one file, English and German with a tab between; a hundredth each is for validation and test.

    Pairs with the same English are all in the same split: no sentence to be translated was seen in training.
    """
    for number, line in gzip_lines(path):
        sides = line.split("\t")
        if len(sides) != len(LANGUAGES):
            raise ExperimentError(
                f"{path.name}, line {number}: {len(sides)} columns; two are needed, English and German, a tab between."
            )
        hundredth = zlib.crc32(sides[0].strip().encode()) % 100
        if split == {0: "validation", 1: "test"}.get(hundredth, "train"):
            yield number, sides[0], sides[1]


def original(dataset: str, split: str) -> Iterator[Text]:
    """Of the public original, where there is one that can be fetched."""
    if dataset != "wmt14":
        raise ExperimentError(f"{dataset} is not fetched; give the folder that holds {dataset}/ with --data.")
    for number, record in enumerate(fetched(ORIGINAL, split, name="de-en"), 1):
        english, german = (record["translation"][language] for language in LANGUAGES)
        yield number, english, german


def numbered(settings: TranslationSettings, tokenizer: Any, split: str, texts: Sequence[Text]) -> Pairs:
    """The texts as tokens: none is longer than the model has positions. Training pairs may be cleaned of such."""
    numbers, *sides = zip(*texts, strict=True)
    source, target = (Sentences.of(encoded(tokenizer, side)) for side in sides)
    if split == "train" and settings.length_ratio is not None:
        return cleaned(Pairs(source, target), settings)
    for language, side in zip(LANGUAGES, (source, target), strict=True):
        check_positions(side, settings.positions, numbers, partial(place, settings, split, language))
    return Pairs(source, target, () if split == "train" else tuple(sides[1]))


def check_positions(sentences: Sentences, positions: int, lines: Sequence[int], place: Callable[[int], str]) -> None:
    """The model has a position for each token; ``place`` tells where the sentence of a line stands."""
    for number in (sentences.lengths > positions).nonzero()[:1, 0].tolist():
        raise ExperimentError(
            f"{place(lines[number])}: a sentence of {sentences.lengths[number]} tokens, its end counted, and the model "
            f"has {positions} positions; shorten it, or train with more --positions."
        )


def cleaned(pairs: Pairs, settings: TranslationSettings) -> Pairs:
    """Without pairs that are too long, or of which one side is too many times as long as the other."""
    assert settings.length_ratio is not None
    lengths = torch.stack([pairs.source.lengths, pairs.target.lengths])
    words = lengths - 1  # their ends would make short pairs more equal
    longest = min(settings.longest, settings.positions)
    fitting = (lengths <= longest).all(0) & (words.amax(0) <= settings.length_ratio * words.amin(0))
    if not fitting.any():
        told = f"sentences of at most {longest} tokens (--longest) and --length-ratio {settings.length_ratio}"
        raise ExperimentError(f"{settings.dataset}: {told} leave no training pair.")
    return Pairs(pairs.source.subset(fitting), pairs.target.subset(fitting))
