"""What only shows in processes of their own: kills, Ctrl-C, several processes, exit codes."""

import random
import shutil
import signal
import subprocess

import pytest
from laboratory import (
    ENVIRONMENT,
    PATIENCE,
    ROOT,
    TORCHRUN,
    assert_two_processes_trained_as_one,
    command,
    losses,
    needs_gloo,
    results,
    run,
)

pytest.importorskip("accelerate")

from experiments.lab.rows import configured
from experiments.lab.task import find
from experiments.lab.training import How, train


def arguments(row, data, out, *more):
    return ["source-code", "--config", row, "--data", data, "--out", out, "--results", out, *more]


def alone(config, data, folder):
    """The same run in this process, with nothing in its way."""
    task = find("source_code")
    return train(task, configured(task, str(config), {}), How(data=data, out=folder / "whole"))


def stopped(words, kind, epochs):
    """Start a run, wait until it has told of so many epochs, and send it a signal."""
    process = subprocess.Popen(
        words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    told = (line for line in process.stdout if " step " in line)  # backends of some versions of torch speak too
    for _ in range(epochs):
        next(told)
    process.send_signal(kind)
    _, told = process.communicate(timeout=PATIENCE)
    return process.returncode, told


def test_a_run_killed_at_any_step_or_stopped_by_ctrl_c_ends_as_if_nothing_had_happened(row, sources, tmp_path):
    config = row(steps=300, validations=60, format="tr")
    whole = alone(config, sources, tmp_path)
    words = command(*arguments(config, sources, tmp_path / "cut", "--checkpoint-steps", "1"))
    code, _ = stopped(words, signal.SIGKILL, random.randint(1, 8))
    assert code == -signal.SIGKILL
    code, told = stopped([*words, "--resume"], signal.SIGINT, 1)
    assert code == 130
    assert "stopped after step" in told
    assert "--resume goes on" in told
    code, _, told = run(*arguments(config, sources, tmp_path / "cut", "--resume"))
    assert code == 0, told
    assert losses(results(tmp_path / "cut")[0]) == losses(whole)


@needs_gloo
@pytest.mark.parametrize("more", [("--accumulate", "2"), ("--fsdp", "--accumulate", "2")], ids=["ddp", "fsdp"])
def test_two_processes_train_what_one_does_and_go_on_after_a_kill(row, sources, tmp_path, more):
    config = row(steps=36, validations=12, clip=1.0)
    one = alone(config, sources, tmp_path)
    words = arguments(config, sources, tmp_path / "two", "--checkpoint-steps", "1", *more)
    code, _ = stopped([*TORCHRUN, *command(*words)[1:]], signal.SIGTERM, 2)
    assert code != 0
    code, _, told = run(*words, "--resume", before=TORCHRUN)
    assert code == 0, told
    (two,) = results(tmp_path / "two")
    assert_two_processes_trained_as_one(two, one, rel=1e-4)


@needs_gloo
def test_processes_that_have_different_data_are_refused(row, sources, tmp_path):
    """As machines may, each of which has its own copy."""
    for rank in range(2):
        shutil.copytree(sources, tmp_path / f"copy{rank}")
    (tmp_path / "copy1" / "more.py").write_text("different = 1\n" * 500)
    words = [*command(*arguments(row(), tmp_path / "copy", tmp_path / "out"))]
    spoken = " ".join(words).replace(f"{tmp_path}/copy", f"{tmp_path}/copy$RANK")
    done = subprocess.run(
        [*TORCHRUN, "--no-python", "sh", "-c", spoken],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode != 0
    assert "process 1 has other data than process 0" in done.stderr
    assert not (tmp_path / "out" / "source_code.jsonl").exists()


def test_a_second_ctrl_c_ends_at_once_and_tells_so(row, sources, tmp_path):
    words = command(*arguments(row(steps=50_000, validations=5000), sources, tmp_path / "cut"))
    process = subprocess.Popen(
        words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)  # both come before it looks
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "stopped" in told


def test_a_run_goes_on_when_nobody_reads_any_more(row, sources, tmp_path):
    words = command(*arguments(row(), sources, tmp_path / "alone"))
    process = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(PATIENCE) == 0, process.stderr.read()
    assert len(results(tmp_path / "alone")) == 1
    process.stderr.close()


def test_errors_are_one_sentence_and_an_exit_code():
    code, _, told = run("sentiment", "--config", "sst5-tt9")
    assert (code, told.count("\n")) == (2, 1)
    assert 'unknown row "sst5-tt9": did you mean "sst5-tt' in told
    code, _, told = run("sentiment", "--rnk", "3")
    assert code == 2
    assert "--rank" in told
