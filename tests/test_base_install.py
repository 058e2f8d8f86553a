"""What a base install can do: torch and safetensors with what these need, and nothing else."""

import json
import subprocess
import sys
import textwrap

import tensorbed

# The packages of a fresh environment after "pip install ." (torch's own requirements, and setuptools, among them).
BASE = {
    *("tensorbed", "_tensorbed_editable", "torch", "torchgen", "functorch", "safetensors"),
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing_extensions", "setuptools"),
}

# Others are found by nobody, so that an optional import fails as it does where they are not installed.
ONLY_BASE = f"""
import sys

def is_there(module):
    name = module.partition(".")[0]
    return name in {BASE!r} or name in sys.stdlib_module_names or name.startswith(("_sysconfigdata", "__"))

class Gate:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, module, *where):
        return self.finder.find_spec(module, *where) if is_there(module) else None

sys.meta_path[:] = [Gate(finder) for finder in sys.meta_path]
for module in [module for module in sys.modules if not is_there(module)]:
    del sys.modules[module]
"""


def run(code, *arguments):
    """A program in an interpreter that has the base install alone."""
    program = ONLY_BASE + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_nothing_else_is_there():
    done = run(
        """
        from importlib.util import find_spec

        print([name for name in ("numpy", "typer", "rich", "transformers", "matplotlib", "torch") if find_spec(name)])
        """
    )
    assert done.stdout == "['torch']\n", done.stderr


def test_a_model_is_trained_compressed_saved_and_loaded(tmp_path):
    done = run(
        """
        import torch
        import tensorbed as tb

        def same(one, other):
            return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())

        path = sys.argv[1]
        torch.manual_seed(0)
        index = torch.randint(0, 3000, (4, 7))
        embedding, head = tb.embedding_and_head(3000, 16, tb.TensorTrain(rank=4), tied=True, padding_idx=0)
        model = torch.nn.ModuleDict({"words": embedding, "body": torch.nn.Linear(16, 16), "head": head})
        optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            loss = head.loss(model["body"](embedding(index)), index)
            losses.append(loss.item())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        assert losses[1] < losses[0]
        tb.save(model, path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        after = model["words"](index)
        tb.load(path, into=model)
        assert not torch.equal(model["words"](index), after)

        dense = torch.nn.ModuleDict({"words": torch.nn.Embedding(3000, 16), "head": torch.nn.Linear(16, 3000)})
        for format in (tb.QuantizedRows(bits=4), tb.ProductQuantized(ratio=4), tb.HotRows(), tb.LowRank(ratio=4)):
            small = torch.nn.ModuleDict({name: layer for name, layer in dense.items()})
            assert "words" in str(tb.compress_(small, format))
            tb.save(small, path)
            again = torch.nn.ModuleDict({name: layer for name, layer in dense.items()})
            assert same(small, tb.load(path, into=again))
        assert tb.plan(dense, ratio=4).to_dict()
        layer = tb.TTEmbeddingBag(3000, 16, rank=4, dtype=torch.bfloat16)
        tb.save(layer, path)
        assert same(layer, tb.load(path))
        assert layer.explain(index).to_dict()
        assert "numpy" not in sys.modules
        print("done")
        """,
        str(tmp_path / "model.safetensors"),
    )
    assert done.stdout == "done\n", done.stderr


COMMAND = "import runpy; runpy.run_module('tensorbed', run_name='__main__', alter_sys=True)"


def test_the_command_says_what_is_installed():
    done = run(COMMAND, "info")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"tensorbed: {tensorbed.__version__}\ntorch: ")
    assert "\nkernels: " in done.stdout
    done = run(COMMAND, "info", "--json")
    assert json.loads(done.stdout)["tensorbed"] == tensorbed.__version__


MISSING = (
    'the command tensorbed needs typer and rich for all but info and --version: pip install "typer>=0.15" "rich>=13"'
)


def test_the_command_says_its_version():
    done = run(COMMAND, "--version")
    assert (done.returncode, done.stdout) == (0, f"tensorbed {tensorbed.__version__}\n"), done.stderr


def test_other_commands_say_what_to_install():
    done = run(COMMAND)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == MISSING
    done = run(
        """
        from tensorbed.__main__ import main

        for arguments in (["--help"], ["plan", "267735x512", "--ratio", "50"], ["info", "--yaml"]):
            sys.argv[1:] = arguments
            try:
                main()
            except SystemExit as end:
                print(end.code)
        """
    )
    assert done.stdout.splitlines() == [MISSING] * 3, done.stderr
