import torch

# Workers of pytest-xdist share the cores; more threads than cores only slow the small products here.
torch.set_num_threads(1)
