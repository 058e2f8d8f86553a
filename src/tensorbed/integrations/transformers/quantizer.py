"""The quantisation method ``tensorbed`` of transformers: our layers put into a model before its file is read."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from tensorbed.convert import compress_
from tensorbed.integrations.transformers import checksums, resizing
from tensorbed.integrations.transformers.cards import save_pretrained
from tensorbed.integrations.transformers.config import GGUF, METHOD, METHOD_IN_FILES, TensorbedConfig
from tensorbed.integrations.transformers.ties import (
    override,
    remove_overrides,
    restore,
    rewrite,
    separate,
    share_tensors,
    sources_of,
    tables,
    tie_weights,
    untied,
)
from tensorbed.nn.described import described, put, rebuilt
from tensorbed.nn.head import Head
from tensorbed.nn.lazy import LazyTable
from tensorbed.nn.table import StructuredTable, shared_names
from tensorbed.printable import short_messages

_HINT = "[compressed: import tensorbed.integrations.transformers before loading]"
_OVERRIDES = {"tie_weights": tie_weights, "save_pretrained": save_pretrained}
# Models draw the weights of all their layers anew before a file is read, unless marked; ours are never drawn that way.
LazyTable._is_hf_initialized = True  # type: ignore[attr-defined]


@register_quantizer(METHOD)
class TensorbedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts the layers of a compressed model in place, or compresses a dense one once it is loaded."""

    quantization_config: TensorbedConfig
    _sources: Mapping[str, str] = MappingProxyType({})  # by layer, whose tensors it shares

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if not self.pre_quantized:
            return
        config, files = self.quantization_config, kwargs.get("checkpoint_files") or ()
        with short_messages():
            layers, self._sources = _built(model, config)
            put(model, layers)
            rewrite(model, self._sources)
            _expect(model, self._sources)
            checksums.check_files(config, files, _check_files(model, config, files))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if not self.pre_quantized:
            assert self.quantization_config.format is not None
            compress_(model, self.quantization_config.format, **self.quantization_config.options)
            return
        for name, layer in tables(model).items():
            _check_shapes(name, layer)
            _draw_bias(layer)
            if name not in self._sources:
                _check_loaded(name, layer)
        _alias_on_disk(model, self._sources)
        _adopt(model, self._sources)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """The state, with an empty ``weight`` for each table.

        Where the method is not registered transformers goes on with a warning and random tables: shapes that do not
        match make that an error. In its report of what was wrong one more name, which no model has, tells what to do.
        """
        if not tables(model):
            self.remove_quantization_config(model)
            return None, {}
        separate(model)  # again: layers may have been replaced since
        rewrite(model, sources_of(tables(model)))
        _describe(model)
        model.tie_weights()  # others may have set tensors of one layer alone
        state: dict[str, Tensor] = model.state_dict()
        found = tables(model)
        owners = [name for name in found if name not in sources_of(found)]
        for name in owners:
            state[f"{name}.weight"] = torch.empty(0, dtype=found[name]._dtype, device="cpu")
        state[f"{owners[0]}.{_HINT}"] = torch.empty(0, device="cpu")
        return state, checksums.header_entry(model, state)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Dense layers of the model's own classes, holding the tables as they are."""
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # of a config that was saved
        dense, broken, own = _stock(model), untied(model), model.dtype
        made: dict[str, nn.Module] = {}
        for name, layer in tables(model).items():
            made[name] = _filled(dense.get_submodule(name), layer, dtype)
        put(model, made)
        restore(model, broken)
        remove_overrides(model, (*_OVERRIDES, *resizing.METHODS))
        model.tie_weights()
        return model if dtype in (None, own) else model.to(dtype)


def check_layers(model: PreTrainedModel, layers: Iterable[StructuredTable]) -> None:
    """Refuse layers that a config cannot describe, and models that another method has quantised."""
    config = getattr(model.config, "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", METHOD)
    if method not in (METHOD, METHOD_IN_FILES, GGUF):
        raise ValueError(
            f"this {type(model).__name__} is quantised by {getattr(method, 'value', method)}; transformers knows one "
            "method for a model. Compress the model before that, or dequantize it first."
        )
    for layer in layers:
        described(layer)


def adopt(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that has layers of ours one that transformers saves, loads, ties and resizes.

    :func:`tensorbed.compress_` does it; call it yourself after putting layers into a model by hand.
    """
    if not tables(model):
        raise ValueError(f"this {type(model).__name__} has no layer of tensorbed.")
    separate(model)
    _adopt(model, sources_of(tables(model)))
    return model


def _adopt(model: PreTrainedModel, sources: Mapping[str, str]) -> None:
    share_tensors(model, sources)
    rewrite(model, sources)
    override(model, _OVERRIDES)
    resizing.install(model)
    if not isinstance(getattr(model, "hf_quantizer", None), TensorbedQuantizer):
        _own_config(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and tables(part):  # any of them may be saved by itself
            _describe(part)
    _describe(model)
    model.quantization_method = METHOD
    model.is_quantized = False  # else transformers refuses .half() and its Trainer


def _own_config(model: PreTrainedModel) -> None:
    """A config of its own for the model and its parts: another dense model may have been made with this one."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for part in model.modules():
        if id(part.__dict__.get("config")) in copies:
            part.config = copies[id(part.config)]


def _describe(model: PreTrainedModel) -> None:
    """What the config says of the layers, which a resize may have changed."""
    found = tables(model)
    sources = sources_of(found)
    layers = {name: {**described(layer), "tied_to": sources.get(name)} for name, layer in found.items()}
    config = TensorbedConfig(layers=layers, untied=sorted(untied(model)))
    model.config.quantization_config = config
    model.hf_quantizer = TensorbedQuantizer(config, pre_quantized=True)


def _built(model: PreTrainedModel, config: TensorbedConfig) -> tuple[dict[str, StructuredTable], dict[str, str]]:
    """The layers a config describes, empty, under the names they have in this model, and whose tensors they share."""
    layers = {}
    for name, description in (config.layers or {}).items():
        place = _place(model, name)
        if place is None:
            continue
        try:
            layer = rebuilt({key: value for key, value in description.items() if key != "tied_to"})
        except (ValueError, AttributeError) as error:
            raise ValueError(f"quantization_config, layer {name!r}: {error}") from None
        _check_place(model, place, layer)
        layers[place] = layer.to(dtype=torch.get_default_dtype())
    layers.update(_more_heads(model, config, layers))
    return layers, _tied(model, config, set(layers))


def _check_place(model: PreTrainedModel, name: str, layer: StructuredTable) -> None:
    shape = tuple(getattr(getattr(model.get_submodule(name), "weight", None), "shape", ()))
    if shape != (layer.structure.rows, layer.structure.cols):
        raise ValueError(
            f"quantization_config, layer {name!r}: {layer.structure.rows} x {layer.structure.cols}, where the model "
            f"has {shape}; config.json was edited, or is another model's."
        )


def _more_heads(
    model: PreTrainedModel, config: TensorbedConfig, layers: Mapping[str, StructuredTable]
) -> dict[str, StructuredTable]:
    """Where the file is that of a model without the head that this one has, tied to a table of ours."""
    made: dict[str, StructuredTable] = {}
    for name, source in _stock_ties(model, config).items():
        dense = model.get_submodule(name)
        if source in layers and name not in layers and type(dense) is nn.Linear:
            bias = dense.bias is not None
            table = layers[source]
            options = {"std": table.std, "impl": "auto", "memory_budget": None, "bias": bias}
            options |= {} if table.padding_idx is None else {"padding_idx": table.padding_idx}
            made[name] = rebuilt({**described(table), "layer": "Head", "options": options})
    return made


def _stock_ties(model: PreTrainedModel, config: TensorbedConfig) -> dict[str, str]:
    """What transformers would tie, but for what was untied."""
    broken = {_place(model, name) for name in config.untied}
    pairs = {a: b for a, b in model.all_tied_weights_keys.items() if a.endswith(".weight")}
    named = {a.removesuffix(".weight"): b.removesuffix(".weight") for a, b in pairs.items()}
    return {name: source for name, source in named.items() if name not in broken}


def _tied(model: PreTrainedModel, config: TensorbedConfig, there: set[str]) -> dict[str, str]:
    """For each layer that shares another's tensors, whose."""
    pairs = {name: one.get("tied_to") for name, one in (config.layers or {}).items() if one.get("tied_to")}
    placed = {_place(model, name): _place(model, source) for name, source in pairs.items()}
    found = {a: b for a, b in placed.items() if a is not None and b is not None and {a, b} <= there}
    more = {a: b for a, b in _stock_ties(model, config).items() if {a, b} <= there}
    return {**more, **found}


def _place(model: PreTrainedModel, name: str) -> str | None:
    """A layer's name in this model: base and task classes differ by a prefix."""
    prefix = f"{model.base_model_prefix}."
    for one in (name, prefix + name, name.removeprefix(prefix)):
        try:
            model.get_submodule(one)
        except AttributeError:
            continue
        return one
    return None


def _expect(model: PreTrainedModel, sources: Mapping[str, str]) -> None:
    """Tell the loader what the file need not have, and what it may have besides."""
    # It marks tied names as parameters; buffers are tied after loading.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ties = model.all_tied_weights_keys
    model.all_tied_weights_keys = {name: source for name, source in ties.items() if name in parameters}
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


def _check_shapes(name: str, layer: StructuredTable) -> None:
    """While a quantiser is at work nobody else does."""
    shapes = {spec.name: spec.shape for spec in layer.structure.tensors()}
    shapes |= {"padding_row": (layer.structure.cols,), "bias": (layer.structure.rows,)}
    for key, tensor in layer.state_dict().items():
        if tuple(tensor.shape) != shapes[key]:
            raise ValueError(f"{name}.{key} has shape {tuple(tensor.shape)} in the file, not {shapes[key]}.")


def _draw_bias(layer: StructuredTable) -> None:
    """Zero, as transformers would have it, where the file has none."""
    bias = layer.bias if isinstance(layer, Head) else None
    if bias is not None and not bias.is_meta and not getattr(bias, "_is_hf_initialized", False):
        with torch.no_grad():
            bias.zero_()


def _check_loaded(name: str, layer: StructuredTable) -> None:
    """Nor does anybody draw what was missing."""
    own = {key: getattr(layer, key) for key in shared_names(layer)}
    # On the meta device: left on disk.
    missing = [k for k, t in own.items() if not t.is_meta and not getattr(t, "_is_hf_initialized", False)]
    if missing and (len(missing) < len(own) or not layer.structure.can_initialise):
        raise ValueError(f"the file lacks {', '.join(f'{name}.{one}' for one in missing)}; it is damaged.")
    if missing:
        layer.reset_parameters()
    elif not any(tensor.is_meta for tensor in layer.params().values()):
        try:
            layer.structure.check_values(layer.params())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _check_files(model: PreTrainedModel, config: TensorbedConfig, files: Iterable[str]) -> set[str]:
    """The names of our layers' tensors. Numbers of another kind than a layer has would be cast to it in silence."""
    kinds: dict[str, bool] = {}
    for name in config.layers or {}:
        place = _place(model, name)
        layer = model.get_submodule(place) if place is not None else None
        if isinstance(layer, StructuredTable):
            kinds |= {
                f"{name}.{spec.name}": spec.dtype is None or spec.dtype.is_floating_point
                for spec in layer.structure.tensors()
            }
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, "pt") as file:
            stored = set(file.keys())
            for name in config.layers or {}:
                if f"{name}.weight" in stored and 0 not in file.get_slice(f"{name}.weight").get_shape():
                    raise ValueError(
                        f"{path} has the dense {name}.weight, but config.json describes a compressed layer; it is the "
                        "config of another model: remove its quantization_config."
                    )
            for key in kinds.keys() & stored:
                dtype = file.get_slice(key).get_dtype()
                if dtype.startswith(("F", "BF")) != kinds[key]:
                    wanted = "floating-point numbers" if kinds[key] else "whole numbers"
                    raise ValueError(f"{key} is stored as {dtype} in {path}; its layer has {wanted}.")
    return set(kinds)


def _stock(model: PreTrainedModel) -> PreTrainedModel:
    """The model without numbers and without our layers."""
    config = type(model.config).from_dict({**model.config.to_dict(), "quantization_config": None})
    with torch.device("meta"):
        return type(model)(config)


def _filled(dense: nn.Module, layer: StructuredTable, dtype: torch.dtype | None) -> nn.Module:
    table = layer._table().detach().to(dtype or layer._dtype)
    trained = any(p.requires_grad for p in layer.parameters())
    dense.weight = nn.Parameter(table, requires_grad=trained)
    if isinstance(layer, Head) and layer.bias is not None:
        dense.bias = layer.bias
    for name, buffer in dense.named_buffers():  # embed_scale of scaled embeddings
        setattr(dense, name, torch.as_tensor(getattr(layer, name)).to(device=table.device, dtype=buffer.dtype))
    return dense.train(layer.training)
