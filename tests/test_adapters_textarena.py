"""TextArena's games through their ids: its known faults are found by the check, and contained by the adapter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from selfplay.check.determinism import global_random, interleaved, same_again
from selfplay.check.driver import Make, RandomGame
from selfplay.check.report import Faults
from selfplay.errors import ConfigError, UserError
from selfplay.registry import make_environment

NAIVE = str(Path(__file__).with_name("naive_textarena.py"))


def games(env_id: str) -> Make:
    return lambda number: RandomGame(env_id, {}, number)


def play(env_id: str, number: int) -> list[str]:
    """The record of a random game."""
    return RandomGame(env_id, {}, number).to_end().lines


def test_the_known_faults_are_found_in_naive_use() -> None:
    # What was told before a reset is told again after it, and the seed goes into the process's own generator.
    assert "played again, the same seed differs" in same_again(games(NAIVE), 2, Faults(NAIVE, {})).text
    assert "the module random" in global_random(games(NAIVE), 2, Faults(NAIVE, {})).text


def test_they_are_contained() -> None:
    make, faults = games("textarena:TicTacToe-v0"), Faults("", {})
    assert [check(make, 4, faults).status for check in (same_again, interleaved)] == ["ok", "ok"]
    assert global_random(make, 2, faults).text == "draws from the module-level generator, as declared: contained"


def test_the_processs_own_generator_is_left_alone() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    play("textarena:LiarsDice-v0", 3)
    assert random.random() == expected


@pytest.mark.parametrize("name", ["Nim-v0", "LiarsDice-v0", "IteratedPrisonersDilemma-v0", "SimpleNegotiation-v0"])
def test_the_same_seed_is_the_same_game(name: str) -> None:
    assert play(f"textarena:{name}", 7) == play(f"textarena:{name}", 7)


def test_an_illegal_move_is_told_the_first_time_and_ends_the_game_the_second() -> None:
    game = make_environment("textarena:Nim-v0", {}, 0)
    game.step({"player_0": "nonsense"})
    assert game.to_move() == ("player_0",)
    assert "invalid move. Reason: No valid move format" in game.view("player_0")
    game.step({"player_0": "nonsense"})
    assert game.to_move() == ()
    outcome = game.outcome()
    assert outcome.rewards == {"player_0": -1.0, "player_1": 1.0}
    assert outcome.winners == ("player_1",)
    assert outcome.info == {"invalid_move": True}


def test_a_whole_game_of_nim() -> None:
    game = make_environment("textarena:Nim-v0", {}, 0)
    for seat, move in (("player_0", "[0 3]"), ("player_1", "1 4"), ("player_0", "[2 5]")):
        assert game.to_move() == (seat,)
        game.step({seat: move})  # brackets are put where the library's own wrapper would
    assert game.outcome().winners == ("player_0",)


def test_only_what_is_new() -> None:
    full, new = (make_environment("textarena:Nim-v0", {"history": h}, 0) for h in ("full", "new"))
    for game in (full, new):
        game.step({"player_0": "[0 1]"})
        game.step({"player_1": "[0 1]"})
    assert full.view("player_0").count("Current Pile") == 3
    assert new.view("player_0").count("Current Pile") == 2
    assert full.rules("player_0").startswith("Welcome to Nim, Player 0!")


def test_players() -> None:
    assert len(make_environment("textarena:LiarsDice-v0", {"players": 4}, 0).seats) == 4
    assert make_environment("textarena:ThreePlayerIPD-v0", {}, 0).seats == ("player_0", "player_1", "player_2")
    with pytest.raises(ConfigError, match="players is 9; the game says"):
        make_environment("textarena:Nim-v0", {"players": 9}, 0)
    with pytest.raises(ConfigError, match="history is 'all'; it must be full or new"):
        make_environment("textarena:Nim-v0", {"history": "all"}, 0)


def test_a_game_with_a_jury_needs_no_network() -> None:
    game = make_environment("textarena:Debate-v0", {}, 0)
    num = 0
    while movers := game.to_move():
        game.step({movers[0]: "We should, for three reasons."})
        num += 1
    assert num >= 4
    assert game.outcome().winners == ()


def test_games_that_cannot_be_had() -> None:
    with pytest.raises(UserError, match="did you mean 'Nim-v0'"):
        make_environment("textarena:Nimm-v0", {}, 0)
