"""Perfect play for small games of perfect information, from what the seat is shown.

A player never sees the game object, only its own view. So each supported game has a reader here that turns the view
into a position, and rules to search it. A game without a reader is refused by name.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.errors import ConfigError, UserError
from selfplay.registry.parameters import Parameter, check_values

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_CELL = re.compile(r"[XO1-9]\Z")


OPTIONS = (Parameter(name="ties", kind="str", default="random"),)


class MinimaxPlayer:
    """Plays one among the best moves.

    Option: ``ties`` ``random`` (uniformly drawn) or ``first`` (as the game lists them: the same play every time, in few
    positions, which makes it a teacher that is quickly learnt from).
    """

    def __init__(self, context: PlayerContext) -> None:
        ties = check_values("agent kind minimax", OPTIONS, context.options)["ties"]
        if ties not in ("random", "first"):
            raise ConfigError(f"agent kind minimax: ties is {ties!r}; it must be random or first")
        game = re.sub(r"-v\d+\Z", "", context.env_id)
        if game not in _BEST_MOVES:
            raise UserError(f"minimax cannot play {context.env_id!r}; it knows {', '.join(sorted(_BEST_MOVES))}")
        self._best_moves, self._rng, self._first = _BEST_MOVES[game], context.rng, ties == "first"

    async def decide(self, decision: Decision) -> Answer:
        best = self._best_moves(decision)
        return Answer(text=best[0] if self._first else self._rng.choice(best))

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


_HEAPS = re.compile(r"([a-h]) has (\d+)|Stones left: (\d+)")
_LARGEST_HEAP = 40


def _nim(decision: Decision) -> list[str]:
    """Best moves of a Nim view, by the nim-sum of the heaps modulo (most + 1); every move of a lost position is one."""
    heaps = {name: int(many or one) for name, many, one in _HEAPS.findall(decision.view)}
    most = re.search(r"Take 1 to (\d+) stones", decision.rules)
    if not heaps or "Nim" not in decision.rules:
        raise UserError(f"minimax cannot read this view of nim: {decision.view[:100]!r}")
    limit, misere = int(most[1]) if most else _LARGEST_HEAP, "last stone loses" in decision.rules
    moves = [
        (f"{name}{n}", {**heaps, name: heap - n})
        for name, heap in heaps.items()
        for n in range(1, min(heap, limit) + 1)
    ]
    good = [move for move, after in moves if _nim_lost(after.values(), limit, misere)]
    return good or [move for move, _ in moves]


def _nim_lost(heaps: Iterable[int], limit: int, misere: bool) -> bool:
    """Whether the seat to move loses against perfect play."""
    small = [heap % (limit + 1) for heap in heaps]
    if misere and max(small) <= 1:
        return sum(small) % 2 == 1
    return functools.reduce(operator.xor, small) == 0


_BEST_MOVES: dict[str, Callable[[Decision], list[str]]] = {"tictactoe": _tictactoe, "nim": _nim}
