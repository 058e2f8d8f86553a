"""What a page shows as code: its blocks, what is said of them, and how they are run."""

import ast
import contextlib
import doctest
import io
import json
import math
import re
import shlex
import sys
import types
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,})\s*(?P<language>\w*)[^`]*$")
NOT_EXECUTED = re.compile(r"<!-- not executed: (?P<reason>\S.*) -->")
SHELL = ("sh", "bash", "console")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
DOCTEST_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A piece of a page in a fence, or a cell of a notebook."""

    page: Path
    line: int  # the first one of its code, counted from 1
    language: str
    code: str
    reason: str | None = None  # why it is not executed
    output: str | None = None  # what the page shows below it

    @property
    def is_session(self):
        return ">>> " in self.code

    @property
    def is_python(self):
        return self.language in ("python", "py", "pycon") or self.is_session

    @property
    def shell_lines(self):
        """What a shell block runs, continued lines in one, without remarks, as words."""
        if self.language not in SHELL:
            return []
        lines = self.code.replace("\\\n", " ").splitlines()
        words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
        return [line[2:] if line[:2] == ["python", "-m"] else line for line in words if line]

    @property
    def commands(self):
        """Lines of a shell block that run the command of this library."""
        return [line[1:] for line in self.shell_lines if line[0] == "tensorbed"]


def blocks_of(page):
    """All blocks of a Markdown page or a notebook, in order."""
    if page.suffix == ".ipynb":
        return cells_of(page)
    lines, blocks = page.read_text().splitlines(), []
    start = 0
    while start < len(lines):
        fence = FENCE.match(lines[start])
        if not fence:
            start += 1
            continue
        end = start + 1
        while end < len(lines) and lines[end].strip() != fence["ticks"]:
            end += 1
        if end == len(lines):
            raise ValueError(f"{page}, line {start + 1}: this block has no end.")
        code = "".join(f"{line.removeprefix(fence['indent'])}\n" for line in lines[start + 1 : end])
        marked = NOT_EXECUTED.search(lines[start - 1]) if start else None
        block = Block(page, start + 2, fence["language"], code, marked and marked["reason"])
        if blocks and shows_output(blocks[-1], block, lines):
            block = Block(**{**vars(blocks.pop()), "output": code})
        blocks.append(block)
        start = end + 1
    return blocks


def shows_output(before, block, lines):
    """Plain text that follows code with nothing between them but empty lines is what the code prints."""
    if block.language not in ("", "text") or block.is_session or before.output is not None:
        return False
    if not (before.is_python or before.language in SHELL):
        return False
    after = before.line - 1 + before.code.count("\n") + 1
    return not any(line.strip() for line in lines[after : block.line - 2])


def cells_of(page):
    """Cells of code, with the text that they have printed."""
    blocks = []
    for number, cell in enumerate(json.loads(page.read_text())["cells"]):
        if cell["cell_type"] == "code":
            streams = ("".join(out["text"]) for out in cell["outputs"] if out.get("name") == "stdout")
            blocks.append(Block(page, number, "python", "".join(cell["source"]), output="".join(streams)))
    return blocks


def run_page(page, run_command):
    """Run the blocks of a page in order, in one namespace and in the current folder; compare what they print.

    The lines of the page at which those that were run begin.
    """
    module = types.ModuleType("a_page_that_is_run")
    sys.modules[module.__name__] = module  # dataclasses look for the module of their class
    allowed = [block for block in blocks_of(page) if block.reason is None]
    try:
        return [block.line for block in allowed if run_block(block, vars(module), run_command)]
    finally:
        del sys.modules[module.__name__]


def run_block(block, names, run_command):
    """Whether there was anything in it to run."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if block.is_session:
            run_session(block, names)
            return True
        if block.is_python:
            # Empty lines before it, so that a traceback shows the line of the page.
            before = "\n" * (block.line - 1) if block.page.suffix == ".md" else ""
            exec(compile(ast.parse(before + block.code, str(block.page)), str(block.page), "exec"), names)
        for command in block.commands:
            printed.write(run_command(command))
    if block.output is not None and (block.is_python or block.commands):
        where = f"{block.page.name}, line {block.line}"
        assert same_text(block.output, printed.getvalue()), f"{where} prints\n{printed.getvalue()}"
    return block.is_python or bool(block.commands)


def run_session(block, names):
    """Lines after ``>>>``, and what they answer."""
    test = doctest.DocTestParser().get_doctest(block.code, names, block.page.name, str(block.page), block.line)
    doctest.DebugRunner(optionflags=DOCTEST_OPTIONS).run(test, clear_globs=False)
    names.update(test.globs)


def same_text(shown, printed):
    """Whether two texts are the same but for spaces, ``...`` and the last digits of decimals.

    Whole numbers must be equal. Decimals may differ by 2 %, since sums are rounded in another order on another
    processor, and training goes on from there.
    """
    if "..." in shown:
        return doctest.OutputChecker().check_output(shown, printed, DOCTEST_OPTIONS)
    if NUMBER.sub("0", shown).split() != NUMBER.sub("0", printed).split():
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(same_number(*pair) for pair in pairs)


def same_number(shown, printed):
    if "." not in shown:
        return shown == printed
    one, other = (float(text.replace(",", "")) for text in (shown, printed))
    last_digit = 10.0 ** -len(shown.partition(".")[2].partition("e")[0])
    return math.isclose(one, other, rel_tol=0.02, abs_tol=1.5 * last_digit if "e" not in shown else 0)
