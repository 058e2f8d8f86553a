"""Four small language models of Python's own sources, alike but for their embedding table: ``python -m demo``."""
