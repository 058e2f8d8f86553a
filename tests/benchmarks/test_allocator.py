import pytest

from benchmarks import allocator


@pytest.mark.parametrize(
    ("platform", "preloaded", "library", "expected"),
    [
        ("linux", None, "libjemalloc.so.2", {"LD_PRELOAD": "libjemalloc.so.2"}),
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
    if preloaded:
        monkeypatch.setenv("LD_PRELOAD", preloaded)
    assert allocator.jemalloc() == expected
