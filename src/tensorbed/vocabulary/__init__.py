"""Scores of all rows of a table, a vocabulary, and what is made of them without keeping them: losses, choices."""
