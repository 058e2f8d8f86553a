"""The archives of a release: built into dist/, read, and installed into empty environments. ``make dist`` runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = 11  # Python 3.11
STABLE = 12  # from Python 3.12 on one wheel serves all later ones

# What a user does first, in an interpreter that has the install and nothing of this folder.
FIRST_STEPS = """
import json, sys, torch, tensorbed as tb
from tensorbed.info import info
layer = tb.TTEmbedding(1000, 64, rank=4)
layer(torch.tensor([0, 999])).sum().backward()
model = torch.nn.Sequential(torch.nn.Embedding(3000, 16), torch.nn.Linear(16, 2))
tb.compress_(model, tb.QuantizedRows(bits=4))
tb.save(model, sys.argv[1])
tb.load(sys.argv[1], into=torch.nn.Sequential(torch.nn.Embedding(3000, 16), torch.nn.Linear(16, 2)))
kernels = info().kernels
said = {"version": tb.__version__, "file": tb.__file__, "compiled": kernels.available, "kernels": str(kernels)}
print(json.dumps(said))
"""

# The same question where there is no torch: the package cannot be imported then, its compiled module can.
WITHOUT_TORCH = """
import importlib.metadata, importlib.util, json
installed = importlib.metadata.distribution("tensorbed")
(package,) = [file for file in installed.files if str(file) == "tensorbed/__init__.py"]
modules = [file.locate() for file in installed.files if file.match("tensorbed/_native.*so")]
for file in modules:
    spec = importlib.util.spec_from_file_location("tensorbed._native", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
kernels = "compiled, loaded without torch" if modules else "pure Python"
said = {"version": installed.version, "file": str(package.locate()), "compiled": bool(modules), "kernels": kernels}
print(json.dumps(said))
"""


def main() -> int:
    """Build everything, check everything, and say what was found; dist/ changes when all of it has succeeded."""
    pythons = interpreters()
    say(f"Pythons: {', '.join(f'3.{minor} ({path})' for minor, path in pythons.items())}")
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        built = Path(folder) / "dist"
        archive = build_archive(built)
        environments = {minor: environment(path, Path(folder) / f"3.{minor}") for minor, path in pythons.items()}
        wheels = build_wheels(archive, environments)
        run([sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(built.iterdir()))])
        for file in sorted(built.iterdir()):
            say(f"{file.name}: {check_contents(names_in(file))} files, {file.stat().st_size / 1e6:.2f} MB")
        for minor, python in environments.items():
            check_installs(minor, python, wheels[min(minor, STABLE)], archive)
        shutil.rmtree(DIST, ignore_errors=True)
        built.rename(DIST)
    return 0


def interpreters() -> dict[int, Path]:
    """The Pythons of this machine by minor version: those on the path, and those that pyenv keeps beside it."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    there = [path for path in (shutil.which(f"python3.{minor}") for minor in range(OLDEST, 30)) if path]
    found: dict[int, Path] = {}
    for path in [Path(sys.executable), *map(Path, there), *sorted(kept.glob("*/bin/python3.*"))]:
        if re.fullmatch(r"python3?(\.\d+)?", path.name) is None:
            continue
        # A shim of pyenv is there for a Python that it does not run.
        asked = subprocess.run([path, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, check=False)
        if asked.returncode == 0 and int(asked.stdout) >= OLDEST:
            found.setdefault(int(asked.stdout), path)
    return dict(sorted(found.items()))


def build_archive(folder: Path) -> Path:
    """The sources."""
    run([sys.executable, "-m", "build", "--sdist", "--outdir", str(folder), str(ROOT)])
    (archive,) = folder.glob("*.tar.gz")
    return archive


def build_wheels(archive: Path, environments: Mapping[int, Path]) -> dict[int, Path]:
    """Of the sources as they are sent, and not of this folder: one for Python 3.11, one for all later."""
    wheels: dict[int, Path] = {}
    folder = archive.parent
    for minor, python in environments.items():
        if min(minor, STABLE) not in wheels:
            before = set(folder.glob("*.whl"))
            build = [str(python), "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(archive)]
            run(build, {"TENSORBED_NATIVE": "1"})
            (wheels[min(minor, STABLE)],) = set(folder.glob("*.whl")) - before
    return wheels


def names_in(file: Path) -> list[str]:
    """Files of an archive, below its root."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return wheel.namelist()
    with tarfile.open(file) as archive:
        return [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]


def check_contents(names: Sequence[str]) -> int:
    """How many files there are, once none is missing and none is there that nobody needs."""
    is_wheel = any(name.endswith(".dist-info/METADATA") for name in names)
    package = "tensorbed/" if is_wheel else "src/tensorbed/"
    needed = {f"{package}{name}" for name in ("__init__.py", "_version.py", "py.typed", "cli/commands.py")}
    if not is_wheel:
        needed |= {"README.md", "LICENSE", "CITATION.cff", "native/kernels.cpp", "index_page.py", "pyproject.toml"}
    if missing := sorted(needed - set(names)):
        raise SystemExit(f"missing: {', '.join(missing)}")
    if is_wheel and not any(re.fullmatch(r"tensorbed/_native\..*so", name) for name in names):
        raise SystemExit("a wheel without its compiled kernels")
    known = ("tensorbed/", "tensorbed-") if is_wheel else ("",)
    unwanted = [
        name for name in names if not name.startswith(known) or re.search(r"\.(pyc|jsonl)$|^\.(venv|git/)", name)
    ]
    if unwanted:
        raise SystemExit(f"nobody needs these: {', '.join(unwanted[:10])}")
    return len(names)


def check_installs(minor: int, python: Path, wheel: Path, archive: Path) -> None:
    """The wheel, the sources with a compiler and the sources without: each does what a user does first."""
    has_torch = install_torch(minor, python)
    no_compiler = {"PATH": str(python.parent)}
    ways: list[tuple[str, Path, Mapping[str, str], bool]] = [
        ("the wheel, no compiler", wheel, no_compiler, True),
        ("the sources, a compiler", archive, {}, True),
        ("the sources, no compiler", archive, no_compiler, False),
    ]
    for told, file, variables, compiled in ways:
        options = ["-c", str(CONSTRAINTS)] if has_torch else ["--no-deps"]
        run([str(python), "-m", "pip", "install", "--quiet", *options, str(file)], variables)
        done = first_steps(python, FIRST_STEPS if has_torch else WITHOUT_TORCH)
        say(f"Python 3.{minor}, {told}: tensorbed {done['version']}, kernels: {done['kernels']}")
        if done["compiled"] != compiled:
            raise SystemExit("which is not what was to be installed")
        run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "tensorbed"])


def install_torch(minor: int, python: Path) -> bool:
    """Install torch's build for CPUs, if pip finds one; the one with CUDA, 4.7 GB, is not fetched for a check."""
    (version,) = re.findall(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    wanted = f"torch=={version}+cpu"
    # Without the constraints, or pip calls what it does not find a conflict; those hold when tensorbed is installed.
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", wanted]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        say(f"Python 3.{minor}: installs are tried with {wanted}.")
        return True
    if "No matching distribution found for torch" not in tried.stderr:
        raise SystemExit(f"failed: {' '.join(command)}\n{tried.stderr}")
    say(
        f"Python 3.{minor}: pip finds no {wanted}, so tensorbed is installed without its dependencies and only its "
        "compiled module is loaded. Set PIP_EXTRA_INDEX_URL to PyTorch's index for CPUs to try all of it."
    )
    return False


def first_steps(python: Path, steps: str) -> dict[str, object]:
    """What an installed copy says of itself after its first steps, far from this folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-c", steps, str(Path(folder) / "model.safetensors")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    said: dict[str, object] = json.loads(done.stdout)
    if "site-packages" not in str(said["file"]):
        raise SystemExit(f"{said['file']} is no installed copy")
    return said


def environment(python: Path, folder: Path) -> Path:
    """An empty one; its interpreter."""
    run([str(python), "-m", "venv", str(folder)])
    return folder / "bin" / "python"


def run(command: Iterable[str], variables: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, with what it says, or stop."""
    given = list(command)
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "TENSORBED_NATIVE")}
    if subprocess.run(given, env={**kept, **(variables or {})}, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(given)}")


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
