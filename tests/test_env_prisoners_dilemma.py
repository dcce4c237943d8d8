"""The iterated prisoner's dilemma: payoffs, simultaneity, noise, and the well-known strategies."""

from __future__ import annotations

import asyncio
import random

import pytest

from selfplay.agent import Sampling
from selfplay.errors import ConfigError
from selfplay.play import play, sit_down
from selfplay.registry import make_environment
from selfplay.types import Episode, Match, Scalar, SeatAssignment
from selfplay_agents.scripted import STRATEGIES
from selfplay_envs.prisoners_dilemma import PrisonersDilemma
from toy_games import Scripted, play_toy


def game_between(first: str, second: str, seed: int = 0, **params: Scalar) -> Episode:
    seats = tuple(
        SeatAssignment(seat=f"player_{i}", player="scripted", agent="scripted", options={"strategy": s})
        for i, s in enumerate((first, second))
    )
    match = Match(index=0, env="prisoners-dilemma-v0", env_params=params, seed=seed, seats=seats)
    game = make_environment(match.env, params, seed)
    return asyncio.run(play(match.env, game, sit_down(match, None, Sampling()), match, env_source="t"))


@pytest.mark.parametrize(
    ("first", "second", "points"),
    [
        ("tit-for-tat", "defect", "4 to 9"),  # 0 1 1 1 1 against 5 1 1 1 1
        ("tit-for-tat", "grim", "15 to 15"),
        ("cooperate", "defect", "0 to 25"),
        ("defect", "win-stay-lose-shift", "17 to 2"),  # it changes after each 1 and each 0
        ("grim", "defect", "4 to 9"),
    ],
)
def test_known_pairs_over_five_rounds(first: str, second: str, points: str) -> None:
    assert game_between(first, second).reason == f"{points} points in 5 rounds"


def test_swapped_seats_swap_the_result() -> None:
    for first in STRATEGIES["prisoners-dilemma"]:
        a = game_between(first, "defect")
        b = game_between("defect", first)
        if first != "generous":  # draws from its seat's generator
            assert list(a.rewards.values()) == list(reversed(b.rewards.values()))


def test_no_prompt_of_a_round_holds_a_choice_of_that_round() -> None:
    game = PrisonersDilemma(random.Random(0), rounds=4)
    players = {s: Scripted("defect", "cooperate", "defect", "cooperate") for s in game.seats}
    episode = play_toy(game, players)
    for player in players.values():
        for number, decision in enumerate(player.asked):
            assert decision.view.count("you ") == number
    assert [t.round for t in episode.turns] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert episode.info["cooperation"] == 0.5


def test_the_number_of_rounds_is_drawn_and_hidden() -> None:
    lengths = {make_environment("prisoners-dilemma-v0", {"preset": "open-ended"}, s)._rounds for s in range(200)}  # type: ignore[attr-defined]
    assert lengths >= {1, 2, 3, 10}
    assert max(lengths) <= 30
    game = make_environment("prisoners-dilemma-v0", {"preset": "open-ended"}, 3)
    assert "rounds." not in game.rules("player_0").replace("Past rounds", "")
    assert "There are 5 rounds." in PrisonersDilemma(random.Random(0)).rules("player_0")


def test_noise_changes_what_was_played_for_both() -> None:
    game = PrisonersDilemma(random.Random(1), rounds=50, noise=0.25)
    while game.to_move():
        game.step({"player_0": "cooperate", "player_1": "cooperate"})
    assert 10 <= game.transcript().count("defect") <= 40
    assert game.view("player_0").count("you defect") == game.view("player_1").count("other defect")


@pytest.mark.parametrize("params", [{"rounds": 0}, {"noise": 0.6}, {"continuation": 1.5}])
def test_parameters_that_cannot_be_played(params: dict[str, Scalar]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(params))} is"):
        make_environment("prisoners-dilemma-v0", params, 0)


def test_an_unknown_strategy_or_game_is_named() -> None:
    with pytest.raises(ConfigError, match="prisoners-dilemma has no strategy 'tit'; it has tit-for-tat, grim"):
        game_between("tit", "grim")
    match = Match(index=0, env="tictactoe-v0", seed=0, seats=(SeatAssignment(seat="x", player="scripted", agent="s"),))
    with pytest.raises(Exception, match="scripted cannot play 'tictactoe-v0'; it knows"):
        sit_down(match, None, Sampling())


def test_a_seat_that_says_nothing_legal_forfeits() -> None:
    game = PrisonersDilemma(random.Random(0))
    episode = play_toy(game, {"player_0": Scripted("hm"), "player_1": Scripted("defect")})
    assert (episode.ended, episode.rewards) == ("forfeit", {"player_0": 0.0, "player_1": 3.0})
