"""What the suite's tests are made from: samples, drawn tensors and layers, tolerances, and a watch on memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensorbed.nn import Embedding, Head
from tensorbed.structures import Format, Params, Structure
from tensorbed.structures.formats import Budget, RankedFormat


@dataclass(frozen=True)
class Sample:
    """A format bound to one size; laws that say nothing of precision hold in ``dtype``."""

    format: Format
    rows: int
    cols: int
    dtype: torch.dtype = torch.float64

    @property
    def structure(self) -> Structure:
        return self.format.bind(Budget(self.rows, self.cols))

    @property
    def is_small(self) -> bool:
        """Whether an allocation of the table's size would stand out beside those of gradients and of a few rows."""
        entries = self.rows * self.cols
        return entries >= 40_000 and all(4 * s.numel <= entries for s in self.structure.tensors() if s.trainable)

    def __str__(self) -> str:
        structure = self.structure
        return f"{structure.kind}-{self.rows}x{self.cols}-{structure.describe()}".replace(" ", "")


class Conformance:
    """Parametrises inherited tests: ``sample`` over the class's samples, ``impl`` over each one's :func:`backends`."""

    samples: ClassVar[Sequence[Sample]] = ()
    impls: ClassVar[Sequence[str] | None] = None  # these backends alone, where it is about them

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest for each test of the class."""
        if "sample" not in metafunc.fixturenames:
            return
        test, samples = metafunc.function, self.samples
        for choice in getattr(test, "choices", ()):
            samples = choice(samples)
        names, values = getattr(test, "spread_over", ((), [()]))
        with_impl = "impl" in metafunc.fixturenames
        cases: list[tuple[Any, ...]] = []
        for group in _by_kind(samples):
            known = backends(group[0].structure) if self.impls is None else self.impls
            impls: list[Any] = [(impl,) for impl in known] if with_impl else [()]
            for turn, impl in enumerate(impls):
                for k in range(max(len(group), len(values))):
                    sample, value = group[(k + turn) % len(group)], values[k % len(values)]
                    cases.append((sample, *impl, *value))
        arguments = ("sample", *(("impl",) if with_impl else ()), *names)
        metafunc.parametrize(arguments, cases, ids=["-".join(map(str, case)) for case in cases])

    @pytest.fixture
    def draw(self, sample: Sample) -> Draw:
        return Draw(sample, seed=0)


class Traced(Conformance):
    """Compiles for tests, ``by_inductor`` the structures of these kinds; ``None`` is all of them.

    Others stop before code is generated, which takes seconds for each layer and is the same for equal graphs.
    """

    by_inductor: ClassVar[Collection[str] | None] = None

    def compiled(self, function: Callable[..., Any], sample: Sample) -> Any:
        """Without a break in its graph."""
        inductor = self.by_inductor is None or sample.structure.kind in self.by_inductor
        return torch.compile(function, fullgraph=True, backend="inductor" if inductor else "aot_eager")

    @pytest.fixture(autouse=True)
    def compile_afresh(self) -> None:
        """Every test compiles the same few lines of code for another layer, more often than the compiler allows."""
        torch.compiler.reset()


Test = TypeVar("Test", bound=Callable[..., None])
Choice = Callable[[Sequence[Sample]], Sequence[Sample]]


def _marked(name: str, value: object) -> Callable[[Test], Test]:
    def mark(test: Test) -> Test:
        setattr(test, name, value)
        return test

    return mark


def on(*choices: Choice) -> Callable[[Test], Test]:
    """Run a test on the samples it is about: what the first choice leaves, then the next."""
    return _marked("choices", choices)


def spread(names: str | tuple[str, ...], values: Sequence[Any]) -> Callable[[Test], Test]:
    """As ``pytest.mark.parametrize``, but every structure and backend takes all values in turn on its samples.

    Each sample occurs and each value occurs, not each with each: for options that do not depend on the table's size.
    """
    single = isinstance(names, str)
    return _marked("spread_over", ((names,), [(value,) for value in values]) if single else (names, values))


def backends(structure: Structure) -> list[str]:
    """``auto``, and by their names those that it does not take: each way of computing rows once."""
    taken = structure.explain(torch.zeros(1, dtype=torch.int64), "auto").path
    return [impl for impl in structure.impls if impl != taken]


def _by_kind(samples: Sequence[Sample]) -> list[list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.structure.kind, []).append(sample)
    return list(groups.values())


def one_of_each(samples: Sequence[Sample]) -> list[Sample]:
    """The first sample of each structure: for what does not depend on the table's sizes."""
    return [group[0] for group in _by_kind(samples)]


def smallest_of_each(samples: Sequence[Sample]) -> list[Sample]:
    """The sample of each structure with the smallest table: for what computes it bit by bit."""
    return [min(group, key=lambda s: s.rows * s.cols) for group in _by_kind(samples)]


def those(which: Callable[[Sample], bool]) -> Choice:
    """The samples of which something holds."""
    return lambda samples: [sample for sample in samples if which(sample)]


small = those(lambda s: s.is_small)
ranked = those(lambda s: isinstance(s.format, RankedFormat))
bounded = those(lambda s: isinstance(s.format, RankedFormat) and "rel_error" in s.format.sizes)
fitted = those(lambda s: s.format.can_fit)
drawn = those(lambda s: s.structure.can_initialise)
trained = those(lambda s: any(spec.trainable for spec in s.structure.tensors()))
rounding = those(lambda s: s.structure.packs)
smooth = those(lambda s: not s.structure.packs)  # differences of values would show a rounding's steps


def keeps_rows(structure: Structure) -> bool:
    """Whether rows of a table, or of a part of it, are there as they are, and only read."""
    parts = getattr(structure, "parts", ())
    return structure.row_multiply_adds == 0 or (isinstance(parts, tuple) and any(map(keeps_rows, parts)))


class Draw:
    """Random tensors for a sample, the same at every run on every device; the table has entries of size 1.

    They are drawn on the CPU and then on torch's default device.
    """

    def __init__(self, sample: Sample, seed: int) -> None:
        self.sample, self.structure = sample, sample.structure
        self.budget = Budget(sample.rows, sample.cols)
        self.generator = torch.Generator().manual_seed(seed)

    def params(self, dtype: torch.dtype | None = None, *, grad: bool = True) -> dict[str, Tensor]:
        """Tensors of the structure, drawn or, where it cannot be, fitted to a drawn table."""
        specs = self.structure.tensors()
        if self.structure.can_initialise:
            tensors: Params = self.undrawn(torch.float64)
            self.structure.initialise(tensors, 1.0, self.generator)
        else:
            tensors = _fitted_params(self.sample)
        device, dtype = torch.get_default_device(), dtype or self.sample.dtype
        copies = {s.name: tensors[s.name].to(device, s.dtype or dtype, copy=True) for s in specs}
        return {s.name: copies[s.name].requires_grad_(grad and s.trainable) for s in specs}

    def undrawn(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors of the structure before they are drawn, with what its format knows of them."""
        specs = self.structure.tensors()
        empty = {s.name: torch.empty(s.shape, dtype=s.dtype or dtype, device="cpu") for s in specs}
        return {**empty, **self.sample.format.constants(self.structure)}

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return drawn.to(torch.get_default_device(), dtype or self.sample.dtype)

    def index(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Indices with repetitions, the first and the last row among them where there is room."""
        drawn = torch.randint(0, self.sample.rows, shape, generator=self.generator, device="cpu")
        if drawn.numel() >= 4:
            flat = drawn.view(-1)
            flat[0], flat[1], flat[2] = 0, self.sample.rows - 1, flat[3]
        return drawn.to(torch.get_default_device(), dtype)


def make(sample: Sample, kind: type[Any] = Embedding, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """A layer whose table has entries of size 1; a head has a drawn bias."""
    torch.manual_seed(0)
    if sample.structure.can_initialise:
        sizes = (sample.cols, sample.rows) if kind is Head else (sample.rows, sample.cols)
        layer = kind(*sizes, sample.format, std=1.0, dtype=torch.float64, **options)
    else:
        layer = copy.deepcopy(_fitted(sample, kind, **options))  # type: ignore[arg-type]
    if kind is Head:
        layer.bias = nn.Parameter(Draw(sample, seed=0).normal(sample.rows))
    return layer.to(dtype or sample.dtype)


@cache
def _fitted_params(sample: Sample) -> Params:
    draw = Draw(sample, seed=0)
    return sample.format.fit(draw.normal(sample.rows, sample.cols), draw.budget).params


@cache
def _fitted(sample: Sample, kind: type[Any], **options: Any) -> Any:
    """Fitted to a drawn table, once: searching takes longer than the tests themselves."""
    table = Draw(sample, seed=0).normal(sample.rows, sample.cols)
    return kind.from_pretrained(table, sample.format, freeze=False, **options)


def leaves_of(module: nn.Module) -> list[Tensor]:
    """What has gradients."""
    return [p for p in module.parameters() if p.requires_grad]


def assert_near(actual: Tensor, expected: Tensor, *, units: float | None = None) -> None:
    """Equal shape, dtype and device, and a relative Frobenius error of a few units in the last place.

    Units default to 64 for single and double precision and 4 for the half precisions, whose unit is a percent.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.device == expected.device, f"device {actual.device}, expected {expected.device}"
    actual, expected = actual.detach(), expected.detach()
    units = units or (64 if actual.dtype.itemsize >= 4 else 4)
    error = float(torch.linalg.vector_norm(actual.double() - expected.double()))
    bound = units * torch.finfo(actual.dtype).eps * float(torch.linalg.vector_norm(expected.double()))
    assert error <= bound, f"off by {error:.3g} in Frobenius norm, {bound:.3g} allowed"


def assert_all_near(actual: Sequence[Tensor], expected: Sequence[Tensor], *, units: float | None = None) -> None:
    """:func:`assert_near` for each pair."""
    for one, other in zip(actual, expected, strict=True):
        assert_near(one, other, units=units)


def assert_same(actual: Tensor, expected: Tensor, leaves: Sequence[Tensor], draw: Draw) -> None:
    """Near values, and near gradients of these leaves, if any, for a drawn one of the values."""
    assert_near(actual, expected)
    if leaves:
        grad = draw.normal(*actual.shape, dtype=actual.dtype)
        # What a call does not touch, the hot rows of a block that has none for instance, has a gradient of zero.
        gradients = [torch.autograd.grad(out, leaves, grad, materialize_grads=True) for out in (actual, expected)]
        assert_all_near(*gradients)


def assert_rounded_once(actual: Tensor, exact: Tensor) -> None:
    """No number further from ``exact``, which is float64, than its rounding to the dtype of ``actual``.

    But for what single precision is off by, in which half precision is computed.
    """
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    actual, exact = actual.detach(), exact.detach()
    rounding = (exact.to(actual.dtype).double() - exact).abs()
    error, single = (actual.double() - exact).abs() - rounding, 64 * torch.finfo(torch.float32).eps
    bound = single * float(exact.abs().max()) if exact.numel() else 0.0
    assert bool((error <= bound).all()), f"off by {float(error.max()):.3g} more than a rounding, {bound:.3g} allowed"


def assert_writes_are_noticed(call: Callable[[], Tensor], leaves: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """A tensor written to between forward and backward changes no gradient: autograd says so, or it is not read again.

    ``call`` computes what is differentiated in ``leaves`` from ``written``, tensors of any dtype.
    """
    for tensor in written:
        made, before = call(), tensor.detach().clone()
        grad = torch.linspace(-1, 1, made.numel(), dtype=made.dtype).view_as(made)
        expected = torch.autograd.grad(made, leaves, grad, retain_graph=True)
        with torch.no_grad():
            tensor.copy_(tensor * 3 if tensor.is_floating_point() else tensor.flip(0))
        try:
            found = torch.autograd.grad(made, leaves, grad)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error  # noqa: PT017
        else:
            assert all(map(torch.equal, found, expected)), f"gradients of the {tensor.dtype} written to afterwards"
        with torch.no_grad():
            tensor.copy_(before)


class _Watch(TorchDispatchMode):
    """The most elements that a tensor made here had; bytes of all storages made here, and the most alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.most_elements = self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            # A view shows its storage: expanded or sliced, what counts is the memory behind it.
            storage = leaf.untyped_storage()
            self.most_elements = max(self.most_elements, storage.nbytes() // leaf.element_size())
            if storage._cdata not in given and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.most_bytes = max(self.most_bytes, sum(self.alive.values()))
        return out


@contextmanager
def largest_allocation() -> Iterator[Callable[[], int]]:
    """Watch every tensor made below the operators; the value yielded tells the most elements one of them had."""
    with _Watch() as watch:
        yield lambda: watch.most_elements


@contextmanager
def most_held() -> Iterator[Callable[[], int]]:
    """Watch the memory of tensors made below the operators; the value yielded tells the most bytes alive at once."""
    with _Watch() as watch:
        yield lambda: watch.most_bytes
