"""Gymnasium's environments with one seat through their ids."""

from __future__ import annotations

import random

import gymnasium
import pytest

from selfplay.cli.main import main
from selfplay.errors import UserError
from selfplay.registry import describe, make_environment

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, about its coming changes


def test_rewards_and_endings_are_the_librarys() -> None:
    for seed in range(10):
        game = make_environment("gym:FrozenLake-v1", {}, seed)
        other = gymnasium.make("FrozenLake-v1", **gymnasium.spec("FrozenLake-v1").kwargs)
        other.reset(seed=random.Random(seed).randrange(2**31))
        rng, total = random.Random(seed), 0.0
        while movers := game.to_move():
            move = rng.choice(list(game.legal_moves("player") or ()))
            _, reward, ended, cut, _ = other.step(("left", "down", "right", "up").index(move))
            total += float(reward)
            assert movers == ("player",)
            game.step({"player": move})
            assert bool(game.to_move()) == (not ended and not cut)
        assert game.outcome().rewards == {"player": total}
        game.close()


def test_the_place_is_in_brackets_and_moves_have_names() -> None:
    game = make_environment("gym:FrozenLake-v1", {"is_slippery": False}, 0)
    assert "[S]FFF" in game.view("player")
    assert game.legal_moves("player") == ["left", "down", "right", "up"]
    game.step({"player": "right"})
    assert "S[F]FF" in game.view("player")
    assert make_environment("gym:Blackjack-v1", {}, 0).view("player").startswith("observation: (")
    assert make_environment("gym:CartPole-v1", {}, 0).legal_moves("player") == ["left", "right"]


def test_the_librarys_time_limit_is_an_ending() -> None:
    game = make_environment("gym:MountainCar-v0", {}, 0)
    while game.to_move():
        game.step({"player": "coast"})
    assert game.outcome().reason == "the library's time limit: total reward -200"


def test_games_that_cannot_be_had() -> None:
    with pytest.raises(UserError, match="Pendulum-v1 has actions Box"):
        describe("gym:Pendulum-v1")
    with pytest.raises(UserError, match="did you mean 'FrozenLake-v1'"):
        make_environment("gym:FrozenLak-v1", {}, 0)


def test_a_librarys_games_are_listed_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "gym:"]) == 0
    assert "gym:FrozenLake-v1" in capsys.readouterr().out
    assert main(["env", "list"]) == 0
    assert "games of other libraries: gym:, openspiel:, pettingzoo:, textarena:" in capsys.readouterr().out
    assert main(["env", "list", "nothing:"]) == 2
