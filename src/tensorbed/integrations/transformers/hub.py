"""Models of the Hugging Face Hub, by the name that they have there: fetched into its cache, or found in it."""

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from huggingface_hub import list_repo_files, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

from tensorbed.integrations.transformers.folders import LOADED, is_loaded, is_weights, left_of
from tensorbed.printable import shortened, some

# A name without an owner is more likely that of a folder, misspelt.
_OWNER_AND_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*", re.ASCII)
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # what huggingface_hub reads, once


def local_folder(given: Path) -> Path:
    """The folder that is given or, where there is none and the name could be one of the Hub, that model's folder.

    One that is whole in the cache is taken as it is, the newest; others are fetched.
    """
    name = given.as_posix()
    if given.exists() or left_of(given) is not None:
        return given
    if not _OWNER_AND_NAME.fullmatch(name):
        hint = "" if len(given.parts) > 1 else "; models of the Hugging Face Hub are named owner/name"
        raise FileNotFoundError(f"there is no file or folder {given}{hint}.")
    for first in ("config.json", "modules.json"):
        cached = try_to_load_from_cache(name, first)
        folder = Path(cached).parent if isinstance(cached, str) else None
        if folder is not None and any(is_loaded(file.relative_to(folder)) for file in folder.rglob("*")):
            return folder
    with _explained(name):
        files = list_repo_files(name)
    left, weights = unread(files), [file for file in files if is_weights(PurePath(file))]
    read = [file for file in weights if file not in left]
    # Before gigabytes are fetched: of many GGUF files each is the whole model.
    several = sorted(file for file in weights if file.endswith(".gguf"))
    if several and (len([file for file in read if file.endswith(".gguf")]) > 1 or not read):
        raise ValueError(
            f"{name} has the model in GGUF files, {some(several)}: choose one, fetch it with "
            f"hf download {name} {several[0]} --local-dir FOLDER, and give that folder."
        )
    if not read:
        there = f"it has {some(weights)}" if weights else "it has none at all"
        raise ValueError(f"{name} has no weights that transformers reads, {', '.join(LOADED)}; {there}.")
    with _explained(name):
        return Path(snapshot_download(name, ignore_patterns=[glob.escape(file) for file in left]))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Whatever keeps a model from being fetched, in one sentence."""
    not_cached = "the cache of the Hub has no such model, and it cannot be fetched:"
    try:
        yield
        return
    except GatedRepoError:
        access = "ask for access on its page of the Hub, then log in with hf auth login"
        why = f"and the model of that name is gated: {access}."
    except RepositoryNotFoundError:
        why = "and the Hub shows no model of that name; for a private one log in first, with hf auth login."
    except OfflineModeIsEnabled:
        variable = next((name for name in _OFFLINE if os.environ.get(name)), _OFFLINE[0])
        why = f"{not_cached} the environment variable {variable} says to stay offline; unset it, or give a folder."
    except Exception as error:  # there are as many reasons as networks
        why = f"{not_cached} {shortened(' '.join(str(error).split()), 200)}"
    raise FileNotFoundError(f"there is no folder {name}, {why}")


def unread(files: list[str]) -> list[str]:
    """Weights that nothing here reads: at the top all but one kind, in folders GGUF and those of other frameworks."""
    weights = [file for file in files if is_weights(PurePath(file)) and not file.endswith(".index.json")]
    loaded = [file for file in weights if is_loaded(PurePath(file))]
    top = [file for file in loaded if len(PurePath(file).parts) == 1]
    kept = next((kind for kind in LOADED if any(file.endswith(kind) for file in top)), LOADED[0])
    read = {file for file in loaded if file.endswith(kept if file in top else LOADED[:-1])}
    return [file for file in weights if file not in read]
