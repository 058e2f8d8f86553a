"""Compressed models of transformers: saved with ``save_pretrained``, loaded with ``from_pretrained``.

Importing this module registers the quantisation method ``tensorbed``; :func:`tensorbed.compress_` imports it when
it is given such a model::

    import tensorbed as tb
    tb.compress_(model, tb.HotRows())
    model.save_pretrained("small")

    import tensorbed.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained("small")

or compressed while loading, ``from_pretrained(folder, quantization_config=TensorbedConfig(tb.QuantizedRows(bits=8)))``.
"""

from tensorbed.integrations.transformers.config import TensorbedConfig
from tensorbed.integrations.transformers.logits import loss_without_logits
from tensorbed.integrations.transformers.quantizer import TensorbedQuantizer, adopt, check_layers

__all__ = ["TensorbedConfig", "TensorbedQuantizer", "adopt", "check_layers", "loss_without_logits"]
