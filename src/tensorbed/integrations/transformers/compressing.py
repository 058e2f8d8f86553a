"""A folder of a model into a folder of the compressed model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from tensorbed.convert import compress_
from tensorbed.finding import MIN_ROWS, Formats
from tensorbed.integrations.transformers.folders import (
    Folder,
    Rest,
    check_target,
    load_model,
    load_tokenizer,
    opened,
    put_in_place,
    quiet,
    refuse_adapter,
    rest_of,
    token_limit,
)
from tensorbed.nn.head import Head
from tensorbed.planning import SpoilsHeadsError, plan
from tensorbed.plans import Plan
from tensorbed.progress import track
from tensorbed.report import Report
from tensorbed.structures import Format

_HARMLESS = 0.02  # a fit error that no head is hurt by; 8 bits have less
_WAYS_OUT = (
    "Ask for no more than that, give --calibrate FILE with a few hundred lines of typical text, or say --yes if the "
    "model is trained again afterwards."
)
_TOKENS = 512  # of a text that the model is calibrated on


@dataclass(frozen=True)
class CompressedFolder:
    """What was written, and what the user should know of it.

    Attributes:
        disk_before, disk_after: bytes of the weights on disk.
    """

    source: Path
    out: Path
    report: Report
    disk_before: int
    disk_after: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for JSON."""
        return {
            "source": str(self.source),
            "out": str(self.out),
            "report": self.report.to_dict(),
            "disk_before": self.disk_before,
            "disk_after": self.disk_after,
            "notes": list(self.notes),
        }


def compress_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: Format | None,
    *,
    ratio: float | None = None,
    budget: str | int | None = None,
    min_rows: int = MIN_ROWS,
    skip: Sequence[str] = (),
    untie: bool = False,
    include_heads: bool = True,
    force: bool = False,
    calibrate: Sequence[str] | None = None,
    careful: bool = True,
) -> CompressedFolder:
    """Compress the model of a folder into another, which has the tokenizer and all small files of the first.

    Args:
        out: written beside itself and put in place when complete; ``force`` replaces one that is there.
        format: or ``None``, to have a format chosen for each table by :func:`tensorbed.plan` under ``ratio`` or
            ``budget``.
        calibrate: texts that the model reads, so that formats weigh errors as they are met there; see
            :func:`tensorbed.compress_`.
        careful: refuse a ``ratio`` or ``budget`` at which a vocabulary head is likely to be spoilt, where there are no
            texts to calibrate it with.
    """
    source, out = Path(source), Path(out)
    folder = opened(source)
    check_target(out, source, force)
    if folder.is_compressed:
        raise ValueError(f"{source} is compressed already; compress the model it was made of.")
    refuse_adapter(folder.place)
    rest = rest_of(folder)
    model, notes = load_model(folder)
    read = None if calibrate is None else _reader(folder, calibrate)
    where: Any = {"min_rows": min_rows, "skip": skip, "tied": "untie" if untie else "keep"}
    where["include_heads"] = include_heads
    formats: Formats = format or planned(model, {"ratio": ratio, "budget": budget, **where}, careful, read is not None)
    report = compress_(model, formats, calibrate=read, **where)
    if not report.entries:
        raise ValueError(f"{source}: {report.warnings[0]} Lower --min-rows (min_rows) if a table is too small.")
    heads = {e.names[0]: e.error for e in report.entries if any(_is_head(model, name) for name in e.names)}
    notes += _notes_on_heads(heads, formats, calibrate is not None)
    check_target(out, source, force)  # again: fits take minutes
    with put_in_place(out) as part:
        _write(folder, rest, model, part)
    notes += rest.notes
    after = opened(out).weight_bytes
    return CompressedFolder(source, out, report, folder.weight_bytes, after, tuple(notes))


def _reader(folder: Folder, texts: Sequence[str]) -> Callable[[Any], None]:
    """Runs a model on texts, one at a time: what is padded would be counted as used."""
    tokenizer = load_tokenizer(folder)
    with quiet():
        limit = token_limit(folder, tokenizer, _TOKENS)
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


def _is_head(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), Head)


def planned(model: nn.Module, where: Mapping[str, Any], careful: bool, calibrated: bool) -> Plan:
    """Formats that suit heads where they are small enough; calibrated, others may do."""
    try:
        return plan(model, **where)
    except SpoilsHeadsError as refusal:
        if careful and not calibrated:
            raise ValueError(f"{refusal.reach} {refusal.heads} {_WAYS_OUT}") from None
        return plan(model, **where, careful=False)


def notes_on_plan(model: nn.Module, planned: Plan) -> list[str]:
    """What its errors do not tell of a model."""
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    heads = {name: one.error for name, one in planned.chosen.items() if id(model.get_submodule(name).weight) in linear}
    return _notes_on_heads(heads, planned, calibrated=False)


def _notes_on_heads(heads: Mapping[str, float | None], formats: Formats, calibrated: bool) -> list[str]:
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
            better = (
                "--format hot" if calibrated else "--format hot --calibrate FILE, with a few hundred lines of text,"
            )
            notes.append(
                f"{name} is used as a vocabulary head, and {format!r} may cost it more predictions than its fit error "
                f"says: {better} keeps nearly all of them at a ratio of 7. Check what is left with tensorbed verify."
            )
    return notes


def _write(folder: Folder, rest: Rest, model: Any, part: Path) -> None:
    """The rest of the folder first, so that what the model itself saves prevails."""
    rest.copy(folder.root, part)
    try:
        with quiet():
            model.save_pretrained(part / folder.inside)
            if folder.gguf:
                load_tokenizer(folder).save_pretrained(part / folder.inside)
    except SafetensorError as error:  # which is no OSError, not even of a full disk
        raise OSError(f"the weights cannot be written to {part}: {error}") from error
