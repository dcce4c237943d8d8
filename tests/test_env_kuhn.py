"""Kuhn poker against the values of the literature, by walking our own game's tree."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from game_tree import Deals, always, best_response_value, nash_conv, uniform, values
from selfplay.errors import ConfigError
from selfplay.evaluation import build_tree, solve
from selfplay.registry import make_environment
from selfplay_agents.equilibrium import _read_kuhn, bet_probability
from selfplay_envs.kuhn_poker import RANKS, KuhnPoker
from toy_games import Scripted, play_toy


def deals(players: int = 2) -> Deals:
    """Every deal with its probability."""
    cards = list(itertools.permutations(RANKS[-(players + 1) :], players))
    out = []
    for hand in cards:
        game = KuhnPoker(random.Random(0), players=players)
        game._cards = list(hand)
        out.append((1 / len(cards), game))
    return out


def equilibrium(alpha: float):  # type: ignore[no-untyped-def]
    def policy(seat, view, legal):  # type: ignore[no-untyped-def]
        history = view.split("History: ")[1].split(".")[0]
        card = view.split("Card: ")[1][0]
        p = bet_probability(() if history == "none" else tuple(history.split(", ")), card, alpha)
        return {"pass": 1 - p, "bet": p}

    return policy


def test_uniform_play() -> None:
    assert nash_conv(deals(), uniform) == pytest.approx(11 / 12, abs=1e-12)
    assert values(deals(), uniform)["player_0"] == pytest.approx(1 / 8, abs=1e-12)


@pytest.mark.parametrize(("move", "expected"), [("bet", 2 / 3), ("pass", 2.0)])
def test_constant_play(move: str, expected: float) -> None:
    assert nash_conv(deals(), always(move)) == pytest.approx(expected, abs=1e-12)


def test_the_short_wording_is_the_same_game_and_its_equilibrium_player_knows_it() -> None:
    tree, plain = build_tree("kuhn-poker-v0", {"wording": "short"}), build_tree("kuhn-poker-v0", {})
    assert {s.decision.view for s in tree.states} == {f"{c}{h}" for c in "JQK" for h in ("", " p", " b", " pb")}
    policy = [kuhn_row(s.decision.view) for s in tree.states]
    assert solve(tree, policy).nash_conv == pytest.approx(0.0, abs=1e-9)
    assert solve(plain, [kuhn_row(s.decision.view) for s in plain.states]).nash_conv == pytest.approx(0.0, abs=1e-9)


def kuhn_row(view: str) -> list[float]:
    found = _read_kuhn(view)
    assert found is not None
    card, history = found
    p = bet_probability(history, card, 0.2)
    return [1.0 - p, p]


def test_a_wording_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="wording is 'long'; it must be plain or short"):
        make_environment("kuhn-poker-v0", {"wording": "long"}, 0)


def test_three_players_uniform() -> None:
    assert nash_conv(deals(3), uniform) == pytest.approx(2.0625, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_the_equilibrium_player_is_one(alpha: float) -> None:
    assert nash_conv(deals(), equilibrium(alpha)) == pytest.approx(0.0, abs=1e-12)
    assert values(deals(), equilibrium(alpha))["player_0"] == pytest.approx(-1 / 18, abs=1e-12)
    assert best_response_value(deals(), equilibrium(alpha), "player_1") == pytest.approx(1 / 18, abs=1e-12)


def test_there_are_twelve_information_states() -> None:
    views = set()

    def walk(game: KuhnPoker) -> None:
        from game_tree import after

        for seat in game.to_move():
            views.add((seat, game.view(seat)))
            for move in game.legal_moves(seat):
                walk(after(game, seat, move))  # type: ignore[arg-type]

    for _, game in deals():
        walk(game)  # type: ignore[arg-type]
    assert len(views) == 12


@pytest.mark.parametrize(
    ("cards", "moves", "rewards"),
    [
        ("KJ", "pp", (1, -1)), ("JK", "pp", (-1, 1)), ("JK", "bp", (1, -1)), ("KJ", "bb", (2, -2)), ("JQ", "bb", (-2, 2)),
        ("KQ", "pbp", (-1, 1)), ("KQ", "pbb", (2, -2)), ("JQ", "pbb", (-2, 2)),
        ("TJQ", "ppp", (-1, -1, 2)), ("KJQ", "bpp", (2, -1, -1)), ("QJT", "pbpb", (3, -2, -1)), ("QKT", "bbb", (-2, 4, -2)),
        ("KQJ", "ppbbp", (3, -1, -2)), ("9TJQ", "pppbppp", (-1, -1, -1, 3)),
    ],
)  # fmt: skip
def test_payoffs(cards: str, moves: str, rewards: tuple[int, ...]) -> None:
    game = KuhnPoker(random.Random(0), players=len(cards))
    game._cards = list(cards)
    for move in moves:
        (seat,) = game.to_move()
        game.step({seat: {"p": "pass", "b": "bet"}[move]})
    assert game.to_move() == ()
    assert tuple(game.outcome().rewards.values()) == rewards


@given(st.integers(2, 4), st.integers(0, 2**32), st.lists(st.sampled_from(["pass", "bet"]), min_size=7, max_size=7))
def test_every_game_is_zero_sum_in_range_and_ends_in_time(players: int, seed: int, moves: list[str]) -> None:
    game = KuhnPoker(random.Random(seed), players=players)
    num_turns = 0
    while movers := game.to_move():
        game.step({movers[0]: moves[num_turns]})
        num_turns += 1
    outcome = game.outcome()
    assert sum(outcome.rewards.values()) == 0
    assert all(game.reward_range[0] <= r <= game.reward_range[1] for r in outcome.rewards.values())
    assert num_turns <= game.max_turns
    assert max(outcome.rewards, key=lambda s: outcome.rewards[s]) == outcome.winners[0]


def test_a_view_hides_the_others_cards() -> None:
    for mine in "JQK":
        for history in ([], ["pass"], ["bet"], ["pass", "bet"]):
            shown = set()
            for other in set("JQK") - {mine}:
                game = KuhnPoker(random.Random(0))
                game._cards, game._history = [mine, other], list(history)
                shown.add((game.rules("player_0"), game.view("player_0"), game.transcript()))
            assert len(shown) == 1


def test_both_players_are_shown_the_moves() -> None:
    game = KuhnPoker(random.Random(0))
    game.step({"player_0": "pass"})
    game.step({"player_1": "bet"})
    assert all("History: pass, bet." in game.view(s) for s in game.seats)


def test_cards_are_dealt_by_the_seed_alone_and_evenly() -> None:
    hands = [tuple(make_environment("kuhn-poker-v0", {}, seed)._cards) for seed in range(600)]  # type: ignore[attr-defined]
    assert hands == [tuple(make_environment("kuhn-poker-v0", {}, seed)._cards) for seed in range(600)]  # type: ignore[attr-defined]
    counts = [hands.count(h) for h in itertools.permutations("JQK", 2)]
    assert len(counts) == 6
    assert min(counts) > 60


def test_a_forfeit_costs_two_chips() -> None:
    for players in (2, 3, 4):
        game = KuhnPoker(random.Random(1), players=players)
        table = {s: Scripted("rubbish" if s == "player_1" else "bet") for s in game.seats}
        episode = play_toy(game, table)
        assert (episode.ended, episode.rewards["player_1"]) == ("forfeit", -2.0)
        assert episode.rewards["player_0"] == pytest.approx(2 / (players - 1))


@pytest.mark.parametrize("answer", ["bet", "Bet.", "I BET!", "Moves: pass, bet", "pass? No: bet"])
def test_answers_that_are_understood(answer: str) -> None:
    assert KuhnPoker(random.Random(0)).parse("player_0", answer) == "bet"
