"""What ``config.json`` keeps of a compressed model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from tensorbed.finding import Formats

METHOD = "tensorbed"
GGUF = "gguf"  # how a file was read; the model is dense
VERSION = 1


def _check_layers(layers: Any, untied: Any) -> None:
    """A config may come from a file that somebody has edited."""
    if layers is not None:
        sound = isinstance(layers, Mapping) and layers and all(isinstance(one, Mapping) for one in layers.values())
        ties = [one.get("tied_to") for one in layers.values()] if sound else []
        if not sound or not all(isinstance(to, (str, NoneType)) for to in ties):
            raise ValueError(
                "quantization_config: layers must be descriptions of layers by name, as tensorbed wrote them."
            )
        if wrong := [to for to in ties if to is not None and layers.get(to, {}).get("tied_to", "") is not None]:
            raise ValueError(f"quantization_config: a layer is tied to {wrong[0]!r}, which has no tensors of its own.")
    if isinstance(untied, str) or not isinstance(untied, Sequence) or not all(isinstance(one, str) for one in untied):
        raise ValueError(f"quantization_config: untied must be a list of names, got {untied!r}.")


@register_quantization_config(METHOD)
class TensorbedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How to compress a model while it is loaded, or what the layers of a compressed one are.

    Args:
        format: as for :func:`tensorbed.compress_`, and so are the options after it.
        layers: of a compressed model, by name: class, structure and options, and whose tensors it shares. From a file.
        untied: what its class would tie and is not. From a file.
    """

    def __init__(
        self,
        format: Formats | None = None,
        *,
        min_rows: int = 2000,
        skip: Sequence[str] = (),
        tied: str = "keep",
        fit: bool = True,
        include_heads: bool = True,
        calibrate: Callable[[Any], object] | None = None,
        layers: Mapping[str, Any] | None = None,
        untied: Sequence[str] = (),
        version: int = VERSION,
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)
        if unknown:
            raise TypeError(f"TensorbedConfig: unexpected {', '.join(unknown)}; it takes what tb.compress_ takes.")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ValueError(f"the model has version {version!r} of the format, this tensorbed reads up to {VERSION}.")
        _check_layers(layers, untied)
        if format is None and layers is None:
            raise ValueError("TensorbedConfig wants a format, for instance TensorbedConfig(tb.QuantizedRows(bits=8)).")
        self.quant_method = METHOD
        self.version = version
        self.format = format
        self.options: dict[str, Any] = {
            "min_rows": min_rows,
            "skip": tuple(skip),
            "tied": tied,
            "fit": fit,
            "include_heads": include_heads,
            "calibrate": calibrate,
        }
        self.layers = None if layers is None else dict(layers)
        self.untied = tuple(untied)

    def to_dict(self) -> dict[str, Any]:
        """For JSON. A format is not kept: what came of it is, layer by layer."""
        return {"quant_method": METHOD, "version": self.version, "layers": self.layers, "untied": list(self.untied)}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def get_loading_attributes(self) -> dict[str, Any]:
        return {}
