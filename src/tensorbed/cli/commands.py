"""The command ``tensorbed``. It needs typer and rich, which ``tensorbed[cli]`` brings; the library does not.

Results go to standard output, what went wrong and progress to standard error; exit codes are those that its help names.
"""

import json
import re
import shlex
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tensorbed._version import __version__
from tensorbed.checks import require_number
from tensorbed.cli import terminal
from tensorbed.cli.inspection import inspect as look_into
from tensorbed.compress.finding import MIN_ROWS
from tensorbed.compress.planning import DEFAULT_RATIO, parsed_bytes
from tensorbed.compress.planning import plan as make_plan
from tensorbed.info import info as collect
from tensorbed.structures import Format
from tensorbed.structures.registry import formats

__all__ = ["app"]

_SIZE = re.compile(r"(\d+)[x*](\d+)", re.IGNORECASE)
_DIGITS = 1000  # of a size; Python makes no number of very many

app = typer.Typer(cls=terminal.OneLineErrors, no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, for programs.")]
Ratio = Annotated[float | None, typer.Option(help="How many times smaller the tables shall be, all together.")]
Budget = Annotated[str | None, typer.Option(help="Or the bytes that all tables may take: 20MB, 512KiB.")]
MinRows = Annotated[int, typer.Option(min=1, help="Tables with fewer rows stay as they are.")]
Skip = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Tables to leave alone; may be repeated.")]

_MODEL = "A folder of transformers' save_pretrained, or owner/name of a model of the Hugging Face Hub."

_AUTO = "auto"
_SPELLINGS = {name: spelling for format in formats() for name, spelling in format.spellings().items()}
_Name = StrEnum("_Name", [*_SPELLINGS, _AUTO])  # type: ignore[misc]  # known when the command runs
_DEFAULT = _Name(_AUTO)
_NAMES = "; ".join([*(f"{name}: {spelling.help}" for name, spelling in _SPELLINGS.items()), "auto: by measured error."])
_Dtype = StrEnum("_Dtype", ["float32", "bfloat16", "float16"])  # as torch names them


def _say_version(wanted: bool) -> None:
    if wanted:
        terminal.say(f"tensorbed {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Embedding tables as tensor trains, product quantised, or as other structured matrices, for PyTorch.

    A model of transformers or sentence-transformers, in a folder or by its name on the Hub, becomes a smaller folder:

        tensorbed inspect  all-MiniLM-L6-v2
        tensorbed plan     all-MiniLM-L6-v2
        tensorbed compress all-MiniLM-L6-v2 small
        tensorbed verify   small --against all-MiniLM-L6-v2 --texts sentences.txt

    Exit codes: 0 done, 1 refused or a check failed, with the reason on standard error, 2 wrong usage, 130 interrupted.
    """


@app.command()
def inspect(
    what: Annotated[Path, typer.Argument(metavar="MODEL|FILE", help=f"{_MODEL} Or a safetensors file.")],
    as_json: AsJson = False,
) -> None:
    """What is inside: tables, their structure and sizes, the scale of their numbers and their spectrum.

    Dense tables of at least 2,000 rows are shown too, with what they could be. The spectrum is that of a sample of
    rows: one that falls fast can be of low rank, a flat one not. Of a file that tb.save did not write, such as
    model.safetensors, tensors are shown that look like tables by name and shape.

    Example: `tensorbed inspect all-MiniLM-L6-v2`
    """
    folder = what if what.suffix == ".safetensors" else _local_folder(what)
    if folder.is_dir():
        _integration()
    found = look_into(folder)
    if as_json:
        _print_json(asdict(found))
        return
    terminal.show_inspection(found)
    if folder.is_dir() and any(one.possible for one in found.layers):
        terminal.say(f"Measure what that costs: tensorbed plan {shlex.quote(str(what))}")


@app.command()
def plan(
    what: Annotated[list[str], typer.Argument(metavar="MODEL|ROWSxDIM...", help=f"{_MODEL} Or sizes: 267735x512.")],
    ratio: Ratio = None,
    budget: Budget = None,
    min_rows: Annotated[
        int | None, typer.Option(min=1, help=f"Smaller tables stay as they are; {MIN_ROWS} if not said.")
    ] = None,
    skip: Skip = None,
    as_json: AsJson = False,
) -> None:
    """Which format each table should take, under a ratio or a budget.

    Of a model the errors of the formats are measured on its tables, without training, and the ratio is 7 if none is
    said. Sizes alone are planned as tensor trains, which are trained from scratch.

    Example: `tensorbed plan all-MiniLM-L6-v2 --budget 6MB` or `tensorbed plan 267735x512 --ratio 50`
    """
    if ratio is not None and budget is not None:
        raise typer.BadParameter("give a --ratio or a --budget, not both.")
    _check_size(ratio, budget)
    notes: list[str] = []
    if len(what) == 1 and not _SIZE.fullmatch(what[0]) and (Path(what[0]).exists() or "/" in what[0]):
        folders = _integration().folders
        model, notes = folders.load_model(folders.opened(_local_folder(Path(what[0]))))
        where = {"ratio": ratio, "budget": budget, "min_rows": min_rows or MIN_ROWS, "skip": skip or ()}
        found, more = _integration().compressing.shown_plan(model, where)
        notes += more
    else:
        sizes = _tables(what)
        if min_rows is not None or skip:
            raise typer.BadParameter("--min-rows and --skip are for a model; of sizes give only those that are meant.")
        if ratio is None and budget is None:
            raise typer.BadParameter("give a --ratio or a --budget, for instance --ratio 50.")
        found = make_plan(sizes, ratio=ratio, budget=budget, purpose="train")
    if as_json:
        _print_json({**found.to_dict(), "notes": [*found.notes, *notes]})
    else:
        terminal.show_plan(found, notes)


def _tables(texts: list[str]) -> dict[str, tuple[int, int]]:
    """Sizes by what they were written as, with a number where that was said before."""
    found: dict[str, tuple[int, int]] = {}
    for place, text in enumerate(texts):
        match = _SIZE.fullmatch(text)
        if match is None:
            raise typer.BadParameter(
                f"{text!r} is neither a table nor a model: there is no file or folder {text}; give rows and columns as "
                "ROWSxDIM, for instance 267735x512, or one model, as a folder or as owner/name of the Hugging Face Hub."
            )
        if len(text) > _DIGITS:
            raise ValueError(f"{text[:20]}...: {len(text)} characters are a table of more numbers than one can have.")
        before = texts[:place].count(text)
        found[f"{text} ({before + 1})" if before else text] = (int(match[1]), int(match[2]))
    return found


@app.command()
def compress(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help=_MODEL)],
    out: Annotated[Path, typer.Argument(metavar="OUT-DIR", help="Written whole or not at all.")],
    format: Annotated[_Name, typer.Option(help=_NAMES)] = _DEFAULT,
    ratio: Annotated[float | None, typer.Option(help="How many times smaller tables shall be; 7 of float32.")] = None,
    budget: Budget = None,
    min_rows: MinRows = MIN_ROWS,
    skip: Skip = None,
    untie: Annotated[bool, typer.Option("--untie", help="Break tables that share their weight apart.")] = False,
    no_heads: Annotated[bool, typer.Option("--no-heads", help="Leave vocabulary heads dense.")] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts, one a line, that the model reads: errors are weighed as met there."),
    ] = None,
    dtype: Annotated[
        _Dtype | None, typer.Option(help="Of the weights that stay dense; that of MODEL if not said, float32 of GGUF.")
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Also formats that are likely to spoil a vocabulary head, to be trained again."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT-DIR if tensorbed wrote it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compress the embedding tables and vocabulary heads of a model.

    OUT-DIR gets the compressed weights, the tokenizer and all other small files. It is loaded with `from_pretrained` or
    `SentenceTransformer` after `import tensorbed.integrations.transformers`.

    Example: `tensorbed compress all-MiniLM-L6-v2 small` or, for a language model,
    `tensorbed compress HuggingFaceTB/SmolLM2-135M small --calibrate texts.txt`
    """
    chosen, ratio = _format(format, ratio, budget)
    if calibrate is not None and chosen is not None and not chosen.weighs_use:
        able = [name for name in _SPELLINGS if (other := _format(name, None, None)[0]) and other.weighs_use]
        raise typer.BadParameter(f"--calibrate is for {', '.join(able)} and auto; {format} cannot weigh errors.")
    texts = None if calibrate is None else _integration().verifying.read_texts(calibrate)
    folder = _local_folder(source)
    done = _integration().compressing.compress_folder(
        folder,
        out,
        chosen,
        ratio=ratio,
        budget=budget,
        min_rows=min_rows,
        skip=skip or (),
        tied="untie" if untie else "keep",
        include_heads=not no_heads,
        force=force,
        calibrate=texts,
        dtype=None if dtype is None else getattr(torch, dtype),
        tell=lambda message: terminal.complain(f"tensorbed: {terminal.in_its_words(message)}"),
        careful=not yes,
        hub_name=None if folder == source else str(source),
    )
    if as_json:
        _print_json(done.to_dict())
    else:
        terminal.show_compressed(done)


def _format(name: str, ratio: float | None, budget: str | None) -> tuple[Format | None, float | None]:
    """The format, ``None`` for one to be chosen, and the ratio."""
    if budget is not None and (name != _AUTO or ratio is not None):
        raise typer.BadParameter("--budget is for --format auto, without a --ratio.")
    known = None if name == _AUTO else _SPELLINGS[name].format
    if isinstance(known, Format):
        if ratio is not None:
            terminal.complain(f"tensorbed: the ratio of {name} is what its bits make it; --ratio is not used.")
        return known, None
    _check_size(ratio, budget)
    return None if known is None else known(ratio=DEFAULT_RATIO if ratio is None else ratio), ratio


def _check_size(ratio: float | None, budget: str | None) -> None:
    """What cannot be a ratio or a budget is wrong usage, whatever the model."""
    try:
        if ratio is not None:
            require_number(ratio, "ratio", low=0)
        if budget is not None:
            parsed_bytes(budget)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if ratio is not None and ratio <= 1:
        fix = "give how many times smaller the tables shall be, for instance --ratio 7"
        raise typer.BadParameter(f"--ratio {ratio:g} makes nothing smaller: {fix}.")


@app.command()
def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT-DIR", help="The compressed model.")],
    against: Annotated[Path, typer.Option(metavar="MODEL", help="The model it was made of.")],
    texts: Annotated[Path, typer.Option(metavar="FILE", help="One text a line, UTF-8.")],
    batch: Annotated[int, typer.Option(min=1, help="Texts read at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="What is longer is cut.")] = 512,
    min_cosine: Annotated[float | None, typer.Option(help="Fail if the mean cosine is below.")] = None,
    max_perplexity_ratio: Annotated[float | None, typer.Option(help="Fail if perplexity grew by more.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the outputs of a compressed model with those of the original, on your own texts.

    Of a sentence-transformers folder the sentence embeddings are compared, of others the mean of the last hidden
    states; of a causal language model the perplexity too.

    Example: `tensorbed verify small --against all-MiniLM-L6-v2 --texts sentences.txt --min-cosine 0.99`
    """
    verifying = _integration().verifying
    lines = verifying.read_texts(texts)
    found = verifying.verify_folders(out, _local_folder(against), lines, batch=batch, max_tokens=max_tokens)
    if as_json:
        _print_json(asdict(found))
    else:
        terminal.show_verified(found)
    # Written so that NaN fails.
    if min_cosine is not None and not found.mean_cosine >= min_cosine:
        raise ValueError(f"the mean cosine is {found.mean_cosine:.6f}, below {min_cosine:g}.")
    if max_perplexity_ratio is None:
        return
    if found.perplexity is None:
        raise ValueError("the model has no causal head, and so no perplexity to check.")
    if not found.perplexity.ratio <= max_perplexity_ratio:
        raise ValueError(f"perplexity is {found.perplexity.ratio:.4f} times as large, above {max_perplexity_ratio:g}.")


@app.command()
def info(as_json: AsJson = False) -> None:
    """Versions, threads, and whether the compiled kernels are in use."""
    facts = collect()
    if as_json:
        _print_json(asdict(facts))
    else:
        terminal.say(*str(facts).split("\n"))


def _local_folder(model: Path) -> Path:
    """A folder as it is given; of a model of the Hub, by its name there, the folder in its cache."""
    return model if model.exists() else _integration().hub.local_folder(model)


def _integration() -> Any:
    """The integration with its modules; only commands that read folders wait for transformers."""
    try:
        from tensorbed.integrations import transformers
        from tensorbed.integrations.transformers import compressing, folders, hub, verifying  # noqa: F401
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("transformers", "accelerate"):
            raise
        install = 'pip install "transformers>=5.20" "accelerate>=1.10"'
        raise ValueError(f"folders of models need {missing}: {install}") from None
    return transformers


def _print_json(found: Any) -> None:
    # What Python writes for infinities and NaN is no JSON.
    plain = json.loads(json.dumps(found), parse_constant=lambda name: None)
    terminal.say(*json.dumps(plain, indent=2).split("\n"))
