"""Perfect play for small games of perfect information, from what the seat is shown.

A player never sees the game object, only its own view. So each supported game has a reader here that turns the view
into a position, and rules to search it. A game without a reader is refused by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.errors import UserError
from selfplay.registry.parameters import check_values

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_CELL = re.compile(r"[XO1-9]\Z")


class MinimaxPlayer:
    """Plays a uniformly drawn one among the best moves. No options."""

    def __init__(self, context: PlayerContext) -> None:
        check_values("agent kind minimax", (), context.options)
        game = re.sub(r"-v\d+\Z", "", context.env_id)
        if game not in _BEST_MOVES:
            raise UserError(f"minimax cannot play {context.env_id!r}; it knows {', '.join(sorted(_BEST_MOVES))}")
        self._best_moves, self._rng = _BEST_MOVES[game], context.rng

    async def decide(self, decision: Decision) -> Answer:
        return Answer(text=self._rng.choice(self._best_moves(decision)))

    async def close(self) -> None:
        """Nothing is held."""


def _tictactoe(decision: Decision) -> list[str]:
    """Best squares of a tic-tac-toe view: nine cells in its first three lines, X, O or the square's number."""
    cells = [c for line in decision.view.splitlines()[:3] for c in line.split() if _CELL.match(c)]
    if len(cells) != 9:
        raise UserError(f"minimax cannot read this tic-tac-toe view: {decision.view[:100]!r}")
    board = "".join(c if c in "XO" else "." for c in cells)
    values = {square: -_value(_marked(board, square)) for square, mark in enumerate(board) if mark == "."}
    best = max(values.values())
    return [str(square + 1) for square, value in values.items() if value == best]


@functools.cache
def _value(board: str) -> int:
    """Value for the side to move: 1 won, 0 drawn, -1 lost."""
    if any(board[a] != "." and board[a] == board[b] == board[c] for a, b, c in _LINES):
        return -1
    return max((-_value(_marked(board, i)) for i, mark in enumerate(board) if mark == "."), default=0)


def _marked(board: str, square: int) -> str:
    mark = "X" if board.count("X") == board.count("O") else "O"
    return board[:square] + mark + board[square + 1 :]


_BEST_MOVES: dict[str, Callable[[Decision], list[str]]] = {"tictactoe": _tictactoe}
