"""Four small language models of Python's own sources, alike but for the tables at both ends: ``python -m demo``."""
