"""A note at the top of the model card of a compressed model: what it is, and the lines that load it."""

import json
import re
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from tensorbed.files.description import tables, ties
from tensorbed.printable import printable, some

CARD = "README.md"
_BEGIN, _END = "<!-- tensorbed: how this model is loaded -->", "<!-- tensorbed: end -->"
_OWN = re.compile(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}\s*", re.DOTALL)
# What the Hub reads of a card has to be its beginning.
_FRONT_MATTER = re.compile(r"\ufeff?---[ \t]*\r?\n.*?^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_MOST = 8  # tables that are named
_TEXT = """{begin}
> **This model is compressed with tensorbed.** {what}

To load it install tensorbed, which is on no package index yet; in a copy of its sources:

```
pip install {packages}
```

```python
import tensorbed.integrations.transformers  # before the model is loaded: it makes the tables known to transformers
{load}
```

Without that import transformers knows no quantization type `tensorbed` and stops at shapes that do not match.
{end}
"""


def file_bytes(model: nn.Module) -> int:
    """Of all that a file has of a model, what is shared once."""
    return sum({id(tensor): tensor.nbytes for tensor in model.state_dict(keep_vars=True).values()}.values())


def note_on(model: PreTrainedModel, name: str, of_sentences: bool = False, source: str | None = None) -> str:
    """The note for a folder of that name, which was made of ``source`` on the Hub."""
    found = tables(model)
    shared = ties(found)
    own = {table: layer for table, layer in found.items() if table not in shared}
    dense = sum(layer._dense_bytes for layer in own.values())
    kept, whole = sum(layer._stored_bytes for layer in own.values()), file_bytes(model)
    named = some([f"`{_plain(table)}`, {layer.structure.summary}" for table, layer in own.items()], _MOST, "; ")
    made = f" It was made of `{_plain(source)}`." if source else ""
    what = (
        f"Its embedding tables are kept {dense / max(1, kept):.1f} times smaller, and all weights take "
        f"{whole / 1e6:,.1f} MB in place of {(whole - kept + dense) / 1e6:,.1f}: {named}.{made}"
    )
    packages = '".[transformers]"' + (" sentence-transformers" if of_sentences else "")
    folder = json.dumps(printable(name), ensure_ascii=False)
    if of_sentences:
        load = f"from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer({folder})"
    else:
        kind = type(model).__name__
        kind = kind if getattr(transformers, kind, None) is type(model) else "AutoModel"
        load = f"from transformers import {kind}\n\nmodel = {kind}.from_pretrained({folder})"
    return _TEXT.format(begin=_BEGIN, end=_END, what=what, load=load, packages=packages)


def _plain(name: str) -> str:
    return printable(name).replace("`", "'")


def write_note(folder: Path, note: str) -> None:
    """Put a note on top of the card of a folder, or in place of the note that is there; the card stays below."""
    card = folder / CARD
    if card.exists() and not card.is_file():  # nothing to be written to
        return
    # As it is, whatever its encoding and its line ends.
    text = card.read_bytes().decode("utf-8", "surrogateescape") if card.exists() else ""
    text = _OWN.sub("", text)
    match = _FRONT_MATTER.match(text)
    front, rest = (match[0], text[match.end() :]) if match else ("", text)
    front += "" if not front or front.endswith("\n") else "\n"
    written = f"{front}{note}" + (f"\n{rest.lstrip()}" if rest.strip() else "")
    card.write_bytes(written.encode("utf-8", "surrogateescape"))


def save_pretrained(
    model: PreTrainedModel, save_directory: str | Path, is_main_process: bool = True, *args: Any, **options: Any
) -> None:
    """``model.save_pretrained``, which writes the note too."""
    type(model).save_pretrained(model, save_directory, is_main_process, *args, **options)
    adapters_alone = getattr(model, "_hf_peft_config_loaded", False)
    if is_main_process and tables(model) and not adapters_alone and Path(save_directory).is_dir():
        write_note(Path(save_directory), note_on(model, Path(save_directory).resolve().name))
