"""Connect Four: a solved game of perfect information; the first player wins with perfect play (Allis, 1988)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Outcome

ROWS, COLUMNS, IN_A_ROW = 6, 7, 4
DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))


class ConnectFour(Environment):
    """Two players drop discs into the 7 columns of a board of 6 rows; four in a line win.

    Columns are numbered 1 to 7. Seat ``x`` begins; a line may run in any direction. A full board is a draw. Rewards: 1 for
    the winner and -1 for the loser, 0 each for a draw. An illegal move may be tried again once, then the game is forfeited.
    """

    seats: Sequence[str] = ("x", "o")
    max_turns = ROWS * COLUMNS
    max_move_tokens = 8

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._columns: list[str] = [""] * COLUMNS
        self._moves: list[int] = []

    def rules(self, seat: str) -> str:
        return f"You play Connect Four as {seat.upper()}. Four in a line win. Answer with the number of a column."

    def to_move(self) -> Sequence[str]:
        full = len(self._moves) == ROWS * COLUMNS
        return () if full or self._has_won() else (self.seats[len(self._moves) % 2],)

    def view(self, seat: str) -> str:
        return f"{self.transcript()}\nYou are {seat.upper()}. Your column:"

    def legal_moves(self, seat: str) -> Sequence[str]:
        return [str(i + 1) for i, column in enumerate(self._columns) if len(column) < ROWS]

    def step(self, moves: Mapping[str, str]) -> None:
        ((seat, move),) = moves.items()
        self._columns[int(move) - 1] += seat
        self._moves.append(int(move) - 1)

    def outcome(self) -> Outcome:
        if not self._has_won():
            return self.draw("draw: the board is full")
        winner = self.seats[(len(self._moves) - 1) % 2]
        return self.win(winner, reason=f"{winner} has four in a line")

    def private(self, seat: str) -> str:
        return ""  # nothing is hidden

    def transcript(self) -> str:
        rows = [" ".join(self._at(r, c).upper() or "." for c in range(COLUMNS)) for r in reversed(range(ROWS))]
        return "\n".join(["1 2 3 4 5 6 7", *rows])

    def _at(self, row: int, column: int) -> str:
        inside = 0 <= column < COLUMNS and 0 <= row < len(self._columns[column])
        return self._columns[column][row] if inside else ""

    def _has_won(self) -> bool:
        """Whether the last disc completed a line."""
        if not self._moves:
            return False
        column = self._moves[-1]
        row = len(self._columns[column]) - 1
        return any(
            self._run(row, column, d) + self._run(row, column, (-d[0], -d[1])) + 1 >= IN_A_ROW for d in DIRECTIONS
        )

    def _run(self, row: int, column: int, step: tuple[int, int]) -> int:
        """How many discs of the same side follow in one direction."""
        mark, length = self._at(row, column), 0
        while self._at(row + (length + 1) * step[0], column + (length + 1) * step[1]) == mark:
            length += 1
        return length
