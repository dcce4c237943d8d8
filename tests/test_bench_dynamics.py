"""Training on a table: games are sampled as they are played, and the losses move policies the way they should."""

from __future__ import annotations

import pytest
import torch

from selfplay.bench import dynamics
from selfplay.config.schema import AlgorithmConfig
from selfplay.evaluation import build_tree
from selfplay.training.table import Setup, all_games, play_and_learn


def test_every_way_of_kuhn_poker_is_there_with_its_probability() -> None:
    """6 deals, 5 ways to go on; uniform play is worth +1/8 to the first seat."""
    tree = build_tree("kuhn-poker-v0", {})
    games = all_games(tree)
    assert games.rewards.shape == (30, 2)
    uniform = torch.full((12, 2), 0.5).log()
    probabilities = games.probabilities([uniform, uniform])
    assert float(probabilities.sum()) == pytest.approx(1.0)
    assert float(probabilities @ games.rewards[:, 0].double()) == pytest.approx(1 / 8)


def test_learning_leaves_uniform_play_behind() -> None:
    tree = build_tree("kuhn-poker-v0", {})
    algorithm = AlgorithmConfig(loss="ppo", epochs=6, kl=0.5, reference="moving", reference_every=20)
    found = play_and_learn(tree, Setup(algorithm=algorithm, steps=16), seed=0)
    assert found.last < 0.6 < 11 / 12
    assert found == play_and_learn(tree, Setup(algorithm=algorithm, steps=16), seed=0)


@pytest.mark.parametrize("setup", [{"past": 2}, {"baseline": False, "staleness": 3, "linear": True}])
def test_other_ways_to_train_run(setup: dict[str, int]) -> None:
    tree = build_tree("kuhn-poker-v0", {})
    found = play_and_learn(tree, Setup(algorithm=AlgorithmConfig(), steps=4, batch=32, **setup), seed=1)  # type: ignore[arg-type]
    assert 0.0 < found.average < 2.0


def test_rows_compare_with_the_first() -> None:
    rows = dynamics.run(quick=True)
    assert [r.name for r in rows] == ["plain", "no_baseline"]
    assert rows[0].ratio is None
    assert rows[1].ratio == pytest.approx(rows[1].value / rows[0].value)
