"""One folder a task; ``EXPERIMENT_TASKS`` names further places, for tasks that lie elsewhere."""

import os

_PLACES = [os.path.abspath(place) for place in os.environ.get("EXPERIMENT_TASKS", "").split(os.pathsep) if place]
os.environ["EXPERIMENT_TASKS"] = os.pathsep.join(_PLACES)  # whole, for the runs of a sweep, which start elsewhere
__path__ += _PLACES
