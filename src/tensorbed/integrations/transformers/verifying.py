"""Two folders of one model, one of them compressed: how far apart their outputs are on texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tensorbed.integrations.transformers import folders
from tensorbed.progress import track

Ids = list[int]


@dataclass(frozen=True)
class Perplexity:
    """Of both models, over the tokens that they predict: all but the first of each text."""

    before: float
    after: float
    ratio: float
    tokens: int


@dataclass(frozen=True)
class Verification:
    """How near the outputs are, one vector for each text."""

    texts: int
    tokens: int
    cut: int  # texts that were longer than what was read of them
    outputs: str  # what the vectors are
    mean_cosine: float
    worst_cosine: float
    worst_text: str  # the one that is farthest off
    perplexity: Perplexity | None  # where the model has a causal head
    notes: tuple[str, ...]


# What one model made of the texts: vectors (texts, dim), the loss of all predicted tokens in nats, notes.
_Seen = tuple[Tensor, Tensor | None, list[str]]


def read_texts(file: str | Path) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")  # splitlines would end one at other characters too
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {file}.") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{file} is a folder; give a file of texts, one a line.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8 (byte {error.start}).") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ValueError(f"there is no text in {file}; give one a line.")
    return found


def verify_folders(
    out: str | Path, against: str | Path, texts: Sequence[str], *, batch: int = 8, max_tokens: int = 512
) -> Verification:
    """Read texts with the model of each folder, one in memory at a time, and compare; causal heads have a perplexity.

    The vector of a text is that of sentence-transformers, where both folders are its and it is installed, else the mean
    of the last hidden states over the text's tokens (of the encoder, where there is one).
    """
    both = folders.opened(out), folders.opened(against)
    ids, cut = _tokens(both, texts, max_tokens)
    sentences = all(one.modules is not None for one in both) and find_spec("sentence_transformers") is not None
    (after, loss, notes), (before, loss_before, notes_before) = (
        _sentences(folder, texts, batch, max_tokens) if sentences else _states(folder, ids, batch) for folder in both
    )
    if after.shape != before.shape:
        sizes = f"{after.shape[1]} and {before.shape[1]}"
        raise ValueError(f"{out} and {against} are different models: their outputs have {sizes} numbers.")
    perplexity, predicted = None, sum(len(one) - 1 for one in ids)
    if loss is not None and loss_before is not None and predicted:
        dense, small = (float((total / predicted).exp()) for total in (loss_before, loss))
        perplexity = Perplexity(dense, small, small / dense, predicted)
    cosines = F.cosine_similarity(after, before, dim=1)
    worst = int(cosines.argmin())
    return Verification(
        texts=len(texts),
        tokens=sum(map(len, ids)),
        cut=cut,
        outputs="sentence embeddings" if sentences else "means of the last hidden states",
        mean_cosine=float(cosines.mean()),
        worst_cosine=float(cosines[worst]),
        worst_text=texts[worst],
        perplexity=perplexity,
        notes=tuple(dict.fromkeys([*notes, *notes_before])),
    )


def _tokens(both: Sequence[folders.Folder], texts: Sequence[str], max_tokens: int) -> tuple[list[Ids], int]:
    """The texts in numbers, the same for both, and how many of them were cut."""
    ours, theirs = map(folders.load_tokenizer, both)
    names = f"the tokenizers of {both[0].root} and {both[1].root} differ"
    if ours.get_vocab() != theirs.get_vocab():
        raise ValueError(f"{names}: vocabularies of {len(ours):,} and {len(theirs):,}; are these one model?")
    limit = min(map(folders.token_limit, both, (ours, theirs), (max_tokens, max_tokens)))
    with folders.quiet():
        whole, other = (tokenizer(list(texts))["input_ids"] for tokenizer in (ours, theirs))
        kept = ours(list(texts), truncation=True, max_length=limit)["input_ids"]
    for text, one, two in zip(texts, whole, other, strict=True):
        if one != two:
            raise ValueError(f"{names}: {text[:60]!r} has {len(one)} tokens for one and {len(two)} for the other.")
        if not one:
            raise ValueError(f"{text[:60]!r} has no token for {both[0].root}; leave it out.")
    return kept, sum(len(one) < len(two) for one, two in zip(kept, whole, strict=True))


def _sentences(folder: folders.Folder, texts: Sequence[str], batch: int, max_tokens: int) -> _Seen:
    from sentence_transformers import SentenceTransformer

    options: dict[str, Any] = {"device": "cpu", "local_files_only": True, "model_kwargs": {"dtype": "auto"}}
    with folders.explained(folder), folders.quiet():
        model = SentenceTransformer(str(folder.root), **options)
    model.max_seq_length = min(max_tokens, model.max_seq_length or max_tokens)
    rows = []
    for start in track(range(0, len(texts), batch), f"reading with {folder.root.name}"):
        part = list(texts[start : start + batch])
        rows.append(model.encode(part, batch_size=batch, convert_to_tensor=True, show_progress_bar=False).double())
    return torch.cat(rows), None, []


@torch.no_grad()
def _states(folder: folders.Folder, ids: Sequence[Ids], batch: int) -> _Seen:
    model, notes = folders.load_model(folder)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # little is padded
    rows: dict[int, Tensor] = {}
    heads = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    loss = torch.zeros((), dtype=torch.float64) if heads else None
    for start in track(range(0, len(order), batch), f"reading with {folder.root.name}"):
        picked = order[start : start + batch]
        texts = [torch.tensor(ids[i]) for i in picked]
        tokens = pad_sequence(texts, batch_first=True)  # (n, longest)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        hidden, logits = _outputs(model, tokens, mask, heads)
        if hidden.dim() != 3:
            raise ValueError(f"a {type(model).__name__} has no hidden state for each token, which this compares.")
        for place, (i, text) in enumerate(zip(picked, texts, strict=True)):
            rows[i] = hidden[place, : len(text)].double().mean(0)
            if loss is not None and logits is not None:
                # Single precision for one text at a time, since logits are large.
                loss += F.cross_entropy(logits[place, : len(text) - 1].float(), text[1:], reduction="sum")
    return torch.stack([rows[i] for i in range(len(ids))]), loss, notes


def _outputs(model: PreTrainedModel, tokens: Tensor, mask: Tensor, heads: bool) -> tuple[Tensor, Tensor | None]:
    """Last hidden states ``(n, length, dim)`` and, where there is a causal head, logits ``(n, length, vocabulary)``."""
    if model.config.is_encoder_decoder:
        return model.get_encoder()(input_ids=tokens, attention_mask=mask)[0], None
    options: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    options |= {"use_cache": False} if heads else {}
    seen: list[Tensor] = []
    with model.base_model.register_forward_hook(lambda module, given, found: seen.append(found[0])):
        found = model(**options)
    # Some models call what is inside their base model and not itself.
    hidden = seen[0] if seen else model(**options, output_hidden_states=True).hidden_states[-1]
    return hidden, found.logits if heads else None
