"""What a run is told: rows of the paper's tables from TOML files, changed by options."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import tensorbed as tb
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.files import text_of

# Names of formats on the command line and in TOML files; the first is the one that is written into results.
FORMATS = {
    "full": ("full", "dense"),
    "low_rank": ("low_rank", "lr"),
    "tensor_train": ("tensor_train", "tt"),
    "tensor_ring": ("tensor_ring", "tr"),
}
PRECISIONS = ("fp32", "bf16")
PAD_ROWS = ("zero", "trained")
_COUNTS = (
    "vocabulary", "dim", "hidden", "layers", "batch", "epochs", "patience", "max_tokens", "pad_to", "train_limit",
    "examples", "rank",
)  # fmt: skip
_NAME = re.compile(r"[\w=+-][\w=+.-]{0,99}", re.ASCII)  # a row's name is a folder's too


@dataclass(frozen=True)
class Settings:
    """One run of one row. Every field can stand in a TOML file; ``shape`` is ``(row_factors, col_factors)``."""

    dataset: str
    row: str
    format: str = "full"
    rank: int | None = None
    shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    vocabulary: int = 25_000
    dim: int = 256
    hidden: int = 128
    layers: int = 2
    dropout: float = 0.5
    std: float | None = None  # of the drawn table; None is Glorot's
    max_tokens: int | None = None  # the last ones of each text
    pad_to: int | None = None  # shorter texts are padded at their end, and the LSTM reads the padding
    pad_row: str = "zero"  # what it reads there: "zero", or "trained", a row as any other
    phrases: bool = False
    train_limit: int | None = None  # train on so many texts; words are counted on all
    examples: int | None = None  # as if each split had only so many texts
    batch: int = 32
    lr: float = 1e-3
    clip: float = 1.0
    epochs: int = 10
    patience: int = 3
    precision: str = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"format": FORMATS, "precision": PRECISIONS, "pad_row": PAD_ROWS}
        for kind, known in choices.items():
            if (given := getattr(self, kind)) not in known:
                raise unknown(kind, given, known)
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ExperimentError(f"{name}={count}: it must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise ExperimentError(f"dropout={self.dropout}: it must be at least 0 and below 1.")
        for name in ("lr", "clip", "std"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ExperimentError(f"{name}={value}: it must be above 0 and finite.")
        if not 0 <= self.seed < 2**32:
            raise ExperimentError(f"seed={self.seed}: it must be at least 0 and below 2^32.")
        if not _NAME.fullmatch(self.row):
            raise ExperimentError(f"row={self.row!r}: a name of letters, digits and - _ = + . is needed, 100 at most.")
        if self.vocabulary < 3:
            raise ExperimentError(f"vocabulary={self.vocabulary}: padding, the unknown word and one more make 3.")
        if self.format != "full" and self.rank is None:
            raise ExperimentError(f'format "{self.format}" needs a rank, for instance --rank 16.')
        if self.format == "full" and self.rank is not None:
            raise ExperimentError(f"rank={self.rank}: a full table has none; give a --format too: lr, tt or tr.")
        if self.format in ("full", "low_rank") and self.shape is not None:
            raise ExperimentError(f'shape={self.shape}: format "{self.format}" has none; only tt and tr have.')

    def table_format(self) -> Any:
        """The format of the table, as the library takes it."""
        if self.format == "full":
            return tb.Dense()
        if self.format == "low_rank":
            return tb.LowRank(rank=self.rank)
        kind = tb.TensorTrain if self.format == "tensor_train" else tb.TensorRing
        return kind(rank=self.rank, shape=self.shape)

    def check_table(self) -> None:
        """A table of this size, format and shape can be made; nothing is allocated to see it."""
        try:
            tb.Embedding(self.vocabulary, self.dim, self.table_format(), padding_idx=0, device="meta")
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise ExperimentError(f"{self.dataset} {self.row}: {str(error).splitlines()[0]}") from None

    def fingerprint(self) -> str:
        """The same for the same configuration whatever the seed: rows of a table have to agree in it."""
        values = {name: value for name, value in asdict(self).items() if name != "seed"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def as_record(self) -> dict[str, Any]:
        """As results and checkpoints keep it."""
        return {**asdict(self), "fingerprint": self.fingerprint()}

    def folder(self, out: Path) -> Path:
        """Where the run keeps its checkpoint."""
        return out / f"{self.dataset}-{self.row}-{self.seed}"


def canonical_format(name: str, where: str = "") -> str:
    """``tt`` and ``tensor_train`` are one."""
    for canonical, names in FORMATS.items():
        if name.lower() in names:
            return canonical
    raise unknown("format", name, [name for names in FORMATS.values() for name in names], where)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    if not path.exists():
        raise ExperimentError(f"{path} does not exist; --config takes a TOML file or the name of a row.")
    try:
        return tomllib.loads(text_of(path))
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{path} is no TOML file: {error}.") from None


def configured(
    configs: Path, config: str, options: Mapping[str, Any], beneath: Mapping[str, Any] | None = None
) -> Settings:
    """Settings of a row (``sst5-tt1``, or a path) over its dataset's defaults, with the options given on top.

    ``beneath`` goes before the defaults, and the row's own file before that.
    """
    path = Path(config)
    if path.suffix != ".toml":
        path = configs / f"{config.lower()}.toml"
        if not path.exists():
            raise unknown("row", config, row_names(configs))
    row = read_toml(path)
    where = f"{path.name}: "
    checked(row, where)
    on_top = {name: value for name, value in options.items() if value is not None}
    if "format" in on_top and canonical_format(on_top["format"]) != canonical_format(row.get("format", "full"), where):
        row = {name: value for name, value in row.items() if name not in ("rank", "shape")}  # they were the format's
    given = {**row, **on_top}
    if "dataset" not in given:
        raise ExperimentError(f"{where}dataset is missing.")
    common = {**defaults(configs, given["dataset"], where), **(beneath or {})}
    return made({**common, "row": path.stem, **given}, where)


def row_names(configs: Path) -> list[str]:
    """Every row there is a file for."""
    return sorted(path.stem for path in configs.glob("*-*.toml"))


def defaults(configs: Path, dataset: str, where: str = "") -> dict[str, Any]:
    """What all rows of a dataset have in common, from ``defaults.toml``."""
    tables = read_toml(configs / "defaults.toml")
    datasets = [name for name in tables if name != "all"]
    if dataset not in datasets:
        raise unknown("dataset", dataset, datasets, where)
    for name, table in tables.items():
        checked(table, f"defaults.toml, [{name}]: ")
    return {**tables.get("all", {}), **tables[dataset], "dataset": dataset}


def checked(values: Mapping[str, Any], where: str) -> None:
    """Only names of settings, with values of their types."""
    types = {field.name: str(field.type) for field in fields(Settings)}
    for name, value in values.items():
        if name not in types:
            raise unknown("key", name, types, where)
        kind = types[name]
        wanted: tuple[type, ...] = (str,) if kind.startswith("str") else (bool,) if kind.startswith("bool") else ()
        wanted = wanted or ((int, float) if "float" in kind else (list, tuple) if "tuple" in kind else (int,))
        empty = value is None and "None" in kind
        if not empty and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
            raise ExperimentError(f"{where}{name} = {value!r} should be {kind}.")


def made(values: Mapping[str, Any], where: str = "") -> Settings:
    """Settings from plain values, checked."""
    checked(values, where)
    given = dict(values)
    given["format"] = canonical_format(given.get("format", "full"), where)
    if given.get("shape") is not None:
        shape = given["shape"]
        if len(shape) != 2 or not all(isinstance(part, (list, tuple)) for part in shape):
            raise ExperimentError(f"{where}shape = {shape} should be two lists: factors of the rows, of the columns.")
        given["shape"] = (tuple(shape[0]), tuple(shape[1]))
    try:
        return Settings(**given)
    except TypeError as error:
        raise ExperimentError(f"{where}{error}.") from None


def smoke(settings: Settings) -> Settings:
    """The same row in seconds: a few examples, two short epochs, small layers, the same table, a name of its own."""
    return replace(
        settings,
        row=f"{settings.row}-smoke",
        examples=64,
        hidden=8,
        epochs=2,
        patience=2,
        max_tokens=min(settings.max_tokens or 24, 24),
        batch=8,
    )


def recorded(record: Mapping[str, Any]) -> Settings | None:
    """The settings a result line was made with; none if it tells none, or such as are no more."""
    settings = record.get("settings")
    if not isinstance(settings, dict):
        return None
    try:
        return made({name: value for name, value in settings.items() if name != "fingerprint"})
    except ExperimentError:
        return None
