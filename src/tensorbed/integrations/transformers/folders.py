"""Folders of models: what is in one, its model and tokenizer, and its other files."""

import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.utils import logging

from tensorbed.files.header import check_readable
from tensorbed.integrations.transformers.config import METHODS
from tensorbed.printable import some
from tensorbed.progress import track

# Weights, of any framework, and what indexes them.
WEIGHTS = (
    *(".safetensors", ".bin", ".h5", ".gguf", ".onnx", ".onnx_data", ".msgpack", ".pt", ".pth", ".ckpt", ".ot"),
    *(".tflite", ".pb", ".index.json"),
)
# transformers takes the first kind that it finds.
LOADED = (".safetensors", ".bin", ".gguf")
TOKEN = 4  # bytes that tell folders of one name apart while they are written
_LARGE = 100_000_000  # bytes; a vocabulary has less


def is_weights(file: PurePath) -> bool:
    """Of whatever framework; OpenVINO has the graph that belongs to its weights in a file beside them."""
    return file.name.endswith(WEIGHTS) or (file.name.startswith("openvino") and file.suffix == ".xml")


def is_loaded(file: PurePath) -> bool:
    """Weights of a kind that transformers reads, and neither OpenVINO's nor Mistral's own copy beside the shards."""
    others = file.name.startswith(("openvino", "consolidated")) or "openvino" in file.parts[:-1]
    return file.name.endswith(LOADED) and not others


@dataclass(frozen=True)
class Folder:
    """A folder of ``save_pretrained``, one of sentence-transformers, or one with a GGUF file."""

    root: Path  # as given
    inside: str  # where config.json is, below the root; empty but for some of sentence-transformers
    config: dict[str, Any]  # empty for a GGUF, which has its own
    gguf: str | None = None  # name of that file
    modules: tuple[str, ...] | None = None  # folders of sentence-transformers' other modules, by modules.json

    @property
    def place(self) -> Path:
        """Where the model itself is."""
        return self.root / self.inside

    def is_of_module(self, file: PurePath) -> bool:
        """Whether a file below the root is that of another module: the nearest folder of one has it."""
        above = [module for module in (self.inside, *(self.modules or ())) if file.is_relative_to(module)]
        return max(above, key=lambda module: len(PurePath(module).parts), default=self.inside) != self.inside

    def leads_to_module(self, place: PurePath) -> bool:
        """Whether a folder below the root is that of the model or of a module, or on the way to it."""
        return any(PurePath(module).is_relative_to(place) for module in (self.inside, *(self.modules or ())))

    @property
    def is_compressed(self) -> bool:
        quantization = self.config.get("quantization_config")
        return isinstance(quantization, dict) and quantization.get("quant_method") in METHODS

    @property
    def weight_bytes(self) -> int:
        """On disk, of the files that are read."""
        for suffix in LOADED:
            files = [file for file in self.place.glob(f"*{suffix}") if is_loaded(PurePath(file.name))]
            if sizes := [file.stat().st_size for file in files if file.is_file()]:
                return sum(sizes)
        return 0


def opened(path: str | os.PathLike[str]) -> Folder:
    """What a folder holds, from its small files."""
    root = Path(path)
    if root.is_file():
        raise NotADirectoryError(f"{root} is a file; give the folder that it is in, with its config.json.")
    if not root.is_dir():
        old = left_of(root)
        left = f" A command that was killed left the one that was there as {old}; rename it." if old else ""
        raise FileNotFoundError(f"there is no folder {root}.{left}")
    first, others = _modules(root)
    place = root / first
    ggufs = sorted(file.name for file in place.glob("*.gguf"))
    if ggufs and not any(place.glob("*.safetensors")) and not any(place.glob("*.bin")):
        if len(ggufs) > 1:
            raise ValueError(
                f"{place} has the model in GGUF files, {some(ggufs)}: choose one, and put it into a folder of its own."
            )
        refuse_adapter(place)  # for it transformers would load another model, wherever that is
        return Folder(root, first, {}, ggufs[0], others)
    if not (place / "config.json").is_file():
        raise FileNotFoundError(f"{place} is no folder of a transformers model: there is no config.json in it.")
    config = _json(place / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{place / 'config.json'} is not a config: it holds a {type(config).__name__}.")
    _check_weight_paths(place, config)
    return Folder(root, first, config, None, others)


def _modules(root: Path) -> tuple[str, tuple[str, ...] | None]:
    """Of sentence-transformers: the folder of the model and those of the modules after it."""
    file = root / "modules.json"
    if not file.is_file():
        return "", None
    try:
        named = [module["path"] for module in _json(file)]
    except (LookupError, TypeError):
        raise ValueError(f"{file} is not a list of modules with a path each.") from None
    paths = dict.fromkeys(path_below(root, path, file) for path in named)
    first, *others = paths or [""]
    return first, tuple(others)


def refuse_adapter(place: Path) -> None:
    """Where there is one transformers saves it alone, without the model."""
    if (place / "adapter_config.json").exists():
        raise ValueError(f"{place} has an adapter, adapter_config.json; merge it into its model, and give that folder.")


def _check_weight_paths(place: Path, config: dict[str, Any]) -> None:
    """transformers takes the names of files as they stand, in an index of shards and in a config."""
    file, others = place / "config.json", config.get("configuration_files")
    configs = {file: config}  # and those that it names for some versions of transformers to read in its place
    for name in others if isinstance(others, (list, dict)) else ():
        other = place / path_below(place, name, file)
        configs[other] = _json(other) if other.is_file() else {}
    indexes = set(place.glob("*.index.json"))
    for named_in, found in configs.items():
        if isinstance(found, dict) and (explicit := found.get("transformers_weights")) is not None:
            weights = place / path_below(place, explicit, named_in)
            indexes |= {weights} if weights.name.endswith(".index.json") else set()
    for index in indexes:
        try:
            shards = set(_json(index)["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # no index; if it is to be read, transformers will say so
        for shard in shards:
            path_below(place, shard, index)


def path_below(root: Path, path: object, named_in: Path) -> str:
    """A path that a file names, as ``a/b`` and empty for the root itself; refused where it is not below the root."""
    # On every system absolute paths, ".." and what Windows takes for either.
    windows = PureWindowsPath(path if isinstance(path, str) else "/")
    stays = not windows.anchor and ".." not in windows.parts and not {"\\", "\0"} & set(str(path))
    if not stays or leads_outside(root, root / str(path)):
        raise ValueError(
            f"{named_in} names {path!r}: paths in it stay below {root}, written a/b, without '..' and without links "
            "that lead out."
        )
    below = PurePosixPath(str(path)).as_posix()
    return "" if below == "." else below


def leads_outside(root: Path, path: Path) -> bool:
    """Whether links make a path under the root one of somewhere else."""
    home = root.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return True
    # The cache of Hugging Face has links in models--NAME/snapshots/COMMIT to files in models--NAME/blobs.
    caches = (folder.parent for folder in home.parents if folder.name == "snapshots")
    blobs = next((cache / "blobs" for cache in caches if cache.name.startswith("models--")), None)
    return not target.is_relative_to(home) and target.parent != blobs


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}.") from None


def load_model(folder: Folder, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, list[str]]:
    """The model, of the class that its config names and in the dtype of its file, and what the user should know."""
    options: dict[str, Any] = {"dtype": dtype or "auto", "local_files_only": True, "output_loading_info": True}
    notes = []
    architectures = folder.config.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    kind: Any = getattr(transformers, named, None) if named.isidentifier() else None
    if folder.gguf:
        if find_spec("gguf") is None:
            raise ValueError(f'{folder.gguf} is read by the package gguf: pip install "gguf>=0.17"')
        kind, options["gguf_file"] = AutoModelForCausalLM, folder.gguf
        notes.append(f"the weights of {folder.gguf} are quantised already; they are taken as they come out, unpacked.")
    elif not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        kind = AutoModel
        if named:
            notes.append(f"transformers has no class {named}; the model is loaded without the head it may have had.")
    if kind in (AutoModel, AutoModelForCausalLM):
        options["trust_remote_code"] = False  # else it may ask at the terminal
    with explained(folder), quiet():
        model, found = kind.from_pretrained(folder.place, **options)
    if missing := sorted(found["missing_keys"]):
        words = model.get_input_embeddings()
        names = [f"{name}.weight" for name, module in model.named_modules(remove_duplicate=False) if module is words]
        if names and set(names) <= set(missing):  # without its word table it is no model, whatever else was drawn
            lacking = f"{names[0]}, the table of the model"
            raise ValueError(f"the weights in {folder.root} have no {lacking}; they are damaged.")
        notes.append(f"tensors that are not in {folder.root} were drawn: {len(missing)}, the first is {missing[0]}.")
    return model.eval(), notes


def load_tokenizer(folder: Folder) -> Any:
    """The tokenizer that lies beside the model."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    options |= {"gguf_file": folder.gguf} if folder.gguf else {}
    with explained(folder, "tokenizer"), quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder.place, **options)
    # Without its files transformers goes on with a tokenizer that knows nothing.
    files = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not folder.gguf and tokenizer.vocab_files_names and not any((folder.place / one).is_file() for one in files):
        raise FileNotFoundError(f"{folder.place} has no tokenizer: none of {', '.join(sorted(files))} is in it.")
    return tokenizer


def token_limit(folder: Folder, tokenizer: Any, most: int) -> int:
    """Tokens of one text that the model can read, and no more than ``most``."""
    places = folder.config.get("max_position_embeddings") or folder.config.get("n_positions") or most
    return int(min(most, tokenizer.model_max_length, places))


@contextmanager
def explained(folder: Folder, what: str = "model") -> Iterator[None]:
    """Whatever transformers raises over a folder, as one line that names it."""
    try:
        yield
    except Exception as error:  # of as many kinds as there are ways to spoil a file
        said = " ".join(str(error).split()) or type(error).__name__
        for file in folder.place.glob("*.safetensors"):
            if isinstance(error, FileNotFoundError) and file.name in said and file.is_file():
                check_readable(file)
        own = " (it has code of its own, which is not run)" if "auto_map" in folder.config else ""
        raise ValueError(f"the {what} in {folder.root} cannot be loaded{own}: {said[:500]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own bars and warnings; unpacking GGUF, which takes seconds, has a bar of ours."""
    level, bars, bar = logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf.tqdm = lambda tensors, **_: track(tensors, "unpacking GGUF")
    try:
        yield
    finally:
        gguf.tqdm = bar
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def rest_of(folder: Folder) -> tuple[list[PurePath], list[str]]:
    """Files to copy besides the model's weights, below the root, and notes on what stays behind and why.

    All files of other modules; of the others those that are neither weights nor large nor in hidden folders. Links that
    lead out of the folder are refused, those of the model's own weights too: what they point to would be in the result.
    """
    files, notes = [], []
    for base, folders, names in os.walk(folder.root, onerror=_raise):
        inside = PurePath(os.path.relpath(base, folder.root))
        for link in (inside / name for name in folders if (Path(base) / name).is_symlink()):
            if folder.is_of_module(link) or folder.leads_to_module(link):
                raise ValueError(f"{link} is a link to a folder, and a module needs it; put the folder itself there.")
            notes.append(f"{link} was not copied: it is a link to a folder.")
        folders[:] = [name for name in folders if not _is_hidden(folder, inside / name)]
        for file in (inside / name for name in names):
            if is_weights(file) and not folder.is_of_module(file):
                continue
            if why := _why_left(folder, file):
                notes.append(f"{file} was not copied: it is {why}.")
            else:
                files.append(file)
    for suffix in (*LOADED, ".index.json"):
        for path in folder.place.glob(f"*{suffix}"):
            _check_file_link(folder, path.relative_to(folder.root))
    return files, notes


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_hidden(folder: Folder, place: PurePath) -> bool:
    """Unless it is of another module, or on the way to one."""
    hidden = place.name.startswith(".") or place.name == "__pycache__"
    named = any(module and place.is_relative_to(module) for module in folder.modules or ())
    return hidden and not named and not folder.leads_to_module(place)


def _why_left(folder: Folder, file: PurePath) -> str:
    """Empty for one that is copied."""
    path = folder.root / file
    if not path.is_file():
        return "a link to nothing" if path.is_symlink() else "no ordinary file"
    _check_file_link(folder, file)
    large = path.stat().st_size > _LARGE and not folder.is_of_module(file)
    return "larger than what belongs to a tokenizer" if large else ""


def _check_file_link(folder: Folder, file: PurePath) -> None:
    path = folder.root / file
    if leads_outside(folder.root, path):
        outside = f"{os.path.realpath(path)}, outside of {folder.root}"
        raise ValueError(f"{file} is a link to {outside}; put the file itself there, or remove the link.")


def left_of(out: Path) -> Path | None:
    """The folder that was here, where a command was killed between taking it away and putting the new one in place."""
    out = out.resolve()
    if out.exists():
        return None
    beside = out.parent.glob(f".{glob.escape(out.name)}.{'[0-9a-f]' * 2 * TOKEN}.old")
    return max(beside, key=lambda path: path.stat().st_ctime, default=None)
