"""What ``config.json`` keeps of a compressed model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from tensorbed.compress.finding import Formats
from tensorbed.compress.replacing import compress_
from tensorbed.files.description import VERSION, checked
from tensorbed.printable import short_messages

METHOD = "tensorbed"
# What config.json has: transformers prints it where it knows no such method, and then it says what is missing.
METHOD_IN_FILES = "tensorbed (import tensorbed.integrations.transformers before loading)"
GGUF = "gguf"  # how a file was read; the model is dense


@register_quantization_config(METHOD_IN_FILES)
@register_quantization_config(METHOD)
class TensorbedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How to compress a model while it is loaded, or what the layers of a compressed one are.

    Args:
        format: as for :func:`tensorbed.compress_`; so are all other options that have no line here.
        layers: of a compressed model, by name: class, structure and options, and whose tensors it shares. From a file.
        untied: what its class would tie and is not. From a file.
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

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()
