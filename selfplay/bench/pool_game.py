"""A game for measuring: two seats talk in turn, any text is a move, and the game itself does next to nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Outcome


class Talk(Environment):
    """``turns`` decisions, alternating between two seats."""

    seats = ("first", "second")

    def __init__(self, rng: random.Random, turns: int = 10) -> None:
        super().__init__(rng)
        self._turns, self._num_said = turns, 0
        self._last = ""

    def rules(self, seat: str) -> str:
        return f"You are {seat}. Answer with any word."

    def to_move(self) -> Sequence[str]:
        return () if self._num_said == self._turns else (self.seats[self._num_said % 2],)

    def view(self, seat: str) -> str:
        return f"{seat}, turn {self._num_said}: a card {self.rng.randrange(52)}. Before you: {self._last}"

    def step(self, moves: Mapping[str, str]) -> None:
        self._num_said += 1
        self._last = next(iter(moves.values()))

    def outcome(self) -> Outcome:
        return Outcome(rewards=dict.fromkeys(self.seats, 0.0), reason="all was said")
