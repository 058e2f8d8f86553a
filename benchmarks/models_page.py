"""The results of ``python -m benchmarks.models`` as a page and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from pages import unbroken

Line = dict[str, Any]

COLOURS = {"int8 / int4": "#e0793a", "hot rows": "#c2413b", "pq": "#12508f", "low rank": "#6cc2a4", "TT": "#8a6fc0"}
MARKERS = {"int8 / int4": "s", "hot rows": "D", "pq": "o", "low rank": "^", "TT": "v"}
_TICKS = (2, 4, 8, 16, 32)
_ALT = {  # of a picture, by whether it is of cosines
    True: "Ratio of the table against how far sentence embeddings move, a line for each format",
    False: "Ratio of the table against perplexity, a line for each format",
}
_WORST = 10.0  # times the base perplexity, beyond which nothing is drawn

_HEAD = """# Compressed tables of trained models

What two real models lose when their tables are compressed and nothing is trained afterwards. Made by

```
python -m benchmarks.models minilm --data DIR
python -m benchmarks.models smollm2 --data DIR
```

`python -m benchmarks.models --help` says what DIR holds and which packages bring the models.

What to take is on the page [Which format should I take?](../which_format.md).
"""
_COMMANDS = """
## The command as it comes

`tensorbed compress` with no option, and with typical texts. Cosines (of sentence embeddings; of SmolLM2 of the means of
its last hidden states) and perplexity are over 60 reviews of IMDB's test half, up to 256 tokens of each; 200 reviews of
its training half calibrate. Nothing was chosen by these texts. Seconds are of the whole command, imports and reading
included, on two cores with little else to do. Made by `python -m benchmarks.defaults --data DIR`.

"""
_FORMATS = """
## The formats

* **int8 / int4**: `tb.QuantizedRows`, 8 or 4 bits for each number.
* **hot rows**: `tb.HotRows`, the rows that are used most in 8 bits, the others in 4.
* **pq**: `tb.ProductQuantized`, product quantisation: a byte for each 1, 2, 3, ... columns of a row.
* **low rank**: `tb.LowRank`, the product of two thin matrices.
* **TT**: `tb.TensorTrain`, a chain of small cores.
* **calibrated**: fitted with `tb.compress_(..., calibrate=...)` on the beginning of WikiText-2's validation text, which
  nothing is measured on; all others saw no data.
"""
_HOW = """
## How it was measured

*Ratio* is the dense table in float32 over all that is stored for it: codes, codebooks, steps, scales, places of hot
rows. *Error* is `||W - fit||_F / ||W||_F`. Calibration may raise the error: it lowers what counts, errors of rows that
are used and in directions that hidden vectors have.

*Asked* is the ratio that was asked for; *ratio* is what came of it, the smallest that the format has from there on.
Product quantisation keeps a byte for each column (a ratio of about 4), for each two (7.5), for each three (11) and so
on, and nothing between: asked for 8 it has 11. Seconds are those of one thread of a busy machine, calibration included.
Rows that were not measured yet are not shown; the commands go on with them.
"""
_ABOUT = {
    "all-MiniLM-L6-v2": """
A sentence encoder; its word table of 30,522 x 384 is half of the model. Cosines are between the sentence embeddings
(mean pooling, length 1) of the compressed model and the model's own, over {amount:,} English sentences of Multi30k
(test_2016_flickr).
""",
    "SmolLM2-135M-Instruct": """
A language model with one table of 49,152 x 576 at both ends, so that its errors meet every logit. The weights come from
a GGUF file and are **quantised already**: Q4_1, the table Q8_0; here they are float32 numbers again, and ratios are
over float32. Perplexity is over {amount:,} tokens of WikiText-2's test text, read in windows of 1,024 whose first
token is not predicted; the text is as the data set has it, split into words, with `<unk>`, lines joined
without the spaces at their ends. The base is {base:.2f}.

That hot rows are kept at all, and how an error counts by itself beside what hidden vectors make of it, was decided
by trying a few values on the first half of this test text: hot rows and calibrated rows are a little flattered by that.
""",
}


def read(path: Path) -> list[Line]:
    """The lines that are there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def write(folder: Path) -> None:
    """``compression.md`` and a picture for each model, beside ``compression.jsonl``."""
    lines = read(folder / "compression.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    groups = {name: _latest([line for line in lines if line["model"] == name]) for name in _ABOUT}
    groups = {name: group for name, group in groups.items() if group}
    for name, group in groups.items():
        picture(name, group).savefig(folder / _picture_file(name), dpi=200)
    sections = "".join(_section(name, group) for name, group in groups.items())
    commands = default_commands(read(folder / "defaults.jsonl"))
    (folder / "compression.md").write_text(_HEAD + commands + _FORMATS + sections + _HOW, encoding="utf-8")


def default_commands(lines: Sequence[Line]) -> str:
    """What the command does where nothing is said; empty where it was not measured."""
    if not lines:
        return ""
    head = ("command", "seconds", "ratio", "mean cosine", "worst cosine", "perplexity", "format")
    rows = [head, ("---", *("---:",) * 5, "---"), *map(_default_cells, lines)]
    return _COMMANDS + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _default_cells(line: Line) -> tuple[str, ...]:
    if "ratio" not in line:
        return f"`{line['command']}`", f"{line['seconds']:.0f}", *("",) * 5
    perplexity = line["perplexity"]
    over = (
        f"{perplexity['before']:.2f} to {perplexity['after']:.2f}, {perplexity['ratio'] - 1:+.1%}" if perplexity else ""
    )
    cosines = (f"{line['mean_cosine']:.4f}", f"{line['worst_cosine']:.4f}")
    numbers = (f"{line['seconds']:.0f}", f"{line['ratio']:.2f}", *cosines, over)
    return f"`{line['command']}`", *numbers, unbroken(line["format"].replace("quantized_rows ", ""))


def _picture_file(name: str) -> str:
    return f"compression_{name.lower()}.png"


def _latest(lines: Sequence[Line]) -> list[Line]:
    """Of several amounts of text the largest, of a row measured twice the last; by family and ratio."""
    most = max((_amount(line) for line in lines), default=0)
    rows = {line["key"]: line for line in lines if _amount(line) == most}
    families = list(COLOURS)
    return sorted(rows.values(), key=lambda r: (families.index(r["family"]), r["asked"], r["calibrated"]))


def _amount(line: Line) -> int:
    amount: int = line.get("sentences") or line["tokens"]
    return amount


def _section(name: str, lines: Sequence[Line]) -> str:
    """A model: what it is, what is seen, the picture, and all rows."""
    measured = [line for line in lines if "ratio" in line]
    cosines = any("mean_cosine" in line for line in measured)
    base = measured[0].get("base_perplexity", 0.0) if measured else 0.0
    quality = ("mean cosine", "worst cosine") if cosines else ("perplexity", "over the base")
    # What is compared comes first: a phone shows four columns, and the rest is to be scrolled to.
    head = ("format", "ratio", *quality, "error", "table, MB", "model, MB", "asked", "seconds to fit", "details")
    table: list[tuple[str, ...]] = [head, ("---", *("---:",) * 8, "---")]
    if measured:
        ends = ("1.0000", "1.0000") if cosines else (f"{base:.2f}", "")
        sizes = (_megabytes(measured[0]["table_bytes_before"]), _megabytes(measured[0]["model_bytes_before"]))
        table.append(("float32", "1.00", *ends, "0", *sizes, "", "", ""))
    table += [_cells(line) for line in measured]
    parts = (
        _ABOUT[name].format(amount=_amount(lines[0]), base=base).strip(),
        _reached(measured, cosines),
        f"![{_ALT[cosines]}]({_picture_file(name)})",
        _how_to_read(measured),
        "\n".join(f"| {' | '.join(row)} |" for row in table),
        _not_to_be_had([line for line in lines if "ratio" not in line]),
    )
    return f"\n## {name}\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _family(line: Line) -> str:
    return f"{line['family']}, calibrated" if line["calibrated"] else str(line["family"])


def _cells(line: Line) -> tuple[str, ...]:
    return (
        _family(line),
        f"{line['ratio']:.2f}",
        *_quality(line),
        f"{line['error']:.3f}",
        _megabytes(line["table_bytes"]),
        _megabytes(line["model_bytes"]),
        f"{line['asked']:g}",
        f"{line['seconds']:.0f}",
        unbroken(line["structure"].split(", ", 1)[1].replace("quantized_rows ", "")),  # bits say it
    )


def _not_to_be_had(lines: Sequence[Line]) -> str:
    """What was asked for and no format of the family has, and why."""
    asked: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        asked.setdefault((_family(line), line["reason"]), []).append(f"{line['asked']:g}")
    said = [f"{family} at ratio {', '.join(ratios)} ({reason})" for (family, reason), ratios in asked.items()]
    return f"Not to be had: {'; '.join(said)}." if said else ""


def _how_to_read(lines: Sequence[Line]) -> str:
    """Of a model's picture: what is better, and what is not in it."""
    drawn = {_family(line) for line in _drawn(lines)}
    beyond = list(dict.fromkeys(_family(line) for line in lines if _family(line) not in drawn))
    said = "In the picture further right is smaller and lower is better; hollow marks are calibrated."
    if beyond:
        said += f" Beyond {_WORST:g} times the base's perplexity, and so not in it: {', '.join(beyond)}."
    return said


def _quality(line: Line) -> tuple[str, str]:
    if "mean_cosine" in line:
        return f"{line['mean_cosine']:.4f}", f"{line['worst_cosine']:.4f}"
    over = line["perplexity"] / line["base_perplexity"] - 1
    return f"{line['perplexity']:,.2f}", f"{over:+.1%}" if over < 100 else f"x {over + 1:,.0f}"


def _reached(lines: Sequence[Line], cosines: bool) -> str:
    """The largest ratio within each bound."""
    said = []
    for bound in (0.995, 0.98, 0.95) if cosines else (0.01, 0.03, 0.1):
        if cosines:
            held, what = [r for r in lines if r["mean_cosine"] >= bound], f"mean cosine of at least {bound}"
        else:
            held = [r for r in lines if r["perplexity"] <= (1 + bound) * r["base_perplexity"]]
            what = f"perplexity within {bound:.0%}"
        if held:
            best = max(held, key=lambda r: r["ratio"])
            said.append(f"* {what}: ratio {best['ratio']:.2f}, {_family(best)} ({_quality(best)[0]})")
    return "What is seen: the largest ratio with\n\n" + "\n".join(said) if said else ""


def shown(line: Line) -> str:
    """One line for the terminal."""
    if "ratio" not in line:
        return f"{line['family']:<12} {line['asked']:>4g}  not to be had: {line['reason']}"
    family = line["family"] + (" *" if line["calibrated"] else "")
    sizes = f"{line['ratio']:6.2f}  error {line['error']:.3f}  table {_megabytes(line['table_bytes'])} MB"
    return f"{family:<14} {line['asked']:>4g}  {sizes}  {'  '.join(_quality(line))}  {line['seconds']:.0f} s"


def picture(name: str, lines: Sequence[Line]) -> Figure:
    """Ratio against cosine or perplexity, a line for each family; as wide as a phone, where its text is legible."""
    with matplotlib.rc_context({"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.8, 5.2), layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, name, [line for line in lines if "ratio" in line])
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return figure


def _drawn(lines: Sequence[Line]) -> list[Line]:
    """Those that are not off the scale."""
    return [r for r in lines if "mean_cosine" in r or r["perplexity"] <= _WORST * r["base_perplexity"]]


def _draw(axes: Any, name: str, lines: Sequence[Line]) -> None:
    cosines = any("mean_cosine" in line for line in lines)
    for family, colour in COLOURS.items():
        for calibrated in (False, True):
            mine = [r for r in _drawn(lines) if r["family"] == family and r["calibrated"] == calibrated]
            mine.sort(key=lambda r: r["ratio"])
            if mine:
                axes.plot(
                    [r["ratio"] for r in mine],
                    [_distance(r) for r in mine],
                    color=colour,
                    marker=MARKERS[family],
                    markerfacecolor="white" if calibrated else colour,
                    linestyle="--" if calibrated else "-",
                    label=_family(mine[0]),
                )
    axes.set(
        title=name, xlabel="ratio: times smaller than the table in float32", xscale="log", yscale="log", xlim=(1.8, 40)
    )
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(alpha=0.3)
    if cosines:
        axes.set(ylabel="1 - mean cosine of sentence embeddings")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.5f}".rstrip("0").rstrip(".")))
    else:
        axes.set(ylabel=f"perplexity over the base (up to {_WORST:g})")
        axes.yaxis.set_major_locator(FixedLocator((1, 1.1, 1.5, 2, 5, 10)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _distance(line: Line) -> float:
    """From what the model was: less is better."""
    if "mean_cosine" in line:
        return float(max(1 - line["mean_cosine"], 1e-7))
    return float(line["perplexity"] / line["base_perplexity"])


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"
