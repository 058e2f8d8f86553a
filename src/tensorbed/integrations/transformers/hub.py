"""Models of the Hugging Face Hub, by the name that they have there: fetched into its cache, or found in it."""

from __future__ import annotations

import glob
import re
from pathlib import Path, PurePath

from huggingface_hub import list_repo_files, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError

from tensorbed.integrations.transformers.folders import LOADED, WEIGHTS, left_of

# A name without an owner is more likely that of a folder, misspelt.
_OWNER_AND_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_FIRST_FILES = ("config.json", "modules.json")


def local_folder(given: Path) -> Path:
    """The folder that is given or, where there is none and the name could be one of the Hub, that model's folder."""
    name = given.as_posix()
    if given.exists() or left_of(given) is not None or not _OWNER_AND_NAME.fullmatch(name):
        return given
    try:
        files = list_repo_files(name)
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"there is no folder {name}, and the Hub shows no model of that name; for a private one log in first, with "
            "hf auth login."
        ) from None
    except Exception as error:  # there are as many reasons as networks
        return _in_cache(name, error)
    return Path(snapshot_download(name, ignore_patterns=[glob.escape(file) for file in unread(files)]))


def unread(files: list[str]) -> list[str]:
    """Weights that nothing here reads: at the top all but one kind, in folders those of other frameworks."""
    top = [file for file in files if len(PurePath(file).parts) == 1]
    kept = next((kind for kind in LOADED if any(file.endswith(kind) for file in top)), LOADED[0])
    weights = [file for file in files if file.endswith(WEIGHTS) and not file.endswith(".index.json")]
    return [file for file in weights if not file.endswith(kept if file in top else LOADED)]


def _in_cache(name: str, error: Exception) -> Path:
    for file in _FIRST_FILES:
        path = try_to_load_from_cache(name, file)
        if isinstance(path, str):
            return Path(path).parent
    reason = " ".join(str(error).split())[:200]
    raise FileNotFoundError(
        f"there is no folder {name}, the cache of the Hub has no model of that name, and the Hub does not answer: "
        f"{reason}"
    ) from None
