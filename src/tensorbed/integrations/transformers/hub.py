"""Models of the Hugging Face Hub, by the name that they have there: fetched into its cache, or found in it."""

from __future__ import annotations

import glob
import re
from pathlib import Path, PurePath

from huggingface_hub import list_repo_files, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from tensorbed.integrations.transformers.folders import LOADED, WEIGHTS, left_of
from tensorbed.printable import shortened

# A name without an owner is more likely that of a folder, misspelt.
_OWNER_AND_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*", re.ASCII)
_FIRST_FILES = ("config.json", "modules.json")


def local_folder(given: Path) -> Path:
    """The folder that is given or, where there is none and the name could be one of the Hub, that model's folder.

    One that is whole in the cache is taken as it is; others are fetched.
    """
    name = given.as_posix()
    if given.exists() or left_of(given) is not None or not _OWNER_AND_NAME.fullmatch(name):
        return given
    cached = _in_cache(name)
    return _fetched(name) if cached is None else cached


def _fetched(name: str) -> Path:
    neither = f"there is no folder {name}, and"
    try:
        files = list_repo_files(name)
        return Path(snapshot_download(name, ignore_patterns=[glob.escape(file) for file in unread(files)]))
    except GatedRepoError:
        raise FileNotFoundError(
            f"{neither} the model of that name is gated: ask for access on its page of the Hub, then log in with "
            "hf auth login."
        ) from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"{neither} the Hub shows no model of that name; for a private one log in first, with hf auth login."
        ) from None
    except Exception as error:  # there are as many reasons as networks
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"{neither} the cache of the Hub has no such model, and it cannot be fetched: {shortened(reason, 200)}"
        ) from None


def unread(files: list[str]) -> list[str]:
    """Weights that nothing here reads: at the top all but one kind, in folders those of other frameworks."""
    top = [file for file in files if len(PurePath(file).parts) == 1]
    kept = next((kind for kind in LOADED if any(file.endswith(kind) for file in top)), LOADED[0])
    weights = [file for file in files if file.endswith(WEIGHTS) and not file.endswith(".index.json")]
    return [file for file in weights if not file.endswith(kept if file in top else LOADED)]


def _in_cache(name: str) -> Path | None:
    """The newest that is there with its weights."""
    for file in _FIRST_FILES:
        path = try_to_load_from_cache(name, file)
        folder = Path(path).parent if isinstance(path, str) else None
        if folder is not None and any(file.name.endswith(LOADED) for file in folder.rglob("*")):
            return folder
    return None
