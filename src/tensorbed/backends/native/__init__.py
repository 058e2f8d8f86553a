"""The compiled kernels, or why there are none.

``available`` says whether ``module`` is there; where it is not, ``reason`` is one line that says why. Where it is,
``from tensorbed import _native`` gives the same module with its types.

Two variables of the environment, read once, are for those who work on the kernels: ``TENSORBED_NATIVE=0`` leaves them
out, ``TENSORBED_NATIVE_PATH`` names a build to take instead of the installed one, as a file or the folder it is in.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

# Before the kernels: torch brings the OpenMP that they then share, and with it one pool of threads.
import torch

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}  # as the kernels number them
MOST = 2**31 - 1  # indices of a batch, digits of a factor

NAME = "tensorbed._native"
NOT_BUILT = "not built when tensorbed was installed"


def _load_file(path: Path) -> ModuleType:
    """The extension that ``path`` names, itself or the folder that holds it."""
    if path.is_dir():
        files = [file for suffix in EXTENSION_SUFFIXES if (file := path / f"_native{suffix}").is_file()]
        if not files:
            raise ImportError(f"no _native{EXTENSION_SUFFIXES[0]} in that folder")
        path = files[0]
    elif not path.is_file():
        raise ImportError("no such file or folder")
    spec = spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python extension, whose name ends in {' or '.join(EXTENSION_SUFFIXES)}")
    extension = module_from_spec(spec)
    spec.loader.exec_module(extension)
    sys.modules[NAME] = extension
    return extension


def load() -> tuple[ModuleType | None, str]:
    """The module of the kernels and an empty string, or None and the reason, in one line."""
    if os.environ.get("TENSORBED_NATIVE") == "0":
        return None, "left out by TENSORBED_NATIVE=0"
    path = os.environ.get("TENSORBED_NATIVE_PATH", "")
    try:
        return (_load_file(Path(path)) if path else importlib.import_module(NAME)), ""
    except ModuleNotFoundError as error:
        # Something that the extension itself imports may be missing as well; that is another reason.
        why = NOT_BUILT if error.name == NAME else str(error)
    except (ImportError, OSError) as error:
        why = str(error)
    # The loader's messages have more than one line at times.
    why = " ".join(why.split())
    return None, f"TENSORBED_NATIVE_PATH={path}: {why}" if path else why


module, reason = load()
available = module is not None
