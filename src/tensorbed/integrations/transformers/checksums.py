"""Checksums in the folders of compressed models: in the header of each file, where transformers asks for metadata."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.accelerate import load_offloaded_parameter

from tensorbed.checks import frames_in_packages
from tensorbed.files.description import tables
from tensorbed.files.header import Checksums
from tensorbed.integrations.transformers.config import METHOD, TensorbedConfig
from tensorbed.nn.table import StructuredTable


def header_entry(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, str]:
    """The checksums of our layers' tensors in a state that is about to be saved, for the header of every file."""
    tensors = _tensors_of_layers(model, state)
    # save_pretrained may write them under the names of older versions of the model, or under its own.
    tensors |= revert_weight_conversion(model, tensors)
    return Checksums.of(_text(model.config.quantization_config), tensors).entry()


def _tensors_of_layers(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By all names that they have, in other modules too: save_pretrained keeps one of them.

    Without those that are spread over processes: what is written of them is put together later.
    """
    names = {f"{name}.{key}" for name, layer in tables(model).items() for key in layer.state_dict()}
    plain = {name: tensor for name, tensor in state.items() if type(tensor) is Tensor and tensor.numel()}
    there = {name: tensor for name, tensor in plain.items() if not tensor.is_meta}
    places = {tensor.data_ptr() for name, tensor in there.items() if name in names}
    tensors = {name: tensor for name, tensor in there.items() if tensor.data_ptr() in places}
    # The rest is left on disk; of what is tied, the one that is tied to has the numbers there.
    on_disk = names & plain.keys() - there.keys() - model.all_tied_weights_keys.keys()
    return tensors | {name: load_offloaded_parameter(model, name) for name in sorted(on_disk)}


def check_files(
    config: TensorbedConfig,
    files: Iterable[str | os.PathLike[str]],
    layers: Mapping[str, StructuredTable] = MappingProxyType({}),
) -> None:
    """Refuse files that are damaged or of another model; a note where something has no checksum, or cannot be found.

    Args:
        layers: by the names that they have in the files.
    """
    # Numbers of another kind than a layer has would be cast to it in silence.
    is_float = {
        f"{name}.{spec.name}": spec.dtype is None or spec.dtype.is_floating_point
        for name, layer in layers.items()
        for spec in layer.structure.tensors()
    }
    text, unchecked = _text(config), []
    written: dict[str, str | os.PathLike[str]] = {}  # checksums, and which file has them
    compared = set()
    for path in files:
        if not str(path).endswith(".safetensors"):
            unchecked.append(path)
            continue
        with safe_open(path, "pt") as file, torch.device("cpu"):  # a model is made on the meta device
            checksums, stored = Checksums.read(file.metadata() or {}, path), set(file.keys())
            for name in config.layers or {}:
                if f"{name}.weight" in stored and 0 not in file.get_slice(f"{name}.weight").get_shape():
                    raise ValueError(
                        f"{path} has the dense {name}.weight, but config.json describes a compressed layer; it is the "
                        "config of another model: remove its quantization_config."
                    )
            for key in is_float.keys() & stored:
                dtype = file.get_slice(key).get_dtype()
                if dtype.startswith(("F", "BF")) != is_float[key]:
                    wanted = "floating-point numbers" if is_float[key] else "whole numbers"
                    raise ValueError(f"{key} is stored as {dtype} in {path}; its layer has {wanted}.")
            if checksums is None or stored & is_float.keys() - checksums.tensors.keys():
                unchecked.append(path)
            if checksums is not None:
                checksums.check_description(text, f"config.json, beside {path},")
                for name in sorted(stored & checksums.tensors.keys()):
                    checksums.check_tensor(name, file.get_tensor(name), path)
                    compared.add(checksums.tensors[name])
                written |= dict.fromkeys(checksums.tensors.values(), path)
    # A tensor has a checksum by each of its names and is stored by one, unless somebody has renamed it.
    unchecked += [written[checksum] for checksum in written.keys() - compared]
    if unchecked:
        warnings.warn(
            f"{unchecked[0]} has no checksums of its compressed tables, or not of all, so that damage to them cannot "
            "be seen; model.save_pretrained(folder) writes them.",
            stacklevel=frames_in_packages("tensorbed", "transformers"),
        )


def _text(config: TensorbedConfig) -> str:
    """The same for a config that was made and for one that was read, whatever the method was called in files."""
    return json.dumps({**config.to_dict(), "quant_method": METHOD}, sort_keys=True)
