"""Tables whose rows are kept as codes, which the compiled kernels read: rows are multiplied where they are made.

Graphs and transforms take the plain path; so do devices and layouts that the kernels do not know. Gradients are
computed in PyTorch. As in :mod:`tensorbed.backends.native.chains` the kernels are handed addresses, and what they rely
on is settled here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from tensorbed.backends import native
from tensorbed.backends.native import TYPES
from tensorbed.backends.native.chains import unready
from tensorbed.backends.triton import serving
from tensorbed.dispatch import differentiable_once, full_precision, working_dtype

if TYPE_CHECKING:
    from tensorbed import _native

Made = Callable[["Coded", Tensor], Tensor]  # rows (n, cols) of a table for indices (n,)


@dataclass(frozen=True)
class Coded(ABC):
    """A table whose rows are kept as codes.

    Shape:
        - codes: ``(rows, bytes)`` int8 or uint8
        - floats: the numbers that codes stand for shares or names of
    """

    floats_by_row: ClassVar[bool]  # whether each row has its own

    cols: int
    codes: Tensor
    floats: Tensor

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def constants(self) -> dict[str, Any]:
        """All but the floats, by name."""
        return {name: tensor for name in ("codes", "steps") if (tensor := getattr(self, name, None)) is not None}

    def part(self, start: int, stop: int) -> Self:
        """A block of rows, by itself."""
        held = {**self.constants, "floats": self.floats} if self.floats_by_row else self.constants
        return replace(self, **{name: tensor[start:stop] for name, tensor in held.items()})

    def known(self) -> bool:
        """Whether the kernels can compute with these tensors, half precision in single."""
        dtype = self.floats.dtype
        if not native.available or (dtype not in TYPES and dtype != torch.float16) or self.codes.element_size() != 1:
            return False
        for tensor in (self.floats, *self.constants.values()):
            if unready((tensor,), tensor.dtype) is not None or not tensor.is_contiguous():
                return False
        return self.fits()

    def are_on(self, device: torch.device) -> bool:
        """Whether all tensors are there."""
        return all(tensor.device == device for tensor in (self.floats, *self.constants.values()))

    @abstractmethod
    def fits(self) -> bool:
        """Whether sizes are such that nothing is read beside the tensors; PyTorch says else what is wrong."""

    @abstractmethod
    def handle(self) -> _native.Coded:
        """The same by addresses."""

    def kernel_rows(self, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """Rows, differentiable; ``IndexError`` for an index outside the table."""
        if torch.is_grad_enabled() and self.floats.requires_grad:
            rows: Tensor = _Rows.apply(self, index, self.floats)  # type: ignore[no-untyped-call]
            return rows
        return _made(self, index)

    def fills(self, dtype: torch.dtype, cols: int) -> bool:
        """Whether the kernels write such rows as they decode them, and no gradient is recorded."""
        trains = torch.is_grad_enabled() and self.floats.requires_grad
        alike = self.floats.dtype == dtype and dtype in TYPES and self.cols == cols
        return alike and not trains and self.known()

    @abstractmethod
    def gradient(
        self, index: Tensor, grad: Tensor, made: Made | None = None
    ) -> Tensor:  # (n,), (n, cols) -> like floats
        """Of :attr:`floats`, for that of the rows; ``made`` makes rows, by default the compiled kernels do."""


@dataclass(frozen=True)
class Quantized(Coded):
    """Whole numbers of ``bits`` bits, times the step of each ``group`` columns, times the row's scale.

    Shape:
        - floats: ``(rows, 1)``, the scales
        - steps: ``(rows, ceil(cols / group))`` int8, or ``None``
    """

    floats_by_row = True

    steps: Tensor | None
    group: int
    bits: int

    def fits(self) -> bool:
        groups = (self.rows, -(-self.cols // self.group))
        return (
            self.codes.shape[1] == (self.cols if self.bits == 8 else -(-self.cols // 2))
            and self.floats.shape == (self.rows, 1)
            and (self.steps is None or (self.steps.shape == groups and self.steps.dtype == torch.int8))
        )

    def handle(self) -> _native.Coded:
        assert native.module is not None
        steps = 0 if self.steps is None else _address(self.steps)
        found: _native.Coded = native.module.Coded.quantized(
            self.rows, self.cols, _address(self.codes), self.bits, steps, self.group, _address(self.floats)
        )
        return found

    def gradient(self, index: Tensor, grad: Tensor, made: Made | None = None) -> Tensor:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        shares = (made or _made)(replace(self, floats=torch.ones_like(self.floats, dtype=wide.dtype)), index)
        each = (shares * wide).sum(1, keepdim=True)
        return torch.zeros_like(self.floats, dtype=wide.dtype).index_add_(0, index, each).to(self.floats.dtype)


@dataclass(frozen=True)
class Product(Coded):
    """Each byte of a row names an entry of its own codebook.

    Shape:
        - floats: ``(parts, words, cols / parts)``, the codebooks
        - rotation: ``(cols, cols)``, what rows are multiplied by, or ``None``
    """

    floats_by_row = False

    rotation: Tensor | None = None

    def kernel_rows(self, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        rotation, floats = self.rotation, self.floats
        if rotation is None:
            return super().kernel_rows(index)
        # Half precision in single, rounded once.
        wide = working_dtype(floats, rotation)
        with full_precision(index):
            rows = replace(self, floats=floats.to(wide), rotation=None).kernel_rows(index)
            return (rows @ rotation.to(wide)).to(torch.promote_types(floats.dtype, rotation.dtype))

    def fills(self, dtype: torch.dtype, cols: int) -> bool:
        return self.rotation is None and super().fills(dtype, cols)

    def handle(self) -> _native.Coded:
        assert native.module is not None
        parts, words, _ = self.floats.shape
        found: _native.Coded = native.module.Coded.product(
            self.rows, self.cols, _address(self.codes), parts, _address(self.floats), words
        )
        return found

    def fits(self) -> bool:
        parts, _, width = self.floats.shape
        return self.codes.shape[1] == parts and parts * width == self.cols

    def gradient(self, index: Tensor, grad: Tensor, made: Made | None = None) -> Tensor:
        parts, words, width = self.floats.shape
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).reshape(-1, width)
        places = self.codes.index_select(0, index).long() + torch.arange(parts, device=index.device) * words
        total = wide.new_zeros(parts * words, width).index_add_(0, places.reshape(-1), wide)
        return total.view_as(self.floats).to(self.floats.dtype)


def _address(tensor: Tensor) -> int:
    if tensor.numel() and not tensor.untyped_storage().data_ptr():
        raise RuntimeError("a tensor of codes has no memory: its storage was freed, or is sharded elsewhere.")
    return tensor.data_ptr()


def _made(coded: Coded, index: Tensor) -> Tensor:
    if coded.floats.dtype == torch.float16:
        return _made(replace(coded, floats=coded.floats.float()), index).half()
    index = index.contiguous()
    out = torch.empty(index.shape[0], coded.cols, dtype=coded.floats.dtype, device="cpu")
    kind, threads = TYPES[out.dtype], torch.get_num_threads()
    coded.handle().rows(kind, index.data_ptr(), index.shape[0], out.data_ptr(), threads)
    return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coded: Coded, index: Tensor, floats: Tensor) -> Tensor:
        ctx.coded = replace(coded, floats=floats.detach())
        # All that backward reads again is saved by autograd, which notices when it is written to before.
        ctx.save_for_backward(index, *coded.constants.values())
        return _made(ctx.coded, index)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        index, *constants = saved
        coded = replace(ctx.coded, **dict(zip(ctx.coded.constants, constants, strict=True)))
        return None, None, coded.gradient(index, grad)


def by_kernel(kernel: Literal["scores", "sums"], block: Coded, x: Tensor, out: Tensor, impl: str = "auto") -> bool:
    """Write ``rows @ x``, or of tables ``x`` the sum of the entries that each row's codes name, if the kernels can.

    Shape:
        - x: ``(cols, n)``, or tables ``(parts * words, n)``
        - out: ``(rows, n)``
    """
    if serving.serves(impl, out) and x.dtype == out.dtype and x.is_contiguous() and out.is_contiguous():
        getattr(serving.codes(), kernel)(block, x, out)
        return True
    ready = unready((x, out), out.dtype) is None and x.is_contiguous() and out.is_contiguous()
    ready &= out.dtype in (torch.float32, torch.float64) and block.floats.dtype == out.dtype
    if not ready or not block.known():
        return False
    write = getattr(block.handle(), kernel)
    write(TYPES[out.dtype], x.data_ptr(), out.shape[1], out.data_ptr(), torch.get_num_threads())
    return True
