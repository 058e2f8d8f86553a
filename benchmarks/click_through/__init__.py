"""Training steps of a click-through model with tables of up to 10^9 rows, side by side with others."""
