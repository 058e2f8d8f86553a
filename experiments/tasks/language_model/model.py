"""Transformer-XL (Dai et al., 2019, arXiv:1901.02860) between two tables of words, or one that both ends share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorbed as tb
from experiments.lab.dropout import Dropout
from experiments.lab.errors import ExperimentError
from experiments.lab.settings import Settings, option
from experiments.lab.words import UNKNOWN

# Of weights and tables at birth, as in the original. With a larger one, a table that both ends share would foretell the
# word that was just read.
STD = 0.02
END = "<eos>"  # of a line
Memory = list[Tensor]  # what each layer has read before: (batch, remembered, dim)


@dataclass(frozen=True, kw_only=True)
class LanguageModelSettings(Settings):
    """Of the model, of the segments it reads, and of how it is measured."""

    vocabulary: int = option(33_278, "words at most, <unk> and <eos> among them", least=2)
    dim: int = option(128, "numbers per word", least=2)
    layers: int = option(4, "of the body", least=1)
    heads: int = option(4, "of each attention; dim is a multiple of them", least=1)
    inner: int = option(512, "width inside of feed-forward layers", least=1)
    dropout: float = option(0.1, "of what enters and leaves the layers", least=0, below=1)
    tables: int = option(1, "1, which both ends share, or 2; a ratio is one full table's to both", least=1, below=3)
    target: int = option(128, "tokens per lane and step", least=1)
    memory: int = option(128, "tokens before them that attention reaches", least=0)
    evaluation_batch: int = option(4, least=1)
    evaluation_target: int = option(128, least=1)
    evaluation_memory: int = option(640, "the same in evaluation and generation", least=0)
    clamp: int = option(400, "the distance beyond which all are alike", least=1)
    steps: int | None = option(None, "training steps; left out, as many as the epochs have", least=1)
    validations: int = option(8, "spread over the steps", least=1)
    tokens: int | None = option(None, "as if each split had only so many tokens", least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads or self.dim % 2:
            raise ExperimentError(f"dim={self.dim}: it must be even and a multiple of heads={self.heads}.")

    def table_format(self, *size: int) -> Any:
        """Of each table; two share what one may take."""
        if self.ratio is None or self.tables == 1:
            return super().table_format(*size)
        return replace(self, ratio=self.ratio * self.tables, tables=1).table_format(*size)


def spelled(words: Sequence[str]) -> Tensor:  # -> (bytes,)
    """The words as a tensor, for files that hold only those."""
    return torch.frombuffer(bytearray("\n".join(words).encode()), dtype=torch.uint8)


def words_of(spelling: Tensor) -> tuple[str, ...]:  # (bytes,)
    """The words again; a ``ValueError`` where a file was changed and has none."""
    if spelling.dtype != torch.uint8 or spelling.dim() != 1:
        raise ValueError("its words are not the bytes of a text")
    try:
        words = tuple(bytes(spelling.tolist()).decode().split("\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"its words are not UTF-8: {error.reason} at byte {error.start}") from None
    if missing := {UNKNOWN, END} - set(words):
        raise ValueError(f"its words lack {', '.join(sorted(missing))}")
    if len(set(words)) < len(words):
        raise ValueError("it has one of its words twice")
    return words


def distance_waves(count: int, dim: int, clamp: int, like: Tensor) -> Tensor:  # -> (count, dim)
    """Sines and cosines of the distances from ``count - 1`` down to 0, none beyond ``clamp``."""
    distances = torch.arange(count - 1, -1, -1, device=like.device).clamp(max=clamp)
    speeds = 10_000 ** (-torch.arange(0, dim, 2, device=like.device) / dim)
    angles = torch.outer(distances, speeds)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)


def shifted(scores: Tensor) -> Tensor:  # (..., target, keys) -> (..., target, keys)
    """From scores by distance, the farthest first, to scores by key: each row moves one place less than that above it.

    What comes to stand right of a row's own token is of no distance at all, and masked.
    """
    *batch, target, keys = scores.shape
    # With one more column, rows that are read one number too long begin one number later each.
    return F.pad(scores, (1, 0)).view(*batch, keys + 1, target)[..., 1:, :].view(*batch, target, keys)


class RelativeAttention(nn.Module):
    r"""Attention over memory and segment, in which positions enter as distances alone.

    .. math:: s_{ij} = \big((q_i + u) \cdot k_j + (q_i + v) \cdot W_r r_{i-j}\big) / \sqrt{d}

    Shape:
        - hidden: ``(batch, target, dim)``
        - context: ``(batch, remembered + target, dim)``
        - waves: ``(remembered + target, dim)``
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.distance = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, 1, dim // heads))  # u
        self.distance_bias = nn.Parameter(torch.zeros(heads, 1, dim // heads))  # v

    def forward(self, hidden: Tensor, context: Tensor, waves: Tensor) -> Tensor:  # -> (batch, target, dim)
        query, distance = self.by_head(self.query(hidden)), self.by_head(self.distance(waves))
        key, value = map(self.by_head, self.key_value(context).chunk(2, dim=-1))
        scores = (query + self.content_bias) @ key.mT + shifted((query + self.distance_bias) @ distance.mT)
        target, keys = scores.shape[-2:]
        ahead = torch.ones(target, keys, dtype=torch.bool, device=scores.device).triu(keys - target + 1)
        weights = (scores / query.shape[-1] ** 0.5).masked_fill(ahead, -torch.inf).softmax(dim=-1)
        attended: Tensor = self.out((weights @ value).transpose(-3, -2).flatten(-2))
        return attended

    def by_head(self, numbers: Tensor) -> Tensor:  # (..., length, dim) -> (..., heads, length, dim / heads)
        parted: Tensor = numbers.unflatten(-1, (self.heads, -1))
        return parted.transpose(-3, -2)


class Layer(nn.Module):
    """Attention and a feed-forward layer, each added to what it reads and normalised."""

    def __init__(self, settings: LanguageModelSettings) -> None:
        super().__init__()
        dim, dropout = settings.dim, settings.dropout
        self.attention = RelativeAttention(dim, settings.heads)
        self.attention_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, settings.inner), nn.ReLU(), Dropout(dropout), nn.Linear(settings.inner, dim)
        )
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.dropout = Dropout(dropout)

    def forward(self, hidden: Tensor, context: Tensor, waves: Tensor) -> Tensor:  # -> (batch, target, dim)
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, context, waves)))
        normalised: Tensor = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return normalised


class TransformerXL(nn.Module):
    """Embedding, layers that remember what they have read, and a head over all words.

    In evaluation it remembers as much as the settings say for that.

    Shape:
        - words, following: ``(batch, target)``
        - memory: for each layer ``(batch, remembered, dim)``
    """

    spelling: Tensor  # of the words: what it writes can be read without its data

    def __init__(self, settings: LanguageModelSettings, words: Sequence[str]) -> None:
        super().__init__()
        self.register_buffer("spelling", spelled(words))
        self.remembered = {True: settings.memory, False: settings.evaluation_memory}
        self.segment = settings.evaluation_target  # what generation reads of a prompt at once
        self.clamp = settings.clamp
        self.dropout = Dropout(settings.dropout)
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=STD)
        # The tables come last: whatever they draw, the body has drawn the same numbers before them.
        self.embedding, self.head = tb.embedding_and_head(
            len(words),
            settings.dim,
            settings.table_format(len(words), settings.dim),
            tied=settings.tables == 1,
            bias=True,
            std=settings.std or STD,
        )
        self.scale = settings.dim**0.5  # to what is read, not to what scores

    def hidden(self, words: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:  # -> (batch, target, dim)
        """The body's output, and what it remembers for the words to come."""
        hidden = self.dropout(self.scale * self.embedding(words))
        memory = memory or [hidden[:, :0]] * len(self.layers)
        length = memory[0].shape[1] + hidden.shape[1]
        waves = self.dropout(distance_waves(length, hidden.shape[2], self.clamp, hidden))
        after = []
        for layer, before in zip(self.layers, memory, strict=True):
            context = torch.cat([before, hidden], dim=1)
            after.append(context[:, max(0, length - self.remembered[self.training]) :].detach().clone())
            hidden = layer(hidden, context, waves)
        return self.dropout(hidden), after

    def forward(self, words: Tensor, following: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """The loss, exact and over all words, summed over the tokens; those of -100 are not scored."""
        hidden, memory = self.hidden(words, memory)
        return self.head.loss(hidden, following, reduction="sum"), memory
