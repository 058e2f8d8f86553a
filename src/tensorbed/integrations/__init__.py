"""Other libraries. Importing this enters their adapters; the libraries are imported where a model of theirs is met."""

from tensorbed.adapters import ADAPTERS, Adapter


def _transformers() -> Adapter:
    from tensorbed.integrations import transformers

    return transformers


ADAPTERS["transformers.modeling_utils"] = _transformers
