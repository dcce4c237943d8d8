"""Tic-tac-toe against exact enumeration, and perfect play."""

from __future__ import annotations

import asyncio
import functools
import random
from fractions import Fraction

import pytest

from game_tree import after
from selfplay.agent import Sampling
from selfplay.play import play, sit_down
from selfplay.registry import make_environment
from selfplay.types import Episode, Match, SeatAssignment
from selfplay_envs.tictactoe import TicTacToe


def test_random_against_random_exactly() -> None:
    @functools.cache
    def shares(board: str) -> tuple[Fraction, Fraction, Fraction]:
        game = games[board]
        if not game.to_move():
            winners = game.outcome().winners
            return (Fraction(winners == ("x",)), Fraction(not winners), Fraction(winners == ("o",)))
        (seat,) = game.to_move()
        children = []
        for move in game.legal_moves(seat):
            child = after(game, seat, move)
            games.setdefault(child.transcript(), child)
            children.append(shares(child.transcript()))
        return tuple(sum(parts, Fraction(0)) / len(children) for parts in zip(*children, strict=True))  # type: ignore[return-value]

    start = TicTacToe(random.Random(0))
    games = {start.transcript(): start}
    assert shares(start.transcript()) == (Fraction(737, 1260), Fraction(8, 63), Fraction(121, 420))
    assert len(games) == 5478  # reachable positions


def game_between(x: str, o: str, seed: int) -> Episode:
    seats = tuple(SeatAssignment(seat=s, player=p, agent=p) for s, p in (("x", x), ("o", o)))
    match = Match(index=0, env="tictactoe-v0", seed=seed, seats=seats)
    game = make_environment(match.env, {}, seed)
    return asyncio.run(play(match.env, game, sit_down(match, None, Sampling()), match, env_source="t"))


def test_perfect_play_is_a_draw_and_never_loses() -> None:
    for seed in range(5):
        assert game_between("minimax", "minimax", seed).winners == ()
    for seed in range(40):
        assert game_between("minimax", "random", seed).winners != ("o",)
        assert game_between("random", "minimax", seed).winners != ("x",)


def test_totals_are_zero_and_a_draw_is_even() -> None:
    endings = set()
    for seed in range(60):
        episode = game_between("random", "random", seed)
        assert sum(episode.rewards.values()) == 0.0
        assert episode.ended == "natural"
        expected = {s: 0.0 if not episode.winners else 1.0 if s in episode.winners else -1.0 for s in "xo"}
        assert episode.rewards == expected
        endings.add(episode.winners)
    assert endings == {("x",), ("o",), ()}


def test_a_win_on_the_last_square_is_a_win() -> None:
    game = TicTacToe(random.Random(0))
    for seat, move in zip("xoxoxoxox", "142568793", strict=True):
        assert game.to_move() == (seat,)
        game.step({seat: move})
    assert game.to_move() == ()
    assert game.outcome().winners == ("x",)


def test_each_seats_legal_moves_are_the_empty_squares_it_is_shown() -> None:
    game = TicTacToe(random.Random(0))
    game.step({"x": "5"})
    for seat in game.seats:
        shown = game.view(seat).splitlines()[:3]
        assert [c for c in " ".join(shown).split() if c.isdigit()] == list(game.legal_moves(seat))


@pytest.mark.parametrize("answer", ["0", "10", "", "five", "x", "1" * 5000])
def test_answers_that_are_no_square(answer: str) -> None:
    from selfplay.errors import IllegalMove

    with pytest.raises(IllegalMove):
        TicTacToe(random.Random(0)).parse("x", answer)
