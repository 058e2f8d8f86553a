"""Figures of the paper, drawn from the library's own numbers: ``python -m benchmarks.figures init``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import overview
from tensorbed import TTEmbedding
from tensorbed.progress import track

_FACTORS = (5, 5, 5, 5)
_RANKS = (1, 2, 4, 8, 16, 32, 64)
_EDGE, _BINS = 6.0, 245  # the histogram spans [-_EDGE, _EDGE]; an odd number, so that a bin is centred on zero


@dataclass(frozen=True)
class Entries:
    """What a table of one rank looks like at birth, averaged over draws.

    Shape:
        - density: ``(bins,)``, of all the entries, those outside the histogram included
    """

    rank: int
    std: float
    excess_kurtosis: float
    distance: float  # Kolmogorov-Smirnov, to N(0, 1)
    density: Tensor


def entries_at_birth(rank: int, draws: int, seed: int = 0) -> Entries:
    """Entries of a table of shape (5,5,5,5) x (5,5,5,5) drawn with standard deviation 1 (Figure 3 of the paper)."""
    size = math.prod(_FACTORS)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        layer = TTEmbedding(size, size, rank, shape=(_FACTORS, _FACTORS), std=1.0)
        tables = [layer.weight.flatten()]
        for _ in range(draws - 1):
            layer.reset_parameters()
            tables.append(layer.weight.flatten())
    values = torch.cat(tables).double()
    counts = torch.histc(values, _BINS, -_EDGE, _EDGE)
    variance, fourth = values.square().mean(), values.pow(4).mean()
    return Entries(
        rank,
        float(variance.sqrt()),
        float(fourth / variance**2 - 3),
        normal_distance(values),
        counts * _BINS / (2 * _EDGE * values.numel()),
    )


def normal_distance(values: Tensor) -> float:  # (n,) -> float
    """Kolmogorov-Smirnov distance to N(0, 1): the largest gap between the two distribution functions."""
    expected = torch.special.ndtr(values.double().sort().values)
    step = torch.arange(expected.numel() + 1, dtype=torch.float64) / expected.numel()
    # The empirical function jumps at each value: the gap is measured on both sides of the jump.
    return float(torch.maximum((step[1:] - expected).max(), (expected - step[:-1]).max()))


def draw_init(out: Path, *, seed: int = 0, draws: int = 8) -> list[Entries]:
    """Draw Figure 3 of the paper into ``out``, a ``.png`` or ``.svg`` file, and return its numbers.

    Args:
        out: overwritten; its folder is made if need be.
        draws: tables drawn and pooled for each rank.
    """
    pyplot = _pyplot()
    found = [entries_at_birth(rank, draws, seed) for rank in track(_RANKS, "drawing tables")]
    with pyplot.rc_context(_STYLE):
        figure, (linear, logarithmic) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
        colours = pyplot.get_cmap("viridis_r")(torch.linspace(0.12, 1, len(found)).tolist())
        _draw_densities(linear, found, colours)
        # Few entries are far out: wider bins there show the tail and not the chance of the draw.
        _draw_densities(logarithmic, found, colours, pooled=5)
        linear.set(xlim=(-3, 3), ylim=(0, 1), ylabel="density", title="near zero")
        logarithmic.set(xlim=(-_EDGE, _EDGE), ylim=(1e-5, 3), yscale="log", title="tails, logarithmic")
        linear.legend(frameon=False, loc="upper right", handlelength=1.4)
        shape = f"({', '.join(map(str, _FACTORS))})"
        figure.suptitle(rf"Entries of a tensor-train table at birth, {shape} $\times$ {shape}, $\sigma = 1$")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=160)
        pyplot.close(figure)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m benchmarks.figures``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    figures = parser.add_subparsers(dest="figure", required=True, metavar="figure")
    init = figures.add_parser("init", help="how the entries' distribution goes to a Gaussian as the rank grows")
    init.add_argument("--out", type=_picture, default=Path("out/init.png"), help="default: %(default)s")
    init.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    init.add_argument("--draws", type=_positive, default=8, help="tables for each rank (default: %(default)s)")
    picture = figures.add_parser("overview", help="the picture of the README: memory and accuracy side by side")
    picture.add_argument("--out", type=Path, default=Path("docs/images"), help="a folder, default: %(default)s")
    options = parser.parse_args(arguments)
    if options.figure == "overview":
        panels = overview.trained_from_scratch(), overview.already_trained()
        files = overview.draw(_pyplot(), options.out, panels)
        sys.stdout.write(f"drawn into {' and '.join(map(str, files))}\n")
        return 0
    found = draw_init(options.out, seed=options.seed, draws=options.draws)
    sys.stdout.write("rank   std     excess kurtosis   distance to N(0, 1)\n")
    for entries in found:
        row = f"{entries.rank:4d}   {entries.std:.4f}   {entries.excess_kurtosis:15.3f}   {entries.distance:19.4f}\n"
        sys.stdout.write(row)
    sys.stdout.write(f"drawn into {options.out}\n")
    return 0


_STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlecolor": "0.3",
    "axes.edgecolor": "0.6",
    "xtick.color": "0.4",
    "ytick.color": "0.4",
    "legend.fontsize": 9,
    "figure.titlesize": 12,
    # The same numbers give the same file.
    "svg.hashsalt": "tensorbed",
}


def _draw_densities(axes: Any, found: Sequence[Entries], colours: Any, pooled: int = 1) -> None:
    width = pooled * 2 * _EDGE / _BINS
    middles = -_EDGE + width * (torch.arange(_BINS // pooled) + 0.5)
    for entries, colour in zip(found, colours, strict=True):
        # An empty bin has no logarithm; a gap is drawn there.
        density = entries.density.reshape(-1, pooled).mean(1)
        density = density.where(density > 0, math.nan)
        axes.plot(middles.tolist(), density.tolist(), color=colour, linewidth=1.5, label=f"rank {entries.rank}")
    line = torch.linspace(-_EDGE, _EDGE, 401)
    normal = torch.exp(-line.square() / 2) / math.sqrt(2 * math.pi)
    axes.plot(line.tolist(), normal.tolist(), color="black", linewidth=1.3, linestyle="--", label="N(0, 1)")
    axes.set_xlabel("entry of the table")


def _pyplot() -> Any:
    """Matplotlib without a display, imported only here: the library itself does not need it."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Figures are drawn with matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text}: give a file that ends in .png or .svg.")
    return path


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} draws: at least one.")
    return number


if __name__ == "__main__":
    sys.exit(main())
