"""Where a table loses: how well tokens are predicted, by how frequent they are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from torch import Tensor

from experiments.lab.errors import ExperimentError
from experiments.lab.files import check_folder
from experiments.tasks.translation.commands import opened, precision_of
from experiments.tasks.translation.data import numbered, texts_of
from experiments.tasks.translation.model import PAD, TranslationSettings, Translator


def by_frequency(
    checkpoint: Annotated[list[Path], typer.Option(help="a model, or its folder, of --keep-model; one or several")],
    data: Annotated[Path | None, typer.Option(help="folder that holds the data")] = None,
) -> None:
    """Print the loss of trained models on validation, for frequent tokens and for rare ones."""
    check_folder(data)
    shown = Table(Column("tokens, by frequency", no_wrap=True), Column("share", no_wrap=True))
    columns: list[tuple[Tensor, Tensor]] = []
    models = [opened(path) for path in checkpoint]  # all, before the first is asked for its losses
    for path, (settings, tokenizer, model) in zip(checkpoint, models, strict=True):
        tokens, losses = token_losses(settings, tokenizer, model, data)
        if columns and not torch.equal(tokens, columns[0][0]):
            raise ExperimentError(
                f"{path}: its tokens are not those of {checkpoint[0]}; compare models of one dataset and vocabulary."
            )
        columns.append((tokens, losses))
        shown.add_column(f"{settings.row}, seed {settings.seed}", justify="right")
    tokens = columns[0][0]
    for first, end in ranges_of_tokens(tokenizer.get_vocab_size()):
        within = (tokens >= first) & (tokens < end)
        if within.any():
            means = [f"{losses[within].mean():.2f}" for _, losses in columns]
            shown.add_row(f"{first + 1:,} to {end:,}", f"{100 * within.double().mean():.0f} %", *means)
    Console().print(shown)


def ranges_of_tokens(tokens: int) -> list[tuple[int, int]]:
    """First token and end of each: it ends at four times the end of the one before. The last one is of all."""
    edges = [0, *(4**k for k in range(2, 16) if 4**k < tokens), tokens]
    return [*pairwise(edges), (0, tokens)]


@torch.no_grad()
def token_losses(
    settings: TranslationSettings, tokenizer: Any, model: Translator, data: Path | None
) -> tuple[Tensor, Tensor]:  # (predicted,), (predicted,)
    """Every token that the model has to predict on validation, and their losses."""
    pairs = numbered(settings, tokenizer, "validation", texts_of(settings, data, "validation"))
    tokens, losses = [], []
    for numbers in track(pairs.batches(settings.batch), settings.row, console=Console(stderr=True), transient=True):
        batch = pairs.batch(numbers)
        with precision_of(settings):
            of_batch = model.loss(batch["source"], batch["target"], reduction="none")
        known = batch["target"] != PAD
        tokens.append(batch["target"][known])
        losses.append(of_batch[known].float())
    return torch.cat(tokens), torch.cat(losses)
