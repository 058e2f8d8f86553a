"""Lookups and heads side by side with other implementations: ``python -m benchmarks``."""
