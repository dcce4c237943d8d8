"""Connect Four by looking a few moves ahead (alpha-beta), read from the board that a seat is shown."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from selfplay.agent import Decision
from selfplay.errors import UserError

ROWS, COLUMNS, DEPTH = 6, 7, 4
ORDER = (3, 2, 4, 1, 5, 0, 6)
_WON = 1000
Board = tuple[str, ...]
"""One text per column, from the bottom up."""


def _search(decision: Decision, rng: random.Random) -> str:
    board, me = _read(decision.view)
    values = {
        c: -_value(_dropped(board, c, me), _other(me), DEPTH - 1, -_WON - DEPTH, _WON + DEPTH, c)
        for c in ORDER
        if len(board[c]) < ROWS
    }
    best = max(values.values())
    return str(rng.choice([c for c, v in values.items() if v == best]) + 1)


def _read(view: str) -> tuple[Board, str]:
    lines = view.splitlines()
    rows = [line.split() for line in lines[1 : ROWS + 1]]
    if len(rows) != ROWS or any(len(row) != COLUMNS for row in rows) or "You are " not in view:
        raise UserError(f"scripted cannot read this view of connect-four: {view[:100]!r}")
    columns = ("".join(row[c] for row in reversed(rows)).rstrip(".") for c in range(COLUMNS))
    return tuple(columns), view.partition("You are ")[2][0]


def _value(board: Board, mover: str, depth: int, low: int, high: int, last: int) -> int:
    """For the seat to move, after a disc fell into ``last``: won, lost (the sooner the more), or how central it stands."""
    if _line_through(board, last):
        return -_WON - depth
    moves = [c for c in ORDER if len(board[c]) < ROWS]
    if not moves:
        return 0
    if depth == 0:
        return board[3].count(mover) - board[3].count(_other(mover))
    for c in moves:
        low = max(low, -_value(_dropped(board, c, mover), _other(mover), depth - 1, -high, -low, c))
        if low >= high:
            break
    return low


def _line_through(board: Board, column: int) -> bool:
    row = len(board[column]) - 1
    mark = board[column][row]

    def run(dr: int, dc: int) -> int:
        n, r, c = 0, row + dr, column + dc
        while 0 <= c < COLUMNS and 0 <= r < len(board[c]) and board[c][r] == mark:
            n, r, c = n + 1, r + dr, c + dc
        return n

    return any(run(dr, dc) + run(-dr, -dc) >= 3 for dr, dc in ((0, 1), (1, 0), (1, 1), (1, -1)))


def _dropped(board: Board, column: int, mark: str) -> Board:
    return (*board[:column], board[column] + mark, *board[column + 1 :])


def _other(mark: str) -> str:
    return "O" if mark == "X" else "X"


STRATEGIES: Mapping[str, Callable[[Decision, random.Random], str]] = {"search": _search}
