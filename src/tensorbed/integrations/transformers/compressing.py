"""A folder of a model into a folder of the compressed model, which is put in place when it is complete."""

import errno
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from tensorbed.compress.finding import MIN_ROWS, Formats, Weight, found_tables
from tensorbed.compress.planning import DEFAULT_RATIO, SpoilsHeadsError, parsed_bytes, plan
from tensorbed.compress.replacing import compress_
from tensorbed.compress.report import Plan, Report, why_nothing
from tensorbed.files.saving import sync, sync_folder
from tensorbed.integrations.transformers import folders
from tensorbed.integrations.transformers.cards import file_bytes, note_on, write_note
from tensorbed.nn.head import Head
from tensorbed.progress import track
from tensorbed.structures import Format
from tensorbed.structures.formats import Budget
from tensorbed.structures.registry import plain_format

_HARMLESS = 0.02  # a fit error that no head is hurt by; 8 bits have less
_WAYS_OUT = (
    "Ask for no smaller tables, give --calibrate FILE with a few hundred lines of typical text, or say --yes if the "
    "model is trained again afterwards."
)
_FULL = (errno.ENOSPC, errno.EDQUOT)  # what systems say of a disk without space, or without more for this user
_TOKENS = 512  # of a text that the model is calibrated on


@dataclass(frozen=True)
class CompressedFolder:
    """What was written, and what the user should know of it."""

    source: Path  # as it was named: a folder, or a model of the Hub
    out: Path
    report: Report
    disk_before: int  # bytes of the weights on disk
    disk_after: int
    notes: tuple[str, ...]
    unpacked: int | None  # of a GGUF file, bytes of its weights as they come out of it
    dtype: str  # of the weights that are not compressed

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for JSON."""
        paths = {"source": str(self.source), "out": str(self.out)}
        return {**vars(self), **paths, "report": self.report.to_dict(), "notes": list(self.notes)}


def compress_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: Format | None,
    *,
    ratio: float | None = None,
    budget: str | int | None = None,
    force: bool = False,
    calibrate: Sequence[str] | None = None,
    careful: bool = True,
    dtype: torch.dtype | None = None,
    tell: Callable[[str], None] | None = None,
    hub_name: str | None = None,
    **where: Any,
) -> CompressedFolder:
    """Compress the model of a folder into another, which has the tokenizer and all small files of the first.

    Args:
        out: written beside itself and put in place when complete; ``force`` replaces one that is there.
        format: or ``None``, to have one chosen for each table by :func:`tensorbed.plan` under ``ratio`` or ``budget``,
            by default at 7 times fewer bytes than float32 takes, or what suits a vocabulary head.
        calibrate: texts that the model reads, so that formats weigh errors as they are met there.
        careful: refuse a size at which a vocabulary head that is not calibrated is likely to be spoilt.
        dtype: of the model, by default that of its file; ratios are counted from it.
        tell: called with what the user should know before the work begins.
        hub_name: of the model on the Hub, where ``source`` is its folder in the cache.
        where: which tables, ``min_rows``, ``skip``, ``tied`` and ``include_heads`` of :func:`tensorbed.compress_`.
    """
    where = {"min_rows": MIN_ROWS, "skip": (), "tied": "keep", "include_heads": True, **where}
    source, out = Path(source), Path(out)
    named = source if hub_name is None else Path(hub_name)
    folder = folders.opened(source)
    check_target(out, source, force)
    if folder.is_compressed:
        raise ValueError(f"{named} is compressed already; compress the model it was made of.")
    folders.refuse_adapter(folder.place)
    files, notes_on_files = folders.rest_of(folder)
    model, notes = folders.load_model(folder, dtype)
    weights, left = found_tables(model, format or plain_format(), **where)
    if not weights:
        raise ValueError(f"{named}: nothing can be compressed: {why_nothing(left)}")
    asked = {"ratio": ratio, "budget": budget, **where}
    before, after = expected_size(model, weights, format, asked)
    check_space(out, after + sum((source / file).stat().st_size for file in files))
    dtype_name = str(model.dtype).removeprefix("torch.")
    if folder.gguf and tell is not None:
        smaller = ", or about half of that with --dtype bfloat16" if model.dtype.itemsize > 2 else ""
        tell(
            f"{folder.gguf} is unpacked: {megabytes(folder.weight_bytes)} become {megabytes(before)} in {dtype_name}, "
            f"of which the tables alone are compressed; {out} will take about {megabytes(after)}{smaller}."
        )
    # Of a GGUF file it is written anew: whether that can be shall be known before the fit.
    tokenizer: Any = folders.load_tokenizer(folder) if folder.gguf or calibrate is not None else None
    read = None if calibrate is None else _reader(folder, tokenizer, calibrate)
    formats: Formats = format or planned(model, asked, careful=careful and read is None)
    if isinstance(formats, Plan):
        notes += formats.notes
        if not any(formats.values()):
            raise ValueError(
                f"{named}: all tables may stay as they are, they take {megabytes(formats.dense)} and "
                f"{megabytes(int(formats.allowed))} are allowed; ask for less, --ratio 7 for instance."
            )
    report = compress_(model, formats, calibrate=read, **where)
    of_heads = [e for e in report.entries if any(isinstance(model.get_submodule(name), Head) for name in e.names)]
    heads = {entry.names[0]: entry.error for entry in of_heads}
    better = f"tensorbed compress {shlex.quote(str(named))} {shlex.quote(str(out))} --force --format hot"
    notes += _notes_on_heads(heads, formats, calibrate is not None, better)
    check_target(out, source, force)  # again: fits take minutes
    with put_in_place(out) as part, folders.quiet():
        for file in files:  # first, so that what the model itself saves prevails
            (part / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / file, part / file)
        type(model).save_pretrained(model, part / folder.inside)  # its own, without a note on this folder
        if folder.gguf:
            tokenizer.save_pretrained(part / folder.inside)
        write_note(part, note_on(model, out.resolve().name, folder.modules is not None, hub_name))
    return CompressedFolder(
        source=named,
        out=out,
        report=report,
        disk_before=folder.weight_bytes,
        disk_after=folders.opened(out).weight_bytes,
        notes=(*notes, *notes_on_files),
        unpacked=before if folder.gguf else None,
        dtype=dtype_name,
    )


def expected_size(
    model: nn.Module, weights: Sequence[Weight], format: Format | None, asked: Mapping[str, Any]
) -> tuple[int, int]:
    """Bytes of a model's weights before and after: of a format as it is, of one to be chosen what it has to keep to."""
    dense = kept = after = 0
    for weight in weights:
        (rows, cols), dtype = weight.tensor.shape, weight.tensor.dtype
        dense += weight.tensor.nbytes
        inside = {id(module) for module in weight.places.values()}
        others = (module for module in model.modules() if id(module) not in inside)
        if any(parameter is weight.tensor for module in others for parameter in module._parameters.values()):
            kept += weight.tensor.nbytes  # a layer that is not compressed goes on with it, its tie broken
        if format is not None:
            with suppress(ValueError):  # the fit will say why
                after += format.bind(Budget(rows, cols, dtype)).bytes(dtype) * len(weight.groups(asked["tied"]))
    if format is None and asked["budget"] is not None:
        after = min(dense, parsed_bytes(asked["budget"]))
    elif format is None:
        after = int(dense / (asked["ratio"] or _default_ratio(model)))
    before = file_bytes(model)
    return before, before - dense + kept + after


def _reader(folder: folders.Folder, tokenizer: Any, texts: Sequence[str]) -> Callable[[Any], None]:
    """Runs a model on texts, one at a time: what is padded would be counted as used."""
    with folders.quiet():
        limit = folders.token_limit(folder, tokenizer, _TOKENS)
        ids = tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]

    def read(model: Any) -> None:
        for one in track([one for one in ids if one], "calibrating"):
            tokens = torch.tensor([one], device=model.device)
            both = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
            try:
                model(input_ids=tokens, **both)
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                said = " ".join(str(error).split())
                raise ValueError(f"the model in {folder.root} does not read the texts: {said[:500]}") from error

    return read


def _default_ratio(model: Any) -> float:
    return DEFAULT_RATIO * float(model.dtype.itemsize) / 4


def planned(model: nn.Module, where: Mapping[str, Any], *, careful: bool) -> Plan:
    """Formats that suit heads, without a ratio or a budget whatever they reach; others where nobody is careful."""
    unasked = where["ratio"] is None and where["budget"] is None
    try:
        return plan(model, **({**where, "ratio": _default_ratio(model)} if unasked else where))
    except SpoilsHeadsError as refusal:
        if unasked:
            return plan(model, **{**where, "ratio": refusal.ratio * (1 - 1e-9)})
        if careful:
            raise ValueError(f"{refusal.reach} {refusal.heads} {_WAYS_OUT}") from None
        return plan(model, **where, careful=False)


def shown_plan(model: nn.Module, where: Mapping[str, Any]) -> tuple[Plan, list[str]]:
    """What :func:`compress_folder` would take, or would if it were told to, and what the errors do not tell."""
    notes = []
    try:
        found = planned(model, where, careful=True)
    except ValueError as refusal:
        found = planned(model, where, careful=False)  # which says itself what is wrong with a size
        notes.append(f"tensorbed compress refuses this: {refusal}")
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    heads = {name: one.error for name, one in found.chosen.items() if id(model.get_submodule(name).weight) in linear}
    return found, notes + _notes_on_heads(heads, found, False, "tensorbed compress MODEL OUT-DIR --format hot")


def _notes_on_heads(
    heads: Mapping[str, float | None], formats: Formats, calibrated: bool, better_command: str
) -> list[str]:
    """Errors of a head meet every score, which its fit error does not tell."""
    notes = []
    for name, error in heads.items():
        format = formats if isinstance(formats, Format) else formats.get(name)
        if error is None or error <= _HARMLESS or format is None or (calibrated and format.suits_heads):
            continue
        if format.suits_heads:
            better = "--calibrate FILE, with a few hundred lines of typical text, loses less"
            notes.append(f"{name} is used as a vocabulary head, whose errors meet every score: {better}.")
        else:
            notes.append(
                f"{name} is used as a vocabulary head, and {format!r} may cost it more predictions than its fit error "
                "says; check what is left with tensorbed verify. This keeps nearly all of them, with a few hundred "
                f"lines of typical text: {better_command} --calibrate texts.txt"
            )
    return notes


def check_target(out: Path, source: Path, force: bool) -> None:
    """Refuse what would lose something, before any work is done; what a killed command took away is put back first."""
    here, there = out.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"{out} and {source} lie in each other; write to a folder of its own.")
    if not here.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent}; make it first.")
    beside = _beside(here, "part")
    try:  # permissions do not tell of file systems that are read-only, nor of names that are too long
        beside.mkdir()
        beside.rmdir()
    except OSError as error:
        raise OSError(
            f"{here.parent} cannot be written to ({error.strerror}), and {here.name} would be in it; write to another "
            "folder, or change its permissions."
        ) from None
    if old := folders.left_of(here):
        old.rename(here)
    if not here.exists() or (here.is_dir() and not any(here.iterdir())):
        return
    if not here.is_dir():
        raise FileExistsError(f"{out} is a file; name a folder.")
    if not force:
        raise FileExistsError(f"{out} exists already; --force (force=True) replaces it.")
    with suppress(OSError, ValueError):
        if folders.opened(here).is_compressed:
            return
    raise FileExistsError(
        f"{out} was not written by tensorbed, its config.json does not say so, and it is not replaced; remove it "
        "yourself, or name another folder."
    )


def check_space(out: Path, needed: int) -> None:
    """Refuse what will not fit, before any work is done; something may fill the disk all the same."""
    free = shutil.disk_usage(out.resolve().parent).free
    if free < needed:
        raise OSError(
            f"{out} will take about {megabytes(needed)}, and its disk has {megabytes(free)} left; free some space, or "
            "write to another disk."
        )


def megabytes(count: int) -> str:
    """For people."""
    return f"{count / 1e6:,.1f} MB"


def _beside(out: Path, what: str) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(folders.TOKEN)}.{what}")


@contextmanager
def put_in_place(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to write into, which takes its place at the end: there is the old one or the new one.

    But for a kill between two renames: then the old one is in ``.OUT.*.old``, and :func:`check_target` brings it back.
    """
    target = out.resolve()  # of a link, what it points to is replaced
    part, old = _beside(target, "part"), _beside(target, "old")
    part.mkdir()
    try:
        yield part
        # Readable by whom the folder is, weights too, and written by the system and not only kept in its memory.
        mode = part.stat().st_mode & 0o666
        for path in (*part.rglob("*"), part):
            if path.is_file():
                path.chmod(mode)
                sync(path)
            else:
                sync_folder(path)
        if target.exists():
            target.rename(old)
        try:
            part.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own, of a full disk too
        if isinstance(error, OSError) and error.errno not in _FULL:
            raise
        said = f"{error.strerror}." if isinstance(error, OSError) else str(error)
        raise OSError(f"{out} cannot be written, and nothing of it is left: {said}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
