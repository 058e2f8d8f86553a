"""What the package says of itself: how it is built, what it needs, and what is in its archive."""

import ast
import re
import sys
import tarfile
import tomllib
from email import message_from_string
from pathlib import Path

import pytest

import distribution
import tensorbed

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
# Texts that people read, by whatever program they are shown.
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
SOURCES = [file for folder in ("src", "experiments", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
# Modules whose package has another name.
PACKAGES = {"tltorch": "tensorly-torch", "pytorch_optimizer": "pytorch-optimizer", "ibis": "ibis-framework"}


DEMO = ("experiments/__main__.py", "experiments/lab", "experiments/tasks/source_code")


def names(requirements):
    return {re.match(r"[\w-]+", line)[0].lower() for line in requirements if not line.startswith("#")}


def test_building_needs_no_torch():
    assert names(PROJECT["build-system"]["requires"]) == {"scikit-build-core", "nanobind"}


def test_make_builds_with_the_same_tools_at_pinned_versions():
    (tools,) = re.findall(r"^BUILD := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(tools.split()) == names(PROJECT["build-system"]["requires"]) | {"cmake", "ninja"}
    assert set(tools.split()) <= names((ROOT / "constraints.txt").read_text().splitlines())


def test_nothing_is_said_to_be_on_an_index_that_is_not():
    told = [(file.name, line) for file in (*TEXTS, *SOURCES) for line in file.read_text().splitlines()]
    assert [(name, line) for name, line in told if re.search(r"pip install.*tensorbed\[", line)] == []


def test_messages_name_the_requirements_of_the_extras():
    known = {requirement for extra in EXTRAS.values() for requirement in extra}
    said = {
        requirement
        for file in SOURCES
        for line in file.read_text().splitlines()
        if "pip install" in line
        for requirement in re.findall(r'"([\w-]+>=[\d.]+)"', line)
    }
    assert {"typer>=0.15", "rich>=13", "transformers>=5.20", "accelerate>=1.10", "gguf>=0.17"} <= said
    assert said <= known


def imported(*places):
    """Packages that sources import, wherever in a file, but for the standard library and what is here."""
    own = {path.stem for path in ROOT.iterdir()} | {"tensorbed"}
    found = set()
    for place in places:
        path = ROOT / place
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and not node.level:
                    found.add(node.module.split(".")[0])
                elif isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
    return {PACKAGES.get(name, name) for name in found - own - sys.stdlib_module_names}


@pytest.mark.parametrize(
    ("extras", "places"),
    [
        ((), ["src/tensorbed/nn", "src/tensorbed/structures", "src/tensorbed/files", "src/tensorbed/info.py"]),
        (("cli",), ["src/tensorbed/cli", "src/tensorbed/__main__.py"]),
        (("transformers",), ["src/tensorbed/integrations"]),
        (("figures",), ["src/tensorbed/compress", "benchmarks/figures.py"]),
        (("demo",), [*DEMO, "pages", "provenance.py"]),
        (("experiments",), ["experiments", "pages", "provenance.py"]),
        (("benchmarks", "models"), ["benchmarks", "pages", "provenance.py"]),
    ],
    ids=str,
)
def test_extras_bring_what_is_imported(extras, places):
    brought = names(line for name in extras for line in EXTRAS[name]) | names(PROJECT["project"]["dependencies"])
    # Of the integration: sentence-transformers is used where it is. torchTT is built by make bench. What the demo does
    # not use of the laboratory is an optimiser, and what fetches public data. Spark and
    # Triton have extras of their own, make installs TorchRec apart, and FBTT-Embedding is on no index.
    others = {
        "sentence_transformers",
        "torchtt",
        "pytorch-optimizer",
        "pyspark",
        "py4j",
        "triton",
        "torchrec",
        "tt_embeddings_ops",
    }
    others |= {"datasets"} if extras == ("demo",) else set()
    assert imported(*places) - brought <= others


def test_benchmarks_of_models_bring_the_command_that_they_run():
    # Models by their names on the Hub, which need another, are none of them.
    assert {*EXTRAS["cli"], *EXTRAS["transformers"]} - {*EXTRAS["models"]} == {"huggingface_hub>=1.0"}


def test_extras_agree_on_what_they_want():
    wanted = {line for extra in EXTRAS.values() for line in extra}
    assert len(wanted) == len(names(wanted)), sorted(wanted)


def test_what_fetches_the_data_of_experiments_is_brought():
    assert {"datasets", "requests", "aiohttp"} <= names(EXTRAS["experiments"])


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The source archive: its metadata, and the size of each file."""
    build = pytest.importorskip("scikit_build_core.build")
    folder = tmp_path_factory.mktemp("archive")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = build.build_sdist(str(folder))
    with tarfile.open(folder / name) as file:
        sizes = {member.name.partition("/")[2]: member.size for member in file.getmembers()}
        (info,) = (member for member in file.getmembers() if member.name.endswith("PKG-INFO"))
        return message_from_string(file.extractfile(info).read().decode()), sizes


def test_the_archive_has_sources_and_no_records_of_runs(archive):
    _, sizes = archive
    ours = ("docs/", "tests/", "experiments/", "benchmarks/", "pages/")  # and not what else lies in a checkout
    beside = {name: size for name, size in sizes.items() if name.startswith(ours)}
    assert {"src/tensorbed/__init__.py", "native/kernels.cpp", "tests/test_packaging.py", "README.md"} <= sizes.keys()
    assert [name for name in beside if name.endswith((".jsonl", ".gz", ".safetensors"))] == []
    assert [name for name in beside if name.startswith(("docs/results", "tests")) and name.endswith(".html")] == []
    assert max(size for name, size in beside.items() if not name.startswith("docs/images")) < 150_000


def test_metadata_says_whose_it_is_and_where_it_runs(archive):
    metadata, _ = archive
    assert metadata["Author"] == "The tensorbed authors"
    assert "Paper, https://arxiv.org/abs/1901.10787" in metadata.get_all("Project-URL")
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_version_is_the_same_wherever_it_is_said():
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == tensorbed.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == tensorbed.__version__


def test_every_python_that_is_claimed_is_tested_by_the_workflow():
    (listed,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "tests.yml").read_text())
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert re.findall(r"3\.\d+", listed) == claimed


WHEEL = [
    *(f"tensorbed/{name}" for name in ("__init__.py", "_version.py", "py.typed", "cli/commands.py")),
    *("tensorbed/_native.abi3.so", "tensorbed-0.1.0.dist-info/METADATA"),
]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (WHEEL[1:], "missing: tensorbed/__init__.py"),
        ([name for name in WHEEL if "_native" not in name], "without its compiled kernels"),
        ([*WHEEL, "tests/test_packaging.py"], "nobody needs these: tests/test_packaging.py"),
        ([*WHEEL, "tensorbed/__pycache__/x.pyc"], "nobody needs these"),
    ],
)
def test_a_wheel_that_is_not_right_is_refused(names, reason):
    assert distribution.check_contents(WHEEL) == len(WHEEL)
    with pytest.raises(SystemExit, match=reason):
        distribution.check_contents(names)


def test_a_release_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "before.whl").touch()

    def fail(folder):
        folder.mkdir()
        (folder / "half.tar.gz").touch()
        raise SystemExit("no space left")

    monkeypatch.setattr(distribution, "ROOT", tmp_path)
    monkeypatch.setattr(distribution, "DIST", tmp_path / "dist")
    monkeypatch.setattr(distribution, "interpreters", dict)
    monkeypatch.setattr(distribution, "build_archive", fail)
    with pytest.raises(SystemExit, match="no space left"):
        distribution.main()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["before.whl"]


def test_installs_are_tried_without_torch_only_where_pip_finds_none(tmp_path, monkeypatch, capsys):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    assert distribution.install_torch(12, python)
    python.write_text("#!/bin/sh\necho 'no connection' >&2; exit 1\n")
    with pytest.raises(SystemExit, match="no connection"):
        distribution.install_torch(12, python)
    # pip itself, where there is nothing to be found.
    empty = tmp_path / "empty"
    empty.mkdir()
    for name, value in {
        "CONFIG_FILE": "/dev/null",
        "NO_INDEX": "1",
        "FIND_LINKS": empty,
        "IGNORE_INSTALLED": "1",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", str(value))
    assert not distribution.install_torch(12, Path(sys.executable))
    assert "without its dependencies" in capsys.readouterr().out


LINK = re.compile(r"\]\(([^)]+)\)")


def test_links_of_an_index_page_hold(archive):
    metadata, _ = archive
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload()
    assert LINK.findall(page) == [link for link in LINK.findall((ROOT / "README.md").read_text()) if "://" in link]
    assert "Start (docs/index.md)" in page
    assert "](docs" not in page
    assert "<picture>" not in page


def test_links_and_pictures_of_the_readme_lead_to_files():
    text = (ROOT / "README.md").read_text()
    files = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    files += re.findall(r'src(?:set)?="([^"]+)"', text)
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
