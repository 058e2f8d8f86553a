"""The calls users and layers make: checked, flattened, and sent the way that fits where they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tensorbed.checks import require_int, require_number
from tensorbed.dispatch import World, is_autocast, working_dtype, world_of
from tensorbed.functional import check_params
from tensorbed.structures import Params, Structure
from tensorbed.vocabulary import graph_operators, logits, reference, sampling
from tensorbed.vocabulary.checks import (
    check_budget,
    check_class_weight,
    check_hidden,
    check_ignore_index,
    check_per_class,
    check_softcap,
    check_target_shape,
    check_targets,
    check_terms,
    check_together,
    checked_targets,
)
from tensorbed.vocabulary.loss import Asked, Options, cross_entropy
from tensorbed.vocabulary.sampling import TopK
from tensorbed.vocabulary.scorer import Vocabulary

IMPLS = ("auto", "reference")
_TILES, _GRAPH, _PLAIN = "tiles", "graph", "plain"


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Structure | torch.nn.Module,
    target: Tensor,
    *,
    params: Params | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """``cross_entropy(input @ table.T + bias, target)`` with neither the table nor the logits ever made.

    With the keywords of ``torch.nn.functional.linear_cross_entropy``, and some more.

    Args:
        linear_weight: a layer of this library, or a structure with its tensors in ``params``.
        linear_bias: added to the logits; by default the layer's own.
        weight: of each class, as in ``torch.nn.functional.cross_entropy``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: targets that do not count.
        label_smoothing: the share of the target that is spread over all classes.
        z_loss: adds ``z_loss * logsumexp(logits)**2``, the mean over targets that count.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        memory_budget: bytes for intermediate numbers; by default a third of what the logits would take, at most
            1 GiB.
        impl: ``"auto"``, or ``"reference"``, which makes all logits.

    Shape:
        - input: ``(*, cols)``
        - target: ``(*)``, int32 or int64
        - linear_bias, weight: ``(rows,)``
        - output: ``()``, or ``(*)`` for ``reduction="none"``

    Example::

        >>> loss = tb.linear_cross_entropy(hidden, embedding, target)  # a tied table
    """
    vocabulary = vocabulary_of(linear_weight, params, linear_bias)
    options = Options(ignore_index, label_smoothing, reduction, z_loss, softcap, memory_budget)
    return loss_of(vocabulary, input, target, weight, options, impl=impl, weight_name="weight")


def vocabulary_of(table: Structure | torch.nn.Module, params: Params | None, bias: Tensor | None) -> Vocabulary:
    """What is scored against, from any of the forms it may be given in."""
    if isinstance(table, Structure):
        if not isinstance(params, Mapping):
            names = ", ".join(spec.name for spec in table.tensors())
            raise TypeError(f"a {table.kind} structure holds no numbers: give params= with {names} (layer.params()).")
        check_params(table, params)
        return Vocabulary(table, tuple(params[spec.name] for spec in table.tensors()), bias)
    if params is not None:
        raise TypeError(f"params= goes with a structure; {type(table).__name__} has its own tensors.")
    vocabulary_with = getattr(table, "vocabulary", None)
    if not callable(vocabulary_with):
        raise TypeError(f"expected a layer of tensorbed or a structure with params=, got {type(table).__name__}.")
    vocabulary: Vocabulary = vocabulary_with(bias)
    return vocabulary


def loss_of(
    vocabulary: Vocabulary,
    h: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    options: Options,
    *,
    impl: str = "auto",
    weight_name: str = "class_weight",
) -> Tensor:
    """The loss for vectors and targets of any shape."""
    structure = vocabulary.structure
    _check(vocabulary, h, options.memory_budget)
    check_target_shape(target, h)
    check_terms(options.reduction, options.label_smoothing, options.z_loss, options.softcap)
    check_ignore_index(options.ignore_index)
    check_class_weight(class_weight, structure.rows, weight_name)
    check_impl(impl)
    asked = Asked(vocabulary, h.reshape(-1, structure.cols), target.reshape(-1).long(), class_weight, options)
    loss = _by_any_means(asked, impl).to(_shown_dtype(h))
    return loss.reshape(target.shape) if options.reduction == "none" else loss


def _check(vocabulary: Vocabulary, h: Tensor, memory_budget: int | None) -> None:
    """What all calls refuse."""
    check_hidden(h, vocabulary.structure.cols)
    check_per_class(vocabulary.bias, vocabulary.structure.rows, "bias")
    check_together(h, vocabulary.floats)
    check_budget(memory_budget)


def check_impl(impl: str) -> None:
    """A way of computing scores, or an error that lists them."""
    if impl not in IMPLS:
        raise ValueError(f'impl={impl!r}: choose one of "auto", "reference".')


def _by_any_means(asked: Asked, impl: str) -> Tensor:
    path = _path(asked.structure, asked.x, impl)
    if path == _GRAPH:
        return graph_operators.traced_cross_entropy(asked)
    asked = _with_checked_targets(asked)
    return cross_entropy(asked) if path == _TILES else reference.cross_entropy(asked)


def _path(structure: Structure, h: Tensor, impl: str = "auto") -> str:
    """Tile by tile; in a graph by operators; by all logits in plain PyTorch where neither can go."""
    world = world_of(h)
    if impl == "reference":
        return _PLAIN
    if world is World.EAGER:
        return _TILES
    return _GRAPH if world is World.COMPILED and graph_operators.can_trace(structure) else _PLAIN


def _with_checked_targets(asked: Asked) -> Asked:
    """Checked where there are values, or by an operator when a graph runs."""
    told, world = (asked.target, asked.structure.rows, asked.options.ignore_index), world_of(asked.x)
    if world is World.COMPILED:
        return replace(asked, target=checked_targets(*told))
    if world is World.EAGER and world_of(asked.target) is World.EAGER:
        check_targets(*told)
    return asked


def _shown_dtype(h: Tensor) -> torch.dtype:
    """Of a loss: that of the vectors, as in torch; under autocast single precision, as in torch."""
    return working_dtype(h) if is_autocast(h) else h.dtype


def logits_of(vocabulary: Vocabulary, h: Tensor, memory_budget: int | None, impl: str = "auto") -> Tensor:
    """``h @ table.T + bias``: ``(*, cols) -> (*, rows)``."""
    structure = vocabulary.structure
    _check(vocabulary, h, memory_budget)
    check_impl(impl)
    if is_autocast(h) and torch.float64 not in (h.dtype, *(t.dtype for t in vocabulary.tensors)):
        h = h.to(torch.get_autocast_dtype(h.device.type))
    path = _path(structure, h, impl)
    if path == _PLAIN:
        return reference.logits(vocabulary, h)
    compute = graph_operators.traced_logits if path == _GRAPH else logits.logits
    return compute(vocabulary, h.reshape(-1, structure.cols), memory_budget).reshape(*h.shape[:-1], structure.rows)


def topk_of(vocabulary: Vocabulary, h: Tensor, k: int, memory_budget: int | None) -> TopK:
    """The ``k`` largest scores: ``(*, cols) -> (*, k)`` twice."""
    structure = vocabulary.structure
    _check(vocabulary, h, memory_budget)
    if not 1 <= require_int(k, "k") <= structure.rows:
        raise ValueError(f"k={k}: there are {structure.rows} classes to choose from (1 to {structure.rows}).")
    path = _path(structure, h)
    if path == _PLAIN:
        return TopK(*torch.topk(reference.logits(vocabulary, h).detach(), k))
    compute = graph_operators.traced_topk if path == _GRAPH else sampling.topk
    values, indices = compute(vocabulary, h.reshape(-1, structure.cols), k, memory_budget)
    return TopK(values.reshape(*h.shape[:-1], k), indices.reshape(*h.shape[:-1], k))


def sample_of(vocabulary: Vocabulary, h: Tensor, memory_budget: int | None, **options: Any) -> Tensor:
    """One class for each vector: ``(*, cols) -> (*)``."""
    structure = vocabulary.structure
    _check(vocabulary, h, memory_budget)
    require_number(options["temperature"], "temperature", low=0, inclusive=True)
    check_softcap(options["softcap"])
    top_k = options["top_k"]
    if top_k is not None and not 1 <= require_int(top_k, "top_k") <= structure.rows:
        raise ValueError(f"top_k={top_k}: there are {structure.rows} classes to choose from (1 to {structure.rows}).")
    if _path(structure, h) != _TILES:
        softcap = options.pop("softcap")
        scores = reference.scores(vocabulary.detached(), h.detach())
        return sampling.drawn(scores if softcap is None else softcap * torch.tanh(scores / softcap), **options)
    drawn = sampling.sample(vocabulary, h.reshape(-1, structure.cols), memory_budget=memory_budget, **options)
    return drawn.reshape(h.shape[:-1])
