"""How the standard deviation of a table at birth, rate and weight decay change what a first training run reaches."""
