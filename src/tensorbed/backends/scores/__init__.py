"""Scores of all rows against vectors, without the table: how each format computes them."""
