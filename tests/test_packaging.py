"""What the package says of how it is built."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements):
    return {re.match(r"[\w-]+", line)[0].lower() for line in requirements if not line.startswith("#")}


def test_building_needs_no_torch():
    assert names(PROJECT["build-system"]["requires"]) == {"scikit-build-core", "nanobind"}


def test_make_builds_with_the_same_tools_at_pinned_versions():
    (tools,) = re.findall(r"^BUILD := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(tools.split()) == names(PROJECT["build-system"]["requires"]) | {"cmake", "ninja"}
    assert set(tools.split()) <= names((ROOT / "constraints.txt").read_text().splitlines())
