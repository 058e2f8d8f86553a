"""Where there are no kernels for GPUs the library goes on without, and whoever asks for them by name learns why."""

import json
import re
import subprocess
import sys

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import triton
from tensorbed.info import info

NO_TRITON = 'triton is not installed: pip install "triton>=3.6"'


def refused(monkeypatch, reason=""):
    """What is said where these are the facts of the install."""
    monkeypatch.setattr(triton, "reason", reason)
    monkeypatch.setattr(triton, "interpreted", False)
    with pytest.raises(ValueError, match=r'^impl=.triton.*choose one of "auto", "reference", "torch"') as caught:
        tb.Embedding(60, 8, tb.TensorTrain(rank=2), impl="triton")
    said = str(info()).splitlines()[-1]
    layer = tb.Embedding(60, 8, tb.TensorTrain(rank=2))
    assert layer.explain(torch.tensor([3])).path != "triton"
    assert layer(torch.tensor([3])).shape == (1, 8)
    why = triton.absent()
    assert why in str(caught.value)
    assert said == f"GPU kernels: none ({why})"
    return why


def test_without_triton(monkeypatch):
    assert refused(monkeypatch, NO_TRITON) == NO_TRITON


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("", NO_TRITON),
        ("3.1.0", 'triton 3.1.0 is too old: pip install --upgrade "triton>=3.6"'),
        ("3.9.0", ""),
        ("4.0", ""),
        ("9rc1", ""),
        ("3.6rc1", ""),
        ("3", 'triton 3 is too old: pip install --upgrade "triton>=3.6"'),
        ("unknown", 'triton is of an unknown version: pip install --upgrade "triton>=3.6"'),
    ],
)
def test_versions(monkeypatch, version, why):
    monkeypatch.setattr(triton, "version", lambda: version)
    assert triton.not_installed() == why


def test_a_triton_that_no_package_brought_is_of_unknown_version(monkeypatch):
    monkeypatch.setattr(triton, "_PACKAGES", ("a-package-that-nobody-has",))
    monkeypatch.setattr(triton, "find_spec", lambda name: object())
    assert triton.version() == "unknown"
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    assert triton.version() == ""


def test_the_versions_that_messages_and_the_extra_name_are_one():
    least = ".".join(map(str, triton.LEAST_VERSION))
    assert re.findall(r"triton>=([\d.]+)", NO_TRITON) == [least]


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in refused(monkeypatch)


def test_with_a_device_that_is_too_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GTX 1080")
    assert refused(monkeypatch) == (
        'GTX 1080 has compute capability 6.1, Triton needs 7.0 or later: use impl="torch" on it, or another GPU'
    )


def test_tensors_that_are_elsewhere(monkeypatch):
    monkeypatch.setattr(triton, "reason", "")
    monkeypatch.setattr(triton, "interpreted", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    layer = tb.Embedding(60, 8, tb.TensorTrain(rank=2), impl="triton")
    with pytest.raises(ValueError, match="the tensors are on cpu: move the layer and the indices to a GPU"):
        layer(torch.tensor([3]))


def test_auto_takes_the_kernels_only_once_they_were_measured(monkeypatch):
    """No result of ``make gpu`` is in the repository: this test is to be changed with the commit that brings one."""
    assert not triton.measured
    monkeypatch.setattr(triton, "reason", "")
    monkeypatch.setattr(triton, "absent", lambda device=None: "")
    backend, cuda = tb.dispatch.BACKENDS["triton"], torch.device("cuda")
    making = tb.Embedding(60, 8, tb.TensorTrain(rank=2)).structure.making
    assert backend.knows(making)
    assert not backend.knows(making, cuda)
    monkeypatch.setattr(triton, "measured", True)
    assert backend.knows(making, cuda)
    assert not backend.knows(making, torch.device("cpu"))


RAN = {"tests": 900, "failures": 0, "errors": 0, "skipped": 3}


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ({"capability": [8, 0], "tests": RAN}, True),
        ({"capability": [8, 0], "tests": RAN | {"failures": 1}}, False),
        ({"capability": [8, 0], "tests": RAN | {"errors": 1}}, False),
        ({"capability": [8, 0], "tests": RAN | {"skipped": 900}}, False),
        ({"capability": [8, 0], "tests": None}, False),
        ({"capability": None, "tests": RAN}, False),
        ([], False),
    ],
    ids=["passed", "failures", "errors", "all skipped", "no tests", "no GPU", "another file"],
)
def test_a_result_counts_where_tests_ran_on_a_gpu_and_none_failed(told, counts, tmp_path):
    result = tmp_path / "measured.json"
    assert not triton.passed(result)
    result.write_text(json.dumps(told)[:-1])
    assert not triton.passed(result)
    result.write_text(json.dumps(told))
    assert triton.passed(result) == counts


def test_importing_the_library_imports_no_triton():
    code = "import sys, tensorbed, tensorbed.info as i; i.info(); print('triton' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == "False\n"
