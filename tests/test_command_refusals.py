"""What goes wrong with a command is one line on standard error and an exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tensorbed
from tensorbed.cli.commands import app
from tensorbed.cli.terminal import in_its_words


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False, **options)


def test_interrupted_by_ctrl_c():
    code = (
        "import signal, sys; from tensorbed.cli import commands; from tensorbed.__main__ import main\n"
        "commands.look_into = lambda what: signal.raise_signal(signal.SIGINT)\n"
        "sys.argv = ['tensorbed', 'inspect', 'x.safetensors']; main()"
    )
    result = python(code, stdout=subprocess.PIPE)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "tensorbed: interrupted; nothing half-written is left behind.\n"


def test_interrupted_while_torch_is_imported():
    code = (
        "import builtins, signal; from tensorbed.__main__ import main; own = builtins.__import__\n"
        "def interrupted(name, *args):\n"
        "    if name == 'tensorbed.cli.commands': signal.raise_signal(signal.SIGINT)\n"
        "    return own(name, *args)\n"
        "builtins.__import__ = interrupted; main()"
    )
    result = python(code)
    assert (result.returncode, result.stderr) == (130, "tensorbed: interrupted.\n")


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="pipes of POSIX")
@pytest.mark.parametrize("arguments", [["info"], ["--help"], ["plan", "1000x16", "--ratio", "2"]])
def test_a_closed_pipe_is_a_line(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    result = python(
        f"import sys; sys.argv[1:] = {arguments!r}; import tensorbed.__main__ as m; m.main()", stdout=writing
    )
    os.close(writing)
    assert result.returncode == 1
    assert result.stderr == "tensorbed: the output was closed before all of it was read.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file of Linux")
def test_nowhere_to_complain_is_no_fault():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tensorbed", "inspect", "nowhere.safetensors"]
        assert subprocess.run(command, stderr=full, check=False).returncode == 1


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"tensorbed {tensorbed.__version__}\n")


def test_commands_are_in_the_order_of_their_use():
    shown = CliRunner().invoke(app, ["--help"]).stdout
    commands = shown[shown.index("Commands") :]
    places = [commands.index(f" {name} ") for name in ("inspect", "plan", "compress", "verify", "info")]
    assert places == sorted(places)


@pytest.mark.parametrize("ratio", ["1", "0.5"])
@pytest.mark.parametrize("command", [["plan", "1000x16"], ["compress", "nowhere", "out"]])
def test_a_ratio_that_makes_nothing_smaller_is_wrong_usage(command, ratio):
    result = CliRunner().invoke(app, [*command, "--ratio", ratio])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--ratio {ratio} makes nothing smaller: give how many times smaller" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ('leave it out with skip=["lm_head"].', "leave it out with --skip lm_head."),
        ('break the tie with tied="untie".', "break the tie with --untie."),
        ("lm_head (include_heads=False)", "lm_head (--no-heads)"),
        ("512 rows, fewer than min_rows=2,000", "512 rows, fewer than --min-rows 2,000"),
        ("no table of at least min_rows=2000 rows", "no table of at least --min-rows 2000 rows"),
        ("To take them lower min_rows, or leave out the", "To take them lower --min-rows, or leave out the"),
        ('words (left out by skip=["w*"]).', "words (left out by --skip w*)."),
        ("leave out the pattern of skip=.", "leave out the pattern of --skip."),
        ("many, but others have; if it is a head, name it in a pattern", "many, but others have"),
        ("--force (force=True) replaces it", "--force replaces it"),
        ("ask for no less, or give formats= that are smaller.", "ask for no less."),
        ("take tb.QuantizedRows for instance.", "take --format int4 for instance."),
        ("[Errno 2] No such file: 'x (y)'", "[Errno 2] No such file: 'x (y)'"),
    ],
)
def test_options_stand_in_place_of_arguments(said, shown):
    assert in_its_words(said) == shown
