"""Monte Carlo tree search by OpenSpiel, for deterministic games of perfect information, from what the seat is shown.

A player never sees the game object, only its own view. So a game of its own is kept beside, and after every view it is brought to the
position that shows the same: the others' moves are those that lead there.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.environment import Environment
from selfplay.errors import ConfigError, MissingExtraError, UserError
from selfplay.registry import make_environment
from selfplay.registry.parameters import Parameter, check_values

OPTIONS = (Parameter(name="simulations", kind="int", default=500), Parameter(name="rollouts", kind="int", default=1))
UCT_C, MEMORY_MB = 2.0, 100
MOST_MOVES = 100_000
"""Positions that are looked at for the one that a view shows."""
Move = tuple[str, str]
"""Seat and what it played."""

FIRST_PARTY: dict[str, tuple[str, Callable[[str], int]]] = {
    "tictactoe-v0": ("tic_tac_toe", lambda move: int(move) - 1),
    "connect-four-v0": ("connect_four", lambda move: int(move) - 1),
}
"""Environment → OpenSpiel's game of the same rules, and a move as its action."""


class MctsPlayer:
    """Searches anew for every move. Options ``simulations`` per move and random ``rollouts`` per leaf."""

    def __init__(self, context: PlayerContext) -> None:
        options = check_values("agent kind mcts", OPTIONS, context.options)
        for name, most in (("simulations", 1_000_000), ("rollouts", 1000)):
            if not 1 <= int(options[name]) <= most:
                raise ConfigError(f"agent kind mcts: {name} is {options[name]}; it must be 1 to {most}")
        self._env_id = context.env_id
        spiel, self._rules, self._action = _opened(context.env_id)
        self._bot = spiel.MCTSBot(
            self._rules, spiel.RandomRolloutEvaluator(int(options["rollouts"]), context.rng.randrange(2**31)), UCT_C,
            int(options["simulations"]), MEMORY_MB, True, context.rng.randrange(2**31), False,
        )  # fmt: skip
        self._game = make_environment(context.env_id, {}, 0)
        self._state = self._rules.new_initial_state()
        self._mine: Move | None = None

    async def decide(self, decision: Decision) -> Answer:
        if self._mine is not None and not decision.complaint:
            self._apply([self._mine])
        self._apply(self._moves_to(decision))
        action = await asyncio.to_thread(self._bot.step, self._state)
        move = next(m for m in self._game.legal_moves(decision.seat) or () if self._number(decision.seat, m) == action)
        self._mine = (decision.seat, move)
        return Answer(text=move)

    async def close(self) -> None:
        """Nothing is held."""

    def _apply(self, moves: list[Move]) -> None:
        for seat, move in moves:
            self._state.apply_action(self._number(seat, move))
            self._game.step({seat: move})

    def _number(self, seat: str, move: str) -> int:
        if self._action is not None:
            return self._action(move)
        numbers: dict[str, int] = self._game.moves(seat)  # type: ignore[attr-defined]
        return numbers[move]

    def _moves_to(self, decision: Decision) -> list[Move]:
        """The shortest way from the position that is kept to the one that is shown; raises `UserError` when there is none."""
        for game, moves in itertools.islice(_onwards(self._game, decision.seat), MOST_MOVES):
            if tuple(game.to_move()) == (decision.seat,) and game.view(decision.seat) == decision.view:
                return moves
        raise UserError(
            f"mcts cannot find the position that {decision.seat} is shown in {self._env_id}; it plays games with their default "
            "parameters only"
        )


def _onwards(game: Environment, seat: str) -> Iterator[tuple[Environment, list[Move]]]:
    """Positions that the other seats' moves can lead to, nearest first."""
    waiting: list[tuple[Environment, list[Move]]] = [(game, [])]
    while waiting:
        at, moves = waiting.pop(0)
        yield at, moves
        for mover in at.to_move():
            for move in (at.legal_moves(mover) or ()) if mover != seat else ():
                after = copy.deepcopy(at)
                after.step({mover: move})
                waiting.append((after, [*moves, (mover, move)]))


@functools.cache
def _opened(env_id: str) -> tuple[Any, Any, Callable[[str], int] | None]:
    """(OpenSpiel, its game of the same rules, a move as an action where names do not tell); raises `UserError`."""
    try:
        import pyspiel
    except ModuleNotFoundError as e:
        raise MissingExtraError("agent kind mcts", "envs", "open_spiel") from e

    scheme, _, name = env_id.partition(":")
    action = None
    if scheme != "openspiel":
        if env_id not in FIRST_PARTY:
            raise UserError(
                f"mcts cannot play {env_id!r}; it knows {', '.join(sorted(FIRST_PARTY))} and games of openspiel:"
            )
        name, action = FIRST_PARTY[env_id]
    rules = pyspiel.load_game(name)
    kind = rules.get_type()
    wanted = ("SEQUENTIAL", "PERFECT_INFORMATION", "DETERMINISTIC")
    found = (kind.dynamics.name, kind.information.name, kind.chance_mode.name)
    if found != wanted:
        words = ", ".join(f.lower().replace("_", " ") for f in found if f not in wanted)
        raise UserError(
            f"mcts plays deterministic games of perfect information in turns; {env_id} is {words}: use cfr or random"
        )
    return pyspiel, rules, action
