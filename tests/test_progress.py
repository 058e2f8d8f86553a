"""The progress bar: silent when quick or unseen, drawn and wiped when slow."""

import io
import sys

import pytest

from tensorbed import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by the given step at every look."""

    def start(step):
        now = iter(range(10**6))
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(now) * step)

    return start


def run(monkeypatch, stream, steps=20):
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress.track(range(steps), "fitting")) == list(range(steps))
    return stream.getvalue()


def test_quick_work_shows_nothing(monkeypatch, clock):
    clock(0.01)
    assert run(monkeypatch, Terminal()) == ""


def test_no_terminal_shows_nothing(monkeypatch, clock):
    clock(1.0)
    assert run(monkeypatch, io.StringIO()) == ""


def test_slow_work_shows_a_bar_and_wipes_it(monkeypatch, clock):
    clock(0.5)
    shown = run(monkeypatch, Terminal())
    assert "fitting" in shown
    assert "10 of 20" in shown
    assert "s left" in shown
    assert shown.endswith("\r\033[K")


def test_the_bar_is_wiped_when_the_work_fails(monkeypatch, clock):
    clock(1.0)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)

    def fail():
        for step in progress.track(range(10), "fitting"):
            if step == 5:
                raise KeyError(step)

    with pytest.raises(KeyError):
        fail()
    assert stream.getvalue().endswith("\r\033[K")
