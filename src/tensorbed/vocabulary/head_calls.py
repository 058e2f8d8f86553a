"""The calls users and layers make: checked, flattened, and sent the way that fits where they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorbed.backends.triton import serving
from tensorbed.checks import require_int, require_integer_indices, require_number
from tensorbed.dispatch import World, is_autocast, working_dtype, world_of
from tensorbed.functional import check_params, check_score_impl
from tensorbed.structures import Params, Structure
from tensorbed.vocabulary import graph_operators, reference, sampling
from tensorbed.vocabulary.loss import Asked, Options, check_budget, computed
from tensorbed.vocabulary.sampling import TopK
from tensorbed.vocabulary.scorer import Vocabulary


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
        input: the hidden vectors.
        target: the classes that they should have.
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
        impl: ``"auto"``, ``"reference"``, which makes all logits, or ``"triton"``, the kernels for GPUs.

    Shape:
        - input: ``(*, cols)``
        - target: ``(*)``, int32 or int64
        - linear_bias, weight: ``(rows,)``
        - output: ``()``, or ``(*)`` for ``reduction="none"``

    Example::

        >>> embedding = tb.TTEmbedding(10_000, 64, rank=16)  # its table scores, too
        >>> hidden, target = torch.randn(8, 64), torch.randint(0, 10_000, (8,))
        >>> loss = tb.linear_cross_entropy(hidden, embedding, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ embedding.weight.T, target))
        True
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
    target: Any,
    class_weight: Tensor | None,
    options: Options,
    *,
    impl: str,
    weight_name: str = "class_weight",
) -> Tensor:
    """The loss for vectors and targets of any shape."""
    check_vectors(vocabulary, h)
    check_target_shape(target, h)
    check_per_class(class_weight, vocabulary.structure.rows, weight_name)
    if class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{weight_name} requires a gradient, which the loss does not have for it; give {weight_name}.detach()."
        )
    # Products of float16 stay single, so that nothing has to be rounded to it.
    halves = is_autocast(h) and torch.get_autocast_dtype(h.device.type) == torch.bfloat16
    x = (_as_autocast_asks(vocabulary, h) if halves else h).reshape(-1, vocabulary.structure.cols)
    loss = _computed(Asked(vocabulary, x, target.reshape(-1).long(), class_weight, options), impl)
    # Of the dtype of the vectors, as in torch; under autocast single precision, as in torch.
    loss = loss.to(working_dtype(h) if is_autocast(h) else h.dtype)
    return loss.reshape(target.shape) if options.reduction == "none" else loss


def check_hidden(h: Tensor, cols: int) -> None:
    """Vectors of as many numbers as the table has columns."""
    if not isinstance(h, Tensor):
        raise TypeError(f"the hidden vectors must be a tensor, got {type(h).__name__}.")
    if not h.is_floating_point():
        raise TypeError(f"the hidden vectors must be floating-point numbers, got {str(h.dtype)[6:]}.")
    if h.dim() == 0 or h.shape[-1] != cols:
        raise ValueError(f"the hidden vectors have shape {tuple(h.shape)}; their last size must be {cols}.")


def check_target_shape(target: Tensor, h: Tensor) -> None:
    """A class number for each vector."""
    if isinstance(target, Tensor) and target.is_floating_point():
        raise TypeError(
            f"target must be class numbers, int32 or int64, got {str(target.dtype)[6:]}: probabilities of all classes "
            "would be as large as the logits; use torch.nn.functional.cross_entropy(head(h), target) for those."
        )
    require_integer_indices(target, "target")
    if target.device != h.device:
        raise ValueError(f"target is on {target.device} and the hidden vectors are on {h.device}; move one.")
    if target.shape != h.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}; hidden vectors of shape {tuple(h.shape)} need one class each, "
            f"shape {tuple(h.shape[:-1])}."
        )


def check_per_class(weight: Tensor | None, classes: int, name: str) -> None:
    """A number for each class."""
    if weight is None:
        return
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        found = str(weight.dtype)[6:] if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"{name} must be a tensor of floating-point numbers, got {found}.")
    if weight.shape != (classes,):
        raise ValueError(f"{name} has shape {tuple(weight.shape)}; one for each of {classes} classes is needed.")


def check_vectors(vocabulary: Vocabulary, h: Tensor) -> None:
    """As a product of matrices asks: sizes that fit, one device and, unless autocast is on, one dtype."""
    check_hidden(h, vocabulary.structure.cols)
    check_per_class(vocabulary.bias, vocabulary.structure.rows, "bias")
    for tensor in vocabulary.floats:
        if tensor.device != h.device:
            raise ValueError(f"the hidden vectors are on {h.device} and the table is on {tensor.device}; move one.")
        if tensor.is_floating_point() and tensor.dtype != h.dtype and not is_autocast(h):
            raise ValueError(
                f"the hidden vectors are {str(h.dtype)[6:]} and the table is {str(tensor.dtype)[6:]}; convert one with "
                ".to(...), or compute under torch.autocast."
            )


def _computed(asked: Asked, impl: str) -> Tensor:
    """Tile by tile; by operators in a graph; else by all logits in plain PyTorch."""
    asked = replace(asked, vocabulary=_asking(asked.vocabulary, asked.x, impl))
    world, structure, target = world_of(asked.x), asked.structure, asked.target
    if world is World.COMPILED and impl != "reference" and graph_operators.can_trace(structure):
        return graph_operators.traced(asked)
    if target is not None:
        target = graph_operators.checked_targets(target, structure.rows, asked.options.ignore_index, world, impl)
        asked = replace(asked, target=target)
    return computed(asked) if world is World.EAGER and impl != "reference" else reference.computed(asked)


def _asking(vocabulary: Vocabulary, x: Tensor, impl: str) -> Vocabulary:
    """The same, to be scored by the backend asked for, if that is one of kernels."""
    check_score_impl(impl)
    if impl != serving.NAME:
        return vocabulary
    if not x.is_meta:
        serving.require(x)
    return replace(vocabulary, impl=impl)


def logits_of(vocabulary: Vocabulary, h: Tensor, memory_budget: int | None, impl: str) -> Tensor:
    """``h @ table.T + bias``: ``(*, cols) -> (*, rows)``."""
    check_vectors(vocabulary, h)
    h = _as_autocast_asks(vocabulary, h)
    x, options = h.reshape(-1, vocabulary.structure.cols), Options(memory_budget=memory_budget)
    made = _computed(Asked(vocabulary, x, None, None, options), impl)
    return made.reshape(*h.shape[:-1], vocabulary.structure.rows)


def _as_autocast_asks(vocabulary: Vocabulary, h: Tensor) -> Tensor:
    """Vectors in autocast's dtype, as those that a linear layer multiplies; double precision stays."""
    if not is_autocast(h) or torch.float64 in (h.dtype, *(t.dtype for t in vocabulary.tensors)):
        return h
    return h.to(torch.get_autocast_dtype(h.device.type))


def topk_of(vocabulary: Vocabulary, h: Tensor, k: int, memory_budget: int | None, impl: str) -> TopK:
    """The ``k`` largest scores: ``(*, cols) -> (*, k)`` twice."""
    structure = vocabulary.structure
    check_vectors(vocabulary, h)
    vocabulary = _asking(vocabulary, h, impl)
    check_budget(memory_budget)
    _check_choice(k, "k", structure.rows)
    world = world_of(h)
    if world is World.EAGER:
        compute: Any = sampling.topk
    elif world is World.COMPILED and graph_operators.can_trace(structure):
        compute = graph_operators.traced_topk
    else:
        return TopK(*torch.topk(reference.scores(vocabulary, h).to(h.dtype).detach(), k))
    values, indices = compute(vocabulary, h.reshape(-1, structure.cols), k, memory_budget)
    return TopK(values.reshape(*h.shape[:-1], k), indices.reshape(*h.shape[:-1], k))


def sample_of(
    vocabulary: Vocabulary,
    h: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    options: Options,
    impl: str,
) -> Tensor:
    """One class for each vector, drawn with the probability that its score has: ``(*, cols) -> (*)``."""
    structure, softcap, budget = vocabulary.structure, options.softcap, options.memory_budget
    check_vectors(vocabulary, h)
    require_number(temperature, "temperature", low=0, inclusive=True)
    if top_k is not None:
        _check_choice(top_k, "top_k", structure.rows)
    if top_k is None and temperature > 0 and world_of(h) is World.EAGER:
        # The largest of scores with noise is such a draw, so that no sum over all rows is needed.
        noisy = partial(sampling.with_noise, temperature=temperature, generator=generator)
        asking = _asking(vocabulary, h, impl)
        best = sampling.topk(asking, h.reshape(-1, structure.cols), 1, budget, softcap, noisy)
        return best.indices.reshape(h.shape[:-1])
    values, indices = topk_of(vocabulary, h, 1 if temperature == 0 else top_k or structure.rows, budget, impl)
    return sampling.drawn(reference.capped(values.to(working_dtype(values)), softcap), indices, temperature, generator)


def _check_choice(k: int, name: str, classes: int) -> None:
    if not 1 <= require_int(k, name) <= classes:
        raise ValueError(f"{name}={k}: there are {classes} classes to choose from (1 to {classes}).")
