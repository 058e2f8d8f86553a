"""The laws of the project's own structure."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from others import Coded, ForgetfulMatrix, Scaled, ScaledMatrix

import tensorbed
from tensorbed.structures import register, registered
from tensorbed.structures import registry as registry_module
from tensorbed.structures.formats import Budget
from tensorbed.structures.registry import formats, read
from tensorbed.testing import (
    BagParity,
    EmbeddingParity,
    HeadLaws,
    HeadLimits,
    HeadTracing,
    Sample,
    StructureLaws,
    TracingLaws,
)

SOURCE = Path(tensorbed.__file__).parent
# From the bottom up: a room may import from those before it, never from those after.
ROOMS = (
    ("checks", "printable", "progress", "workers", "_version", "_native"),
    ("indexing", "shapes"),
    ("dispatch",),
    ("backends", "decompose"),
    ("structures",),
    ("fitting", "functional"),
    ("vocabulary",),
    ("nn",),
    ("adapters",),
    ("files",),
    ("compress",),
    ("integrations",),
    ("tensorbed",),
    ("testing", "info"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}


def room(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else {"__init__": "tensorbed"}.get(path.stem, path.stem)


def imported(path):
    """Modules of ours, and names in them, that a file imports: wherever in it, under any condition."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tensorbed":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "tensorbed")


def imported_rooms(path):
    for name in imported(path):
        part = name.split(".")[1] if "." in name else "tensorbed"
        yield part if part in LEVEL else "tensorbed"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_dependencies_point_one_way(path):
    here = room(path)
    assert here in LEVEL, f"{here} has no place in the order of rooms"
    assert not {r for r in imported_rooms(path) if LEVEL[r] > LEVEL[here]}


def test_nothing_is_imported_by_a_string():
    """Where nobody sees it. But structures, found by their files, and the extension, which may not be there."""
    by_string = set()
    for file in SOURCE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        if used & {"import_module", "__import__", "resolve_name"}:
            by_string.add(str(file.relative_to(SOURCE)))
    assert by_string == {"structures/__init__.py", "backends/native/__init__.py"}


# What is no format's own: everything else in the room is.
COMMON = ("__init__", "base", "explanation", "formats", "registry")
CONCRETE = {f"tensorbed.structures.{path.stem}" for path in (SOURCE / "structures").glob("*.py")} - {
    f"tensorbed.structures.{name}" for name in COMMON
}
FORMATS = {format.__name__ for format in formats() if format.__module__ in CONCRETE}


# Public names, and shorthands, which are names for a structure.
NAMING = {SOURCE / "__init__.py", SOURCE / "nn" / "shorthands.py"}
OUTSIDE = [file for file in SOURCE.rglob("*.py") if file.parent != SOURCE / "structures" and file not in NAMING]


def test_no_format_is_imported_outside_its_room():
    """Others ask the registry."""
    assert len(CONCRETE) >= 9
    for file in OUTSIDE:
        names = list(imported(file))
        assert not [name for name in names if any(name == c or name.startswith(f"{c}.") for c in CONCRETE)], file
        assert not [name for name in names if name.rpartition(".")[2] in FORMATS], file


def test_no_structure_is_known_by_name_outside_its_room():
    for file in OUTSIDE:
        names = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        assert not names & set(registered()), f"{file} names a structure"


def test_importing_the_library_needs_torch_and_safetensors_only():
    code = (
        "import sys, torch, safetensors; before = set(sys.modules); import tensorbed;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(*sorted(new - set(sys.stdlib_module_names) - {'tensorbed', 'torch', 'safetensors'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == []


def test_public_names():
    assert all(hasattr(tensorbed, name) for name in tensorbed.__all__)
    assert len(set(tensorbed.__all__) - {format.__name__ for format in formats()}) <= 18
    assert (SOURCE / "py.typed").exists()


def test_files_have_one_subject():
    for file in SOURCE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 400, file


class TestSomeoneElsesStructure(StructureLaws, EmbeddingParity, BagParity, HeadLaws, HeadLimits):
    samples = (Sample(Scaled(), 300, 5), Sample(Scaled(), 12, 1), Sample(Coded(), 700, 60))


class TestSomeoneElsesStructureInGraphs(HeadTracing, TracingLaws):
    by_inductor = ()
    samples = (Sample(Scaled(), 300, 5),)


def test_registering(monkeypatch):
    monkeypatch.setattr(registry_module, "_STRUCTURES", dict(registered()))
    register("scaled")(ScaledMatrix)
    assert registered()["scaled"] is ScaledMatrix
    with pytest.raises(ValueError, match='structure "scaled" is ScaledMatrix already'):

        @register("scaled")
        class Other(ScaledMatrix):
            pass

    assert registered()["scaled"] is ScaledMatrix
    assert Scaled().bind(Budget(3, 4)).numel == 4


def test_registering_again_replaces_the_class(monkeypatch, tmp_path):
    """As a notebook's cell does that is run twice."""
    monkeypatch.setattr(registry_module, "_STRUCTURES", dict(registered()))
    first = register("again")(type("AgainMatrix", (ScaledMatrix,), {}))
    text = first(30, 4).text
    assert type(read(text)) is first
    second = register("again")(type("AgainMatrix", (ScaledMatrix,), {}))
    assert type(read(text)) is second
    layer = tensorbed.Embedding(30, 4, Scaled())
    layer.structure = second(30, 4)
    tensorbed.save(layer, tmp_path / "layer")
    assert tensorbed.load(tmp_path / "layer").structure == layer.structure
    layer.structure = first(30, 4)
    with pytest.raises(TypeError, match="AgainMatrix that was registered again since; make the layer anew"):
        tensorbed.save(layer, tmp_path / "layer")


def test_a_structure_that_forgets_super_is_complete(monkeypatch, tmp_path):
    monkeypatch.setattr(registry_module, "_STRUCTURES", dict(registered()))
    register("forgetful")(ForgetfulMatrix)
    layer = tensorbed.Embedding(30, 4, Scaled())
    layer.structure = ForgetfulMatrix(30, 4)
    tensorbed.save(layer, tmp_path / "layer")
    found = tensorbed.load(tmp_path / "layer")
    assert found.structure == layer.structure
    assert found.structure.pattern == "cos"
    with pytest.raises(ValueError, match="num_embeddings=0"):
        ForgetfulMatrix(0, 4)
