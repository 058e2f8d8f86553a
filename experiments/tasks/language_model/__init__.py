"""Words of Wikipedia by a Transformer-XL, with both ends compressed."""
