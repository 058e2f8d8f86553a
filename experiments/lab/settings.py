"""What a run is told: fields that every task has, rows from TOML files, changed by options.

A task adds fields of its own in a subclass. A field's help makes it an option of the command line.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from experiments.lab import formats
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.files import text_of
from experiments.lab.optimisers import OPTIMIZERS, SCHEDULES

_LIMITS = ("least", "above", "below", "choices")
_NAME = re.compile(r"[\w=+-][\w=+.-]{0,99}", re.ASCII)  # a row's name is a folder's too
S = TypeVar("S", bound="Settings")


def option(default: Any, help: str | None = None, **limits: Any) -> Any:
    """A field with what may stand in it: ``least``, ``above``, ``below``, ``choices``."""
    return field(default=default, metadata={"help": help, **dict.fromkeys(_LIMITS), **limits})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of one row. Every field can stand in a TOML file; ``shape`` is ``(row_factors, col_factors)``."""

    dataset: str = option("", "what to train on")
    row: str
    format: str = option(formats.FULL, "of the tables, such as tt or tt(order=4)")
    rank: int | None = option(None, "of the tables", least=1)
    ratio: float | None = option(None, "how many times smaller the tables are to be", above=0)
    shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    std: float | None = option(None, "of the drawn tables; left out, the task's or what the search found", above=0)
    batch: int = option(32, "rows of a batch", least=1)
    lr: float = option(1e-3, "learning rate; left out, what the search found", above=0)
    clip: float = option(1.0, above=0)
    optimizer: str = option("adam", "by which weights are moved", choices=OPTIMIZERS)
    weight_decay: float = option(0.0, least=0)
    schedule: str = option("linear", "how the rate falls", choices=SCHEDULES)
    warm_up: float = option(0.0, "share of the steps in which the rate rises", least=0, below=1)
    epochs: int = option(10, "at most", least=1)
    patience: int | None = option(3, "validations without improvement before the end", least=1)
    precision: str = option("fp32", "fp32 or bf16", choices=("fp32", "bf16"))
    seed: int = option(0, "left out, the row's own, or 0", least=0, below=2**32)

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name), each.metadata)
        if not _NAME.fullmatch(self.row):
            raise ExperimentError(f"row={self.row!r}: a name of letters, digits and - _ = + . is needed, 100 at most.")
        formats.check_sizes(self.format, self.sizes())

    def sizes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in formats.SIZES}

    def table_format(self) -> Any:
        return formats.made(self.format, self.sizes())

    def fingerprint(self) -> str:
        """The same for the same configuration whatever the seed: rows of a table have to agree in it."""
        values = {name: value for name, value in asdict(self).items() if name != "seed"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "fingerprint": self.fingerprint()}


def _check(name: str, value: Any, told: Mapping[str, Any]) -> None:
    if value is None or not told:
        return
    if told["choices"] is not None and value not in told["choices"]:
        raise unknown(name, value, told["choices"])
    least, above, below = told["least"], told["above"], math.inf if told["below"] is None else told["below"]
    if least is not None and not least <= value < below:
        limit = "" if below == math.inf else f" and below {below}"
        raise ExperimentError(f"{name}={value}: it must be at least {least}{limit}.")
    if above is not None and not above < value < below:
        raise ExperimentError(f"{name}={value}: it must be above {above} and finite.")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    if not path.exists():
        raise ExperimentError(f"{path} does not exist; --config takes a TOML file or the name of a row.")
    try:
        return tomllib.loads(text_of(path))
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{path} is no TOML file: {error}.") from None


def hints(kind: Any) -> dict[str, Any]:
    """The types of all settings, looked up once: thousands of lines are read."""
    return _hints(kind)


_hints = cache(get_type_hints)


def checked(kind: type[Settings], values: Mapping[str, Any], where: str) -> None:
    """Only names of settings, with values of their types."""
    types = hints(kind)
    for name, value in values.items():
        if name not in types:
            raise unknown("key", name, types, where)
        wanted = get_args(types[name]) if NoneType in get_args(types[name]) else (types[name],)
        allowed = tuple(_PLAIN.get(one, (list, tuple)) for one in wanted)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in wanted):
            said = " or ".join(getattr(one, "__name__", str(one)) for one in wanted if one is not NoneType)
            raise ExperimentError(f"{where}{name} = {value!r} should be {said}.")


_PLAIN: dict[Any, Any] = {str: str, bool: bool, int: int, float: (int, float), NoneType: NoneType}


def made(kind: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Settings from plain values, checked."""
    checked(kind, values, where)
    given = {name: _tuples(value) for name, value in values.items()}
    given["format"] = formats.canonical(given.get("format", formats.FULL), where)
    shape = given.get("shape")
    if shape is not None and (len(shape) != 2 or not all(isinstance(part, tuple) for part in shape)):
        raise ExperimentError(
            f"{where}shape = {values['shape']} should be two lists: factors of the rows, of the columns."
        )
    try:
        return kind(**given)
    except TypeError as error:
        raise ExperimentError(f"{where}{error}.") from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def recorded(kind: type[S], record: Mapping[str, Any]) -> S | None:
    """The settings a result line was made with; none if it tells none, or such as are no more."""
    settings = record.get("settings")
    if not isinstance(settings, dict):
        return None
    try:
        return made(kind, {name: value for name, value in settings.items() if name != "fingerprint"})
    except ExperimentError:
        return None
