"""The API reference has every public name, and everything on it has a docstring."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"
SHOWN = [name for page in REFERENCE.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]
MODULES = [
    "tensorbed",
    "tensorbed.structures",
    "tensorbed.testing",
    "tensorbed.integrations.transformers",
]
# Names that are no objects of their own to read about.
BESIDE = {"tensorbed.__version__", "tensorbed.functional", "tensorbed.indexing", "tensorbed.structures"}
BESIDE |= {"tensorbed.structures.Params"}


def named(path):
    """What stands under a path of names, a module or something in one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(named(module), name)


def members(thing):
    """Public methods and properties that a class of ours defines itself."""
    kinds = (property, classmethod, staticmethod)
    return {
        name: member
        for name, member in vars(thing).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds))
    }


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_a_page(module):
    public = {f"{module}.{name}" for name in named(module).__all__}
    assert sorted(public - set(SHOWN) - BESIDE) == []


def test_a_name_is_on_one_page():
    assert sorted(name for name in SHOWN if SHOWN.count(name) > 1) == []


@pytest.mark.parametrize("path", SHOWN)
def test_what_is_shown_has_a_docstring(path):
    thing = named(path)
    assert (inspect.getdoc(thing) or "").strip(), path
    if inspect.isclass(thing) and not path.startswith("tensorbed.testing"):
        # A method that another class defines too may say it there.
        assert [name for name in members(thing) if not inspect.getdoc(getattr(thing, name))] == []
