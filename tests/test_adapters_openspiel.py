"""OpenSpiel's games through their ids: move for move the library's own."""

from __future__ import annotations

import random
import subprocess
import sys

import pyspiel
import pytest
from tests.patience import PATIENCE_S

from selfplay.errors import ConfigError, UserError
from selfplay.registry import describe, environment_source, make_environment

GAMES = {
    "kuhn_poker": {}, "leduc_poker": {}, "tic_tac_toe": {}, "connect_four": {}, "goofspiel": {"num_cards": 5}, "oshi_zumo": {},
    "liars_dice": {}, "backgammon": {}, "pig": {}, "blotto": {}, "matrix_rps": {}, "hearts": {}, "go": {"board_size": 5},
    "breakthrough": {}, "negotiation": {}, "bargaining": {}, "coop_box_pushing": {}, "phantom_ttt": {}, "hex": {},
    "tiny_hanabi": {}, "first_sealed_auction": {}, "catch": {}, "2048": {}, "nim": {}, "mancala": {}, "oware": {}, "othello": {},
    "checkers": {}, "quoridor": {}, "y": {}, "havannah": {}, "cursor_go": {}, "dark_hex": {}, "dou_dizhu": {}, "euchre": {},
    "gin_rummy": {}, "laser_tag": {}, "lewis_signaling": {}, "pentago": {}, "skat": {}, "solitaire": {},
    "trade_comm": {}, "tiny_bridge_2p": {}, "cliff_walking": {}, "deep_sea": {}, "clobber": {}, "coin_game": {},
}  # fmt: skip
MAX_ROUNDS = 60


def test_at_least_forty_games() -> None:
    assert len(GAMES) >= 40


@pytest.mark.parametrize("name", sorted(GAMES))
def test_legal_moves_and_returns_are_the_librarys(name: str) -> None:
    """The library's own state is led through the same actions: same movers, same legal actions, same returns."""
    rng = random.Random(1)
    for seed in range(3):
        game = make_environment(f"openspiel:{name}", GAMES[name], seed)
        shadow = game.state.clone()  # type: ignore[attr-defined]
        for _ in range(MAX_ROUNDS):
            movers = list(game.to_move())
            if not movers:
                break
            players = [game.seats.index(s) for s in movers]
            simultaneous = shadow.is_simultaneous_node()
            assert simultaneous or players == [shadow.current_player()]
            moves = {}
            for seat, player in zip(movers, players, strict=True):
                numbers = game.moves(seat)  # type: ignore[attr-defined]
                assert list(numbers.values()) == shadow.legal_actions(player)
                assert list(numbers) == list(game.legal_moves(seat) or ())
                moves[seat] = rng.choice(list(numbers))
                assert game.parse(seat, moves[seat]) == moves[seat]
            actions = [game.moves(s)[m] for s, m in moves.items()]  # type: ignore[attr-defined]
            game.step(moves)
            if simultaneous:
                every = dict(zip(players, actions, strict=True))
                shadow.apply_actions([every.get(i, 0) for i in range(len(game.seats))])
            else:
                shadow.apply_action(actions[0])
            _follow_chance(shadow, game.state)  # type: ignore[attr-defined]
            assert shadow.history() == game.state.history()  # type: ignore[attr-defined]
        if not game.to_move():
            assert list(game.outcome().rewards.values()) == shadow.returns()


def _follow_chance(shadow: pyspiel.State, real: pyspiel.State) -> None:
    """Take the chance outcomes that the game drew."""
    history = real.history()
    while shadow.is_chance_node():
        action = history[len(shadow.history())]
        assert action in [a for a, p in shadow.chance_outcomes() if p > 0]
        shadow.apply_action(action)


def test_chance_is_never_asked_and_follows_its_weights() -> None:
    cards = [make_environment("openspiel:kuhn_poker", {}, s).view("player_0")[6] for s in range(600)]
    assert all(abs(cards.count(c) - 200) < 60 for c in "JQK")


def test_simultaneous_moves_are_made_at_once() -> None:
    game = make_environment("openspiel:goofspiel", {"num_cards": 4}, 0)
    assert game.to_move() == ["player_0", "player_1"]
    before = [game.view(s) for s in game.seats]
    first, second = (game.legal_moves(s)[0] for s in game.seats)  # type: ignore[index]
    assert [game.view(s) for s in game.seats] == before
    game.step({"player_0": first, "player_1": second})
    assert game.to_move() == ["player_0", "player_1"]


def test_what_reads_badly_has_words() -> None:
    game = make_environment("openspiel:leduc_poker", {}, 3)
    game.step({"player_0": "call"})
    game.step({"player_1": "raise"})
    view = game.view("player_0")
    assert view.startswith("Your card: ")
    assert "Public card: none. Round 1: call, raise." in view
    assert game.legal_moves("player_0") == ["fold", "call", "raise"]
    assert (
        make_environment("openspiel:tic_tac_toe", {}, 0).view("player_0").startswith("1 2 3\n4 5 6\n7 8 9\nYou are x.")
    )


def test_parameters_are_the_librarys() -> None:
    assert make_environment("openspiel:kuhn_poker", {"players": 3}, 0).seats == ("player_0", "player_1", "player_2")
    assert describe("openspiel:goofspiel").parameters["num_cards"] == 13
    with pytest.raises(ConfigError, match="no parameter 'plaers'; did you mean 'players'"):
        make_environment("openspiel:kuhn_poker", {"plaers": 3}, 0)
    with pytest.raises(ConfigError, match="OpenSpiel refuses these parameters"):
        make_environment("openspiel:kuhn_poker", {"players": 50}, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [("leduc", "did you mean 'leduc_poker'"), ("mfg_crowd_modelling", "mean-field games have no seats")],
)
def test_games_that_cannot_be_had(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_environment(f"openspiel:{name}", {}, 0)


def test_the_library_is_in_the_provenance() -> None:
    assert environment_source("openspiel:kuhn_poker").split()[0] == "open_spiel"
    assert environment_source("openspiel:kuhn_poker").split()[2].startswith("sha256:")


def test_adapters_load_no_heavy_library() -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from selfplay.registry import make_environment\n"
        "for e in ('openspiel:kuhn_poker', 'pettingzoo:tictactoe_v3', 'textarena:Nim-v0', 'gym:FrozenLake-v1'):\n"
        "    make_environment(e, {}, 0)\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
