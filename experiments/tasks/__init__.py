"""One folder a task; ``EXPERIMENT_TASKS`` names further places, for tasks that lie elsewhere."""

import os

__path__ += [place for place in os.environ.get("EXPERIMENT_TASKS", "").split(os.pathsep) if place]
