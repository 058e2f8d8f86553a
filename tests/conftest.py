import hypothesis
import torch

# Workers of pytest-xdist share the cores; more threads than cores only slow the small products here.
torch.set_num_threads(1)

# No test may depend on the time of day or on luck: no deadline, and the same examples every run.
hypothesis.settings.register_profile("tensorbed", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tensorbed")
