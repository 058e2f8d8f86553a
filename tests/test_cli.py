import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import tensorbed
from tensorbed.backends import native
from tensorbed.cli.commands import app, terminal
from tensorbed.cli.inspection import inspect
from tensorbed.compress.report import Entry, Report
from tensorbed.info import info
from tensorbed.printable import printable

COMPILED = SimpleNamespace(
    isa="avx2", isas=("baseline", "avx2", "avx512"), openmp=True, nanobind="3.1.0", __file__="/lib/_native.so"
)


def kernels_line():
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    (line,) = [line for line in result.output.splitlines() if line.startswith("kernels: ")]
    return line


def test_info_says_what_is_installed():
    lines = CliRunner().invoke(app, ["info"]).output.splitlines()
    assert f"tensorbed: {tensorbed.__version__}" in lines
    assert f"torch: {torch.__version__}" in lines
    assert [line.split(":")[0] for line in lines] == [
        "tensorbed",
        "torch",
        "python",
        "threads",
        "kernels",
        "GPU kernels",
    ]


def test_info_for_programs():
    result = CliRunner().invoke(app, ["info", "--json"])
    facts = json.loads(result.output)
    assert facts == json.loads(json.dumps(info().as_dict()))
    assert facts["kernels"]["available"] is native.available


def test_compiled_kernels(monkeypatch):
    monkeypatch.setattr(native, "module", COMPILED)
    assert kernels_line() == "kernels: compiled, avx2 (of baseline, avx2, avx512), OpenMP, nanobind 3.1.0"
    monkeypatch.setattr(native, "module", SimpleNamespace(**{**vars(COMPILED), "openmp": False}))
    assert "one thread (built without OpenMP)" in kernels_line()


def test_no_kernels(monkeypatch):
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "reason", native.NOT_BUILT)
    assert kernels_line() == (
        "kernels: pure Python (no compiled extension: not built when tensorbed was installed); install a C++ compiler "
        'and run "pip install --force-reinstall --no-deps ." to get them'
    )
    monkeypatch.setattr(native, "reason", "left out by TENSORBED_NATIVE=0")
    assert kernels_line() == "kernels: pure Python (no compiled extension: left out by TENSORBED_NATIVE=0)"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_python_dash_m():
    out = subprocess.run([sys.executable, "-m", "tensorbed", "info"], capture_output=True, text=True, check=True).stdout
    assert out.startswith(f"tensorbed: {tensorbed.__version__}\n")


def test_without_typer_one_line_says_how_to_get_it():
    # A module that is None in sys.modules is one that cannot be imported.
    result = run("import sys; sys.modules['typer'] = None; from tensorbed.__main__ import main; main()")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        'the command tensorbed needs typer and rich for all but info and --version: pip install "typer>=0.15" '
        '"rich>=13"\n'
    )


def test_the_library_and_its_facts_import_neither_typer_nor_rich():
    code = "import sys, tensorbed, tensorbed.info as i; i.info(); print({'typer', 'rich'} & set(sys.modules))"
    assert run(code).stdout == "set()\n"


def invoke(*arguments):
    return subprocess.run([sys.executable, "-m", "tensorbed", *arguments], capture_output=True, text=True, check=False)


def test_plan_of_sizes():
    result = CliRunner().invoke(app, ["plan", "267735x512", "--ratio", "50"])
    assert result.exit_code == 0
    assert "TensorTrain(ratio=50.0)" in result.output
    found = json.loads(CliRunner().invoke(app, ["plan", "267735x512", "1000x64", "--budget", "2MB", "--json"]).output)
    assert found["bytes"] <= found["allowed"] == 2_000_000


def test_inspecting_a_file(tmp_path):
    torch.manual_seed(0)
    pair = tensorbed.embedding_and_head(3000, 16, tensorbed.LowRank(rank=4), tied=True)
    path = tmp_path / "pair.safetensors"
    tensorbed.save(torch.nn.ModuleDict({"words": pair.embedding, "head": pair.head}), path)
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0
    assert "Head (tied)" in result.stdout
    assert "3,000 x 16, rank=4" in result.stdout
    found = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)
    words, head = found["layers"]
    assert words["spectrum"] == head["spectrum"]
    assert sum(value > 1e-6 for value in words["spectrum"]) == 4
    assert words["std"] == pytest.approx(16**-0.5, rel=0.05)


def test_inspecting_a_file_that_others_wrote(tmp_path):
    torch.manual_seed(0)
    table, path = torch.randn(3000, 16) * 0.5, tmp_path / "model.safetensors"
    others = {
        "layer.dense.weight": torch.randn(3000, 1500),  # not tall
        "short.embedding": torch.randn(1999, 4),
        "position_embeddings": torch.randn(3000, 1000),
        "embedding.ids": torch.zeros(5000, 2, dtype=torch.long),
        "embedding.cube": torch.randn(3000, 2, 2),
    }
    save_file({"words.weight": table, **others}, path, {"format": "pt"})
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0, result.output
    assert "words.weight could be QuantizedRows(bits=8)" in result.stdout
    assert "note: 4 other tensors do not look like tables by name and shape" in result.stdout
    assert "tensorbed plan" not in result.stdout
    layers = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)["layers"]
    found = {layer["name"]: layer for layer in layers}
    assert set(found) == {"words.weight", "position_embeddings"}
    words = found["words.weight"]
    assert (words["layer"], words["kind"], words["numbers"], words["bytes"]) == ("tensor", "dense", 48_000, 192_000)
    assert words["std"] == pytest.approx(table.square().mean().sqrt().item(), rel=1e-5)


def test_inspecting_a_file_without_anything_to_say(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "x.safetensors")])
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 2)
    (tmp_path / "y.safetensors").write_bytes(b"hello")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "y.safetensors")])
    assert result.exit_code == 1
    assert "is damaged or not a safetensors file" in result.stderr


def test_inspecting_numbers_that_are_none(tmp_path):
    torch.manual_seed(0)
    layer = tensorbed.Embedding(3000, 16, tensorbed.LowRank(rank=4))
    with torch.no_grad():
        layer.u[7, 0] = torch.nan
    path = tmp_path / "layer.safetensors"
    tensorbed.save(layer, path)
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0, result.output
    assert "(alone) holds NaN or infinite numbers" in result.output
    (found,) = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).output)["layers"]
    assert (found["finite"], found["std"], found["spectrum"]) == (False, None, [])


@pytest.mark.parametrize("row", [0, 49_999])
def test_one_number_of_a_large_dense_table_is_seen(row):
    words = torch.nn.Embedding(50_000, 2)
    with torch.no_grad():
        words.weight[row, 1] = torch.inf
    found = inspect(torch.nn.ModuleDict({"words": words}))
    assert found.remarks() == ["words holds NaN or infinite numbers; no format can be fitted to it."]
    with torch.no_grad():
        words.weight[row, 1] = 0
    assert "holds" not in str(inspect(torch.nn.ModuleDict({"words": words})).remarks())


def test_equal_sizes_are_tables_of_their_own():
    found = json.loads(CliRunner().invoke(app, ["plan", *["1000x16"] * 3, "--ratio", "2", "--json"]).output)
    assert list(found["tables"]) == ["1000x16", "1000x16 (2)", "1000x16 (3)"]
    assert found["allowed"] == 3 * 1000 * 16 * 4 / 2


def test_errors_of_torch_are_told_in_a_line(monkeypatch):
    def fail(what):
        raise RuntimeError("not enough\n memory")

    monkeypatch.setattr("tensorbed.cli.commands.look_into", fail)
    result = CliRunner().invoke(app, ["inspect", "x.safetensors"])
    assert (result.exit_code, result.stderr) == (1, "tensorbed: not enough memory\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("plan", "12by3", "--ratio", "2"), 2, "'12by3' is neither a table nor a model"),
        (("plan", "12x3"), 2, "give a --ratio or a --budget"),
        (("plan", "12x3", "--ratio", "2", "--budget", "1MB"), 2, "not both"),
        (("plan", "0x3", "--ratio", "2"), 1, "rows of 0x3=0"),
        (("plan", "12x3", "--ratio", "many"), 2, "ratio"),
        (("plan", "99999999999999999999999x16", "--ratio", "2"), 1, "are more than a table can have"),
        (("plan", "12x3", "--ratio", "2", "--min-rows", "2000"), 2, "--min-rows and --skip are for a model"),
        (("plan", "12x3", "--ratio", "2", "--skip", "12*"), 2, "--min-rows and --skip are for a model"),
        (("inspect", "nowhere.safetensors"), 1, "there is no file nowhere.safetensors"),
        (("inspect",), 2, "Missing argument"),
        (("compact",), 2, "No such command"),
    ],
)
def test_wrong_usage_is_told_on_standard_error(arguments, code, said):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_process_ends_with_the_code_of_wrong_usage():
    result = invoke("plan", "12x3")
    assert (result.returncode, result.stdout) == (2, "")
    assert "give a --ratio or a --budget" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_no_arguments_show_the_help():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "tensorbed compress all-MiniLM-L6-v2" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("plan", f"{'9' * 400}x16", "--ratio", "2"), 1, "are more than a table can have"),
        (("plan", f"{'9' * 5000}x16", "--ratio", "2"), 1, "more numbers than one can have"),
        (("plan", f"16x{'9' * 5000}", "--ratio", "2"), 1, "more numbers than one can have"),
        (("plan", "12x3", "--budget", "9" * 400), 2, "budget=9999"),
        (("plan", "12x3", "--budget", "9" * 5000), 2, "budget=9999"),
        (("plan", "12x3", "--budget", f"{'9' * 400}.5GB"), 2, "budget=9999"),
        (("plan", "12x3", "--budget", "0.5B"), 2, "at least 1 byte"),
        (("plan", "12x3", "--ratio", "9" * 400), 2, "ratio=inf"),
        (("plan", "12x3", "--ratio", "2", "--min-rows", "9" * 5000), 2, "min-rows"),
    ],
)
def test_numbers_of_many_digits_are_told_in_a_line(arguments, code, said):
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert said in line
    assert len(line) < 2500


def test_a_budget_is_exact():
    found = CliRunner().invoke(app, ["plan", "1000x16", "--budget", "9007199254740.993kB", "--json"]).output
    assert json.loads(found)["allowed"] == 9_007_199_254_740_993


EVIL = "\x1b]0;title\x07\x1b[2J\x9b1m[red]:dog:\u202e\nwords  Embedding  fine\r\udcff"


def shown_only(text):
    assert not set(text) & set("\x1b\x07\x9b\u202e\r\udcff")
    return "\\x1b]0;title\\x07\\x1b[2J\\x9b1m[red]:dog:\\u202e" in text


def test_names_in_files_do_not_command_the_terminal(tmp_path):
    name = EVIL.removesuffix("\udcff")  # JSON in a file has none
    path = tmp_path / "names.safetensors"
    words = tensorbed.Embedding(300, 16, tensorbed.LowRank(rank=4))
    tensorbed.save(torch.nn.ModuleDict({name: words}), path)
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0
    assert shown_only(result.stdout)
    assert len(result.stdout.splitlines()) == 2
    (layer,) = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)["layers"]
    assert layer["name"] == name
    with torch.no_grad():
        words.u[0] = torch.nan
    tensorbed.save(torch.nn.ModuleDict({name: words}), path)
    assert len(CliRunner().invoke(app, ["inspect", str(path)]).stdout.splitlines()) == 3


def test_messages_do_not_command_the_terminal():
    for arguments, code in ((["inspect", EVIL], 1), (["plan", EVIL, "--ratio", "2"], 2), ([EVIL], 2)):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code
        assert shown_only(result.stderr)
        assert len(result.stderr.splitlines()) == 1


def test_tables_for_people_have_no_markup(capsys):
    entry = Entry((EVIL, "[bold]x[/bold]\\"), 3, 2, "[blue]", 2, 1, 8, 4, error=0.5, same_rows_as=EVIL)
    report = Report((entry,), 2, 1, 8, 4, left={EVIL: "[/]"})
    done = SimpleNamespace(
        report=report, notes=[EVIL], out=EVIL, source="[x]", disk_before=8, disk_after=4, unpacked=None
    )
    terminal.show_compressed(done)
    text = capsys.readouterr().out
    assert shown_only(text.replace("\n", ""))
    for plain in ("[bold]x[/bold]\\", "[blue]", ", [/]", "--against '[x]'"):
        assert plain in text
    found = SimpleNamespace(
        texts=1, cut=0, tokens=1, outputs="x", mean_cosine=1.0, worst_cosine=1.0, worst_text=EVIL, perplexity=None
    )
    terminal.show_verified(SimpleNamespace(**vars(found), notes=["[red]note"]))
    text = capsys.readouterr().out
    assert shown_only(text)
    assert "note: [red]note" in text


def test_characters_that_are_shown_stay():
    for text in ("schön 文字　句\u00a0🐕", "▁▂▃", ""):
        assert printable(text) == text
    assert printable("a\tb\x7f\u2028\u200b") == "a\\tb\\x7f\\u2028\\u200b"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file of Linux")
@pytest.mark.parametrize(
    ("arguments", "without"),
    [(["--version"], ""), (["plan", "1000x16", "--ratio", "2"], ""), (["info"], "sys.modules['typer'] = None; ")],
    ids=str,
)
def test_a_full_disk_under_the_output_is_told_in_a_line(arguments, without):
    code = f"import sys; {without}sys.argv[1:] = {arguments!r}; from tensorbed.__main__ import main; main()"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "tensorbed: standard output cannot be written: No space left on device\n"
