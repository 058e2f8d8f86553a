import builtins
import json

import pytest
import torch

from benchmarks import figures, overview


def test_init_draws_a_picture_and_its_numbers(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "made" / "init.png"
    assert figures.main(["init", "--out", str(out), "--draws", "1"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    lines = capsys.readouterr().out.splitlines()
    ranks = {int(line.split()[0]): [float(number) for number in line.split()[1:]] for line in lines[1:-1]}
    assert list(ranks) == [1, 2, 4, 8, 16, 32, 64]
    assert all(std == pytest.approx(1, rel=0.05) for std, _, _ in ranks.values())
    assert str(out) in lines[-1]


def test_entries_go_to_a_gaussian_as_the_rank_grows():
    low, high = figures.entries_at_birth(1, draws=1), figures.entries_at_birth(64, draws=1)
    assert high.distance < low.distance / 4
    assert high.excess_kurtosis < low.excess_kurtosis / 4


def test_density_counts_every_entry():
    entries = figures.entries_at_birth(64, draws=2)
    assert entries.density.mean() * 12 == pytest.approx(1, abs=1e-3)


def test_a_seed_fixes_the_draw_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, second = (figures.entries_at_birth(2, draws=1, seed=3) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.density, second.density)
    assert not torch.equal(first.density, figures.entries_at_birth(2, draws=1, seed=4).density)


def test_distance_is_the_largest_gap_between_distribution_functions():
    # One value at the median: the empirical function jumps from 0 to 1 where the normal one is 1/2.
    assert figures.normal_distance(torch.zeros(1)) == pytest.approx(0.5)
    quantiles = torch.special.ndtri((torch.arange(100, dtype=torch.float64) + 0.5) / 100)
    assert figures.normal_distance(quantiles) == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rank"], "invalid choice: 'rank'"),
        ([], "required: figure"),
        (["init", "--out", "init.txt"], "ends in .png or .svg"),
        (["init", "--draws", "0"], "at least one"),
    ],
)
def test_wrong_arguments_say_what_is_right(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        figures.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        figures.main(["init", "--out", str(tmp_path / "init.png"), "--draws", "1"])


def test_overview_is_drawn_for_light_and_dark_pages_and_twice_the_same(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for folder in ("first", "second"):
        assert figures.main(["overview", "--out", str(tmp_path / folder)]) == 0
    assert "overview-dark.svg" in capsys.readouterr().out
    for name in ("overview-light.svg", "overview-dark.svg"):
        drawn = [(tmp_path / folder / name).read_bytes() for folder in ("first", "second")]
        assert drawn[0] == drawn[1]
        assert b"<svg" in drawn[0]


def test_numbers_of_the_readme_are_those_of_the_picture():
    text = (overview.ROOT / "README.md").read_text()
    full, *trains = overview.trained_from_scratch().bars
    assert f"| {full.score:.3f} ± {full.spread:.3f} |" in text
    times = [f"{full.megabytes / bar.megabytes:.0f} times" for bar in trains]
    shown = [f"| {bar.score:.3f} ± {bar.spread:.3f}, train, {told}" for bar, told in zip(trains, times, strict=True)]
    assert any(line in text for line in shown), shown
    hot = next(bar for bar in overview.already_trained().bars if bar.label.startswith("hot rows"))
    assert f"{hot.score:.4f}, hot rows, 7 times" in text


def test_the_settings_with_the_most_seeds_are_shown(tmp_path):
    lines = [
        {
            "dataset": "sst5",
            "row": row,
            "ratio": 2.0,
            "table_parameters": 500_000,
            "test_accuracy": accuracy,
            "settings": {"fingerprint": settings},
        }
        for row in ("full", "TT1", "TT2", "TT3")
        for settings, accuracy in (("often", 0.25), ("once", 0.75), ("often", 0.5))
    ]
    (tmp_path / "sentiment.jsonl").write_text("\n".join(map(json.dumps, lines)))
    full, train, *_ = overview.trained_from_scratch(tmp_path).bars
    assert (full.megabytes, full.score, full.spread) == (2.0, 0.375, pytest.approx(0.25 / 2**0.5))
    assert train.label == "tensor train, 2 times smaller"
