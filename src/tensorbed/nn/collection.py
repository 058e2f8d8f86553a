"""Dozens of tables in one call: the id fields of a recommender."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Self, Unpack, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from tensorbed.checks import naming, require_float_dtype, require_int, require_integer_indices, require_positive
from tensorbed.dispatch import Asked, World
from tensorbed.functional import Pooling, explain_bags, pooled, request_bags, request_columns
from tensorbed.nn.embedding import Embedding, EmbeddingBag
from tensorbed.nn.options import TableOptions, options_shown
from tensorbed.structures import Explanations, Format, Params, Structure
from tensorbed.structures.formats import Budget, OutOfReachError, require_format
from tensorbed.structures.registry import plain_format

Arguments = Tensor | tuple[Tensor | None, ...]  # what one table's layer takes


class Pooled(NamedTuple):
    """What a collection returns.

    Shape:
        - values: ``(B, sum of dims)``, the tables' outputs side by side
        - split: the same by name, views ``(B, dim)`` of ``values``, in order
    """

    values: Tensor
    split: dict[str, Tensor]


# So that an exported collection can be saved.
_register_namedtuple(Pooled, serialized_type_name="tensorbed.nn.Pooled")


class Jagged(Protocol):
    """What is asked of TorchRec's ``KeyedJaggedTensor``: bags of ids, one key after another."""

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def offsets(self) -> Tensor: ...
    def offset_per_key(self) -> list[int]: ...
    def stride_per_key(self) -> list[int]: ...


class KeyedPooled:
    """What a collection returns for a ``KeyedJaggedTensor``: the methods of TorchRec's ``KeyedTensor``."""

    def __init__(self, pooled: Pooled) -> None:
        self._pooled = pooled

    def keys(self) -> list[str]:
        return list(self._pooled.split)

    def values(self) -> Tensor:
        return self._pooled.values

    def key_dim(self) -> int:
        return 1

    def length_per_key(self) -> list[int]:
        return [values.shape[1] for values in self._pooled.split.values()]

    def offset_per_key(self) -> list[int]:
        return [0, *accumulate(self.length_per_key())]

    def to_dict(self) -> dict[str, Tensor]:
        return dict(self._pooled.split)

    def device(self) -> torch.device:
        return self._pooled.values.device

    def __getitem__(self, key: str) -> Tensor:
        return self._pooled.split[key]


class EmbeddingBagCollection(nn.Module):
    """Named :class:`EmbeddingBag` layers called as one, such as the 26 id fields of Criteo.

    Each table keeps its own structure, dimension and mode. One layer may stand under two names: two fields then share
    its parameters, which are counted once. All tables have one dtype and one device.

    Args:
        tables: layers by name, in the order of the columns of the ids and of the output. A name is also part of the
            ``state_dict`` keys (``tables.C1.core_0``).

    Shape:
        - input: ``(B, F)``, int32 or int64, one id a table, columns in the order of ``names``; or by name what each
          layer takes: ids ``(B, L)``, ``(ids, offsets)`` or ``(ids, offsets, per_sample_weights)``, every table ``B``
          bags; or TorchRec's ``KeyedJaggedTensor``, whose keys that no table has are left alone, and whose weights, if
          there are any, weigh its ids as in a collection of TorchRec with ``is_weighted=True``
        - output: :class:`Pooled`, values ``(B, embedding_dim)`` and their split by name; for a ``KeyedJaggedTensor``
          :class:`KeyedPooled`, which has the methods of a ``KeyedTensor``

    Example::

        >>> sizes = {"C1": 1460, "C2": 583, "C3": 10_131_227}
        >>> fields = tb.EmbeddingBagCollection.from_sizes(sizes, 16, tb.TensorTrain(rank=16))
        >>> values, split = fields(torch.tensor([[3, 0, 10_131_226], [1459, 582, 7]]))
        >>> values.shape, split["C3"].shape
        (torch.Size([2, 48]), torch.Size([2, 16]))
    """

    def __init__(self, tables: Mapping[str, EmbeddingBag]) -> None:
        super().__init__()
        _check_tables(tables)
        self.tables = nn.ModuleDict(tables)

    @classmethod
    @options_shown
    def from_sizes(
        cls,
        sizes: Mapping[str, int],
        embedding_dim: int,
        format: Format,
        *,
        dense_below: int | None = None,
        mode: str = "sum",
        include_last_offset: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> Self:
        """One table a field, all of one dimension and format.

        Small fields gain nothing from a structure: a table of 4 rows is smaller as it is than as a chain of cores. By
        default a table stays :class:`Dense` where the format would not be smaller, or cannot reach the ratio asked for.

        Args:
            sizes: rows by name.
            dense_below: instead of that, tables of fewer rows than this are dense and all others have the format;
                0 gives it to every one.
            mode, include_last_offset, options: as for :class:`EmbeddingBag`, the same for every table.

        Example::

            >>> fields = tb.EmbeddingBagCollection.from_sizes({"user": 1_000_000, "day": 7}, 16, tb.TensorTrain(rank=8))
            >>> [table.structure.kind for table in fields.tables.values()]
            ['tensor_train', 'dense']
        """
        if not isinstance(sizes, Mapping):
            raise TypeError(f'sizes must be a mapping such as {{"C1": 1460}}, got {type(sizes).__name__}.')
        require_format(format)
        if dense_below is not None and require_int(dense_below, "dense_below") < 0:
            raise ValueError(f"dense_below={dense_below}: a number of rows, or 0 to keep no table dense.")
        bags: Any = {"mode": mode, "include_last_offset": include_last_offset, "device": device, "dtype": dtype}
        tables = {}
        for name, rows in sizes.items():
            with naming(str(name)):
                chosen = _format_for(rows, embedding_dim, format, dense_below, dtype)
                tables[name] = EmbeddingBag(rows, embedding_dim, chosen, **bags, **options)
        return cls(tables)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tables, in the order of the columns."""
        return tuple(self.tables)

    @property
    def dims(self) -> dict[str, int]:
        """Columns of each table."""
        return {name: layer.embedding_dim for name, layer in self._items()}

    @property
    def embedding_dim(self) -> int:
        """Columns of all tables together."""
        return sum(self.dims.values())

    @overload
    def forward(self, input: Tensor | Mapping[str, Arguments]) -> Pooled: ...
    @overload
    def forward(self, input: Jagged) -> KeyedPooled: ...
    def forward(self, input: Tensor | Mapping[str, Arguments] | Jagged) -> Pooled | KeyedPooled:
        """Look up and pool all tables in one call; the shapes are those of the class.

        Example::

            >>> fields = tb.EmbeddingBagCollection.from_sizes({"user": 1000, "tag": 5000}, 8, tb.TensorTrain(rank=4))
            >>> tags = torch.tensor([7, 7, 4999]), torch.tensor([0, 2])  # ids and where each bag begins
            >>> fields({"user": torch.tensor([[3], [999]]), "tag": tags}).values.shape
            torch.Size([2, 16])
        """
        asked, world = self._asked(input)
        # Here all work is known before any is done: the compiled kernels do theirs in one call.
        values, dims = pooled(asked, world), self.dims
        # One split, not a slice each: its gradient is put together once instead of added up table by table.
        by_name = Pooled(values, dict(zip(dims, values.split(list(dims.values()), dim=1), strict=True)))
        return KeyedPooled(by_name) if _is_jagged(input) else by_name

    def explain(self, input: Tensor | Mapping[str, Arguments] | Jagged) -> Explanations:
        """What :meth:`forward` would do with these ids, counted and not done, table by table and in total."""
        asked, world = self._asked(input)
        return Explanations({name: explain_bags(own, world) for name, own in zip(self.names, asked, strict=True)})

    def _asked(self, input: Any) -> tuple[list[Asked], World]:
        if isinstance(input, Tensor):
            return self._columns(input)
        return self._by_name(self._bags(input) if _is_jagged(input) else input)

    def _bags(self, jagged: Jagged) -> dict[str, Arguments]:
        """Bags by name from those of all keys, one after another; only keys that a table has."""
        values, weights, offsets = jagged.values(), jagged.weights_or_none(), jagged.offsets()
        bags: dict[str, Arguments] = {}
        first, bounds = 0, jagged.offset_per_key()
        for name, count, start, end in zip(jagged.keys(), jagged.stride_per_key(), bounds, bounds[1:], strict=False):
            if name in self.tables:
                last = count + self.tables[name].include_last_offset  # type: ignore[operator]
                own = offsets[first : first + last] - start
                bags[name] = (values[start:end], own, None if weights is None else weights[start:end])
            first += count
        return bags

    def _columns(self, ids: Tensor) -> tuple[list[Asked], World]:
        """One id of each table a row, from ``(B, F)``: bags of one id each are rows, and padding is zero."""
        require_integer_indices(ids, "ids")
        if ids.dim() != 2 or ids.shape[1] != len(self.names):
            raise ValueError(
                f"ids has shape {tuple(ids.shape)}; (B, {len(self.names)}) is needed, one column a table: "
                f"{_listed(self.names)}. Bags of several ids go by name: {{{self.names[0]!r}: (ids, offsets), ...}}."
            )
        return request_columns(self._tables(), ids)

    def _by_name(self, given: Mapping[str, Arguments]) -> tuple[list[Asked], World]:
        if not isinstance(given, Mapping):
            raise TypeError(
                f"give ids as a tensor (B, {len(self.names)}), as a mapping from names or as a KeyedJaggedTensor, "
                f"got {type(given).__name__}."
            )
        missing = [name for name in self.names if name not in given]
        unknown = [str(name) for name in given if name not in self.tables]
        if missing or unknown:
            problems = [f"no ids for {_listed(missing)}"] * bool(missing)
            problems += [f"no table {_listed(unknown)}"] * bool(unknown)
            raise ValueError(f"{'; '.join(problems)}. The tables are {_listed(self.names)}; give ids for each.")
        asked, world, counts = [], World.EAGER, {}
        for name, table in self._tables().items():
            with naming(name):
                arguments = _arguments(given[name])
            bags, world = request_bags(*table, *arguments, owner=name)
            asked.append(bags)
            counts[name] = 0 if bags.bounds is None else bags.bounds.shape[0] - 1
        if any(count != counts[self.names[0]] for count in counts.values()):
            shown = _grouped(counts.items(), "{1} in {0}")
            raise ValueError(f"every table needs the same number of bags, got {shown}.")
        return asked, world

    def _tables(self) -> dict[str, tuple[Structure, Params, Pooling]]:
        return {name: (layer.structure, layer.params(), layer._pooling) for name, layer in self._items()}

    def _items(self) -> Iterable[tuple[str, EmbeddingBag]]:
        return self.tables.items()  # type: ignore[return-value]

    @property
    def compression_ratio(self) -> float:
        """Bytes of all dense tables over the bytes stored; a layer under several names counts once."""
        layers = self._layers()
        return sum(layer._dense_bytes for layer in layers) / sum(layer._stored_bytes for layer in layers)

    def _layers(self) -> list[EmbeddingBag]:
        """Each layer once."""
        return list(dict.fromkeys(layer for _, layer in self._items()))

    def extra_repr(self) -> str:
        numbers = sum(layer._stored_numbers for layer in self._layers())
        return (
            f"{len(self.names)} tables, embedding_dim={self.embedding_dim}, parameters={numbers:,}, "
            f"ratio={self.compression_ratio:.4g}"
        )


def _is_jagged(given: object) -> bool:
    """A ``KeyedJaggedTensor``, told by what it can do: TorchRec need not be there."""
    if isinstance(given, Tensor | Mapping):
        return False
    names = ("keys", "values", "weights_or_none", "offsets", "offset_per_key", "stride_per_key")
    return all(hasattr(given, name) for name in names)


def _check_tables(tables: Mapping[str, EmbeddingBag]) -> None:
    """At least one layer, under names that a module may have, of one dtype on one device."""
    if not isinstance(tables, Mapping):
        raise TypeError(
            f'tables must be a mapping such as {{"C1": tb.TTEmbeddingBag(...)}}, got {type(tables).__name__}.'
        )
    if not tables:
        raise ValueError("tables is empty: give at least one.")
    for name, layer in tables.items():
        if not isinstance(name, str):
            raise TypeError(f"names are strings, got {name!r} ({type(name).__name__}).")
        if not name or "." in name:
            raise ValueError(f"{name!r} cannot name a table: state_dict keys are made of names and dots.")
        if hasattr(nn.ModuleDict(), name):
            raise ValueError(
                f"{name!r} cannot name a table: torch.nn.ModuleDict has an attribute of that name; try {name + '_'!r}."
            )
        if not isinstance(layer, EmbeddingBag):
            raise TypeError(f"{name}: give a tb.EmbeddingBag{_advice(layer)}, got {type(layer).__name__}.")
    kinds = {
        name: f"{str(layer._dtype)[6:]} on {next(iter(layer.params().values())).device}"
        for name, layer in tables.items()
    }
    if len(set(kinds.values())) > 1:
        raise ValueError(
            "the tables' outputs stand in one tensor and need one dtype and device, got "
            f"{_grouped(kinds.items(), '{1}: {0}')}. Use .to(...)."
        )


def _advice(layer: object) -> str:
    if isinstance(layer, nn.EmbeddingBag):
        return " (tb.EmbeddingBag.from_pretrained(layer.weight, tb.Dense(), freeze=False) holds the same table)"
    return ", which takes one id a bag as well as many" if isinstance(layer, Embedding | nn.Embedding) else ""


def _format_for(rows: int, cols: int, format: Format, dense_below: int | None, dtype: torch.dtype | None) -> Format:
    """The format, or a dense table for a field too small to gain from it."""
    budget = Budget(
        require_positive(rows, "num_embeddings"),
        require_positive(cols, "embedding_dim"),
        dtype or torch.get_default_dtype(),
    )
    if dense_below is not None:
        return plain_format() if rows < dense_below else format
    require_float_dtype(budget.dtype)
    try:
        return format if budget.ratio(format.bind(budget)) > 1 else plain_format()
    except OutOfReachError:
        return plain_format()


def _arguments(given: Arguments) -> tuple[Any, ...]:
    """What one layer's forward takes."""
    if isinstance(given, Tensor):
        return (given,)
    if not isinstance(given, tuple | list) or not 1 <= len(given) <= 3:
        raise TypeError(
            f"give ids (B, L), (ids, offsets) or (ids, offsets, per_sample_weights), got {type(given).__name__}"
            + (f" of {len(given)}." if isinstance(given, tuple | list) else ".")
        )
    return tuple(given)


def _grouped(facts: Iterable[tuple[str, object]], form: str) -> str:
    """Which tables have what in common, each group in a form of its names and of that."""
    groups: dict[object, list[str]] = {}
    for name, fact in facts:
        groups.setdefault(fact, []).append(name)
    return "; ".join(form.format(_listed(names), fact) for fact, names in groups.items())


def _listed(names: Sequence[str], most: int = 8) -> str:
    """Names in one line, the middle left out of many."""
    shown = list(names) if len(names) <= most else [*names[: most - 2], "...", names[-1]]
    return ", ".join(shown)
