"""A Transformer of transformers' Marian kind, with one table for source, target and softmax."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorbed as tb
from experiments.lab.dropout import dropout
from experiments.lab.errors import ExperimentError, needed
from experiments.lab.settings import Settings, option

END = 0  # of a sentence; the decoder starts with it, too
MOST_BEAMS = 64  # each has caches of its own
PAD = -100  # stands in batches where a sentence is over; no row of the table is its own


@dataclass(frozen=True, kw_only=True)
class TranslationSettings(Settings):
    """Of the model, of its vocabulary and batches, and of how it is measured."""

    vocabulary: int = option(8_000, "tokens of both languages at most, <end> among them", least=257)
    dim: int = option(256, "numbers per token", least=2)
    layers: int = option(3, "of the encoder, and as many of the decoder", least=1, below=1_000)
    heads: int = option(4, "of each attention; dim is a multiple of them", least=1)
    inner: int = option(512, "width inside of feed-forward layers", least=1)
    dropout: float = option(0.1, "of what enters the layers, and of what each of their parts adds", least=0, below=1)
    positions: int = option(128, "tokens of the longest sentence, its end among them", least=2)
    length_ratio: float | None = option(None, "clean training pairs: none empty, too long or so unequal", above=1)
    longest: int = option(128, "tokens of a cleaned training sentence at most, its end among them", least=2)
    label_smoothing: float = option(0.1, "in training", least=0, below=1)
    batch: int = option(4_096, "tokens of a batch at most, of both sides, padding counted", least=2)
    beam: int = option(4, "for the test sets", least=1, below=MOST_BEAMS + 1)
    validation_beam: int = option(1, "on the way", least=1, below=MOST_BEAMS + 1)
    steps: int | None = option(None, "training steps; left out, as many as the epochs have", least=1)
    validations: int = option(10, "spread over the steps", least=1)
    pairs: int | None = option(None, "as if each split had only so many pairs", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads or self.dim % 2:
            raise ExperimentError(f"dim={self.dim}: it must be even and a multiple of heads={self.heads}.")


class Translator(nn.Module):
    """The model, and the tokeniser that it was trained with: what it writes can be read without its data.

    Shape:
        - source, target: ``(batch, length)``, each sentence with its end, and ``PAD`` after it
    """

    tokenizer: Tensor  # its JSON, as bytes

    def __init__(self, settings: TranslationSettings, vocabulary: int, tokenizer: str = "") -> None:
        super().__init__()
        marian = transformers()
        self.register_buffer("tokenizer", torch.tensor(list(tokenizer.encode()), dtype=torch.uint8))
        self.label_smoothing = settings.label_smoothing
        deviation = settings.dim**-0.5  # Glorot's, of a square matrix; the table is read times sqrt(dim)
        sides = ("encoder", "decoder")
        config = marian.MarianConfig(
            vocab_size=vocabulary,
            d_model=settings.dim,
            **{f"{side}_layers": settings.layers for side in sides},
            **{f"{side}_attention_heads": settings.heads for side in sides},
            **{f"{side}_ffn_dim": settings.inner for side in sides},
            dropout=0.0,  # see add_dropout
            activation_function="relu",
            max_position_embeddings=settings.positions,
            scale_embedding=True,
            init_std=deviation,
            pad_token_id=None,  # what is padding is masked here, and no table keeps a row for it
            eos_token_id=END,
            decoder_start_token_id=END,
            forced_eos_token_id=None,
            # On a processor the backward of torch's fused attention takes a third of a step where sentences are short.
            attn_implementation="sdpa" if torch.accelerator.is_available() else "eager",
        )
        self.marian = marian.MarianMTModel(config)
        self.ending = Ending()
        self.marian._check_early_stop_heuristic = self.ending
        scale_branches(self.marian, (2 * settings.layers) ** -0.5)
        if settings.dropout:
            add_dropout(self.marian, settings.dropout)
        # The table comes last: whatever it draws, the body has drawn the same numbers before it.
        format = settings.table_format(vocabulary, settings.dim)
        tb.compress_(self.marian, {"model.shared": format}, fit=False, std=settings.std or deviation)

    def forward(self, source: Tensor, target: Tensor | None = None, beams: int = 1) -> Tensor:
        """The loss summed over the target's tokens; without a target, translations.

        Both are one call, because processes that share a model find it whole only inside of one.
        """
        return self.translated(source, beams) if target is None else self.loss(source, target)

    def loss(self, source: Tensor, target: Tensor, reduction: str = "sum") -> Tensor:  # -> (), or as the target
        """Exact, over all tokens, and without their scores; smoothed in training."""
        words, known = without_padding(source)
        before, _ = without_padding(F.pad(target[:, :-1], (1, 0), value=END))
        decoded = self.marian.model(
            input_ids=words, attention_mask=known, decoder_input_ids=before, use_cache=False
        ).last_hidden_state
        smoothing = self.label_smoothing if self.training else 0.0
        loss: Tensor = self.marian.lm_head.loss(
            decoded, target, label_smoothing=smoothing, ignore_index=PAD, reduction=reduction
        )
        return loss

    def translated(
        self, source: Tensor, beams: int, left: float = 0.0
    ) -> Tensor:  # (batch, length) -> (batch, its length)
        """The likeliest translations that beams find, each with its end, and ends after it.

        A translation is at most twice as long as the longest source beside it, and ten tokens more. It has a token at
        least: without a length penalty a smoothed model finds an empty one likelier than a dozen tokens. The search may
        stop where a share of the sentences is ``left``: their rows are ``PAD``.
        """
        words, known = without_padding(source)
        config = transformers().GenerationConfig(
            num_beams=beams,
            length_penalty=0.0 if beams > 1 else None,
            min_new_tokens=1,
            max_new_tokens=min(self.marian.config.max_position_embeddings, 2 * source.shape[1] + 10),
            eos_token_id=END,
            pad_token_id=END,
            decoder_start_token_id=END,
        )
        self.ending.begin(left)
        with scored_by_table(self.marian, beams * len(source)):
            written: Tensor = self.marian.generate(input_ids=words, attention_mask=known, generation_config=config)
        if self.ending.stopped is not None:
            written = written.masked_fill(self.ending.stopped, PAD)
        return written[:, 1:]  # without the start


def transformers() -> Any:
    """The package, which is slow to import and of no use to most commands."""
    return needed("transformers", "translation")


class Ending:
    """When a search by beams ends: where no translation may come that is likelier than the best one that has ended.

    A likelihood falls with every token, and no length divides it here: what is behind stays behind. transformers' own
    rule, in whose place this one is called, waits until as many have ended as there are beams, for the same best one.

    Attributes:
        left: the share of sentences for which the search need not end.
        stopped: for which it did not, where it stopped with some; ``(batch, 1)``.
    """

    left = 0.0
    stopped: Tensor | None = None

    def begin(self, left: float) -> None:
        self.left, self.stopped = left, None

    def __call__(
        self,
        is_early_stop_heuristic_unsatisfied: Tensor,  # (batch, 1), whether it may have come before
        running_beam_scores: Tensor,  # (batch, beams), the best one first
        beam_scores: Tensor,  # (batch, beams), of translations that have ended
        is_sent_finished: Tensor,  # (batch, beams), whether there is such a translation
        **more: Any,
    ) -> Tensor:  # -> (batch, 1)
        best_ended = beam_scores.masked_fill(~is_sent_finished, -torch.inf).amax(1, keepdim=True)
        may_come = is_early_stop_heuristic_unsatisfied & (running_beam_scores[:, :1] > best_ended)
        if self.left and 0 < int(may_come.sum()) <= self.left * len(may_come):
            self.stopped = may_come
            return torch.zeros_like(may_come)
        return may_come


class TableScores(nn.Module):
    """Scores by a table that is there: ``(*, dim) -> (*, vocabulary)``."""

    def __init__(self, table: Tensor) -> None:  # (dim, vocabulary)
        super().__init__()
        self.table = table

    def forward(self, decoded: Tensor) -> Tensor:
        return decoded.to(self.table.dtype) @ self.table


@contextmanager
def scored_by_table(marian: Any, vectors: int) -> Iterator[None]:
    """Inside this block the model scores by a full table, where its head would do more work for so many vectors a step.

    The table is made once for all steps, of the scores of unit vectors and in their precision. Blocks may be nested:
    whoever translates many batches with the same weights makes the table once for all of them by a block around them.
    """
    head = marian.lm_head
    told = None if isinstance(head, TableScores) else head.explain(vectors)
    if told is not None and told.multiply_adds > told.multiply_adds_dense:
        with torch.no_grad():
            marian.lm_head = TableScores(head(torch.eye(head.in_features, device=marian.device)))
    try:
        yield
    finally:
        marian.lm_head = head


@torch.no_grad()
def scale_branches(marian: nn.Module, factor: float) -> None:
    """Make what each attention and inner layer adds so much smaller at birth, much as GPT-2 does.

    Norms stand after the sums in Marian's layers: with branches as large as what they are added to, the decoder takes
    three times as many steps until it attends to the source.
    """
    for name, weight in marian.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            weight.mul_(factor)


def add_dropout(marian: nn.Module, share: float) -> None:
    """Dropout where Marian has its own: of what enters the layers, and of what each attention and inner layer adds."""

    def entering(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (dropout(given[0], share), *given[1:]) if layer.training else given

    def leaving(layer: nn.Module, _: Any, added: Tensor) -> Tensor:
        return dropout(added, share) if layer.training else added

    for name, layer in marian.named_modules():
        if name.endswith("layers.0"):
            layer.register_forward_pre_hook(entering)
        elif name.endswith(("out_proj", "fc2")):
            layer.register_forward_hook(leaving)


def without_padding(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that all have a row, and which of them are there."""
    known = tokens != PAD
    return tokens.masked_fill(~known, END), known
