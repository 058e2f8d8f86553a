"""Rows in PyTorch alone: unique rows, shared prefixes, batched products."""
