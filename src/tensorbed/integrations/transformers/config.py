"""What ``config.json`` keeps of a compressed model, and checksums of its tables, in the header of each file."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from tensorbed.checks import frames_in_packages
from tensorbed.compress.finding import Formats
from tensorbed.compress.replacing import compress_
from tensorbed.files.description import VERSION, checked, tables
from tensorbed.files.header import Checksums
from tensorbed.nn.table import StructuredTable
from tensorbed.printable import short_messages

METHOD = "tensorbed"
# What config.json has: transformers prints it where it knows no such method, and then it says what is missing.
METHOD_IN_FILES = "tensorbed (import tensorbed.integrations.transformers before loading)"
METHODS = (METHOD, METHOD_IN_FILES)
GGUF = "gguf"  # how a file was read; the model is dense


@register_quantization_config(METHOD_IN_FILES)
@register_quantization_config(METHOD)
class TensorbedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How to compress a model while it is loaded, or what the layers of a compressed one are.

    Args:
        format: as for :func:`tensorbed.compress_`; so are all other options that have no line here.
        layers: of a compressed model, by name: class, structure and options, and whose tensors it shares. From a file.
        untied: what its class would tie and is not. From a file.
        version: of the description. From a file.

    Example::

        >>> from tensorbed.integrations.transformers import TensorbedConfig
        >>> from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> LlamaForCausalLM(LlamaConfig(vocab_size=3000, **sizes)).save_pretrained("dense")
        >>> config = TensorbedConfig(tb.QuantizedRows(bits=8))
        >>> model = AutoModelForCausalLM.from_pretrained("dense", quantization_config=config)
        >>> model.lm_head.structure.kind
        'quantized_rows'
    """

    @short_messages()  # it may come from a file that somebody has edited
    def __init__(
        self,
        format: Formats | None = None,
        *,
        layers: Mapping[str, Any] | None = None,
        untied: Sequence[str] = (),
        version: int = VERSION,
        **options: Any,
    ) -> None:
        options.pop("quant_method", None)
        if unknown := [name for name in options if name not in signature(compress_).parameters]:
            raise TypeError(f"TensorbedConfig: unexpected {', '.join(unknown)}; it takes what tb.compress_ takes.")
        if not isinstance(untied, Sequence) or isinstance(untied, str) or not all(isinstance(n, str) for n in untied):
            raise ValueError(f"quantization_config: untied must be a list of names, got {untied!r}.")
        if format is None and layers is None:
            raise ValueError("TensorbedConfig wants a format, for instance TensorbedConfig(tb.QuantizedRows(bits=8)).")
        self.quant_method = METHOD
        self.version = version
        self.format = format
        self.options = options
        self.layers = None if layers is None else checked(version, layers, "quantization_config")
        self.untied = tuple(untied)

    def to_dict(self) -> dict[str, Any]:
        """For JSON. A format is not kept: what came of it is, layer by layer."""
        described = {"version": self.version, "layers": self.layers, "untied": list(self.untied)}
        return {"quant_method": METHOD_IN_FILES, **described}

    def text(self) -> str:
        """The same for a config that was made and for one that was read, whatever the method was called in files."""
        return json.dumps({**self.to_dict(), "quant_method": METHOD}, sort_keys=True)


def header_entry(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, str]:
    """The checksums of our layers' tensors in a state that is about to be saved, for the header of every file."""
    # By all names that they have, in other modules too: save_pretrained keeps one of them. Without those that are
    # spread over processes: what is written of them is put together later.
    names = {f"{name}.{key}" for name, layer in tables(model).items() for key in layer.state_dict()}
    plain = {name: tensor for name, tensor in state.items() if type(tensor) is Tensor and tensor.numel()}
    there = {name: tensor for name, tensor in plain.items() if not tensor.is_meta}
    places = {tensor.data_ptr() for name, tensor in there.items() if name in names}
    tensors = {name: tensor for name, tensor in there.items() if tensor.data_ptr() in places}
    # The rest is left on disk; of what is tied, the one that is tied to has the numbers there.
    on_disk = names & plain.keys() - there.keys() - model.all_tied_weights_keys.keys()
    tensors |= {name: load_offloaded_parameter(model, name) for name in sorted(on_disk)}
    # save_pretrained may write them under the names of older versions of the model, or under its own.
    tensors |= revert_weight_conversion(model, tensors)
    return Checksums.of(model.config.quantization_config.text(), tensors).entry()


def check_files(
    config: TensorbedConfig, files: Iterable[str | Path], layers: Mapping[str, StructuredTable] = MappingProxyType({})
) -> None:
    """Refuse files that are damaged or of another model; a note where something has no checksum, or cannot be found.

    ``layers`` have the names that they have in the files.
    """
    # Numbers of another kind than a layer has would be cast to it in silence.
    tensors = {f"{name}.{key}": tensor for name, one in layers.items() for key, tensor in one.state_dict().items()}
    is_float = {name: tensor.is_floating_point() for name, tensor in tensors.items()}
    text, unchecked = config.text(), []
    written: dict[str, str | Path] = {}  # checksums, and which file has them
    compared = set()
    for path in files:
        if not str(path).endswith(".safetensors"):
            unchecked.append(path)
            continue
        with safe_open(path, "pt") as file, torch.device("cpu"):  # a model is made on the meta device
            checksums, stored = Checksums.read(file.metadata() or {}, path), set(file.keys())
            for name in config.layers or {}:
                if f"{name}.weight" in stored and 0 not in file.get_slice(f"{name}.weight").get_shape():
                    why = "but config.json, which is another model's, describes a compressed layer"
                    raise ValueError(f"{path} has the dense {name}.weight, {why}; remove its quantization_config.")
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
