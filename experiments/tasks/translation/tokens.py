"""One vocabulary for both languages: byte-pair encoding over bytes, learned from the training pairs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any
from unicodedata import category

from torch import Tensor

from experiments.lab.checkpoints import ANEW
from experiments.lab.errors import ExperimentError, needed
from experiments.tasks.translation.model import END

_END_TOKEN = "end of sentence"  # with spaces, which no token of a text has
_BLOCK = 10_000  # lines at a time: what a tokeniser tells of them is many times as large


def package() -> Any:
    """That of byte-pair encoding."""
    return needed("tokenizers", "translation")


def trained_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Tokens numbered by how frequent they are in the texts, after the end of a sentence; every text can be written."""
    bpe = package()
    tokenizer = bpe.Tokenizer(bpe.models.BPE())
    tokenizer.pre_tokenizer = bpe.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = bpe.decoders.ByteLevel()
    alphabet = bpe.pre_tokenizers.ByteLevel.alphabet()
    trainer = bpe.trainers.BpeTrainer(vocab_size=vocabulary - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    counts = Counter(number for line in encoded(tokenizer, texts) for number in line)
    told = json.loads(tokenizer.to_str())
    drawn = told["model"]["vocab"]
    ranked = sorted(drawn, key=lambda token: (-counts[drawn[token]], drawn[token]))
    told["model"]["vocab"] = {token: number for number, token in enumerate([_END_TOKEN, *ranked], END)}
    return bpe.Tokenizer.from_str(json.dumps(told))


def encoded(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """The numbers of each text, without its end."""
    lines = iter(texts)
    while block := list(islice(lines, _BLOCK)):
        yield from (encoding.ids for encoding in tokenizer.encode_batch_fast(block))


def sentence(tokenizer: Any, numbers: list[int]) -> str:
    """The text of a translation up to its end."""
    text: str = tokenizer.decode(numbers[: numbers.index(END)] if END in numbers else numbers)
    return text.strip()


def in_one_line(text: str) -> str:
    """What a terminal can show, and a reader of lines take for one.

    Marks that part no word, such as soft hyphens, are left out.
    """
    shown = (sign for sign in text if category(sign) != "Cf")
    return " ".join("".join(sign if sign.isprintable() else " " for sign in shown).split())


def tokenizer_of(tensors: dict[str, Tensor], where: object) -> tuple[Any, str]:
    """The tokeniser in a trained model, and its JSON; refused where the model's table has another vocabulary."""
    bpe = package()
    try:
        written = bytes(tensors["tokenizer"].tolist()).decode()
        tokenizer = bpe.Tokenizer.from_str(written)
    except Exception as error:  # tokenizers has no kind of its own
        raise ExperimentError(f"{where} has no tokeniser: {error}. {ANEW}") from None
    known, bias = tokenizer.get_vocab_size(), tensors.get("marian.final_logits_bias")
    if isinstance(bias, Tensor) and bias.dim() and known != (rows := bias.shape[-1]):
        raise ExperimentError(
            f"{where} has a tokeniser of another vocabulary: it knows {known:,} tokens, and the model's table has "
            f"{rows:,} rows. {ANEW}"
        )
    return tokenizer, written
