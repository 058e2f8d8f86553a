"""Sentiment of sentences (SST-5) and reviews (IMDB), with a bidirectional LSTM."""
