"""The vocabulary's other end: scores over all classes from a structured table, and a loss that never holds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self, Unpack

import torch
from torch import Tensor, nn

from tensorbed.checks import require_bool, require_positive
from tensorbed.functional import check_score_impl
from tensorbed.nn.embedding import Embedding
from tensorbed.nn.options import Deviation, TableOptions, options_shown
from tensorbed.nn.table import StructuredTable
from tensorbed.nn.ties import tied_layers
from tensorbed.structures import Format, Use
from tensorbed.vocabulary.explanation import ScoresExplanation, explain
from tensorbed.vocabulary.head_calls import check_per_class, logits_of, loss_of, sample_of, topk_of
from tensorbed.vocabulary.loss import Options, check_budget
from tensorbed.vocabulary.sampling import TopK
from tensorbed.vocabulary.scorer import Vocabulary


class Head(StructuredTable):
    r"""``torch.nn.Linear(in_features, num_classes)`` with its weight kept as a structured matrix, and what follows it.

    For a tensor train the score of class :math:`i` is the paper's softmax layer,

    .. math:: s_i = \sum_{j} x[j_1 \dots j_N]\, G^{(1)}[i_1, j_1] \cdots G^{(N)}[i_N, j_N].

    :meth:`loss` walks the classes in blocks: neither the weight nor the logits of all vectors ever exist.

    Args:
        in_features: columns of the table.
        num_classes: rows of the table.
        format: for instance ``tb.TensorTrain(rank=16)`` or ``tb.LowRank(ratio=8)``.
        bias: whether each class has a number added to its score; zero at birth.
        std: standard deviation of the table at birth, by default ``1 / sqrt(in_features)``; see :class:`Embedding`.
        impl: ``"auto"`` chooses by counted cost, ``"reference"`` makes all logits in plain PyTorch, ``"triton"`` takes
            the kernels for GPUs where there are some for what ``"auto"`` chooses.
        memory_budget: bytes that the loss may take for intermediate numbers; by default a third of what the logits of
            the batch would take, at most 1 GiB.

    Shape:
        - h: ``(*, in_features)``
        - output: ``(*, num_classes)``

    Example::

        >>> head = tb.Head(64, 10_000, tb.TensorTrain(rank=16))
        >>> hidden, target = torch.randn(8, 64), torch.randint(0, 10_000, (8,))
        >>> loss = head.loss(hidden, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(head(hidden), target))
        True
        >>> values, words = head.topk(hidden[-1], 10)
    """

    _size_names: ClassVar[tuple[str, str]] = ("num_classes", "in_features")
    num_classes: int
    in_features: int
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        format: Format,
        bias: bool = False,
        *,
        std: Deviation = None,
        impl: str = "auto",
        memory_budget: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(impl, memory_budget, bias)
        in_features = require_positive(in_features, "in_features")
        num_classes = require_positive(num_classes, "num_classes")
        super().__init__(num_classes, in_features, format, std=std, device=device, dtype=dtype)
        self._finish(bias, impl, memory_budget)

    def _finish(self, bias: Tensor | bool | None, impl: str, memory_budget: int | None) -> None:
        """What a head has besides a table; a bias is copied to where that is, or zero."""
        self.impl, self.memory_budget = impl, memory_budget
        device = next(iter(self.params().values())).device
        if bias is True:
            bias = torch.zeros(self.num_classes, device=device)
        copied = bias.detach().to(device=device, dtype=self._dtype, copy=True) if isinstance(bias, Tensor) else None
        self.register_parameter("bias", None if copied is None else nn.Parameter(copied))

    @classmethod
    def from_pretrained(
        cls,
        table: Tensor,
        format: Format,
        freeze: bool = True,
        *,
        bias: Tensor | None = None,
        impl: str = "auto",
        memory_budget: int | None = None,
        dtype: torch.dtype | None = None,
        std: Deviation = None,
        use: Use | None = None,
    ) -> Self:
        """Fit a format to a trained weight, ``linear.weight`` and ``linear.bias`` of a ``torch.nn.Linear``.

        The relative Frobenius error that was reached is in ``fit_error``.

        Args:
            table: the trained weight, all of its numbers finite.
            format: to a rank, a ratio, or an error: ``tb.TensorTrain(rel_error=0.1)``.
            freeze: the tensors do not require gradients unless ``freeze=False``.
            bias: copied.
            impl, memory_budget, std: as for the layer itself.
            dtype: of the layer, by default the table's.
            use: how the table is used, where that is known (``tb.structures.Use``): errors are weighed by it.

        Shape:
            - table: ``(num_classes, in_features)``
            - bias: ``(num_classes,)``

        Example::

            >>> linear = torch.nn.Linear(64, 5000)
            >>> head = tb.Head.from_pretrained(linear.weight, tb.QuantizedRows(bits=8), bias=linear.bias)
            >>> hidden = torch.randn(8, 64)
            >>> torch.allclose(head(hidden), linear(hidden), atol=0.05)
            True
        """
        _check(impl, memory_budget)
        if isinstance(table, Tensor) and table.dim() == 2:
            check_per_class(bias, table.shape[0], "bias")
        layer = cls._fitted(table, format, freeze, dtype, use, std=std)
        layer._finish(bias, impl, memory_budget)
        return layer.requires_grad_(not freeze)

    @classmethod
    def tied_to(
        cls, embedding: StructuredTable, bias: bool = False, *, impl: str = "auto", memory_budget: int | None = None
    ) -> Self:
        """A head over an embedding's own table, as ``lm_head.weight = wte.weight`` ties dense ones.

        The tensors are the embedding's own Parameters: trained by both uses, counted once. A padding row is shared too:
        its class has the constant row's score. Under FSDP2 both make one unit, ``fully_shard([embedding, head])``.

        Args:
            embedding: a layer of this library.
            bias: whether each class has a number added to its score, the head's own.
            impl, memory_budget: as for the layer itself.

        Example::

            >>> embedding = tb.TTEmbedding(10_000, 64, rank=16, std=64**-0.5)
            >>> head = tb.Head.tied_to(embedding)
            >>> head.core_0 is embedding.core_0
            True
        """
        if not isinstance(embedding, StructuredTable):
            raise TypeError(
                f"tied_to takes a layer of tensorbed, got {type(embedding).__name__}; for a torch.nn.Embedding use "
                "tb.Embedding.from_pretrained first."
            )
        _check(impl, memory_budget, bias)
        head = cls.__new__(cls)
        options: Any = {"padding_idx": embedding.padding_idx, "std": embedding.std}
        head._set_up(embedding.structure, "meta", embedding._dtype, **options)
        head.share(embedding)
        head._finish(bias, impl, memory_budget)
        return head

    def _owner(self) -> StructuredTable:
        """The layer whose table this is: of those that hold its tensors the first, tables before heads."""
        return min(tied_layers(self), key=lambda layer: isinstance(layer, Head), default=self)

    def _default_std(self) -> float:
        """A table that is tied is born as its embedding's."""
        owner = self._owner()
        return scoring_std(self.in_features) if owner is self else owner._deviation()

    @property
    def is_tied(self) -> bool:
        """Whether the table is another layer's, an embedding's mostly."""
        return self._owner() is not self

    def packed(self) -> Self:
        """The head that is stored when training is over; a tied one is tied anew to its packed embedding."""
        if self.is_tied:
            raise ValueError(
                "a tied head has its embedding's table: pack that and tie again, tb.Head.tied_to(embedding.packed())."
            )
        return super().packed()

    def forward(self, h: Tensor, target: Tensor | None = None, *, task: str = "", **options: Any) -> Any:
        """Score all classes: ``head(h)`` gives the logits.

        :meth:`loss` and the others come through here too, so that hooks see every use; those of FSDP gather parameters.

        Shape:
            - h: ``(*, in_features)``
            - output: ``(*, num_classes)``
        """
        vocabulary, budget = self.vocabulary(), self.memory_budget
        if task == "topk":
            return topk_of(vocabulary, h, memory_budget=budget, impl=self.impl, **options)
        if task == "sample":
            said = Options(softcap=options.pop("softcap"), memory_budget=budget)
            return sample_of(vocabulary, h, options=said, impl=self.impl, **options)
        if task == "loss" or (not task and target is not None):
            class_weight = options.pop("class_weight", None)
            if unknown := [name for name in options if name not in Options.__dataclass_fields__]:
                raise TypeError(f"unexpected {', '.join(unknown)}; see head.loss for what a loss takes.")
            said = Options(**{"memory_budget": budget, **options})
            return loss_of(vocabulary, h, target, class_weight, said, impl=self.impl)
        if task or options:
            names = ", ".join([*([f"task={task!r}"] if task else []), *options])
            raise TypeError(f"unexpected {names}: head(h) gives logits; for a loss use head.loss(h, target, ...).")
        return logits_of(vocabulary, h, budget, self.impl)

    def loss(
        self,
        h: Tensor,
        target: Tensor,
        *,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        class_weight: Tensor | None = None,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> Tensor:
        """``F.cross_entropy(head(h), target)`` without the logits; see :func:`tensorbed.linear_cross_entropy`.

        Args:
            ignore_index, label_smoothing, reduction: as in ``torch.nn.functional.cross_entropy``.
            class_weight: what that function calls ``weight``.
            z_loss: adds ``z_loss * logsumexp(logits)**2``, the mean over targets that count.
            softcap: logits become ``softcap * tanh(logits / softcap)``.

        Shape:
            - h: ``(*, in_features)``
            - target: ``(*)``, int32 or int64, each below ``num_classes`` or ``ignore_index``
            - class_weight: ``(num_classes,)``
            - output: ``()``, or ``(*)`` for ``reduction="none"``
        """
        loss: Tensor = self(
            h,
            target,
            task="loss",
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            class_weight=class_weight,
            z_loss=z_loss,
            softcap=softcap,
        )
        return loss

    def log_prob(self, h: Tensor, target: Tensor, *, softcap: float | None = None) -> Tensor:  # (*, in), (*) -> (*)
        """``log_softmax(head(h))`` at the targets, differentiable, without the logits: ``(*)`` for ``(*)`` targets."""
        loss: Tensor = self(h, target, task="loss", reduction="none", ignore_index=None, softcap=softcap)
        return -loss

    def topk(self, h: Tensor, k: int) -> TopK:  # (*, in_features) -> (*, k), (*, k)
        """The largest scores and their classes, ``(values, indices)``, the largest first; without gradients.

        Shape:
            - h: ``(*, in_features)``
            - values, indices: ``(*, k)``
        """
        found: TopK = self(h, task="topk", k=k)
        return found

    def sample(
        self,
        h: Tensor,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        *,
        softcap: float | None = None,
    ) -> Tensor:  # (*, in_features) -> (*)
        """A class for each vector, drawn with the probability that ``softmax(head(h) / temperature)`` gives it.

        Args:
            temperature: 0 takes the largest score.
            top_k: draw among so many largest scores only.
            generator: of the random numbers; by default torch's own.
            softcap: scores become ``softcap * tanh(scores / softcap)`` first.

        Shape:
            - h: ``(*, in_features)``
            - output: ``(*)``, int64
        """
        drawn: Tensor = self(
            h, task="sample", temperature=temperature, top_k=top_k, generator=generator, softcap=softcap
        )
        return drawn

    def explain(self, vectors: int | Tensor, *, training: bool = False, reduction: str = "mean") -> ScoresExplanation:
        """What :meth:`loss` would do in ``training``, or scores and :meth:`topk` else, for so many vectors.

        It is counted and not done: ``print(head.explain(1))``.
        """
        asked = replace(self.vocabulary(), impl=self.impl)
        found = explain(asked, vectors, self.memory_budget, training=training, reduction=reduction)
        return replace(found, path="reference, all logits at once") if self.impl == "reference" else found

    def vocabulary(self, bias: Tensor | None = None) -> Vocabulary:
        """The table as what hidden vectors are scored against, with this head's bias or another."""
        return super().vocabulary(self.bias if bias is None else bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the table anew, and set a bias to zero."""
        super().reset_parameters()
        if isinstance(getattr(self, "bias", None), Tensor):
            self.bias.zero_()  # type: ignore[union-attr]

    @property
    def compression_ratio(self) -> float:
        """Bytes of the dense layer, real classes only, over the bytes stored here; a bias counts on both sides."""
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return (self._dense_bytes + bias) / (self._stored_bytes + bias)

    @property
    def out_features(self) -> int:
        """``num_classes``, by the name ``torch.nn.Linear`` has for it."""
        return self.num_classes

    def _sizes_shown(self) -> str:
        bias = "" if self.bias is None else ", bias=True"
        return f"{self.in_features}, {self.num_classes}{bias}{', tied' if self.is_tied else ''}"


def _check(impl: str, memory_budget: int | None, bias: bool = False) -> None:
    check_budget(memory_budget)
    check_score_impl(impl)
    require_bool(bias, "bias")


def scoring_std(dim: int) -> float:
    """The deviation at birth of a table that scores: of vectors with entries of size 1 it makes scores of size 1."""
    return float(dim**-0.5)


class EmbeddingAndHead(NamedTuple):
    """Both ends of a model: ``embedding, head = tb.embedding_and_head(...)``."""

    embedding: Embedding
    head: Head

    @property
    def ratio(self) -> float:
        """As the paper counts: bytes of *one* dense table over those stored for both ends (a bias counts in both)."""
        bias = 0 if self.head.bias is None else self.head.bias.numel() * self.head.bias.element_size()
        stored = self.embedding._stored_bytes + (0 if self.head.is_tied else self.head._stored_bytes)
        return (self.embedding._dense_bytes + bias) / (stored + bias)


@options_shown
def embedding_and_head(
    num_embeddings: int,
    embedding_dim: int,
    format: Format,
    *,
    tied: bool = False,
    bias: bool = False,
    memory_budget: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Unpack[TableOptions],
) -> EmbeddingAndHead:
    """An embedding and a head of one shape: two tables as in the paper, or one that both share.

    Args:
        num_embeddings: how many words there are, rows of the table.
        embedding_dim: how many numbers a word has, columns of the table.
        format: of both.
        tied: whether the head computes with the embedding's table, see :meth:`Head.tied_to`.
        bias, memory_budget: of the head.
        options: of the embedding, ``padding_idx`` for instance; ``std``, if given, holds for both, and one table for
            both is drawn with ``1 / sqrt(embedding_dim)`` if not. ``impl`` and ``scale_grad_by_freq`` are as in
            :class:`Embedding`.

    Example::

        >>> embedding, head = tb.embedding_and_head(10_000, 64, tb.TensorTrain(rank=16), tied=True)
        >>> words = torch.randint(0, 10_000, (2, 5))
        >>> head.loss(embedding(words), words).shape
        torch.Size([])
    """
    if require_bool(tied, "tied") and options.get("std") is None:
        options["std"] = scoring_std(require_positive(embedding_dim, "embedding_dim"))
    embedding = Embedding(num_embeddings, embedding_dim, format, device=device, dtype=dtype, **options)
    if tied:
        return EmbeddingAndHead(embedding, Head.tied_to(embedding, bias, memory_budget=memory_budget))
    sizes, std = (embedding_dim, num_embeddings), options.get("std")
    head = Head(*sizes, format, bias, std=std, memory_budget=memory_budget, device=device, dtype=dtype)
    return EmbeddingAndHead(embedding, head)
