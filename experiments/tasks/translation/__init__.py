"""English to German by a Transformer, with the one table of both languages and the softmax compressed."""
