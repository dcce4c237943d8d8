"""The learning benchmarks: their settings are those of the configs, and their figures are what they say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from selfplay.bench import learn_chat, learn_kuhn
from selfplay.bench.learning import Evaluation, outcome, row
from selfplay.config import load_config
from selfplay.errors import RunError

CONFIGS = Path(__file__).parent.parent / "configs"


def test_a_benchmark_runs_what_the_config_says() -> None:
    assert load_config(None, learn_chat.SETTINGS) == load_config(CONFIGS / "kuhn-smollm2.toml")


def test_the_kuhn_benchmark_is_the_config_going_on() -> None:
    """The learning rate falls over the config's steps, so three times as many are the same run and more of it."""
    config = load_config(CONFIGS / "kuhn.toml")
    assert load_config(None, learn_kuhn.SETTINGS) == load_config(
        CONFIGS / "kuhn.toml", [f"train.steps={3 * config.train.steps}"]
    )
    assert config.train.decay_steps == config.train.steps
    assert config.train.steps * config.train.batch <= learn_kuhn.WITHIN


def evaluation(step: int, nash_conv: float, legal: float = 1.0) -> Evaluation:
    figures = {"nash_conv": nash_conv, "average_nash_conv": nash_conv / 2, "legal_mass": legal}
    return Evaluation(step=step, games=100 * step, elapsed_s=float(step), figures=figures, illegal_share=0.0)


def test_the_last_iterate_is_a_median_of_the_last_five_within_the_games() -> None:
    """Steps 1 to 9 with NashConv .9 … .1; within 700 games the last five are .7, .6, .5, .4, .3."""
    found = outcome([evaluation(s, 1 - s / 10, 0.9 + s / 100) for s in range(1, 10)], 700)
    assert (found.games, found.elapsed_s) == (700, 7.0)
    assert found.last == pytest.approx(0.5)
    assert found.average == pytest.approx(0.15)
    assert found.legal == pytest.approx(0.93)


def test_no_evaluation_in_time_is_an_error() -> None:
    with pytest.raises(RunError, match=r"no evaluation within 50 games: lower eval\.every"):
        outcome([evaluation(1, 0.9)], 50)


def test_a_row_shows_the_worst_seed() -> None:
    found = row("x", [0.1, 0.3, 0.2], "chips", (0, 1, 2), "what")
    assert (found.value, found.repeats) == (0.3, 3)
    assert "mean 0.200, each 0.100, 0.300, 0.200" in found.reference
    assert row("x", [0.1, 0.3, 0.2], "share", (0, 1, 2), "what", best=True).value == 0.1
    msgspec.json.encode(found)


@pytest.mark.engine
def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {r.name: r for r in learn_kuhn.run(quick=True)}
    assert set(rows) == {
        f"{name}{suffix}" for name in ("average_nash_conv", "last_nash_conv", "legal_mass") for suffix in ("", "_3x")
    }
    assert 0.0 < rows["average_nash_conv_3x"].value < 2.0
    assert 0.0 < rows["legal_mass"].value <= 1.0
    assert "seed 0: step 6" in capsys.readouterr().err
