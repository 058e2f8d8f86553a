"""Other libraries. Importing this enters their adapters; the libraries are imported where a model of theirs is met."""

from tensorbed.adapters import Adapter, register_adapter


def _transformers() -> Adapter:
    from tensorbed.integrations import transformers

    return transformers


register_adapter("transformers.modeling_utils", _transformers)
