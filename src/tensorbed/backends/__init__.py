"""How rows, bags and scores are computed: a folder for each backend, and what they have in common.

One for another device is a class of :class:`tensorbed.dispatch.Backend` that is entered here.
"""

from tensorbed.backends.native.chains import Native
from tensorbed.backends.reference import Reference
from tensorbed.backends.torch import Torch
from tensorbed.backends.triton.backend import Triton
from tensorbed.dispatch import BACKENDS

# The last is asked first.
BACKENDS.update({backend.name: backend for backend in (Reference(), Torch(), Triton(), Native())})
