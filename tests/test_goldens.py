"""What was computed and stored before stays what it was: values of every sample, files and folders of every kind."""

import json
from pathlib import Path

import pytest
from golden_values import computed, machine
from safetensors.torch import load_file
from samples import SAMPLES
from torch import nn

import tensorbed as tb
from tensorbed.testing import Sample

GOLDENS = Path(__file__).parent / "goldens"

SINGLE = 2e-5  # relative, what single precision and another order of sums may differ by
STORED = [(folder.parent.name, folder.name) for folder in sorted(GOLDENS.glob("*/*/"))]
GOLDEN = json.loads((GOLDENS / "start" / "values.json").read_text())


def states(sample):
    """Its tensors of before, where they are kept."""
    tensors = load_file(GOLDENS / "start" / "states.safetensors")
    return {name.split("/")[1]: tensor for name, tensor in tensors.items() if name.startswith(f"{sample}/")}


def close(made, expected):
    return pytest.approx(expected, rel=SINGLE, abs=SINGLE) == made


# Those that are no sample of the conformance suite any more.
FORMER = [Sample(tb.StraightThrough(bits=4), 500, 48), Sample(tb.StraightThrough(bits=8, group=4), 31, 6)]
KEPT = [s for samples in (*SAMPLES.values(), FORMER) for s in samples if str(s) in GOLDEN["samples"]]


def test_every_golden_is_compared():
    assert {str(sample) for sample in KEPT} == set(GOLDEN["samples"])


@pytest.mark.parametrize("sample", KEPT, ids=str)
def test_values_are_those_of_the_start(sample):
    expected, state = GOLDEN["samples"][str(sample)], states(sample)
    made = computed(sample, state)
    if GOLDEN["machine"] == machine() or state:
        assert made["draw"] == expected["draw"]
    assert made.keys() == expected.keys()
    assert close(made["rows"], expected["rows"])
    assert close(made["bags"], expected["bags"])
    assert close(made["loss"], expected["loss"])
    assert close(made["topk"]["scores"], expected["topk"]["scores"])
    assert made["topk"]["classes"] == expected["topk"]["classes"]
    for name in ["drawn", *(name for name in expected if name.startswith("gradients"))]:
        assert made[name].keys() == expected[name].keys()
        for tensor, golden in expected[name].items():
            assert close(made[name][tensor], golden), f"{name}: {tensor}"


@pytest.mark.parametrize(("folder", "kind"), STORED, ids=str)
@pytest.mark.filterwarnings("ignore:.*has no checksums")
def test_files_of_before_are_read(folder, kind):
    from golden_files import COLS, ROWS, outputs

    expected = json.loads((GOLDENS / folder / "outputs.json").read_text())[kind]
    embedding, head = nn.Embedding(ROWS, COLS), nn.Linear(COLS, ROWS, bias=False)
    head.weight = embedding.weight
    plain = nn.ModuleDict({"embedding": embedding, "head": head, "bag": nn.EmbeddingBag(ROWS, COLS)})
    model = tb.load(GOLDENS / folder / f"{kind}.safetensors", into=plain)
    assert close(outputs(model), expected)
    assert model["head"].is_tied


@pytest.mark.parametrize(("folder", "kind"), STORED, ids=str)
@pytest.mark.filterwarnings("ignore:.*has no checksums")
def test_folders_of_before_are_read(folder, kind):
    transformers = pytest.importorskip("transformers")
    from golden_files import hidden_states

    import tensorbed.integrations.transformers  # noqa: F401

    place = GOLDENS / folder / kind
    name = json.loads((place / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(place)
    expected = json.loads((GOLDENS / folder / "outputs.json").read_text())[f"{kind}/"]
    assert close(hidden_states(model.eval()), expected)
