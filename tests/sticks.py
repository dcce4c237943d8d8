"""A sound game in a bare file, with a parameter and everything a game may say: what the tests of files and wheels play with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay import Environment
from selfplay.environment import Outcome


class Nim(Environment):
    """Take 1, 2 or 3 sticks in turn. Whoever takes the last stick wins. Answer with one number."""

    seats = ("first", "second")

    def __init__(self, rng: random.Random, heap: int = 21) -> None:
        super().__init__(rng)
        self.left, self.turn = heap, 0

    def to_move(self) -> Sequence[str]:
        return [self.seats[self.turn % 2]] if self.left else []

    def view(self, seat: str) -> str:
        return f"{self.left} sticks are left."

    def legal_moves(self, seat: str) -> Sequence[str]:
        return [str(n) for n in (1, 2, 3) if n <= self.left]

    def step(self, moves: Mapping[str, str]) -> None:
        self.left -= int(*moves.values())
        self.turn += 1

    def outcome(self) -> Outcome:
        return self.win(self.seats[(self.turn - 1) % 2])

    def transcript(self) -> str:
        return f"sticks left: {self.left}"

    def private(self, seat: str) -> str:
        return ""  # nothing is hidden
