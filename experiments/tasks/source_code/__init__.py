"""A language model over the sources of Python itself, with an LSTM between two tables."""
