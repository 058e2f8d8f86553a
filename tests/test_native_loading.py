"""The compiled kernels may be absent, and the library says why and goes on."""

import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tensorbed.backends import native

VARIABLES = ("TENSORBED_NATIVE", "TENSORBED_NATIVE_PATH")


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch):
    """No test sees the variables of whoever runs it, and none leaves another module behind."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, native.NAME, sys.modules.get(native.NAME))


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_either_there_or_a_reason():
    assert native.available == (native.module is not None) == (native.reason == "")


def test_not_built(monkeypatch):
    monkeypatch.setitem(sys.modules, native.NAME, None)
    assert native.load() == (None, native.NOT_BUILT)


def test_left_out_on_request(monkeypatch):
    monkeypatch.setenv("TENSORBED_NATIVE", "0")
    assert native.load() == (None, "left out by TENSORBED_NATIVE=0")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "no such file or folder"),
        (Path.mkdir, f"no _native{EXTENSION_SUFFIXES[0]} in that folder"),
        (lambda path: path.write_text("no extension"), "not a Python extension"),
    ],
    ids=["nothing", "empty folder", "another file"],
)
def test_a_path_without_an_extension_is_said_and_nothing_else_is_loaded(monkeypatch, tmp_path, make, why):
    path = tmp_path / "build"
    make(path)
    monkeypatch.setenv("TENSORBED_NATIVE_PATH", str(path))
    module, reason = native.load()
    assert module is None
    assert reason.startswith(f"TENSORBED_NATIVE_PATH={path}: {why}")


def test_a_damaged_extension_is_said_in_one_line(monkeypatch, tmp_path):
    (tmp_path / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"\0" * 100)
    monkeypatch.setenv("TENSORBED_NATIVE_PATH", str(tmp_path))
    module, reason = native.load()
    assert module is None
    assert reason.startswith(f"TENSORBED_NATIVE_PATH={tmp_path}: ")
    assert len(reason.splitlines()) == 1


def test_what_the_extension_itself_misses_is_said(monkeypatch, tmp_path):
    (tmp_path / "_native.py").write_text("import a_module_that_nobody_has")
    monkeypatch.setenv("TENSORBED_NATIVE_PATH", str(tmp_path / "_native.py"))
    assert native.load()[1].endswith("No module named 'a_module_that_nobody_has'")


@pytest.mark.skipif(not native.available, reason="no compiled kernels")
@pytest.mark.parametrize("named", ["file", "folder"])
def test_the_build_that_is_named_is_the_one_in_use(monkeypatch, tmp_path, named):
    built = shutil.copy(native.module.__file__, tmp_path)
    monkeypatch.setenv("TENSORBED_NATIVE_PATH", built if named == "file" else str(tmp_path))
    code = (
        "from tensorbed import _native; from tensorbed.backends import native;"
        "print(native.available, native.module is _native, _native.__file__)"
    )
    assert python(code) == ["True", "True", built]


def test_the_library_works_without_kernels(monkeypatch):
    monkeypatch.setenv("TENSORBED_NATIVE", "0")
    code = (
        "import torch, tensorbed as tb; from tensorbed.backends import native;"
        "layer = tb.TTEmbedding(60, 8, rank=2); rows = layer(torch.arange(60)); rows.sum().backward();"
        "print(native.available, tuple(rows.shape) == (60, 8))"
    )
    assert python(code) == ["False", "True"]
