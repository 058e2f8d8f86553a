"""What a run is told: fields that every task has, rows from TOML files, changed by options.

A task adds fields of its own in a subclass. A field's help makes it an option of the command line.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from experiments.lab import formats
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.files import text_of
from experiments.lab.optimisers import OPTIMIZERS, SCHEDULES

_NAME = re.compile(r"[\w=+-][\w=+.-]{0,99}", re.ASCII)  # a row's name is a folder's too
_PLAIN: dict[Any, Any] = {str: str, bool: bool, int: int, float: (int, float), NoneType: NoneType}
S = TypeVar("S", bound="Settings")
types_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)  # thousands of lines are read


def option(default: Any, help: str | None = None, **limits: Any) -> Any:
    """A field with what may stand in it: ``least``, ``above``, ``below``, ``choices``."""
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Fields that are what their limits allow."""

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value, limits = each.name, getattr(self, each.name), each.metadata
            if value is None:
                continue
            if "choices" in limits and value not in limits["choices"]:
                raise unknown(name, value, limits["choices"])
            below = limits.get("below", math.inf)
            if "least" in limits and not limits["least"] <= value < below:
                limit = "" if below == math.inf else f" and below {below}"
                raise ExperimentError(f"{name}={value}: it must be at least {limits['least']}{limit}.")
            if "above" in limits and not limits["above"] < value < below:
                raise ExperimentError(f"{name}={value}: it must be above {limits['above']} and finite.")


@dataclass(frozen=True, kw_only=True)
class Places(Checked):
    """Where runs read and write."""

    data: Path | None = option(None, "folder that holds the data; left out, what is public is taken")  # noqa: RUF009
    out: Path = option(Path("out/experiments"), "checkpoints, logs; left out, out/experiments")  # noqa: RUF009
    results: Path | None = option(None, "where lines are added; docs/results, with --smoke --out")  # noqa: RUF009
    smoke: bool = option(False, "tiny slices, in seconds")


@dataclass(frozen=True, kw_only=True)
class How(Places):
    """What is no part of a run's configuration: beside places, what becomes of a checkpoint, and in what it is made."""

    kind: str = option("", "search (a point of its grid, validation only) or league", choices=("", "search", "league"))
    resume: bool = option(False, "go on from the checkpoint in --out")
    restart: bool = option(False, "begin anew where there is a checkpoint")
    resume_if_possible: bool = option(False)
    checkpoint_steps: int | None = option(None, "between checkpoints, at most", least=1)
    checkpoint_minutes: float = option(5.0, "between checkpoints, at most; 5", least=0)
    accumulate: int = option(1, "pieces a batch is computed in", least=1)
    fsdp: bool = option(False, "shard the model over processes (torchrun)")
    tensorboard: bool = option(False, "write logs below --out")
    keep_model: bool = option(False, "leave the trained model in --out")


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
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
        super().__post_init__()
        if not _NAME.fullmatch(self.row):
            raise ExperimentError(f"row={self.row!r}: a name of letters, digits and - _ = + . is needed, 100 at most.")
        formats.check_sizes(self.format, self.sizes())

    def sizes(self) -> dict[str, Any]:
        return {name: value for name in formats.SIZES if (value := getattr(self, name)) is not None}

    def table_format(self, rows: int, cols: int) -> Any:
        """For a table of this size."""
        return formats.made(self.format, self.sizes(), rows, cols)

    def fingerprint(self) -> str:
        """The same for the same configuration whatever the seed: rows of a table have to agree in it."""
        values = {name: value for name, value in asdict(self).items() if name != "seed"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "fingerprint": self.fingerprint()}

    def as_line(self, task: str) -> dict[str, Any]:
        """What every line of results begins with: of which run it is."""
        names = ("dataset", "row", "seed", "format")
        return {"task": task, **{name: getattr(self, name) for name in names}, "settings": self.as_record()}


def with_options(
    function: Callable[..., None], *kinds: type[Checked], names: Iterable[str] | None = None, **helps: str
) -> Callable[..., None]:
    """A function for typer, with an option for each field of some kinds, or for those that are named.

    The function takes first, for each kind, a dictionary of the options that were given.
    """
    told: list[dict[str, Any]] = [{} for _ in kinds]
    for kind, options in zip(kinds, told, strict=True):
        for each in fields(kind):
            if each.metadata and (names is None or each.name in names):  # names and shapes stand in files
                help = helps.get(each.name, each.metadata["help"])
                named = f"--{each.name.replace('_', '-')}"  # no --no- beside a flag
                options[each.name] = Annotated[
                    types_of(kind)[each.name] | None, typer.Option(named, help=help, hidden=help is None)
                ]

    def command(**given: Any) -> None:
        values = [{name: given.pop(name) for name in options} for options in told]
        function(*({name: value for name, value in of.items() if value is not None} for of in values), **given)

    own = list(inspect.signature(function, eval_str=True).parameters.values())[len(kinds) :]
    by_name = inspect.Parameter.KEYWORD_ONLY
    every = [inspect.Parameter(name, by_name, default=None, annotation=of[name]) for of in told for name in of]
    command.__signature__ = inspect.Signature([*every, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*every, *own]}
    command.__doc__ = function.__doc__
    return command


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    if not path.exists():
        raise ExperimentError(f"{path} does not exist; --config takes a TOML file or the name of a row.")
    try:
        return tomllib.loads(text_of(path))
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{path} is no TOML file: {error}.") from None


def checked(kind: type[Settings], values: Mapping[str, Any], where: str) -> None:
    """Only names of settings, with values of their types."""
    types = types_of(kind)
    for name, value in values.items():
        if name not in types:
            raise unknown("key", name, types, where)
        wanted = get_args(types[name]) if NoneType in get_args(types[name]) else (types[name],)
        allowed = tuple(_PLAIN.get(one, (list, tuple)) for one in wanted)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in wanted):
            said = " or ".join(getattr(one, "__name__", str(one)) for one in wanted if one is not NoneType)
            raise ExperimentError(f"{where}{name} = {value!r} should be {said}.")


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
    with suppress(ExperimentError):
        if isinstance(settings, dict):
            return made(kind, {name: value for name, value in settings.items() if name != "fingerprint"})
    return None
