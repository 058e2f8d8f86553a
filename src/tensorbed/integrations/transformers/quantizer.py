"""The quantisation method ``tensorbed`` of transformers: our layers put into a model before its file is read."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from tensorbed.checks import naming
from tensorbed.compress.replacing import compress_
from tensorbed.files.description import described, descriptions, put, rebuilt, tables, ties
from tensorbed.integrations.transformers import tying
from tensorbed.integrations.transformers.cards import save_pretrained
from tensorbed.integrations.transformers.config import GGUF, METHOD, METHODS, TensorbedConfig, check_files, header_entry
from tensorbed.nn.head import Head
from tensorbed.nn.lazy import LazyTable
from tensorbed.nn.table import StructuredTable
from tensorbed.nn.ties import shared_names
from tensorbed.printable import short_messages

_HINT = "[compressed: import tensorbed.integrations.transformers before loading]"
# Models draw the weights of all their layers anew before a file is read, unless marked; ours are never drawn that way.
LazyTable._is_hf_initialized = True  # type: ignore[attr-defined]
# What a model with our layers does otherwise than its class says.
_METHODS: dict[str, Callable[..., Any]] = {
    "tie_weights": tying.tie_weights,
    "save_pretrained": save_pretrained,
    **{name: partial(tying.resized_layer, name) for name in ("_get_resized_embeddings", "_get_resized_lm_head")},
}


@register_quantizer(METHOD)
class TensorbedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts the layers of a compressed model in place, or compresses a dense one once it is loaded."""

    quantization_config: TensorbedConfig
    _sources: Mapping[str, str] = MappingProxyType({})  # by layer, whose tensors it shares

    is_trainable = is_qat_trainable = is_compileable = True

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` may write the model."""
        return True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if not self.pre_quantized:
            return
        config = self.quantization_config
        with short_messages():
            places = {name: place for name in config.layers or {} if (place := _place(model, name)) is not None}
            layers, self._sources = _built(model, config, places)
            put(model, layers)
            tying.rewrite(model, self._sources)
            _expect(model, self._sources)
            in_files = {name: layers[place] for name, place in places.items()}
            check_files(config, kwargs.get("checkpoint_files") or (), in_files)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if not self.pre_quantized:
            assert self.quantization_config.format is not None
            compress_(model, self.quantization_config.format, **self.quantization_config.options)
            return
        for name, layer in tables(model).items():
            _check_loaded(name, layer, owns=name not in self._sources)
        _alias_on_disk(model, self._sources)
        tying.share_tensors(model, self._sources)
        adopt(model)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """The state, with an empty ``weight`` for each table.

        Where the method is not registered transformers goes on with a warning and random tables: shapes that do not
        match make that an error. In its report of what was wrong one more name, which no model has, tells what to do.
        """
        if not tables(model):
            self.remove_quantization_config(model)
            return None, {}
        adopt(model)  # again: layers may have been replaced since
        model.tie_weights()  # others may have set tensors of one layer alone
        state: dict[str, Tensor] = model.state_dict()
        found = tables(model)
        owners = [name for name in found if name not in ties(found)]
        for name in owners:
            state[f"{name}.weight"] = torch.empty(0, dtype=found[name]._dtype, device="cpu")
        state[f"{owners[0]}.{_HINT}"] = torch.empty(0, device="cpu")
        return state, header_entry(model, state)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Dense layers of the model's own classes, holding the tables as they are."""
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # of a config that was saved
        config = type(model.config).from_dict({**model.config.to_dict(), "quantization_config": None})
        with torch.device("meta"):
            dense = type(model)(config)
        broken, own = tying.untied(model), model.dtype
        put(model, {n: _filled(dense.get_submodule(n), layer, dtype) for n, layer in tables(model).items()})
        tying.restore(model, broken)
        for part in model.modules():
            for name in _METHODS:
                part.__dict__.pop(name, None)
        model.tie_weights()
        return model if dtype in (None, own) else model.to(dtype)


def check_layers(model: PreTrainedModel, layers: Iterable[StructuredTable]) -> None:
    """Refuse layers that a config cannot describe, and models that another method has quantised."""
    config = getattr(model.config, "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", METHOD)
    if method not in (*METHODS, GGUF):
        raise ValueError(
            f"this {type(model).__name__} is quantised by {getattr(method, 'value', method)}; transformers knows one "
            "method for a model. Compress the model before that, or dequantize it first."
        )
    for layer in layers:
        described(layer)


def adopt(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that has layers of ours one that transformers saves, loads, ties and resizes.

    :func:`tensorbed.compress_` does it; call it yourself after putting layers into a model by hand.

    Args:
        model: of transformers, changed in place and returned.

    Example::

        >>> from tensorbed.integrations.transformers import adopt
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = BertModel(BertConfig(vocab_size=3000, **sizes))
        >>> model.set_input_embeddings(tb.TTEmbedding(3000, 32, rank=8, padding_idx=0))
        >>> adopt(model).save_pretrained("small")
        >>> BertModel.from_pretrained("small").get_input_embeddings().structure.kind
        'tensor_train'
    """
    if not tables(model):
        raise ValueError(f"this {type(model).__name__} has no layer of tensorbed.")
    tying.separate(model)
    tying.share_tensors(model, ties(tables(model)))
    tying.rewrite(model, ties(tables(model)))
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            for name, method in _METHODS.items():
                # Not a closure: models are pickled and copied.
                object.__setattr__(part, name, partial(method, part))
    if not isinstance(getattr(model, "hf_quantizer", None), TensorbedQuantizer):
        _own_config(model)
    for part in reversed(list(model.modules())):
        if isinstance(part, PreTrainedModel) and tables(part):  # any of them may be saved by itself
            _describe(part)
    model.quantization_method = METHOD
    model.is_quantized = False  # else transformers refuses .half() and its Trainer
    return model


def _own_config(model: PreTrainedModel) -> None:
    """A config of its own for the model and its parts: another dense model may have been made with this one."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for part in model.modules():
        if id(part.__dict__.get("config")) in copies:
            part.config = copies[id(part.config)]


def _describe(model: PreTrainedModel) -> None:
    """What the config says of the layers, which a resize may have changed."""
    config = TensorbedConfig(layers=descriptions(tables(model)), untied=sorted(tying.untied(model)))
    model.config.quantization_config = config
    model.hf_quantizer = TensorbedQuantizer(config, pre_quantized=True)


def _built(
    model: PreTrainedModel, config: TensorbedConfig, places: Mapping[str, str]
) -> tuple[dict[str, StructuredTable], dict[str, str]]:
    """The layers a config describes, empty, under the names they have in this model, and whose tensors they share."""
    layers: dict[str, StructuredTable] = {}
    described = {name: (config.layers or {})[name] for name in places}
    for name, place in places.items():
        with naming(f"quantization_config, layer {name!r}"):
            layer = rebuilt(described[name])
        shape = tuple(getattr(getattr(model.get_submodule(place), "weight", None), "shape", ()))
        if shape != (layer.structure.rows, layer.structure.cols):
            raise ValueError(
                f"quantization_config, layer {place!r}: {layer.structure.rows} x {layer.structure.cols}, where the "
                f"model has {shape}; config.json was edited, or is another model's."
            )
        layers[place] = layer.to(dtype=torch.get_default_dtype())
    broken = {_place(model, name) for name in config.untied}
    weights = {a: b for a, b in model.all_tied_weights_keys.items() if a.endswith(".weight")}
    tied = {a.removesuffix(".weight"): b.removesuffix(".weight") for a, b in weights.items()}
    tied = {name: source for name, source in tied.items() if name not in broken}
    # The file may be that of a model without the head that this one has, tied to a table of ours.
    new = {name: model.get_submodule(name) for name, source in tied.items() if source in layers and name not in layers}
    heads = {name: dense for name, dense in new.items() if type(dense) is nn.Linear}
    layers |= {name: Head.tied_to(layers[tied[name]], dense.bias is not None) for name, dense in heads.items()}
    own = {name: one["tied_to"] for name, one in described.items() if one["tied_to"] in places}
    tied |= {places[name]: places[source] for name, source in own.items()}
    return layers, {name: source for name, source in tied.items() if {name, source} <= layers.keys()}


def _place(model: PreTrainedModel, name: str) -> str | None:
    """A layer's name in this model: base and task classes differ by a prefix."""
    prefix = f"{model.base_model_prefix}."
    for one in (name, prefix + name, name.removeprefix(prefix)):
        with suppress(AttributeError):
            model.get_submodule(one)
            return one
    return None


def _expect(model: PreTrainedModel, sources: Mapping[str, str]) -> None:
    """Tell the loader what the file need not have, and what it may have besides."""
    # It marks tied names as parameters; buffers are tied after loading.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    named = model.all_tied_weights_keys
    model.all_tied_weights_keys = {name: source for name, source in named.items() if name in parameters}
    found = tables(model)
    tied = {f"^{re.escape(f'{name}.{own}')}$" for name in sources for own in shared_names(found[name])}
    model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *tied}
    guards = {rf"(^|\.){re.escape(f'{name}.{guard}')}$" for name in found for guard in ("weight", _HINT)}
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *guards}


def _alias_on_disk(model: PreTrainedModel, sources: Mapping[str, str]) -> None:
    """Buffers left on disk are found there under the name of the one that is tied to."""
    found = tables(model)
    for name, source in sources.items():
        weights = getattr(getattr(found[name], "_hf_hook", None), "weights_map", None)
        index = getattr(getattr(weights, "dataset", None), "index", None) or {}
        for own in shared_names(found[name]):
            if f"{source}.{own}" in index:
                index.setdefault(f"{name}.{own}", index[f"{source}.{own}"])


def _check_loaded(name: str, layer: StructuredTable, owns: bool) -> None:
    """Compare shapes and draw what was missing: while a quantiser is at work nobody else does."""
    shapes = {spec.name: spec.shape for spec in layer.structure.tensors()}
    shapes |= {"padding_row": (layer.structure.cols,), "bias": (layer.structure.rows,)}
    for key, tensor in layer.state_dict().items():
        if tuple(tensor.shape) != shapes[key]:
            raise ValueError(f"{name}.{key} has shape {tuple(tensor.shape)} in the file, not {shapes[key]}.")
    if isinstance(layer, Head) and layer.bias is not None and _is_missing(layer.bias):
        layer.bias.data.zero_()
    if not owns:
        return
    own = shared_names(layer)
    missing = [key for key in own if _is_missing(getattr(layer, key))]
    if missing and (len(missing) < len(own) or not layer.structure.can_initialise):
        raise ValueError(f"the file lacks {', '.join(f'{name}.{one}' for one in missing)}; it is damaged.")
    if missing:
        layer.reset_parameters()
    elif not any(tensor.is_meta for tensor in layer.params().values()):
        with naming(name):
            layer.structure.check_values(layer.params())


def _is_missing(tensor: Tensor) -> bool:
    """In the file; what is on the meta device was left on disk."""
    return not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False)


def _filled(dense: nn.Module, layer: StructuredTable, dtype: torch.dtype | None) -> nn.Module:
    table = layer._table().detach().to(dtype or layer._dtype)
    trained = any(p.requires_grad for p in layer.parameters())
    dense.weight = nn.Parameter(table, requires_grad=trained)
    if isinstance(layer, Head) and layer.bias is not None:
        dense.bias = layer.bias
    for name, buffer in dense.named_buffers():  # embed_scale of scaled embeddings
        setattr(dense, name, torch.as_tensor(getattr(layer, name)).to(device=table.device, dtype=buffer.dtype))
    return dense.train(layer.training)
