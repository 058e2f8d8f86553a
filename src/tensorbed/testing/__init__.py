"""The conformance suite: give it samples of a structure and inherit the laws as tests.

For the author of a new structure, in a test module::

    from tensorbed import testing
    from tensorbed.testing import Sample


    class TestMine(
        testing.StructureLaws,
        testing.EmbeddingParity,
        testing.BagParity,
        testing.HeadLaws,
        testing.HeadLimits,
        testing.HeadTracing,
        testing.TracingLaws,
    ):
        samples = (Sample(MyFormat(rank=3), rows=97, cols=24), Sample(MyFormat(rank=1), rows=50, cols=13))

They are about what a structure can get wrong; what layers do over any, their states and options for instance, is tested
with the layers. Needs pytest. What a structure declares it cannot do (``can_initialise``, tensors that are not
``trainable``), or reads otherwise than it trains (``packed``), is left out, and nothing else.
"""

from tensorbed.testing.heads import HeadLaws, HeadLimits, HeadTracing
from tensorbed.testing.laws import StructureLaws
from tensorbed.testing.layers import BagParity, EmbeddingParity, TracingLaws
from tensorbed.testing.samples import Draw, Sample, assert_near, largest_allocation

__all__ = [
    "BagParity",
    "Draw",
    "EmbeddingParity",
    "HeadLaws",
    "HeadLimits",
    "HeadTracing",
    "Sample",
    "StructureLaws",
    "TracingLaws",
    "assert_near",
    "largest_allocation",
]
