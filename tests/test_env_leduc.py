"""Leduc poker against the values of the literature, OpenSpiel's game, and its equilibrium table."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pyspiel
import pytest

from game_tree import Deals, after, nash_conv, uniform, values
from selfplay.errors import ConfigError
from selfplay.evaluation import build_tree, solve
from selfplay.registry import make_environment
from selfplay_agents.equilibrium import leduc_probabilities
from selfplay_envs.leduc_poker import RANKS, LeducPoker
from toy_games import Scripted, play_toy

LETTERS = {"fold": 0, "check": 1, "call": 1, "raise": 2}


def dealt(cards: tuple[str, ...]) -> LeducPoker:
    game = LeducPoker(random.Random(0))
    game._cards = list(cards)
    return game


def deals() -> Deals:
    """Every deal of ranks with its probability."""
    counts = Counter(itertools.permutations(RANKS * 2, 3))
    total = sum(counts.values())
    return [(n / total, dealt(cards)) for cards, n in counts.items()]


def test_uniform_play_has_the_published_values() -> None:
    assert values(deals(), uniform)["player_0"] == pytest.approx(-0.078125, abs=1e-9)
    assert nash_conv(deals(), uniform) == pytest.approx(4.747222, abs=1e-6)


def test_the_equilibrium_table_is_one() -> None:
    def table(seat, view, legal):  # type: ignore[no-untyped-def]
        return leduc_probabilities(view)

    assert nash_conv(deals(), table) < 0.01
    assert values(deals(), table)["player_0"] == pytest.approx(-0.0856, abs=2e-3)


def test_every_situation_has_its_probabilities() -> None:
    views = set()

    def walk(game: LeducPoker) -> None:
        for seat in game.to_move():
            view, legal = game.view(seat), game.legal_moves(seat)
            if view not in views:
                views.add(view)
                probabilities = leduc_probabilities(view)
                assert set(probabilities) == set(legal)
                assert sum(probabilities.values()) == pytest.approx(1.0, abs=1e-3)
            for move in legal:
                walk(after(game, seat, move))  # type: ignore[arg-type]

    for _, game in deals():
        walk(game)  # type: ignore[arg-type]
    assert len(views) == 288  # 936 when suits are told apart


def test_the_short_wording_is_the_same_game_and_its_equilibrium_player_knows_it() -> None:
    tree = build_tree("leduc-poker-v0", {"wording": "short"})
    rows = [leduc_probabilities(state.decision.view) for state in tree.states]
    assert len(rows) == 288
    policy = [
        [row[move] / sum(row.values()) for move in state.moves] for row, state in zip(rows, tree.states, strict=True)
    ]
    assert solve(tree, policy).nash_conv < 0.01


def test_a_wording_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="wording is 'long'; it must be plain or short"):
        make_environment("leduc-poker-v0", {"wording": "long"}, 0)


def test_move_for_move_as_openspiel() -> None:
    """Random games: same seat to move, same legal moves, same returns."""
    theirs = pyspiel.load_game("leduc_poker")
    rng = random.Random(0)
    endings = set()
    for _ in range(300):
        deck = rng.sample(range(6), 3)
        mine, state = dealt(tuple(RANKS[c // 2] for c in deck)), theirs.new_initial_state()
        cards = iter(deck)
        while True:
            while state.is_chance_node():
                state.apply_action(next(cards))
            if state.is_terminal():
                break
            (seat,) = mine.to_move()
            assert seat == f"player_{state.current_player()}"
            legal = mine.legal_moves(seat)
            assert sorted(LETTERS[m] for m in legal) == state.legal_actions()
            move = rng.choice(list(legal))
            mine.step({seat: move})
            state.apply_action(LETTERS[move])
        outcome = mine.outcome()
        assert mine.to_move() == ()
        assert list(outcome.rewards.values()) == state.returns()
        endings.add(outcome.reason.split(":")[0])
    assert endings == {"player_0 folded", "player_1 folded", "showdown"}


def test_the_other_seats_card_is_not_shown() -> None:
    for other in "JQ":
        game = dealt(("K", other, "Q"))
        game.step({"player_0": "check"})
        game.step({"player_1": "check"})
        assert game.view("player_0") == (
            "Your card: K. Public card: Q. Round 1: check, check. Round 2: none. You paid 1, the other 1. Choose: check, raise."
        )
    assert "Q" not in dealt(("K", "J", "Q")).view("player_0").split("Choose")[0]


def test_a_forfeit_costs_the_most_that_can_be_lost() -> None:
    episode = play_toy(LeducPoker(random.Random(1)), {"player_0": Scripted("rubbish"), "player_1": Scripted("check")})
    assert (episode.ended, episode.rewards) == ("forfeit", {"player_0": -13.0, "player_1": 13.0})
