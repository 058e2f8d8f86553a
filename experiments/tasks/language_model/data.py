"""WikiText as three streams of word numbers, from texts or from a file of tokens, and the segments a model reads."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from experiments.lab.batches import Batch
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.files import check_folder, fetched, gzip_lines, write_whole
from experiments.lab.words import UNKNOWN, choose_words, numbering, places
from experiments.tasks.language_model.model import END, LanguageModelSettings, spelled, words_of

ORIGINAL = "Salesforce/wikitext"
DATASETS = ("wikitext-2", "wikitext-103")
FILES = {"train": "train", "validation": "valid", "test": "test"}
NOT_SCORED = -100


@dataclass(frozen=True)
class Corpus:
    """Words, most frequent first after ``<unk>``, and the splits as their numbers."""

    words: tuple[str, ...]
    splits: dict[str, Tensor]  # (tokens,) int32

    def sizes(self) -> dict[str, list[int]]:
        words = [len(self.words), zlib.crc32("\n".join(self.words).encode())]
        return {**{split: [len(stream)] for split, stream in self.splits.items()}, "words": words}


def load(settings: LanguageModelSettings, folder: Path | None) -> Corpus:
    """A file of tokens if the folder has one, or else texts of the folder, or else the public original."""
    if settings.dataset not in DATASETS:
        raise unknown("dataset", settings.dataset, DATASETS)
    check_folder(folder)
    mapped = None if folder is None else token_file(folder, settings.dataset)
    if mapped is not None and mapped.exists():
        corpus = read_tokens(mapped, settings.vocabulary)
    else:
        corpus = read_texts(settings.dataset, settings.vocabulary, folder)
    return Corpus(corpus.words, {split: stream[: settings.tokens] for split, stream in corpus.splits.items()})


def read_texts(dataset: str, vocabulary: int, folder: Path | None) -> Corpus:
    """Number the words of all lines; those of the training text are known, or the most frequent of them."""
    numbers, streams = numbering(), {}
    for split, name in FILES.items():
        file = None if folder is None else folder / dataset / f"{name}.txt.gz"
        tokens = array("i")  # of 4 bytes: a hundred million of them have to lie in memory
        for line in original_lines(dataset, split) if file is None else (line for _, line in gzip_lines(file)):
            tokens.extend([numbers[word] for word in (*line.split(), END)])
        if set(tokens) <= {numbers[END]}:
            raise ExperimentError(f"{file or f'{dataset}, {split}'} is empty: there are no words in it; copy it anew.")
        streams[split] = torch.frombuffer(tokens, dtype=torch.int32)
    counts = torch.bincount(streams["train"], minlength=len(numbers)).tolist()
    counted = {word: count for word, count in zip(numbers, counts, strict=True) if count}
    words = choose_words(counted, vocabulary)
    if END not in words:  # lines end, however few words there are
        words = (*words[:-1], END)
    rank = torch.tensor(places(numbers, words), dtype=torch.int32)
    return Corpus(words, {split: rank.index_select(0, stream) for split, stream in streams.items()})


def original_lines(dataset: str, split: str) -> Iterator[str]:
    """Of the public original."""
    return (record["text"] for record in fetched(ORIGINAL, split, name=f"{dataset}-v1"))


def token_file(folder: Path, dataset: str) -> Path:
    """Where the tokens of a dataset are."""
    return folder / f"{dataset}.safetensors"


def write_tokens(corpus: Corpus, path: Path, vocabulary: int) -> None:
    """All splits and the words in one file, which is mapped into memory where it is read."""
    tensors = {**corpus.splits, "words": spelled(corpus.words)}
    write_whole(path, save(tensors, {"vocabulary": str(vocabulary)}))


def read_tokens(path: Path, vocabulary: int) -> Corpus:
    """What was written; refused when it is damaged, or of another vocabulary."""
    advice = "python -m experiments language-model prepare makes it anew."
    try:
        with safe_open(path, "pt") as file:  # nothing is read before it is used
            told, splits = file.metadata() or {}, {split: file.get_tensor(split) for split in FILES}
            words = words_of(file.get_tensor("words"))
    except (SafetensorError, OSError, ValueError) as error:
        raise ExperimentError(f"{path} is no file of tokens: {error}. {advice}") from None
    theirs = told.get("vocabulary", "")
    if not (theirs.isascii() and theirs.isdigit()):
        raise ExperimentError(f"{path} is no file of tokens: it tells no vocabulary. {advice}")
    if theirs != str(vocabulary):
        raise ExperimentError(
            f"{path} is of another vocabulary, of {theirs} words at most, and this run has {vocabulary}: "
            f"give --vocabulary {theirs}, or {advice}"
        )
    for split, stream in splits.items():
        if stream.dtype != torch.int32 or stream.dim() != 1 or len(stream) < 2:
            raise ExperimentError(f"{path} is no file of tokens: {split} is no stream of them. {advice}")
        low, high = stream.min().item(), stream.max().item()
        if low < 0 or high >= len(words):
            raise ExperimentError(
                f"{path} is of another vocabulary: {split} has the word {high if low >= 0 else low}, and there are "
                f"{len(words)} words. {advice}"
            )
    return Corpus(words, splits)


def segments(stream: Tensor, lanes: int, target: int) -> Iterator[Batch]:  # (tokens,)
    """Every token but the first to be foretold, once: the stream in lanes side by side, segment after segment."""
    length = -(-(len(stream) - 1) // lanes)
    missing = lanes * length - (len(stream) - 1)
    words = F.pad(stream[:-1], (0, missing)).view(lanes, length).split(target, dim=1)
    following = F.pad(stream[1:], (0, missing), value=NOT_SCORED).view(lanes, length).split(target, dim=1)
    for pair in zip(words, following, strict=True):
        yield Batch(dict(zip(("words", "following"), pair, strict=True)))


def numbered(prompt: str, words: Sequence[str]) -> tuple[list[int], list[str]]:
    """The numbers of a prompt's words, and those that are not known, which become ``<unk>``."""
    place = {word: k for k, word in enumerate(words)}
    given = prompt.split()
    return [place.get(word, place[UNKNOWN]) for word in given], [word for word in given if word not in place]
