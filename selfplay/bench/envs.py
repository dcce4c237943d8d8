"""Turns per second of games through the play loop, beside the bare game with the same random moves.

Native, PettingZoo, OpenSpiel and TextArena. The bare game is the library's own objects in a plain loop, without text where
the library has none. Times are CPU time: nothing waits here. Other processes still slow a core down, by half and more, so
many short measurements of both sides alternate, and each side's fastest counts.
``native_overhead_us_per_turn`` is what the loop costs on top of a native game's own methods.
"""

from __future__ import annotations

import asyncio
import random
import time
import warnings
from collections.abc import Callable

from selfplay.agent import Answer, Decision, Player
from selfplay.bench.report import Row
from selfplay.play import play
from selfplay.registry import load_environment, make_environment
from selfplay.types import Limits, Match, SeatAssignment, derive_seed

NATIVE = "tictactoe-v0"
LIBRARIES = ("pettingzoo:tictactoe_v3", "openspiel:tic_tac_toe", "textarena:TicTacToe-v0")


def run(quick: bool = False) -> list[Row]:
    """Rows ``native_overhead_us_per_turn`` and ``NAME_turns_per_s`` for each kind of game."""
    num_games, repeats = (50, 2) if quick else (100, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        rows = _native(num_games, repeats)
        for env_id in LIBRARIES:
            rows.append(_adapted(env_id, num_games // 10, max(2, repeats // 4)))
    return rows


def _native(num_games: int, repeats: int) -> list[Row]:
    _through_loop(NATIVE, 20)
    ours, bare = _fastest(lambda: _through_loop(NATIVE, num_games), lambda: _bare_native(num_games), repeats)
    reference = f"the game's own methods in a plain loop, {bare:.1f} us per turn, the fastest repeat of both"
    return [
        Row(name="native_overhead_us_per_turn", value=ours - bare, unit="us", reference=reference, ratio=ours / bare, repeats=repeats),
        Row(name="native_turns_per_s", value=1e6 / ours, unit="1/s", reference=reference, ratio=bare / ours, repeats=repeats),
    ]  # fmt: skip


def _adapted(env_id: str, num_games: int, repeats: int) -> Row:
    scheme = env_id.partition(":")[0]
    library: Callable[[int], float] = {
        "pettingzoo": _bare_pettingzoo,
        "openspiel": _bare_openspiel,
        "textarena": _bare_textarena,
    }[scheme]
    _through_loop(env_id, 2)
    ours, bare = _fastest(lambda: _through_loop(env_id, num_games), lambda: library(num_games), repeats)
    return Row(
        name=f"{scheme}_turns_per_s", value=1e6 / ours, unit="1/s",
        reference=f"the library alone, {1e6 / bare:.0f} turns per s, the fastest repeat of both", ratio=bare / ours, repeats=repeats,
    )  # fmt: skip


def _fastest(ours: Callable[[], float], bare: Callable[[], float], repeats: int) -> tuple[float, float]:
    """The smallest of ``repeats`` measurements of each, taken by turns."""
    pairs = [(ours(), bare()) for _ in range(repeats)]
    return min(p[0] for p in pairs), min(p[1] for p in pairs)


class _Quick:
    """Draws a legal move or a suggestion."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def decide(self, decision: Decision) -> Answer:
        return Answer(text=self._rng.choice(decision.legal_moves or decision.suggestions))

    async def close(self) -> None:
        """Nothing is held."""


def _through_loop(env_id: str, num_games: int) -> float:
    """Microseconds per turn of games played by the play loop, one after the other."""
    seats = tuple(make_environment(env_id, {}, 0).seats)
    assigned = tuple(SeatAssignment(seat=s, player="random", agent=s) for s in seats)

    async def games() -> int:
        num_turns = 0
        for index in range(num_games):
            match = Match(
                index=index, env=env_id, seed=derive_seed("bench envs", index), seats=assigned, limits=Limits()
            )
            players: dict[str, Player] = {s: _Quick(random.Random(index * 8 + i)) for i, s in enumerate(seats)}
            game = make_environment(env_id, {}, match.seed)
            num_turns += len((await play(env_id, game, players, match, env_source="bench")).turns)
        return num_turns

    begun = time.process_time()
    num_turns = asyncio.run(games())
    return (time.process_time() - begun) * 1e6 / num_turns


def _bare_native(num_games: int) -> float:
    kind, num_turns, begun = load_environment(NATIVE), 0, time.process_time()
    for index in range(num_games):
        game = kind(random.Random(derive_seed("bench envs", index)))
        rngs = {s: random.Random(index * 8 + i) for i, s in enumerate(game.seats)}
        while seats := game.to_move():
            moves = {}
            for seat in seats:
                game.rules(seat)
                game.view(seat)
                moves[seat] = game.parse(seat, rngs[seat].choice(list(game.legal_moves(seat) or ())))
            game.step(moves)
            num_turns += len(moves)
        game.outcome()
    return (time.process_time() - begun) * 1e6 / num_turns


def _bare_openspiel(num_games: int) -> float:
    import pyspiel

    game, rng, num_turns = pyspiel.load_game("tic_tac_toe"), random.Random(0), 0
    begun = time.process_time()
    for _ in range(num_games):
        state = game.new_initial_state()
        while not state.is_terminal():
            state.observation_string(state.current_player())
            state.apply_action(rng.choice(state.legal_actions()))
            num_turns += 1
        state.returns()
    return (time.process_time() - begun) * 1e6 / num_turns


def _bare_pettingzoo(num_games: int) -> float:
    from pettingzoo.classic import tictactoe_v3

    rng, num_turns, begun = random.Random(0), 0, time.process_time()
    for index in range(num_games):
        env = tictactoe_v3.env()
        env.reset(seed=index)
        for _ in env.agent_iter():
            observed, _, terminated, truncated, _ = env.last()
            over = terminated or truncated
            env.step(None if over else rng.choice(list(observed["action_mask"].nonzero()[0])))
            num_turns += not over
        env.close()
    return (time.process_time() - begun) * 1e6 / num_turns


def _bare_textarena(num_games: int) -> float:
    import textarena

    rng, num_turns = random.Random(0), 0
    begun = time.process_time()
    for index in range(num_games):
        env = textarena.make("TicTacToe-v0")
        env.reset(num_players=2, seed=index)
        done = False
        while not done:
            env.get_observation()
            done, _ = env.step(f"[{rng.randrange(9)}]")
            num_turns += 1
        env.close()
    return (time.process_time() - begun) * 1e6 / num_turns
