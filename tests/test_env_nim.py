"""Nim against brute force, its parameters and presets, and perfect play."""

from __future__ import annotations

import asyncio
import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.agent import Sampling
from selfplay.errors import ConfigError
from selfplay.play import play, sit_down
from selfplay.registry import make_environment
from selfplay.types import Episode, Match, Scalar, SeatAssignment
from selfplay_agents.minimax import _nim_lost
from selfplay_envs.nim import Nim


@functools.cache
def lost(heaps: tuple[int, ...], most: int, misere: bool) -> bool:
    """Whether the seat to move loses, by trying everything."""
    if not any(heaps):
        return not misere
    nexts = (
        tuple(sorted((*heaps[:i], heap - n, *heaps[i + 1 :])))
        for i, heap in enumerate(heaps)
        for n in range(1, min(heap, most) + 1)
    )
    return not any(lost(after, most, misere) for after in nexts)


@pytest.mark.parametrize("misere", [False, True])
def test_the_solution_is_right(misere: bool) -> None:
    for most in (1, 2, 3, 40):
        for heaps in ((n, m, k) for n in range(8) for m in range(n + 1) for k in range(m + 1)):
            assert _nim_lost(heaps, most, misere) == lost(tuple(sorted(heaps)), most, misere), (heaps, most)


def game_between(first: str, second: str, params: dict[str, Scalar], seed: int) -> Episode:
    seats = tuple(SeatAssignment(seat=s, player=p, agent=p) for s, p in (("first", first), ("second", second)))
    match = Match(index=0, env="nim-v0", env_params=params, seed=seed, seats=seats)
    game = make_environment(match.env, params, seed)
    return asyncio.run(play(match.env, game, sit_down(match, None, Sampling()), match, env_source="t"))


@pytest.mark.parametrize("params", [{}, {"preset": "classic"}, {"heaps": "3,4,5", "most": 2, "misere": True}])
def test_who_can_win_does(params: dict[str, Scalar]) -> None:
    heaps = tuple(int(n) for n in str({"heaps": "11", **params}.get("heaps")).split(","))
    if params.get("preset") == "classic":
        heaps = (3, 4, 5)
    most = {"classic": 40}.get(str(params.get("preset")), int(params.get("most", 3)))
    wins_first = not lost(tuple(sorted(heaps)), most, bool(params.get("misere")))
    for seed in range(6):
        winner, loser = ("minimax", "random") if wins_first else ("random", "minimax")
        episode = game_between(winner, loser, params, seed)
        assert episode.winners == (("first",) if wins_first else ("second",))
        assert game_between("minimax", "minimax", params, seed).winners == episode.winners


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 4), st.booleans(), st.integers(0, 99))
def test_every_game_ends_with_the_stones(heaps: list[int], most: int, misere: bool, seed: int) -> None:
    game = Nim(random.Random(0), heaps=",".join(map(str, heaps)), most=most, misere=misere)
    rng, num_turns = random.Random(seed), 0
    while movers := game.to_move():
        move = rng.choice(list(game.legal_moves(movers[0])))
        assert game.parse(movers[0], f"I take {move}.") == move
        last = movers[0]
        game.step({last: move})
        num_turns += 1
    assert num_turns <= game.max_turns == sum(heaps)
    assert (game.outcome().winners == (last,)) != misere


@pytest.mark.parametrize(
    "params", [{"heaps": "a"}, {"heaps": ""}, {"heaps": "3,0"}, {"heaps": "1,2,3,4,5,6,7,8,9"}, {"most": -1}]
)
def test_parameters_that_cannot_be_played(params: dict[str, Scalar]) -> None:
    with pytest.raises(ConfigError, match=f"nim-v0: {next(iter(params))} is"):
        make_environment("nim-v0", params, 0)


def test_presets() -> None:
    assert "b has 4" in make_environment("nim-v0", {"preset": "classic"}, 0).view("first")
    assert make_environment("nim-v0", {"preset": "classic", "heaps": "2"}, 0).legal_moves("first") == ["1", "2"]
    with pytest.raises(ConfigError, match="no preset 'clasic'; did you mean 'classic'"):
        make_environment("nim-v0", {"preset": "clasic"}, 0)
    with pytest.raises(ConfigError, match="no parameter 'preset'"):
        make_environment("tictactoe-v0", {"preset": "classic"}, 0)
