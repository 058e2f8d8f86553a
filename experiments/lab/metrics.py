"""What a model is measured by: a name, a direction and a way to print."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_DIVERGED = 1e12  # a number, because JSON knows no infinity


@dataclass(frozen=True)
class Metric:
    """``unit`` says how two values are compared: in ``points``, hundredths; in ``%``; or as they are."""

    name: str
    higher: bool = True  # is better
    digits: int = 3
    unit: str = "points"
    log: bool = False  # in pictures

    @property
    def worst(self) -> float:
        return 0.0 if self.higher else _DIVERGED

    def better(self, value: float, than: float | None) -> bool:
        """Strictly; anything is better than nothing."""
        return than is None or (value > than if self.higher else value < than)

    def best(self, of: Iterable[T], value: Callable[[T], float]) -> T:
        return max(of, key=value) if self.higher else min(of, key=value)

    def written(self, value: float) -> str:
        """``0.413``."""
        return "diverged" if value >= _DIVERGED else f"{value:.{self.digits}f}"

    def beside(self, value: float, base: float) -> float:
        """How far a value is from another, in the metric's unit."""
        if self.unit == "%":
            return 100 * (value / base - 1)
        return (100 if self.unit == "points" else 1) * (value - base)

    def spread(self, deviation: float, mean: float) -> float:
        return 100 * deviation / mean if self.unit == "%" else (100 if self.unit == "points" else 1) * deviation

    def told(self, value: float, base: float) -> str:
        """``1.2 points above``."""
        difference = self.beside(value, base)
        return f"{abs(difference):.1f} {self.unit} {'above' if difference >= 0 else 'below'}"
