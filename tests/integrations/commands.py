"""The command as the tests run it."""

import subprocess
import sys

from model_folders import TEXTS, make_bert, make_llama
from typer.testing import CliRunner

from tensorbed.cli.commands import app

SMALL = ("--min-rows", "100")


def make_folders(root):
    """Two dense models, and one of them compressed by the command."""
    (root / "texts.txt").write_text("\n".join(TEXTS))
    make_bert(root / "bert")
    make_llama(root / "llama")
    run("compress", root / "llama", root / "small", "--format", "int8", *SMALL)
    return root


def invoke(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def run(*arguments):
    """What a command that succeeds says."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments, code=1):
    """The one line of a command that does not, and nothing on standard output."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def python(*arguments, **options):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
