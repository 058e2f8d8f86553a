import pytest

from benchmarks import allocator

KEEPS = "dirty_decay_ms:-1,muzzy_decay_ms:-1"


@pytest.mark.parametrize(
    ("platform", "preloaded", "library", "expected"),
    [
        ("linux", None, "libjemalloc.so.2", {"LD_PRELOAD": "libjemalloc.so.2", "MALLOC_CONF": KEEPS}),
        ("linux", None, None, {}),
        ("linux", "libtcmalloc.so.4", "libjemalloc.so.2", {}),
        ("darwin", None, "libjemalloc.2.dylib", {}),
    ],
)
def test_jemalloc_is_taken_on_linux_where_it_is_and_no_other_was_chosen(
    monkeypatch, platform, preloaded, library, expected
):
    monkeypatch.setattr(allocator.sys, "platform", platform)
    monkeypatch.setattr(allocator, "find_library", {"jemalloc": library}.get)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("MALLOC_CONF", raising=False)
    if preloaded:
        monkeypatch.setenv("LD_PRELOAD", preloaded)
    assert allocator.jemalloc() == expected


def test_an_own_configuration_of_jemalloc_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator, "find_library", {"jemalloc": "libjemalloc.so.2"}.get)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("MALLOC_CONF", "narenas:1")
    assert allocator.jemalloc()["MALLOC_CONF"] == "narenas:1"
