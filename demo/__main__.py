"""``python -m demo``: read the sources, train the four models, show and write what came of it."""

from __future__ import annotations

import argparse
import platform
import sys
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import tensorbed as tb
from demo.display import Display, track_files
from demo.training import LEARNING_RATE, WINDOW, Lanes, Run, Settings, train
from experiments.tasks.source_code.corpus import Corpus, read_corpus
from experiments.tasks.source_code.model import EMBEDDING_STD, HEAD_STD, LanguageModel
from experiments.tasks.source_code.page import Results, Row, write_results
from tensorbed.structures import Format

FORMATS: dict[str, Format] = {
    "full": tb.Dense(),
    "low rank": tb.LowRank(rank=8),
    "tensor train": tb.TensorTrain(rank=16),
    "smaller train": tb.TensorTrain(rank=8),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    given = parser.parse_args(arguments)
    settings = Settings(given.steps, given.vocab, given.dim, given.batch, given.seed)
    console = Console()
    try:
        root = given.corpus or Path(sysconfig.get_path("stdlib"))
        corpus = read_corpus(root, settings.vocab, lambda files: track_files(console, files))
        lanes = Lanes.of(corpus, settings.batch)
        given.out.mkdir(parents=True, exist_ok=True)  # now, not when minutes of training would be lost
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console.print(
        f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} to validate on, {len(corpus.words):,} words"
    )
    results = describe(settings, corpus, lanes, given.corpus, run_all(settings, corpus, lanes, console))
    console.print(results_table(results))
    console.print(f"page: {write_results(results, given.out)}", soft_wrap=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Train a small language model four times, with full and with compressed tables at both ends.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    usual = Settings()
    parser.add_argument("--steps", type=at_least(1), default=usual.steps, help="training steps of each model")
    parser.add_argument("--vocab", type=at_least(2), default=usual.vocab, help="words at most, <unk> among them")
    parser.add_argument("--dim", type=at_least(1), default=usual.dim, help="numbers per word")
    parser.add_argument("--batch", type=at_least(1), default=usual.batch, help="places the corpus is read in at once")
    parser.add_argument("--seed", type=at_least(0), default=usual.seed, help="of all that is drawn")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for demo.html and demo.json")
    parser.add_argument("--corpus", type=Path, help="folder of .py files, instead of Python's standard library")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers from the command line."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
        return int(text)

    return read


def run_all(settings: Settings, corpus: Corpus, lanes: Lanes, console: Console) -> tuple[Row, ...]:
    """Train the four models, as many at a time as there are cores.

    The products here are small: a core for each model is faster than all cores for one, and numbers do not depend on
    how many there are.
    """
    frequencies = corpus.log_frequencies()
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    models = [LanguageModel(frequencies, settings.dim, format, settings.seed) for format in FORMATS.values()]
    tokens = settings.batch * min(WINDOW, len(lanes.train) - 1)
    try:
        with Display(console, list(FORMATS), settings.steps, tokens) as display, ThreadPoolExecutor(cores) as pool:
            runs = [
                pool.submit(train, model, lanes, settings, line)
                for model, line in zip(models, display.lines, strict=True)
            ]
            with display.stopping():
                done = [run.result() for run in runs]
    finally:
        torch.set_num_threads(cores)
    return tuple(row_of(name, model, run) for name, model, run in zip(FORMATS, models, done, strict=True))


def row_of(name: str, model: LanguageModel, run: Run) -> Row:
    structure = model.embedding.structure  # the head's is the same
    return Row(
        name=name,
        format=written(FORMATS[name]),
        structure=structure.describe(),
        parameters=2 * structure.numel,
        ratio=structure.rows * structure.cols / structure.numel,
        model_parameters=sum(tensor.numel() for tensor in model.parameters()),
        run=run,
    )


def written(format: Format) -> str:
    """The format as it is written in code; its repr names what was left out, too."""
    rank = getattr(format, "rank", None)
    return f"tb.{type(format).__name__}({'' if rank is None else f'rank={rank}'})"


def describe(settings: Settings, corpus: Corpus, lanes: Lanes, folder: Path | None, rows: tuple[Row, ...]) -> Results:
    scored = lanes.valid[1:].flatten()
    # Of a folder only the name: where it lies is no part of the results.
    source = f"the standard library of Python {platform.python_version()}" if folder is None else folder.resolve().name
    options = asdict(settings) | ({} if folder is None else {"corpus": source})
    return Results(
        settings=settings,
        corpus={
            "source": source,
            "files": corpus.files,
            "words": len(corpus.words),
            "train_tokens": len(corpus.train),
            "valid_tokens": len(corpus.valid),
            "scored_tokens": len(scored),
            "unknown_share": (scored == 0).double().mean().item(),
            "perplexity_by_frequency": (-corpus.log_frequencies()[scored].double().mean()).exp().item(),
        },
        model={
            "hidden": 2 * settings.dim,
            "window": WINDOW,
            "learning_rate": LEARNING_RATE,
            "embedding_std": EMBEDDING_STD,
            "head_std": HEAD_STD,
        },
        versions={"Python": platform.python_version(), "PyTorch": torch.__version__, "tensorbed": tb.__version__},
        command="python -m demo " + " ".join(f"--{name} {value}" for name, value in options.items()),
        rows=rows,
    )


def results_table(results: Results) -> Table:
    # Narrow enough for the 80 columns of output that is not a terminal; seconds are on the page.
    table = Table(title="One language model, four formats at both ends", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption = "ratio: two full tables over the two kept; the paper has one over two, half"
    table.title_justify = table.caption_justify = "left"
    table.pad_edge, table.collapse_padding = False, True
    table.add_column("tables", style="bold", no_wrap=True)
    table.add_column("format", no_wrap=True)
    for heading in ("both", "ratio", "model", "perplexity"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results.rows:
        sizes = (f"{row.parameters:,}", f"{row.ratio:.1f}", f"{row.model_parameters:,}")
        table.add_row(row.name, row.format, *sizes, f"{row.run.perplexity:.1f}")
    return table


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; nothing was written")
