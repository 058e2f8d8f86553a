"""Progress: silent when quick, a bar that is drawn and wiped when slow, lines where there is no terminal."""

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


def test_without_a_terminal_there_is_a_line_every_ten_seconds(monkeypatch, clock):
    clock(0.4)
    assert run(monkeypatch, io.StringIO()) == ""
    clock(1.0)
    # The clock is looked at when work begins and at every step: at the tenth step it is ten seconds later.
    assert run(monkeypatch, io.StringIO(), steps=35) == (
        "fitting 10 of 35, 29 s left\nfitting 20 of 35, 17 s left\nfitting 30 of 35, 6 s left\n"
    )


def test_silence_is_counted_over_all_that_is_inside(monkeypatch, clock):
    """Ten tables of three seconds each are not silent for thirty."""
    clock(1.0)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    for name in progress.track(["words", "tags"] * 5, "tables"):
        with progress.about(name):
            assert list(progress.track(range(2), "fitting")) == [0, 1]
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "tables 3 of 10, words, fitting 1 of 2, 44 s left"
    assert all(", fitting" in line or "tables" in line for line in lines)


def test_whatever_it_is_about_has_its_name_in_front(monkeypatch, clock):
    clock(1.0)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.about("model.embed_tokens"), progress.about(""):
        list(progress.track(range(4), "quantising rows"))
    assert "\r\033[Kmodel.embed_tokens, quantising rows  █" in stream.getvalue()
    assert stream.getvalue().endswith("\r\033[K")


def test_the_bar_is_that_of_the_outermost_with_several_steps(monkeypatch, clock):
    """And does not begin again with each of those inside; one table among one is not counted."""
    clock(0.5)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    for _ in progress.track(range(1), "tables"):
        for _ in progress.track(range(3), "formats"):
            list(progress.track(range(5), "parts"))
    drawn = [one for one in stream.getvalue().split("\r\033[K") if one]
    assert len(drawn) > 10
    assert all(one.startswith("formats  ") for one in drawn)
    counts = [one[one.index(" of 3") - 1] for one in drawn]
    assert counts == sorted(counts)
    assert set(counts) == {"0", "1", "2"}
    assert drawn[-1].endswith("parts 5 of 5")


def test_a_bar_has_one_line_of_the_terminal(monkeypatch, clock):
    clock(1.0)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.about("a.very.long.name." * 10):
        list(progress.track(range(9), "fitting"))
    drawn = [one for one in stream.getvalue().split("\r\033[K") if one]
    assert drawn
    assert all(len(one) < 80 for one in drawn)
    assert all("very.long.name., fitting  █" in one for one in drawn[2:])


def test_a_closed_pipe_does_not_stop_the_work(monkeypatch, clock):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    clock(20.0)
    monkeypatch.setattr(sys, "stderr", Closed())
    assert list(progress.track(range(5), "fitting")) == list(range(5))
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress.track(range(5), "fitting")) == list(range(5))


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
