"""The tables and vocabulary heads of a model, which formats they are given, and why others stay."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from tensorbed.checks import require_int
from tensorbed.compress.report import Plan
from tensorbed.nn.table import StructuredTable
from tensorbed.structures import Format

MIN_ROWS = 2000  # smaller tables are not worth it, unless somebody says otherwise

Formats = Format | Mapping[str, Format | None]


@dataclass
class Weight:
    """One weight, all modules that hold it by their names, and the format that each is given.

    ``same_rows_as`` is the table that a head was taken to belong to because of its size alone.
    """

    tensor: Tensor
    same_rows_as: str | None = None
    places: dict[str, nn.Module] = field(default_factory=dict)
    formats: dict[str, Format] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return next(iter(self.places))

    def groups(self, tied: str) -> list[dict[str, nn.Module]]:
        """The places that will share one table."""
        return [{name: module} for name, module in self.places.items()] if tied == "untie" else [self.places]


def found_tables(
    model: nn.Module, format: Formats, min_rows: int, skip: Sequence[str], include_heads: bool, tied: str
) -> tuple[list[Weight], dict[str, str]]:
    """Weights to compress, and why other layers stay, by name; refused where that would lose something."""
    require_int(min_rows, "min_rows")
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r}: give a list of patterns.")
    if tied not in ("keep", "untie"):
        raise ValueError(f'tied={tied!r}: choose "keep" or "untie".')
    search = _Search(model, format, min_rows, skip, include_heads)
    search.find_tables()
    search.find_heads()
    if tied == "keep":
        search.refuse_broken_ties()
    search.refuse_useless_patterns()
    search.refuse_useless_skips()
    return list(search.found.values()), search.left


def matches(name: str, pattern: str) -> bool:
    """As in ``fnmatch``, and a name with brackets matches itself."""
    return name == pattern or fnmatchcase(name, pattern)


class _Search:
    """What is found in one model, and why other layers stay as they are."""

    def __init__(
        self, model: nn.Module, format: Formats, min_rows: int, skip: Sequence[str], include_heads: bool
    ) -> None:
        self.min_rows, self.skip, self.include_heads = min_rows, skip, include_heads
        self.plan, self.by_pattern = format if isinstance(format, Plan) else None, not isinstance(format, Format)
        self.formats: Mapping[str, Format | None] = {"*": format} if isinstance(format, Format) else format
        self.modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        self.tables = [n for n, module in self.modules.items() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
        self.linears = [name for name, module in self.modules.items() if type(module) is nn.Linear]
        done = [name for name, module in self.modules.items() if isinstance(module, StructuredTable)]
        self.all_tables = [*self.tables, *done]
        self.declared = declared_heads(model)
        self.declared_ids = {id(head) for heads in self.declared.values() for head in heads}
        self.found: dict[int, Weight] = {}
        self.left = {name: "compressed already" for name in done if self.pattern(name) is not None}
        self.used = {self.pattern(name) for name in self.all_tables}  # of the patterns

    def pattern(self, name: str) -> str | None:
        """The first that matches."""
        return next((pattern for pattern in self.formats if matches(name, pattern)), None)

    def format(self, name: str) -> Format | None:
        return next((format for pattern, format in self.formats.items() if matches(name, pattern)), None)

    def is_refused(self, name: str) -> bool:
        """Whether a pattern says to leave it, which is more than that none speaks of it."""
        return self.pattern(name) is not None and self.format(name) is None

    def is_named_head(self, name: str) -> bool:
        """Whether a linear layer is meant: by its name, or by a pattern that no table matches."""
        pattern = self.pattern(name) if self.by_pattern else None
        if pattern is None or pattern == name:
            return pattern == name
        return set(pattern) != {"*"} and not any(matches(table, pattern) for table in self.all_tables)

    def add(self, name: str, format: Format | None) -> None:
        """One more place of a weight, by default with the format of the first."""
        module = self.modules[name]
        _refuse_irreplaceable(name, module)
        # A plan names heads that nobody named to it.
        same_rows_as = None if self.plan is None else self.plan.same_rows_as.get(name)
        weight = self.found.setdefault(id(module.weight), Weight(module.weight, same_rows_as))
        weight.formats[name] = format or next(iter(weight.formats.values()))
        weight.places[name] = module

    def find_tables(self) -> None:
        """Embeddings that are given a format; and those that nobody spoke of where they share the weight of one."""
        for name in self.tables:
            if reason := self._reason_to_stay(name):
                self.left[name] = reason
            else:
                self.add(name, self.format(name))
        for name in self.tables:
            if name in self.left and not self._is_left_out(name) and id(self.modules[name].weight) in self.found:
                self.add(name, None)
                del self.left[name]

    def _is_left_out(self, name: str) -> bool:
        return self._skipped_by(name) is not None or self.is_refused(name)

    def _skipped_by(self, name: str) -> str | None:
        return next((pattern for pattern in self.skip if matches(name, pattern)), None)

    def _reason_to_stay(self, name: str) -> str | None:
        """Why a table, or a head that was named, is not compressed."""
        if (pattern := self._skipped_by(name)) is not None:
            return f'left out by skip=["{pattern}"]'
        rows = int(self.modules[name].weight.shape[0])
        few = None if rows >= self.min_rows else self._too_few(rows)
        if self.is_refused(name):
            return "kept dense by the plan" if self.plan is not None else "its format is None"
        if self.pattern(name) is None:  # small tables are in no plan
            return (few or "not in the plan") if self.plan is not None else "no pattern matches it"
        return None if self.pattern(name) == name else few

    def _too_few(self, rows: int) -> str:
        return f"{rows:,} rows, fewer than min_rows={self.min_rows:,}"

    def find_heads(self) -> None:
        """Linear layers that are named, share a weight, are declared to be heads, or look like nothing else."""
        tables = list(self.found.values())
        # Those that are named first: others may share their weight.
        for name in sorted(self.linears, key=self.is_named_head, reverse=True):
            module = self.modules[name]
            rows = int(module.weight.shape[0])
            same = [table for table in tables if table.tensor.shape[0] == rows]
            if self.is_named_head(name):
                self._add_head(name, self._reason_to_stay(name), self.format(name))
            elif id(module.weight) in self.found:
                self._add_head_like(name, None)
            elif id(module) in self.declared_ids and tables:
                if same or rows >= self.min_rows:
                    self._add_head_like(name, (same or tables)[0])
                else:
                    self.left[name] = self._too_few(rows)
            elif same and rows >= self.min_rows and not self._is_listed(name):
                self._add_by_size(name, same[0])

    def _add_by_size(self, name: str, table: Weight) -> None:
        """A head because it has as many outputs as a table has rows, unless there is a doubt."""
        rows = table.tensor.shape[0]
        doubt = self._doubt(name, rows)
        if doubt is None:
            self._add_head_like(name, table)
            if name not in self.left:
                self.found[id(self.modules[name].weight)].same_rows_as = table.name
        elif self.include_heads and not self._is_left_out(name):
            size = f"{rows:,} outputs, as many as {table.name} has rows"
            self.left[name] = f"{size}, but {doubt}; if it is a head, name it in a pattern"

    def _doubt(self, name: str, rows: int) -> str | None:
        """Why the size of a layer does not make it a head, if it does not."""
        if any(name.startswith(f"{model}.") or not model for model in self.declared):
            return "the model does not call it its head"
        modules = self.modules.values()
        tables = {id(self.modules[table].weight) for table in self.tables if len(self.modules[table].weight) == rows}
        tables |= {id(one) for one in modules if isinstance(one, StructuredTable) and one.structure.rows == rows}
        if len(tables) > 1:
            return "several tables have that many"
        wide = [module for module in modules if isinstance(module, nn.Linear) and module.out_features == rows]
        # A weight that is computed is another tensor each time.
        weights = {id(module._parameters.get("weight", module)) for module in wide}
        return "other layers have as many" if len(weights) > 1 else None

    def _is_listed(self, name: str) -> bool:
        """Whether a layer, by any of its names, is in a ``ModuleList``: one of many that are alike."""
        names = [other for other in self.linears if self.modules[other].weight is self.modules[name].weight]
        parents = {".".join(parts[:end]) for parts in (n.split(".") for n in names) for end in range(len(parts))}
        return any(isinstance(self.modules[parent], nn.ModuleList) for parent in parents)

    def _add_head_like(self, name: str, table: Weight | None) -> None:
        """A head in the format of its table, unless a pattern speaks of it; without one, sharing its weight."""
        left_out = self._is_left_out(name) if table is not None else self._skipped_by(name) is not None
        format = None if table is None else self.format(name) or next(iter(table.formats.values()))
        self._add_head(name, self._reason_to_stay(name) if left_out else None, format)

    def _add_head(self, name: str, reason: str | None, format: Format | None) -> None:
        self.used.add(self.pattern(name))
        if self.include_heads and reason is None:
            self.add(name, format)
        else:
            self.left[name] = reason or "a head, and include_heads=False"

    def refuse_useless_patterns(self) -> None:
        """A pattern without effect is a mistake: misspelt, or after one that takes all of its names."""
        unused = [pattern for pattern in self.formats if pattern not in self.used] if self.by_pattern else []
        for pattern in unused:
            taken = next((name for name in (*self.all_tables, *self.linears) if matches(name, pattern)), None)
            if taken is not None and (before := self.pattern(taken)) != pattern:
                raise ValueError(
                    f"{pattern!r} is of no use: {before!r}, which comes before it, matches {taken} already; put the "
                    "pattern that matches less first."
                )
        if unused:
            known = ", ".join(self.all_tables) or "none"
            raise ValueError(f"no table matches {', '.join(unused)}; the model has {known}.")

    def refuse_useless_skips(self) -> None:
        """A name that is skipped and that nothing has is misspelt, and its table would be compressed in silence."""
        rows = {self.modules[table].num_embeddings for table in self.tables}
        linears = {name: self.modules[name] for name in self.linears}
        heads = [name for name, one in linears.items() if id(one) in self.declared_ids or one.out_features in rows]
        known = [*self.all_tables, *heads]
        for pattern in self.skip:
            if not any(matches(name, pattern) for name in known):
                there = ", ".join(known) or "none"
                raise ValueError(f'skip=["{pattern}"]: no table or head matches; the model has {there}.')

    def refuse_broken_ties(self) -> None:
        """Whoever else holds a weight would go on with the dense one, alone; and one weight has one format."""
        for name, module in self.modules.items():
            for own, parameter in module._parameters.items():
                weight = self.found.get(id(parameter))
                if weight is not None and name not in weight.places:
                    why = f" ({self.left[name]})" if name in self.left else ""
                    where = f"{name}.{own}".removeprefix(".")  # the model's own has no name before it
                    raise ValueError(
                        f"{where} shares the weight of {weight.name} and is not among the layers to compress{why};"
                        f' compress both, skip {weight.name} too, or break the tie with tied="untie".'
                    )
        for weight in self.found.values():
            chosen = weight.formats[weight.name]
            for name, format in weight.formats.items():
                if format != chosen:
                    raise ValueError(
                        f"{weight.name} and {name} share one weight, but are given {chosen} and {format}; give one "
                        'format, or break the tie with tied="untie".'
                    )


def _refuse_irreplaceable(name: str, module: Any) -> None:
    """What a layer does or has that its replacement would not, said with its name before anything is fitted."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if type(module) not in (nn.Embedding, nn.EmbeddingBag) and not is_scaled(module):
            raise TypeError(
                f"{name} is a {type(module).__name__}, whose forward may do more than look up; leave it out with "
                f'skip=["{name}"], or replace it yourself.'
            )
        if module.max_norm is not None:
            raise ValueError(
                f"{name} has max_norm={module.max_norm}: rows of a structured table share their numbers and cannot be "
                f'renormalised one by one; set {name}.max_norm = None first, or leave it out with skip=["{name}"].'
            )
        if module.sparse:
            raise ValueError(
                f"{name} has sparse=True: the few shared tensors of a structured table have dense gradients; set "
                f'{name}.sparse = False first and take another optimiser than SparseAdam, or give skip=["{name}"].'
            )
    own = vars(module)
    hooks = any(value for key, value in own.items() if "hooks" in key)
    if hooks or "forward" in own or "weight" not in module._parameters:
        what = "hooks" if hooks else "a forward of its own" if "forward" in own else "a weight that is computed"
        raise ValueError(f"{name} has {what}, which its replacement would not have; remove that first, or skip {name}.")


def declared_heads(model: nn.Module) -> dict[str, list[nn.Module]]:
    """What a model and those inside of it call their heads, as those of transformers do, by the names of these models.

    Models that say that they have none have an empty list.
    """
    declared: dict[str, list[nn.Module]] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        with suppress(NotImplementedError, AttributeError):
            answer = part.get_output_embeddings()
            heads = answer if isinstance(answer, nn.ModuleList) else [answer]
            declared[name] = [head for head in heads if isinstance(head, nn.Module)]
    return declared


def is_scaled(module: nn.Module) -> bool:
    """The scaled embeddings of transformers' Gemma, BART and their kin: rows times ``embed_scale`` and nothing else."""
    cls = type(module)
    known = cls.__module__.startswith("transformers.") and cls.__name__.endswith("ScaledWordEmbedding")
    # Some have rows of their own besides.
    return known and hasattr(module, "embed_scale") and [name for name, _ in module.named_parameters()] == ["weight"]
