"""What is done besides training: words that a trained model writes, and texts turned into tokens once for all runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.lab.checkpoints import damaged, rebuilt, trained
from experiments.lab.errors import ExperimentError, plain, unknown
from experiments.lab.files import writable_folder
from experiments.lab.rows import configured
from experiments.lab.words import UNKNOWN
from experiments.tasks.language_model.data import (
    DATASETS,
    numbered,
    read_texts,
    token_file,
    write_tokens,
)
from experiments.tasks.language_model.model import END, LanguageModelSettings, TransformerXL, words_of


def generate(
    checkpoint: Annotated[Path, typer.Option(help="a model, or its folder, that a run with --keep-model left")],
    prompt: Annotated[str, typer.Option(help="words to go on from; left out, a line begins")] = "",
    length: Annotated[int, typer.Option(min=1, help="words to write")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest word")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="draw among so many likeliest words only")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="of the draws")] = 0,
) -> None:
    """Write words that follow a prompt, as they come."""
    if not math.isfinite(temperature):
        raise ExperimentError(f"--temperature {temperature}: it must be finite; 1 draws words as likely as they are.")
    settings, tensors = trained(checkpoint, "language_model", LanguageModelSettings)
    try:
        words = words_of(tensors.get("spelling", torch.empty(0)))
    except ValueError as error:
        raise damaged(checkpoint, error) from None
    model = rebuilt(partial(TransformerXL, settings, words), tensors, checkpoint)
    given, strangers = numbered(prompt, words)
    if strangers:
        told = ", ".join(dict.fromkeys(map(plain, strangers)))
        typer.echo(f"not among the {len(words):,} words of the model, read as {UNKNOWN}: {told}", err=True)
    start, among = given or [words.index(END)], top_k and min(top_k, len(words))
    between = ""
    for k in chain(given, islice(written(model, start, temperature, among, seed), length)):
        typer.echo("\n" if words[k] == END else f"{between}{plain(words[k])}", nl=False)
        between = "" if words[k] == END else " "
    typer.echo()


@torch.no_grad()
def written(
    model: TransformerXL, start: list[int], temperature: float = 1.0, top_k: int | None = None, seed: int = 0
) -> Iterator[int]:
    """Word after word, each remembered with those before it; the scores of all words are at no time in one place."""
    draw = torch.Generator().manual_seed(seed)
    model.eval()
    memory, word = None, torch.tensor([start])
    while True:
        for segment in word.split(model.segment, dim=1):
            hidden, memory = model.hidden(segment, memory)
        word = model.head.sample(hidden[:, -1:], temperature, top_k, draw)
        yield int(word)


def prepare(
    options: dict[str, Any],
    *,
    to: Annotated[Path, typer.Option(help="folder for the file of tokens, to be given as --data")],
    data: Annotated[Path | None, typer.Option(help="folder that holds the texts; left out, they are fetched")] = None,
) -> None:
    """Number the words of a dataset once, for runs that map the file into memory."""
    from experiments.tasks.language_model.task import TASK

    dataset = options.get("dataset", DATASETS[0])
    if dataset not in DATASETS:
        raise unknown("dataset", dataset, DATASETS)
    settings: Any = configured(TASK, f"{dataset}-full", options)
    writable_folder(to, "--to")
    corpus = read_texts(settings.dataset, settings.vocabulary, data)
    path = token_file(to, settings.dataset)
    write_tokens(corpus, path, settings.vocabulary)
    typer.echo(f"{path}: {len(corpus.words):,} words, {sum(map(len, corpus.splits.values())):,} tokens")
