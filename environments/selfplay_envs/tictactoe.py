"""Tic-tac-toe: the smallest perfect-information game, with a known value (a draw)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Outcome

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToe(Environment):
    """Two players take turns to mark an empty square of a 3 by 3 board; three in a line win.

    Squares are numbered 1 to 9, row by row. Seat ``x`` begins. Rewards: 1 for the winner and -1 for the loser, 0 each
    for a draw. An illegal move may be tried again once, then the game is forfeited: -1, and 1 for the other seat.
    """

    seats: Sequence[str] = ("x", "o")
    max_turns = 9
    max_move_tokens = 8

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._board = [""] * 9
        self._moves = 0

    def rules(self, seat: str) -> str:
        return (
            f"You play tic-tac-toe as {seat.upper()}. Three in a line win. Answer with the number of an empty square."
        )

    def to_move(self) -> Sequence[str]:
        return () if self._winner() or self._moves == 9 else (self.seats[self._moves % 2],)

    def view(self, seat: str) -> str:
        return f"{self.transcript()}\nYou are {seat.upper()}. Your square:"

    def legal_moves(self, seat: str) -> Sequence[str]:
        return [str(i + 1) for i, mark in enumerate(self._board) if not mark]

    def step(self, moves: Mapping[str, str]) -> None:
        ((seat, move),) = moves.items()
        self._board[int(move) - 1] = seat
        self._moves += 1

    def outcome(self) -> Outcome:
        winner = self._winner()
        if not winner:
            return Outcome(rewards={"x": 0.0, "o": 0.0}, reason="draw: the board is full")
        rewards = {s: 1.0 if s == winner else -1.0 for s in self.seats}
        return Outcome(rewards=rewards, winners=(winner,), reason=f"{winner} has three in a line")

    def private(self, seat: str) -> str:
        return ""  # nothing is hidden

    def transcript(self) -> str:
        marks = [mark.upper() or str(i + 1) for i, mark in enumerate(self._board)]
        return "\n".join(" ".join(marks[row : row + 3]) for row in (0, 3, 6))

    def _winner(self) -> str:
        for a, b, c in LINES:
            if self._board[a] and self._board[a] == self._board[b] == self._board[c]:
                return self._board[a]
        return ""
