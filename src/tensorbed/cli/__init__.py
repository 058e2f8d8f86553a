"""The command ``tensorbed``."""
