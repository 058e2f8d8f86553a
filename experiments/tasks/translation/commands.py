"""What is done besides training: translations of lines by a trained model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from torch import Tensor

from experiments.lab.checkpoints import rebuilt, trained
from experiments.lab.errors import ExperimentError
from experiments.tasks.translation.data import Pairs, Sentences, check_positions, decoded_at_once
from experiments.tasks.translation.model import MOST_BEAMS, PAD, TranslationSettings, Translator, scored_by_table
from experiments.tasks.translation.tokens import encoded, in_one_line, sentence, tokenizer_of

_BLOCK = 1_000  # lines, of which those of similar length are translated together
_LEFT = 0.15  # of a batch may be unfinished when it stops; these sentences are translated again, together


def translate(
    checkpoint: Annotated[Path, typer.Option(help="a model, or its folder, that a run with --keep-model left")],
    beam: Annotated[
        int | None, typer.Option(min=1, max=MOST_BEAMS, help="left out, as many as its test sets had")
    ] = None,
) -> None:
    """Translate lines of English from standard input into lines of German."""
    settings, tokenizer, model = opened(checkpoint)
    if sys.stdin is None:
        raise ExperimentError("standard input is closed; give the lines there, as in translate ... < text.")
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # as the lines are that it reads
    lines = list(standard_input(sys.stdin.buffer.read()))
    sources = Sentences.of(encoded(tokenizer, lines))
    check_positions(sources, settings.positions, range(1, len(lines) + 1), "standard input, line {}".format)
    beams = beam or settings.beam
    begun = time.perf_counter()
    with progress() as shown, precision_of(settings):
        advance = partial(shown.advance, shown.add_task("translating", total=len(lines)))
        written = translations(model, tokenizer, sources, decoded_at_once(settings, beams), beams, advance)
        for line, german in zip(lines, written, strict=True):
            typer.echo(german if line else "", file=sys.stdout)
    if lines:
        seconds = time.perf_counter() - begun
        what = "line" if len(lines) == 1 else "lines"
        typer.echo(f"{len(lines):,} {what} in {seconds:.1f} s, {len(lines) / seconds:,.1f} a second", err=True)


def progress() -> Progress:
    """A bar on standard error; lines that are written to the same terminal go above it."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    return Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty())


def opened(checkpoint: Path) -> tuple[TranslationSettings, Any, Translator]:
    """A trained model with its settings and its tokeniser, ready to translate."""
    settings, tensors = trained(checkpoint, "translation", TranslationSettings)
    tokenizer, written = tokenizer_of(tensors, checkpoint)
    build = partial(Translator, settings, tokenizer.get_vocab_size(), written)
    return settings, tokenizer, rebuilt(build, tensors, checkpoint).eval()


def precision_of(settings: TranslationSettings) -> torch.autocast:
    """That which the test sets were computed in."""
    return torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bf16")


def standard_input(content: bytes) -> Iterator[str]:
    """Its lines, without spaces around; a line may be empty, and stays so."""
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else (), 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise ExperimentError(
                f"standard input, line {number}: not UTF-8; convert the text, as iconv does."
            ) from None


@torch.no_grad()
def translations(
    model: Translator, tokenizer: Any, sources: Sentences, tokens: int, beams: int, advance: Callable[[int], None]
) -> Iterator[str]:
    """In the order of the sources, a block of them at a time; ``advance`` is told how many more are done."""
    count = len(sources.lengths)
    with scored_by_table(model.marian, beams):
        for first in range(0, count, _BLOCK):
            numbers = torch.arange(first, min(first + _BLOCK, count))
            texts = [""] * len(numbers)
            for part, rows in translated_parts(model, sources.subset(numbers), tokens, beams):
                for number, row in zip(part.tolist(), rows.tolist(), strict=True):
                    texts[number] = in_one_line(sentence(tokenizer, row))
                advance(len(part))
            yield from texts


def translated_parts(
    model: Translator, sources: Sentences, tokens: int, beams: int
) -> Iterator[tuple[Tensor, Tensor]]:  # (some,), (some, their length)
    """Numbers of sources, each once, and their translations.

    A batch does not wait for its last few sentences, which may take as long again: those of all batches are translated
    once more, together.
    """
    waiting = torch.arange(len(sources.lengths))
    for share in (_LEFT, 0.0):
        some = sources.subset(waiting)
        parts = [waiting[part] for part in Pairs(some, some).batches(tokens)]
        left = []
        for part in parts:
            written = model.translated(sources.take(part), beams, share if len(parts) > 1 else 0.0)
            ended = written[:, 0] != PAD
            yield part[ended], written[ended]
            left.append(part[~ended])
        waiting = torch.cat(left)
        if not len(waiting):
            return
